// SPDX-License-Identifier: MIT
// What plans know of a device's memory.
#pragma once

namespace mk {

// Reading, of an H100: what the plan of an unknown GPU takes it for. An H200 has 4.8e6.
constexpr double H100_MEMORY_BYTES_PER_US = 3.35e6;

}  // namespace mk
