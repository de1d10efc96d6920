// SPDX-License-Identifier: MIT
// The plain product's kernel: the roles of the mainloop and the epilogue, and nothing else.
#pragma once

#include <cuda.h>

#include "kernels/device/gemm_epilogue.cuh"
#include "kernels/device/gemm_mainloop.cuh"
#include "kernels/device/gemm_partials.cuh"
#include "kernels/device/tile_scheduler.h"
#include "kernels/gemm/gemm_plan.h"
#include "kernels/ptx/warp.cuh"

namespace mk {

struct GemmParams {
  CUtensorMap map_a;
  CUtensorMap map_b;
  CUtensorMap map_c;
  TileSchedule schedule;
  EpilogueParams epilogue;
  int num_cluster_ctas;
  void* workspace;
};

template <class Config>
struct GemmStorage {
  MainloopStorage<Config> mainloop;
  EpilogueBuffers epilogue[Config::NUM_CONSUMER_WARPS];
};

using GemmKernel = void (*)(GemmParams);

struct GemmKernelEntry {
  GemmKernel kernel;
  int num_threads;
  int smem_bytes;
};

// What a layout is called in the tables: A and B as they come, B transposed, A transposed.
enum GemmLayout { GEMM_KN = 0, GEMM_NK = 1, GEMM_A_TRANSPOSED_KN = 2, NUM_GEMM_LAYOUTS = 3 };

struct GemmKernelTable {
  GemmKernelEntry entries[NUM_GEMM_TILES][NUM_GEMM_LAYOUTS];
};
// One translation unit an input type, so that they compile in parallel.
const GemmKernelTable& gemm_kernels_bf16();
const GemmKernelTable& gemm_kernels_fp16();

template <class Config>
__device__ __forceinline__ void producer_role(GemmStorage<Config>& smem, const GemmParams& params,
                                              const ClusterPosition& cluster) {
  if (threadIdx.x % 128 != 0) return;
  ptx::prefetch_tensormap(&params.map_a);
  ptx::prefetch_tensormap(&params.map_b);
  TileCursor tiles(params.schedule, blockIdx.x / cluster.num_ctas);
  StageCursor<Config::NUM_STAGES> stages;
  TileWork work;
  while (tiles.next(&work)) {
    load_tile<Config>(smem.mainloop, stages, &params.map_a, &params.map_b,
                      work.m_tile * cluster.num_ctas + cluster.cta_rank, work, cluster, AIsReady());
  }
}

template <class Config>
__device__ __forceinline__ void consumer_role(GemmStorage<Config>& smem, const GemmParams& params,
                                              const ClusterPosition& cluster, int warpgroup) {
  const int warp = threadIdx.x / 32;
  const PartialsLayout partials(gridDim.x, Config::BLOCK_M, Config::BLOCK_N);
  TileCursor tiles(params.schedule, blockIdx.x / cluster.num_ctas);
  StageCursor<Config::NUM_STAGES> stages;
  float accumulators[Config::BLOCK_N / 2];
  TileWork work;
  while (tiles.next(&work)) {
    multiply_tile<Config>(accumulators, smem.mainloop, stages, work.k_end - work.k_begin, warpgroup, cluster);
    const int m = (work.m_tile * cluster.num_ctas + cluster.cta_rank) * Config::BLOCK_M + warp * EPILOGUE_ROWS;
    const bool has_rows = m < params.epilogue.m;
    if (!work.is_owner) {
      partials_store(accumulators, partials, params.workspace, blockIdx.x, warpgroup, has_rows);
      continue;
    }
    for (int peer = work.first_peer; peer < work.first_peer + work.num_peers; ++peer) {
      partials_add(accumulators, partials, params.workspace, peer * cluster.num_ctas + cluster.cta_rank, warpgroup,
                   has_rows);
    }
    store_tile_rows(accumulators, params.epilogue, &params.map_c, smem.epilogue[warp], m,
                    work.n_tile * Config::BLOCK_N);
  }
  drain_stores();
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1) gemm_kernel(const __grid_constant__ GemmParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  GemmStorage<Config>& smem = *reinterpret_cast<GemmStorage<Config>*>(smem_bytes);
  const ClusterPosition cluster = {ptx::cluster_ctarank(), static_cast<uint32_t>(params.num_cluster_ctas)};
  if (threadIdx.x == 0) mainloop_init<Config>(smem.mainloop, cluster);
  ptx::barrier_cluster_arrive_release();
  ptx::barrier_cluster_wait_acquire();

  // With two consumers the registers of a CTA (168 a thread at launch) are dealt anew: 128 accumulators and
  // their addresses do not fit in 168.
  constexpr bool DEAL_REGISTERS = Config::NUM_CONSUMER_WARPGROUPS > 1;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == Config::NUM_CONSUMER_WARPGROUPS) {
    if constexpr (DEAL_REGISTERS) ptx::setmaxnreg_dec<40>();
    producer_role<Config>(smem, params, cluster);
  } else {
    if constexpr (DEAL_REGISTERS) ptx::setmaxnreg_inc<232>();
    consumer_role<Config>(smem, params, cluster, warpgroup);
  }

  // A CTA must outlive the multicasts into it and the arrivals at its barriers.
  __syncwarp();
  ptx::barrier_cluster_arrive_release();
  ptx::barrier_cluster_wait_acquire();
}

template <GemmTile TILE, class Element, bool A_TRANSPOSED, bool B_TRANSPOSED>
constexpr GemmKernelEntry gemm_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, Element, A_TRANSPOSED, B_TRANSPOSED>;
  static_assert(sizeof(GemmStorage<Config>) <= 227 * 1024);
  return {gemm_kernel<Config>, Config::NUM_THREADS, sizeof(GemmStorage<Config>)};
}

template <class Element>
const GemmKernelTable& gemm_kernel_table() {
  static const GemmKernelTable table = [] {
    GemmKernelTable t;
    const auto fill = [&t]<int TILE>() {
      t.entries[TILE][GEMM_KN] = gemm_kernel_entry<GEMM_TILES[TILE], Element, false, false>();
      t.entries[TILE][GEMM_NK] = gemm_kernel_entry<GEMM_TILES[TILE], Element, false, true>();
      t.entries[TILE][GEMM_A_TRANSPOSED_KN] = gemm_kernel_entry<GEMM_TILES[TILE], Element, true, false>();
    };
    fill.template operator()<0>();
    fill.template operator()<1>();
    fill.template operator()<2>();
    fill.template operator()<3>();
    static_assert(NUM_GEMM_TILES == 4);
    return t;
  }();
  return table;
}

}  // namespace mk
