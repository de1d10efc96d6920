// SPDX-License-Identifier: MIT
#include "kernels/cuda/moe_launch.h"

#include <algorithm>

#include "kernels/cuda/gemm_type.h"
#include "kernels/cuda/kernel_launch.h"
#include "kernels/gemm/tensor_map.h"
#include "kernels/ops/moe_dispatch_gemm/cuda_network_kernel.cuh"
#include "kernels/ops/moe_gemm_combine/cuda_network_kernel.cuh"

namespace mk {
namespace {

constexpr int RASTER_ROWS = 2048;  // that are walked before the next tile of N

template <class Table>
cudaError_t prepare_table(const Table& table) {
  for (const auto& tile : table.entries) {
    for (const auto& kernel : tile) {
      const cudaError_t error =
          cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel.kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.smem_bytes);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

// The weights of this rank's experts, each [depth, columns] or [columns, depth]. `any`: a valid address for a
// rank without experts.
bool encode_weights(CUtensorMap* map, const MoeCall& call, int num_experts, int64_t depth, int64_t columns,
                    int block_n, const void* any) {
  const GemmType type = gemm_type(call.dtype);
  const void* w = num_experts > 0 ? call.w : any;
  return call.w_layout == MK_LAYOUT_NK
             ? encode_tensor_map_of_slices(map, type, w, num_experts, columns, columns, depth, depth, block_n,
                                           GEMM_BLOCK_K)
             : encode_tensor_map_of_slices(map, type, w, num_experts, depth, depth, columns, columns,
                                           GEMM_BLOCK_K, 64);
}

// Two groups of 32 items for each warp that counts, or more where there are many.
int num_counting_ctas(const moe::CudaRouting& routing, int num_threads, int num_ctas) {
  const int64_t wanted = ceil_div(routing.num_items(), 2 * num_threads);
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, std::min(num_ctas, moe::MAX_COUNTING_CTAS)));
}

// All but what several nodes add.
bool fill_dispatch(moe_dispatch_gemm::CudaParams& params, const MoeCall& call, const MoePlan& plan,
                   const RankComm& comm, int num_threads) {
  const GemmTile& tile = moe::CUDA_TILES[plan.tile];
  const std::byte* area = comm.memory[comm.rank] + comm.arena;
  const int out_bytes = element_bytes(call.out_dtype);
  params.comm = comm;
  params.routing =
      cuda_routing(call, comm.rank, comm.nranks, plan.is_between_nodes ? plan.network.nodes.num_nodes : 1);
  params.routing.num_counting_ctas =
      num_counting_ctas(params.routing, num_threads, plan.plan.compute_ctas + plan.plan.copy_ctas);
  params.layout = plan.layout;
  for (int bank = 0; bank < 2; ++bank) {
    if (!encode_tensor_map(&params.map_rows[bank], gemm_type(call.dtype),
                           area + bank * comm.bank_bytes + plan.layout.rows(), call.capacity_rows, call.hidden,
                           call.hidden, moe::expert_box_rows(tile.block_m), GEMM_BLOCK_K)) {
      return false;
    }
  }
  if (!encode_weights(&params.map_w, call, params.routing.num_experts(comm.rank), call.hidden, call.inter,
                      tile.block_n, area)) {
    return false;
  }
  const int64_t ldy = std::max(call.ldy, call.inter);
  params.epilogue = {call.y,
                     ldy,
                     nullptr,
                     static_cast<int>(call.inter),
                     gemm_type(call.out_dtype),
                     gemm_type(call.out_dtype),
                     false,
                     reinterpret_cast<uintptr_t>(call.y) % 16 == 0 && ldy * out_bytes % 16 == 0};
  params.num_n_tiles = static_cast<int>(ceil_div(call.inter, tile.block_n));
  params.num_k_steps = static_cast<int>(ceil_div(call.hidden, GEMM_BLOCK_K));
  params.group_m = RASTER_ROWS / tile.block_m;
  params.num_compute_ctas = plan.plan.compute_ctas;
  params.first_flag = comm.nranks;
  params.blocks_per_source = plan.blocks_per_source;
  const auto row_bytes = static_cast<int>(plan.layout.row_bytes);
  // Where rows are many, CTAs that compute push a unit a warp first.
  const int push_ctas = plan.plan.copy_ctas + (tile.block_m < moe::BLOCK_ROWS ? 0 : plan.plan.compute_ctas);
  params.unit_rows =
      moe::unit_rows_for(row_bytes, params.routing.num_items(), push_ctas * (num_threads / 32 - 1));
  params.piece_rows = std::clamp(PUSH_CTA_PIECE_BYTES / row_bytes, 1, 32);
  const int64_t parts = ceil_div(row_bytes, PUSH_CTA_PIECE_BYTES);
  params.piece_bytes = static_cast<int>(round_up(ceil_div(row_bytes, parts), 16));
  params.x = static_cast<const std::byte*>(call.x);
  params.x_pitch = std::max(call.ldx, call.hidden) * 2;
  params.row_scale = call.factors;
  params.dispatched_rows = static_cast<std::byte*>(call.dispatched_rows);
  params.dispatched_pitch = std::max(call.ld_dispatched_rows, call.hidden) * 2;
  return true;
}

cudaError_t launch_dispatch(const MoeCall& call, const MoePlan& plan, const RankComm& comm,
                            cudaStream_t stream) {
  using namespace moe_dispatch_gemm;
  const bool is_transposed = call.w_layout == MK_LAYOUT_NK;
  const int num_ctas = plan.plan.compute_ctas + plan.plan.copy_ctas;
  if (plan.is_between_nodes) {
    const NetworkTable& table =
        call.dtype == MK_DTYPE_FP16 ? cuda_network_kernels_fp16() : cuda_network_kernels_bf16();
    const auto& kernel = table.entries[plan.tile][is_transposed];
    NetworkParams params{};
    if (!fill_dispatch(params, call, plan, comm, kernel.num_threads)) return cudaErrorInvalidValue;
    params.nodes = plan.network.nodes;
    params.chunks = plan.network.chunks;
    params.network = plan.network.layout;
    params.numbers = plan.network.numbers;
    params.num_split = plan.network.num_split;
    return launch_cooperatively(kernel.kernel, params, num_ctas + NUM_NETWORK_CTAS, kernel.num_threads,
                                kernel.smem_bytes, stream);
  }
  const CudaTable& table = call.dtype == MK_DTYPE_FP16 ? cuda_kernels_fp16() : cuda_kernels_bf16();
  const auto& kernel = table.entries[plan.tile][is_transposed];
  CudaParams params{};
  if (!fill_dispatch(params, call, plan, comm, kernel.num_threads)) return cudaErrorInvalidValue;
  return launch_cooperatively(kernel.kernel, params, num_ctas, kernel.num_threads, kernel.smem_bytes, stream);
}

// All but what several nodes add.
bool fill_combine(moe_gemm_combine::CudaParams& params, const MoeCall& call, const MoePlan& plan,
                  const RankComm& comm, int num_threads) {
  const GemmTile& tile = moe::CUDA_TILES[plan.tile];
  const std::byte* area = comm.memory[comm.rank] + comm.arena;
  params.comm = comm;
  params.routing =
      cuda_routing(call, comm.rank, comm.nranks, plan.is_between_nodes ? plan.network.nodes.num_nodes : 1);
  params.routing.num_counting_ctas = num_counting_ctas(
      params.routing, num_threads, plan.plan.compute_ctas + plan.plan.copy_ctas + plan.plan.reduce_ctas);
  params.layout = {plan.layout.counts_bytes, call.hidden * element_bytes(call.out_dtype)};
  const void* rows = call.x != nullptr ? call.x : area;
  const int64_t ld_rows = call.x != nullptr ? call.ldx : call.inter;
  if (!encode_tensor_map(&params.map_rows, gemm_type(call.dtype), rows, 1, call.inter, ld_rows,
                         moe::expert_box_rows(tile.block_m), GEMM_BLOCK_K) ||
      !encode_weights(&params.map_w, call, params.routing.num_experts(comm.rank), call.inter, call.hidden,
                      tile.block_n, area)) {
    return false;
  }
  params.products.ldc = call.hidden;
  params.products.n = static_cast<int>(call.hidden);
  params.products.out_type = params.products.bias_type = gemm_type(call.out_dtype);
  params.products.rows_aligned = true;
  params.num_n_tiles = static_cast<int>(ceil_div(call.hidden, tile.block_n));
  params.num_k_steps = static_cast<int>(ceil_div(call.inter, GEMM_BLOCK_K));
  params.group_m = RASTER_ROWS / tile.block_m;
  params.num_compute_ctas = plan.plan.compute_ctas;
  params.first_flag = comm.nranks;
  params.unit_rows = moe::unit_rows_for(params.layout.row_bytes);
  params.weights = call.factors;
  params.y = static_cast<std::byte*>(call.y);
  params.y_pitch = std::max(call.ldy, call.hidden) * element_bytes(call.out_dtype);
  return true;
}

cudaError_t launch_combine(const MoeCall& call, const MoePlan& plan, const RankComm& comm,
                           cudaStream_t stream) {
  using namespace moe_gemm_combine;
  const bool is_transposed = call.w_layout == MK_LAYOUT_NK;
  const int num_ctas = plan.plan.compute_ctas + plan.plan.copy_ctas + plan.plan.reduce_ctas;
  if (plan.is_between_nodes) {
    const NetworkTable& table =
        call.dtype == MK_DTYPE_FP16 ? cuda_network_kernels_fp16() : cuda_network_kernels_bf16();
    const auto& kernel = table.entries[plan.tile][is_transposed];
    NetworkParams params{};
    if (!fill_combine(params, call, plan, comm, kernel.num_threads)) return cudaErrorInvalidValue;
    params.nodes = plan.network.nodes;
    params.route_chunks = plan.network.route_chunks;
    params.sum_chunks = plan.network.sum_chunks;
    params.network = plan.network.sum_layout;
    params.numbers = plan.network.sum_numbers;
    params.num_split = plan.network.num_split;
    params.num_push_ctas = plan.plan.copy_ctas;
    params.num_relay_ctas = plan.plan.reduce_ctas;
    return launch_cooperatively(kernel.kernel, params, num_ctas + NUM_NETWORK_CTAS, kernel.num_threads,
                                kernel.smem_bytes, stream);
  }
  const CudaTable& table = call.dtype == MK_DTYPE_FP16 ? cuda_kernels_fp16() : cuda_kernels_bf16();
  const auto& kernel = table.entries[plan.tile][is_transposed];
  CudaParams params{};
  if (!fill_combine(params, call, plan, comm, kernel.num_threads)) return cudaErrorInvalidValue;
  return launch_cooperatively(kernel.kernel, params, num_ctas, kernel.num_threads, kernel.smem_bytes, stream);
}

}  // namespace

cudaError_t moe_prepare(bool is_between_nodes) {
  cudaError_t error = tensor_map_prepare();
  if (is_between_nodes) {
    if (error == cudaSuccess) error = prepare_table(moe_dispatch_gemm::cuda_network_kernels_bf16());
    if (error == cudaSuccess) error = prepare_table(moe_dispatch_gemm::cuda_network_kernels_fp16());
    if (error == cudaSuccess) error = prepare_table(moe_gemm_combine::cuda_network_kernels_bf16());
    if (error == cudaSuccess) error = prepare_table(moe_gemm_combine::cuda_network_kernels_fp16());
    return error;
  }
  if (error == cudaSuccess) error = prepare_table(moe_dispatch_gemm::cuda_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(moe_dispatch_gemm::cuda_kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(moe_gemm_combine::cuda_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(moe_gemm_combine::cuda_kernels_fp16());
  return error;
}

cudaError_t moe_launch(const MoeCall& call, const MoePlan& plan, const RankComm& comm, cudaStream_t stream) {
  if (!tensor_map_is_prepared()) return cudaErrorNotReady;
  return call.op == MK_OPERATOR_MOE_DISPATCH_GEMM ? launch_dispatch(call, plan, comm, stream)
                                                  : launch_combine(call, plan, comm, stream);
}

}  // namespace mk
