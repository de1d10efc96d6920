// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter and GEMM+AllReduce between nodes on GPUs: in which order owners' tiles are computed, how
// they are cut into chunks, sums and what is forwarded, and that regions, flags and signals of a bank do not
// overlap.
#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "kernels/ops/gemm_reduce_scatter/network_schedule.h"
#include "kernels/topology_arrays.h"
#include "test/support/catch.h"

namespace {

using namespace mk;
using namespace mk::gemm_reduce_scatter;

const std::vector<std::vector<int32_t>> TOPOLOGIES = {{0, 1},       {0, 1, 2, 3}, {0, 0, 1, 1},
                                                      {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 1, 1, 1, 2, 2, 0}};

Topology topology_of(int rank, const std::vector<int32_t>& nodes) {
  return Topology::make(rank, std::vector<std::string>(nodes.size(), "host"), nodes);
}

// Rows, columns, rows of a group, tiles of a chunk, bytes of a tile.
std::vector<NetworkSchedule> schedules() {
  std::vector<NetworkSchedule> made;
  for (const auto& [rows, columns, group, chunk, bytes] : {std::tuple{8, 8, 8, 4, 65536},
                                                           {7, 5, 3, 2, 65536},
                                                           {1, 1, 1, 1, 8192},
                                                           {5, 9, 1, 4, 40960},
                                                           {6, 3, 4, 3, 131072}}) {
    made.push_back({2, 2, 3, rows, columns, group, chunk, bytes, bytes / 2});
  }
  return made;
}

}  // namespace

TEST_CASE("chunks are numbered group by group, and each tile is in the chunk that it is said to be in") {
  for (const NetworkSchedule& schedule : schedules()) {
    std::set<std::pair<int, int>> seen;
    int last_group = 0;
    for (int number = 0; number < schedule.max_chunks(); ++number) {
      const TileChunk chunk = schedule.chunk(number);
      CHECK(chunk.num_tiles >= 1);
      CHECK(chunk.m_tile / schedule.group_rows >= last_group);
      last_group = chunk.m_tile / schedule.group_rows;
      for (int i = 0; i < chunk.num_tiles; ++i) {
        CHECK(schedule.chunk_of(chunk.m_tile, chunk.first_n_tile + i) == number);
        CHECK(seen.insert({chunk.m_tile, chunk.first_n_tile + i}).second);
      }
    }
    CHECK(static_cast<int>(seen.size()) == schedule.tiles());
  }
}

TEST_CASE("sums cover every tile of every owner relayed once, chunk by chunk") {
  for (const NetworkSchedule& schedule : schedules()) {
    for (const int num_relayed : {1, 3}) {
      // Tiles of the last row have fewer bytes with rows in them.
      const auto bytes_of = [&](int m_tile) {
        return m_tile + 1 < schedule.tile_rows ? schedule.tile_bytes : schedule.tile_bytes / 8 * 3;
      };
      std::map<std::tuple<int, int, int>, int64_t> bytes;  // of a relayed rank's tile
      std::map<std::pair<int, int>, int> units;            // of a relayed rank's chunk
      std::pair<int, int> last;
      for (int number = 0; number < schedule.num_sum_units(num_relayed); ++number) {
        const SumUnit unit = schedule.sum_unit(number, num_relayed);
        const std::pair<int, int> turn = {unit.tile.chunk, unit.tile.turn};
        CHECK(turn >= last);
        last = turn;
        if (!unit.tile.is_there) continue;
        REQUIRE(unit.tile.n_tile < schedule.num_n_tiles);
        CHECK(schedule.chunk_of(unit.tile.m_tile, unit.tile.n_tile) == unit.tile.chunk);
        const int64_t count =
            std::min<int64_t>(NetworkSchedule::SUM_UNIT_BYTES, bytes_of(unit.tile.m_tile) - unit.begin);
        if (count <= 0) continue;
        int64_t& sum = bytes[{unit.tile.turn, unit.tile.m_tile, unit.tile.n_tile}];
        CHECK(unit.begin == sum);
        sum += count;
        ++units[{unit.tile.turn, unit.tile.chunk}];
      }
      CHECK(static_cast<int>(bytes.size()) == num_relayed * schedule.tiles());
      for (const auto& [tile, sum] : bytes) CHECK(sum == bytes_of(std::get<1>(tile)));
      for (const auto& [chunk, count] : units) {
        CHECK(schedule.units_of_chunk(chunk.second, bytes_of(schedule.chunk(chunk.second).m_tile)) == count);
      }
    }
  }
}

TEST_CASE("finished chunks are forwarded whole, chunk by chunk") {
  for (const NetworkSchedule& schedule : schedules()) {
    for (const int num_owners : {1, 3}) {
      std::map<std::pair<int, int>, std::pair<int64_t, int>> seen;  // of an owner's chunk: bytes, units
      std::pair<int, int> last;
      for (int number = 0; number < schedule.num_finished_units(num_owners); ++number) {
        const FinishedUnit unit = schedule.finished_unit(number, num_owners);
        const std::pair<int, int> turn = {unit.chunk, unit.turn};
        CHECK(turn >= last);
        last = turn;
        CHECK(unit.num_bytes >= 0);
        if (unit.num_bytes == 0) continue;
        auto& [bytes, units] = seen[turn];
        CHECK(unit.begin == bytes);
        bytes += unit.num_bytes;
        ++units;
      }
      CHECK(static_cast<int>(seen.size()) == num_owners * schedule.max_chunks());
      for (const auto& [turn, sum] : seen) {
        CHECK(sum.first == schedule.chunk(turn.first).num_tiles * schedule.finished_tile_bytes);
        CHECK(sum.second == schedule.finished_units(schedule.finished_chunk_bytes(turn.first)));
      }
    }
  }
}

