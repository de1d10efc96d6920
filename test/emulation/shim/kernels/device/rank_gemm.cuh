// SPDX-License-Identifier: MIT
// What the kernels of the GEMM operators name of a product, which does not run on the host.
#pragma once

#include <utility>

#include "kernels/device/bulk_push.cuh"
#include "kernels/device/gemm_epilogue.cuh"
#include "kernels/device/gemm_partials_layout.h"
#include "kernels/device/rank_gemm_kernel.h"
#include "kernels/device/rank_launch.cuh"
#include "kernels/device/rank_tiles.h"

namespace mk {

template <int M, int N, bool PING_PONG, class Element, bool A_TRANSPOSED, bool B_TRANSPOSED>
struct GemmConfig;
template <GemmTile TILE, class Element, bool B_TRANSPOSED>
struct RankGemmConfig;
template <class Config>
struct MainloopStorage;
// Stages as a producer and who stands in for consumers hand them to each other: their barriers count phases.
template <int NUM_STAGES>
struct StageCursor {
  int stage = 0;
  uint32_t phase = 0;
  void advance() {
    if (++stage < NUM_STAGES) return;
    stage = 0;
    phase ^= 1;
  }
};
inline void mbarrier_wait(uint64_t* barrier, uint32_t phase) {
  while ((__atomic_load_n(barrier, __ATOMIC_ACQUIRE) & 1) == phase) emulation::pause();
}
template <class Config>
struct RankGemmStorage;
// What storage_init() does beside the mainloop's part.
template <class Config>
void staging_init(RankGemmStorage<Config>& smem) {
  for (int slot = 0; slot < NUM_STAGED_TILES; ++slot) {
    ptx::mbarrier_init(&smem.staged_full[slot], Config::BLOCK_M / 16);
    ptx::mbarrier_init(&smem.staged_empty[slot], NUM_PUSH_WARPS);
  }
  push_init(smem.push);
}
template <int BLOCK_N, int NUM_BUFFERS>
class DeferredRows;
struct AIsReady {};
constexpr int NUM_COPY_WARPS = NUM_PUSH_WARPS + 1;
struct CopyWarp {
  int warp;
  int num_ctas;
  bool pushes() const { return warp < NUM_PUSH_WARPS; }
  bool greets() const { return blockIdx.x == 0 && warp == NUM_PUSH_WARPS; }
  int index() const { return warp * num_ctas + static_cast<int>(blockIdx.x); }
};

}  // namespace mk
