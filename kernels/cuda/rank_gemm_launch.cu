// SPDX-License-Identifier: MIT
#include "kernels/cuda/rank_gemm_launch.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/cuda/gemm_type.h"
#include "kernels/gemm/tensor_map.h"
#include "kernels/ops/allgather_gemm/cuda_kernel.cuh"
#include "kernels/ops/allgather_gemm/cuda_network_kernel.cuh"
#include "kernels/ops/gemm_reduce_scatter/cuda_kernel.cuh"
#include "kernels/ops/gemm_reduce_scatter/cuda_network_kernel.cuh"

namespace mk {
namespace {

// What a warp brings to the gathered A at a time.
constexpr int64_t PIECE_BYTES = 16 << 10;

int piece_rows(int64_t row_bytes) {
  return static_cast<int>(std::clamp<int64_t>(PIECE_BYTES / std::max<int64_t>(1, row_bytes), 4, 128));
}

template <class Table>
auto& find_kernel(const Table& table, const GemmPlan& plan, bool b_transposed) {
  int tile = 0;
  while (tile + 1 < NUM_RANK_GEMM_TILES &&
         (RANK_GEMM_TILES[tile].block_m != plan.block_m || RANK_GEMM_TILES[tile].block_n != plan.block_n)) {
    ++tile;
  }
  return table.entries[tile][b_transposed ? 1 : 0];
}

template <class Params>
cudaError_t launch(const RankGemmKernel<Params>& kernel, const Params& params, int num_ctas,
                   cudaStream_t stream) {
  // Cooperative: either all CTAs become resident, or none holds an SM while it waits for a peer.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(num_ctas);
  config.blockDim = dim3(kernel.num_threads);
  config.dynamicSmemBytes = kernel.smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel.kernel, params);
}

template <class Table>
cudaError_t prepare_table(const Table& table) {
  for (const auto& row : table.entries) {
    for (const auto& kernel : row) {
      const cudaError_t error =
          cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel.kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.smem_bytes);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

// Rows of A that a box of TMA brings: no more than there are.
int a_box_rows(const GemmPlan& plan, int64_t rows) {
  return static_cast<int>(std::min<int64_t>(plan.block_m, std::max<int64_t>(8, round_up(rows, 8))));
}

// Maps and counts that both operators have. `any` is a valid address for an operand without elements.
bool fill_load(const GemmCall& call, const GemmPlan& plan, int64_t a_rows, int64_t max_rows, int stage_bytes,
               const void* any, LoadParams* load) {
  const GemmType type = gemm_type(call.dtype);
  const int box_rows = a_box_rows(plan, max_rows);
  const bool has_a = a_rows > 0 && call.k > 0;
  const bool has_b = call.n > 0 && call.k > 0;
  const int64_t lda = std::max<int64_t>(round_up(std::max(call.lda, call.k), 8), 8);
  const bool transposed = call.b_layout == MK_LAYOUT_NK;
  const int64_t ldb = std::max<int64_t>(round_up(std::max(call.ldb, transposed ? call.k : call.n), 8), 8);
  load->stage_bytes = stage_bytes - (plan.block_m - box_rows) * GEMM_BLOCK_K * 2;
  if (!encode_tensor_map(&load->map_a, type, has_a ? call.a : any, a_rows, call.k, lda, box_rows, GEMM_BLOCK_K))
    return false;
  const void* b = has_b ? call.b : any;
  return transposed ? encode_tensor_map(&load->map_b, type, b, call.n, call.k, ldb, plan.block_n, GEMM_BLOCK_K)
                    : encode_tensor_map(&load->map_b, type, b, call.k, call.n, ldb, GEMM_BLOCK_K, 64);
}

EpilogueParams epilogue_of(const GemmCall& call) {
  const int out_bytes = element_bytes(call.out_dtype);
  const int64_t ldc = std::max(call.ldc, call.n);
  const bool aligned = reinterpret_cast<uintptr_t>(call.c) % 16 == 0 && ldc * out_bytes % 16 == 0;
  return {call.c,
          ldc,
          call.bias,
          static_cast<int>(call.n),
          gemm_type(call.out_dtype),
          gemm_type(call.bias_dtype),
          call.accumulate,
          aligned};
}

TileSchedule tiles_of(const GemmCall& call, const RankGemmPlan& plan, int num_ctas) {
  return {plan.num_owners * plan.tile_rows,
          static_cast<int>(ceil_div(call.n, plan.gemm.block_n)),
          static_cast<int>(ceil_div(call.k, GEMM_BLOCK_K)),
          num_ctas,
          plan.gemm.num_streamk_tiles,
          plan.gemm.group_m,
          true};
}

// Ranks that take turns, after this one, in what it computes first.
int num_in_turn(const RankGemmPlan& plan, const RankComm& comm) {
  if (plan.merged) return 0;
  return comm.order.num_local > 1 ? comm.order.num_local - 1 : comm.nranks - 1;
}

bool fill_gather(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm, int stage_bytes,
                 allgather_gemm::CudaParams& params) {
  const int64_t max_rows = ceil_div(call.m, comm.nranks);
  const int64_t own_rows = rows_count(call.m, comm.nranks, comm.rank);
  params.comm = comm;
  params.schedule.topology.nranks = comm.nranks;
  params.schedule.topology.rank = comm.rank;
  params.schedule.m = call.m;
  params.schedule.k = call.k;
  params.schedule.chunk_rows = plan.plan.chunk_rows;
  params.schedule.tile_m = plan.gemm.block_m;
  params.schedule.max_chunks = plan.plan.num_chunks;
  std::byte* area = comm.memory[comm.rank] + comm.arena;
  const int64_t box_source = plan.merged ? call.m : max_rows;
  if (!fill_load(call, plan.gemm, own_rows, box_source, stage_bytes, area, &params.load)) return false;
  for (int bank = 0; bank < 2; ++bank) {
    if (!encode_tensor_map(&params.map_gathered[bank], gemm_type(call.dtype), area + bank * comm.bank_bytes,
                           call.m, call.k, std::max<int64_t>(round_up(call.k, 8), 8),
                           a_box_rows(plan.gemm, box_source), GEMM_BLOCK_K)) {
      return false;
    }
  }
  params.tiles = tiles_of(call, plan, plan.plan.compute_ctas);
  params.order = {std::max(1, plan.tile_rows), num_in_turn(plan, comm)};
  params.epilogue = epilogue_of(call);
  params.m = static_cast<int>(call.m);
  params.max_rows = static_cast<int>(std::max<int64_t>(1, max_rows));
  params.merged = plan.merged;
  params.push_order = {plan.merged ? 0 : params.order.tile_rows,
                       std::max(1, params.order.num_in_turn) * plan.plan.chunk_rows / plan.gemm.block_m,
                       params.tiles.group_m, std::max(1, params.tiles.num_n_tiles), params.tiles.num_workers};
  params.num_panels = plan.num_panels;
  params.panel_steps = plan.panel_steps;
  params.piece_rows = piece_rows(std::min<int64_t>(call.k, int64_t{plan.panel_steps} * GEMM_BLOCK_K) * 2);
  params.a = static_cast<const std::byte*>(call.a);
  params.a_pitch = std::max<int64_t>(call.lda, round_up(call.k, 8)) * 2;
  if (call.m > 0 && call.k > 0) params.a_gathered = static_cast<std::byte*>(call.a_gathered);
  params.a_gathered_pitch = std::max(call.lda_gathered, call.k) * 2;
  return true;
}

cudaError_t launch_gather(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm, int num_ctas,
                          cudaStream_t stream) {
  using namespace allgather_gemm;
  const CudaTable& table = call.dtype == MK_DTYPE_FP16 ? cuda_kernels_fp16() : cuda_kernels_bf16();
  const auto& kernel = find_kernel(table, plan.gemm, call.b_layout == MK_LAYOUT_NK);
  CudaParams params{};
  if (!fill_gather(call, plan, comm, kernel.stage_bytes, params)) return cudaErrorInvalidValue;
  return launch(kernel, params, num_ctas, stream);
}

cudaError_t launch_network_gather(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm,
                                  int num_ctas, cudaStream_t stream) {
  using namespace allgather_gemm;
  const NetworkTable& table =
      call.dtype == MK_DTYPE_FP16 ? cuda_network_kernels_fp16() : cuda_network_kernels_bf16();
  const auto& kernel = find_kernel(table, plan.gemm, call.b_layout == MK_LAYOUT_NK);
  NetworkParams params{};
  if (!fill_gather(call, plan, comm, kernel.stage_bytes, params)) return cudaErrorInvalidValue;
  params.far_order = {params.order.tile_rows, 0, 0};
  if (!plan.merged) {
    params.far_order.num_near = comm.order.num_local - 1;
    params.far_order.num_far = comm.nranks - comm.order.num_local;
  }
  return launch(kernel, params, num_ctas + NUM_NETWORK_CTAS, stream);
}

bool fill_reduction(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm, int stage_bytes,
                    gemm_reduce_scatter::CudaParams& params) {
  params.comm = comm;
  const bool one_shot = plan.reduction == gemm_reduce_scatter::Reduction::one_shot;
  const int64_t rows = one_shot ? call.m : ceil_div(call.m, comm.nranks);
  if (!fill_load(call, plan.gemm, call.m, rows, stage_bytes, comm.memory[comm.rank] + comm.arena,
                 &params.load)) {
    return false;
  }
  params.tiles = tiles_of(call, plan, plan.plan.compute_ctas);
  params.output = epilogue_of(call);
  params.comm_type = gemm_type(call.comm_dtype);
  params.reduction = plan.reduction;
  params.tile_rows = std::max(1, plan.tile_rows);
  params.m = static_cast<int>(call.m);
  params.max_rows = static_cast<int>(std::max<int64_t>(1, rows));
  params.tiles_per_owner = static_cast<int>(plan.tiles_per_owner);
  params.slot_bytes = plan.slot_bytes;
  params.first_gather_flag = static_cast<int>(comm.nranks * plan.tiles_per_owner);
  params.gather_begin = plan.gather_begin;
  params.gather_pitch = plan.gather_pitch;
  params.is_paced = plan.is_paced;
  return true;
}

cudaError_t launch_reduction(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm, int num_ctas,
                             cudaStream_t stream) {
  using namespace gemm_reduce_scatter;
  const CudaTable& table = call.dtype == MK_DTYPE_FP16 ? cuda_kernels_fp16() : cuda_kernels_bf16();
  const auto& kernel = find_kernel(table, plan.gemm, call.b_layout == MK_LAYOUT_NK);
  CudaParams params{};
  if (!fill_reduction(call, plan, comm, kernel.stage_bytes, params)) return cudaErrorInvalidValue;
  return launch(kernel, params, num_ctas, stream);
}

cudaError_t launch_network_reduction(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm,
                                     int num_ctas, cudaStream_t stream) {
  using namespace gemm_reduce_scatter;
  const NetworkTable& table =
      call.dtype == MK_DTYPE_FP16 ? cuda_network_kernels_fp16() : cuda_network_kernels_bf16();
  const auto& kernel = find_kernel(table, plan.gemm, call.b_layout == MK_LAYOUT_NK);
  NetworkParams params{};
  if (!fill_reduction(call, plan, comm, kernel.stage_bytes, params)) return cudaErrorInvalidValue;
  params.network = plan.network;
  params.reducers = plan.reducers;
  return launch(kernel, params, num_ctas + plan.plan.reduce_ctas + NUM_NETWORK_CTAS, stream);
}

}  // namespace

cudaError_t rank_gemm_prepare(bool between_nodes) {
  cudaError_t error = tensor_map_prepare();
  if (error == cudaSuccess) error = prepare_table(allgather_gemm::cuda_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(allgather_gemm::cuda_kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(gemm_reduce_scatter::cuda_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(gemm_reduce_scatter::cuda_kernels_fp16());
  if (!between_nodes) return error;
  if (error == cudaSuccess) error = prepare_table(allgather_gemm::cuda_network_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(allgather_gemm::cuda_network_kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(gemm_reduce_scatter::cuda_network_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(gemm_reduce_scatter::cuda_network_kernels_fp16());
  return error;
}

cudaError_t rank_gemm_launch(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm,
                             cudaStream_t stream) {
  if (!tensor_map_is_prepared()) return cudaErrorNotReady;
  const int num_ctas = plan.plan.compute_ctas + plan.plan.copy_ctas;
  if (comm.order.num_rail_peers > 0) {
    return call.op == MK_OPERATOR_ALLGATHER_GEMM ? launch_network_gather(call, plan, comm, num_ctas, stream)
                                                 : launch_network_reduction(call, plan, comm, num_ctas, stream);
  }
  return call.op == MK_OPERATOR_ALLGATHER_GEMM ? launch_gather(call, plan, comm, num_ctas, stream)
                                               : launch_reduction(call, plan, comm, num_ctas, stream);
}

}  // namespace mk
