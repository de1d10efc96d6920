// SPDX-License-Identifier: MIT
// Gradients of ring attention between nodes on GPUs: in which order tiles of keys are taken, where parts of dK
// and dV lie, and by which way they come to the owners of the keys. Host and device.
//
// Keys and values travel as in the forward call (ring_attention/network_panels.h). Each rank's part for keys of
// its own node goes straight to their owner, as inside a node; one for keys of another node goes to the rank
// of its own node that relays for the owner, which puts it to the owner as it is: so the owner adds the parts
// of all ranks in their order, and gets the bits that it would get inside one node.
//
// A receive area holds slots: 1, 2, ... of the ranks that many places behind it, with their parts of its own
// keys; from nranks on of each rank that it relays for and each rank of its node, with the part that is on its
// way from one to the other. Parts of a rank are put in the same pieces as its keys are.
#pragma once

#include "kernels/ops/ring_attention/network_panels.h"
#include "kernels/ops/ring_attention/packed_network_panels.h"
#include "kernels/ops/ring_attention_backward/cuda_blocks.h"

namespace mk::ring_attention_backward {

using ring_attention::is_in;
using ring_attention::KeyPut;
using ring_attention::RankSet;

// The last nodes' first, whose parts have the longest way to go.
struct FarRanksFirst : ring_attention::NodeOrder {
  MK_HOST_DEVICE int own() const { return rank_at[0]; }
  MK_HOST_DEVICE int first_step(int nranks) const { return nranks - 1; }
  MK_HOST_DEVICE int next_step(int step, int) const { return step - 1; }
  MK_HOST_DEVICE int step_before(int step, int) const { return step + 1; }
};

// `source`: the rank whose part it is. `tile` is one of the owner's. `Panels`: of keys and values.
template <class Panels>
struct NetworkGradientPanelsOf : GradientPanelsOf<Panels> {
  using Keys = Panels;
  int num_slots;  // the same on every rank

  MK_HOST_DEVICE int slot_at_owner(int owner, int source) const {
    return source > owner ? source - owner : source - owner + this->nranks;
  }
  MK_HOST_DEVICE int num_tiles(int owner, int run) const { return tiles_of(this->slices.count(owner, run)); }
  // Heads without gaps, as of keys.
  MK_HOST_DEVICE size_t part(int slot, int owner, int head, int run, int tile) const {
    const size_t at =
        (static_cast<size_t>(slot - 1) * this->num_runs + run) * this->num_heads * this->run_tiles() +
        static_cast<size_t>(head) * num_tiles(owner, run) + tile;
    return Keys::area_bytes() + at * this->part_bytes();
  }
  MK_HOST_DEVICE QueryRowPlaces row_places() const {
    return GradientPanelsOf<Panels>::row_places(Keys::area_bytes() + num_slots * this->slot_bytes());
  }
  MK_HOST_DEVICE size_t rows(int query_head, int run, int block) const {
    return row_places().offset(query_head, run, block);
  }
  MK_HOST_DEVICE QuerySumPlaces query_sums() const {
    return GradientPanelsOf<Panels>::query_sums(row_places());
  }
  MK_HOST_DEVICE size_t area_bytes() const { return query_sums().end(); }

  // Flags of parts lie behind those of keys.
  MK_HOST_DEVICE int part_panel_flag(int slot, int head, int run, int panel) const {
    return static_cast<int>(Keys::num_flags()) + this->flag(slot - 1, head, run, panel);
  }
  MK_HOST_DEVICE int part_flag(int slot, int head, int run, int tile) const {
    return part_panel_flag(slot, head, run, tile / this->panel_tiles());
  }
  MK_HOST_DEVICE int64_t num_flags() const {
    return Keys::num_flags() + int64_t{num_slots} * this->num_units();
  }

  // A put of an owner's keys, as one of a rank's parts of them: has it some, and some of that panel? Room for
  // those that it has not travels with the others.
  MK_HOST_DEVICE bool has_parts(const KeyPut& put, int owner, int source) const {
    return this->enters(put, owner, RankSet{1} << source);
  }
  MK_HOST_DEVICE bool has_panel_parts(int run, int panel, int owner, int source) const {
    return is_in(this->needs(owner, run, panel), source);
  }
  MK_HOST_DEVICE int first_tile(const KeyPut& put) const { return put.panel * this->panel_tiles(); }
  MK_HOST_DEVICE size_t part_put_bytes(const KeyPut& put) const {
    const int tiles = (put.num_blocks + TILE_BLOCKS - 1) / TILE_BLOCKS;
    return static_cast<size_t>(put.num_heads) * tiles * this->part_bytes();
  }
  // Behind those of keys, by whose parts they are.
  MK_HOST_DEVICE int part_signal(int source, int put) const { return this->signal(this->nranks + source, put); }
  MK_HOST_DEVICE int64_t num_signals() const { return 2 * Keys::num_signals(); }
};
using NetworkGradientPanels = NetworkGradientPanelsOf<ring_attention::NetworkPanels>;
using PackedNetworkGradientPanels = NetworkGradientPanelsOf<ring_attention::PackedNetworkPanels>;

// By which way parts go, as a rank sees it.
struct PartRoutes {
  // Of this rank's own, for each owner of keys: who in this node gets them, perhaps the owner, and in which
  // slot.
  uint8_t receiver[MAX_GPU_RANKS];
  uint16_t slot[MAX_GPU_RANKS];
  uint8_t local_ranks[MAX_GPU_RANKS];  // this node's, by local rank
};

// What a rank relays: the parts of `source`, one of its node's, for `owner`'s keys.
struct RelayedParts {
  int owner;
  int source;
  int slot;
};
MK_HOST_DEVICE int num_relayed_parts(const RankOrder& order) { return order.num_relayed * order.num_local; }
MK_HOST_DEVICE RelayedParts relayed_parts(const RankOrder& order, const PartRoutes& routes, int nranks,
                                          int index) {
  const int relayed = index / order.num_local;
  return {order.relayed[relayed], routes.local_ranks[index - relayed * order.num_local], nranks + index};
}

inline PartRoutes make_part_routes(const TopologyView& view) {
  PartRoutes routes{};
  const int num_local = view.local_nranks();
  for (int local_rank = 0; local_rank < num_local; ++local_rank)
    routes.local_ranks[local_rank] = static_cast<uint8_t>(view.rank_at(view.node(), local_rank));
  for (int owner = 0; owner < view.nranks; ++owner) {
    if (view.is_local(owner)) {
      routes.receiver[owner] = static_cast<uint8_t>(owner);
      routes.slot[owner] = static_cast<uint16_t>((view.rank - owner + view.nranks) % view.nranks);
      continue;
    }
    TopologyView relay = view;
    relay.rank = view.rail_peer(owner, view.node());
    const RankOrder order = make_rank_order(relay);
    int relayed = 0;
    while (order.relayed[relayed] != owner) ++relayed;
    routes.receiver[owner] = static_cast<uint8_t>(relay.rank);
    routes.slot[owner] = static_cast<uint16_t>(view.nranks + relayed * num_local + view.local_rank());
  }
  return routes;
}

// Slots that the rank with most of them has.
inline int most_part_slots(const TopologyView& view) {
  int most_relayed = 0;
  for (int rank = 0; rank < view.nranks; ++rank) {
    TopologyView one = view;
    one.rank = rank;
    most_relayed = most(most_relayed, num_relayed_parts(make_rank_order(one)));
  }
  return view.nranks - 1 + most_relayed;
}

}  // namespace mk::ring_attention_backward
