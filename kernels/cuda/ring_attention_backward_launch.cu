// SPDX-License-Identifier: MIT
#include "kernels/cuda/ring_attention_backward_launch.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/kernel_launch.h"
#include "kernels/cuda/ring_attention_tensors.h"
#include "kernels/ops/ring_attention_backward/cuda_network_kernel.cuh"
#include "kernels/ops/ring_attention_backward/cuda_packed_kernel.cuh"
#include "kernels/ops/ring_attention_backward/cuda_packed_network_kernel.cuh"
#include "kernels/ops/ring_attention_backward/cuda_packed_row_sums.cuh"
#include "kernels/ops/ring_attention_backward/cuda_row_sums.cuh"

namespace mk {
namespace {

using namespace ring_attention_backward;

template <class Table>
cudaError_t prepare_table(const Table& table) {
  for (const auto& kernel : table.entries) {
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel.kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.smem_bytes);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Modules are loaded where a function is first asked about.
template <class Element>
cudaError_t prepare_row_sums() {
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(row_sums_kernel<Element>));
  if (error != cudaSuccess) return error;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(packed_row_sums_kernel<Element>));
}

HeadRows head_rows(const RingAttentionCall& call, const void* data, int heads, int64_t rows) {
  const AttentionStrides strides = attention_strides(call, heads, rows);
  return {static_cast<std::byte*>(const_cast<void*>(data)), strides.row, strides.head, strides.batch};
}

// `rows`: of this rank, as maps have them.
cudaError_t launch_row_sums(const RingAttentionCall& call, const RingAttentionBackwardPlan& plan,
                            const RankComm& comm, int64_t rows, int64_t num_blocks, cudaStream_t stream) {
  RowSumParams params{};
  params.state = comm.state;
  params.area = comm.memory[comm.rank] + comm.arena;
  params.bank_bytes = comm.bank_bytes;
  params.slices = plan.tiles.slices;
  params.places = plan.row_places();
  params.query_sums = plan.query_sums();
  params.rank = comm.rank;
  params.heads = call.heads;
  params.dim = call.dim;
  params.o = head_rows(call, call.forward_o, call.heads, rows);
  params.d_o = head_rows(call, call.d_o, call.heads, rows);
  params.lse = call.forward_lse;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(num_blocks, MOST_ROW_SUM_CTAS)));
  config.blockDim = dim3(32 * ROW_SUM_WARPS);
  config.stream = stream;
  const bool is_fp16 = call.dtype == MK_DTYPE_FP16;
  if (call.num_sequences == 0)
    return cudaLaunchKernelEx(&config, is_fp16 ? row_sums_kernel<__half> : row_sums_kernel<__nv_bfloat16>,
                              params);
  const PackedRowSumParams packed = {params, plan.packed.slices, call.layout == MK_ATTENTION_BHSD};
  return cudaLaunchKernelEx(
      &config, is_fp16 ? packed_row_sums_kernel<__half> : packed_row_sums_kernel<__nv_bfloat16>, packed);
}

// Where there are rows the first kernel comes behind all that was before, and one rank's second may begin
// beside it; unless its CTAs wait for such as come later.
template <class Params>
cudaError_t launch_both(const CudaKernelOf<Params>& kernel, const Params& params, int num_ctas,
                        const RingAttentionCall& call, const RingAttentionBackwardPlan& plan,
                        const RankComm& comm, int64_t rows, cudaStream_t stream) {
  const int64_t num_blocks =
      int64_t{plan.panels.num_query_heads} * plan.panels.num_runs * plan.panels.run_blocks;
  const bool has_rows = rows > 0 && num_blocks > 0;
  if (has_rows) {
    const cudaError_t error = launch_row_sums(call, plan, comm, rows, num_blocks, stream);
    if (error != cudaSuccess) return error;
  }
  const bool is_early = has_rows && comm.nranks == 1 && !std::is_same_v<Params, CircularParams>;
  const auto launch = is_early ? launch_early<Params> : launch_cooperatively<Params>;
  return launch(kernel.kernel, params, num_ctas, kernel.num_threads, kernel.smem_bytes, stream);
}

