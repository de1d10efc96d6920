// SPDX-License-Identifier: MIT
// MoE GEMM + combine on GPUs: what its kernel is given.
#pragma once

#include <cuda.h>

#include "kernels/device/gemm_epilogue_params.h"
#include "kernels/device/rank_comm.h"
#include "kernels/ops/moe_gemm_combine/cuda_layout.h"
#include "kernels/ops/moe_gemm_combine/network_schedule.h"
#include "kernels/ops/moe_routing/cuda_params.h"

namespace mk::moe_gemm_combine {

struct CudaParams {
  RankComm comm;
  moe::CudaRouting routing;
  CUtensorMap map_rows;  // the caller's; how many there are only the device knows
  CUtensorMap map_w;
  EpilogueParams products;  // but for the pointer
  CudaLayout layout;
  int num_n_tiles;
  int num_k_steps;
  int group_m;
  int num_compute_ctas;
  int first_flag;  // of blocks that come home
  int unit_rows;
  const float* weights;  // [tokens, topk]
  std::byte* y;
  int64_t y_pitch;  // bytes
};

// Of several nodes.
struct NetworkParams : CudaParams {
  moe::NodeMap nodes;
  moe::PacketChunks route_chunks;
  moe::PacketChunks sum_chunks;
  NetworkLayout network;
  NetworkNumbers numbers;
  int num_split;       // experts of a rank, see near_tiles.h
  int num_push_ctas;   // behind those that compute,
  int num_relay_ctas;  // and in front of the one that has the network
};

}  // namespace mk::moe_gemm_combine
