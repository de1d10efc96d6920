// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter on GPUs of several nodes, as one persistent kernel. Products and pushes are as in
// cuda_kernel.cuh, but that partial tiles go to the rank that sums them in this node. Those of this rank's own
// rows are summed in the epilogue, last of all, with what has come from its node and from the others. A few
// CTAs sum those for owners elsewhere, where there is anything to sum: a rank that is alone in its node leaves
// its partial tiles where they are put from. One CTA has the network: it puts the sums for owners elsewhere,
// and tells of those that have come for this rank.
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

__device__ __forceinline__ FarFirstTileOrder order_of(const NetworkParams& params) {
  return {params.tile_rows, params.comm.nranks - params.comm.order.num_local};
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
  bool has_come = true;
  if (lane < count && flag_of(lane) >= 0) {
    has_come = launch.wait_flag(flag_of(lane), DeviceRole::reduce, DeviceObject::partial, peer_of(lane), index);
  }
  has_come = !__any_sync(~0u, !has_come);
  __syncwarp();  // what each lane has acquired holds for all
  return has_come;
}

// Has a flag of this rank's been raised? Then what it tells of is visible to the lane.
__device__ __forceinline__ bool has_flag(const RankLaunch& launch, const NetworkParams& params, int index) {
  const uint64_t* const word = launch.flag(params.comm.rank, index);
  if (ptx::ld_relaxed_sys(word) < launch.epoch()) return false;
  ptx::ld_acquire_sys(word);
  return true;
}

