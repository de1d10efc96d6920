// SPDX-License-Identifier: MIT
// Ring attention over packed sequences between nodes on GPUs: which of a rank's panels go to whom. Pure, host
// and device.
//
// A panel travels to the ranks of its node, and is forwarded to those of others, of which a query sees one of
// its keys. Puts bring several panels: all of a put that there are enter a node if one of them is needed there,
// and so a rank brings all of them to its own receive area.
#pragma once

#include "kernels/ops/ring_attention/network_panels.h"
#include "kernels/ops/ring_attention/packed_blocks.h"

namespace mk::ring_attention {

// Does a query of `peer` see one of the keys of another rank's panel?
MK_HOST_DEVICE bool needs_panel(const KeyPanels& panels, const PackedSlices& slices, int block_n, int source,
                                int panel, int peer) {
  const int rows = panels.panel_blocks * block_n, begin = panel * rows;
  RowRange seen;
  return next_seen(slices, source, {begin, least(begin + rows, slices.rows(source))}, peer,
                   {0, slices.rows(peer)}, &seen);
}

struct PackedNetworkPanels : NetworkPanelsOf<PackedSlices> {
  RankSet own;  // ranks of this node
  // [source][run_panels]: the other ranks that need a panel. Of sources that this rank neither is nor relays
  // for nothing is known, and of the latter only what concerns this node.
  const RankSet* needed_by;

  MK_HOST_DEVICE RankSet needs(int source, int, int panel) const {
    return needed_by[source * run_panels + panel];
  }
  // Of some panels.
  MK_HOST_DEVICE RankSet needs_some(int source, int panel, int num_panels) const {
    RankSet ranks = 0;
    for (int i = panel; i < panel + num_panels; ++i) ranks |= needs(source, 0, i);
    return ranks;
  }
  MK_HOST_DEVICE bool enters(const KeyPut& put, int source, RankSet node) const {
    return put.num_blocks > 0 && (needs_some(source, put.panel, put.num_panels) & node) != 0;
  }
};

// `needed_by` are those of this node; `rank` itself, if another node needs something of the panel's put.
MK_HOST_DEVICE PackedPanelUnit panel_unit(const PackedNetworkPanels& panels, const PackedSlices& slices,
                                          int rank, int block_n, int index) {
  PackedPanelUnit unit;
  unit.head = index / panels.run_panels;
  unit.run = 0;
  unit.panel = index - unit.head * panels.run_panels;
  unit.block = unit.panel * panels.panel_blocks;
  const int first = unit.panel / panels.put_panels * panels.put_panels;
  const RankSet of_put = panels.needs_some(rank, first, least(panels.put_panels, panels.run_panels - first));
  unit.needed_by = panels.needs(rank, 0, unit.panel) & panels.own;
  if ((of_put & ~panels.own) != 0) unit.needed_by |= RankSet{1} << rank;
  const int blocks = (slices.rows(rank) + block_n - 1) / block_n;
  unit.num_blocks = unit.needed_by != 0 ? most(0, least(panels.panel_blocks, blocks - unit.block)) : 0;
  return unit;
}

}  // namespace mk::ring_attention
