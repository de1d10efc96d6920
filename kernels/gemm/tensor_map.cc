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

bool encode(CUtensorMap* map, GemmType type, const void* base, cuuint32_t num_dimensions,
            const cuuint64_t* dimensions, const cuuint64_t* strides, const cuuint32_t* box) {
  const CUtensorMapDataType data_type =
      type == GemmType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint32_t element_strides[3] = {1, 1, 1};
  return encode_tiled.load(std::memory_order_acquire)(
             map, data_type, num_dimensions, const_cast<void*>(base), dimensions, strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
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
  // Without a k-step nothing is loaded, but a dimension of a map may not be 0.
  const cuuint64_t dimensions[2] = {static_cast<cuuint64_t>(std::max<int64_t>(columns, 1)),
                                    static_cast<cuuint64_t>(std::max<int64_t>(rows, 1))};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(ld) * 2};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  return encode(map, type, base, 2, dimensions, strides, box);
}

bool encode_tensor_map_of_matrices(CUtensorMap* map, GemmType type, const void* base, int64_t count,
                                   int64_t rows, int64_t columns, int box_rows, int box_columns) {
  const cuuint64_t dimensions[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                                    static_cast<cuuint64_t>(std::max<int64_t>(count, 1))};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(columns) * 2,
                                 static_cast<cuuint64_t>(rows) * static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1};
  return encode(map, type, base, 3, dimensions, strides, box);
}

}  // namespace mk
