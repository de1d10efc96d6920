// SPDX-License-Identifier: MIT
// Ring attention over packed sequences as one persistent kernel: as cuda_kernel.cuh, behind what begin_packed()
// finds out. The producer looks up who sees what.
#pragma once

#include "kernels/ops/ring_attention/cuda_kernel.cuh"
#include "kernels/ops/ring_attention/cuda_packed.cuh"

namespace mk::ring_attention {

template <class Config, class Params_ = PackedParams, class Room = CudaStorage<Config, PackedBlock>>
struct PackedCudaStorage : Room {
  using Params = Params_;
  PackedStorage<Params, Config::NUM_THREADS> packed;
};

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
template <class Config, IsPacked Params>
__device__ __forceinline__ auto key_walk(const Params& params, const QueryTile& tile) {
  return PackedKeyWalk(params.tiles.slices, key_order(params), params.comm.rank, Config::BLOCK_N,
                       RowRange{tile.row, tile.row + tile.num_rows});
}
__device__ __forceinline__ int run_of(const PackedBlock&) { return 0; }
template <class Config, class Params>
__device__ __forceinline__ int first_row_of(const Params&, const PackedBlock& block) {
  return block.index * Config::BLOCK_N;
}

// What a thread's two rows, `row_in_tile` and 8 further on, see.
template <class Params>
class PackedKeyMask {
 public:
  __device__ PackedKeyMask(const Params& params, int row_in_tile)
      : params_(params), row_in_tile_(row_in_tile) {}

  __device__ __forceinline__ void begin_tile(const QueryTile& tile) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // Rows behind the tile's last see what that one sees; nothing is stored for them.
      const int at = tile.row + least(row_in_tile_ + 8 * row, tile.num_rows - 1);
      places_[row] = packed_row(params_.tiles.slices, params_.comm.rank, at);
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
    hide_columns(logits, block.index * Config::BLOCK_N, begin_, end_);
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
  run_compute_cta<Config>(launch, smem.packed.params, smem, num_ctas, [&] {
    if constexpr (!HasNodes<typename Storage::Params>) greet_packed(smem.packed);
  });
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    ring_attention_packed_kernel(const __grid_constant__ PackedArguments<PackedParams> arguments) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  PackedCudaStorage<Config>& smem = *reinterpret_cast<PackedCudaStorage<Config>*>(smem_bytes);
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
