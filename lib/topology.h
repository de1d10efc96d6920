// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "status.h"

namespace mk {

// Which rank is where. Equal on every rank but for `rank`. Nodes are numbered by their lowest rank; the ranks
// of a node are numbered in rank order.
struct Topology {
  int rank = 0;
  int nranks = 1;
  int num_nodes = 1;
  std::vector<int> node_of_rank;
  std::vector<int> local_rank_of_rank;
  std::vector<std::vector<int>> ranks_of_node;

  int node() const { return node_of_rank[rank]; }
  int local_rank() const { return local_rank_of_rank[rank]; }
  int local_nranks() const { return static_cast<int>(ranks_of_node[node()].size()); }
  bool same_node(int a, int b) const { return node_of_rank[a] == node_of_rank[b]; }

  // Groups ranks by host and, where given, by emulated node: two ranks share a node when both agree.
  static Topology make(int rank, std::span<const std::string> host_of_rank,
                       std::span<const int32_t> emulated_node_of_rank);
};

// What this process' machine calls itself: equal for two processes exactly when they can share memory (boot id,
// network namespace, IPC namespace).
std::string host_identity();

}  // namespace mk
