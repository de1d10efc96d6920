// SPDX-License-Identifier: MIT
// Gradients of ring attention as one persistent kernel, behind a small one (cuda_row_sums.cuh). Some CTAs push
// this rank's keys and values to the peers that need them and then compute like all others: parts of dK and dV
// of other ranks' keys, as they arrive, which go to their owners; dK and dV of its own keys, to which the
// others' parts are added. Each tile of keys adds to dQ of the queries that see it, in turns; at last dQ is
// rounded. Every sum has one order.
#pragma once

#include "kernels/ops/ring_attention/cuda_packed_params.h"
#include "kernels/ops/ring_attention_backward/cuda_producer.cuh"
#include "kernels/ptx/elect.cuh"

namespace mk::ring_attention_backward {

// The sums of a warp, to the owner of the keys and back: chunk i of all lanes, then chunk i + 1.
template <int N>
__device__ __forceinline__ void store_part(const float (&sums)[N], std::byte* part) {
  float4* const chunks = reinterpret_cast<float4*>(part) + threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < N / 4; ++i)
    chunks[32 * i] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
}

// Adds the other ranks' parts to this rank's sums, in the order of ranks. Bit r of `sources`: rank r has one.
// first_part: that of step 1.
template <int N>
__device__ __forceinline__ void add_parts(float (&sums)[N], const std::byte* first_part, size_t step_bytes,
                                          uint32_t sources, int rank, int nranks) {
  constexpr int CHUNKS = 4, SOURCES = 4;  // read together
  const std::byte* const lane = first_part + threadIdx.x % 32 * 16;
#pragma unroll
  for (int first = 0; first < N / 4; first += CHUNKS) {
    float totals[4 * CHUNKS] = {};
#pragma unroll 1
    for (int group = 0; group < nranks; group += SOURCES) {
      float4 chunks[SOURCES][CHUNKS];
#pragma unroll
      for (int s = 0; s < SOURCES; ++s) {
        const int source = group + s;
        const int step = source > rank ? source - rank : source - rank + nranks;
        const bool has = source < nranks && (sources >> source & 1) != 0;
#pragma unroll
        for (int j = 0; j < CHUNKS; ++j) {
          chunks[s][j] = make_float4(0, 0, 0, 0);
          if (has)
            chunks[s][j] =
                __ldcg(reinterpret_cast<const float4*>(lane + (step - 1) * step_bytes + (first + j) * 512));
        }
      }
#pragma unroll
      for (int s = 0; s < SOURCES; ++s) {
        const bool is_own = group + s == rank;
#pragma unroll
        for (int j = 0; j < CHUNKS; ++j) {
          const int at = 4 * (first + j);
          totals[4 * j] += is_own ? sums[at] : chunks[s][j].x;
          totals[4 * j + 1] += is_own ? sums[at + 1] : chunks[s][j].y;
          totals[4 * j + 2] += is_own ? sums[at + 2] : chunks[s][j].z;
          totals[4 * j + 3] += is_own ? sums[at + 3] : chunks[s][j].w;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * CHUNKS; ++i) sums[4 * first + i] = totals[i];
  }
}

// The consumers, a warpgroup.
template <class Config, class Params>
class Consumer {
 public:
  using Element = typename Config::Element;
  static constexpr int NUM_SUMS = Config::HEAD_DIM / 2;

  using Storage = CudaStorage<Config>;

  __device__ __forceinline__ Consumer(const RankLaunch& launch, const Params& params, Storage& smem,
                                      int warpgroup)
      : launch_(launch),
        params_(params),
        smem_(smem),
        warpgroup_(warpgroup),
        core_(smem.attention, smem.joint, warpgroup, params.scale),
        notes_(smem.stored, threadIdx.x / 32) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const int item = item_now();
      if (__any_sync(~0u, item < 0)) break;
      const Tracer tracer(params_.comm.trace, TRACE_COMPUTE + warpgroup_);
      tracer.begin(TraceKind::compute, item);
      if (__any_sync(~0u, item < params_.num_key_tiles)) {
        compute_keys();
      } else {
        round_queries(item - params_.num_key_tiles);
      }
      tracer.end();
      release_item(smem_.items, cursor_);
    }
    notes_.end();
  }

 private:
  // Both are read anew behind a tile's products, for which all registers are needed.
  __device__ __forceinline__ int item_now() const { return await_item(smem_.items, cursor_); }
  __device__ __forceinline__ const KeyTile& tile_now() const { return smem_.producer.tiles[cursor_.slot]; }

  // dQ of some blocks, of which every tile has had its turn: this warpgroup's columns.
  __device__ __forceinline__ void round_queries(int chunk) const {
    constexpr int NUM_HALF_SUMS = NUM_SUMS / 2, COLUMNS = Config::HEAD_DIM / 2;
    const int in_block = (threadIdx.x / 32 * (NUM_HALF_SUMS / 4 * 32) + threadIdx.x % 32) * 16;
    for_each_block(params_, chunk, [&](const QueryBlock& block, int64_t number) {
      const std::byte* const sums =
          launch_.area(params_.comm.rank, params_.panels.query_sums().sums(number)) + in_block;
      float d_queries[NUM_HALF_SUMS];
#pragma unroll
      for (int i = 0; i < NUM_HALF_SUMS / 4; ++i) {
        const float4 four = __ldcg(reinterpret_cast<const float4*>(sums + i * 512));
        d_queries[4 * i] = four.x;
        d_queries[4 * i + 1] = four.y;
        d_queries[4 * i + 2] = four.z;
        d_queries[4 * i + 3] = four.w;
      }
      const int batch = block.head / params_.tiles.heads;
      const int head = block.head - batch * params_.tiles.heads;
      store_gradient_rows<Element>(d_queries, params_.scale,
                                   params_.dq.at(batch, head, block.row) + warpgroup_ * COLUMNS * 2,
                                   params_.dq.row_bytes, block.num_rows, params_.dim - warpgroup_ * COLUMNS);
    });
  }

  __device__ __forceinline__ void compute_keys() {
    const auto mask = key_mask(params_, tile_now(), warpgroup_);
    float d_keys[NUM_SUMS], d_values[NUM_SUMS];
    core_.add_queries(mask.is_used(), mask, d_keys, d_values);
    const KeyTile tile = tile_now();
    if constexpr (IsAlone<Params>) {
      core_.end_tile();
      finish(tile, d_keys, d_values);
    } else if (tile.step > 0) {
      core_.end_tile();
      store_parts(tile, d_keys, d_values);
      __syncwarp();
      notes_.add(static_cast<uint64_t>(item_now()));
    } else {
      if (params_.comm.nranks > 1) {
        // Before the tile's room is given back: so the producer is never two such tiles ahead.
        wait_barrier(&smem_.parts_full, parts_phase_);
        parts_phase_ ^= 1;
      }
      core_.end_tile();
      finish(tile, d_keys, d_values);
    }
  }

  // Where in a tile's part a warp's lie: of dK, and part_bytes() / 2 further on of dV.
  __device__ __forceinline__ int warp_offset() const {
    return static_cast<int>(threadIdx.x / 32) * (Config::HEAD_DIM * 16 * 4);
  }

  __device__ __forceinline__ void store_parts(const KeyTile& tile, const float (&d_keys)[NUM_SUMS],
                                              const float (&d_values)[NUM_SUMS]) const {
    const size_t offset = part_offset(params_, part_slot(params_, tile), tile);
    std::byte* const part = launch_.area(part_receiver(params_, tile), offset) + warp_offset();
    store_part(d_keys, part);
    store_part(d_values, part + params_.panels.part_bytes() / 2);
  }

  // Own keys.
  __device__ __forceinline__ void finish(const KeyTile& tile, float (&d_keys)[NUM_SUMS],
                                         float (&d_values)[NUM_SUMS]) const {
    const int num_rows = tile.num_rows - warpgroup_ * BLOCK_ROWS;
    if (num_rows <= 0) return;
    const int rank = params_.comm.rank, nranks = params_.comm.nranks;
    const int batch = tile.head / params_.tiles.kv_heads;
    const int head = tile.head - batch * params_.tiles.kv_heads;
    const int row =
        params_.tiles.slices.first_row(rank, tile.run) + tile.index * TILE_ROWS + warpgroup_ * BLOCK_ROWS;
    uint32_t sources = 0;
    for (int other = 0; other < nranks; ++other)
      if (other != rank && has_part(params_, other, tile)) sources |= 1u << other;
    const auto& panels = params_.panels;
    const std::byte* first_part = nullptr;
    size_t step_bytes = 0;
    if (sources != 0) {
      first_part = launch_.area(rank, part_offset(params_, 1, tile)) + warp_offset();
      step_bytes = panels.slot_bytes();
    }
    if (sources != 0)
      add_parts(d_values, first_part + panels.part_bytes() / 2, step_bytes, sources, rank, nranks);
    store_gradient_rows<Element>(d_values, 1.0f, params_.dv.at(batch, head, row), params_.dv.row_bytes,
                                 num_rows, params_.dim);
    if (sources != 0) add_parts(d_keys, first_part, step_bytes, sources, rank, nranks);
    store_gradient_rows<Element>(d_keys, params_.scale, params_.dk.at(batch, head, row), params_.dk.row_bytes,
                                 num_rows, params_.dim);
  }

  const RankLaunch& launch_;
  const Params& params_;
  Storage& smem_;
  const int warpgroup_;
  JointGradientConsumer<Config> core_;
  PushNotes<PushSignals<Config::NUM_CONSUMER_WARPS>> notes_;
  ItemCursor cursor_;
  uint32_t parts_phase_ = 0;
};

