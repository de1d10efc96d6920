// SPDX-License-Identifier: MIT
// Names and sizes of what the public enumerations stand for.
#pragma once

#include "mkernel.h"

namespace mk {

// Bytes of an element; 0 for a type that is not one of matrices.
constexpr int element_bytes(mk_dtype_t dtype) {
  switch (dtype) {
    case MK_DTYPE_BF16:
    case MK_DTYPE_FP16:
      return 2;
    case MK_DTYPE_FP32:
      return 4;
    default:
      return 0;
  }
}

const char* operator_name(mk_operator_t op);
const char* dtype_name(mk_dtype_t dtype);

}  // namespace mk
