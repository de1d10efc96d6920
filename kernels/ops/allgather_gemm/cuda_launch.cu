// SPDX-License-Identifier: MIT
#include "kernels/ops/allgather_gemm/cuda_launch.h"

#include <algorithm>

#include "kernels/cuda/gemm_type.h"
#include "kernels/cuda/rank_gemm_params.h"
#include "kernels/gemm/tensor_map.h"
#include "kernels/ops/allgather_gemm/cuda_kernel.cuh"

namespace mk::allgather_gemm {
namespace {

// What a warp brings to the gathered A at a time.
constexpr int64_t PIECE_BYTES = 16 << 10;

int piece_rows(int64_t row_bytes) {
  return static_cast<int>(std::clamp<int64_t>(PIECE_BYTES / std::max<int64_t>(1, row_bytes), 4, 128));
}

class CudaLaunch final : public RankGemmLaunch {
 public:
  CudaLaunch(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm)
      : kernel_(find_kernel(call.dtype == MK_DTYPE_FP16 ? cuda_kernels_fp16() : cuda_kernels_bf16(), plan.gemm,
                            call.b_layout == MK_LAYOUT_NK)),
        num_ctas_(plan.plan.compute_ctas + plan.plan.copy_ctas),
        own_rows_(rows_count(call.m, comm.nranks, comm.rank)) {
    params_.comm = comm;
    fill_schedule(call, plan);
    params_.epilogue = epilogue_of(call);
    params_.piece_rows = piece_rows(std::min<int64_t>(call.k, int64_t{plan.panel_steps} * GEMM_BLOCK_K) * 2);
    params_.a_pitch = std::max<int64_t>(call.lda, round_up(call.k, 8)) * 2;
    params_.a_gathered_pitch = std::max(call.lda_gathered, call.k) * 2;
  }

  bool fill_maps(const GemmCall& call, const RankGemmPlan& plan) {
    const RankComm& comm = params_.comm;
    std::byte* area = comm.memory[comm.rank] + comm.arena;
    const int64_t box_source = plan.merged ? call.m : ceil_div(call.m, comm.nranks);
    if (!fill_load(call, plan.gemm, own_rows_, box_source, kernel_.stage_bytes, area, &params_.load))
      return false;
    for (int bank = 0; bank < 2; ++bank) {
      if (!encode_tensor_map(&params_.map_gathered[bank], gemm_type(call.dtype), area + bank * comm.bank_bytes,
                             call.m, call.k, std::max<int64_t>(round_up(call.k, 8), 8),
                             a_box_rows(plan.gemm, box_source), GEMM_BLOCK_K)) {
        return false;
      }
    }
    return true;
  }

  cudaError_t enqueue(const GemmCall& call, TraceBuffer* trace, uint64_t ticket, cudaStream_t stream) override {
    if (!move_load(call, own_rows_, &params_.load)) return cudaErrorInvalidValue;
    move_epilogue(call, &params_.epilogue);
    params_.comm.trace = trace;
    params_.comm.ticket = ticket;
    params_.a = static_cast<const std::byte*>(call.a);
    params_.a_gathered = call.m > 0 && call.k > 0 ? static_cast<std::byte*>(call.a_gathered) : nullptr;
    return launch_kernel(kernel_, params_, num_ctas_, stream);
  }

 private:
  void fill_schedule(const GemmCall& call, const RankGemmPlan& plan) {
    const RankComm& comm = params_.comm;
    params_.schedule.topology.nranks = comm.nranks;
    params_.schedule.topology.rank = comm.rank;
    params_.schedule.m = call.m;
    params_.schedule.k = call.k;
    params_.schedule.chunk_rows = plan.plan.chunk_rows;
    params_.schedule.tile_m = plan.gemm.block_m;
    params_.schedule.max_chunks = plan.plan.num_chunks;
    params_.m = static_cast<int>(call.m);
    params_.max_rows = static_cast<int>(std::max<int64_t>(1, ceil_div(call.m, comm.nranks)));
    params_.merged = plan.merged;
    params_.tiles = tiles_of(call, plan);
    params_.order = {std::max(1, plan.tile_rows), plan.merged ? 0 : comm.nranks - 1};
    params_.push_order = {plan.merged ? 0 : params_.order.tile_rows,
                          std::max(1, params_.order.num_in_turn) * plan.plan.chunk_rows / plan.gemm.block_m,
                          params_.tiles.group_m, std::max(1, params_.tiles.num_n_tiles),
                          params_.tiles.num_workers};
    params_.num_panels = plan.num_panels;
    params_.panel_steps = plan.panel_steps;
  }

  const RankGemmKernel<CudaParams>& kernel_;
  const int num_ctas_;
  const int64_t own_rows_;
  CudaParams params_{};
};

}  // namespace

cudaError_t cuda_prepare() {
  const cudaError_t error = prepare_table(cuda_kernels_bf16());
  return error != cudaSuccess ? error : prepare_table(cuda_kernels_fp16());
}

std::unique_ptr<RankGemmLaunch> make_cuda_launch(const GemmCall& call, const RankGemmPlan& plan,
                                                 const RankComm& comm) {
  auto launch = std::make_unique<CudaLaunch>(call, plan, comm);
  if (!launch->fill_maps(call, plan)) return nullptr;
  return launch;
}

}  // namespace mk::allgather_gemm
