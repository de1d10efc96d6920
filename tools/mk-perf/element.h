// SPDX-License-Identifier: MIT
// Elements of matrices in host memory: bits and values of the dtypes. Written for the checks, so it shares no
// code with the library that is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "mkernel.h"

namespace perf {

size_t element_bytes(mk_dtype_t dtype);
const char* dtype_name(mk_dtype_t dtype);

// "bf16", "fp16", "fp32"; anything else is a UsageError that names `option`.
mk_dtype_t parse_dtype(const std::string& text, const char* option, bool allow_fp32);

// Round to nearest, ties to even.
uint16_t bf16_bits(float value);
uint16_t fp16_bits(float value);
float bf16_value(uint16_t bits);
float fp16_value(uint16_t bits);

float load_element(mk_dtype_t dtype, const void* matrix, int64_t index);
void store_element(mk_dtype_t dtype, void* matrix, int64_t index, float value);
float round_to(mk_dtype_t dtype, float value);

// Fills with a NaN of one particular pattern, which a launch must overwrite.
void poison_elements(mk_dtype_t dtype, void* matrix, int64_t count);
bool is_poison(mk_dtype_t dtype, const void* matrix, int64_t index);

// Integers from -n to n are all exact.
int64_t exact_integer_limit(mk_dtype_t dtype);

// Bound of |out - reference| / |reference| (Frobenius) for random inputs when results are rounded to dtype.
double relative_error_limit(mk_dtype_t dtype);

}  // namespace perf
