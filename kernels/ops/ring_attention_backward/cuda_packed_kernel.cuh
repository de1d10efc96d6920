// SPDX-License-Identifier: MIT
// Gradients of ring attention over packed sequences as one persistent kernel, behind a small one
// (cuda_packed_row_sums.cuh): as cuda_kernel.cuh, behind what begin_packed() finds out.
#pragma once

#include "kernels/ops/ring_attention/cuda_packed.cuh"
#include "kernels/ops/ring_attention_backward/cuda_kernel.cuh"
#include "kernels/ops/ring_attention_backward/cuda_packed_parts.cuh"

namespace mk::ring_attention_backward {

using ring_attention::packed_row;
using ring_attention::PackedRow;
using ring_attention::receiver_needs;

template <class Config, class Params_ = PackedParams, class Room = CudaStorage<Config>>
struct PackedCudaStorage : Room {
  using Params = Params_;
  ring_attention::PackedStorage<Params, Config::NUM_THREADS> packed;
  // What each row of the tile sees of those that stream past, or is seen by: rows of their rank.
  RowRange ranges[TILE_ROWS];
};

// A block that streams past, as consumers are told: its first row, whose it is by step, or nobody's if all of
// it is seen, and the blocks behind it.
__device__ __forceinline__ StreamedBlock streamed(int block, int step, bool is_masked, int num_left) {
  return {block * BLOCK_ROWS, is_masked ? step : -1, num_left};
}
__device__ __forceinline__ bool is_masked(const StreamedBlock& block) { return block.num_rows >= 0; }
__device__ __forceinline__ int step_of(const StreamedBlock& block) { return block.num_rows; }

// The producer, one thread: hands out tiles, brings their rows and what streams past them.
template <class Config, class Storage>
class PackedProducer {
 public:
  using Params = typename Storage::Params;

  __device__ PackedProducer(const RankLaunch& launch, Storage& smem)
      : launch_(launch), params_(smem.packed.params), smem_(smem), attention_(smem.attention) {}

  __device__ __forceinline__ void run() {
    const int num_query_tiles = params_.tiles.size();
    const auto key_tiles = key_tiles_of(params_);
    const int num_items = num_query_tiles + key_tiles.size();
    ItemCursor cursor;
    int item = take();
    while (item < num_items) {
      const int next = take();  // ahead of its use
      if (item < num_query_tiles) {
        put_item(smem_.items, cursor, item);
        load(params_.tiles.at(item));
      } else {
        const KeyTile tile = key_tiles.at(item - num_query_tiles);
        if (key_tiles.is_seen(tile)) {
          put_item(smem_.items, cursor, item);
          load(tile);
        }
      }
      item = next;
    }
    put_item(smem_.items, cursor, -1);
  }

 private:
  __device__ __forceinline__ int take() const {
    return static_cast<int>(atomicAdd(&params_.comm.state->gather_ticket, 1u));
  }

  // Queries and dO, then keys and values past them.
  __device__ __forceinline__ void load(const QueryTile& tile) {
    const Tracer tracer(params_.comm.trace, TRACE_LOAD);
    tracer.begin(TraceKind::load, tile.row);
    ring_attention::PackedKeyWalk walk(params_.tiles.slices, key_order(params_), params_.comm.rank, BLOCK_ROWS,
                                       {tile.row, tile.row + tile.num_rows});
    const int num_blocks = blocks_of(tile.num_rows);
    begin_tile(num_blocks);
#pragma unroll 1
    for (int block = 0; block < num_blocks; ++block) {
      load_rows(attention_.tile[block], &attention_.tile_full, ring_attention::PACKED_Q, PACKED_D_O,
                tile.row + block * BLOCK_ROWS, tile.head);
    }
    int num_left = walk.count();
    ring_attention::PackedBlock block;
    while (walk.next(&block)) {
      if (block.step > 0) await_keys(block.step, tile.kv_head, block.index);
      begin_stage(streamed(block.index, block.step, block.is_masked, --num_left), Config::PAIR_BYTES);
      load_keys(attention_.stream[stage_], &attention_.stream_full[stage_], block.step, tile.kv_head,
                block.index);
      advance();
    }
    tracer.end();
  }

