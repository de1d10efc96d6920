// SPDX-License-Identifier: MIT
// Ring attention as one persistent kernel: some CTAs push this rank's keys and values to the peers that need
// them, head by head, and then compute like all others: tiles of queries, each over the keys of all ranks,
// which it takes as they arrive.
#pragma once

#include <utility>

#include "kernels/device/attention.cuh"
#include "kernels/device/rank_launch.cuh"
#include "kernels/ops/ring_attention/cuda_items.cuh"
#include "kernels/ops/ring_attention/cuda_packed_params.h"
#include "kernels/ops/ring_attention/cuda_params.h"
#include "kernels/ops/ring_attention/cuda_parts.cuh"
#include "kernels/ops/ring_attention/cuda_push.cuh"
#include "kernels/ptx/elect.cuh"
#include "kernels/ptx/grid_dependency.cuh"
#include "kernels/ptx/tma.cuh"

namespace mk::ring_attention {

// A tile on its way to the consumers, or a part of it.
struct TileWork {
  QueryTile tile;
  int num_blocks;
  PartPlace place;
  int first_sequence, last_sequence;  // of the queries, if they are packed
};

template <class Config, class Block_ = KeyBlock>
struct CudaStorage {
  using Block = Block_;
  AttentionStorage<Config> attention;
  ItemQueue items;
  TileWork tiles[NUM_ITEMS_AHEAD];
  Block blocks[Config::NUM_STAGES];  // whose keys the stages have
  // While a CTA pushes, its pieces pass through the room of keys and values.
  KeyPushStorage push;
};

template <class Config, class Block>
__device__ __forceinline__ void storage_init(CudaStorage<Config, Block>& smem) {
  attention_init(smem.attention);
  item_queue_init(smem.items, Config::NUM_CONSUMER_WARPS);
  key_push_init(smem.push);
  ptx::fence_mbarrier_init_release_cluster();
}

// Of packed sequences the same are in cuda_packed_kernel.cuh.
template <class Params>
__device__ __forceinline__ RingOrder key_order(const Params& params) {
  return {params.comm.rank};
}
template <class Params>
__device__ __forceinline__ const CUtensorMap* query_map(const Params& params) {
  return &params.map_q;
}
template <class Params>
__device__ __forceinline__ int num_items(const Params& params) {
  return params.items.num_items;
}
template <class Params>
__device__ __forceinline__ QueryItem item_at(const Params& params, int item) {
  return params.items.at(item);
}
// The blocks of which a tile's queries see something.
template <class Config, class Params, class Storage>
__device__ __forceinline__ auto key_walk(const Params& params, const Storage&, const QueryTile& tile) {
  const CudaSlices& slices = params.tiles.slices;
  return KeyBlockWalk(slices, key_order(params), Config::BLOCK_N,
                      visible_ends(slices, tile.position, tile.position + tile.num_rows - 1));
}
__device__ __forceinline__ int run_of(const KeyBlock& block) { return block.run; }
// Of a block of this rank's own keys.
template <class Config, class Params>
__device__ __forceinline__ int first_row_of(const Params& params, const KeyBlock& block) {
  return params.tiles.slices.first_row(params.comm.rank, block.run) + block.index * Config::BLOCK_N;
}

// ------------------------------------------------------------------ loading

// The producer, one thread: hands out tiles, finds out who sees what, and brings queries, keys and values. The
// consumers are told of tiles and blocks through shared memory.
template <class Config, class Params, class Storage>
class Producer {
 public:
  using Block = typename Storage::Block;

  __device__ Producer(const RankLaunch& launch, const Params& params, Storage& smem)
      : launch_(launch), params_(params), smem_(smem) {}

