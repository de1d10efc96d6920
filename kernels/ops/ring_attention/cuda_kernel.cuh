// SPDX-License-Identifier: MIT
// Ring attention as one persistent kernel: some CTAs push this rank's keys and values to the peers that need
// them, head by head, and then compute like all others: tiles of queries, each over the keys of all ranks,
// which it takes as they arrive.
#pragma once

#include "kernels/device/attention.cuh"
#include "kernels/device/rank_launch.cuh"
#include "kernels/ops/ring_attention/cuda_items.cuh"
#include "kernels/ops/ring_attention/cuda_params.h"
#include "kernels/ops/ring_attention/cuda_push.cuh"
#include "kernels/ptx/tma.cuh"

namespace mk::ring_attention {

template <class Config>
struct CudaStorage {
  AttentionStorage<Config> attention;
  ItemQueue items;
  // While a CTA pushes, its pieces pass through the room of keys and values.
  KeyPushStorage push;
};

template <class Config>
__device__ __forceinline__ void storage_init(CudaStorage<Config>& smem) {
  attention_init(smem.attention);
  item_queue_init(smem.items, Config::NUM_CONSUMER_WARPS);
  key_push_init(smem.push);
  ptx::fence_mbarrier_init_release_cluster();
}

__device__ __forceinline__ RingOrder key_order(const CudaParams& params) { return {params.comm.rank}; }

// ------------------------------------------------------------------ loading

// The producer, one thread: hands out tiles and brings their queries, keys and values.
template <class Config, class Params>
class Producer {
 public:
  using Storage = CudaStorage<Config>;

  __device__ Producer(const RankLaunch& launch, const Params& params, Storage& smem)
      : launch_(launch), params_(params), smem_(smem) {}

  __device__ __forceinline__ void run() {
    ptx::prefetch_tensormap(&params_.map_q);
    ptx::prefetch_tensormap(&params_.map_k);
    ptx::prefetch_tensormap(&params_.map_v);
    const int num_items = params_.tiles.size();
    ItemCursor cursor;
    int item = take();
    while (true) {
      put_item(smem_.items, cursor, item < num_items ? item : -1);
      if (item >= num_items) return;
      const int next = take();  // ahead of its use
      const Tracer tracer(params_.comm.trace, TRACE_LOAD);
      tracer.begin(TraceKind::load, item);
      load(params_.tiles.at(item));
      tracer.end();
      item = next;
    }
  }

 private:
  __device__ __forceinline__ int take() const {
    return static_cast<int>(atomicAdd(&params_.comm.state->gather_ticket, 1u));
  }

  __device__ __forceinline__ void load(const QueryTile& tile) {
    const CudaSlices& slices = params_.tiles.slices;
    KeyBlockWalk walk(slices, key_order(params_), Config::BLOCK_N,
                      visible_range(slices, tile.position, tile.position + tile.num_rows - 1));
    AttentionStorage<Config>& smem = smem_.attention;
    wait_barrier(&smem.queries_empty, queries_phase_ ^ 1);
    queries_phase_ ^= 1;
    ptx::mbarrier_arrive_expect_tx(&smem.queries_full, Config::QUERY_BYTES);
#pragma unroll
    for (int column = 0; column < Config::NUM_COLUMN_BLOCKS; ++column) {
      ptx::cp_async_bulk_tensor_4d_shared_global(smem.queries + column * Config::QUERY_COLUMN_BYTES,
                                                 &params_.map_q, &smem.queries_full, column * 64, tile.row,
                                                 tile.head, tile.batch);
    }
    // Keys go one block ahead of values: their product comes first.
    KeyBlock block, following;
    bool has_block = walk.next(&block);
    if (has_block) load_keys(tile, block);
    while (has_block) {
      const bool has_following = walk.next(&following);
      if (has_following) load_keys(tile, following);
      load_part(tile, block, true, smem.values[values_.slot], &smem.values_full[values_.slot],
                &smem.values_empty[values_.slot], values_);
      block = following;
      has_block = has_following;
    }
  }

  struct Stage {
    int slot = 0;
    uint32_t phase = 0;
  };

  __device__ __forceinline__ void load_keys(const QueryTile& tile, const KeyBlock& block) {
    if (block.step > 0) await_panel(tile, block);
    AttentionStorage<Config>& smem = smem_.attention;
    load_part(tile, block, false, smem.keys[keys_.slot], &smem.keys_full[keys_.slot],
              &smem.keys_empty[keys_.slot], keys_);
  }

  __device__ __forceinline__ int head_of(const QueryTile& tile) const {
    return tile.batch * params_.tiles.kv_heads + tile.kv_head;
  }

