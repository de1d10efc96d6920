// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <vector>

#include "lib/topology.h"

namespace mk::test {

// The topology seen by `rank` when node_of_rank says which rank is where; nodes numbered by their lowest rank.
inline Topology rank_topology(int rank, const std::vector<int>& node_of_rank) {
  Topology topology;
  topology.rank = rank;
  topology.nranks = static_cast<int>(node_of_rank.size());
  topology.num_nodes = 1 + *std::max_element(node_of_rank.begin(), node_of_rank.end());
  topology.node_of_rank = node_of_rank;
  topology.ranks_of_node.resize(static_cast<size_t>(topology.num_nodes));
  for (int other = 0; other < topology.nranks; ++other) {
    auto& ranks = topology.ranks_of_node[static_cast<size_t>(node_of_rank[static_cast<size_t>(other)])];
    topology.local_rank_of_rank.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(other);
  }
  return topology;
}

}  // namespace mk::test