TEST_CASE("slots, flags and signals of a bank do not overlap") {
  for (const auto& nodes : TOPOLOGIES) {
    const int nranks = static_cast<int>(nodes.size());
    for (int rank = 0; rank < nranks; ++rank) {
      const TopologyArrays arrays(topology_of(rank, nodes));
      const TopologyView& view = arrays.view();
      const NetworkSchedule schedule = {
          view.num_nodes, max_local_nranks(view), max_reductions(view), 5, 3, 2, 2, 8192, 4096};
      const int num_local = view.local_nranks();
      const int num_relayed = make_rank_order(view).num_relayed;
      const bool is_alone = num_local == 1;
      std::set<int64_t> slots;
      std::set<int> flags;
      const auto add_slot = [&](int64_t offset) {
        CHECK(offset % schedule.slot_bytes() == 0);
        CHECK((offset >= 0 && offset < schedule.num_slots() * schedule.slot_bytes()));
        CHECK(slots.insert(offset).second);
      };
      const auto add_flag = [&](int flag) {
        CHECK((flag >= 0 && flag < schedule.num_flags(nranks)));
        CHECK(flags.insert(flag).second);
      };
      for (int node = 0; node < view.num_nodes; ++node) {
        add_slot(schedule.sum_offset(node));
        for (int chunk = 0; chunk < schedule.max_chunks(); ++chunk)
          add_flag(schedule.arrived_flag(node, chunk));
      }
      std::set<int> signals;
      for (int chunk = 0; chunk < schedule.max_chunks(); ++chunk) {
        for (int node = 0; node < view.num_nodes; ++node)
          CHECK(signals.insert(schedule.signal(node, chunk)).second);
        for (int owner = 0; owner < nranks; ++owner) {
          CHECK(signals.insert(schedule.finished_signal(owner, chunk)).second);
          add_flag(schedule.finished_flag(owner, chunk));
        }
      }
      CHECK(*signals.begin() == kEntrySignals);
      CHECK(*signals.rbegin() < kEntrySignals + schedule.num_signals(nranks));
      CHECK(schedule.finished_offset(0, 0, 0) == schedule.num_slots() * schedule.slot_bytes());
      CHECK(schedule.finished_offset(1, 0, 0) ==
            schedule.finished_offset(0, 4, 2) + schedule.finished_tile_bytes);
      if (is_alone) CHECK(schedule.own_offset(true, view.node(), 0) == schedule.sum_offset(view.node()));
      for (int reduction = is_alone ? 1 : 0; reduction <= num_relayed; ++reduction) {
        for (int local = 0; local < num_local; ++local) {
          add_slot(schedule.partial_offset(reduction, local));
          if (is_alone) continue;
          for (int tile = 0; tile < schedule.tiles(); ++tile)
            add_flag(schedule.partial_flag(reduction, local, tile));
        }
        if (reduction == 0) continue;
        if (is_alone) {
          CHECK(schedule.put_offset(true, reduction) == schedule.partial_offset(reduction, 0));
        } else {
          add_slot(schedule.put_offset(false, reduction));
        }
        for (int chunk = 0; chunk < schedule.max_chunks(); ++chunk)
          add_flag(schedule.summed_flag(reduction, chunk));
      }
    }
  }
}

TEST_CASE("owners elsewhere come first and in turn, this rank last") {
  for (const auto& nodes : TOPOLOGIES) {
    const int nranks = static_cast<int>(nodes.size());
    for (int rank = 0; rank < nranks; ++rank) {
      const TopologyArrays arrays(topology_of(rank, nodes));
      const TopologyView& view = arrays.view();
      const Reducers reducers = make_reducers(view);
      const int num_far = nranks - view.local_nranks();
      constexpr int TILE_ROWS = 5;
      const FarFirstTileOrder order = {TILE_ROWS, num_far};
      std::set<std::pair<int, int>> seen;
      for (int m_tile = 0; m_tile < nranks * TILE_ROWS; ++m_tile) {
        TileWork work{};
        work.m_tile = m_tile;
        const RankTile place = order.place(work);
        const bool is_far = m_tile < num_far * TILE_ROWS;
        CHECK(view.is_local(reducers.owner_at[place.position]) != is_far);
        CHECK((place.index >= 0 && place.index < TILE_ROWS));
        if (is_far) CHECK(place.index == m_tile / num_far);
        CHECK((reducers.owner_at[place.position] == rank) == (m_tile >= (nranks - 1) * TILE_ROWS));
        CHECK(seen.insert({place.position, place.index}).second);
      }
    }
  }
}
