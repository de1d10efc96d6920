// SPDX-License-Identifier: MIT
// Gradients of ring attention on GPUs: what a CTA has in shared memory, and its producer.
#pragma once

#include "kernels/device/rank_launch.cuh"
#include "kernels/ops/ring_attention/cuda_items.cuh"
#include "kernels/ops/ring_attention/cuda_push.cuh"
#include "kernels/ops/ring_attention_backward/cuda_parts.cuh"
#include "kernels/ops/ring_attention_backward/cuda_query_sums.cuh"
#include "kernels/ops/ring_attention_backward/cuda_tiles.cuh"
#include "kernels/ptx/tma.cuh"

namespace mk::ring_attention_backward {

using ring_attention::ItemCursor;
using ring_attention::key_map;
using ring_attention::wait_barrier;

template <class Config>
struct CudaStorage {
  // From the producer to the warps that add. It is at most NUM_STAGES ahead of the blocks that consumers are
  // done with, and of those all but the last three have been added, or are about to be: their turns have been
  // read.
  static constexpr int NUM_TURNS = Config::NUM_STAGES + 3;
  JointGradientStorage<Config> attention;
  JointGradientBarriers joint;
  ring_attention::ItemQueue items;
  // While a CTA pushes, its pieces pass through the room of what streams.
  ring_attention::KeyPushStorage push;
  // A tile of own keys: the parts of the other ranks are there.
  uint64_t parts_full;
  // Parts of other ranks' keys that consumer warps have stored.
  PushSignals<Config::NUM_CONSUMER_WARPS> stored;
  QueryTurns<NUM_TURNS> turns;
};

template <class Config>
__device__ __forceinline__ void storage_init(CudaStorage<Config>& smem) {
  attention_gradient_init(smem.attention);
  joint_gradient_init<Config>(smem.joint);
  item_queue_init(smem.items, Config::NUM_CONSUMER_WARPS);
  key_push_init(smem.push);
  ptx::mbarrier_init(&smem.parts_full, 1);
  push_signals_init(smem.stored);
  smem.turns.num_put = smem.turns.has_ended = 0;
  ptx::fence_mbarrier_init_release_cluster();
}

// The producer, one thread: hands out tiles of keys, brings their rows and the queries and dO that stream past
// them; behind the last waits until dQ of some blocks is whole, which are then rounded.
template <class Config, class Params>
class Producer {
 public:
  using Storage = CudaStorage<Config>;

  __device__ Producer(const RankLaunch& launch, const Params& params, Storage& smem)
      : launch_(launch), params_(params), smem_(smem), attention_(smem.attention) {}

  __device__ __forceinline__ void run() {
    prefetch_maps(params_);
    const int num_tiles = params_.num_key_tiles;
    const int num_items = num_tiles + num_query_chunks(params_);
    ItemCursor cursor;
    int item;
    // None is taken ahead: a tile that is begun late holds up all behind it.
    while ((item = take()) < num_items) {
      if (item >= num_tiles) {
        await_whole(item - num_tiles);
        put_item(smem_.items, cursor, item);
        continue;
      }
      const auto tiles = key_tiles_of(params_);
      const KeyTile tile = tiles.at(item);
      if (!tiles.is_seen(tile)) continue;
      put_item(smem_.items, cursor, item);
      const Tracer tracer(params_.comm.trace, TRACE_LOAD);
      tracer.begin(TraceKind::load, item);
      load(tile);
      tracer.end();
    }
    put_item(smem_.items, cursor, -1);
    smem_.turns.end();
  }

 private:
  __device__ __forceinline__ int take() const {
    return static_cast<int>(atomicAdd(&params_.comm.state->gather_ticket, 1u));
  }

  // All turns with some blocks of queries are over.
  __device__ __forceinline__ void await_whole(int chunk) const {
    for_each_block(params_, chunk, [&](const QueryBlock& block, int64_t number) {
      const auto tiles = key_tiles_of(params_);
      await_turn(launch_, params_, number, turns_of(tiles).last(block));
    });
  }

