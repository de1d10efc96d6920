// SPDX-License-Identifier: MIT
// Ring attention between nodes on GPUs: who needs whose keys, in which puts they travel, where they land, which
// flags and signals say so, and how they are cut up to be forwarded inside a node. Host and device.
//
// All places, flags and signals are numbered by the source and are the same on every rank.
#pragma once

#include <type_traits>

#include "kernels/device/network_comm.h"
#include "kernels/ops/ring_attention/cuda_blocks.h"

namespace mk::ring_attention {

// Ranks as bits.
using RankSet = uint32_t;
static_assert(MAX_GPU_RANKS <= 32);
MK_HOST_DEVICE bool is_in(RankSet ranks, int rank) { return (ranks >> rank & 1) != 0; }

// In which order a rank takes keys: its own, its node's, those of the next nodes.
struct NodeOrder {
  const uint8_t* rank_at;
  MK_HOST_DEVICE int source(int step, int) const { return rank_at[step]; }
};

// What a put brings of a run: some panels of one key head, or all panels of several.
struct KeyPut {
  int head;  // the first
  int num_heads;
  int run;
  int panel;  // the first
  int num_panels;
  int block;       // the first of a head
  int num_blocks;  // of a head, perhaps none
};

template <class Slices>
struct NetworkPanelsOf : KeyPanels {
  Slices slices;
  int block_n;
  int put_heads;   // key heads of a put;
  int put_panels;  // if there is but one, panels of its run

  MK_HOST_DEVICE int num_blocks(int source, int run) const {
    return (slices.count(source, run) + block_n - 1) / block_n;
  }
  MK_HOST_DEVICE int num_blocks_of_panel(int source, int run, int panel) const {
    return most(0, least(panel_blocks, num_blocks(source, run) - panel * panel_blocks));
  }
  MK_HOST_DEVICE int block_bytes() const { return 2 * image_bytes; }

  // A run's heads lie one behind the other without gaps, so that a put may bring several.
  MK_HOST_DEVICE size_t offset(int source, int head, int run, int block) const {
    return ((static_cast<size_t>(source) * num_runs + run) * num_heads * run_blocks +
            static_cast<size_t>(head) * num_blocks(source, run) + block) *
           block_bytes();
  }
  MK_HOST_DEVICE size_t area_bytes() const {
    return static_cast<size_t>(nranks) * num_runs * num_heads * run_blocks * block_bytes();
  }
  MK_HOST_DEVICE int flag(int source, int head, int run, int panel) const {
    return ((source * num_heads + head) * num_runs + run) * run_panels + panel;
  }
  MK_HOST_DEVICE int64_t num_flags() const { return int64_t{nranks} * num_units(); }

  // Puts of a source, in the order of the heads.
  MK_HOST_DEVICE int num_parts() const { return (run_panels + put_panels - 1) / put_panels; }
  MK_HOST_DEVICE int num_puts() const {
    return (num_heads + put_heads - 1) / put_heads * num_runs * num_parts();
  }
  MK_HOST_DEVICE KeyPut put(int source, int index) const {
    const int parts = num_parts(), group = index / (num_runs * parts);
    const int within = index - group * num_runs * parts;
    KeyPut put;
    put.head = group * put_heads;
    put.num_heads = least(put_heads, num_heads - put.head);
    put.run = within / parts;
    put.panel = (within - put.run * parts) * put_panels;
    put.num_panels = least(put_panels, run_panels - put.panel);
    put.block = put.panel * panel_blocks;
    put.num_blocks = most(0, least(put.num_panels * panel_blocks, num_blocks(source, put.run) - put.block));
    return put;
  }
  // Of a head of it.
  MK_HOST_DEVICE int num_panels(const KeyPut& put) const {
    return (put.num_blocks + panel_blocks - 1) / panel_blocks;
  }
  MK_HOST_DEVICE size_t put_bytes(const KeyPut& put) const {
    return static_cast<size_t>(put.num_heads) * put.num_blocks * block_bytes();
  }
  MK_HOST_DEVICE int signal(int source, int put) const { return kEntrySignals + source * num_puts() + put; }
  MK_HOST_DEVICE int64_t num_signals() const { return int64_t{nranks} * num_puts(); }
};

// A run of one rank lies wholly before or behind those of another: a rank needs all its panels, or none.
struct NetworkPanels : NetworkPanelsOf<CudaSlices> {
  RankSet needed_by[2][MAX_GPU_RANKS];  // [run][source]: the other ranks that do