  // Keys and values, then queries and dO past them.
  __device__ __forceinline__ void load(const KeyTile& tile) {
    const Tracer tracer(params_.comm.trace, TRACE_LOAD);
    tracer.begin(TraceKind::load, tile.index);
    const int group = params_.tiles.heads / params_.tiles.kv_heads;
    const int first_block = tile.index * TILE_BLOCKS;
    if (tile.step > 0) await_keys(tile.step, tile.head, first_block);
    const int num_blocks = blocks_of(tile.num_rows);
    begin_tile(num_blocks);
#pragma unroll 1
    for (int block = 0; block < num_blocks; ++block) {
      load_keys(attention_.tile[block], &attention_.tile_full, tile.step, tile.head, first_block + block);
    }
    PackedQueryBlockWalk walk(params_.tiles.slices, params_.comm.rank, group, source_of(params_, tile.step),
                              PackedKeyTiles::rows_of(tile));
    int num_left = walk.count();
    PackedQueryBlock block;
    while (walk.next(&block)) {
      const int head = tile.head * group + block.head;
      begin_stage(streamed(block.index, 0, block.is_masked, --num_left),
                  Config::PAIR_BYTES + GradientPanels::ROW_BYTES);
      uint64_t* const full = &attention_.stream_full[stage_];
      load_rows(attention_.stream[stage_], full, ring_attention::PACKED_Q, PACKED_D_O, block.index * BLOCK_ROWS,
                head);
      ptx::cp_async_bulk_shared_global(
          attention_.rows[stage_], launch_.area(params_.comm.rank, params_.panels.rows(head, 0, block.index)),
          GradientPanels::ROW_BYTES, full);
      advance();
    }
    tracer.end();
    if (tile.step == 0 && params_.comm.nranks > 1) {
      await_parts(tile);
      ptx::mbarrier_arrive(&smem_.parts_full);
    }
  }

