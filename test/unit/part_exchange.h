// SPDX-License-Identifier: MIT
// How parts of gradients come from rank to rank between nodes, step by step, without a kernel: for tests of
// where they lie and which way they go. A Member is what one rank of a launch knows: `order`, `routes`,
// `panels()`, `key_tiles()`; of which tile, and of how many of a panel's, it has a part, and who has one of its
// own keys. HAS_GAPS: a put may bring room for parts that nobody has.
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/ops/ring_attention_backward/network_parts.h"
#include "test/support/catch.h"

namespace mk::test {

using namespace ring_attention_backward;

// Whose part of whose keys: source, owner, head, run, tile.
using Part = std::tuple<int, int, int, int, int>;
constexpr Part NO_PART = {-1, -1, -1, -1, -1};

// What is in a rank's receive area, and how many tiles stand behind each of its flags.
struct Area {
  std::map<size_t, Part> parts;
  std::map<int, int> flags;

  template <class Panels>
  void store(const Panels& panels, size_t place, const Part& part) {
    REQUIRE(place >= panels.Keys::area_bytes());
    REQUIRE(place + static_cast<size_t>(panels.part_bytes()) <= panels.rows(0, 0, 0));
    REQUIRE((place - panels.Keys::area_bytes()) % static_cast<size_t>(panels.part_bytes()) == 0);
    REQUIRE(parts.emplace(place, part).second);
  }
  template <class Panels>
  void raise(const Panels& panels, int flag) {
    REQUIRE((flag >= panels.Keys::num_flags() && flag < panels.num_flags()));
    ++flags[flag];
  }
};

// As consumers store parts, and tell of panels that are whole.
template <class Member>
void store_own(const Member& member, std::vector<Area>* areas, int64_t* link_bytes) {
  const auto& panels = member.panels();
  const auto tiles = member.key_tiles();
  const int rank = member.order.rank_at[0];
  std::map<std::tuple<int, int>, std::pair<int, int>> counts;  // of a receiver's flag: stored, expected
  for (int index = 0; index < tiles.size(); ++index) {
    const KeyTile tile = tiles.at(index);
    if (tile.step == 0 || !member.has_some(tile)) continue;
    const int owner = tiles.source(tile.step);
    const int receiver = member.routes.receiver[owner], slot = member.routes.slot[owner];
    if (receiver != rank) *link_bytes += panels.part_bytes();
    Area& area = (*areas)[static_cast<size_t>(receiver)];
    area.store(panels, panels.part(slot, owner, tile.head, tile.run, tile.index),
               {rank, owner, tile.head, tile.run, tile.index});
    const int flag = panels.part_flag(slot, tile.head, tile.run, tile.index);
    auto& [stored, expected] = counts[{receiver, flag}];
    expected = member.parts_of_panel(tile, tile.index / panels.panel_tiles());
    if (++stored == expected) area.raise(panels, flag);
  }
  for (const auto& [flag, count] : counts) REQUIRE(count.first == count.second);
}

// As the CTA that has the network puts them to the owners.
template <class Member>
void put_relayed(const Member& member, std::vector<Area>* areas, std::set<std::pair<int, int>>* signals,
                 int64_t* network_bytes) {
  const auto& panels = member.panels();
  const int rank = member.order.rank_at[0], nranks = panels.nranks;
  for (int index = 0; index < num_relayed_parts(member.order); ++index) {
    const RelayedParts parts = relayed_parts(member.order, member.routes, nranks, index);
    Area& from = (*areas)[static_cast<size_t>(rank)];
    Area& to = (*areas)[static_cast<size_t>(parts.owner)];
    REQUIRE(parts.slot <= panels.num_slots);
    for (int number = 0; number < panels.num_puts(); ++number) {
      const KeyPut put = panels.put(parts.owner, number);
      if (!panels.has_parts(put, parts.owner, parts.source)) continue;
      const int slot = panels.slot_at_owner(parts.owner, parts.source);
      const size_t begin = panels.part(parts.slot, parts.owner, put.head, put.run, panels.first_tile(put));
      const size_t target = panels.part(slot, parts.owner, put.head, put.run, panels.first_tile(put));
      const size_t bytes = panels.part_put_bytes(put);
      REQUIRE(bytes > 0);
      for (size_t at = begin; at < begin + bytes; at += static_cast<size_t>(panels.part_bytes())) {
        const auto found = from.parts.find(at);
        REQUIRE((Member::HAS_GAPS || found != from.parts.end()));
        to.store(panels, target + (at - begin), found != from.parts.end() ? found->second : NO_PART);
      }
      for (int head = put.head; head < put.head + put.num_heads; ++head) {
        for (int panel = put.panel; panel < put.panel + panels.num_panels(put); ++panel) {
          const bool is_awaited = panels.has_panel_parts(put.run, panel, parts.owner, parts.source);
          REQUIRE(from.flags[panels.part_panel_flag(parts.slot, head, put.run, panel)] == (is_awaited ? 1 : 0));
          to.raise(panels, panels.part_panel_flag(slot, head, put.run, panel));
        }
      }
      const int signal = panels.part_signal(parts.source, number);
      REQUIRE(signals->emplace(parts.owner, signal).second);
      REQUIRE(signal >= kEntrySignals + static_cast<int>(panels.Keys::num_signals()));
      REQUIRE(signal < kEntrySignals + static_cast<int>(panels.num_signals()));
      REQUIRE(signal < static_cast<int>(kSignalsPerBank));
      *network_bytes += static_cast<int64_t>(bytes);
    }
  }
}

// What the owner waits for, and adds.
template <class Member>
void check_owner(const Member& member, const Area& area) {
  const auto& panels = member.panels();
  const auto tiles = member.key_tiles();
  const int rank = member.order.rank_at[0];
  size_t num_parts = 0;
  std::set<int> flags;
  for (int index = 0; index < tiles.size(); ++index) {
    const KeyTile tile = tiles.at(index);
    for (int step = 1; step < panels.nranks && tile.step == 0; ++step) {
      const int source = (rank + step) % panels.nranks;
      if (!member.is_owed(source, tile)) continue;
      const auto found = area.parts.find(panels.part(step, rank, tile.head, tile.run, tile.index));
      REQUIRE(found != area.parts.end());
      REQUIRE(found->second == Part{source, rank, tile.head, tile.run, tile.index});
      const int flag = panels.part_flag(step, tile.head, tile.run, tile.index);
      REQUIRE((area.flags.count(flag) == 1 && area.flags.at(flag) == 1));
      flags.insert(flag);
      ++num_parts;
    }
  }
  // And nothing else came there for it.
  const int64_t first_relayed = panels.part_panel_flag(panels.nranks, 0, 0, 0);
  size_t num_stored = 0, num_raised = 0;
  for (const auto& [place, part] : area.parts) num_stored += std::get<1>(part) == rank ? 1 : 0;
  for (const auto& [flag, count] : area.flags) num_raised += flag < first_relayed ? 1 : 0;
  REQUIRE(num_stored == num_parts);
  REQUIRE((num_raised == flags.size() || (Member::HAS_GAPS && num_raised > flags.size())));
}

// Whoever waits for a put gets it, and nobody else does.
template <class Member>
void check_signals(const Member& member, int node_size, const std::set<std::pair<int, int>>& signals) {
  const auto& panels = member.panels();
  const int rank = member.order.rank_at[0];
  for (int at = node_size; at < panels.nranks; ++at) {
    const int source = member.order.rank_at[at];
    for (int number = 0; number < panels.num_puts(); ++number) {
      const bool is_awaited = panels.has_parts(panels.put(rank, number), rank, source);
      REQUIRE(is_awaited == (signals.count({rank, panels.part_signal(source, number)}) == 1));
    }
  }
}

}  // namespace mk::test
