// SPDX-License-Identifier: MIT
// Ring attention over packed sequences as one persistent kernel: as cuda_kernel.cuh, behind what begin_packed()
// finds out. The producer looks up who sees what.
#pragma once

#include "kernels/ops/ring_attention/cuda_kernel.cuh"
#include "kernels/ops/ring_attention/cuda_packed.cuh"

namespace mk::ring_attention {

// The keys that the tile of queries from `row` on sees.
template <class Config, class Params>
__device__ __forceinline__ auto packed_key_walk(const Params& params, int row) {
  const int rank = params.comm.rank;
  return PackedKeyWalk(params.tiles.slices, key_order(params), rank, Config::BLOCK_N,
                       RowRange{row, least(row + Config::BLOCK_M, params.tiles.slices.rows(rank))});
}

constexpr int MOST_LISTED_TILES = 1024;

// A head's tiles: what a tile needs to know at its beginning, when consumers wait for it.
struct TileList {
  int num_tiles;  // 0: none is listed
  PackedTile tiles[MOST_LISTED_TILES];
  uint16_t order[MOST_LISTED_TILES];  // those with most blocks first
};

template <class Config, class Params_ = PackedParams, class Room = CudaStorage<Config, PackedBlock>>
struct PackedCudaStorage : Room {
  using Params = Params_;
  PackedStorage<Params, Config::NUM_THREADS> packed;
  TileList list;
};

// By all threads of a CTA. Nothing is gained where none of so many CTAs has more than one tile.
template <class Config, class Params>
__device__ inline void list_tiles(Params& params, TileList& list, int num_ctas) {
  const int num_tiles = params.tiles.tiles_of_head();
  const bool are_listed = num_tiles <= MOST_LISTED_TILES && params.tiles.size() > num_ctas;
  if (are_listed) {
    for (int number = threadIdx.x; number < num_tiles; number += Config::NUM_THREADS)
      list.tiles[number] = packed_key_walk<Config>(params, number * Config::BLOCK_M).tile();
    __syncthreads();
    for (int number = threadIdx.x; number < num_tiles; number += Config::NUM_THREADS) {
      const int num_blocks = list.tiles[number].num_blocks;
      int place = 0;
      for (int other = 0; other < num_tiles; ++other) {
        const int others = list.tiles[other].num_blocks;
        if (others > num_blocks || (others == num_blocks && other > number)) ++place;
      }
      list.order[place] = static_cast<uint16_t>(number);
    }
  }
  if (threadIdx.x == 0) {
    list.num_tiles = are_listed ? num_tiles : 0;
    if (are_listed) params.tiles.order = list.order;
  }
  __syncthreads();
}

template <IsPacked Params>
__device__ __forceinline__ const CUtensorMap* query_map(const Params& params) {
  return params.maps[PACKED_Q];
}
// Whole tiles: the staging memory, where parts would wait, has the table of rows.
template <IsPacked Params>
__device__ __forceinline__ int num_items(const Params& params) {
  return params.tiles.size();
}
template <IsPacked Params>
__device__ __forceinline__ QueryItem item_at(const Params&, int item) {
  return {item, 0, 1, -1, -1};
}
template <class Config, IsPacked Params, class Storage>
__device__ __forceinline__ auto key_walk(const Params& params, const Storage& smem, const QueryTile& tile) {
  const int number = tile.row / Config::BLOCK_M;
  if (number >= smem.list.num_tiles) return packed_key_walk<Config>(params, tile.row);
  return PackedKeyWalk(params.tiles.slices, key_order(params), params.comm.rank, Config::BLOCK_N,
                       RowRange{tile.row, tile.row + tile.num_rows}, smem.list.tiles[number]);
}
__device__ __forceinline__ int run_of(const PackedBlock&) { return 0; }
template <class Config, class Params>
__device__ __forceinline__ int first_row_of(const Params&, const PackedBlock& block) {
  return block.row;
}

// What a thread's two rows, `row_in_tile` and 8 further on, see.
template <class Params>
class PackedKeyMask {
 public:
  __device__ PackedKeyMask(const Params& params, int row_in_tile)
      : params_(params), row_in_tile_(row_in_tile) {}

