// SPDX-License-Identifier: MIT
#include "kernels/gemm/tensor_map.h"

#include <algorithm>
#include <atomic>

#include "kernels/device/gemm_epilogue_params.h"

namespace mk {
namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
using ReplaceAddress = CUresult (*)(CUtensorMap*, void*);

std::atomic<EncodeTiled> encode_tiled{nullptr};
std::atomic<ReplaceAddress> replace_address{nullptr};

template <class Function>
cudaError_t find_function(const char* name, std::atomic<Function>& to) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  to.store(reinterpret_cast<Function>(entry), std::memory_order_release);
  return cudaSuccess;
}

// Without elements nothing is loaded, but a dimension of a map may not be 0.
cuuint64_t size_of(int64_t dimension) { return static_cast<cuuint64_t>(std::max<int64_t>(dimension, 1)); }

bool encode(CUtensorMap* map, GemmType type, int rank, const void* base, const cuuint64_t* dimensions,
            const cuuint64_t* strides, const cuuint32_t* box) {
  const CUtensorMapDataType data_type = type == GemmType::bf16   ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                        : type == GemmType::fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  return encode_tiled.load(std::memory_order_acquire)(
             map, data_type, static_cast<cuuint32_t>(rank), const_cast<void*>(base), dimensions, strides, box,
             element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

cudaError_t tensor_map_prepare() {
  const cudaError_t error = find_function("cuTensorMapReplaceAddress", replace_address);
  return error != cudaSuccess ? error : find_function("cuTensorMapEncodeTiled", encode_tiled);
}

bool tensor_map_is_prepared() { return encode_tiled.load(std::memory_order_acquire) != nullptr; }

bool encode_tensor_map(CUtensorMap* map, GemmType type, const void* base, int64_t rows, int64_t columns,
                       int64_t ld, int box_rows, int box_columns) {
  const cuuint64_t dimensions[2] = {size_of(columns), size_of(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(ld) * element_bytes_of(type)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  return encode(map, type, 2, base, dimensions, strides, box);
}

bool encode_tensor_map_of_slices(CUtensorMap* map, GemmType type, const void* base, int64_t slices,
                                 int64_t slice_rows, int64_t rows, int64_t columns, int64_t ld, int box_rows,
                                 int box_columns) {
  const cuuint64_t dimensions[3] = {size_of(columns), size_of(rows), size_of(slices)};
  const auto row_bytes = static_cast<cuuint64_t>(ld) * 2;
  const cuuint64_t strides[2] = {row_bytes, row_bytes * size_of(slice_rows)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1};
  return encode(map, type, 3, base, dimensions, strides, box);
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

bool move_tensor_map(CUtensorMap* map, const void* base) {
  return replace_address.load(std::memory_order_acquire)(map, const_cast<void*>(base)) == CUDA_SUCCESS;
}

}  // namespace mk
