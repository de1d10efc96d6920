// SPDX-License-Identifier: MIT
#include "kernels/cuda/ring_attention_launch.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "kernels/cuda/gemm_type.h"
#include "kernels/gemm/tensor_map.h"
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

// Bytes from one row, head and batch of a caller's tensor to the next.
struct Strides {
  int64_t row, head, batch;
};
Strides strides_of(const RingAttentionCall& call, int heads, int64_t rows) {
  const int64_t dim_bytes = int64_t{call.dim} * 2;
  if (call.layout == MK_ATTENTION_BHSD) return {dim_bytes, rows * dim_bytes, heads * rows * dim_bytes};
  return {heads * dim_bytes, dim_bytes, rows * heads * dim_bytes};
}

bool encode(CUtensorMap* map, const RingAttentionCall& call, const void* data, const void* any, int heads,
            int64_t rows, int box_rows) {
  const Strides strides = strides_of(call, heads, std::max<int64_t>(1, rows));
  return encode_tensor_map_4d(map, gemm_type(call.dtype), rows > 0 && call.batch > 0 ? data : any,
                              {call.dim, rows, heads, call.batch}, {strides.row, strides.head, strides.batch},
                              box_rows, 64);
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
  if (!encode(&params.map_q, call, call.q, any, call.heads, rows, kernel.block_m) ||
      !encode(&params.map_k, call, call.k, any, call.kv_heads, rows, kernel.block_n) ||
      !encode(&params.map_v, call, call.v, any, call.kv_heads, rows, kernel.block_n)) {
    return cudaErrorInvalidValue;
  }
  params.tiles = plan.tiles;
  params.panels = plan.panels;
  params.num_push_ctas = plan.num_push_ctas;
  params.dim = call.dim;
  params.scale_log2 = std::fabs(call.scale) * 1.44269504088896341f;
  params.negate = call.scale < 0;
  params.o = static_cast<std::byte*>(call.o);
  const Strides strides = strides_of(call, call.heads, rows);
  params.o_row_bytes = strides.row;
  params.o_head_bytes = strides.head;
  params.o_batch_bytes = strides.batch;
  params.lse = call.lse;
  params.lse_rows = rows;

  // Cooperative: either all CTAs become resident, or none holds an SM while it waits for a peer.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(plan.plan.compute_ctas);
  config.blockDim = dim3(kernel.num_threads);
  config.dynamicSmemBytes = kernel.smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel.kernel, params);
}

}  // namespace mk
