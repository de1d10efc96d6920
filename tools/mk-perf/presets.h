// SPDX-License-Identifier: MIT
// Lists of shapes by name.
#pragma once

#include <string>
#include <vector>

#include "shape.h"

namespace perf {

// "gpu, square, llama3-70b, deepseek-v3, deepseek-v3-small, ring-attention"
std::string preset_names();

// The shapes of a preset for one operator among `nranks` ranks, "default" being those of a run that names none,
// on GPUs "gpu"; empty when the preset has nothing for the operator. A UsageError for an unknown preset, or
// ranks that do not divide its sizes.
std::vector<Shape> preset_shapes(const std::string& preset, const std::string& operator_name, int nranks);

}  // namespace perf
