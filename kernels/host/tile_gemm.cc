// SPDX-License-Identifier: MIT
#include "tile_gemm.h"

#include <algorithm>
#include <cstring>

#include "number_format.h"

namespace mk {
namespace {

constexpr int kDepth =
    128;  // inner elements converted to fp32 at a time: both panels stay in the first-level cache

template <float (*Convert)(uint16_t)>
void load_panels(const TileGemm& tile, int64_t begin, int depth, float* a, float* b) {
  const auto* a16 = static_cast<const uint16_t*>(tile.a);
  for (int i = 0; i < tile.rows; ++i) {
    const uint16_t* row =
        (tile.a_rows ? static_cast<const uint16_t*>(tile.a_rows[i]) : a16 + i * tile.lda) + begin;
    for (int kk = 0; kk < depth; ++kk) a[i * kDepth + kk] = Convert(row[kk]);
  }
  const auto* b16 = static_cast<const uint16_t*>(tile.b);
  if (tile.b_layout == MK_LAYOUT_KN) {
    for (int kk = 0; kk < depth; ++kk) {
      const uint16_t* row = b16 + (begin + kk) * tile.ldb + tile.column;
      for (int j = 0; j < tile.columns; ++j) b[kk * TileGemm::kColumns + j] = Convert(row[j]);
    }
  } else {
    for (int j = 0; j < tile.columns; ++j) {
      const uint16_t* row = b16 + (tile.column + j) * tile.ldb + begin;
      for (int kk = 0; kk < depth; ++kk) b[kk * TileGemm::kColumns + j] = Convert(row[kk]);
    }
  }
}

}  // namespace

void TileGemm::compute(float* out) const {
  alignas(64) float a_panel[kRows * kDepth];
  alignas(64) float b_panel[kDepth * kColumns] = {};
  std::memset(out, 0, sizeof(float) * kRows * kColumns);
  for (int64_t begin = 0; begin < k; begin += kDepth) {
    const int depth = static_cast<int>(std::min<int64_t>(kDepth, k - begin));
    if (dtype == MK_DTYPE_FP16) {
      load_panels<fp16_to_float>(*this, begin, depth, a_panel, b_panel);
    } else {
      load_panels<bf16_to_float>(*this, begin, depth, a_panel, b_panel);
    }
    for (int i = 0; i < rows; ++i) {
      float* sums = out + i * kColumns;
      for (int kk = 0; kk < depth; ++kk) {
        const float factor = a_panel[i * kDepth + kk];
        const float* row = b_panel + kk * kColumns;
        for (int j = 0; j < kColumns; ++j) sums[j] += factor * row[j];
      }
    }
  }
}

}  // namespace mk
