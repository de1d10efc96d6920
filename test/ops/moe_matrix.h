// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "mkernel.h"

namespace mk::test {

// Rows at a leading dimension. An input ends with its last element; an output has guard elements behind it.
class MoeMatrix {
 public:
  MoeMatrix() = default;
  MoeMatrix(mk_dtype_t dtype, int64_t rows, int64_t columns, int padding, bool output);

  std::byte* data() { return bytes_.empty() ? nullptr : bytes_.data(); }
  size_t num_bytes() const { return bytes_.size(); }
  int64_t ld() const { return ld_; }
  void poison();
  void write(int64_t row, int64_t column, double value);
  double read(int64_t row, int64_t column) const;
  // The first row or element beyond `rows` rows that is not as it was; "" when all are.
  std::string overwritten(int64_t rows) const;
  std::string bits(int64_t rows) const;

 private:
  mk_dtype_t dtype_ = MK_DTYPE_BF16;
  int64_t columns_ = 0;
  int64_t ld_ = 0;
  std::vector<std::byte> bytes_;
};

}  // namespace mk::test
