// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter and GEMM+AllReduce on GPUs of several nodes, as one persistent kernel. Products and pushes
// are as in cuda_kernel.cuh, but that partial tiles go to the rank that sums them in this node. Those of this
// rank's own rows are summed in the epilogue with what has come from its node and from the others: last of all,
// or, since what an all-reduce has finished goes on, in turn with those of the other ranks of the node. A few
// CTAs sum those for owners elsewhere, where there is anything to sum: a rank that is alone in its node leaves
// its partial tiles where they are put from. One CTA has the network: it puts the sums for owners elsewhere,
// and tells of those that have come for this rank. All-reduce: finished tiles go on, chunk by chunk, to the
// ranks of the node and to the rail peers, who forward them, and every rank brings them to its C.
#pragma once

#include "kernels/device/arrival_window.h"
#include "kernels/device/network_launch.cuh"
#include "kernels/ops/gemm_reduce_scatter/cuda_kernel.cuh"

namespace mk::gemm_reduce_scatter {

using NetworkTable = RankGemmTable<NetworkParams>;
const NetworkTable& cuda_network_kernels_bf16();
const NetworkTable& cuda_network_kernels_fp16();

constexpr int NUM_NETWORK_CTAS = 1;

__device__ __forceinline__ int owner_at(const NetworkParams& params, int position) {
  return params.reducers.owner_at[position];
}

// A CTA's tiles.
__device__ __forceinline__ OwnerTileCursor<NetworkTiles> tile_cursor(const NetworkParams& params) {
  return {params.network_tiles, params.tiles.num_k_steps, static_cast<int>(blockIdx.x),
          params.tiles.num_workers};
}

template <class Config>
__device__ __forceinline__ bool next_tile(const NetworkParams& params, OwnerTileCursor<NetworkTiles>& tiles,
                                          TileWork* work) {
  return tiles.next(work, [&](const OwnerTile& tile) {
    return tile.row * Config::BLOCK_M < rows_of(params, owner_at(params, tile.position));
  });
}

// A tile's number among its owner's, by which flags are counted.
__device__ __forceinline__ int tile_index(const NetworkParams& params, const TileWork& work,
                                          const RankTile& tile) {
  return tile.index * params.tiles.num_n_tiles + work.n_tile;
}

__device__ __forceinline__ bool is_alone(const NetworkParams& params) {
  return params.comm.order.num_local == 1;
}

template <class Config>
__device__ __forceinline__ int64_t slab_offset_of(const NetworkParams& params, int slab) {
  return int64_t{slab} * slab_bytes<Config::BLOCK_N>(element_bytes_of(params.comm_type));
}

// Slabs of an owner's row of tiles that hold rows.
template <class Config>
__device__ __forceinline__ int num_slabs_of(const NetworkParams& params, int owner, int m_tile) {
  const int rows = min(Config::BLOCK_M, rows_of(params, owner) - m_tile * Config::BLOCK_M);
  return max(0, (rows + 15) / 16);
}

// For reports: a rank of this node by its number there, and the one of another node that this rank deals with.
__device__ __forceinline__ int rank_of_local(const NetworkParams& params, int local) {
  const int num_local = params.comm.order.num_local;
  return params.comm.order.rank_at[(local - params.reducers.local_rank + num_local) % num_local];
}
__device__ __forceinline__ int rail_peer_of(const NetworkParams& params, int node) {
  const int own_node = params.reducers.node[params.comm.rank];
  return params.comm.order
      .rail_peers[(node - own_node + params.network.num_nodes) % params.network.num_nodes - 1];
}

// Waits with a lane for each of `count` flags; -1: for none.
template <class FlagOf, class PeerOf>
__device__ __forceinline__ bool wait_flags(const RankLaunch& launch, int count, int index, FlagOf&& flag_of,
                                           PeerOf&& peer_of) {
  const int lane = threadIdx.x % 32;
  const int flag = lane < count ? flag_of(lane) : -1;
  const bool waits = flag >= 0;
  return launch.wait_flags(waits, waits ? flag : 0, DeviceRole::reduce, DeviceObject::partial,
                           waits ? peer_of(lane) : 0, index);
}

// Has a flag of this rank's been raised? Then what it tells of is visible to the lane.
__device__ __forceinline__ bool has_flag(const RankLaunch& launch, const NetworkParams& params, int index) {
  const uint64_t* const word = launch.flag(params.comm.rank, index);
  if (ptx::ld_relaxed_sys(word) < launch.epoch()) return false;
  ptx::ld_acquire_sys(word);
  return true;
}

// Waits for what comes by way of the network: most warps of the GPU do, for as long as that takes, for the same
// few words. They look seldom, so that the L2 has time for others. By a whole warp, of which each lane that
// `waits` has a flag of its own; peer_of(lane) is who is to blame.
template <class PeerOf>
__device__ __forceinline__ bool wait_for_network(const RankLaunch& launch, const NetworkParams& params,
                                                 bool waits, int flag, DeviceRole role, DeviceObject object,
                                                 int index, PeerOf&& peer_of) {
  constexpr uint32_t PAUSE_NS = 800;
  bool has_come = true;
  if (waits && !has_flag(launch, params, flag)) {
    const int peer = peer_of(threadIdx.x % 32);
    const Tracer tracer(params.comm.trace, trace_track());
    const uint64_t start = tracer.now();
    Patience patience(launch, NETWORK_POLL_PAUSE_NS);
    do {
      __nanosleep(PAUSE_NS);
      has_come = has_flag(launch, params, flag);
    } while (!has_come && patience.goes_on({role, object, peer, static_cast<uint64_t>(index),
                                            launch.epoch() - 1, launch.epoch()}));
    tracer.record(TraceKind::wait, start, static_cast<uint32_t>(index), peer);
  }
  has_come = !__any_sync(~0u, !has_come);
  __syncwarp();  // what each lane has acquired holds for all
  return has_come;
}

// Until this node's partials of a tile are here.
__device__ __forceinline__ bool wait_node(const RankLaunch& launch, const NetworkParams& params, int reduction,
                                          int tile) {
  return wait_flags(
      launch, params.comm.order.num_local, tile,
      [&](int local) { return params.network.partial_flag(reduction, local, tile); },
      [&](int local) { return rank_of_local(params, local); });
}

__device__ __forceinline__ bool reduces_all(const NetworkParams& params) {
  return params.reduction == Reduction::two_shot;
}

// Where rows of this rank's own go: to C, or, to be distributed, to a tile that lies by itself.
template <class Config>
__device__ __forceinline__ EpilogueParams own_output(const RankLaunch& launch, const NetworkParams& params,
                                                     int m_tile, int n_tile) {
  EpilogueParams output = params.output;
  if (!reduces_all(params)) return output;
  const int rank = params.comm.rank;
  // As if the tile were part of a matrix, as which it is addressed.
  const int64_t before = int64_t{m_tile} * Config::BLOCK_M * Config::BLOCK_N + n_tile * Config::BLOCK_N;
  output.c = launch.area(rank, params.network.finished_offset(rank, m_tile, n_tile)) -
             before * element_bytes_of(output.out_type);
  output.ldc = Config::BLOCK_N;
  output.accumulate = false;
  output.rows_aligned = true;
  return output;
}

// 16 rows of this rank's own: the node's sum, rounded once, and then all nodes' sums.
template <class Config>
__device__ __forceinline__ void finish_own_slab(const RankLaunch& launch, const NetworkParams& params,
                                                EpilogueBuffers<1>& buffers, const TileWork& work, int m_tile,
                                                int slab, const float (&accumulators)[Config::BLOCK_N / 2]) {
  const NetworkSchedule& schedule = params.network;
  const int rank = params.comm.rank;
  const int node = params.reducers.node[rank];
  const int local_rank = params.reducers.local_rank;
  const int64_t place = schedule.tile_offset(m_tile, work.n_tile) + slab_offset_of<Config>(params, slab);
  store_slab(accumulators, params.comm_type,
             launch.area(rank, schedule.own_offset(is_alone(params), node, local_rank) + place));
  if (!is_alone(params)) {
    const int tile = m_tile * schedule.num_n_tiles() + work.n_tile;
    if (!wait_flags(
            launch, params.comm.order.num_local, tile,
            [&](int local) { return local == local_rank ? -1 : schedule.partial_flag(0, local, tile); },
            [&](int local) { return rank_of_local(params, local); }))
      return;
    // A lane reads back what it has written.
    sum_slab<Config::BLOCK_N>({launch.area(rank, schedule.partial_offset(0, 0) + place), schedule.slot_bytes(),
                               params.comm.order.num_local},
                              params.comm_type, launch.area(rank, schedule.sum_offset(node) + place));
  }
  const int chunk = schedule.sums.of_tile(m_tile, work.n_tile);
  const int lane = threadIdx.x % 32;
  if (!wait_for_network(launch, params, lane < schedule.num_nodes && lane != node,
                        schedule.arrived_flag(lane, chunk), DeviceRole::reduce, DeviceObject::partial, chunk,
                        [&](int other) { return rail_peer_of(params, other); }))
    return;
  const Tracer tracer(params.comm.trace, TRACE_COMPUTE + threadIdx.x / 128);
  const uint64_t start = tracer.now();
  finish_slab<Config::BLOCK_N>(
      {launch.area(rank, schedule.sum_offset(0) + place), schedule.slot_bytes(), schedule.num_nodes},
      params.comm_type, own_output<Config>(launch, params, m_tile, work.n_tile), false, buffers,
      m_tile * Config::BLOCK_M + slab * 16, rows_of(params, rank), work.n_tile * Config::BLOCK_N);
  tracer.record(TraceKind::reduce, start, trace_tile(work));
}

// 64 rows of a finished product: this rank's own are summed, those that it sums for others go where it does,
// and the rest to the staging memory, whence they are pushed.
template <class Config>
__device__ __forceinline__ void finish_network_block(const RankLaunch& launch, const NetworkParams& params,
                                                     RankGemmStorage<Config>& smem, const TileWork& work,
                                                     int block,
                                                     const float (&accumulators)[Config::BLOCK_N / 2]) {
  const NetworkSchedule& schedule = params.network;
  const int rank = params.comm.rank;
  const RankTile place = params.order.place(work);
  const int owner = owner_at(params, place.position);
  const int slab = block * 4 + threadIdx.x / 32 % 4;
  const bool has_rows = slab < num_slabs_of<Config>(params, owner, place.index);
  if (owner == rank) {
    if (reduces_all(params)) wait_staging(smem, work.ordinal);
    if (has_rows) {
      finish_own_slab<Config>(launch, params, smem.epilogue[threadIdx.x / 32], work, place.index, slab,
                              accumulators);
    }
    if (reduces_all(params)) pass_to_push_warps(smem, work.ordinal);
    return;
  }
  wait_staging(smem, work.ordinal);
  if (has_rows) {
    std::byte* const tile = params.reducers.reducer[owner] == rank
                                ? launch.area(rank, schedule.partial_offset(params.reducers.reduction[owner],
                                                                            params.reducers.local_rank) +
                                                        schedule.tile_offset(place.index, work.n_tile))
                                : staged_tile<Config>(params, work.ordinal % NUM_STAGED_TILES);
    store_slab(accumulators, params.comm_type, tile + slab_offset_of<Config>(params, slab));
  }
  pass_to_push_warps(smem, work.ordinal);
}

// Counts one of the `expected` ones that a chunk's flag waits for, by a lane that has seen it done. True: it
// was the last.
__device__ __forceinline__ bool count_towards(const NetworkParams& params, int flag, int expected) {
  uint32_t* const count = &params.comm.state->counts[flag];
  if (ptx::atom_acq_rel_gpu_add(count, 1) + 1 != static_cast<uint32_t>(expected)) return false;
  ptx::st_relaxed_gpu(count, 0);
  return true;
}

// Tells the ranks of this node, from the `first_step`-th on (0: this one), of a finished chunk; after a fence.
__device__ __forceinline__ void tell_finished(const RankLaunch& launch, const NetworkParams& params, int owner,
                                              int chunk, int first_step) {
  for (int step = first_step; step < params.comm.order.num_local; ++step) {
    launch.raise_flag_relaxed(params.comm.order.rank_at[step], params.network.finished_flag(owner, chunk));
  }
}

// A partial tile has gone where it is wanted, or a finished one to the whole node: by a lane that has seen it.
__device__ __forceinline__ void tell_of_tile(const RankLaunch& launch, const NetworkParams& params, int owner,
                                             const RankTile& place, const TileWork& work) {
  const NetworkSchedule& schedule = params.network;
  const int rank = params.comm.rank;
  const int reduction = params.reducers.reduction[owner];
  if (owner == rank) {
    const int chunk = schedule.finished.of_tile(place.index, work.n_tile);
    const int num_tiles = schedule.finished.at(chunk).num_tiles;
    if (!count_towards(params, schedule.finished_flag(rank, chunk), num_tiles)) return;
    ptx::fence_acq_rel_sys();
    tell_finished(launch, params, rank, chunk, 0);
  } else if (is_alone(params)) {
    const int chunk = schedule.sums.of_tile(place.index, work.n_tile);
    const int flag = schedule.summed_flag(reduction, chunk);
    if (count_towards(params, flag, schedule.sums.at(chunk).num_tiles)) launch.raise_flag(rank, flag);
  } else {
    launch.raise_flag(
        params.reducers.reducer[owner],
        schedule.partial_flag(reduction, params.reducers.local_rank, tile_index(params, work, place)));
  }
}

// Bytes of finished tiles, at the same place at every rank, from here to the rest of the node; `warp` of
// `num_warps` that share them.
template <class Push>
__device__ __forceinline__ void push_finished_bytes(const RankLaunch& launch, const NetworkParams& params,
                                                    Push& push, int64_t offset, int num_bytes, int warp,
                                                    int num_warps) {
  const RankOrder& order = params.comm.order;
  int next_begin = warp * Push::PIECE_BYTES;
  push.template move<PartialPiece>(
      [&](PartialPiece* piece) {
        piece->begin = next_begin;
        next_begin += num_warps * Push::PIECE_BYTES;
        return piece->begin < num_bytes;
      },
      [&](const PartialPiece& piece, uint8_t* buffer, uint64_t* loaded) {
        if (threadIdx.x % 32 != 0) return;
        const int bytes = min(Push::PIECE_BYTES, num_bytes - piece.begin);
        ptx::mbarrier_arrive_expect_tx(loaded, bytes);
        ptx::cp_async_bulk_shared_global(buffer, launch.area(params.comm.rank, offset + piece.begin), bytes,
                                         loaded);
      },
      [&](const PartialPiece& piece, const uint8_t* buffer) {
        if (threadIdx.x % 32 != 0) return;
        const int bytes = min(Push::PIECE_BYTES, num_bytes - piece.begin);
#pragma unroll 1
        for (int step = 1; step < order.num_local; ++step) {
          ptx::cp_async_bulk_global_shared(launch.area(order.rank_at[step], offset + piece.begin), buffer,
                                           bytes);
        }
        ptx::cp_async_bulk_commit_group();
      });
}

// Both push warps of a CTA: each partial tile to the rank that sums it in this node, and each finished one to
// the whole node. Of those that are where they should be, the first warp says so.
template <class Config>
__device__ __forceinline__ void push_to_node(const RankLaunch& launch, const NetworkParams& params,
                                             RankGemmStorage<Config>& smem, int warp) {
  const NetworkSchedule& schedule = params.network;
  const int rank = params.comm.rank;
  const int lane = threadIdx.x % 32;
  BulkPush push(smem.push, warp);
  auto tiles = tile_cursor(params);
  TileWork work;
  while (next_tile<Config>(params, tiles, &work)) {
    const RankTile place = params.order.place(work);
    const int owner = owner_at(params, place.position);
    if (owner == rank && !reduces_all(params)) return;  // a reduce-scatter's own tiles are the last
    const int reducer = params.reducers.reducer[owner];
    const bool is_pushed = owner == rank ? !is_alone(params) : reducer != rank;
    const int num_rows = min(Config::BLOCK_M, rows_of(params, owner) - place.index * Config::BLOCK_M);
    const int slot = work.ordinal % NUM_STAGED_TILES;
    mbarrier_wait(&smem.staged_full[slot], work.ordinal / NUM_STAGED_TILES % 2);
    __syncwarp();  // as inside a node
    const Tracer tracer(params.comm.trace, TRACE_COPY + warp);
    tracer.begin(TraceKind::copy, trace_tile(work), owner);
    if (owner == rank && is_pushed) {
      const int out_slab_bytes = slab_bytes<Config::BLOCK_N>(element_bytes_of(params.output.out_type));
      push_finished_bytes(launch, params, push, schedule.finished_offset(rank, place.index, work.n_tile),
                          (num_rows + 15) / 16 * out_slab_bytes, warp, NUM_PUSH_WARPS);
    } else if (is_pushed) {
      push_partial<Config>(params, push, warp, work,
                           launch.area(reducer, schedule.partial_offset(params.reducers.reduction[owner],
                                                                        params.reducers.local_rank) +
                                                    schedule.tile_offset(place.index, work.n_tile)),
                           num_rows);
    }
    if (lane == 0) ptx::mbarrier_arrive(&smem.staged_empty[slot]);
    if (is_pushed) {
      push.template complete<0>();
      ptx::barrier_sync(PUSH_BARRIER, NUM_PUSH_WARPS * 32);
    }
    tracer.end();
    if (warp == 0 && lane == 0) tell_of_tile(launch, params, owner, place, work);
    __syncwarp();
  }
}

// A part of a unit of sums, small enough for all local ranks' to lie in a buffer side by side.
struct SumPiece {
  int begin;  // bytes of the tile
  int num_bytes;
};

// Adds what lies in a buffer, `pitch` bytes from source to source, in their order, and leaves the sum in the
// first one's place. Sizes and pitches are multiples of 16 bytes.
template <class T>
__device__ __forceinline__ void sum_buffer(uint8_t* buffer, int num_bytes, int pitch, int num_sources) {
  constexpr int NUM = PartialChunk<T>::NUM;
#pragma unroll 2
  for (int at = threadIdx.x % 32 * 16; at < num_bytes; at += 512) {
    float sums[NUM];
#pragma unroll
    for (int i = 0; i < NUM; ++i) sums[i] = 0.0f;
    for (int source = 0; source < num_sources; ++source) {
      PartialChunk<T>::add(sums, *reinterpret_cast<const uint4*>(buffer + source * pitch + at));
    }
    *reinterpret_cast<uint4*>(buffer + at) = PartialChunk<T>::pack(sums);
  }
}

__device__ __forceinline__ void sum_buffer(GemmType type, uint8_t* buffer, int num_bytes, int pitch,
                                           int num_sources) {
  if (type == GemmType::bf16) {
    sum_buffer<__nv_bfloat16>(buffer, num_bytes, pitch, num_sources);
  } else if (type == GemmType::fp16) {
    sum_buffer<__half>(buffer, num_bytes, pitch, num_sources);
  } else {
    sum_buffer<float>(buffer, num_bytes, pitch, num_sources);
  }
}

// Bytes of a tile of an owner's that hold rows.
template <class Config>
__device__ __forceinline__ int tile_bytes_of(const NetworkParams& params, int owner, int m_tile) {
  return static_cast<int>(slab_offset_of<Config>(params, num_slabs_of<Config>(params, owner, m_tile)));
}

// A unit's partials, which are here, through shared memory to the place that their sum is put from.
template <class Storage>
__device__ __forceinline__ void sum_partials(const RankLaunch& launch, const NetworkParams& params,
                                             BulkPush<Storage>& push, const SumUnit& unit, int num_bytes) {
  const NetworkSchedule& schedule = params.network;
  const int rank = params.comm.rank;
  const int lane = threadIdx.x % 32;
  const int num_local = params.comm.order.num_local;
  const int reduction = 1 + unit.tile.turn;
  const int64_t tile = schedule.tile_offset(unit.tile.m_tile, unit.tile.n_tile);
  static_assert(Storage::PIECE_BYTES / MAX_GPU_RANKS >= 128);
  const int pitch = Storage::PIECE_BYTES / num_local / 128 * 128;
  const int end = unit.begin + num_bytes;
  int next_begin = unit.begin;
  push.template move<SumPiece>(
      [&](SumPiece* piece) {
        *piece = {next_begin, min(pitch, end - next_begin)};
        next_begin += pitch;
        return piece->num_bytes > 0;
      },
      [&](const SumPiece& piece, uint8_t* buffer, uint64_t* loaded) {
        if (lane == 0) ptx::mbarrier_arrive_expect_tx(loaded, num_local * piece.num_bytes);
        __syncwarp();
        if (lane >= num_local) return;
        ptx::cp_async_bulk_shared_global(
            buffer + lane * pitch,
            launch.area(rank, schedule.partial_offset(reduction, lane) + tile + piece.begin), piece.num_bytes,
            loaded);
      },
      [&](const SumPiece& piece, uint8_t* buffer) {
        sum_buffer(params.comm_type, buffer, piece.num_bytes, pitch, num_local);
        ptx::fence_proxy_async_shared_cta();
        __syncwarp();
        if (lane != 0) return;
        ptx::cp_async_bulk_global_shared(
            launch.area(rank, schedule.send_offset(reduction) + tile + piece.begin), buffer, piece.num_bytes);
        ptx::cp_async_bulk_commit_group();
      });
  push.template complete<0>();
}

// What a warp of a CTA that sums tells the one that signals: of a chunk of a rank relayed.
struct ChunkNote {
  static constexpr int FINISHED_SHIFT = 63;
  uint64_t bits;
  __device__ static uint64_t make(bool is_finished, int relayed, int chunk) {
    return static_cast<uint64_t>(is_finished) << FINISHED_SHIFT | static_cast<uint64_t>(relayed) << 32 |
           static_cast<uint32_t>(chunk);
  }
  __device__ bool is_finished() const { return bits >> FINISHED_SHIFT != 0; }
  __device__ int relayed() const { return static_cast<int>(bits >> 32 & 0xff); }
  __device__ int chunk() const { return static_cast<int>(bits & 0xffffffff); }
};

// Sums for an owner elsewhere; false: the launch is to end. Waits for ranks of this node alone.
template <class Config, class Storage, class Done>
__device__ __forceinline__ bool sum_for_other(const RankLaunch& launch, const NetworkParams& params,
                                              BulkPush<Storage>& push, const SumUnit& unit, Done&& done) {
  const ChunkTile& tile = unit.tile;
  const int owner = params.comm.order.relayed[tile.turn];
  const int num_bytes =
      min(NetworkSchedule::SUM_UNIT_BYTES, tile_bytes_of<Config>(params, owner, tile.m_tile) - unit.begin);
  if (!tile.is_there || num_bytes <= 0) return true;
  if (!wait_node(launch, params, 1 + tile.turn, tile.m_tile * params.network.num_n_tiles() + tile.n_tile))
    return false;
  // The copy engine is another proxy than the loads that saw the flags.
  ptx::fence_proxy_async_global();
  __syncwarp();
  sum_partials(launch, params, push, unit, num_bytes);
  done(ChunkNote::make(false, tile.turn, tile.chunk));
  return true;
}

// Forwards a part of a finished chunk that has come from elsewhere; false: the launch is to end.
template <class Config, class Storage, class Done>
__device__ __forceinline__ bool forward_finished(const RankLaunch& launch, const NetworkParams& params,
                                                 BulkPush<Storage>& push, const FinishedUnit& unit,
                                                 Done&& done) {
  const int owner = params.comm.order.relayed[unit.turn];
  const TileChunk chunk = params.network.finished.at(unit.chunk);
  if (unit.num_bytes == 0 || num_slabs_of<Config>(params, owner, chunk.m_tile) == 0) return true;
  bool is_here = true;
  if (threadIdx.x % 32 == 0) {
    is_here = launch.wait_flag(params.network.finished_flag(owner, unit.chunk), DeviceRole::copy,
                               DeviceObject::reduced_tile, owner, unit.chunk);
  }
  if (!__shfl_sync(~0u, static_cast<int>(is_here), 0)) return false;
  __syncwarp();
  ptx::fence_proxy_async_global();
  __syncwarp();
  push_finished_bytes(launch, params, push,
                      params.network.finished_offset(owner, chunk.m_tile, chunk.first_n_tile) + unit.begin,
                      unit.num_bytes, 0, 1);
  push.template complete<0>();
  done(ChunkNote::make(true, unit.turn, unit.chunk));
  return true;
}

// A warp of a CTA that sums: units one by one, all sums before anything that is forwarded. It waits with
// nothing of its own under way, so it owes nobody anything.
template <class Config, class Storage, class Done>
__device__ __forceinline__ void sum_and_forward(const RankLaunch& launch, const NetworkParams& params,
                                                Storage& storage, int warp, Done&& done) {
  const NetworkSchedule& schedule = params.network;
  const int num_relayed = params.comm.order.num_relayed;
  BulkPush<Storage> push(storage, warp);
  const int num_sums = schedule.num_sum_units(num_relayed);
  const int num_units = num_sums + schedule.num_finished_units(num_relayed);
  const auto take_ticket = [&] {
    return threadIdx.x % 32 == 0 ? static_cast<int>(atomicAdd(&launch.progress().gather_ticket, 1u)) : 0;
  };
  int ticket = take_ticket();  // ahead of its use, which then need not wait for it
  while (true) {
    const int number = __shfl_sync(~0u, ticket, 0);
    if (number >= num_units) return;
    ticket = take_ticket();
    const bool goes_on =
        number < num_sums
            ? sum_for_other<Config>(launch, params, push, schedule.sum_unit(number, num_relayed), done)
            : forward_finished<Config>(launch, params, push,
                                       schedule.finished_unit(number - num_sums, num_relayed), done);
    if (!goes_on) return;
  }
}

// A CTA that sums: all of its warps, but the last, which signals.
template <class Config>
__device__ __forceinline__ void run_reduce_cta(const RankLaunch& launch, const NetworkParams& params,
                                               uint8_t* smem_bytes) {
  using Storage = PushCtaStorage<Config::NUM_THREADS>;
  static_assert(sizeof(Storage) <= sizeof(RankGemmStorage<Config>));
  Storage& storage = *reinterpret_cast<Storage*>(smem_bytes);
  push_cta_init(storage);
  const int warp = threadIdx.x / 32;
  if (warp < Storage::NUM_WARPS) {
    PushNotes notes(storage.signals, warp);
    sum_and_forward<Config>(launch, params, storage.push, warp, [&](uint64_t note) { notes.add(note); });
    notes.end();
    return;
  }
  const NetworkSchedule& schedule = params.network;
  const auto owner_of = [&](const ChunkNote& note) { return params.comm.order.relayed[note.relayed()]; };
  const auto flag_of = [&](const ChunkNote& note) {
    return note.is_finished() ? schedule.finished_flag(owner_of(note), note.chunk())
                              : schedule.summed_flag(1 + note.relayed(), note.chunk());
  };
  send_signals(
      storage.signals,
      [&](uint64_t bits, uint32_t* expected) {
        const ChunkNote note{bits};
        if (note.is_finished()) {
          *expected = schedule.finished_units(schedule.finished_chunk_bytes(note.chunk()));
        } else {
          const int m_tile = schedule.sums.at(note.chunk()).m_tile;
          *expected =
              schedule.units_of_chunk(note.chunk(), tile_bytes_of<Config>(params, owner_of(note), m_tile));
        }
        return &params.comm.state->counts[flag_of(note)];
      },
      [&](uint64_t bits) {
        const ChunkNote note{bits};
        if (note.is_finished()) {
          tell_finished(launch, params, owner_of(note), note.chunk(), 1);
        } else {
          launch.raise_flag_relaxed(params.comm.rank, flag_of(note));
        }
      });
}

// Puts each chunk's sum to its owner elsewhere, once all of it is there: in about the order in which they
// become complete, without any that is late holding up those behind it.
template <class Config>
__device__ __forceinline__ void send_sums(const RankLaunch& launch, const NetworkLaunch& network,
                                          const NetworkParams& params) {
  const NetworkSchedule& schedule = params.network;
  const RankOrder& order = params.comm.order;
  const int lane = threadIdx.x % 32;
  const int node = params.reducers.node[params.comm.rank];
  const int num_puts = order.num_relayed * schedule.sums.size();
  ArrivalWindow window;
  Patience patience(launch, NETWORK_POLL_PAUSE_NS);
  while (window.first < num_puts) {
    const int idx = window.first + lane;
    const int number = idx / order.num_relayed;
    const int relayed = idx - number * order.num_relayed;
    const int owner = order.relayed[relayed];
    TileChunk chunk{};
    bool is_sent = false, is_due = false;
    if (idx < num_puts && window.is_missing(lane)) {
      chunk = schedule.sums.at(number);
      is_sent = num_slabs_of<Config>(params, owner, chunk.m_tile) > 0;
      is_due = !is_sent || has_flag(launch, params, schedule.summed_flag(1 + relayed, number));
    }
    const uint32_t fresh = __ballot_sync(~0u, is_due);
    if (fresh != 0) {
      const int64_t place = schedule.tile_offset(chunk.m_tile, chunk.first_n_tile);
      if (!network.put(is_due && is_sent, owner,
                       network.area_address(schedule.put_offset(is_alone(params), 1 + relayed) + place),
                       network.area_address(schedule.sum_offset(node) + place),
                       static_cast<uint32_t>(chunk.num_tiles * schedule.tile_bytes),
                       schedule.signal(node, number), DeviceRole::send))
        return;
      window.add(fresh);
      patience.progressed();
      continue;
    }
    bool goes_on = true;
    if (lane == 0) {
      goes_on = patience.goes_on({DeviceRole::send, DeviceObject::chunk, owner, static_cast<uint64_t>(number),
                                  launch.epoch() - 1, launch.epoch()});
    }
    if (!__shfl_sync(~0u, static_cast<int>(goes_on), 0)) return;
  }
}

// Tells those who sum of other nodes' sums of this rank's rows. A lane keeps the account of each node.
template <class Config>
__device__ __forceinline__ void receive_sums(const RankLaunch& launch, const NetworkLaunch& network,
                                             const NetworkParams& params) {
  const NetworkSchedule& schedule = params.network;
  const int lane = threadIdx.x % 32;
  const int rank = params.comm.rank;
  const int own_node = params.reducers.node[rank];
  const int num_chunks = schedule.sums.size();
  const bool has_account = lane < schedule.num_nodes && lane != own_node;
  ArrivalWindow mine;
  Patience patience(launch, NETWORK_POLL_PAUSE_NS);
  while (__any_sync(~0u, has_account && mine.first < num_chunks)) {
    bool has_any = false;
    for (int node = 0; node < schedule.num_nodes; ++node) {
      if (node == own_node) continue;
      const ArrivalWindow window = {__shfl_sync(~0u, mine.first, node), __shfl_sync(~0u, mine.arrived, node)};
      const int number = window.first + lane;
      bool has_come = false;
      if (number < num_chunks && window.is_missing(lane)) {
        const bool is_sent = num_slabs_of<Config>(params, rank, schedule.sums.at(number).m_tile) > 0;
        has_come = !is_sent || network.take_signal(schedule.signal(node, number));
        if (is_sent && has_come) launch.raise_flag(rank, schedule.arrived_flag(node, number));
      }
      const uint32_t fresh = __ballot_sync(~0u, has_come);
      has_any = has_any || fresh != 0;
      if (lane == node) mine.add(fresh);
    }
    if (has_any) {
      patience.progressed();
      continue;
    }
    const int waiting = __ffs(static_cast<int>(__ballot_sync(~0u, has_account && mine.first < num_chunks))) - 1;
    const int number = __shfl_sync(~0u, mine.first, waiting);
    bool goes_on = true;
    if (lane == 0) {
      goes_on = patience.goes_on({DeviceRole::receive, DeviceObject::partial, rail_peer_of(params, waiting),
                                  static_cast<uint64_t>(number), launch.epoch() - 1, launch.epoch()});
    }
    if (!__shfl_sync(~0u, static_cast<int>(goes_on), 0)) return;
  }
}

// Puts each finished chunk of this rank's to its rail peers, once the node has it.
template <class Config>
__device__ __forceinline__ void send_finished(const RankLaunch& launch, const NetworkLaunch& network,
                                              const NetworkParams& params) {
  const NetworkSchedule& schedule = params.network;
  const RankOrder& order = params.comm.order;
  const int rank = params.comm.rank;
  const int lane = threadIdx.x % 32;
  const int num_chunks = schedule.finished.size();
  ArrivalWindow window;
  Patience patience(launch, NETWORK_POLL_PAUSE_NS);
  while (window.first < num_chunks) {
    const int number = window.first + lane;
    TileChunk chunk{};
    bool is_sent = false, is_due = false;
    if (number < num_chunks && window.is_missing(lane)) {
      chunk = schedule.finished.at(number);
      is_sent = num_slabs_of<Config>(params, rank, chunk.m_tile) > 0;
      is_due = !is_sent || has_flag(launch, params, schedule.finished_flag(rank, number));
    }
    const uint32_t fresh = __ballot_sync(~0u, is_due);
    if (fresh != 0) {
      const uint64_t place =
          network.area_address(schedule.finished_offset(rank, chunk.m_tile, chunk.first_n_tile));
      for (int i = 0; i < order.num_rail_peers; ++i) {
        if (!network.put(is_due && is_sent, order.rail_peers[i], place, place,
                         static_cast<uint32_t>(chunk.num_tiles * schedule.finished_tile_bytes),
                         schedule.finished_signal(rank, number), DeviceRole::send))
          return;
      }
      window.add(fresh);
      patience.progressed();
      continue;
    }
    bool goes_on = true;
    if (lane == 0) {
      goes_on = patience.goes_on({DeviceRole::send, DeviceObject::reduced_tile, rank,
                                  static_cast<uint64_t>(number), launch.epoch() - 1, launch.epoch()});
    }
    if (!__shfl_sync(~0u, static_cast<int>(goes_on), 0)) return;
  }
}

// Tells of finished chunks that have come from the network. A lane keeps the account of each rank relayed.
template <class Config>
__device__ __forceinline__ void receive_finished(const RankLaunch& launch, const NetworkLaunch& network,
                                                 const NetworkParams& params) {
  const NetworkSchedule& schedule = params.network;
  const RankOrder& order = params.comm.order;
  const int lane = threadIdx.x % 32;
  const int num_chunks = schedule.finished.size();
  const bool has_account = lane < order.num_relayed;
  ArrivalWindow mine;
  Patience patience(launch, NETWORK_POLL_PAUSE_NS);
  while (__any_sync(~0u, has_account && mine.first < num_chunks)) {
    bool has_any = false;
    for (int i = 0; i < order.num_relayed; ++i) {
      const int owner = order.relayed[i];
      const ArrivalWindow window = {__shfl_sync(~0u, mine.first, i), __shfl_sync(~0u, mine.arrived, i)};
      const int number = window.first + lane;
      bool has_come = false;
      if (number < num_chunks && window.is_missing(lane)) {
        const bool is_sent = num_slabs_of<Config>(params, owner, schedule.finished.at(number).m_tile) > 0;
        has_come = !is_sent || network.take_signal(schedule.finished_signal(owner, number));
        if (is_sent && has_come) launch.raise_flag(params.comm.rank, schedule.finished_flag(owner, number));
      }
      const uint32_t fresh = __ballot_sync(~0u, has_come);
      has_any = has_any || fresh != 0;
      if (lane == i) mine.add(fresh);
    }
    if (has_any) {
      patience.progressed();
      continue;
    }
    const int waiting = __ffs(static_cast<int>(__ballot_sync(~0u, has_account && mine.first < num_chunks))) - 1;
    const int number = __shfl_sync(~0u, mine.first, waiting);
    bool goes_on = true;
    if (lane == 0) {
      goes_on = patience.goes_on({DeviceRole::receive, DeviceObject::reduced_tile, order.relayed[waiting],
                                  static_cast<uint64_t>(number), launch.epoch() - 1, launch.epoch()});
    }
    if (!__shfl_sync(~0u, static_cast<int>(goes_on), 0)) return;
  }
}

// All-reduce: brings finished tiles to C, 16 rows of one at a time, chunk by chunk and of each chunk owner by
// owner. Pieces are handed out one by one, because the push warps come late.
template <class Config>
__device__ __forceinline__ void bring_finished(const RankLaunch& launch, const NetworkParams& params) {
  constexpr int SLABS = Config::BLOCK_M / 16;
  const NetworkSchedule& schedule = params.network;
  const int nranks = params.comm.nranks;
  const int num_pieces = schedule.finished.num_tiles(nranks) * SLABS;
  const int element_bytes = element_bytes_of(params.output.out_type);
  while (true) {
    int number = 0;
    if (threadIdx.x % 32 == 0) number = static_cast<int>(atomicAdd(&launch.progress().push_ticket, 1u));
    number = __shfl_sync(~0u, number, 0);
    if (number >= num_pieces) return;
    const ChunkTile tile = schedule.finished.tile(number / SLABS, nranks);
    const int slab = number % SLABS;
    const int owner = params.comm.order.rank_at[tile.turn];
    const int row = tile.m_tile * Config::BLOCK_M + slab * 16;
    const int rows = min(16, rows_of(params, owner) - row);
    if (!tile.is_there || rows <= 0) continue;
    if (!wait_for_network(launch, params, threadIdx.x % 32 == 0, schedule.finished_flag(owner, tile.chunk),
                          DeviceRole::gather, DeviceObject::reduced_tile, tile.chunk,
                          [&](int) { return owner; }))
      return;
    const int column = tile.n_tile * Config::BLOCK_N;
    const int64_t first = first_row_of(params, owner) + row;
    const Tracer tracer(params.comm.trace, trace_track());
    tracer.begin(TraceKind::copy, tile.chunk, owner);
    bring_rows(params.output,
               static_cast<std::byte*>(params.output.c) + (first * params.output.ldc + column) * element_bytes,
               launch.area(params.comm.rank, schedule.finished_offset(owner, tile.m_tile, tile.n_tile) +
                                                 int64_t{slab} * slab_bytes<Config::BLOCK_N>(element_bytes)),
               Config::BLOCK_N * element_bytes, rows, min(params.output.n - column, Config::BLOCK_N));
    tracer.end();
  }
}

template <class Config>
__device__ __forceinline__ void run_network_cta(const RankLaunch& launch, const NetworkParams& params) {
  const NetworkLaunch network(launch, params.comm);
  const int warp = threadIdx.x / 32;
  if (warp == 0) network.greet();
  if (warp == 1) send_sums<Config>(launch, network, params);
  if (warp == 2) receive_sums<Config>(launch, network, params);
  if (warp == 3 && reduces_all(params)) send_finished<Config>(launch, network, params);
  if (warp == 4 && reduces_all(params)) receive_finished<Config>(launch, network, params);
  __syncthreads();
  if (warp == 0) network.wait_for_puts();
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    gemm_network_reduction_kernel(const __grid_constant__ NetworkParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  RankGemmStorage<Config>& smem = *reinterpret_cast<RankGemmStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  const int num_workers = params.tiles.num_workers;
  launch.begin_cta();
  if (static_cast<int>(blockIdx.x) >= num_workers) {
    if (blockIdx.x + NUM_NETWORK_CTAS == gridDim.x) {
      run_network_cta<Config>(launch, params);
    } else {
      run_reduce_cta<Config>(launch, params, smem_bytes);
    }
    launch.end_cta();
    return;
  }
  if (threadIdx.x == 0) storage_init(smem);
  __syncthreads();
  run_roles<Config>(
      num_workers, [&] { produce<Config>(smem.mainloop, params); },
      [&](const CopyWarp& warp) {
        if (warp.pushes()) push_to_node<Config>(launch, params, smem, warp.warp);
        if (reduces_all(params)) bring_finished<Config>(launch, params);
      },
      [&](int warpgroup) __attribute__((always_inline)) {
        auto tiles = tile_cursor(params);
        consumer_role<Config, TileWork, Config::IS_LARGE ? TilesAre::plain : TilesAre::settled>(
            smem.mainloop, warpgroup, params.comm.trace,
            [&](TileWork* work) { return next_tile<Config>(params, tiles, work); },
            [&](const TileWork& work, int block, float(&accumulators)[Config::BLOCK_N / 2]) {
              finish_network_block<Config>(launch, params, smem, work, block, accumulators);
            });
      });
  launch.end_cta();
}

template <GemmTile TILE, class Element, bool B_TRANSPOSED>
constexpr RankGemmKernel<NetworkParams> cuda_network_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, TILE.ping_pong, Element, false, B_TRANSPOSED>;
  static_assert(sizeof(RankGemmStorage<Config>) <= 227 * 1024);
  return {gemm_network_reduction_kernel<Config>, Config::NUM_THREADS, sizeof(RankGemmStorage<Config>)};
}

template <class Element>
const NetworkTable& cuda_network_kernel_table() {
  static const NetworkTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return NetworkTable{{{cuda_network_kernel_entry<RANK_GEMM_TILES[TILES], Element, false>(),
                          cuda_network_kernel_entry<RANK_GEMM_TILES[TILES], Element, true>()}...}};
  }
  (std::make_index_sequence<NUM_RANK_GEMM_TILES>());
  return table;
}

}  // namespace mk::gemm_reduce_scatter
