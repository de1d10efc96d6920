// SPDX-License-Identifier: MIT
#include "wait_report.h"

#include <algorithm>
#include <cstdio>

#include "lib/log.h"

namespace mk {

void report_timeout(const ExecutorContext& context, const WaitReport& wait) {
  mk_async_error_t error = MK_ASYNC_ERROR_INIT;
  error.status = MK_ERROR_TIMEOUT;
  error.op = wait.op;
  error.rank = wait.peer;
  error.waiter_rank = wait.waiter_rank;
  error.epoch = wait.epoch;
  error.object_index = wait.index;
  error.seen = wait.seen;
  error.expected = wait.expected;
  std::snprintf(error.role, sizeof error.role, "%s", wait.role);
  std::snprintf(error.object, sizeof error.object, "%s", wait.object);
  const std::string cta = wait.cta >= 0 ? format(", CTA %d", wait.cta) : std::string();
  const std::string from = wait.peer >= 0 ? format(" of rank %d", wait.peer) : std::string();
  const char* const cause = wait.peer >= 0
                                ? "That rank has entered the launch but does not go on; look at its own error"
                                : "The network does not complete what this rank has posted; look at the other "
                                  "ranks' own errors";
  context.report(
      error,
      format("rank %d, role %s%s, waited %lld ms in %s (launch %llu) for %s %llu%s: saw %llu, expected %llu. "
             "%s, or raise wait_timeout_ms",
             wait.waiter_rank, wait.role, cta.c_str(), static_cast<long long>(context.config.wait_timeout_ms),
             operator_name(wait.op), static_cast<unsigned long long>(wait.epoch), wait.object,
             static_cast<unsigned long long>(wait.index), from.c_str(),
             static_cast<unsigned long long>(wait.seen), static_cast<unsigned long long>(wait.expected),
             cause));
}

void log_absent(const ExecutorContext& context, mk_operator_t op, uint64_t epoch,
                const std::vector<AbsentPeer>& peers) {
  if (peers.empty()) return;
  constexpr size_t kMostNamed = 8;
  std::string named;
  for (size_t i = 0; i < std::min(peers.size(), kMostNamed); ++i) {
    named += format("%srank %d (its last launch: %llu)", i == 0 ? "" : ", ", peers[i].rank,
                    static_cast<unsigned long long>(peers[i].last_epoch));
  }
  if (peers.size() > kMostNamed) named += format(" and %zu others", peers.size() - kMostNamed);
  log(MK_LOG_WARN,
      "rank %d has waited %lld ms in %s (launch %llu) for %s to enter it, and goes on waiting: all of them "
      "live. "
      "If they are not merely late, ranks have not made the same calls",
      context.topology.rank, static_cast<long long>(context.config.wait_timeout_ms), operator_name(op),
      static_cast<unsigned long long>(epoch), named.c_str());
}

}  // namespace mk
