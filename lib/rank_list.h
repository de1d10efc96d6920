// SPDX-License-Identifier: MIT
#pragma once

#include <span>
#include <string>

namespace mk {

// "rank 3" or "ranks 3, 5-7": for sentences. `ranks` is ascending.
std::string rank_list(std::span<const int> ranks);
// 8000 -> "8 s", 2500 -> "2.5 s".
std::string seconds(long long milliseconds);

}  // namespace mk
