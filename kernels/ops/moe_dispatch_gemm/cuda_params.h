// SPDX-License-Identifier: MIT
// MoE dispatch + GEMM on GPUs: what its kernel is given, and what lies where in a bank.
#pragma once

#include <cuda.h>

#include "kernels/device/gemm_epilogue_params.h"
#include "kernels/device/rank_comm.h"
#include "kernels/ops/moe_dispatch_gemm/cuda_layout.h"
#include "kernels/ops/moe_dispatch_gemm/network_schedule.h"
#include "kernels/ops/moe_routing/cuda_params.h"

namespace mk::moe_dispatch_gemm {

struct CudaParams {
  RankComm comm;
  moe::CudaRouting routing;
  CUtensorMap map_rows[2];  // received rows, in both banks
  CUtensorMap map_w;
  EpilogueParams epilogue;  // y
  CudaLayout layout;
  int num_n_tiles;
  int num_k_steps;
  int group_m;
  int num_compute_ctas;
  int first_flag;         // of row blocks
  int blocks_per_source;  // flags of a source
  int unit_rows;
  // A push warp's buffer takes piece_rows whole rows, or piece_bytes of one.
  int piece_rows;
  int piece_bytes;
  const std::byte* x;
  int64_t x_pitch;             // bytes
  const float* row_scale;      // or null
  std::byte* dispatched_rows;  // or null
  int64_t dispatched_pitch;
};

// Of several nodes.
struct NetworkParams : CudaParams {
  moe::NodeMap nodes;
  moe::PacketChunks chunks;
  NetworkLayout network;
  NetworkNumbers numbers;
  int num_split;  // experts of a rank, see near_tiles.h
};

}  // namespace mk::moe_dispatch_gemm
