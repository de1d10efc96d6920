// SPDX-License-Identifier: MIT
#include "kernels/cuda/ring_attention_launch.h"

#include <cuda_runtime.h>

#include <cmath>

#include "kernels/cuda/cooperative_launch.h"
#include "kernels/cuda/ring_attention_tensors.h"
#include "kernels/ops/ring_attention/cuda_kernel.cuh"

namespace mk {
namespace {

using namespace ring_attention;

const CudaKernel& find_kernel(const RingAttentionCall& call, const RingAttentionPlan& plan) {
  const CudaTable& table = call.dtype == MK_DTYPE_FP16 ? cuda_kernels_fp16() : cuda_kernels_bf16();
  int at = 0;
  while (at + 1 < NUM_CUDA_KERNELS && table.entries[at].head_dim != plan.head_dim) ++at;
  return table.entries[at];
}

cudaError_t prepare_table(const CudaTable& table) {
  for (const CudaKernel& kernel : table.entries) {
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel.kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.smem_bytes);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t ring_attention_prepare() {
  cudaError_t error = tensor_map_prepare();
  if (error == cudaSuccess) error = prepare_table(cuda_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(cuda_kernels_fp16());
  return error;
}

cudaError_t ring_attention_launch(const RingAttentionCall& call, const RingAttentionPlan& plan,
                                  const RankComm& comm, cudaStream_t stream) {
  if (!tensor_map_is_prepared()) return cudaErrorNotReady;
  const CudaKernel& kernel = find_kernel(call, plan);
  const int64_t rows = plan.tiles.slices.rows(comm.rank);
  const void* any = comm.memory[comm.rank] + comm.arena;  // a valid address for tensors without elements
  CudaParams params{};
  params.comm = comm;
  if (!encode_attention_map(&params.map_q, call, call.q, any, call.heads, rows, kernel.block_m) ||
      !encode_attention_map(&params.map_k, call, call.k, any, call.kv_heads, rows, kernel.block_n) ||
      !encode_attention_map(&params.map_v, call, call.v, any, call.kv_heads, rows, kernel.block_n)) {
    return cudaErrorInvalidValue;
  }
  params.tiles = plan.tiles;
  params.panels = plan.panels;
  params.num_push_ctas = plan.num_push_ctas;
  params.dim = call.dim;
  params.scale_log2 = std::fabs(call.scale) * 1.44269504088896341f;
  params.negate = call.scale < 0;
  params.o = static_cast<std::byte*>(call.o);
  const AttentionStrides strides = attention_strides(call, call.heads, rows);
  params.o_row_bytes = strides.row;
  params.o_head_bytes = strides.head;
  params.o_batch_bytes = strides.batch;
  params.lse = call.lse;
  params.lse_rows = rows;

  return launch_cooperatively(kernel.kernel, params, plan.plan.compute_ctas, kernel.num_threads,
                              kernel.smem_bytes, stream);
}

}  // namespace mk
