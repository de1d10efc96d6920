// SPDX-License-Identifier: MIT
// The network between two ranks, or between all, is cut in the middle of operators: every rank ends in time and
// says that the other one does not answer. In a network namespace of its own, where each rank has an address of
// its own on the loopback interface; taking rank r's address away cuts r off from its predecessor on the ring,
// whose connection leads there. Where the kernel permits no namespace it exits with 77: not run.
//   link_cut [--cuts N] [--seed S]
#include <sched.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "test/multi_rank/fault_operators.h"
#include "test/multi_rank/fault_pool.h"

using namespace mk::test;

namespace {

constexpr int kMostRanks = 5;

bool shell(const std::string& command) { return std::system(command.c_str()) == 0; }

std::string address_of(int rank) { return "10.77.0." + std::to_string(rank + 1) + "/32"; }
std::string interface_of(int rank) { return "lo:" + std::to_string(rank); }

bool add_address(int rank) {
  return shell("ip addr add " + address_of(rank) + " dev lo label " + interface_of(rank));
}

// "" or why not.
std::string enter_namespace() {
  if (unshare(CLONE_NEWNET) != 0) return std::string("unshare(CLONE_NEWNET): ") + std::strerror(errno);
  if (!shell("ip link set lo up")) return "no ip command, or it may not configure the new namespace";
  for (int rank = 0; rank < kMostRanks; ++rank) {
    if (!add_address(rank)) return "ip addr add failed";
  }
  return "";
}

bool cut_or_mend(int victim, bool cut) {
  if (victim < 0) return shell(cut ? "ip link set lo down" : "ip link set lo up");
  return cut ? shell("ip addr del " + address_of(victim) + " dev lo") : add_address(victim);
}

Fault make_cut(std::mt19937_64& random, uint64_t number) {
  const auto below = [&](size_t bound) { return static_cast<int>(random() % bound); };
  Fault fault;
  fault.kind = FaultKind::cut;
  Scene& scene = fault.scene;
  scene.nranks = 2 + below(kMostRanks - 1);
  scene.num_nodes = 1 + below(static_cast<size_t>(std::min(scene.nranks, 3)));
  scene.op = static_cast<int32_t>(number % fault_operators().size());
  scene.seed = random();
  scene.peer_timeout_ms = 1500;
  scene.init_timeout_ms = 20000;
  const bool all = number % 4 == 3;
  fault.victim = all ? -1 : below(static_cast<size_t>(scene.nranks));
  fault.second_victim = all ? -1 : (fault.victim + scene.nranks - 1) % scene.nranks;
  fault.delay_us = below(20000);
  return fault;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t cuts = 8, seed = 1;
  for (int at = 1; at + 1 < argc; at += 2) {
    (std::strcmp(argv[at], "--cuts") == 0 ? cuts : seed) = std::strtoull(argv[at + 1], nullptr, 10);
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (const std::string why = enter_namespace(); !why.empty()) {
    std::printf("SKIPPED, NOTHING WAS TESTED: no network namespace (%s); run as root\n", why.c_str());
    return 77;
  }
  const auto enter = [](int rank) { setenv("MK_SOCKET_IFNAME", ("=" + interface_of(rank)).c_str(), 1); };
  FaultPool pool(enter, cut_or_mend);
  std::mt19937_64 random(seed);
  uint64_t failed = 0;
  int64_t slowest_ms = 0;
  for (uint64_t number = 0; number < cuts; ++number) {
    const Fault fault = make_cut(random, number);
    const FaultResult result = pool.run(fault);
    slowest_ms = std::max(slowest_ms, result.slowest_survivor_ms);
    failed += !result.complaints.empty();
    for (const std::string& complaint : result.complaints)
      std::printf("FAILED cut %llu (%s): %s\n", static_cast<unsigned long long>(number), fault.text().c_str(),
                  complaint.c_str());
  }
  std::printf("%llu passed, %llu failed; slowest %lld ms\n", static_cast<unsigned long long>(cuts - failed),
              static_cast<unsigned long long>(failed), static_cast<long long>(slowest_ms));
  return failed == 0 ? 0 : 1;
}
