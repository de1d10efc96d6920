// SPDX-License-Identifier: MIT
// The GEMM operators on two emulated nodes, two processes, over the transport that MK_TRANSPORT names.
//   rxe_two_nodes [--launches N]
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "test/multi_rank/checked_rank.h"

using namespace mk::test;

int main(int argc, char** argv) {
  constexpr int kRanks = 2;
  constexpr unsigned kLimitS = 55;
  constexpr size_t kGemmOperators = 4;  // the first rows
  const uint64_t launches =
      argc == 3 && std::strcmp(argv[1], "--launches") == 0 ? std::strtoull(argv[2], nullptr, 10) : 8;
  const int32_t nodes[kRanks] = {0, 1};
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  config.device = MK_DEVICE_HOST;
  config.host_threads = 1;
  config.node_of_rank = nodes;
  const auto operators = std::span(fault_operators()).first(kGemmOperators);
  ProcessJob job(kRanks, kLimitS, [&](RankProcess& self) {
    self.tell(run_checked_rank(self, kRanks, config, operators, launches, 1));
  });
  if (!job.started(kRanks) || !job.pass_id_on()) return std::printf("the ranks did not start\n"), 1;
  const std::string wrong = join_checked_ranks(job, kRanks, static_cast<int>(kLimitS * 1000));
  std::printf("%llu launches on 2 nodes: %s\n", static_cast<unsigned long long>(launches),
              wrong.empty() ? "exact" : wrong.c_str());
  return wrong.empty() ? 0 : 1;
}
