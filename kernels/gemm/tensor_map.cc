// SPDX-License-Identifier: MIT
#include "kernels/gemm/tensor_map.h"

#include <algorithm>
#include <atomic>

namespace mk {
namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

std::atomic<EncodeTiled> encode_tiled{nullptr};

// Without elements nothing is loaded, but a dimension of a map may not be 0.
cuuint64_t size_of(int64_t dimension) { return static_cast<cuuint64_t>(std::max<int64_t>(dimension, 1)); }

bool encode(CUtensorMap* map, GemmType type, int rank, const void* base, const cuuint64_t* dimensions,
            const cuuint64_t* strides, const cuuint32_t* box) {
  const CUtensorMapDataType data_type =
      type == GemmType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  return encode_tiled.load(std::memory_order_acquire)(
             map, data_type, static_cast<cuuint32_t>(rank), const_cast<void*>(base), dimensions, strides, box,
             element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

cudaError_t tensor_map_prepare() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  encode_tiled.store(reinterpret_cast<EncodeTiled>(entry), std::memory_order_release);
  return cudaSuccess;
}

bool tensor_map_is_prepared() { return encode_tiled.load(std::memory_order_acquire) != nullptr; }

bool encode_tensor_map(CUtensorMap* map, GemmType type, const void* base, int64_t rows, int64_t columns,
                       int64_t ld, int box_rows, int box_columns) {
  const cuuint64_t dimensions[2] = {size_of(columns), size_of(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(ld) * 2};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  return encode(map, type, 2, base, dimensions, strides, box);
}

bool encode_tensor_map_4d(CUtensorMap* map, GemmType type, const void* base,
                          const std::array<int64_t, 4>& dimensions, const std::array<int64_t, 3>& strides,
                          int box_rows, int box_columns) {
  const cuuint64_t sizes[4] = {size_of(dimensions[0]), size_of(dimensions[1]), size_of(dimensions[2]),
                               size_of(dimensions[3])};
  const cuuint64_t bytes[3] = {static_cast<cuuint64_t>(strides[0]), static_cast<cuuint64_t>(strides[1]),
                               static_cast<cuuint64_t>(strides[2])};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1, 1};
  return encode(map, type, 4, base, sizes, bytes, box);
}

}  // namespace mk
