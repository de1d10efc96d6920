// SPDX-License-Identifier: MIT
// Who relays for whom between nodes, in which order the tiles of near and far ranks follow, and how relayed
// rows are cut up: everything once.
#include "kernels/ops/allgather_gemm/forward_units.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "kernels/device/arrival_window.h"
#include "kernels/device/network_comm.h"
#include "kernels/device/rank_tiles.h"
#include "kernels/topology_arrays.h"
#include "test/support/catch.h"

namespace {

using namespace mk;
using namespace mk::allgather_gemm;

const std::vector<std::vector<int32_t>> TOPOLOGIES = {
    {0, 0, 1, 1}, {0, 1, 2, 3}, {0, 1, 0, 1}, {0, 0, 0, 1, 1}, {0, 1, 1, 1, 2, 2, 0}, {0, 0, 1, 1, 2, 2}};

Topology topology_of(int rank, const std::vector<int32_t>& nodes) {
  return Topology::make(rank, std::vector<std::string>(nodes.size(), "host"), nodes);
}

constexpr int CHUNK_ROWS = 128;
constexpr PushOrder ORDER = {5, 1, 5, 3, 30};

}  // namespace

TEST_CASE("ranks are turned to once each, those of the own node first") {
  for (const auto& nodes : TOPOLOGIES) {
    const int nranks = static_cast<int>(nodes.size());
    for (int rank = 0; rank < nranks; ++rank) {
      const TopologyArrays arrays(topology_of(rank, nodes));
      const RankOrder order = make_rank_order(arrays.view());
      CHECK(order.rank_at[0] == rank);
      std::set<int> seen(order.rank_at, order.rank_at + nranks);
      CHECK(static_cast<int>(seen.size()) == nranks);
      CHECK(*seen.rbegin() == nranks - 1);
      for (int position = 0; position < nranks; ++position) {
        CHECK((nodes[order.rank_at[position]] == nodes[rank]) == (position < order.num_local));
      }
    }
  }
}

TEST_CASE("each rank's puts reach every other node once, at the rank that relays for it there") {
  for (const auto& nodes : TOPOLOGIES) {
    const int nranks = static_cast<int>(nodes.size());
    std::vector<RankOrder> orders;
    for (int rank = 0; rank < nranks; ++rank) {
      const TopologyArrays arrays(topology_of(rank, nodes));
      orders.push_back(make_rank_order(arrays.view()));
    }
    for (int source = 0; source < nranks; ++source) {
      std::map<int, int> arrivals;  // by node
      for (int i = 0; i < orders[source].num_rail_peers; ++i) {
        const int peer = orders[source].rail_peers[i];
        ++arrivals[nodes[peer]];
        const auto* begin = orders[peer].relayed;
        CHECK(std::count(begin, begin + orders[peer].num_relayed, source) == 1);
      }
      CHECK(arrivals.count(nodes[source]) == 0);
      CHECK(arrivals.size() + 1 == std::set<int>(nodes.begin(), nodes.end()).size());
      for (const auto& [node, count] : arrivals) CHECK(count == 1);
    }
    int relayed = 0, sent = 0;
    for (const RankOrder& order : orders) relayed += order.num_relayed, sent += order.num_rail_peers;
    CHECK(relayed == sent);
  }
}

TEST_CASE("tiles of near ranks come before those of far ones, each once") {
  for (const auto& [near, far] : {std::pair{1, 2}, {0, 3}, {3, 0}, {3, 4}, {1, 1}}) {
    for (const int tile_rows : {1, 3, 8}) {
      const NearFarTileOrder order = {tile_rows, near, far};
      std::set<std::pair<int, int>> seen;
      int last_group = 0;
      for (int m_tile = 0; m_tile < tile_rows * (1 + near + far); ++m_tile) {
        TileWork work{};
        work.m_tile = m_tile;
        const RankTile tile = order.place(work);
        CHECK(tile.index < tile_rows);
        CHECK(tile.position <= near + far);
        seen.insert({tile.position, tile.index});
        const int group = tile.position == 0 ? 0 : tile.position <= near ? 1 : 2;
        CHECK(group >= last_group);
        last_group = group;
      }
      CHECK(static_cast<int>(seen.size()) == tile_rows * (1 + near + far));
    }
  }
}

TEST_CASE("every byte of the relayed ranks' rows is forwarded once, and counted in full") {
  for (const auto& rows : {std::vector<int>{1000}, {1000, 1000, 872}, {130, 0, 3}, {128}, {127, 127}}) {
    const int max_rows = *std::max_element(rows.begin(), rows.end());
    const int row_bytes = 776, panel_bytes = 256;
    const PushUnits units(ORDER, max_rows, CHUNK_ROWS, row_bytes, panel_bytes, 4096);
    ForwardUnits forwards(units, static_cast<int>(rows.size()));
    std::vector<std::vector<char>> seen;
    for (const int count : rows) seen.emplace_back(static_cast<size_t>(count) * row_bytes);
    std::map<std::vector<int>, int> counts;
    int last_chunk = 0;
    for (int index = 0; index < forwards.size(); ++index) {
      const ForwardUnit found = forwards.at(index, [&](int relayed) { return rows[relayed]; });
      const PushUnit& unit = found.unit;
      if (unit.num_rows == 0) continue;
      CHECK(unit.chunk >= last_chunk - 30);
      last_chunk = std::max(last_chunk, unit.chunk);
      CHECK(unit.chunk == (unit.row + unit.num_rows - 1) / CHUNK_ROWS);
      ++counts[{found.relayed, unit.chunk, unit.panel}];
      for (int row = unit.row; row < unit.row + unit.num_rows; ++row) {
        for (int byte = unit.column; byte < unit.column + unit.num_bytes; ++byte) {
          ++seen[found.relayed][static_cast<size_t>(row) * row_bytes + byte];
        }
      }
    }
    for (const auto& bytes : seen) {
      CHECK(std::all_of(bytes.begin(), bytes.end(), [](char times) { return times == 1; }));
    }
    for (size_t relayed = 0; relayed < rows.size(); ++relayed) {
      for (int chunk = 0; chunk * CHUNK_ROWS < rows[relayed]; ++chunk) {
        for (int panel = 0; panel * panel_bytes < row_bytes; ++panel) {
          CHECK(counts[{static_cast<int>(relayed), chunk, panel}] ==
                units.expected(rows[relayed], chunk, panel));
        }
      }
    }
  }
}

TEST_CASE("what comes in any order is noted once") {
  std::mt19937 random(3);
  for (const int count : {1, 31, 32, 33, 64, 500}) {
    for (int turn = 0; turn < 50; ++turn) {
      std::vector<int> order(count);
      for (int i = 0; i < count; ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), random);
      std::set<int> here, noted;
      ArrivalWindow window;
      while (window.first < count) {
        const size_t more = std::uniform_int_distribution<size_t>(0, 40)(random);
        for (size_t i = 0; i < more && here.size() < order.size(); ++i) here.insert(order[here.size()]);
        uint32_t fresh = 0;
        for (int place = 0; place < ArrivalWindow::SIZE; ++place) {
          const int number = window.first + place;
          if (number >= count || !window.is_missing(place) || here.count(number) == 0) continue;
          CHECK(noted.insert(number).second);
          fresh |= 1u << place;
        }
        window.add(fresh);
      }
      CHECK(window.first == count);
      CHECK(window.arrived == 0);
      CHECK(static_cast<int>(noted.size()) == count);
    }
  }
}
