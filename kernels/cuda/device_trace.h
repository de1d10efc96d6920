// SPDX-License-Identifier: MIT
// From what the CTAs of traced launches have written to a trace in nanoseconds, and what they find at the
// start. Pure host code, built without CUDA, too.
#pragma once

#include "kernels/device/trace_buffer.h"
#include "kernels/trace.h"

namespace mk {

// Writes what the tracks are at the start, in memory that will be at `device_memory`.
void empty_tracks(const TraceLayout& layout, std::byte* image, std::byte* device_memory);

// `image`: layout.bytes() of a trace's memory, while no launch was running. `offset_ns` is added to the
// device's time.
Trace convert_device_trace(const TraceLayout& layout, const std::byte* image, int64_t offset_ns);

}  // namespace mk
