// SPDX-License-Identifier: MIT
// Ring attention over packed sequences as one persistent kernel: as cuda_kernel.cuh, behind what begin_packed()
// finds out. The producer looks up who sees what; the consumers are told of tiles and blocks through shared
// memory.
#pragma once

#include "kernels/ops/ring_attention/cuda_kernel.cuh"
#include "kernels/ops/ring_attention/cuda_packed.cuh"

namespace mk::ring_attention {

// A tile on its way to the consumers.
struct PackedTile {
  QueryTile tile;
  int num_blocks;
};

template <class Config, class Params_ = PackedParams, class Room = CudaStorage<Config>>
struct PackedCudaStorage : Room {
  using Params = Params_;
  PackedStorage<Params, Config::NUM_THREADS> packed;
  PackedTile tiles[NUM_ITEMS_AHEAD];
  // Blocks of keys, block i of the CTA at i modulo their number. A consumer masks a block when it has let its
  // stage go: then the producer may be NUM_STAGES blocks ahead of it, and no more.
  static constexpr int NUM_BLOCKS = 2 * Config::NUM_STAGES;
  PackedBlock blocks[NUM_BLOCKS];
};

__device__ __forceinline__ RingOrder key_order(const PackedParams& params) { return {params.comm.rank}; }

// The producer, one thread: hands out tiles and brings their queries, keys and values.
template <class Config, class Storage>
class PackedProducer {
 public:
  using Params = typename Storage::Params;

  __device__ PackedProducer(const RankLaunch& launch, Storage& smem)
      : launch_(launch), params_(smem.packed.params), smem_(smem) {}

  __device__ __forceinline__ void run() {
    const int num_items = params_.tiles.size();
    ItemCursor cursor;
    int item = take();
    while (item < num_items) {
      const QueryTile tile = params_.tiles.at(item);
      PackedKeyWalk walk(params_.tiles.slices, key_order(params_), params_.comm.rank, Config::BLOCK_N,
                         {tile.row, tile.row + tile.num_rows});
      wait_barrier(&smem_.items.empty[cursor.slot], cursor.phase ^ 1);
      smem_.tiles[cursor.slot] = {tile, walk.count()};
      put_item(smem_.items, cursor, item);
      const int next = take();  // ahead of its use
      const Tracer tracer(params_.comm.trace, TRACE_LOAD);
      tracer.begin(TraceKind::load, item);
      load(tile, walk);
      tracer.end();
      item = next;
    }
    put_item(smem_.items, cursor, -1);
  }

 private:
  struct Stage {
    int slot = 0;
    uint32_t phase = 0;
  };

  __device__ __forceinline__ int take() const {
    return static_cast<int>(atomicAdd(&params_.comm.state->gather_ticket, 1u));
  }

  template <class Walk>
  __device__ __forceinline__ void load(const QueryTile& tile, Walk& walk) {
    AttentionStorage<Config>& smem = smem_.attention;
    wait_barrier(&smem.queries_empty, queries_phase_ ^ 1);
    queries_phase_ ^= 1;
    ptx::mbarrier_arrive_expect_tx(&smem.queries_full, Config::QUERY_BYTES);
#pragma unroll
    for (int column = 0; column < Config::NUM_COLUMN_BLOCKS; ++column) {
      ptx::cp_async_bulk_tensor_4d_shared_global(smem.queries + column * Config::QUERY_COLUMN_BYTES,
                                                 params_.maps[PACKED_Q], &smem.queries_full, column * 64,
                                                 tile.row, tile.head, 0);
    }
    // Keys go one block ahead of values: their product comes first.
    PackedBlock block, following;
    bool has_block = walk.next(&block);
    if (has_block) load_keys(tile, block);
    while (has_block) {
      const bool has_following = walk.next(&following);
      if (has_following) load_keys(tile, following);
      wait_barrier(&smem.values_empty[values_.slot], values_.phase ^ 1);
      load_part(tile, block, true, smem.values[values_.slot], &smem.values_full[values_.slot], values_);
      block = following;
      has_block = has_following;
    }
  }

  __device__ __forceinline__ void load_keys(const QueryTile& tile, const PackedBlock& block) {
    if (block.step > 0) await_panel(tile, block);
    AttentionStorage<Config>& smem = smem_.attention;
    wait_barrier(&smem.keys_empty[keys_.slot], keys_.phase ^ 1);
    smem_.blocks[next_block_] = block;
    if (++next_block_ == Storage::NUM_BLOCKS) next_block_ = 0;
    load_part(tile, block, false, smem.keys[keys_.slot], &smem.keys_full[keys_.slot], keys_);
  }

  __device__ __forceinline__ void await_panel(const QueryTile& tile, const PackedBlock& block) {
    const auto& panels = params_.panels;
    const int flag =
        panels.flag(slot_of(params_, block.step), tile.kv_head, 0, block.index / panels.panel_blocks);
    if (flag == last_flag_) return;
    last_flag_ = flag;
    launch_.wait_flag(flag, DeviceRole::compute, DeviceObject::chunk, source_of(params_, block.step), flag);
    // TMA is another proxy than the loads that saw the flag.
    ptx::fence_proxy_async_global();
  }