// Of the kernels of packed sequences: fills in what all of them have, then enqueues both kernels.
template <class Params>
cudaError_t launch_packed_with(const CudaTableOf<ring_attention::PackedArguments<Params>>& table,
                               const RingAttentionCall& call, const RingAttentionBackwardPlan& plan,
                               const RankComm& comm, int num_ctas,
                               ring_attention::PackedArguments<Params>& arguments, cudaStream_t stream) {
  const auto& kernel = table.entries[plan.panels.head_dim == 64 ? 0 : 1];
  fill_packed_arguments(call, plan.packed, comm, TILE_ROWS, &arguments);
  const int64_t rows = rows_of_maps(call, plan.tiles.slices.rows(comm.rank));
  const auto encode = [&](int which, const void* data, int heads) {
    return encode_packed_map(&arguments, which, call, data, heads, rows, BLOCK_ROWS);
  };
  if (!encode(ring_attention::PACKED_Q, call.q, call.heads) || !encode(PACKED_D_O, call.d_o, call.heads) ||
      !encode(ring_attention::PACKED_K, call.k, call.kv_heads) ||
      !encode(ring_attention::PACKED_V, call.v, call.kv_heads)) {
    return cudaErrorInvalidValue;
  }
  Params& params = arguments.params;
  params.num_push_ctas = plan.num_push_ctas;
  params.scale = call.scale;
  params.dq = head_rows(call, call.dq, call.heads, rows);
  params.dk = head_rows(call, call.dk, call.kv_heads, rows);
  params.dv = head_rows(call, call.dv, call.kv_heads, rows);
  return launch_both(kernel, arguments, num_ctas, call, plan, comm, rows, stream);
}

int num_ctas_between_nodes(const RingAttentionBackwardPlan& plan) {
  return plan.plan.compute_ctas + plan.num_forward_ctas + 1;
}

template <class Params>
void fill_between_nodes(const RingAttentionBackwardPlan& plan, Params* params) {
  params->routes = plan.routes;
  params->nodes = plan.nodes;
  params->num_compute_ctas = plan.plan.compute_ctas;
}

cudaError_t launch_packed(const RingAttentionCall& call, const RingAttentionBackwardPlan& plan,
                          const RankComm& comm, cudaStream_t stream) {
  PackedArguments arguments{};
  arguments.params.panels = plan.panels;
  return launch_packed_with(
      call.dtype == MK_DTYPE_FP16 ? cuda_packed_kernels_fp16() : cuda_packed_kernels_bf16(), call, plan, comm,
      plan.plan.compute_ctas, arguments, stream);
}

cudaError_t launch_packed_between_nodes(const RingAttentionCall& call, const RingAttentionBackwardPlan& plan,
                                        const RankComm& comm, cudaStream_t stream) {
  ring_attention::PackedArguments<PackedNetworkParams> arguments{};
  arguments.params.panels = plan.packed_network;
  fill_between_nodes(plan, &arguments.params);
  return launch_packed_with(
      call.dtype == MK_DTYPE_FP16 ? cuda_packed_network_kernels_fp16() : cuda_packed_network_kernels_bf16(),
      call, plan, comm, num_ctas_between_nodes(plan), arguments, stream);
}

