// SPDX-License-Identifier: MIT
// AllGather+GEMM on GPUs of several nodes, as one persistent kernel. Inside the node everything is as in
// cuda_kernel.cuh, but that a rank pushes its rows to its own receive area, too, where the network can read
// them. One CTA more has the network: it puts each chunk that is whole to the rail peers, and tells of chunks
// that have come from there. Push warps that are through with their own rows forward those inside the node.
#pragma once

#include "kernels/device/arrival_window.h"
#include "kernels/device/network_launch.cuh"
#include "kernels/ops/allgather_gemm/cuda_kernel.cuh"
#include "kernels/ops/allgather_gemm/forward_units.h"

namespace mk::allgather_gemm {

using NetworkTable = RankGemmTable<NetworkParams>;
const NetworkTable& cuda_network_kernels_bf16();
const NetworkTable& cuda_network_kernels_fp16();

constexpr int NUM_NETWORK_CTAS = 1;

__device__ __forceinline__ const NearFarTileOrder& tile_order(const NetworkParams& params) {
  return params.far_order;
}
__device__ __forceinline__ const TileSchedule& tile_schedule(const NetworkParams& params) {
  return params.tiles;
}

__device__ __forceinline__ int source_at(const NetworkParams& params, int position) {
  return params.comm.order.rank_at[position];
}

__device__ __forceinline__ int num_chunks_of(const CudaParams& params, int source) {
  const int chunk_rows = static_cast<int>(params.schedule.chunk_rows);
  return (rows_of(params, source) + chunk_rows - 1) / chunk_rows;
}

// A unit as noted, of any source.
struct SourceNote {
  static constexpr int SOURCE_SHIFT = 56;
  uint64_t bits;
  __device__ static uint64_t make(int source, const PushUnit& unit) {
    return static_cast<uint64_t>(source) << SOURCE_SHIFT | note_of(unit);
  }
  __device__ int source() const { return static_cast<int>(bits >> SOURCE_SHIFT); }
  __device__ int chunk() const { return static_cast<int>(bits >> 32 & 0xffffff); }
  __device__ int panel() const { return static_cast<int>(bits & 0xffffffff); }
};

// Where units of the note's panel are counted, and how many there are.
__device__ __forceinline__ uint32_t* count_of_source(const CudaParams& params, const PushUnits& units,
                                                     uint64_t note, uint32_t* expected) {
  const SourceNote of{note};
  *expected = units.expected(rows_of(params, of.source()), of.chunk(), of.panel());
  // Many sources' are: a flag's number is that of a count, too.
  return &params.comm.state->counts[panel_flag(params, of.source(), of.chunk(), of.panel())];
}

// Tells the ranks that have been pushed a panel: of own rows this one, too.
__device__ __forceinline__ void signal_source(const RankLaunch& launch, const CudaParams& params,
                                              uint64_t note) {
  const SourceNote of{note};
  const int flag = panel_flag(params, of.source(), of.chunk(), of.panel());
  const int first = of.source() == params.comm.rank ? 0 : 1;
  for (int step = first; step < params.comm.order.num_local; ++step) {
    launch.raise_flag_relaxed(params.comm.order.rank_at[step], flag);
  }
}

// Puts each chunk of this rank to the other nodes, once it is whole in this rank's own receive area.
__device__ inline void send_chunks(const RankLaunch& launch, const NetworkLaunch& network,
                                   const CudaParams& params) {
  const int rank = params.comm.rank;
  const int lane = threadIdx.x % 32;
  const bool has_put = lane < params.comm.order.num_rail_peers;
  const int peer = has_put ? params.comm.order.rail_peers[lane] : 0;
  const int num_chunks = num_chunks_of(params, rank);
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    bool is_here = true;
    for (int panel = 0; panel < params.num_panels && is_here; ++panel) {
      if (lane == 0) {
        is_here = launch.wait_flag(panel_flag(params, rank, chunk, panel), DeviceRole::send,
                                   DeviceObject::chunk, rank, chunk);
      }
      is_here = __shfl_sync(~0u, static_cast<int>(is_here), 0) != 0;
    }
    if (!is_here) return;
    __syncwarp();
    const uint64_t place = network.area_address(params.schedule.area_offset(rank, chunk));
    const auto bytes =
        static_cast<uint32_t>(params.schedule.chunk_count(rank, chunk) * params.schedule.row_pitch());
    if (!network.put(has_put, peer, place, place, bytes, params.schedule.signal(rank, chunk), DeviceRole::send))
      return;
  }
}

