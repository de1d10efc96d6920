// SPDX-License-Identifier: MIT
// A topology's arrays, in memory that a TopologyView points to.
#pragma once

#include <vector>

#include "../lib/topology.h"
#include "protocol.h"

namespace mk {

class TopologyArrays {
 public:
  explicit TopologyArrays(const Topology& topology)
      : node_of_rank_(topology.node_of_rank), local_rank_of_rank_(topology.local_rank_of_rank) {
    for (const auto& ranks : topology.ranks_of_node) {
      node_begin_.push_back(static_cast<int>(ranks_by_node_.size()));
      ranks_by_node_.insert(ranks_by_node_.end(), ranks.begin(), ranks.end());
    }
    node_begin_.push_back(static_cast<int>(ranks_by_node_.size()));
    view_ = {topology.rank,
             topology.nranks,
             topology.num_nodes,
             node_of_rank_.data(),
             local_rank_of_rank_.data(),
             node_begin_.data(),
             ranks_by_node_.data()};
  }
  TopologyArrays(const TopologyArrays&) = delete;
  TopologyArrays& operator=(const TopologyArrays&) = delete;

  const TopologyView& view() const { return view_; }

 private:
  const std::vector<int> node_of_rank_;
  const std::vector<int> local_rank_of_rank_;
  std::vector<int> node_begin_;
  std::vector<int> ranks_by_node_;
  TopologyView view_;
};

}  // namespace mk