  __device__ __forceinline__ void begin_tile(const TileWork& work) {
    const PackedSlices& slices = params_.tiles.slices;
    const QueryTile& tile = work.tile;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // Rows behind the tile's last see what that one sees; nothing is stored for them.
      const int at = tile.row + least(row_in_tile_ + 8 * row, tile.num_rows - 1), rank = params_.comm.rank;
      const int sequence = slices.sequence_of(rank, at, work.first_sequence, work.last_sequence);
      places_[row] = {sequence, slices.position_of(rank, sequence, at)};
    }
    step_ = -1;
  }
  template <class Config, int NUM_LOGITS>
  __device__ __forceinline__ void hide(float (&logits)[NUM_LOGITS], const PackedBlock& block) {
    if (block.step != step_) {
      step_ = block.step;
      const int source = source_of(params_, step_);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const RowRange rows =
            params_.tiles.slices.visible_rows(source, places_[row].sequence, places_[row].position);
        begin_[row] = rows.begin;
        end_[row] = rows.end;
      }
    }
    const int first = block.row + first_column_of_thread();
    const int from[2] = {begin_[0] - first, begin_[1] - first}, to[2] = {end_[0] - first, end_[1] - first};
    hide_columns(logits, [&](int row, int column) { return column < from[row] || column >= to[row]; });
  }

 private:
  const Params& params_;
  const int row_in_tile_;
  PackedRow places_[2];
  int step_ = -1;  // whose rows begin_ and end_ are
  int begin_[2] = {}, end_[2] = {};
};

template <IsPacked Params>
__device__ __forceinline__ PackedKeyMask<Params> key_mask(const Params& params, int row_in_tile) {
  return {params, row_in_tile};
}

// Behind begin_packed().
template <class Config, class Storage>
__device__ __forceinline__ void run_packed_compute_cta(const RankLaunch& launch, Storage& smem, int num_ctas) {
  list_tiles<Config>(smem.packed.params, smem.list, num_ctas);
  run_compute_cta<Config>(launch, smem.packed.params, smem, num_ctas, [&] {
    if constexpr (!HasNodes<typename Storage::Params>) greet_packed(smem.packed);
  });
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    ring_attention_packed_kernel(const __grid_constant__ PackedArguments<PackedParams> arguments) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  PackedCudaStorage<Config>& smem = *reinterpret_cast<PackedCudaStorage<Config>*>(smem_bytes);
  ptx::await_previous_grid();
  const RankLaunch launch(arguments.params.comm);
  launch.begin_cta();
  const bool goes_on = begin_packed(arguments, smem.packed, [&](PackedParams& params, int rows) {
    params.lse_rows = rows;
    if (arguments.heads_first) params.o_head_bytes = rows * params.o_row_bytes;
  });
  if (goes_on) {
    run_packed_compute_cta<Config>(launch, smem, gridDim.x);
  } else if (blockIdx.x == 0 && threadIdx.x < 32) {
    greet_packed(smem.packed);
  }
  launch.end_cta();
}

using PackedKernel = CudaKernelOf<PackedArguments<PackedParams>>;
using PackedTable = CudaTableOf<PackedArguments<PackedParams>>;
const PackedTable& cuda_packed_kernels_bf16();
const PackedTable& cuda_packed_kernels_fp16();

template <class Config>
constexpr PackedKernel packed_kernel_entry() {
  static_assert(sizeof(PackedCudaStorage<Config>) <= 227 * 1024);
  return cuda_kernel_entry<Config>(ring_attention_packed_kernel<Config>, sizeof(PackedCudaStorage<Config>));
}

template <class Element>
const PackedTable& cuda_packed_kernel_table() {
  static const PackedTable table{{packed_kernel_entry<ConfigOf<0, Element>>(),
                                  packed_kernel_entry<ConfigOf<1, Element>>(),
                                  packed_kernel_entry<ConfigOf<2, Element>>()}};
  return table;
}

}  // namespace mk::ring_attention
