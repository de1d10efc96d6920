// SPDX-License-Identifier: MIT
// What the kernels of the GEMM operators name of a product, which does not run on the host.
#pragma once

#include <utility>

#include "kernels/device/bulk_push.cuh"
#include "kernels/device/gemm_partials_layout.h"
#include "kernels/device/rank_gemm_kernel.h"
#include "kernels/device/rank_launch.cuh"
#include "kernels/device/rank_tiles.h"

namespace mk {

template <int M, int N, bool PING_PONG, class Element, bool CLUSTER, bool B_TRANSPOSED>
struct GemmConfig;
struct ClusterPosition {
  int rank;
  int size;
};
template <class Config>
struct MainloopStorage;
template <int NUM_STAGES>
struct StageCursor;
template <class Config>
struct RankGemmStorage;
struct AIsReady {};
constexpr int NUM_COPY_WARPS = NUM_PUSH_WARPS + 1;
struct CopyWarp {
  int warp;
  int num_ctas;
  bool pushes() const { return false; }
  bool greets() const { return false; }
  int index() const { return warp * num_ctas + static_cast<int>(blockIdx.x); }
};

}  // namespace mk
