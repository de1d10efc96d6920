// SPDX-License-Identifier: MIT
// mk-perf --check-network: what the network between the ranks' machines is made of, how fast it is, and in
// words what is wrong with it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mkernel.h"

namespace perf {

struct NetworkCheck {
  std::string text;
  std::string problems;  // a sentence a line, the same on all ranks; "" when none was found
  std::string failure;   // why this rank could not go on, or ""
};

// Collective, in a job of its own with that id. `node_of_rank` emulates nodes; empty: the machines are.
NetworkCheck check_network(const mk_unique_id_t& id, int nranks, int rank,
                           const std::vector<int32_t>& node_of_rank);

// Links from rank to rank, as measured.
struct MeasuredLink {
  int32_t from;
  int32_t to;
  double latency_us;
  double gigabytes;
};
// What stands out among them, a sentence a line.
std::string judge_links(const std::vector<MeasuredLink>& links);

}  // namespace perf