  __device__ __forceinline__ void run() {
    ptx::prefetch_tensormap(query_map(params_));
    ptx::prefetch_tensormap(key_map(params_, false));
    ptx::prefetch_tensormap(key_map(params_, true));
    const int end = num_items(params_);
    const Tracer tracer(params_.comm.trace, TRACE_LOAD);
    // Keys go one block ahead of values, whose product comes a block later: also from tile to tile.
    QueryTile tile_before;
    Block block_before;
    bool has_before = false;
    for (int item = first_item(); item < end;) {
      const QueryItem work = item_at(params_, item);
      const QueryTile tile = params_.tiles.at(work.tile);
      // The queries are on their way while it is found out what they see; unless that takes so long that it is
      // better not to wait for their room first.
      if constexpr (!IsPacked<Params>) load_queries(tile);
      auto walk = key_walk<Config>(params_, smem_, tile);
      int num_blocks = walk.count();
      if constexpr (!IsPacked<Params>) {
        if (work.num_parts > 1) {
          const int begin = part_begin(num_blocks, work.part, work.num_parts);
          num_blocks = part_begin(num_blocks, work.part + 1, work.num_parts) - begin;
          walk.skip(begin);
        }
      }
      put_item(smem_.items, cursor_, item,
               [&] { smem_.tiles[cursor_.slot] = work_of(work, tile, num_blocks, walk); });
      if constexpr (IsPacked<Params>) load_queries(tile);
      int next = num_blocks > 0 ? 0 : take();
      tracer.begin(TraceKind::load, item);
      Block block;
      for (int left = num_blocks; left > 0; --left) {
        // No earlier: items are handed out longest first, and who asks as it begins a long one is given
        // another.
        if (left == 1) next = take();
        walk.next(&block);
        load_keys(tile, block);
        if (has_before) load_values(tile_before, block_before);
        tile_before = tile;
        block_before = block;
        has_before = true;
      }
      tracer.end();
      item = next;
    }
    if (has_before) load_values(tile_before, block_before);
    put_item(smem_.items, cursor_, -1);
  }

 private:
  struct Slot {
    int index = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance(int num_slots) {
      if (++index == num_slots) {
        index = 0;
        phase ^= 1;
      }
    }
  };

  // One rank's CTAs begin alike, and each knows its first item without asking; but who joins parts must not
  // wait for a CTA that has not come yet.
  __device__ __forceinline__ bool is_dealt() const {
    if constexpr (IsAlone<Params>) {
      return params_.items.num_cuts == 0;
    } else {
      return false;
    }
  }
  __device__ __forceinline__ int first_item() const {
    return is_dealt() ? static_cast<int>(blockIdx.x) : take();
  }
  __device__ __forceinline__ int take() const {
    const int ticket = static_cast<int>(atomicAdd(&launch_.progress().gather_ticket, 1u));
    return is_dealt() ? static_cast<int>(gridDim.x) + ticket : ticket;
  }

  template <class Walk>
  static __device__ __forceinline__ TileWork work_of(const QueryItem& item, const QueryTile& tile,
                                                     int num_blocks, const Walk& walk) {
    TileWork work;
    work.tile = tile;
    work.num_blocks = num_blocks;
    work.place = place_of(item);
    if constexpr (IsPacked<Params>) {
      work.first_sequence = walk.tile().first_sequence;
      work.last_sequence = walk.tile().last_sequence;
    }
    return work;
  }
  __device__ __forceinline__ void load_queries(const QueryTile& tile) {
    AttentionStorage<Config>& smem = smem_.attention;
    uint64_t* const full = &smem.queries_full[queries_.index];
    wait_barrier(&smem.queries_empty[queries_.index], queries_.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, Config::QUERY_BYTES);
#pragma unroll
    for (int column = 0; column < Config::NUM_COLUMN_BLOCKS; ++column) {
      ptx::cp_async_bulk_tensor_4d_shared_global(
          smem.queries[queries_.index] + column * Config::QUERY_COLUMN_BYTES, query_map(params_), full,
          column * 64, tile.row, tile.head, tile.batch);
    }
    queries_.advance(NUM_QUERY_SLOTS);
  }

  __device__ __forceinline__ void load_keys(const QueryTile& tile, const Block& block) {
    if constexpr (!IsAlone<Params>) {
      if (block.step > 0) await_panel(tile, block);
    }
    AttentionStorage<Config>& smem = smem_.attention;
    wait_barrier(&smem.keys_empty[keys_.index], keys_.phase ^ 1);
    smem_.blocks[keys_.index] = block;
    load_part(tile, block, false, smem.keys[keys_.index], &smem.keys_full[keys_.index]);
    keys_.advance(Config::NUM_STAGES);
  }

