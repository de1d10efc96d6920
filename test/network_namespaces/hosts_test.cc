// SPDX-License-Identifier: MIT
// The host operators between hosts, over the transport that is chosen by itself where there is no RDMA device:
// exact on two to four hosts, also when a link fails for a moment or is slow; when it stays cut, every rank
// ends in time and names a rank that it cannot reach. Where the kernel permits no namespaces it exits with 77:
// not run.
//   hosts_test [--launches N] [--cuts N] [--seed S]
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "test/multi_rank/checked_rank.h"
#include "test/multi_rank/fault_operators.h"
#include "test/multi_rank/fault_pool.h"
#include "test/network_namespaces/namespace_hosts.h"

using namespace mk::test;

namespace {

constexpr int kHosts = 4;
constexpr int kWideRanks = 3;  // each on a host of its own, when links are cut
constexpr unsigned kJobLimitS = 120;
constexpr int kPauseMs = 400;  // of a link, shorter than anybody's patience

int g_failed = 0, g_passed = 0;

void count(const std::string& what, const std::string& wrong) {
  std::printf("%s %s%s%s\n", wrong.empty() ? "ok    " : "FAILED", what.c_str(), wrong.empty() ? "" : ": ",
              wrong.c_str());
  (wrong.empty() ? g_passed : g_failed)++;
}

// Ranks take the hosts in turns.
int host_of(int rank, int num_hosts) { return rank % num_hosts; }

// Ranks on `num_hosts` of the hosts; `meanwhile` runs once they are on their way.
std::string run_exact(const NamespaceHosts& hosts, int nranks, int num_hosts, uint64_t launches, uint64_t seed,
                      const std::function<void()>& meanwhile) {
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  config.device = MK_DEVICE_HOST;
  config.host_threads = 1;
  ProcessJob job(nranks, kJobLimitS, [&](RankProcess& self) {
    hosts.enter(host_of(self.rank(), num_hosts));
    self.tell(run_checked_rank(self, nranks, config, fault_operators(), launches, seed));
  });
  if (!job.started(nranks) || !job.pass_id_on()) return "the ranks did not start";
  meanwhile();
  return join_checked_ranks(job, nranks, static_cast<int>(kJobLimitS * 1000));
}

void test_exact(const NamespaceHosts& hosts, uint64_t launches, uint64_t seed) {
  const auto nothing = [] {};
  const std::string operators = std::to_string(launches) + " launches, ";
  for (const auto& [nranks, num_hosts] : {std::pair{2, 2}, {4, 2}, {6, 2}, {3, 3}, {6, 3}, {4, 4}, {16, 4}}) {
    count(operators + std::to_string(nranks) + " ranks on " + std::to_string(num_hosts) + " hosts",
          run_exact(hosts, nranks, num_hosts, launches, seed, nothing));
  }
  count(operators + "4 ranks on 2 hosts, a link that fails for a moment, three times",
        run_exact(hosts, 4, 2, 10 * launches, seed, [&] {
          for (int n = 0; n < 3; ++n) {
            usleep(400000);
            hosts.cut(n % 2);
            usleep(kPauseMs * 1000);
            hosts.mend(n % 2);
          }
        }));
}

// The last test: the links stay slow.
void test_slow_links(const NamespaceHosts& hosts, uint64_t launches, uint64_t seed) {
  const char* way = hosts.slow_all();
  if (way == nullptr) {
    std::printf("NOTE: this kernel has neither netem nor tbf: slow links were not tried.\n");
    return;
  }
  count(std::to_string(launches) + " launches, 3 ranks on 3 hosts, slow links (" + way + ")",
        run_exact(hosts, 3, 3, launches, seed, [] {}));
}

// The cable of one host is pulled while operators run.
void test_cuts(const NamespaceHosts& hosts, uint64_t cuts, uint64_t seed) {
  int cut_host = 0;
  int num_hosts = 2;
  FaultPool pool([&](int rank) { hosts.enter(host_of(rank, num_hosts)); },
                 [&](int, bool cut) { return cut ? hosts.cut(cut_host) : hosts.mend(cut_host); });
  FaultPool wide_pool([&](int rank) { hosts.enter(host_of(rank, kWideRanks)); },
                      [&](int, bool cut) { return cut ? hosts.cut(cut_host) : hosts.mend(cut_host); });
  std::mt19937_64 random(seed);
  for (uint64_t number = 0; number < cuts; ++number) {
    const bool wide = number % 2 == 1;
    Fault fault;
    fault.kind = FaultKind::cut;
    fault.victim = -1;  // any rank may be named, but not oneself
    fault.scene.nranks = wide ? kWideRanks : 4;
    fault.scene.num_nodes = 1;  // the hosts are the nodes
    fault.scene.op = static_cast<int32_t>(number % fault_operators().size());
    fault.scene.seed = random();
    fault.scene.peer_timeout_ms = 1500;
    fault.scene.init_timeout_ms = 20000;
    fault.delay_us = static_cast<int>(random() % 20000);
    cut_host = static_cast<int>(random() % static_cast<uint64_t>(wide ? kWideRanks : num_hosts));
    const FaultResult result = (wide ? wide_pool : pool).run(fault);
    std::string wrong;
    for (const std::string& complaint : result.complaints) wrong += complaint + "; ";
    count("host " + std::to_string(cut_host) + " cut off: " + fault.text() + ", slowest " +
              std::to_string(result.slowest_survivor_ms) + " ms",
          wrong);
  }
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t launches = 32, cuts = 6, seed = 1;
  for (int at = 1; at + 1 < argc; at += 2) {
    const uint64_t value = std::strtoull(argv[at + 1], nullptr, 10);
    (std::strcmp(argv[at], "--cuts") == 0   ? cuts
     : std::strcmp(argv[at], "--seed") == 0 ? seed
                                            : launches) = value;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  // No device of this machine is to be found from its namespaces.
  setenv("MK_TRANSPORT", "ofi", 0);
  NamespaceHosts hosts;
  if (const std::string why = hosts.make(kHosts); !why.empty()) {
    std::printf("SKIPPED, NOTHING WAS TESTED: no network namespaces (%s); run as root\n", why.c_str());
    return 77;
  }
  test_exact(hosts, launches, seed);
  test_cuts(hosts, cuts, seed);
  test_slow_links(hosts, launches, seed);
  std::printf("%d passed, %d failed\n", g_passed, g_failed);
  return g_failed == 0 ? 0 : 1;
}
