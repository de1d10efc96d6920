// SPDX-License-Identifier: MIT
#include "kernels/ops/gemm_reduce_scatter/cuda_launch.h"

#include <algorithm>

#include "kernels/cuda/gemm_type.h"
#include "kernels/cuda/rank_gemm_params.h"
#include "kernels/ops/gemm_reduce_scatter/cuda_kernel.cuh"
#include "kernels/ops/gemm_reduce_scatter/cuda_network_kernel.cuh"
#include "kernels/ops/gemm_reduce_scatter/cuda_swapped_kernel.cuh"
#include "kernels/ops/gemm_reduce_scatter/cuda_tagged_kernel.cuh"

namespace mk::gemm_reduce_scatter {
namespace {

// Inside a node and between nodes. `num_more_ctas`: beside those that compute.
template <class Params>
class ReductionLaunchOf : public RankGemmLaunch {
 public:
  template <class Tile, int NUM_TILES>
  ReductionLaunchOf(const RankGemmTable<Params, NUM_TILES>& table, const Tile (&tiles)[NUM_TILES],
                    int num_more_ctas, const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm)
      : kernel_(find_kernel(table, tiles, plan.gemm, call.b_layout == MK_LAYOUT_NK)),
        num_ctas_(plan.plan.compute_ctas + num_more_ctas),
        num_cluster_ctas_(plan.gemm.num_cluster_ctas()),
        is_swapped_(plan.gemm.is_swapped),
        max_rows_(plan.splits_rows ? ceil_div(call.m, comm.nranks) : call.m) {
    params_.comm = comm;
    params_.tiles = tiles_of(call, plan);
    params_.output = epilogue_of(call);
    params_.owner_tiles = plan.owner_tiles;
    params_.comm_type = gemm_type(call.comm_dtype);
    params_.reduction = plan.reduction;
    params_.order = {std::max(1, plan.tile_rows), 0};
    params_.m = static_cast<int>(call.m);
    params_.max_rows = static_cast<int>(std::max<int64_t>(1, max_rows_));
    params_.splits_rows = plan.splits_rows;
    params_.splits_columns = plan.splits_columns;
    params_.is_direct = plan.is_direct;
    params_.tiles_per_owner = static_cast<int>(plan.tiles_per_owner);
    params_.slot_bytes = plan.slot_bytes;
    params_.first_gather_flag = static_cast<int>(plan.num_partial_flags);
    params_.gather_begin = plan.gather_begin;
    params_.gather_pitch = plan.gather_pitch;
    params_.is_paced = plan.is_paced;
    params_.sums_beside = plan.sums_beside;
  }

  bool fill_maps(const GemmCall& call, const RankGemmPlan& plan) {
    const void* any = params_.comm.memory[params_.comm.rank] + params_.comm.arena;
    return is_swapped_ ? fill_swapped_load(call, plan.gemm, call.a, any, &params_.load)
                       : fill_load(call, plan.gemm, call.m, max_rows_, any, &params_.load);
  }

  cudaError_t enqueue(const GemmCall& call, const LaunchDetails& details, cudaStream_t stream) override {
    if (!move_load(call, call.m, is_swapped_, &params_.load)) return cudaErrorInvalidValue;
    move_epilogue(call, &params_.output);
    fill(details, &params_.comm);
    return launch_kernel(kernel_, params_, num_ctas_, stream, num_cluster_ctas_);
  }

 private:
  const RankGemmKernel<Params>& kernel_;
  const int num_ctas_;
  const int num_cluster_ctas_;
  const bool is_swapped_;
  const int64_t max_rows_;  // of an owner