// One of `num_ctas` CTAs that compute, the last of which push before. greet(): by a warp of the first one.
template <class Config, class Params, class Greet>
__device__ __forceinline__ void run_compute_cta(const RankLaunch& launch, const Params& params,
                                                CudaStorage<Config>& smem, int num_ctas, Greet&& greet) {
  // 168 registers a thread at the start; what the producer's warpgroup gives back, the consumers get. With sums
  // of 128 columns they need all there are: with 232 the compiler makes every product wait for the one before.
  // What the producer's warps then keep in memory is not read often. Of packed sequences the producer has more
  // to keep.
  constexpr bool IS_PACKED = ring_attention::IsPacked<Params>;
  constexpr int NUM_PRODUCER_REGISTERS = Config::HEAD_DIM == 128 ? 24 : IS_PACKED ? 88 : 72;
  constexpr int NUM_CONSUMER_REGISTERS = Config::HEAD_DIM == 128 ? 240 : IS_PACKED ? 208 : 216;
  static_assert(128 * (168 - NUM_PRODUCER_REGISTERS) >= 256 * (NUM_CONSUMER_REGISTERS - 168));
  if (threadIdx.x == 0) {
    storage_init(smem);
    smem.turns.begin(launch, params);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == Config::NUM_CONSUMER_WARPGROUPS) {
    ptx::setmaxnreg_dec<NUM_PRODUCER_REGISTERS>();
    const int warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
    const int push_cta = static_cast<int>(blockIdx.x) - (num_ctas - params.num_push_ctas);
    if (warp > 0) {
      if constexpr (!IsAlone<Params>) {
        if (push_cta >= 0) {
          ring_attention::push_keys<Config>(launch, params, smem.push, smem.attention.queries[0], warp - 1,
                                            push_cta);
        }
      }
      if (blockIdx.x == 0 && warp == 1) greet();
      if constexpr (!IsAlone<Params>) {
        if (warp == 1 && params.comm.nranks > 1) signal_parts(launch, params, smem.stored);
      }
      if (warp > 1) {
        if (threadIdx.x % 32 == 0) add_to_queries(launch, params, smem, warp - 2);
        __syncwarp();
      }
    } else {
      if constexpr (!IsAlone<Params>) {
        if (push_cta >= 0) ring_attention::signal_keys<Config>(launch, params, smem.push);
      }
      if (ptx::elect_one()) Producer<Config, Params>(launch, params, smem).run();
      __syncwarp();
    }
  } else {
    ptx::setmaxnreg_inc<NUM_CONSUMER_REGISTERS>();
    Consumer<Config, Params>(launch, params, smem, warpgroup).run();
  }
}