// Tells this rank's other warps of chunks that have come from the network. A lane keeps the account of each
// rank relayed.
__device__ inline void receive_chunks(const RankLaunch& launch, const NetworkLaunch& network,
                                      const CudaParams& params) {
  const RankOrder& order = params.comm.order;
  const int lane = threadIdx.x % 32;
  const int num_mine = lane < order.num_relayed ? num_chunks_of(params, order.relayed[lane]) : 0;
  ArrivalWindow mine;
  Patience patience(launch, NETWORK_POLL_PAUSE_NS);
  while (__any_sync(~0u, mine.first < num_mine)) {
    bool has_any = false;
    for (int i = 0; i < order.num_relayed; ++i) {
      const int source = order.relayed[i];
      const ArrivalWindow window = {__shfl_sync(~0u, mine.first, i), __shfl_sync(~0u, mine.arrived, i)};
      const int num_chunks = __shfl_sync(~0u, num_mine, i);
      const int chunk = window.first + lane;
      const bool has_come = chunk < num_chunks && window.is_missing(lane) &&
                            network.take_signal(params.schedule.signal(source, chunk));
      if (has_come) {
        ptx::fence_acq_rel_sys();
        for (int panel = 0; panel < params.num_panels; ++panel) {
          launch.raise_flag_relaxed(params.comm.rank, panel_flag(params, source, chunk, panel));
        }
      }
      const uint32_t fresh = __ballot_sync(~0u, has_come);
      has_any = has_any || fresh != 0;
      if (lane == i) mine.add(fresh);
    }
    if (has_any) {
      patience.progressed();
      continue;
    }
    const int waiting = __ffs(static_cast<int>(__ballot_sync(~0u, mine.first < num_mine))) - 1;
    const int chunk = __shfl_sync(~0u, mine.first, waiting);
    bool goes_on = true;
    if (lane == 0) {
      goes_on = patience.goes_on({DeviceRole::receive, DeviceObject::chunk, order.relayed[waiting],
                                  static_cast<uint64_t>(chunk), launch.epoch() - 1, launch.epoch()});
    }
    if (!__shfl_sync(~0u, static_cast<int>(goes_on), 0)) return;
  }
}

