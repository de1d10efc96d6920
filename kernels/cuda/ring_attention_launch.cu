// SPDX-License-Identifier: MIT
#include "kernels/cuda/ring_attention_launch.h"

#include <cuda_runtime.h>

#include <cmath>

#include "kernels/cuda/kernel_launch.h"
#include "kernels/cuda/ring_attention_tensors.h"
#include "kernels/ops/ring_attention/cuda_network_kernel.cuh"
#include "kernels/ops/ring_attention/cuda_packed_kernel.cuh"
#include "kernels/ops/ring_attention/cuda_packed_network_kernel.cuh"

namespace mk {
namespace {

using namespace ring_attention;

template <class Params>
cudaError_t prepare_table(const CudaTableOf<Params>& table) {
  for (const CudaKernelOf<Params>& kernel : table.entries) {
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel.kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.smem_bytes);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class Params>
const CudaKernelOf<Params>& kernel_of(const CudaTableOf<Params>& table, const RingAttentionPlan& plan) {
  return table.entries[plan.tile];
}

// What kernels of packed sequences have, too. `rows`: of this rank.
template <class Params>
void fill_common(const RingAttentionCall& call, const RingAttentionPlan& plan, int64_t rows, Params* params) {
  params->num_push_ctas = plan.num_push_ctas;
  params->dim = call.dim;
  params->scale_log2 = std::fabs(call.scale) * 1.44269504088896341f;
  params->negate = call.scale < 0;
  params->o = static_cast<std::byte*>(call.o);
  const AttentionStrides strides = attention_strides(call, call.heads, rows);
  params->o_row_bytes = strides.row;
  params->o_head_bytes = strides.head;
  params->o_batch_bytes = strides.batch;
  params->lse = call.lse;
  params->lse_rows = rows;
}

// The kernel of the plan, and what the parameters of all kernels have in common; null: there is no such map.
template <class Params>
const CudaKernelOf<Params>* fill_params(const CudaTableOf<Params>& table, const RingAttentionCall& call,
                                        const RingAttentionPlan& plan, const RankComm& comm, Params* params) {
  const CudaKernelOf<Params>& kernel = kernel_of(table, plan);
  const int64_t rows = plan.tiles.slices.rows(comm.rank);
  const void* any = comm.memory[comm.rank] + comm.arena;  // a valid address for tensors without elements
  params->comm = comm;
  if (!encode_attention_map(&params->map_q, call, call.q, any, call.heads, rows, kernel.block_m) ||
      !encode_attention_map(&params->map_k, call, call.k, any, call.kv_heads, rows, kernel.block_n) ||
      !encode_attention_map(&params->map_v, call, call.v, any, call.kv_heads, rows, kernel.block_n)) {
    return nullptr;
  }
  params->tiles = plan.tiles;
  params->items = plan.items;
  fill_common(call, plan, rows, params);
  return &kernel;
}

template <class Params>
cudaError_t launch(const CudaKernelOf<Params>& kernel, const Params& params, const RankComm& comm, int num_ctas,
                   cudaStream_t stream) {
  const auto launch = comm.nranks == 1 ? launch_early<Params> : launch_cooperatively<Params>;
  return launch(kernel.kernel, params, num_ctas, kernel.num_threads, kernel.smem_bytes, stream);
}

template <class Params>
cudaError_t launch_in_node(const CudaTableOf<Params>& table, const RingAttentionCall& call,
                           const RingAttentionPlan& plan, const RankComm& comm, cudaStream_t stream) {
  Params params{};
  const auto* kernel = fill_params(table, call, plan, comm, &params);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  params.panels = plan.panels;
  return launch(*kernel, params, comm, plan.plan.compute_ctas, stream);
}

// What kernels of packed sequences have in common; null: there is no such map.
template <class Params>
const CudaKernelOf<PackedArguments<Params>>* fill_arguments(const CudaTableOf<PackedArguments<Params>>& table,
                                                            const RingAttentionCall& call,
                                                            const RingAttentionPlan& plan, const RankComm& comm,
                                                            PackedArguments<Params>* arguments) {
  const CudaKernelOf<PackedArguments<Params>>& kernel = kernel_of(table, plan);
  const int64_t rows = rows_of_maps(call, plan.tiles.slices.rows(comm.rank));
  fill_packed_arguments(call, plan.packed, comm, kernel.block_m, arguments);
  if (!encode_packed_map(arguments, PACKED_Q, call, call.q, call.heads, rows, kernel.block_m) ||
      !encode_packed_map(arguments, PACKED_K, call, call.k, call.kv_heads, rows, kernel.block_n) ||
      !encode_packed_map(arguments, PACKED_V, call, call.v, call.kv_heads, rows, kernel.block_n)) {
    return nullptr;
  }
  fill_common(call, plan, rows, &arguments->params);
  return &kernel;
}

cudaError_t launch_packed(const RingAttentionCall& call, const RingAttentionPlan& plan, const RankComm& comm,
                          cudaStream_t stream) {
  PackedArguments<PackedParams> arguments{};
  const auto* kernel =
      fill_arguments(call.dtype == MK_DTYPE_FP16 ? cuda_packed_kernels_fp16() : cuda_packed_kernels_bf16(),
                     call, plan, comm, &arguments);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  arguments.params.panels = plan.panels;
  return launch(*kernel, arguments, comm, plan.plan.compute_ctas, stream);
}

int num_ctas_between_nodes(const RingAttentionPlan& plan) {
  return plan.plan.compute_ctas + plan.num_forward_ctas + 1;
}

cudaError_t launch_between_nodes(const RingAttentionCall& call, const RingAttentionPlan& plan,
                                 const RankComm& comm, cudaStream_t stream) {
  NetworkParams params{};
  const auto* kernel =
      fill_params(call.dtype == MK_DTYPE_FP16 ? cuda_network_kernels_fp16() : cuda_network_kernels_bf16(), call,
                  plan, comm, &params);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  params.panels = plan.network;
  params.nodes = plan.nodes;
  params.num_compute_ctas = plan.plan.compute_ctas;
  return launch(*kernel, params, comm, num_ctas_between_nodes(plan), stream);
}

cudaError_t launch_packed_between_nodes(const RingAttentionCall& call, const RingAttentionPlan& plan,
                                        const RankComm& comm, cudaStream_t stream) {
  PackedArguments<PackedNetworkParams> arguments{};
  const auto* kernel = fill_arguments(
      call.dtype == MK_DTYPE_FP16 ? cuda_packed_network_kernels_fp16() : cuda_packed_network_kernels_bf16(),
      call, plan, comm, &arguments);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  arguments.params.panels = plan.packed_network;
  arguments.params.nodes = plan.nodes;
  arguments.params.num_compute_ctas = plan.plan.compute_ctas;
  return launch(*kernel, arguments, comm, num_ctas_between_nodes(plan), stream);
}

}  // namespace

cudaError_t ring_attention_prepare(bool between_nodes) {
  cudaError_t error = tensor_map_prepare();
  if (error == cudaSuccess) error = prepare_table(cuda_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(cuda_kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(cuda_alone_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(cuda_alone_kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(cuda_packed_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(cuda_packed_kernels_fp16());
  if (!between_nodes) return error;
  if (error == cudaSuccess) error = prepare_table(cuda_network_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(cuda_network_kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(cuda_packed_network_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(cuda_packed_network_kernels_fp16());
  return error;
}

cudaError_t ring_attention_launch(const RingAttentionCall& call, const RingAttentionPlan& plan,
                                  const RankComm& comm, cudaStream_t stream) {
  if (!tensor_map_is_prepared()) return cudaErrorNotReady;
  const bool is_packed = call.num_sequences > 0;
  if (comm.order.num_rail_peers > 0) {
    return is_packed ? launch_packed_between_nodes(call, plan, comm, stream)
                     : launch_between_nodes(call, plan, comm, stream);
  }
  if (is_packed) return launch_packed(call, plan, comm, stream);
  const bool is_fp16 = call.dtype == MK_DTYPE_FP16;
  if (comm.nranks == 1) {
    return launch_in_node(is_fp16 ? cuda_alone_kernels_fp16() : cuda_alone_kernels_bf16(), call, plan, comm,
                          stream);
  }
  return launch_in_node(is_fp16 ? cuda_kernels_fp16() : cuda_kernels_bf16(), call, plan, comm, stream);
}

}  // namespace mk
