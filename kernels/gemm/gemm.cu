// SPDX-License-Identifier: MIT
#include "kernels/gemm/gemm.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <climits>

#include "kernels/device/gemm_partials_layout.h"
#include "kernels/gemm/gemm_kernel.cuh"
#include "kernels/gemm/load_maps.h"
#include "kernels/gemm/tensor_map.h"

namespace mk {
namespace {

const GemmKernelTable& kernels_of(GemmType in_type, bool traced) {
  if (traced) return in_type == GemmType::bf16 ? gemm_traced_kernels_bf16() : gemm_traced_kernels_fp16();
  return in_type == GemmType::bf16 ? gemm_kernels_bf16() : gemm_kernels_fp16();
}

const GemmSplitKernelTable& split_kernels_of(GemmType in_type) {
  return in_type == GemmType::bf16 ? gemm_split_kernels_bf16() : gemm_split_kernels_fp16();
}

const GemmPairKernelTable& pair_kernels_of(GemmType in_type) {
  return in_type == GemmType::bf16 ? gemm_pair_kernels_bf16() : gemm_pair_kernels_fp16();
}

const GemmSwappedKernelTable& swapped_kernels_of(GemmType in_type, bool b_transposed) {
  if (in_type == GemmType::bf16)
    return b_transposed ? gemm_swapped_kernels_bf16_nk() : gemm_swapped_kernels_bf16_kn();
  return b_transposed ? gemm_swapped_kernels_fp16_nk() : gemm_swapped_kernels_fp16_kn();
}

// Of the kernels that have tables of their own.
template <class Table, int NUM_TILES>
const GemmKernelEntry* find_special_kernel(const Table& table, const GemmTile (&tiles)[NUM_TILES],
                                           const GemmShape& shape, const GemmPlan& plan) {
  if (shape.a_transposed) return nullptr;
  for (int tile = 0; tile < NUM_TILES; ++tile) {
    if (tiles[tile].block_m == plan.block_m && tiles[tile].block_n == plan.block_n)
      return &table.entries[tile][shape.b_transposed ? 1 : 0];
  }
  return nullptr;
}

const GemmKernelEntry* find_swapped_kernel(const GemmShape& shape, const GemmPlan& plan) {
  if (shape.a_transposed) return nullptr;
  for (int i = 0; i < NUM_GEMM_SWAPPED_TILES; ++i) {
    const GemmSwappedTile& tile = GEMM_SWAPPED_TILES[i];
    if (tile.block_m != plan.block_m || tile.block_n != plan.block_n || tile.cluster != plan.cluster) continue;
    if (!gemm_swapped_tile_walks(tile) && plan.num_workers < gemm_plan_num_tiles(shape, plan)) return nullptr;
    return &swapped_kernels_of(shape.in_type, shape.b_transposed).entries[i];
  }
  return nullptr;
}

const GemmKernelEntry* find_kernel(const GemmShape& shape, const GemmPlan& plan, bool traced) {
  if (shape.in_type == GemmType::fp32 || (shape.a_transposed && shape.b_transposed)) return nullptr;
  if (plan.is_swapped) return find_swapped_kernel(shape, plan);
  if (plan.num_split_ctas > 1 && !plan.in_clusters())
    return find_special_kernel(split_kernels_of(shape.in_type), GEMM_SPLIT_TILES, shape, plan);
  if (plan.in_clusters() && !plan.ping_pong)
    return find_special_kernel(pair_kernels_of(shape.in_type), GEMM_PAIR_TILES, shape, plan);
  const GemmLayout layout = shape.a_transposed ? GEMM_A_TRANSPOSED_KN : shape.b_transposed ? GEMM_NK : GEMM_KN;
  for (int i = 0; i < NUM_GEMM_TILES; ++i) {
    const GemmTile& tile = GEMM_TILES[i];
    if (tile.block_m == plan.block_m && tile.block_n == plan.block_n && tile.ping_pong == plan.ping_pong &&
        tile.cluster == plan.cluster) {
      return &kernels_of(shape.in_type, traced).entries[i][layout];
    }
  }
  return nullptr;
}

bool is_aligned_16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

bool arguments_are_valid(const GemmArguments& arguments, const GemmPlan& plan) {
  const GemmShape& shape = arguments.shape;
  if (shape.m < 0 || shape.n < 0 || shape.k < 0) return false;
  if (std::max({shape.m, shape.n, shape.k}) > INT_MAX - 256) return false;
  if (!is_aligned_16(arguments.a) || !is_aligned_16(arguments.b)) return false;
  if (arguments.lda % 8 != 0 || arguments.ldb % 8 != 0) return false;
  if (arguments.lda < (shape.a_transposed ? shape.m : shape.k)) return false;
  if (arguments.ldb < (shape.b_transposed ? shape.k : shape.n)) return false;
  if (arguments.ldc < shape.n || arguments.c == nullptr) return false;
  if (shape.k > 0 && (arguments.a == nullptr || arguments.b == nullptr)) return false;
  if (gemm_plan_num_tiles(shape, plan) > INT_MAX) return false;
  if (plan.workspace_bytes > 0 && plan.num_ctas() > PartialsLayout::MAX_CTAS) return false;
  return plan.workspace_bytes == 0 || (arguments.workspace != nullptr && is_aligned_16(arguments.workspace));
}

bool encode_maps(const GemmShape& shape, const GemmPlan& plan, const void* a, int64_t lda, const void* b,
                 int64_t ldb, int tile_columns, LoadParams* load) {
  return encode_map_of_a(plan, shape.in_type, a, shape.m, shape.k, lda, shape.a_transposed, load) &&
         encode_map_of_b(plan, shape.in_type, b, shape.n, shape.k, ldb, shape.b_transposed, tile_columns, load);
}

// Of a product that leaves SMs idle the next one's first CTAs would take these, and the rest what becomes free:
// not spread over the GPU as a new grid is, which costs the next one up to a quarter of its time. A short one
// gains more by them than it loses (docs/decisions/019-the-next-grid-comes-early.md).
constexpr double SHORT_US = 10;

bool lets_next_come(const GemmPlan& plan, int num_sms) {
  return (num_sms > 0 && plan.num_ctas() >= num_sms) || plan.predicted_us < SHORT_US;
}

// Whether a kernel has use for a map of C, to store by it (CAN_STORE_BOXES) or to ask for what C has. It writes
// whole chunks of 16 bytes, and where CTAs have a tile each, nothing waits for their stores.
bool has_use_for_map_c(const GemmShape& shape, const GemmPlan& plan, const EpilogueParams& epilogue) {
  const bool in_chunks = shape.n * element_bytes_of(shape.out_type) % 16 == 0;
  return plan.ping_pong && gemm_plan_num_tiles(shape, plan) > plan.num_workers && in_chunks &&
         epilogue.rows_aligned;
}

// With few k-steps a tile that is added to C waits for what C has; with many it has come, and asking for it
// earlier costs what else is loaded.
constexpr int64_t MOST_K_TO_PREFETCH_C = 1536;

bool fill_params(const GemmArguments& arguments, const GemmPlan& plan, GemmParams* params) {
  const GemmShape& shape = arguments.shape;
  // Any valid address will do for an operand that has no elements.
  const void* a = shape.k > 0 ? arguments.a : arguments.workspace;
  const void* b = shape.k > 0 ? arguments.b : arguments.workspace;
  const int64_t lda = std::max<int64_t>(arguments.lda, 8);
  const int64_t ldb = std::max<int64_t>(arguments.ldb, 8);
  params->tile_columns = gemm_plan_tile_columns(shape, plan);
  const bool has_maps =
      plan.is_swapped ? encode_maps(swapped(shape), plan, b, ldb, a, lda, params->tile_columns, &params->load)
                      : encode_maps(shape, plan, a, lda, b, ldb, params->tile_columns, &params->load);
  if (!has_maps) return false;

  const int out_bytes = shape.out_type == GemmType::fp32 ? 4 : 2;
  const bool rows_aligned = is_aligned_16(arguments.c) && arguments.ldc * out_bytes % 16 == 0;
  const GemmShape tiled = plan.is_swapped ? swapped(shape) : shape;
  params->schedule = {static_cast<int>((tiled.m + plan.cluster_rows() - 1) / plan.cluster_rows()),
                      static_cast<int>((tiled.n + plan.cluster_columns() - 1) / plan.cluster_columns()),
                      static_cast<int>((shape.k + GEMM_BLOCK_K - 1) / GEMM_BLOCK_K),
                      plan.num_workers,
                      plan.num_streamk_tiles,
                      plan.group_m};
  params->schedule.keep_in_step_from(OUT_OF_STEP_K_STEPS);
  params->epilogue = {arguments.c,    arguments.ldc,       arguments.bias,   static_cast<int>(shape.n),
                      shape.out_type, arguments.bias_type, shape.accumulate, rows_aligned};
  params->has_map_c =
      has_use_for_map_c(shape, plan, params->epilogue) &&
      encode_tensor_map(&params->map_c, shape.out_type, arguments.c, shape.m, shape.n, arguments.ldc,
                        STORE_BOX_ROWS, STORE_BOX_BYTES / element_bytes_of(shape.out_type));
  params->prefetches_c = params->has_map_c && shape.accumulate && shape.k <= MOST_K_TO_PREFETCH_C;
  params->m = static_cast<int>(tiled.m);
  params->num_split_ctas = plan.num_split_ctas;
  params->workspace = arguments.workspace;
  params->trace = arguments.trace;
  params->lets_next_come = lets_next_come(plan, arguments.num_sms);
  return true;
}

using LaunchAttributes = std::array<cudaLaunchAttribute, 2>;

// `attributes` are the answer's. The grid's CTAs may come while the stream's kernel before is at its end, and
// wait for it themselves.
cudaLaunchConfig_t launch_config(const GemmKernelEntry& kernel, int num_ctas, int num_cluster_ctas,
                                 LaunchAttributes* attributes) {
  (*attributes)[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  (*attributes)[0].val.programmaticStreamSerializationAllowed = 1;
  (*attributes)[1].id = cudaLaunchAttributeClusterDimension;
  (*attributes)[1].val.clusterDim = {static_cast<unsigned>(num_cluster_ctas), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(num_ctas);
  config.blockDim = dim3(kernel.num_threads);
  config.dynamicSmemBytes = kernel.smem_bytes;
  config.attrs = attributes->data();
  config.numAttrs = num_cluster_ctas > 1 ? 2 : 1;
  return config;
}

cudaError_t prepare(const GemmKernelEntry& kernel) {
  // Also loads the module, which must not happen on the call path.
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel.kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.smem_bytes);
}

template <int NUM>
cudaError_t prepare(const GemmKernelEntry (&kernels)[NUM]) {
  for (const GemmKernelEntry& kernel : kernels) {
    const cudaError_t error = prepare(kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class Table>
cudaError_t prepare(const Table& table) {
  for (const auto& entries : table.entries) {
    const cudaError_t error = prepare(entries);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t gemm_prepare() {
  cudaError_t error = tensor_map_prepare();
  for (const GemmType type : {GemmType::bf16, GemmType::fp16}) {
    if (error == cudaSuccess) error = prepare(kernels_of(type, false));
    if (error == cudaSuccess) error = prepare(kernels_of(type, true));
    if (error == cudaSuccess) error = prepare(split_kernels_of(type));
    if (error == cudaSuccess) error = prepare(pair_kernels_of(type));
    if (error == cudaSuccess) error = prepare(swapped_kernels_of(type, false));
    if (error == cudaSuccess) error = prepare(swapped_kernels_of(type, true));
  }
  return error;
}

cudaError_t gemm_cluster_limits(GemmClusterLimits* limits) {
  // Every split kernel takes more than half of an SM's shared memory.
  const GemmKernelEntry& kernel = gemm_split_kernels_bf16().entries[0][0];
  const cudaError_t prepared = prepare(kernel);
  if (prepared != cudaSuccess) return prepared;
  for (int num_ctas = 2; num_ctas <= MAX_CLUSTER_CTAS; ++num_ctas) {
    LaunchAttributes attributes{};
    cudaLaunchConfig_t config = launch_config(kernel, num_ctas, num_ctas, &attributes);
    const cudaError_t error =
        cudaOccupancyMaxActiveClusters(&limits->at_a_time[num_ctas], kernel.kernel, &config);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t gemm_launch(const GemmArguments& arguments, const GemmPlan& plan, cudaStream_t stream) {
  if (arguments.shape.m == 0 || arguments.shape.n == 0) return cudaSuccess;
  if (!tensor_map_is_prepared()) return cudaErrorNotReady;
  const GemmKernelEntry* kernel = find_kernel(arguments.shape, plan, arguments.trace.buffer != nullptr);
  if (kernel == nullptr || !arguments_are_valid(arguments, plan)) return cudaErrorInvalidValue;
  GemmParams params{};
  if (!fill_params(arguments, plan, &params)) return cudaErrorInvalidValue;

  LaunchAttributes attributes{};
  cudaLaunchConfig_t config = launch_config(*kernel, plan.num_ctas(), plan.num_cluster_ctas(), &attributes);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel->kernel, params);
}

}  // namespace mk
