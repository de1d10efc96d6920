// SPDX-License-Identifier: MIT
#include "moe_matrix.h"

#include "element.h"

namespace mk::test {
namespace {

constexpr int64_t kGuard = 32;  // elements behind the last row of an output

}  // namespace

MoeMatrix::MoeMatrix(mk_dtype_t dtype, int64_t rows, int64_t columns, int padding, bool output)
    : dtype_(dtype), columns_(columns) {
  const int64_t unit = 16 / element_size(dtype);
  ld_ = ((columns + unit - 1) / unit + padding) * unit;
  const int64_t elements = rows == 0 ? 0 : (rows - 1) * ld_ + columns + (output ? kGuard : 0);
  bytes_.resize(static_cast<size_t>(elements * element_size(dtype)));
  poison();
}

void MoeMatrix::poison() {
  const auto elements = static_cast<int64_t>(bytes_.size()) / element_size(dtype_);
  for (int64_t at = 0; at < elements; ++at) write_bits(bytes_.data(), dtype_, at, test::poison(dtype_));
}

void MoeMatrix::write(int64_t row, int64_t column, double value) {
  write_bits(bytes_.data(), dtype_, row * ld_ + column, encode(value, dtype_));
}

double MoeMatrix::read(int64_t row, int64_t column) const {
  return decode(read_bits(bytes_.data(), dtype_, row * ld_ + column), dtype_);
}

std::string MoeMatrix::overwritten(int64_t rows) const {
  const auto elements = static_cast<int64_t>(bytes_.size()) / element_size(dtype_);
  for (int64_t at = 0; at < elements; ++at) {
    if (at / ld_ < rows && at % ld_ < columns_) continue;
    if (read_bits(bytes_.data(), dtype_, at) != test::poison(dtype_))
      return "row " + std::to_string(at / ld_) + ", column " + std::to_string(at % ld_) + " was written";
  }
  return {};
}

std::string MoeMatrix::bits(int64_t rows) const {
  std::string all;
  for (int64_t row = 0; row < rows; ++row) {
    all.append(reinterpret_cast<const char*>(bytes_.data()) + row * ld_ * element_size(dtype_),
               static_cast<size_t>(columns_ * element_size(dtype_)));
  }
  return all;
}

}  // namespace mk::test