  __device__ __forceinline__ void begin_tile(int num_blocks) {
    wait_barrier(&attention_.tile_empty, tile_phase_ ^ 1);
    tile_phase_ ^= 1;
    ptx::mbarrier_arrive_expect_tx(&attention_.tile_full, num_blocks * Config::PAIR_BYTES);
  }
  __device__ __forceinline__ void begin_stage(const StreamedBlock& block, uint32_t num_bytes) {
    wait_barrier(&attention_.stream_empty[stage_], phase_ ^ 1);
    attention_.blocks[stage_] = block;
    ptx::mbarrier_arrive_expect_tx(&attention_.stream_full[stage_], num_bytes);
  }
  __device__ __forceinline__ void advance() {
    if (++stage_ == Config::NUM_STAGES) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  // A block of two of this rank's tensors.
  __device__ __forceinline__ void load_rows(uint8_t* to, uint64_t* full, int first, int second, int row,
                                            int head) const {
#pragma unroll
    for (int column = 0; column < 2 * Config::NUM_COLUMN_BLOCKS; ++column) {
      const bool is_second = column >= Config::NUM_COLUMN_BLOCKS;
      ptx::cp_async_bulk_tensor_4d_shared_global(to + column * Config::KEY_COLUMN_BYTES,
                                                 params_.maps[is_second ? second : first], full,
                                                 column % Config::NUM_COLUMN_BLOCKS * 64, row, head, 0);
    }
  }

  // A block of keys and values, which are there.
  __device__ __forceinline__ void load_keys(uint8_t* to, uint64_t* full, int step, int head, int block) const {
    if (step == 0) {
      load_rows(to, full, ring_attention::PACKED_K, ring_attention::PACKED_V, block * BLOCK_ROWS, head);
    } else {
      const size_t offset = params_.panels.offset(slot_of(params_, step), head, 0, block);
      ptx::cp_async_bulk_shared_global(to, launch_.area(params_.comm.rank, offset), Config::PAIR_BYTES, full);
    }
  }

  __device__ __forceinline__ void await_keys(int step, int head, int block) {
    const int flag = params_.panels.flag(slot_of(params_, step), head, 0, block / params_.panels.panel_blocks);
    if (flag == last_flag_) return;
    last_flag_ = flag;
    launch_.wait_flag(flag, DeviceRole::compute, DeviceObject::chunk, source_of(params_, step), flag);
    // TMA is another proxy than the loads that saw the flag.
    ptx::fence_proxy_async_global();
  }

  // Of the ranks 1, 2, ... places after this one.
  __device__ __forceinline__ void await_parts(const KeyTile& tile) const {
#pragma unroll 1
    for (int step = 1; step < params_.comm.nranks; ++step) {
      const int source = ring_attention::wrap(params_.comm.rank + step, params_.comm.nranks);
      if (!has_part(params_, source, tile)) continue;
      const int flag = params_.panels.part_flag(step, tile.head, 0, tile.index);
      launch_.wait_flag(flag, DeviceRole::reduce, DeviceObject::partial, source, flag);
    }
  }

  const RankLaunch& launch_;
  const Params& params_;
  Storage& smem_;
  AttentionGradientStorage<Config>& attention_;
  uint32_t tile_phase_ = 0;
  int stage_ = 0;
  uint32_t phase_ = 0;
  int last_flag_ = -1;
};

// The consumers, a warpgroup.
template <class Config, class Storage>
class PackedConsumer {
 public:
  using Params = typename Storage::Params;
  using Element = typename Config::Element;
  static constexpr int NUM_SUMS = Config::HEAD_DIM / 2;

  __device__ __forceinline__ PackedConsumer(const RankLaunch& launch, Storage& smem, int warpgroup)
      : launch_(launch),
        params_(smem.packed.params),
        smem_(smem),
        warpgroup_(warpgroup),
        core_(smem.attention, warpgroup, params_.scale),
        notes_(smem.stored, threadIdx.x / 32) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const int item = item_now();
      if (item < 0) break;
      const Tracer tracer(params_.comm.trace, TRACE_COMPUTE + warpgroup_);
      tracer.begin(TraceKind::compute, item);
      if (item < params_.tiles.size()) {
        compute_queries();
      } else {
        compute_keys();
      }
      tracer.end();
      release_item(smem_.items, cursor_);
    }
    notes_.end();
  }

 private:
  // Tiles are worked out anew behind their products, for which all registers are needed.
  __device__ __forceinline__ int item_now() const { return await_item(smem_.items, cursor_); }
  __device__ __forceinline__ int key_tile_now() const { return item_now() - params_.tiles.size(); }
  __device__ __forceinline__ RowRange* ranges() const {
    return &smem_.ranges[warpgroup_ * BLOCK_ROWS + row_of_thread()];
  }
  // What this thread's two rows do not see of a block, or are not seen by. The lanes of a quad have the same.
  template <int NUM_WEIGHTS>
  __device__ __forceinline__ void hide(float (&weights)[NUM_WEIGHTS], int first_row) const {
    const RowRange first = ranges()[0], second = ranges()[8];
    mask_columns(weights, first.begin - first_row, second.begin - first_row, first.end - first_row,
                 second.end - first_row);
  }

