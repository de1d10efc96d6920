// SPDX-License-Identifier: MIT
// How a mixture-of-experts operator runs on GPUs. Pure; what the ranks must agree on follows
// from globally equal fields alone.
#pragma once

#include "kernels/cuda/memory_rate.h"
#include "kernels/operator_call.h"
#include "kernels/ops/moe_dispatch_gemm/cuda_layout.h"
#include "kernels/ops/moe_dispatch_gemm/network_schedule.h"
#include "kernels/ops/moe_gemm_combine/network_schedule.h"
#include "kernels/ops/moe_routing/cuda_params.h"
#include "lib/status.h"

namespace mk {

// Of several nodes.
struct MoeNetworkPlan {
  moe::NodeMap nodes;
  int num_split;  // experts of a rank, see near_tiles.h
  // Dispatch.
  moe::PacketChunks chunks;
  moe_dispatch_gemm::NetworkLayout layout;
  moe_dispatch_gemm::NetworkNumbers numbers;
  // Combine.
  moe::PacketChunks route_chunks;
  moe::PacketChunks sum_chunks;
  moe_gemm_combine::NetworkLayout sum_layout;
  moe_gemm_combine::NetworkNumbers sum_numbers;
};

struct MoePlan {
  mk_plan_t plan;
  int tile = 0;  // of moe::CUDA_TILES
  // Of a bank: a dispatch's own need, and for maxima that of both operators. What a combine needs is known on
  // the device alone.
  int64_t area_bytes = 0;
  // Dispatch.
  moe_dispatch_gemm::CudaLayout layout{};
  int blocks_per_source = 0;  // flags
  bool is_between_nodes = false;
  MoeNetworkPlan network{};
};

// `nodes`: where there are several, else null. MK_ERROR_UNSUPPORTED: more experts, wider rows, more flags or
// memory than a launch has, or no such tile.
Result<MoePlan> moe_plan(const MoeCall& call, int nranks, int num_sms, const TopologyView* nodes = nullptr,
                         double memory_bytes_per_us = H100_MEMORY_BYTES_PER_US);

// The routing's part of a kernel's parameter, but for pointers.
moe::CudaRouting cuda_routing(const MoeCall& call, int rank, int nranks, int num_nodes = 1);

}  // namespace mk
