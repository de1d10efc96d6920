// SPDX-License-Identifier: MIT
#include "rank_list.h"

#include "status.h"

namespace mk {

std::string rank_list(std::span<const int> ranks) {
  // A sentence stays a sentence with thousands of ranks.
  constexpr int kMaxRuns = 20;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  int runs = 0;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (i > 0) text += ", ";
    if (++runs > kMaxRuns) return text + format("and %zu more", ranks.size() - i);
    text += std::to_string(ranks[i]);
    if (last > i) text += (last == i + 1 ? ", " : "-") + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string seconds(long long milliseconds) {
  return milliseconds % 1000 == 0 ? format("%lld s", milliseconds / 1000)
                                  : format("%.3g s", static_cast<double>(milliseconds) / 1000);
}

}  // namespace mk