// `Params`: CudaParams, AloneParams or CircularParams.
template <class Config, class Params>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    ring_attention_backward_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<CudaStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  launch.begin_cta();
  run_compute_cta<Config>(launch, params, smem, gridDim.x, [&] { launch.greet(); });
  launch.end_cta();
}

template <class Params>
struct CudaKernelOf {
  void (*kernel)(Params);
  int num_threads;
  int smem_bytes;
  int head_dim;
};
constexpr int NUM_CUDA_KERNELS = 2;  // head_dim up to 64, and up to 128
template <class Params>
struct CudaTableOf {
  CudaKernelOf<Params> entries[NUM_CUDA_KERNELS];
};
using CudaTable = CudaTableOf<CudaParams>;
const CudaTable& cuda_kernels_bf16();
const CudaTable& cuda_kernels_fp16();
using AloneTable = CudaTableOf<AloneParams>;
const AloneTable& cuda_alone_kernels_bf16();
const AloneTable& cuda_alone_kernels_fp16();
using CircularTable = CudaTableOf<CircularParams>;
const CircularTable& cuda_circular_kernels_bf16();
const CircularTable& cuda_circular_kernels_fp16();

template <class Config, class Params>
constexpr CudaKernelOf<Params> cuda_kernel_entry(void (*kernel)(Params), size_t smem_bytes) {
  static_assert(Config::BLOCK_N == BLOCK_ROWS && Config::BLOCK_M == TILE_ROWS);
  static_assert(ring_attention::KEY_PUSH_BYTES<Config> <=
                (Config::NUM_STAGES + Config::NUM_D_O_STAGES) * Config::KEY_BYTES);
  return {kernel, Config::NUM_THREADS, static_cast<int>(smem_bytes), Config::HEAD_DIM};
}

template <class Config, class Params>
constexpr CudaKernelOf<Params> cuda_kernel_entry() {
  static_assert(sizeof(CudaStorage<Config>) <= 227 * 1024);
  return cuda_kernel_entry<Config>(ring_attention_backward_kernel<Config, Params>, sizeof(CudaStorage<Config>));
}

template <class Element>
using NarrowConfig = AttentionGradientConfig<64, 6, Element>;
template <class Element>
using WideConfig = AttentionGradientConfig<128, 3, Element>;

template <class Element, class Params>
const CudaTableOf<Params>& cuda_kernel_table() {
  static const CudaTableOf<Params> table{
      {cuda_kernel_entry<NarrowConfig<Element>, Params>(), cuda_kernel_entry<WideConfig<Element>, Params>()}};
  return table;
}

}  // namespace mk::ring_attention_backward