  // The other ranks that need a panel.
  MK_HOST_DEVICE RankSet needs(int source, int run, int) const { return needed_by[run][source]; }
  // Does a put travel to a node of these ranks?
  MK_HOST_DEVICE bool enters(const KeyPut& put, int source, RankSet node) const {
    return put.num_blocks > 0 && (needed_by[put.run][source] & node) != 0;
  }
};

inline void set_needs(const CudaSlices& slices, NetworkPanels* panels) {
  for (int source = 0; source < slices.nranks; ++source) {
    for (int run = 0; run < slices.num_runs(); ++run) {
      const int begin = slices.begin(source, run), end = begin + slices.count(source, run);
      RankSet& ranks = panels->needed_by[run][source];
      ranks = 0;
      for (int rank = 0; rank < slices.nranks; ++rank) {
        if (rank != source && begin < end && sees_some(slices, rank, begin, end)) ranks |= RankSet{1} << rank;
      }
    }
  }
}

// Which ranks are where, as a rank sees it.
struct NodeRanks {
  RankSet own;                     // of its node, itself among them
  RankSet of_rail[MAX_GPU_RANKS];  // of the node of each of its rail peers
};
inline NodeRanks make_node_ranks(const TopologyView& view) {
  const RankOrder order = make_rank_order(view);
  const auto node_of = [&](int rank) {
    RankSet ranks = 0;
    for (int other = 0; other < view.nranks; ++other) {
      if (view.node_of_rank[other] == view.node_of_rank[rank]) ranks |= RankSet{1} << other;
    }
    return ranks;
  };
  NodeRanks nodes{};
  nodes.own = node_of(view.rank);
  for (int i = 0; i < order.num_rail_peers; ++i) nodes.of_rail[i] = node_of(order.rail_peers[i]);
  return nodes;
}

// What kernels between nodes have beside those inside one, forward and backward.
struct BetweenNodes {
  int num_compute_ctas;  // the first ones; behind them those that forward, and at last the one with the network
  NodeRanks nodes;
};
template <class Params>
concept HasNodes = std::is_base_of_v<BetweenNodes, Params>;

// A block of a relayed rank, on its way to the ranks of this node that need it.
struct ForwardBlock {
  int source;
  int head;
  int run;
  int block;
};

// All that a rank may have to forward: put after put, those of several ranks in turn, as they are sent.
template <class Panels>
class ForwardBlocks {
 public:
  MK_HOST_DEVICE ForwardBlocks(const Panels& panels, const RankOrder& order)
      : panels_(panels),
        order_(order),
        put_blocks_(panels.put_heads * panels.put_panels * panels.panel_blocks) {}

  MK_HOST_DEVICE int size() const { return panels_.num_puts() * order_.num_relayed * put_blocks_; }
  // False: there is no such block.
  MK_HOST_DEVICE bool at(int index, ForwardBlock* found) const {
    const int number = index / put_blocks_, within = index - number * put_blocks_;
    const int put_index = number / order_.num_relayed;
    found->source = order_.relayed[number - put_index * order_.num_relayed];
    const KeyPut put = panels_.put(found->source, put_index);
    if (within >= put.num_heads * put.num_blocks) return false;
    const int head = within / put.num_blocks;
    found->head = put.head + head;
    found->run = put.run;
    found->block = put.block + within - head * put.num_blocks;
    return true;
  }

 private:
  const Panels& panels_;
  const RankOrder& order_;
  const int put_blocks_;
};

}  // namespace mk::ring_attention