  // A block's keys or values, to a stage that is free.
  __device__ __forceinline__ void load_part(const QueryTile& tile, const PackedBlock& block, bool value,
                                            uint8_t* to, uint64_t* full, Stage& stage) {
    ptx::mbarrier_arrive_expect_tx(full, Config::KEY_BYTES);
    if (block.step == 0) {
#pragma unroll
      for (int column = 0; column < Config::NUM_COLUMN_BLOCKS; ++column) {
        ptx::cp_async_bulk_tensor_4d_shared_global(to + column * Config::KEY_COLUMN_BYTES,
                                                   key_map(params_, value), full, column * 64,
                                                   block.index * Config::BLOCK_N, tile.kv_head, 0);
      }
    } else {
      const size_t offset = params_.panels.offset(slot_of(params_, block.step), tile.kv_head, 0, block.index) +
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
  int next_block_ = 0;
  int last_flag_ = -1;
};

// Hides the columns that a thread's two rows do not see of a block: 8 j + 2 (lane % 4) and the next. Ranges are
// rows of the block's source.
template <int NUM_LOGITS>
__device__ __forceinline__ void mask_rows(float (&logits)[NUM_LOGITS], int first_row,
                                          const RowRange (&ranges)[2]) {
  const int first = first_row + threadIdx.x % 4 * 2;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int begin = ranges[row].begin - first, end = ranges[row].end - first;
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

template <class Config, class Storage>
__device__ __forceinline__ void consume_packed(Storage& smem, int warpgroup) {
  constexpr float LN2 = 0.693147180559945309f;
  const auto& params = smem.packed.params;
  AttentionConsumer<Config> attention(smem.attention, warpgroup, params.scale_log2, params.negate);
  attention.begin();
  const int row_in_tile = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  int next_block = 0;
  ItemCursor cursor;
  while (true) {
    const int item = await_item(smem.items, cursor);
    const PackedTile work = smem.tiles[cursor.slot];
    release_item(smem.items, cursor);
    if (item < 0) return;
    PackedRow places[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // Rows behind the tile's last see what that one sees; nothing is stored for them.
      const int at = work.tile.row + least(row_in_tile + 8 * row, work.tile.num_rows - 1);
      places[row] = packed_row(params.tiles.slices, params.comm.rank, at);
    }
    const Tracer tracer(params.comm.trace, TRACE_COMPUTE + warpgroup);
    tracer.begin(TraceKind::compute, item);
    float outputs[Config::HEAD_DIM / 2];
    SoftmaxRows rows;
    RowRange ranges[2] = {};
    int step = -1;  // whose rows they are
    attention.attend(
        work.num_blocks,
        [&](auto& logits) {
          const PackedBlock block = smem.blocks[next_block];
          if (++next_block == Storage::NUM_BLOCKS) next_block = 0;
          if (!block.is_masked) return;
          if (block.step != step) {
            step = block.step;
            const int source = source_of(params, step);
#pragma unroll
            for (int row = 0; row < 2; ++row)
              ranges[row] =
                  params.tiles.slices.visible_rows(source, places[row].sequence, places[row].position);
          }
          mask_rows(logits, block.index * Config::BLOCK_N, ranges);
        },
        outputs, rows);
    tracer.end();
    tracer.begin(TraceKind::store, item);
    store_tile<Config>(params, work.tile, row_in_tile, outputs, rows, params.scale_log2 * LN2);
    tracer.end();
  }
}

// One of `num_ctas` CTAs that compute, behind begin_packed().
template <class Config, class Storage>
__device__ __forceinline__ void run_packed_compute_cta(const RankLaunch& launch, Storage& smem, int num_ctas) {
  // As run_compute_cta's, but that this producer has more to keep: with 72 it spills.
  constexpr int NUM_PRODUCER_REGISTERS = 88;
  constexpr int NUM_CONSUMER_REGISTERS = 208;
  static_assert(128 * (168 - NUM_PRODUCER_REGISTERS) >= 256 * (NUM_CONSUMER_REGISTERS - 168));
  if (threadIdx.x == 0) storage_init(smem);
  __syncthreads();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int warpgroup = warp / 4;
  if (warpgroup == Config::NUM_CONSUMER_WARPGROUPS) {
    ptx::setmaxnreg_dec<NUM_PRODUCER_REGISTERS>();
    const auto& params = smem.packed.params;
    const int push_cta = static_cast<int>(blockIdx.x) - (num_ctas - params.num_push_ctas);
    const int role_warp = warp % 4;
    if (role_warp > 0) {
      if (push_cta >= 0) {
        push_keys<Config>(launch, params, smem.push, smem.attention.keys[0], role_warp - 1, push_cta);
      }
      if constexpr (!HasNodes<typename Storage::Params>) {
        if (blockIdx.x == 0 && role_warp == 3) greet_packed(smem.packed);
      }
    } else {
      if (push_cta >= 0) signal_keys<Config>(launch, params, smem.push);
      if (threadIdx.x % 32 == 0) PackedProducer<Config, Storage>(launch, smem).run();
      __syncwarp();
    }
  } else {
    ptx::setmaxnreg_inc<NUM_CONSUMER_REGISTERS>();
    consume_packed<Config>(smem, warpgroup);
  }
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
  static const PackedTable table{
      {packed_kernel_entry<NarrowConfig<Element>>(), packed_kernel_entry<WideConfig<Element>>()}};
  return table;
}

}  // namespace mk::ring_attention