// Of the kernels of one sequence: fills in what all of them have, then enqueues both kernels.
template <class Params>
cudaError_t launch_with(const CudaTableOf<Params>& table, const RingAttentionCall& call,
                        const RingAttentionBackwardPlan& plan, const RankComm& comm, int num_ctas,
                        Params& params, cudaStream_t stream) {
  const CudaKernelOf<Params>& kernel = table.entries[plan.panels.head_dim == 64 ? 0 : 1];
  const int64_t rows = plan.tiles.slices.rows(comm.rank);
  const void* any = comm.memory[comm.rank] + comm.arena;  // a valid address for tensors without elements
  params.comm = comm;
  if (!encode_attention_map(&params.map_q, call, call.q, any, call.heads, rows, BLOCK_ROWS) ||
      !encode_attention_map(&params.map_d_o, call, call.d_o, any, call.heads, rows, BLOCK_ROWS) ||
      !encode_attention_map(&params.map_k, call, call.k, any, call.kv_heads, rows, BLOCK_ROWS) ||
      !encode_attention_map(&params.map_v, call, call.v, any, call.kv_heads, rows, BLOCK_ROWS)) {
    return cudaErrorInvalidValue;
  }
  params.tiles = plan.tiles;
  params.num_key_tiles = plan.num_key_tiles;
  params.num_push_ctas = plan.num_push_ctas;
  params.dim = call.dim;
  params.scale = call.scale;
  params.dq = head_rows(call, call.dq, call.heads, rows);
  params.dk = head_rows(call, call.dk, call.kv_heads, rows);
  params.dv = head_rows(call, call.dv, call.kv_heads, rows);
  return launch_both(kernel, params, num_ctas, call, plan, comm, rows, stream);
}

template <class Params, class Tiles>
cudaError_t launch_in_node(const CudaTableOf<Params>& table, const Tiles& key_tiles,
                           const RingAttentionCall& call, const RingAttentionBackwardPlan& plan,
                           const RankComm& comm, cudaStream_t stream) {
  Params params{};
  params.key_tiles = key_tiles;
  params.panels = plan.panels;
  return launch_with(table, call, plan, comm, plan.plan.compute_ctas, params, stream);
}

cudaError_t launch_between_nodes(const RingAttentionCall& call, const RingAttentionBackwardPlan& plan,
                                 const RankComm& comm, cudaStream_t stream) {
  NetworkParams params{};
  params.panels = plan.network;
  fill_between_nodes(plan, &params);
  return launch_with(call.dtype == MK_DTYPE_FP16 ? cuda_network_kernels_fp16() : cuda_network_kernels_bf16(),
                     call, plan, comm, num_ctas_between_nodes(plan), params, stream);
}

}  // namespace

cudaError_t ring_attention_backward_prepare(bool between_nodes) {
  cudaError_t error = tensor_map_prepare();
  if (error == cudaSuccess) error = prepare_table(cuda_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(cuda_kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(cuda_alone_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(cuda_alone_kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(cuda_circular_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(cuda_circular_kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(cuda_packed_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(cuda_packed_kernels_fp16());
  if (error == cudaSuccess) error = prepare_row_sums<__nv_bfloat16>();
  if (error == cudaSuccess) error = prepare_row_sums<__half>();
  if (!between_nodes) return error;
  if (error == cudaSuccess) error = prepare_table(cuda_network_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(cuda_network_kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(cuda_packed_network_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(cuda_packed_network_kernels_fp16());
  return error;
}

cudaError_t ring_attention_backward_launch(const RingAttentionCall& call, const RingAttentionBackwardPlan& plan,
                                           const RankComm& comm, cudaStream_t stream) {
  if (!tensor_map_is_prepared()) return cudaErrorNotReady;
  const bool is_packed = call.num_sequences > 0;
  if (comm.order.num_rail_peers > 0) {
    return is_packed ? launch_packed_between_nodes(call, plan, comm, stream)
                     : launch_between_nodes(call, plan, comm, stream);
  }
  if (is_packed) return launch_packed(call, plan, comm, stream);
  const bool is_fp16 = call.dtype == MK_DTYPE_FP16;
  if (comm.nranks > 1) {
    return launch_in_node(is_fp16 ? cuda_kernels_fp16() : cuda_kernels_bf16(), plan.key_tiles, call, plan, comm,
                          stream);
  }
  if (plan.is_circular()) {
    return launch_in_node(is_fp16 ? cuda_circular_kernels_fp16() : cuda_circular_kernels_bf16(), plan.circular,
                          call, plan, comm, stream);
  }
  return launch_in_node(is_fp16 ? cuda_alone_kernels_fp16() : cuda_alone_kernels_bf16(), plan.key_tiles, call,
                        plan, comm, stream);
}

}  // namespace mk