 protected:
  Params params_{};
};

// Two-shot, owners distribute rows of C, in pieces of 16 bytes. Every other output is written by its rank
// alone; so is one that is added to.
PeerOutput two_shot_output(const GemmCall& call, Reduction reduction) {
  const int64_t bytes = element_bytes(call.out_dtype);
  const bool is_whole = call.m > 0 && call.n > 0 && call.n * bytes % 16 == 0 && call.ldc * bytes % 16 == 0;
  if (reduction != Reduction::two_shot || call.accumulate || !is_whole) return {};
  return {call.c, static_cast<size_t>(((call.m - 1) * call.ldc + call.n) * bytes), call.ldc};
}

class ReductionLaunch final : public ReductionLaunchOf<CudaParams> {
 public:
  ReductionLaunch(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm)
      : ReductionLaunchOf(call.dtype == MK_DTYPE_FP16 ? cuda_kernels_fp16() : cuda_kernels_bf16(),
                          RANK_GEMM_TILES, 0, call, plan, comm) {}

  PeerOutput peer_output(const GemmCall& call) const override {
    return two_shot_output(call, params_.reduction);
  }
};

class SwappedReductionLaunch final : public ReductionLaunchOf<SwappedParams> {
 public:
  SwappedReductionLaunch(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm)
      : ReductionLaunchOf(call.dtype == MK_DTYPE_FP16 ? swapped::kernels_fp16() : swapped::kernels_bf16(),
                          RANK_SWAPPED_TILES, 0, call, plan, comm) {
    params_.merged_rows = plan.merged_rows;
    params_.rows_of_owner = Divisor(plan.merged_rows.max_rows);
    params_.swapped_tiles = plan.swapped_tiles;
    params_.tiles.set_num_workers(plan.gemm.num_workers);
  }

  PeerOutput peer_output(const GemmCall& call) const override {
    return two_shot_output(call, params_.reduction);
  }
};

class TaggedReductionLaunch final : public ReductionLaunchOf<TaggedParams> {
 public:
  TaggedReductionLaunch(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm)
      : ReductionLaunchOf(call.dtype == MK_DTYPE_FP16 ? tagged::kernels_fp16() : tagged::kernels_bf16(),
                          TAGGED_TILES, 0, call, plan, comm) {
    params_.packets = plan.packets;
    params_.packet_slot_bytes = plan.packet_slot_bytes;
    params_.packet_gather_begin = comm.nranks * plan.packet_slot_bytes;
    params_.merged_rows = plan.merged_rows;
  }

  PeerOutput peer_output(const GemmCall&) const override { return {}; }
};

class NetworkReductionLaunch final : public ReductionLaunchOf<NetworkParams> {
 public:
  NetworkReductionLaunch(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm)
      : ReductionLaunchOf(
            call.dtype == MK_DTYPE_FP16 ? cuda_network_kernels_fp16() : cuda_network_kernels_bf16(),
            RANK_GEMM_TILES, plan.plan.reduce_ctas + NUM_NETWORK_CTAS, call, plan, comm) {
    params_.network = plan.network;
    params_.network_tiles = plan.network_tiles;
    params_.reducers = plan.reducers;
  }

  // Each output is written by its rank alone.
  PeerOutput peer_output(const GemmCall&) const override { return {}; }
};

template <class Launch>
std::unique_ptr<RankGemmLaunch> make(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm) {
  auto launch = std::make_unique<Launch>(call, plan, comm);
  if (!launch->fill_maps(call, plan)) return nullptr;
  return launch;
}

}  // namespace

cudaError_t cuda_prepare(bool between_nodes) {
  cudaError_t error = prepare_table(cuda_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(cuda_kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(swapped::kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(swapped::kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(tagged::kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(tagged::kernels_fp16());
  if (!between_nodes) return error;
  if (error == cudaSuccess) error = prepare_table(cuda_network_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(cuda_network_kernels_fp16());
  return error;
}

std::unique_ptr<RankGemmLaunch> make_cuda_launch(const GemmCall& call, const RankGemmPlan& plan,
                                                 const RankComm& comm) {
  if (comm.order.num_rail_peers > 0) return make<NetworkReductionLaunch>(call, plan, comm);
  if (plan.gemm.is_swapped) return make<SwappedReductionLaunch>(call, plan, comm);
  return plan.is_tagged ? make<TaggedReductionLaunch>(call, plan, comm)
                        : make<ReductionLaunch>(call, plan, comm);
}

}  // namespace mk::gemm_reduce_scatter
