// SPDX-License-Identifier: MIT
// Kills, aborts and stops at seeded random moments of jobs of processes, over all operators and layouts.
//   fault_campaign [--faults N] [--seed S] [--first I] [--during-init 1]
// Each fault is a function of seed and number: --first I --faults 1 repeats number I alone.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "test/multi_rank/fault_pool.h"

using namespace mk::test;

namespace {

struct Options {
  uint64_t faults = 1000;
  uint64_t seed = 1;
  uint64_t first = 0;
  bool during_init = false;  // every fault
};

bool parse(int argc, char** argv, Options& options) {
  for (int at = 1; at < argc; at += 2) {
    char* end = nullptr;
    const uint64_t value = at + 1 < argc ? std::strtoull(argv[at + 1], &end, 10) : 0;
    if (end == nullptr || end == argv[at + 1] || *end != 0) return false;
    if (std::strcmp(argv[at], "--faults") == 0) {
      options.faults = value;
    } else if (std::strcmp(argv[at], "--seed") == 0) {
      options.seed = value;
    } else if (std::strcmp(argv[at], "--first") == 0) {
      options.first = value;
    } else if (std::strcmp(argv[at], "--during-init") == 0 && value <= 1) {
      options.during_init = value == 1;
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) {
    std::fprintf(stderr, "usage: fault_campaign [--faults N] [--seed S] [--first I] [--during-init 1]\n");
    return 2;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  auto reported = start;
  uint64_t failed = 0, tried[kFaultKinds] = {}, during_init = 0;
  int64_t slowest_survivor_ms = 0, slowest_abort_ms = 0;
  FaultPool pool;
  for (uint64_t number = 0; number < options.faults; ++number) {
    const uint64_t index = options.first + number;
    const Fault fault = make_fault(options.seed, index, options.during_init);
    const FaultResult result = pool.run(fault);
    ++tried[static_cast<int>(fault.kind)];
    during_init += fault.during_init;
    failed += !result.complaints.empty();
    slowest_survivor_ms = std::max(slowest_survivor_ms, result.slowest_survivor_ms);
    slowest_abort_ms = std::max(slowest_abort_ms, result.abort_ms);
    for (const std::string& complaint : result.complaints) {
      std::printf("FAILED fault %llu (%s): %s\n", static_cast<unsigned long long>(index), fault.text().c_str(),
                  complaint.c_str());
    }
    const auto now = Clock::now();
    if (now - reported < std::chrono::minutes(1)) continue;
    reported = now;
    std::printf("%llu of %llu faults, %llu failed, %lld s\n", static_cast<unsigned long long>(number + 1),
                static_cast<unsigned long long>(options.faults), static_cast<unsigned long long>(failed),
                static_cast<long long>(std::chrono::duration_cast<std::chrono::seconds>(now - start).count()));
  }
  std::printf("seed %llu:", static_cast<unsigned long long>(options.seed));
  for (int kind = 0; kind < kFaultKinds; ++kind) {
    if (tried[kind] == 0) continue;
    std::printf(" %llu %s,", static_cast<unsigned long long>(tried[kind]),
                name_of(static_cast<FaultKind>(kind)));
  }
  std::printf(" %llu of them during init; slowest survivor %lld ms, slowest abort %lld ms\n",
              static_cast<unsigned long long>(during_init), static_cast<long long>(slowest_survivor_ms),
              static_cast<long long>(slowest_abort_ms));
  std::printf("%llu passed, %llu failed\n", static_cast<unsigned long long>(options.faults - failed),
              static_cast<unsigned long long>(failed));
  return failed == 0 ? 0 : 1;
}
