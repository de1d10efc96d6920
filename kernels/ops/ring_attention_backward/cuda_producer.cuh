// SPDX-License-Identifier: MIT
// Gradients of ring attention on GPUs: what a CTA has in shared memory, and its producer.
#pragma once

#include "kernels/device/rank_launch.cuh"
#include "kernels/ops/ring_attention/cuda_items.cuh"
#include "kernels/ops/ring_attention/cuda_push.cuh"
#include "kernels/ops/ring_attention_backward/cuda_parts.cuh"
#include "kernels/ops/ring_attention_backward/cuda_query_sums.cuh"
#include "kernels/ops/ring_attention_backward/cuda_tiles.cuh"
#include "kernels/ptx/grid_dependency.cuh"
#include "kernels/ptx/tma.cuh"

namespace mk::ring_attention_backward {

using ring_attention::ItemCursor;
using ring_attention::key_map;
using ring_attention::wait_barrier;

// What the producer keeps in shared memory: of 24 registers it has none left for that, and those that the
// compiler puts into local memory come from the L2, for whoever waits for a turn empties the L1 cache.
struct ProducerState {
  KeyTile tiles[ring_attention::NUM_ITEMS_AHEAD];  // that items are, for consumers, too
  KeyTurn turn;                                    // of the tile at hand
  int batch, first_head, query_head;
  int num_left;  // blocks
  int stage, d_outputs_stage;
  uint32_t phase, d_outputs_phase;
  const std::byte* rows;  // what is known of the first block of queries
  ItemCursor cursor;
  uint32_t tile_phase;
  int last_flag;
};

template <class Config>
struct CudaStorage {
  // From the producer to the warps that add. When it puts the turn of block b, consumers are done with b -
  // NUM_STAGES, so that two before that one has been staged, for which the one before had to be read. The warps
  // that added that one and its predecessor may still have to tell of their turns.
  static constexpr int NUM_TURNS = Config::NUM_STAGES + 5;
  JointGradientStorage<Config> attention;
  JointGradientBarriers joint;
  ring_attention::ItemQueue items;
  ProducerState producer;
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
  smem.producer.cursor = {};
  smem.producer.tile_phase = smem.producer.phase = smem.producer.d_outputs_phase = 0;
  smem.producer.stage = smem.producer.d_outputs_stage = 0;
  smem.producer.last_flag = -1;
  key_push_init(smem.push);
  ptx::mbarrier_init(&smem.parts_full, 1);
  push_signals_init(smem.stored);
  ptx::fence_mbarrier_init_release_cluster();
}

// The producer, one thread: hands out tiles of keys, brings their rows and the queries and dO that stream past
// them; behind the last waits until dQ of some blocks is whole, which are then rounded.
template <class Config, class Params>
class Producer {
 public:
  using Storage = CudaStorage<Config>;
  using Turns = decltype(turns_of(key_tiles_of(std::declval<const Params&>())));

  __device__ Producer(const RankLaunch& launch, const Params& params, Storage& smem)
      : launch_(launch), params_(params), smem_(smem), state_(smem.producer), attention_(smem.attention) {}

  __device__ __forceinline__ void run() {
    prefetch_maps(params_);
    state_.rows = launch_.area(params_.comm.rank, params_.panels.row_places().offset(0));
    const int num_tiles = params_.num_key_tiles;
    const int num_items = num_tiles + num_query_chunks(params_);
    int item;
    // None is taken ahead: a tile that is begun late holds up all behind it.
    while ((item = take()) < num_items) {
      if (item >= num_tiles) {
        await_whole(item - num_tiles);
        put_item(smem_.items, state_.cursor, item);
        continue;
      }
      const auto tiles = key_tiles_of(params_);
      const KeyTile tile = tiles.at(item);
      if (!tiles.is_seen(tile)) continue;
      const int slot = state_.cursor.slot;
      put_item(smem_.items, state_.cursor, item, [&] { state_.tiles[slot] = tile; });
      const Tracer tracer(params_.comm.trace, TRACE_LOAD);
      tracer.begin(TraceKind::load, item);
      load(state_.tiles[slot]);
      tracer.end();
    }
    put_item(smem_.items, state_.cursor, -1);
    smem_.turns.end();
  }

 private:
  __device__ __forceinline__ int take() const {
    return static_cast<int>(atomicAdd(&launch_.progress().gather_ticket, 1u));
  }

  // All turns with some blocks of queries are over.
  __device__ __forceinline__ void await_whole(int chunk) const {
    ptx::await_previous_grid();
    for_each_block(params_, chunk, [&](const QueryBlock& block, int64_t number) {
      const auto tiles = key_tiles_of(params_);
      const int key_head = block.head / (params_.tiles.heads / params_.tiles.kv_heads);
      await_turn(launch_, params_, smem_.turns.last_turns + number, number,
                 turns_of(tiles).last(key_head, block));
    });
  }

