// SPDX-License-Identifier: MIT
// What ranks bring to a reduction on emulated warps, and the C that comes of it.
#pragma once

#include "shim/device_words.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>
#include <string>
#include <vector>

#include "kernels/device/gemm_epilogue_params.h"
#include "lib/status.h"

namespace mk::test {

// A rank's product: whole numbers, whose sums 16 bits hold exactly.
inline float partial(uint64_t epoch, int rank, int64_t row, int64_t column) {
  return static_cast<float>((epoch * 5 + static_cast<uint64_t>(rank * 3 + row * 7 + column * 11)) % 17) - 8;
}

// What a lane has of it in a warp's 16 rows, the first at (row, column), as wgmma leaves it. What lies outside,
// from row_end and column_end on, must not matter.
template <int N>
void multiply(float (&accumulators)[N], uint64_t epoch, int rank, int64_t row, int64_t row_end, int64_t column,
              int64_t column_end) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int i = 0; i < N; ++i) {
    const int64_t m = row + lane / 4 + i / 2 % 2 * 8, n = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
    const bool is_inside = m < row_end && n < column_end;
    accumulators[i] = is_inside ? partial(epoch, rank, m, n) : std::numeric_limits<float>::quiet_NaN();
  }
}

// C, with elements around it that nobody may write to: those that its rows are longer, a row before, one
// behind.
class ReducedOutput {
 public:
  static constexpr float kBefore = -100;

  // Fills in all but the bias.
  void make(int64_t rows, int64_t n, int64_t ldc, GemmType type, EpilogueParams* params) {
    rows_ = rows;
    bytes_.assign(static_cast<size_t>((rows + 2) * ldc * element_bytes_of(type)) + 16, std::byte{0});
    params->c = bytes_.data() + ldc * element_bytes_of(type);
    params->ldc = ldc;
    params->n = static_cast<int>(n);
    params->out_type = type;
    params->rows_aligned = ldc * element_bytes_of(type) % 16 == 0;
    output_ = *params;
    clear();
  }
  // As before a launch.
  void clear() {
    for (int64_t row = -1; row <= rows_; ++row) {
      for (int64_t column = 0; column < output_.ldc; ++column) {
        void* const element = address(row, column);
        if (output_.out_type == GemmType::bf16)
          *static_cast<__nv_bfloat16*>(element) = __float2bfloat16(kBefore);
        if (output_.out_type == GemmType::fp16) *static_cast<__half*>(element) = __float2half(kBefore);
        if (output_.out_type == GemmType::fp32) *static_cast<float*>(element) = kBefore;
      }
    }
  }
  // Where it is not sum(row, column), added to what was there if the launch does that; "" when it is right.
  template <class Sum>
  std::string wrong(bool accumulates, Sum&& sum) const {
    for (int64_t row = -1; row <= rows_; ++row) {
      for (int64_t column = 0; column < output_.ldc; ++column) {
        const bool is_inside = row >= 0 && row < rows_ && column < output_.n;
        float expected = !is_inside || accumulates ? kBefore : 0;
        if (is_inside) expected += sum(row, column);
        const float seen = at(row, column);
        if (!(seen == expected))
          return format("row %lld, column %lld is %g, not %g; ", (long long)row, (long long)column, seen,
                        expected);
      }
    }
    return "";
  }

 private:
  void* address(int64_t row, int64_t column) const {
    return static_cast<std::byte*>(output_.c) +
           (row * output_.ldc + column) * element_bytes_of(output_.out_type);
  }
  float at(int64_t row, int64_t column) const {
    const void* const element = address(row, column);
    if (output_.out_type == GemmType::bf16)
      return __bfloat162float(*static_cast<const __nv_bfloat16*>(element));
    if (output_.out_type == GemmType::fp16) return __half2float(*static_cast<const __half*>(element));
    return *static_cast<const float*>(element);
  }

  int64_t rows_ = 0;
  EpilogueParams output_{};
  std::vector<std::byte> bytes_;
};

// Of all ranks.
inline float sum_of_partials(uint64_t epoch, int nranks, int64_t row, int64_t column) {
  float sum = 0;
  for (int rank = 0; rank < nranks; ++rank) sum += partial(epoch, rank, row, column);
  return sum;
}

}  // namespace mk::test