// Until this node's partials of a tile are here.
__device__ __forceinline__ bool wait_node(const RankLaunch& launch, const NetworkParams& params, int reduction,
                                          int tile) {
  return wait_flags(
      launch, params.comm.order.num_local, tile,
      [&](int local) { return params.network.partial_flag(reduction, local, tile); },
      [&](int local) { return rank_of_local(params, local); });
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
    const int tile = m_tile * schedule.num_n_tiles + work.n_tile;
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
  const int chunk = schedule.chunk_of(m_tile, work.n_tile);
  if (!wait_flags(
          launch, schedule.num_nodes, chunk,
          [&](int other) { return other == node ? -1 : schedule.arrived_flag(other, chunk); },
          [&](int other) { return rail_peer_of(params, other); }))
    return;
  const Tracer tracer(params.comm.trace, TRACE_COMPUTE + threadIdx.x / 128);
  const uint64_t start = tracer.now();
  finish_slab<Config::BLOCK_N>(
      {launch.area(rank, schedule.sum_offset(0) + place), schedule.slot_bytes(), schedule.num_nodes},
      params.comm_type, params.output, false, buffers, m_tile * Config::BLOCK_M + slab * 16,
      rows_of(params, rank), work.n_tile * Config::BLOCK_N);
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
  const RankTile place = order_of(params).place(work);
  const int owner = owner_at(params, place.position);
  const int slab = block * 4 + threadIdx.x / 32 % 4;
  const bool has_rows = slab < num_slabs_of<Config>(params, owner, place.index);
  if (owner == rank) {
    if (has_rows) {
      finish_own_slab<Config>(launch, params, smem.epilogue[threadIdx.x / 32], work, place.index, slab,
                              accumulators);
    }
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

// Counts one of those that a chunk waits for: the last tells the one that sends. By a lane that has seen it
// done.
__device__ __forceinline__ void count_tile(const RankLaunch& launch, const NetworkParams& params, int reduction,
                                           int chunk) {
  const int flag = params.network.summed_flag(reduction, chunk);
  uint32_t* const count = &params.comm.state->counts[flag];
  const auto expected = static_cast<uint32_t>(params.network.chunk(chunk).num_tiles);
  if (ptx::atom_acq_rel_gpu_add(count, 1) + 1 != expected) return;
  ptx::st_relaxed_gpu(count, 0);
  launch.raise_flag(params.comm.rank, flag);
}

// Both push warps of a CTA: each partial tile to the rank that sums it in this node; of those that lie there
// already, the first says so.
template <class Config>
__device__ __forceinline__ void push_to_reducers(const RankLaunch& launch, const NetworkParams& params,
                                                 RankGemmStorage<Config>& smem, int warp) {
  const NetworkSchedule& schedule = params.network;
  const int rank = params.comm.rank;
  const int lane = threadIdx.x % 32;
  const int local_rank = params.reducers.local_rank;
  BulkPush push(smem.push, warp);
  RankTileCursor tiles(params.tiles, blockIdx.x, order_of(params));
  TileWork work;
  while (tiles.next(&work, Config::BLOCK_M,
                    [&](int position) { return rows_of(params, owner_at(params, position)); })) {
    const RankTile place = order_of(params).place(work);
    const int owner = owner_at(params, place.position);
    if (owner == rank) return;  // own tiles are the last
    const int reducer = params.reducers.reducer[owner];
    const int reduction = params.reducers.reduction[owner];
    const int slot = work.ordinal % NUM_STAGED_TILES;
    mbarrier_wait(&smem.staged_full[slot], work.ordinal / NUM_STAGED_TILES % 2);
    const Tracer tracer(params.comm.trace, TRACE_COPY + warp);
    tracer.begin(TraceKind::copy, trace_tile(work), owner);
    if (reducer != rank) {
      push_partial<Config>(params, push, warp, work,
                           launch.area(reducer, schedule.partial_offset(reduction, local_rank) +
                                                    schedule.tile_offset(place.index, work.n_tile)),
                           min(Config::BLOCK_M, rows_of(params, owner) - place.index * Config::BLOCK_M));
    }
    if (lane == 0) ptx::mbarrier_arrive(&smem.staged_empty[slot]);
    if (reducer != rank) {
      push.template complete<0>();
      ptx::barrier_sync(PUSH_BARRIER, NUM_PUSH_WARPS * 32);
    }
    tracer.end();
    if (warp != 0 || lane != 0) continue;
    if (is_alone(params)) {
      count_tile(launch, params, reduction, schedule.chunk_of(place.index, work.n_tile));
    } else {
      launch.raise_flag(reducer, schedule.partial_flag(reduction, local_rank, tile_index(params, work, place)));
    }
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
  const int reduction = 1 + unit.relayed;
  const int64_t tile = schedule.tile_offset(unit.m_tile, unit.n_tile);
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

// What a warp that sums tells the one that signals.
struct SumNote {
  uint64_t bits;
  __device__ static uint64_t make(const SumUnit& unit) {
    return static_cast<uint64_t>(unit.relayed) << 32 | static_cast<uint32_t>(unit.chunk);
  }
  __device__ int relayed() const { return static_cast<int>(bits >> 32); }
  __device__ int chunk() const { return static_cast<int>(bits & 0xffffffff); }
};

// A warp that sums for owners elsewhere. It waits for ranks of this node alone, and with nothing of its own
// under way.
template <class Config, class Storage, class Done>
__device__ __forceinline__ void sum_for_others(const RankLaunch& launch, const NetworkParams& params,
                                               Storage& storage, int warp, Done&& done) {
  const NetworkSchedule& schedule = params.network;
  const RankOrder& order = params.comm.order;
  BulkPush<Storage> push(storage, warp);
  const int num_units = schedule.num_sum_units(order.num_relayed);
  const auto take_ticket = [&] {
    return threadIdx.x % 32 == 0 ? static_cast<int>(atomicAdd(&params.comm.state->gather_ticket, 1u)) : 0;
  };
  int ticket = take_ticket();  // ahead of its use, which then need not wait for it
  while (true) {
    const int number = __shfl_sync(~0u, ticket, 0);
    if (number >= num_units) return;
    ticket = take_ticket();
    const SumUnit unit = schedule.sum_unit(number, order.num_relayed);
    const int num_bytes =
        min(NetworkSchedule::SUM_UNIT_BYTES,
            tile_bytes_of<Config>(params, order.relayed[unit.relayed], unit.m_tile) - unit.begin);
    if (!unit.has_tile || num_bytes <= 0) continue;
    if (!wait_node(launch, params, 1 + unit.relayed, unit.m_tile * schedule.num_n_tiles + unit.n_tile)) return;
    // The copy engine is another proxy than the loads that saw the flags.
    ptx::fence_proxy_async_global();
    __syncwarp();
    sum_partials(launch, params, push, unit, num_bytes);
    done(SumNote::make(unit));
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
    sum_for_others<Config>(launch, params, storage.push, warp, [&](uint64_t note) { notes.add(note); });
    notes.end();
    return;
  }
  const NetworkSchedule& schedule = params.network;
  send_signals(
      storage.signals,
      [&](uint64_t bits, uint32_t* expected) {
        const SumNote note{bits};
        const int bytes = tile_bytes_of<Config>(params, params.comm.order.relayed[note.relayed()],
                                                schedule.chunk(note.chunk()).m_tile);
        *expected = schedule.units_of_chunk(note.chunk(), bytes);
        return &params.comm.state->counts[schedule.summed_flag(1 + note.relayed(), note.chunk())];
      },
      [&](uint64_t bits) {
        const SumNote note{bits};
        launch.raise_flag_relaxed(params.comm.rank, schedule.summed_flag(1 + note.relayed(), note.chunk()));
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
  const int num_puts = order.num_relayed * schedule.max_chunks();
  ArrivalWindow window;
  NetworkPatience patience(launch, params.comm);
  while (window.first < num_puts) {
    const int idx = window.first + lane;
    const int number = idx / order.num_relayed;
    const int relayed = idx - number * order.num_relayed;
    const int owner = order.relayed[relayed];
    TileChunk chunk{};
    bool is_sent = false, is_due = false;
    if (idx < num_puts && window.is_missing(lane)) {
      chunk = schedule.chunk(number);
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
  const int num_chunks = schedule.max_chunks();
  const bool has_account = lane < schedule.num_nodes && lane != own_node;
  ArrivalWindow mine;
  NetworkPatience patience(launch, params.comm);
  while (__any_sync(~0u, has_account && mine.first < num_chunks)) {
    bool has_any = false;
    for (int node = 0; node < schedule.num_nodes; ++node) {
      if (node == own_node) continue;
      const ArrivalWindow window = {__shfl_sync(~0u, mine.first, node), __shfl_sync(~0u, mine.arrived, node)};
      const int number = window.first + lane;
      bool has_come = false;
      if (number < num_chunks && window.is_missing(lane)) {
        const bool is_sent = num_slabs_of<Config>(params, rank, schedule.chunk(number).m_tile) > 0;
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

template <class Config>
__device__ __forceinline__ void run_network_cta(const RankLaunch& launch, const NetworkParams& params) {
  const NetworkLaunch network(launch, params.comm);
  const int warp = threadIdx.x / 32;
  if (warp == 0) network.greet();
  if (warp == 1) send_sums<Config>(launch, network, params);
  if (warp == 2) receive_sums<Config>(launch, network, params);
  __syncthreads();
  if (warp == 0) network.wait_for_puts();
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    gemm_network_reduction_kernel(const __grid_constant__ NetworkParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  RankGemmStorage<Config>& smem = *reinterpret_cast<RankGemmStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  const ClusterPosition cluster = {0, 1};
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
        if (warp.pushes()) push_to_reducers<Config>(launch, params, smem, warp.warp);
      },
      [&](int warpgroup) {
        RankTileCursor tiles(params.tiles, blockIdx.x, order_of(params));
        consumer_role<Config>(
            smem.mainloop, cluster, warpgroup, params.comm.trace,
            [&](TileWork* work) {
              return tiles.next(work, Config::BLOCK_M,
                                [&](int position) { return rows_of(params, owner_at(params, position)); });
            },
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
  return {gemm_network_reduction_kernel<Config>, Config::NUM_THREADS, sizeof(RankGemmStorage<Config>),
          Config::STAGE_BYTES};
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
