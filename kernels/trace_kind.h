// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

namespace mk {

// What a warp or a thread did, in a trace; trace.cc has the names.
enum class TraceKind : uint16_t { wait = 0, load, compute, store, copy, send, reduce, NUM };

}  // namespace mk