  __device__ __forceinline__ void await_panel(const QueryTile& tile, const KeyBlock& block) {
    const auto& panels = params_.panels;
    const int panel = block.index / panels.panel_blocks;
    const int flag = panels.flag(slot_of(params_, block.step), head_of(tile), block.run, panel);
    if (flag == last_flag_) return;
    last_flag_ = flag;
    launch_.wait_flag(flag, DeviceRole::compute, DeviceObject::chunk, source_of(params_, block.step), flag);
    // TMA is another proxy than the loads that saw the flag.
    ptx::fence_proxy_async_global();
  }

  // A block's keys or values, once their stage is free.
  __device__ __forceinline__ void load_part(const QueryTile& tile, const KeyBlock& block, bool value,
                                            uint8_t* to, uint64_t* full, uint64_t* empty, Stage& stage) {
    wait_barrier(empty, stage.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, Config::KEY_BYTES);
    if (block.step == 0) {
      const int row =
          params_.tiles.slices.first_row(params_.comm.rank, block.run) + block.index * Config::BLOCK_N;
#pragma unroll
      for (int column = 0; column < Config::NUM_COLUMN_BLOCKS; ++column) {
        ptx::cp_async_bulk_tensor_4d_shared_global(to + column * Config::KEY_COLUMN_BYTES,
                                                   value ? &params_.map_v : &params_.map_k, full, column * 64,
                                                   row, tile.kv_head, tile.batch);
      }
    } else {
      const size_t offset =
          params_.panels.offset(slot_of(params_, block.step), head_of(tile), block.run, block.index) +
          (value ? Config::KEY_BYTES : 0);
      ptx::cp_async_bulk_shared_global(to, launch_.area(params_.comm.rank, offset), Config::KEY_BYTES, full);
    }
    if (++stage.slot == Config::NUM_STAGES) {
      stage.slot = 0;
      stage.phase ^= 1;
    }
  }

  const RankLaunch& launch_;
  const Params& params_;
  Storage& smem_;
  uint32_t queries_phase_ = 0;
  Stage keys_, values_;
  int last_flag_ = -1;
};

// ---------------------------------------------------------------- computing

// The positions that a thread's two rows see.
struct RowRanges {
  int begin[2];
  int end[2];
};

// Hides what the rows do not see of a block: a thread's columns are 8 j + 2 (lane % 4) and the next.
template <int NUM_LOGITS>
__device__ __forceinline__ void mask_block(float (&logits)[NUM_LOGITS], const KeyBlock& block,
                                           const RowRanges& ranges) {
  const int first = block.position + threadIdx.x % 4 * 2;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int begin = ranges.begin[row] - first, end = least(ranges.end[row], block.run_end) - first;
#pragma unroll
    for (int i = 0; i < NUM_LOGITS; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = i * 2 + j;
        if (column < begin || column >= end) logits[i + 2 * row + j] = -INFINITY;
      }
    }
  }
}

template <class Config, class Params>
__device__ __forceinline__ void store_tile(const Params& params, const QueryTile& tile, int row_in_tile,
                                           const float (&outputs)[Config::HEAD_DIM / 2],
                                           const SoftmaxRows& rows, float scale) {
  using Element = typename Config::Element;
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int at = row_in_tile + 8 * row;
    const bool is_row = at < tile.num_rows;
    // A query that sees nothing, or logits of -inf only, gets zeros.
    const bool is_none = rows.maximum[row] == -INFINITY;
    std::byte* const to = params.o + tile.batch * params.o_batch_bytes + tile.head * params.o_head_bytes +
                          (int64_t{tile.row} + at) * params.o_row_bytes;
#pragma unroll
    for (int i = 0; i < Config::HEAD_DIM / 32; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int first = 4 * (4 * i + j) + 2 * row;
        words[j] = is_none
                       ? 0
                       : pack_pair<Element>(outputs[first] / rows.sum[row], outputs[first + 1] / rows.sum[row]);
      }
      transpose_quad(words);
      const int column = 8 * (4 * i + lane);
      if (is_row && column < params.dim) {
        *reinterpret_cast<uint4*>(to + column * 2) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    if (params.lse != nullptr && is_row && lane == 0) {
      const int64_t head = int64_t{tile.batch} * params.tiles.heads + tile.head;
      params.lse[head * params.lse_rows + tile.row + at] =
          is_none ? -INFINITY : rows.maximum[row] * scale + logf(rows.sum[row]);
    }
  }
}

