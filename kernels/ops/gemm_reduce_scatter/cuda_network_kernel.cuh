// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter on GPUs of several nodes, as one persistent kernel. Products and pushes are as in
// cuda_kernel.cuh, but that a rank's own partial tiles take the way of the others, too: to the slot of the rank
// that sums them in this node. A few CTAs sum. One more has the network: it puts the sums for owners elsewhere,
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

// 64 rows of a finished product, all of which are pushed.
template <class Config>
__device__ __forceinline__ void stage_block(const NetworkParams& params, RankGemmStorage<Config>& smem,
                                            const TileWork& work, int block,
                                            const float (&accumulators)[Config::BLOCK_N / 2]) {
  const RankTile place = order_of(params).place(work);
  const int slab = block * 4 + threadIdx.x / 32 % 4;
  wait_staging(smem, work.ordinal);
  if (slab < num_slabs_of<Config>(params, owner_at(params, place.position), place.index)) {
    store_slab(
        accumulators, params.comm_type,
        staged_tile<Config>(params, work.ordinal % NUM_STAGED_TILES) + slab_offset_of<Config>(params, slab));
  }
  pass_to_push_warps(smem, work.ordinal);
}

// Both push warps of a CTA: each partial tile to the rank that sums it in this node.
template <class Config>
__device__ __forceinline__ void push_to_reducers(const RankLaunch& launch, const NetworkParams& params,
                                                 RankGemmStorage<Config>& smem, int warp) {
  const NetworkSchedule& schedule = params.network;
  const int local_rank = params.reducers.local_rank;
  BulkPush push(smem.push, warp);
  RankTileCursor tiles(params.tiles, blockIdx.x, order_of(params));
  TileWork work;
  while (tiles.next(&work, Config::BLOCK_M,
                    [&](int position) { return rows_of(params, owner_at(params, position)); })) {
    const RankTile place = order_of(params).place(work);
    const int owner = owner_at(params, place.position);
    const int reducer = params.reducers.reducer[owner];
    const int reduction = params.reducers.reduction[owner];
    const int num_rows = min(Config::BLOCK_M, rows_of(params, owner) - place.index * Config::BLOCK_M);
    const int slot = work.ordinal % NUM_STAGED_TILES;
    mbarrier_wait(&smem.staged_full[slot], work.ordinal / NUM_STAGED_TILES % 2);
    push_partial<Config>(params, push, warp, work,
                         launch.area(reducer, schedule.partial_offset(reduction, local_rank) +
                                                  schedule.tile_offset(place.index, work.n_tile)),
                         num_rows);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&smem.staged_empty[slot]);
    push.template complete<0>();
    ptx::barrier_sync(PUSH_BARRIER, NUM_PUSH_WARPS * 32);
    if (warp == 0 && threadIdx.x % 32 == 0) {
      launch.raise_flag(reducer, schedule.partial_flag(reduction, local_rank, tile_index(params, work, place)));
    }
  }
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

// A slab's sum over the ranks of this node, rounded once, to `to`.
template <class Config>
__device__ __forceinline__ void sum_node(const NetworkParams& params, const std::byte* partials,
                                         std::byte* to) {
  sum_slab<Config::BLOCK_N>({partials, params.network.slot_bytes(), params.comm.order.num_local},
                            params.comm_type, to);
}

// What a warp that sums takes on: 16 rows of a tile.
struct SumUnit {
  int reduction;
  int owner;
  int chunk;
  int m_tile;
  int n_tile;
  int slab;
  bool has_rows;
};

// Owners elsewhere first, whose sums have the longest way; this rank last.
template <class Config>
__device__ __forceinline__ SumUnit sum_unit(const NetworkParams& params, int number) {
  constexpr int SLABS = Config::BLOCK_M / 16;
  const NetworkSchedule& schedule = params.network;
  const int per_chunk = schedule.chunk_tiles * SLABS;
  const int chunk_number = number / per_chunk;
  const int in_chunk = number - chunk_number * per_chunk;
  const int position = chunk_number / schedule.max_chunks();
  const bool is_own = position == params.comm.order.num_relayed;
  SumUnit unit;
  unit.reduction = is_own ? 0 : 1 + position;
  unit.owner = is_own ? params.comm.rank : params.comm.order.relayed[position];
  unit.chunk = chunk_number - position * schedule.max_chunks();
  const TileChunk chunk = schedule.chunk(unit.chunk);
  const int tile = in_chunk / SLABS;
  unit.m_tile = chunk.m_tile;
  unit.n_tile = chunk.first_n_tile + tile;
  unit.slab = in_chunk - tile * SLABS;
  unit.has_rows = tile < chunk.num_tiles && unit.slab < num_slabs_of<Config>(params, unit.owner, chunk.m_tile);
  return unit;
}

// A slab for an owner elsewhere is summed: the last of a chunk tells the one that sends.
template <class Config>
__device__ __forceinline__ void count_slab(const RankLaunch& launch, const NetworkParams& params,
                                           const SumUnit& unit) {
  const NetworkSchedule& schedule = params.network;
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    const int expected =
        schedule.chunk(unit.chunk).num_tiles * num_slabs_of<Config>(params, unit.owner, unit.m_tile);
    uint32_t* const count = &params.comm.state->counts[unit.reduction * schedule.max_chunks() + unit.chunk];
    if (ptx::atom_acq_rel_gpu_add(count, 1) + 1 == static_cast<uint32_t>(expected)) {
      ptx::st_relaxed_gpu(count, 0);
      launch.raise_flag(params.comm.rank, schedule.summed_flag(unit.reduction, unit.chunk));
    }
  }
  __syncwarp();
}

