// SPDX-License-Identifier: MIT
// Who needs whose panels of packed sequences between nodes, as a rank's CTAs find it out.
#pragma once

#include <string>
#include <vector>

#include "kernels/ops/ring_attention/packed_network_panels.h"
#include "kernels/topology_arrays.h"

namespace mk::test {

using ring_attention::is_in;
using ring_attention::NodeRanks;
using ring_attention::RankSet;

using Nodes = std::vector<int32_t>;

inline TopologyArrays topology_of(const Nodes& nodes, int rank) {
  return TopologyArrays(Topology::make(rank, std::vector<std::string>(nodes.size(), "host"), nodes));
}

// What one rank of a launch knows: as its CTAs find it out.
template <class Panels>
struct PackedRankView {
  RankOrder order;
  NodeRanks nodes;
  std::vector<RankSet> needed_by;
  Panels panels;

  PackedRankView(const Panels& common, const Nodes& where, int rank)
      : order(make_rank_order(topology_of(where, rank).view())),
        nodes(ring_attention::make_node_ranks(topology_of(where, rank).view())),
        needed_by(where.size() * static_cast<size_t>(common.run_panels), ~RankSet{0}),  // of most, nothing
        panels(common) {
    panels.own = nodes.own;
    panels.needed_by = needed_by.data();
    const auto find = [&](int source, RankSet peers) {
      for (int panel = 0; panel < panels.run_panels; ++panel) {
        RankSet& found = needed_by[static_cast<size_t>(source * panels.run_panels + panel)];
        found = 0;
        for (int peer = 0; peer < panels.nranks; ++peer) {
          if (peer != source && is_in(peers, peer) &&
              needs_panel(panels, panels.slices, panels.block_n, source, panel, peer))
            found |= RankSet{1} << peer;
        }
      }
    };
    find(rank, ~RankSet{0});
    for (int i = 0; i < order.num_relayed; ++i) find(order.relayed[i], nodes.own);
  }
  PackedRankView(const PackedRankView&) = delete;
};

}  // namespace mk::test