// A push warp that is through with its own rows: takes units of the rows that this rank relays, waits for each,
// and pushes it to the rest of the node. None is begun before the one before it is on its way: a warp that
// waits here owes nobody anything.
template <class Storage, class Done>
__device__ __forceinline__ void forward_rows(const RankLaunch& launch, const CudaParams& params,
                                             BulkPush<Storage>& push, Done&& done) {
  const RankOrder& order = params.comm.order;
  if (order.num_local == 1 || order.num_relayed == 0) return;
  const int rank = params.comm.rank;
  const int lane = threadIdx.x % 32;
  const auto pitch = static_cast<int64_t>(params.schedule.row_pitch());
  ForwardUnits forwards(params.push_units.of_rows(params.max_rows), order.num_relayed);
  while (true) {
    int index = lane == 0 ? static_cast<int>(atomicAdd(&launch.progress().gather_ticket, 1u)) : 0;
    index = __shfl_sync(~0u, index, 0);
    if (index >= forwards.size()) return;
    const ForwardUnit found =
        forwards.at(index, [&](int relayed) { return rows_of(params, order.relayed[relayed]); });
    PushUnit unit = found.unit;
    if (unit.num_rows == 0) continue;
    const int source = order.relayed[found.relayed];
    bool is_here = true;
    if (lane == 0) {
      is_here = launch.wait_flag(panel_flag(params, source, unit.chunk, unit.panel), DeviceRole::copy,
                                 DeviceObject::chunk, source, unit.chunk);
    }
    if (!__shfl_sync(~0u, static_cast<int>(is_here), 0)) return;
    __syncwarp();
    // The copy engine is another proxy than the load that saw the flag.
    ptx::fence_proxy_async_global();
    unit.num_bytes = (unit.num_bytes + 15) / 16 * 16;
    const int64_t offset = (int64_t{source} * params.max_rows + unit.row + lane) * pitch + unit.column;
    bool is_given = false;
    push.template move<PushUnit>(
        [&](PushUnit* next) {
          if (is_given) return false;
          is_given = true;
          *next = unit;
          return true;
        },
        [&](const PushUnit& one, uint8_t* buffer, uint64_t* loaded) {
          if (lane == 0) ptx::mbarrier_arrive_expect_tx(loaded, one.num_rows * one.num_bytes);
          __syncwarp();
          if (lane >= one.num_rows) return;
          ptx::cp_async_bulk_shared_global(buffer + lane * one.num_bytes, launch.area(rank, offset),
                                           one.num_bytes, loaded);
        },
        [&](const PushUnit& one, const uint8_t* buffer) {
          if (lane < one.num_rows) {
#pragma unroll 1
            for (int step = 1; step < order.num_local; ++step) {
              ptx::cp_async_bulk_global_shared(launch.area(order.rank_at[step], offset),
                                               buffer + lane * one.num_bytes, one.num_bytes);
            }
          }
          ptx::cp_async_bulk_commit_group();
        });
    push.template complete<0>();
    done(SourceNote::make(source, unit));
  }
}

// What a push warp does in all: own rows to the node, then the relayed ones.
template <class Storage, class Done>
__device__ __forceinline__ void push_and_forward(const RankLaunch& launch, const CudaParams& params,
                                                 Storage& storage, int warp, Done&& done) {
  BulkPush<Storage> push(storage, warp);
  const uint64_t own = static_cast<uint64_t>(params.comm.rank) << SourceNote::SOURCE_SHIFT;
  push_rows(
      launch, params, push, PushTickets{}, 0, params.comm.order.num_local, 0,
      [&](int step) { return params.comm.order.rank_at[step]; }, [&](uint64_t note) { done(own | note); });
  forward_rows(launch, params, push, done);
}

template <class Storage>
__device__ __forceinline__ void push_beside_network_product(const RankLaunch& launch, const CudaParams& params,
                                                            Storage& storage) {
  const PushUnits& units = params.push_units;
  push_and_forward(launch, params, storage, 0, [&](uint64_t note) {
    if (threadIdx.x % 32 == 0) {
      uint32_t expected = 0;
      uint32_t* count = count_of_source(params, units, note, &expected);
      if (ptx::atom_release_gpu_add(count, 1) + 1 == expected) {
        ptx::st_relaxed_gpu(count, 0);
        ptx::fence_acq_rel_sys();
        signal_source(launch, params, note);
      }
    }
    __syncwarp();
  });
}

template <class Config>
__device__ __forceinline__ void run_network_push_cta(const RankLaunch& launch, const CudaParams& params,
                                                     uint8_t* smem_bytes) {
  using Storage = PushCtaStorage<Config::NUM_THREADS>;
  static_assert(sizeof(Storage) <= sizeof(RankGemmStorage<Config>));
  Storage& storage = *reinterpret_cast<Storage*>(smem_bytes);
  push_cta_init(storage);
  const int warp = threadIdx.x / 32;
  if (warp < Storage::NUM_WARPS) {
    PushNotes notes(storage.signals, warp);
    push_and_forward(launch, params, storage.push, warp, [&](uint64_t note) { notes.add(note); });
    notes.end();
  } else {
    const PushUnits& units = params.push_units;
    send_signals(
        storage.signals,
        [&](uint64_t note, uint32_t* expected) { return count_of_source(params, units, note, expected); },
        [&](uint64_t note) { signal_source(launch, params, note); });
  }
}

