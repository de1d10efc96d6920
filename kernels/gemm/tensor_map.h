// SPDX-License-Identifier: MIT
// Tensor maps: how TMA sees a matrix.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "kernels/gemm/gemm_plan.h"

namespace mk {

// Finds the driver's functions, which are asked for by name at run time: the library loads on machines without
// a driver.
cudaError_t tensor_map_prepare();
bool tensor_map_is_prepared();

// A row-major matrix: `columns` contiguous, rows `ld` elements, a multiple of 16 bytes, apart from a 16-byte
// aligned base; boxes of box_rows x box_columns, in shared memory with the 128-byte swizzle. What lies outside
// reads as zero.
bool encode_tensor_map(CUtensorMap* map, GemmType type, const void* base, int64_t rows, int64_t columns,
                       int64_t ld, int box_rows, int box_columns);

// The same of `slices` such matrices of 16-bit elements, each `slice_rows` rows behind the one before; boxes
// are of one slice.
bool encode_tensor_map_of_slices(CUtensorMap* map, GemmType type, const void* base, int64_t slices,
                                 int64_t slice_rows, int64_t rows, int64_t columns, int64_t ld, int box_rows,
                                 int box_columns);

// The same of another matrix of the same sizes; a fraction of the time that encoding takes.
bool move_tensor_map(CUtensorMap* map, const void* base);

// The same of four dimensions, the first contiguous; strides, in bytes, of the others. Boxes of one matrix of
// the first two.
bool encode_tensor_map_4d(CUtensorMap* map, GemmType type, const void* base,
                          const std::array<int64_t, 4>& dimensions, const std::array<int64_t, 3>& strides,
                          int box_rows, int box_columns);

}  // namespace mk