  __device__ __forceinline__ void compute_queries() {
    float lse[2] = {}, delta[2] = {};
    bool is_used;
    {
      const QueryTile tile = params_.tiles.at(item_now());
      is_used = tile.num_rows > warpgroup_ * BLOCK_ROWS;
      if (is_used) load_rows(tile, lse, delta);
    }
    float d_queries[NUM_SUMS];
    int step = -1;  // whose rows the ranges are
    core_.add_keys(
        is_used, lse, delta,
        [&](auto& weights, const StreamedBlock& block) {
          if (!is_masked(block)) return;
          if (step_of(block) != step) {
            step = step_of(block);
            look_up_visible(step);
          }
          hide(weights, block.position);
        },
        d_queries);
    core_.end_tile();
    const QueryTile tile = params_.tiles.at(item_now());
    const int first_row = warpgroup_ * BLOCK_ROWS;
    store_gradient_rows<Element>(d_queries, params_.scale, params_.dq.at(0, tile.head, tile.row + first_row),
                                 params_.dq.row_bytes, tile.num_rows - first_row, params_.dim);
  }

  // Rows behind the tile's last see what that one sees; they are nobody's.
  __device__ __forceinline__ void look_up_visible(int step) const {
    const PackedSlices& slices = params_.tiles.slices;
    const QueryTile tile = params_.tiles.at(item_now());
    const int source = source_of(params_, step);
    __syncwarp();
#pragma unroll 1
    for (int row = 0; row < 2; ++row) {
      const int within = warpgroup_ * BLOCK_ROWS + row_of_thread() + 8 * row;
      const PackedRow place =
          packed_row(slices, params_.comm.rank, tile.row + least(within, tile.num_rows - 1));
      ranges()[8 * row] = slices.visible_rows(source, place.sequence, place.position);
    }
    __syncwarp();
  }

  // What is known of this thread's two queries.
  __device__ __forceinline__ void load_rows(const QueryTile& tile, float (&lse)[2], float (&delta)[2]) const {
    const size_t offset = params_.panels.rows(tile.head, 0, tile.row / BLOCK_ROWS + warpgroup_);
    const auto* const rows = reinterpret_cast<const float*>(launch_.area(params_.comm.rank, offset));
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      lse[row] = __ldcg(rows + row_of_thread() + 8 * row);
      delta[row] = __ldcg(rows + BLOCK_ROWS + row_of_thread() + 8 * row);
    }
  }

  __device__ __forceinline__ void compute_keys() {
    bool is_used;
    {
      const KeyTile tile = key_tiles_of(params_).at(key_tile_now());
      is_used = tile.num_rows > warpgroup_ * BLOCK_ROWS;
      look_up_seeing(tile);
    }
    float d_keys[NUM_SUMS], d_values[NUM_SUMS];
    core_.add_queries(
        is_used,
        [&](auto& weights, const StreamedBlock& block) {
          if (is_masked(block)) hide(weights, block.position);
        },
        d_keys, d_values);
    const int number = key_tile_now();
    const KeyTile tile = key_tiles_of(params_).at(number);
    if (tile.step > 0) {
      core_.end_tile();
      store_parts(tile, d_keys, d_values);
      __syncwarp();
      notes_.add(static_cast<uint64_t>(number));
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

  // Rows behind the tile's last are seen by those that see that one; they are nobody's.
  __device__ __forceinline__ void look_up_seeing(const KeyTile& tile) const {
    const PackedSlices& slices = params_.tiles.slices;
    const int source = source_of(params_, tile.step);
    __syncwarp();
#pragma unroll 1
    for (int row = 0; row < 2; ++row) {
      const int within = warpgroup_ * BLOCK_ROWS + row_of_thread() + 8 * row;
      const PackedRow place =
          packed_row(slices, source, tile.index * TILE_ROWS + least(within, tile.num_rows - 1));
      ranges()[8 * row] = slices.seeing_rows(params_.comm.rank, place.sequence, place.position);
    }
    __syncwarp();
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
    const int row = tile.index * TILE_ROWS + warpgroup_ * BLOCK_ROWS;
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
    store_gradient_rows<Element>(d_values, 1.0f, params_.dv.at(0, tile.head, row), params_.dv.row_bytes,
                                 num_rows, params_.dim);
    if (sources != 0) add_parts(d_keys, first_part, step_bytes, sources, rank, nranks);
    store_gradient_rows<Element>(d_keys, params_.scale, params_.dk.at(0, tile.head, row), params_.dk.row_bytes,
                                 num_rows, params_.dim);
  }

  const RankLaunch& launch_;
  const Params& params_;
  Storage& smem_;
  const int warpgroup_;
  AttentionGradientConsumer<Config> core_;
  PushNotes<PushSignals<Config::NUM_CONSUMER_WARPS>> notes_;
  ItemCursor cursor_;
  uint32_t parts_phase_ = 0;
};

// One of `num_ctas` CTAs that compute, behind begin_packed().
template <class Config, class Storage>
__device__ __forceinline__ void run_packed_compute_cta(const RankLaunch& launch, Storage& smem, int num_ctas) {
  // As run_compute_cta's, but that this producer has more to keep.
  constexpr int NUM_PRODUCER_REGISTERS = Config::HEAD_DIM == 128 ? 24 : 88;
  constexpr int NUM_CONSUMER_REGISTERS = Config::HEAD_DIM == 128 ? 240 : 208;
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
        ring_attention::push_keys<Config>(launch, params, smem.push, smem.attention.stream[0], role_warp - 1,
                                          push_cta);
      }
      if constexpr (!ring_attention::HasNodes<typename Storage::Params>) {
        if (blockIdx.x == 0 && role_warp == 3) greet_packed(smem.packed);
      }
      if (role_warp == 1 && params.comm.nranks > 1) signal_parts(launch, params, smem.stored);
    } else {
      if (push_cta >= 0) ring_attention::signal_keys<Config>(launch, params, smem.push);
      if (threadIdx.x % 32 == 0) PackedProducer<Config, Storage>(launch, smem).run();
      __syncwarp();
    }
  } else {
    ptx::setmaxnreg_inc<NUM_CONSUMER_REGISTERS>();
    PackedConsumer<Config, Storage>(launch, smem, warpgroup).run();
  }
}

