// SPDX-License-Identifier: MIT
// Checks of arguments that all operators share. A sentence names the argument, what was expected and what was
// seen.
#pragma once

#include <cstdint>
#include <string>

#include "../kernels/operator_names.h"
#include "status.h"
#include "struct_size.h"

namespace mk {

// Beyond this, byte offsets would not fit the 48 bits of a command.
inline constexpr int64_t kMaxElements = int64_t{1} << 44;

// MK_ERROR_INVALID_ARGUMENT with "mk_<operator>: <sentence>".
Status invalid(mk_operator_t op, const std::string& sentence);
// read_struct for an operator's arguments or maxima: the sentence begins with the operator's name.
template <class Struct>
Status read_struct_of(mk_operator_t op, const Struct* from, size_t first_size, const char* name, Struct& to) {
  Status status = read_struct(from, first_size, name, to);
  if (status.ok()) return status;
  return Status(status.code(), format("mk_%s: %s", operator_name(op), status.sentence().c_str()));
}
Status check_size(mk_operator_t op, const char* name, int64_t value);
Status check_product(mk_operator_t op, const char* what, int64_t rows, int64_t columns);
Status check_dtype(mk_operator_t op, const char* name, mk_dtype_t dtype, bool fp32_allowed);
// nullptr: all zero.
Status read_tuning(mk_operator_t op, const mk_tuning_t* from, mk_tuning_t& to);

// A row-major matrix of the caller's.
struct Matrix {
  const char* name;
  const void* data;
  int64_t rows;
  int64_t columns;
  int64_t ld;
  int element_bytes;
  const char* ld_name = nullptr;  // where it is not "ld" and the name

  bool empty() const { return rows == 0 || columns == 0; }
  uintptr_t begin() const { return reinterpret_cast<uintptr_t>(data); }
  uintptr_t end() const { return begin() + static_cast<uintptr_t>((rows - 1) * ld + columns) * element_bytes; }
};

// Pointer, alignment, leading dimension; nothing is asked of an empty matrix.
Status check_matrix(mk_operator_t op, const Matrix& matrix);
Status check_apart(mk_operator_t op, const Matrix& output, const Matrix& other);

}  // namespace mk
