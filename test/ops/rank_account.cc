// SPDX-License-Identifier: MIT
#include "rank_account.h"

#include <algorithm>

#include "kernels/protocol.h"
#include "lib/status.h"
#include "transport/command.h"

namespace mk::test {

void RankAccount::check_raised(int rank, std::vector<std::string>& found) const {
  const auto check = [&](const char* name, const std::map<int, Raised>& all, int bound) {
    for (const auto& [index, raised] : all) {
      if (raised.times == 1 && raised.waited > 0 && index >= 0 && index < bound) continue;
      found.push_back(format("%s %d at rank %d (of %d): raised %d times, waited for %d times", name, index,
                             rank, bound, raised.times, raised.waited));
    }
  };
  check("flag", flags, kFlagsPerBank);
  check("signal", signals, kSignalsPerBank);
}

void RankAccount::check_bytes(int rank, std::vector<std::string>& found) const {
  if (plan.link_bytes == link_bytes && plan.network_bytes == network_bytes) return;
  found.push_back(
      format("rank %d: the plan says %lld bytes inside the node and %lld outside, the schedule sends %lld and "
             "%lld",
             rank, static_cast<long long>(plan.link_bytes), static_cast<long long>(plan.network_bytes),
             static_cast<long long>(link_bytes), static_cast<long long>(network_bytes)));
}

void RankAccount::check_writes(int rank, std::vector<std::string>& found) const {
  std::vector<Write> ordered = writes;
  std::sort(ordered.begin(), ordered.end(), [](const Write& a, const Write& b) { return a.begin < b.begin; });
  for (size_t at = 0; at < ordered.size(); ++at) {
    const Write& own = ordered[at];
    if (own.end > area_bytes)
      found.push_back(format("rank %d writes beyond the area of rank %d", own.writer, rank));
    if (own.end - own.begin > UINT32_MAX) found.push_back("a put of more than 4 GiB");
    if (at == 0) continue;
    const Write& before = ordered[at - 1];
    if (own.begin < before.end)
      found.push_back(format("ranks %d and %d write the same bytes [%zu, %zu) of rank %d", before.writer,
                             own.writer, own.begin, before.end, rank));
  }
}

}  // namespace mk::test
