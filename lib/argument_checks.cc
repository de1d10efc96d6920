// SPDX-License-Identifier: MIT
#include "argument_checks.h"

namespace mk {

Status invalid(mk_operator_t op, const std::string& sentence) {
  return Status(MK_ERROR_INVALID_ARGUMENT, format("mk_%s: %s", operator_name(op), sentence.c_str()));
}

Status check_size(mk_operator_t op, const char* name, int64_t value) {
  if (value >= 0 && value <= kMaxElements) return {};
  return invalid(op, format("%s: expected 0 to %lld, saw %lld", name, static_cast<long long>(kMaxElements),
                            static_cast<long long>(value)));
}

Status check_product(mk_operator_t op, const char* what, int64_t rows, int64_t columns) {
  int64_t elements = 0;
  if (!__builtin_mul_overflow(rows, columns, &elements) && elements <= kMaxElements) return {};
  return invalid(op, format("%s: expected a matrix of at most %lld elements, saw %lld x %lld", what,
                            static_cast<long long>(kMaxElements), static_cast<long long>(rows),
                            static_cast<long long>(columns)));
}

Status check_dtype(mk_operator_t op, const char* name, mk_dtype_t dtype, bool fp32_allowed) {
  switch (dtype) {
    case MK_DTYPE_BF16:
    case MK_DTYPE_FP16:
      return {};
    case MK_DTYPE_FP32:
      if (fp32_allowed) return {};
      break;
    case MK_DTYPE_FP8_E4M3:
    case MK_DTYPE_FP8_E5M2:
      break;
    default:
      return invalid(op, format("%s: expected one of mk_dtype_t, saw %d", name, dtype));
  }
  return Status(MK_ERROR_UNSUPPORTED,
                format("mk_%s: %s: %s is not built yet; expected bf16 or fp16%s", operator_name(op), name,
                       dtype_name(dtype), fp32_allowed ? " or fp32" : ""));
}

Status read_tuning(mk_operator_t op, const mk_tuning_t* from, mk_tuning_t& to) {
  to = MK_TUNING_INIT;
  if (from == nullptr) return {};
  MK_RETURN_IF_ERROR(read_struct_of(op, from, sizeof(mk_tuning_t), "tuning", to));
  if (to.algorithm < MK_ALGORITHM_AUTO || to.algorithm > MK_ALGORITHM_TWO_SHOT) {
    return invalid(op, format("tuning.algorithm: expected one of mk_algorithm_t, saw %d", to.algorithm));
  }
  const auto check = [&](const char* name, int64_t value, int64_t high) {
    if (value >= 0 && value <= high) return Status();
    return invalid(op, format("tuning.%s: expected 0 to %lld, saw %lld", name, static_cast<long long>(high),
                              static_cast<long long>(value)));
  };
  MK_RETURN_IF_ERROR(check("compute_ctas", to.compute_ctas, 1024));
  MK_RETURN_IF_ERROR(check("copy_ctas", to.copy_ctas, 1024));
  MK_RETURN_IF_ERROR(check("send_ctas", to.send_ctas, 1024));
  MK_RETURN_IF_ERROR(check("receive_ctas", to.receive_ctas, 1024));
  MK_RETURN_IF_ERROR(check("reduce_ctas", to.reduce_ctas, 1024));
  MK_RETURN_IF_ERROR(check("tile_m", to.tile_m, 512));
  MK_RETURN_IF_ERROR(check("tile_n", to.tile_n, 512));
  return check("chunk_bytes", to.chunk_bytes, 1 << 30);
}

Status check_matrix(mk_operator_t op, const Matrix& matrix) {
  if (matrix.empty()) return {};
  if (matrix.data == nullptr) {
    return invalid(op, format("%s: expected a pointer to %lld x %lld elements, saw NULL", matrix.name,
                              static_cast<long long>(matrix.rows), static_cast<long long>(matrix.columns)));
  }
  if (matrix.begin() % 16 != 0) {
    return invalid(op, format("%s: expected a 16-byte aligned pointer, saw %p", matrix.name, matrix.data));
  }
  if (matrix.rows == 1) return {};
  const auto ld_name = [&] { return matrix.ld_name ? matrix.ld_name : std::string("ld") + matrix.name; };
  if (matrix.ld < matrix.columns) {
    return invalid(op, format("%s: expected at least %lld (elements of a row), saw %lld", ld_name().c_str(),
                              static_cast<long long>(matrix.columns), static_cast<long long>(matrix.ld)));
  }
  MK_RETURN_IF_ERROR(check_product(op, matrix.name, matrix.rows, matrix.ld));
  if (matrix.ld * matrix.element_bytes % 16 != 0) {
    return invalid(op, format("%s: expected rows 16 bytes aligned, a multiple of %d elements, saw %lld",
                              ld_name().c_str(), 16 / matrix.element_bytes, static_cast<long long>(matrix.ld)));
  }
  return {};
}

Status check_apart(mk_operator_t op, const Matrix& output, const Matrix& other) {
  if (output.empty() || other.empty() || other.data == nullptr) return {};
  if (output.begin() >= other.end() || other.begin() >= output.end()) return {};
  return invalid(
      op, format("%s [%p, %p) overlaps %s [%p, %p); an output overlaps no other matrix", output.name,
                 reinterpret_cast<void*>(output.begin()), reinterpret_cast<void*>(output.end()), other.name,
                 reinterpret_cast<void*>(other.begin()), reinterpret_cast<void*>(other.end())));
}

}  // namespace mk