  __device__ __forceinline__ void load_values(const QueryTile& tile, const Block& block) {
    AttentionStorage<Config>& smem = smem_.attention;
    wait_barrier(&smem.values_empty[values_.index], values_.phase ^ 1);
    load_part(tile, block, true, smem.values[values_.index], &smem.values_full[values_.index]);
    values_.advance(Config::NUM_STAGES);
  }

  __device__ __forceinline__ int head_of(const QueryTile& tile) const {
    return tile.batch * params_.tiles.kv_heads + tile.kv_head;
  }

  __device__ __forceinline__ void await_panel(const QueryTile& tile, const Block& block) {
    const auto& panels = params_.panels;
    const int panel = block.index / panels.panel_blocks;
    const int flag = panels.flag(slot_of(params_, block.step), head_of(tile), run_of(block), panel);
    if (flag == last_flag_) return;
    last_flag_ = flag;
    launch_.wait_flag(flag, DeviceRole::compute, DeviceObject::chunk, source_of(params_, block.step), flag);
    // TMA is another proxy than the loads that saw the flag.
    ptx::fence_proxy_async_global();
  }

  // A block's keys or values, to a stage that is free.
  __device__ __forceinline__ void load_part(const QueryTile& tile, const Block& block, bool value, uint8_t* to,
                                            uint64_t* full) {
    ptx::mbarrier_arrive_expect_tx(full, Config::KEY_BYTES);
    if (IsAlone<Params> || block.step == 0) {
      const int row = first_row_of<Config>(params_, block);
#pragma unroll
      for (int column = 0; column < Config::NUM_COLUMN_BLOCKS; ++column) {
        ptx::cp_async_bulk_tensor_4d_shared_global(to + column * Config::KEY_COLUMN_BYTES,
                                                   key_map(params_, value), full, column * 64, row,
                                                   tile.kv_head, tile.batch);
      }
    } else {
      const size_t offset =
          params_.panels.offset(slot_of(params_, block.step), head_of(tile), run_of(block), block.index) +
          (value ? Config::KEY_BYTES : 0);
      ptx::cp_async_bulk_shared_global(to, launch_.area(params_.comm.rank, offset), Config::KEY_BYTES, full);
    }
  }

  const RankLaunch& launch_;
  const Params& params_;
  Storage& smem_;
  ItemCursor cursor_;
  Slot queries_, keys_, values_;
  int last_flag_ = -1;
};

// ---------------------------------------------------------------- computing

// The first column of a thread: it has columns 8 j and 8 j + 1 from there on.
__device__ __forceinline__ int first_column_of_thread() { return threadIdx.x % 4 * 2; }

// Of a thread's two rows, hides what they do not see: hides(row, column), which counts from its first column.
template <int NUM_LOGITS, class Hides>
__device__ __forceinline__ void hide_columns(float (&logits)[NUM_LOGITS], Hides&& hides) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int i = 0; i < NUM_LOGITS; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (hides(row, i * 2 + j)) logits[i + 2 * row + j] = -INFINITY;
      }
    }
  }
}

// What a thread's two rows, `row_in_tile` and 8 further on, see.
template <class Params>
class KeyMask {
 public:
  __device__ KeyMask(const Params& params, int row_in_tile) : params_(params), row_in_tile_(row_in_tile) {}

  __device__ __forceinline__ void begin_tile(const TileWork& work) {
    const QueryTile& tile = work.tile;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // Rows behind the tile's last see what that one sees; nothing is stored for them.
      const int position = tile.position + least(row_in_tile_ + 8 * row, tile.num_rows - 1);
      end_[row] = params_.tiles.slices.visible_end(position);
    }
  }
  template <class Config, int NUM_LOGITS>
  __device__ __forceinline__ void hide(float (&logits)[NUM_LOGITS], const KeyBlock& block) {
    const int first = block.position + first_column_of_thread();
    const int to[2] = {least(end_[0], block.run_end) - first, least(end_[1], block.run_end) - first};
    hide_columns(logits, [&](int row, int column) { return column >= to[row]; });
  }

 private:
  const Params& params_;
  const int row_in_tile_;
  int end_[2];  // positions
};

template <class Params>
__device__ __forceinline__ KeyMask<Params> key_mask(const Params& params, int row_in_tile) {
  return {params, row_in_tile};
}

