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
// `cuda_device`: the rank's GPU, whose nearest NICs it uses; -1: none.
NetworkCheck check_network(const mk_unique_id_t& id, int nranks, int rank,
                           const std::vector<int32_t>& node_of_rank, int cuda_device);

}  // namespace perf