// What a copy warp of a CTA that computes does; as run_copy_warp().
template <class Storage, class Params, class Watch = WatchesNothing>
__device__ __forceinline__ void run_network_copy_warp(const RankLaunch& launch, const Params& params,
                                                      Storage& push, PanelBarriers* panels,
                                                      const CopyWarp& warp, Watch&& watch = {}) {
  if (!warp.pushes()) watch();
  if (panels != nullptr && params.merged && params.schedule.k > 0 && !warp.pushes())
    watch_panels(launch, params, *panels);
  const bool has_push_ctas = static_cast<int>(gridDim.x) > params.tiles.num_workers + NUM_NETWORK_CTAS;
  if (warp.warp == 0 && params.schedule.k > 0 && !has_push_ctas) {
    push_beside_network_product(launch, params, push);
  } else if (warp.pushes()) {
    push_nothing(push);
  }
  if (params.a_gathered != nullptr) gather_rows(launch, params, panels, warp);
}

// The CTA that has the network: a warp a role, and at the end the launch's puts.
__device__ inline void run_network_cta(const RankLaunch& launch, const CudaParams& params) {
  const NetworkLaunch network(launch, params.comm);
  const int warp = threadIdx.x / 32;
  if (warp == 0) network.greet();
  if (warp == 1 && params.schedule.k > 0) send_chunks(launch, network, params);
  if (warp == 2 && params.schedule.k > 0) receive_chunks(launch, network, params);
  __syncthreads();
  if (warp == 0) network.wait_for_puts();
}

// A CTA that does not compute: the last of them has the network.
template <class Config>
__device__ __forceinline__ void run_moving_cta(const RankLaunch& launch, const CudaParams& params,
                                               uint8_t* smem_bytes) {
  if (blockIdx.x + NUM_NETWORK_CTAS == gridDim.x) {
    run_network_cta(launch, params);
  } else if (params.schedule.k > 0) {
    run_network_push_cta<Config>(launch, params, smem_bytes);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    allgather_gemm_network_kernel(const __grid_constant__ NetworkParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  GatherStorage<Config>& smem = *reinterpret_cast<GatherStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  const int num_workers = params.tiles.num_workers;
  launch.begin_cta();
  if (static_cast<int>(blockIdx.x) >= num_workers) {
    run_moving_cta<Config>(launch, params, smem_bytes);
    launch.end_cta();
    return;
  }
  if (threadIdx.x == 0) gather_init(smem);
  __syncthreads();
  run_roles<Config>(
      num_workers, [&] { produce<Config>(launch, smem, params); },
      [&](const CopyWarp& warp) { run_network_copy_warp(launch, params, smem.push, &smem.panels, warp); },
      [&](int warpgroup) __attribute__((always_inline)) {
        RankTileCursor tiles(params.tiles, blockIdx.x, tile_order(params));
        consumer_role<Config, TileWork, Config::IS_LARGE ? TilesAre::alike : TilesAre::settled>(
            smem.mainloop, warpgroup, params.comm.trace,
            [&](TileWork* work) {
              return tiles.next(work, Config::BLOCK_M, [&](int position) { return rows_at(params, position); });
            },
            [&](const TileWork& work, int block, float(&accumulators)[Config::BLOCK_N / 2]) {
              const SourceTile tile = source_tile<Config::BLOCK_M>(params, work);
              finish_rows<Config>(params, smem, work, tile.begin, tile.end, block, accumulators);
            });
      });
  launch.end_cta();
}

template <GemmTile TILE, class Element, bool B_TRANSPOSED>
constexpr RankGemmKernel<NetworkParams> cuda_network_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, TILE.ping_pong, Element, false, B_TRANSPOSED>;
  static_assert(sizeof(GatherStorage<Config>) <= 227 * 1024);
  return {allgather_gemm_network_kernel<Config>, Config::NUM_THREADS, sizeof(GatherStorage<Config>)};
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

}  // namespace mk::allgather_gemm