template <class Config, class Params>
__device__ __forceinline__ void store_tile(const Params& params, const QueryTile& tile, int row_in_tile,
                                           const float (&outputs)[Config::HEAD_DIM / 2],
                                           const SoftmaxRows& rows) {
  using Element = typename Config::Element;
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int at = row_in_tile + 8 * row;
    const bool is_row = at < tile.num_rows;
    // A query that sees nothing, or logits of -inf only, gets zeros.
    const bool is_none = rows.maximum[row] == -INFINITY;
    const float factor = 1.0f / rows.sum[row];
    std::byte* const to = params.o + tile.batch * params.o_batch_bytes + tile.head * params.o_head_bytes +
                          (int64_t{tile.row} + at) * params.o_row_bytes;
#pragma unroll
    for (int i = 0; i < Config::HEAD_DIM / 32; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int first = 4 * (4 * i + j) + 2 * row;
        words[j] = is_none ? 0 : pack_pair<Element>(outputs[first] * factor, outputs[first + 1] * factor);
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
          row_lse(rows.maximum[row], rows.sum[row], params.scale_log2);
    }
  }
}

// A consumer warpgroup's tiles, as AttentionConsumer wants them.
template <class Config, class Params, class Storage>
class ConsumerTiles {
 public:
  using Mask = decltype(key_mask(std::declval<const Params&>(), 0));

  __device__ __forceinline__ ConsumerTiles(const Params& params, Storage& smem, int warpgroup)
      : params_(params),
        smem_(smem),
        row_in_tile_(warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4),
        tracer_(params.comm.trace, TRACE_COMPUTE + warpgroup),
        mask_(key_mask(params, row_in_tile_)) {}

  // Numbers that all threads have alike go through a shuffle: so the compiler knows it, too, and keeps what
  // depends on them in uniform registers, stages and descriptors above all.
  __device__ __forceinline__ int next() {
    const bool is_first = item_ < 0;
    tile_before_ = tile_;
    item_before_ = item_;
    place_before_ = place_;
    item_ = __shfl_sync(~0u, await_item(smem_.items, cursor_), 0);
    const TileWork work = smem_.tiles[cursor_.slot];
    release_item(smem_.items, cursor_);
    if (item_ < 0) return 0;
    tile_ = work.tile;
    place_ = work.place;
    mask_.begin_tile(work);
    if (is_first) tracer_.begin(TraceKind::compute, item_);
    return __shfl_sync(~0u, work.num_blocks, 0);
  }
  __device__ __forceinline__ auto block(int stage) const { return smem_.blocks[stage]; }
  template <int NUM_LOGITS>
  __device__ __forceinline__ void mask(float (&logits)[NUM_LOGITS], const typename Storage::Block& block) {
    mask_.template hide<Config>(logits, block);
  }
  template <int NUM_OUTPUTS>
  __device__ __forceinline__ void store(const float (&outputs)[NUM_OUTPUTS], const SoftmaxRows& rows) const {
    tracer_.end();
    tracer_.begin(TraceKind::store, item_before_);
    if (place_before_.is_part()) {
      store_part<Config>(params_.comm, place_before_, row_in_tile_, outputs, rows);
    } else {
      store_tile<Config>(params_, tile_before_, row_in_tile_, outputs, rows);
    }
    tracer_.end();
    if (item_ >= 0) tracer_.begin(TraceKind::compute, item_);
  }

 private:
  const Params& params_;
  Storage& smem_;
  const int row_in_tile_;
  const Tracer tracer_;
  Mask mask_;
  ItemCursor cursor_;
  int item_ = -1, item_before_ = -1;
  QueryTile tile_{}, tile_before_{};
  PartPlace place_, place_before_;
};

// What the producer's warpgroup gives back of its registers, the consumers get.
template <class Config, bool IS_PACKED>
struct CudaRegisters {
  static constexpr bool HAS_THREE = Config::NUM_CONSUMER_WARPGROUPS == 3;
  // Of packed sequences it has more to keep: with 72 it spills.
  static constexpr int PRODUCER = HAS_THREE ? 32 : IS_PACKED ? 88 : 72;
  static constexpr int CONSUMER = HAS_THREE ? 160 : IS_PACKED ? 208 : 216;
  static_assert(128 * (PRODUCER + Config::NUM_CONSUMER_WARPGROUPS * CONSUMER) <= 65536);
};

