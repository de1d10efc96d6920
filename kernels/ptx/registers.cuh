// SPDX-License-Identifier: MIT
// What the compiler is told about registers, without an instruction.
#pragma once

#include <cstdint>

namespace mk::ptx {

// The compiler no longer knows what `value` is: what is worked out from it is not moved out of a loop, where it
// would hold registers.
__device__ __forceinline__ void forget(uint32_t& value) { asm volatile("" : "+r"(value)); }

}  // namespace mk::ptx