  // Keys and values, then queries and dO past them.
  __device__ __forceinline__ void load(const KeyTile& tile) {
    const int group = params_.tiles.heads / params_.tiles.kv_heads;
    state_.batch = tile.head / params_.tiles.kv_heads;
    state_.first_head = (tile.head - state_.batch * params_.tiles.kv_heads) * group;
    state_.query_head = tile.head * group;
    const auto tiles = key_tiles_of(params_);
    const auto turns = turns_of(tiles);
    state_.turn = turns.of(tile);
    auto walk = query_walk(params_, tile);
    state_.num_left = walk.count() * group;
    const int first_block = tile.index * TILE_BLOCKS;
    if constexpr (!IsAlone<Params>) {
      if (tile.step > 0) await_keys(tile.step, tile.head, tile.run, first_block);
    }
    const int num_blocks = blocks_of(tile.num_rows);
    begin_tile(num_blocks);
#pragma unroll 1
    for (int block = 0; block < num_blocks; ++block) {
      load_keys(attention_.tile[block], &attention_.tile_full, tile.step, tile.head, tile.run,
                first_block + block);
    }
    ptx::await_previous_grid();  // which has found out what is to be known of rows
    QueryStretch stretch;
    while (walk.next(&stretch)) {
      for (int index = stretch.last; index >= stretch.first;) {
        const TurnBefore before = turns.before(tile, state_.turn, walk, stretch, index);
#pragma unroll 1
        for (; index >= before.first; --index) load_queries(walk.block(stretch, index), group, before.number);
      }
    }
    if constexpr (!IsAlone<Params>) {
      if (tile.step == 0 && params_.comm.nranks > 1) {
        await_parts(tile);
        ptx::mbarrier_arrive(&smem_.parts_full);
      }
    }
  }

  // A block of queries and their dO, of one head after the other.
  template <class Block>
  __device__ __forceinline__ void load_queries(const Block& block, int group, int turn_before) {
    const QueryRowPlaces places = params_.panels.row_places();
#pragma unroll 1
    for (int i = 0; i < group; ++i) {
      const int64_t number = places.number(state_.query_head + i, block.run, block.index);
      begin_stage(streamed(block, --state_.num_left),
                  {static_cast<int>(number), turn_before, Turns::own(state_.turn, turn_before)});
      uint64_t* const full = &attention_.stream_full[state_.stage];
      const int head = state_.first_head + i;
      load_rows(attention_.queries[state_.stage], full, query_map(params_, false), block.row, head,
                state_.batch);
      ptx::cp_async_bulk_shared_global(attention_.rows[state_.stage],
                                       state_.rows + number * GradientPanels::ROW_BYTES,
                                       GradientPanels::ROW_BYTES, full);
      if constexpr (Config::ARE_PAIRS) {
        load_rows(attention_.d_outputs[state_.stage], full, query_map(params_, true), block.row, head,
                  state_.batch);
      } else {
        begin_d_outputs();
        load_rows(attention_.d_outputs[state_.d_outputs_stage],
                  &attention_.d_outputs_full[state_.d_outputs_stage], query_map(params_, true), block.row, head,
                  state_.batch);
      }
      advance();
    }
  }

  __device__ __forceinline__ void begin_tile(int num_blocks) {
    wait_barrier(&attention_.tile_empty, state_.tile_phase ^ 1);
    state_.tile_phase ^= 1;
    ptx::mbarrier_arrive_expect_tx(&attention_.tile_full, num_blocks * Config::PAIR_BYTES);
  }
  __device__ __forceinline__ void begin_stage(const StreamedBlock& block, const QueryTurn& turn) {
    wait_barrier(&attention_.stream_empty[state_.stage], state_.phase ^ 1);
    attention_.blocks[state_.stage] = block;
    smem_.turns.put(turn);
    constexpr int BYTES = Config::ARE_PAIRS ? Config::PAIR_BYTES : Config::KEY_BYTES;
    ptx::mbarrier_arrive_expect_tx(&attention_.stream_full[state_.stage], BYTES + GradientPanels::ROW_BYTES);
  }
  __device__ __forceinline__ void begin_d_outputs() {
    wait_barrier(&attention_.d_outputs_empty[state_.d_outputs_stage], state_.d_outputs_phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(&attention_.d_outputs_full[state_.d_outputs_stage], Config::KEY_BYTES);
  }
  __device__ __forceinline__ void advance() {
    if (++state_.stage == Config::NUM_STAGES) {
      state_.stage = 0;
      state_.phase ^= 1;
    }
    if (!Config::ARE_PAIRS && ++state_.d_outputs_stage == Config::NUM_D_O_STAGES) {
      state_.d_outputs_stage = 0;
      state_.d_outputs_phase ^= 1;
    }
  }

  // A block of one of this rank's tensors.
  __device__ __forceinline__ void load_rows(uint8_t* to, uint64_t* full, const CUtensorMap* map, int row,
                                            int head, int batch) const {
#pragma unroll
    for (int column = 0; column < Config::NUM_COLUMN_BLOCKS; ++column) {
      ptx::cp_async_bulk_tensor_4d_shared_global(to + column * Config::KEY_COLUMN_BYTES, map, full, column * 64,
                                                 row, head, batch);
    }
  }

  // A block of keys and values, which are there.
  __device__ __forceinline__ void load_keys(uint8_t* to, uint64_t* full, int step, int head, int run,
                                            int block) const {
    if (IsAlone<Params> || step == 0) {
      const int batch = head / params_.tiles.kv_heads;
      const int row = params_.tiles.slices.first_row(params_.comm.rank, run) + block * BLOCK_ROWS;
      const int of_batch = head - batch * params_.tiles.kv_heads;
      load_rows(to, full, key_map(params_, false), row, of_batch, batch);
      load_rows(to + Config::KEY_BYTES, full, key_map(params_, true), row, of_batch, batch);
    } else {
      const size_t offset = params_.panels.offset(slot_of(params_, step), head, run, block);
      ptx::cp_async_bulk_shared_global(to, launch_.area(params_.comm.rank, offset), Config::PAIR_BYTES, full);
    }
  }

  __device__ __forceinline__ void await_keys(int step, int head, int run, int block) {
    const int flag =
        params_.panels.flag(slot_of(params_, step), head, run, block / params_.panels.panel_blocks);
    if (flag == state_.last_flag) return;
    state_.last_flag = flag;
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
  ProducerState& state_;
  JointGradientStorage<Config>& attention_;
};

}  // namespace mk::ring_attention_backward