// One of `num_ctas` CTAs that compute, the last of which push before. greet(): by a warp of the first one.
template <class Config, class Params, class Storage, class Greet>
__device__ __forceinline__ void run_compute_cta(const RankLaunch& launch, const Params& params, Storage& smem,
                                                int num_ctas, Greet&& greet) {
  using Registers = CudaRegisters<Config, IsPacked<Params>>;
  if (threadIdx.x == 0) storage_init(smem);
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == Config::NUM_CONSUMER_WARPGROUPS) {
    ptx::setmaxnreg_dec<Registers::PRODUCER>();
    const int warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
    const int push_cta = static_cast<int>(blockIdx.x) - (num_ctas - params.num_push_ctas);
    if (warp > 0) {
      if constexpr (!IsAlone<Params>) {
        if (push_cta >= 0) {
          push_keys<Config>(launch, params, smem.push, smem.attention.keys[0], warp - 1, push_cta);
        }
      }
      if (blockIdx.x == 0 && warp == 3) greet();
    } else {
      if constexpr (!IsAlone<Params>) {
        if (push_cta >= 0) signal_keys<Config>(launch, params, smem.push);
      }
      if (ptx::elect_one()) Producer<Config, Params, Storage>(launch, params, smem).run();
      __syncwarp();
    }
  } else {
    ptx::setmaxnreg_inc<Registers::CONSUMER>();
    ConsumerTiles<Config, Params, Storage> tiles(params, smem, warpgroup);
    AttentionConsumer<Config>(smem.attention, warpgroup, params.scale_log2, params.negate).run(tiles);
    if constexpr (!IsPacked<Params>) {
      const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
      join_tiles<Config>(params, warp, num_ctas);
    }
  }
}

// `Params`: CudaParams or AloneParams.
template <class Config, class Params>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    ring_attention_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  CudaStorage<Config>& smem = *reinterpret_cast<CudaStorage<Config>*>(smem_bytes);
  ptx::await_previous_grid();
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
  int block_m;
  int block_n;
};
// Of each of CUDA_TILES.
template <class Params>
struct CudaTableOf {
  CudaKernelOf<Params> entries[NUM_CUDA_TILES];
};
using CudaTable = CudaTableOf<CudaParams>;
const CudaTable& cuda_kernels_bf16();
const CudaTable& cuda_kernels_fp16();
using AloneTable = CudaTableOf<AloneParams>;
const AloneTable& cuda_alone_kernels_bf16();
const AloneTable& cuda_alone_kernels_fp16();

template <class Config, class Params>
constexpr CudaKernelOf<Params> cuda_kernel_entry(void (*kernel)(Params), size_t smem_bytes) {
  static_assert(sizeof(CudaStorage<Config>) <= 227 * 1024);
  static_assert(KEY_PUSH_BYTES<Config> <= 2 * Config::NUM_STAGES * Config::KEY_BYTES);
  return {kernel,           Config::NUM_THREADS, static_cast<int>(smem_bytes),
          Config::HEAD_DIM, Config::BLOCK_M,     Config::BLOCK_N};
}

template <class Config, class Params>
constexpr CudaKernelOf<Params> cuda_kernel_entry() {
  return cuda_kernel_entry<Config>(ring_attention_kernel<Config, Params>, sizeof(CudaStorage<Config>));
}

template <int TILE, class Element>
struct ConfigOf : AttentionConfig<CUDA_TILES[TILE].head_dim, CUDA_TILES[TILE].block_m, CUDA_TILES[TILE].block_n,
                                  CUDA_TILES[TILE].num_stages, Element> {};

template <class Element, class Params>
const CudaTableOf<Params>& cuda_kernel_table() {
  static const CudaTableOf<Params> table{{cuda_kernel_entry<ConfigOf<0, Element>, Params>(),
                                          cuda_kernel_entry<ConfigOf<1, Element>, Params>(),
                                          cuda_kernel_entry<ConfigOf<2, Element>, Params>()}};
  return table;
}

}  // namespace mk::ring_attention