template <class Config, class Params>
__device__ __forceinline__ void consume(const Params& params, CudaStorage<Config>& smem, int warpgroup) {
  constexpr float LN2 = 0.693147180559945309f;
  AttentionConsumer<Config> attention(smem.attention, warpgroup, params.scale_log2, params.negate);
  attention.begin();
  const CudaSlices& slices = params.tiles.slices;
  const int row_in_tile = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  ItemCursor cursor;
  while (true) {
    const int item = take_item(smem.items, cursor);
    if (item < 0) return;
    const QueryTile tile = params.tiles.at(item);
    const VisibleRange visible = visible_range(slices, tile.position, tile.position + tile.num_rows - 1);
    KeyBlockWalk walk(slices, key_order(params), Config::BLOCK_N, visible);
    const int num_blocks = walk.count();
    KeyBlock block;
    RowRanges ranges;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // Rows behind the tile's last see what that one sees; nothing is stored for them.
      const int position = tile.position + least(row_in_tile + 8 * row, tile.num_rows - 1);
      ranges.begin[row] = slices.visible_begin(position);
      ranges.end[row] = slices.visible_end(position);
    }
    const Tracer tracer(params.comm.trace, TRACE_COMPUTE + warpgroup);
    tracer.begin(TraceKind::compute, item);
    float outputs[Config::HEAD_DIM / 2];
    SoftmaxRows rows;
    attention.attend(
        num_blocks,
        [&](auto& logits) {
          walk.next(&block);
          if (block.is_masked) mask_block(logits, block, ranges);
        },
        outputs, rows);
    tracer.end();
    tracer.begin(TraceKind::store, item);
    store_tile<Config>(params, tile, row_in_tile, outputs, rows, params.scale_log2 * LN2);
    tracer.end();
  }
}

// One of `num_ctas` CTAs that compute, the last of which push before. With GREETS a warp of the first one meets
// the other ranks.
template <class Config, bool GREETS, class Params>
__device__ __forceinline__ void run_compute_cta(const RankLaunch& launch, const Params& params,
                                                CudaStorage<Config>& smem, int num_ctas) {
  // 168 registers a thread at the start; what the producer's warpgroup gives back, the consumers get.
  constexpr int NUM_PRODUCER_REGISTERS = 72;
  constexpr int NUM_CONSUMER_REGISTERS = 216;
  static_assert(128 * (168 - NUM_PRODUCER_REGISTERS) >= 256 * (NUM_CONSUMER_REGISTERS - 168));
  if (threadIdx.x == 0) storage_init(smem);
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == Config::NUM_CONSUMER_WARPGROUPS) {
    ptx::setmaxnreg_dec<NUM_PRODUCER_REGISTERS>();
    const int warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
    const int push_cta = static_cast<int>(blockIdx.x) - (num_ctas - params.num_push_ctas);
    if (warp > 0) {
      if (push_cta >= 0) {
        push_keys<Config>(launch, params, smem.push, smem.attention.keys[0], warp - 1, push_cta);
      }
      if (GREETS && blockIdx.x == 0 && warp == 3) launch.greet();
    } else {
      if (push_cta >= 0) signal_keys<Config>(launch, params, smem.push);
      if (threadIdx.x % 32 == 0) Producer<Config, Params>(launch, params, smem).run();
      __syncwarp();
    }
  } else {
    ptx::setmaxnreg_inc<NUM_CONSUMER_REGISTERS>();
    consume<Config>(params, smem, warpgroup);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    ring_attention_kernel(const __grid_constant__ CudaParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  CudaStorage<Config>& smem = *reinterpret_cast<CudaStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  launch.begin_cta();
  run_compute_cta<Config, true>(launch, params, smem, gridDim.x);
  launch.end_cta();
}

template <class Params>
struct CudaKernelOf {
  void (*kernel)(Params);
  int num_threads;
  int smem_bytes;
  int head_dim;
  int block_m;
  int block_n;
};
constexpr int NUM_CUDA_KERNELS = 2;  // head_dim up to 64, and up to 128
template <class Params>
struct CudaTableOf {
  CudaKernelOf<Params> entries[NUM_CUDA_KERNELS];
};
using CudaTable = CudaTableOf<CudaParams>;
const CudaTable& cuda_kernels_bf16();
const CudaTable& cuda_kernels_fp16();

template <class Config, class Params>
constexpr CudaKernelOf<Params> cuda_kernel_entry(void (*kernel)(Params), size_t smem_bytes) {
  static_assert(sizeof(CudaStorage<Config>) <= 227 * 1024);
  static_assert(KEY_PUSH_BYTES<Config> <= 2 * Config::NUM_STAGES * Config::KEY_BYTES);
  return {kernel,           Config::NUM_THREADS, static_cast<int>(smem_bytes),
          Config::HEAD_DIM, Config::BLOCK_M,     Config::BLOCK_N};
}

template <class Config>
constexpr CudaKernelOf<CudaParams> cuda_kernel_entry() {
  return cuda_kernel_entry<Config>(ring_attention_kernel<Config>, sizeof(CudaStorage<Config>));
}

template <class Element>
using NarrowConfig = AttentionConfig<64, 128, 4, Element>;
template <class Element>
using WideConfig = AttentionConfig<128, 128, 2, Element>;

template <class Element>
const CudaTable& cuda_kernel_table() {
  static const CudaTable table{
      {cuda_kernel_entry<NarrowConfig<Element>>(), cuda_kernel_entry<WideConfig<Element>>()}};
  return table;
}

}  // namespace mk::ring_attention