// Waits with a lane for each of `count` flags.
template <class FlagOf, class PeerOf>
__device__ __forceinline__ bool wait_flags(const RankLaunch& launch, int count, DeviceObject object, int index,
                                           FlagOf&& flag_of, PeerOf&& peer_of) {
  const int lane = threadIdx.x % 32;
  bool has_come = true;
  if (lane < count && flag_of(lane) >= 0) {
    has_come = launch.wait_flag(flag_of(lane), DeviceRole::reduce, object, peer_of(lane), index);
  }
  has_come = !__any_sync(~0u, !has_come);
  __syncwarp();  // what each lane has acquired holds for all
  return has_come;
}

// A CTA that sums, all its warps. Units for owners elsewhere wait for ranks of this node alone, and are all
// handed out before any of this rank's own rows, which wait for other nodes' sums.
template <class Config>
__device__ __forceinline__ void run_reduce_cta(const RankLaunch& launch, const NetworkParams& params,
                                               uint8_t* smem_bytes) {
  constexpr int SLABS = Config::BLOCK_M / 16;
  const NetworkSchedule& schedule = params.network;
  const RankOrder& order = params.comm.order;
  const int rank = params.comm.rank;
  const int node = params.reducers.node[rank];
  EpilogueBuffers<1>& buffers = reinterpret_cast<EpilogueBuffers<1>*>(smem_bytes)[threadIdx.x / 32];
  const int num_units = (order.num_relayed + 1) * schedule.max_chunks() * schedule.chunk_tiles * SLABS;
  while (true) {
    int number = 0;
    if (threadIdx.x % 32 == 0) number = static_cast<int>(atomicAdd(&params.comm.state->gather_ticket, 1u));
    number = __shfl_sync(~0u, number, 0);
    if (number >= num_units) return;
    const SumUnit unit = sum_unit<Config>(params, number);
    if (!unit.has_rows) continue;
    const int tile = unit.m_tile * schedule.num_n_tiles + unit.n_tile;
    const int64_t place =
        schedule.tile_offset(unit.m_tile, unit.n_tile) + slab_offset_of<Config>(params, unit.slab);
    if (!wait_flags(
            launch, order.num_local, DeviceObject::partial, tile,
            [&](int local) { return schedule.partial_flag(unit.reduction, local, tile); },
            [&](int local) { return rank_of_local(params, local); }))
      return;
    const bool is_own = unit.reduction == 0;
    sum_node<Config>(
        params, launch.area(rank, schedule.partial_offset(unit.reduction, 0) + place),
        launch.area(rank, (is_own ? schedule.sum_offset(node) : schedule.send_offset(unit.reduction)) + place));
    if (!is_own) {
      count_slab<Config>(launch, params, unit);
      continue;
    }
    if (!wait_flags(
            launch, schedule.num_nodes, DeviceObject::partial, unit.chunk,
            [&](int other) { return other == node ? -1 : schedule.arrived_flag(other, unit.chunk); },
            [&](int other) { return rail_peer_of(params, other); }))
      return;
    const int row = unit.m_tile * Config::BLOCK_M + unit.slab * 16;
    finish_slab<Config::BLOCK_N>(
        {launch.area(rank, schedule.sum_offset(0) + place), schedule.slot_bytes(), schedule.num_nodes},
        params.comm_type, params.output, false, buffers, row, rows_of(params, rank),
        unit.n_tile * Config::BLOCK_N);
  }
}

// Puts each chunk's sum to its owner elsewhere, once all of it is there.
template <class Config>
__device__ __forceinline__ void send_sums(const RankLaunch& launch, const NetworkLaunch& network,
                                          const NetworkParams& params) {
  const NetworkSchedule& schedule = params.network;
  const int lane = threadIdx.x % 32;
  const int node = params.reducers.node[params.comm.rank];
  for (int i = 0; i < params.comm.order.num_relayed; ++i) {
    const int owner = params.comm.order.relayed[i];
    for (int number = 0; number < schedule.max_chunks(); ++number) {
      const TileChunk chunk = schedule.chunk(number);
      if (num_slabs_of<Config>(params, owner, chunk.m_tile) == 0) continue;
      bool is_here = true;
      if (lane == 0) {
        is_here = launch.wait_flag(schedule.summed_flag(1 + i, number), DeviceRole::send, DeviceObject::chunk,
                                   owner, number);
      }
      if (!__shfl_sync(~0u, static_cast<int>(is_here), 0)) return;
      __syncwarp();
      const int64_t place = schedule.tile_offset(chunk.m_tile, chunk.first_n_tile);
      if (!network.put(lane == 0, owner, network.area_address(schedule.send_offset(1 + i) + place),
                       network.area_address(schedule.sum_offset(node) + place),
                       static_cast<uint32_t>(chunk.num_tiles * schedule.tile_bytes),
                       schedule.signal(node, number), DeviceRole::send))
        return;
    }
  }
}

// Tells the warps that sum of other nodes' sums of this rank's rows. A lane keeps the account of each node.
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
  static_assert(sizeof(EpilogueBuffers<1>) * (Config::NUM_THREADS / 32) <= sizeof(RankGemmStorage<Config>));
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
              stage_block<Config>(params, smem, work, block, accumulators);
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