// What else follows from the number of this rank's rows.
template <class Arguments, class Params>
__device__ __forceinline__ void settle_rows(const Arguments& arguments, Params& params, int rows) {
  if (!arguments.heads_first) return;
  for (HeadRows* tensor : {&params.dq, &params.dk, &params.dv}) tensor->head_bytes = rows * tensor->row_bytes;
}

using PackedArguments = ring_attention::PackedArguments<PackedParams>;

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    ring_attention_backward_packed_kernel(const __grid_constant__ PackedArguments arguments) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  PackedCudaStorage<Config>& smem = *reinterpret_cast<PackedCudaStorage<Config>*>(smem_bytes);
  const RankLaunch launch(arguments.params.comm);
  launch.begin_cta();
  const bool goes_on = begin_packed(
      arguments, smem.packed, [&](PackedParams& params, int rows) { settle_rows(arguments, params, rows); });
  if (goes_on) {
    run_packed_compute_cta<Config>(launch, smem, gridDim.x);
  } else if (blockIdx.x == 0 && threadIdx.x < 32) {
    greet_packed(smem.packed);
  }
  launch.end_cta();
}

using PackedKernel = CudaKernelOf<PackedArguments>;
using PackedTable = CudaTableOf<PackedArguments>;
const PackedTable& cuda_packed_kernels_bf16();
const PackedTable& cuda_packed_kernels_fp16();

template <class Config>
constexpr PackedKernel packed_kernel_entry() {
  static_assert(sizeof(PackedCudaStorage<Config>) <= 227 * 1024);
  return cuda_kernel_entry<Config>(ring_attention_backward_packed_kernel<Config>,
                                   sizeof(PackedCudaStorage<Config>));
}

template <class Element>
const PackedTable& cuda_packed_kernel_table() {
  static const PackedTable table{
      {packed_kernel_entry<NarrowConfig<Element>>(), packed_kernel_entry<WideConfig<Element>>()}};
  return table;
}

}  // namespace mk::ring_attention_backward