  // Keys and values, then queries and dO past them.
  __device__ __forceinline__ void load(const KeyTile& tile) {
    const int batch = tile.head / params_.tiles.kv_heads;
    const int group = params_.tiles.heads / params_.tiles.kv_heads;
    const int first_head = (tile.head - batch * params_.tiles.kv_heads) * group;
    const int first_block = tile.index * TILE_BLOCKS;
    if (tile.step > 0) await_keys(tile.step, tile.head, tile.run, first_block);
    const int num_blocks = blocks_of(tile.num_rows);
    begin_tile(num_blocks);
#pragma unroll 1
    for (int block = 0; block < num_blocks; ++block) {
      load_keys(attention_.tile[block], &attention_.tile_full, tile.step, tile.head, tile.run,
                first_block + block);
    }
    const auto tiles = key_tiles_of(params_);
    const auto turns = turns_of(tiles);
    const int turn = turns.of(tile);
    const QueryRowPlaces places = params_.panels.row_places();
    auto walk = query_walk(params_, group, tile);
    int num_left = walk.count();
    typename decltype(walk)::Block block;
    int turn_before = 0;
    while (walk.next(&block)) {
      if (block.head == 0) turn_before = turns.before(tile, turn, block);
      const int head = first_head + block.head;
      const int query_head = batch * params_.tiles.heads + head;
      const QueryTurn of_block = {static_cast<int>(places.number(query_head, block.run, block.index)),
                                  turn_before, turn};
      begin_stage(streamed(block, --num_left), of_block);
      uint64_t* const full = &attention_.stream_full[stage_];
      load_rows(attention_.stream[stage_], full, query_map(params_, false), query_map(params_, true), block.row,
                head, batch);
      ptx::cp_async_bulk_shared_global(
          attention_.rows[stage_],
          launch_.area(params_.comm.rank, places.offset(query_head, block.run, block.index)),
          GradientPanels::ROW_BYTES, full);
      advance();
    }
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
  __device__ __forceinline__ void begin_stage(const StreamedBlock& block, const QueryTurn& turn) {
    wait_barrier(&attention_.stream_empty[stage_], phase_ ^ 1);
    attention_.blocks[stage_] = block;
    smem_.turns.put(turn);
    ptx::mbarrier_arrive_expect_tx(&attention_.stream_full[stage_],
                                   Config::PAIR_BYTES + GradientPanels::ROW_BYTES);
  }
  __device__ __forceinline__ void advance() {
    if (++stage_ == Config::NUM_STAGES) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  // A block of two of this rank's tensors.
  __device__ __forceinline__ void load_rows(uint8_t* to, uint64_t* full, const CUtensorMap* first,
                                            const CUtensorMap* second, int row, int head, int batch) const {
#pragma unroll
    for (int column = 0; column < Config::NUM_COLUMN_BLOCKS; ++column) {
      ptx::cp_async_bulk_tensor_4d_shared_global(to + column * Config::KEY_COLUMN_BYTES, first, full,
                                                 column * 64, row, head, batch);
    }
#pragma unroll
    for (int column = 0; column < Config::NUM_COLUMN_BLOCKS; ++column) {
      ptx::cp_async_bulk_tensor_4d_shared_global(to + Config::KEY_BYTES + column * Config::KEY_COLUMN_BYTES,
                                                 second, full, column * 64, row, head, batch);
    }
  }

  // A block of keys and values, which are there.
  __device__ __forceinline__ void load_keys(uint8_t* to, uint64_t* full, int step, int head, int run,
                                            int block) const {
    if (step == 0) {
      const int batch = head / params_.tiles.kv_heads;
      const int row = params_.tiles.slices.first_row(params_.comm.rank, run) + block * BLOCK_ROWS;
      load_rows(to, full, key_map(params_, false), key_map(params_, true), row,
                head - batch * params_.tiles.kv_heads, batch);
    } else {
      const size_t offset = params_.panels.offset(slot_of(params_, step), head, run, block);
      ptx::cp_async_bulk_shared_global(to, launch_.area(params_.comm.rank, offset), Config::PAIR_BYTES, full);
    }
  }

  __device__ __forceinline__ void await_keys(int step, int head, int run, int block) {
    const int flag =
        params_.panels.flag(slot_of(params_, step), head, run, block / params_.panels.panel_blocks);
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
      const int flag = params_.panels.part_flag(step, tile.head, tile.run, tile.index);
      launch_.wait_flag(flag, DeviceRole::reduce, DeviceObject::partial, source, flag);
    }
  }

  const RankLaunch& launch_;
  const Params& params_;
  Storage& smem_;
  JointGradientStorage<Config>& attention_;
  uint32_t tile_phase_ = 0;
  int stage_ = 0;
  uint32_t phase_ = 0;
  int last_flag_ = -1;
};

}  // namespace mk::ring_attention_backward
