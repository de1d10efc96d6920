// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter and GEMM+AllReduce between nodes on GPUs: in which order owners' tiles are computed, how
// they are cut into chunks, sums and what is forwarded, and that regions, flags and signals of a bank do not
// overlap.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>
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

// Of sums and of what is finished: rows, columns, rows of a group, tiles of a chunk; bytes of a tile.
std::vector<NetworkSchedule> schedules() {
  std::vector<NetworkSchedule> made;
  for (const auto& [rows, columns, group, chunk, finished_group, finished_chunk, bytes] :
       {std::tuple{8, 8, 8, 4, 4, 2, 65536},
        {7, 5, 3, 2, 5, 3, 65536},
        {1, 1, 1, 1, 1, 1, 8192},
        {5, 9, 1, 4, 5, 9, 40960},
        {6, 3, 4, 3, 1, 1, 131072}}) {
    made.push_back({2,
                    2,
                    3,
                    {rows, columns, group, chunk},
                    {rows, columns, finished_group, finished_chunk},
                    bytes,
                    bytes / 2});
  }
  return made;
}

// Orders of ranks: owners elsewhere, other owners of the node, rows and columns of tiles, those of a block,
// rows of a group.
std::vector<NetworkTiles> orders() {
  std::vector<NetworkTiles> made;
  for (const auto& [far, others, rows, columns, block_rows, block_columns, group] :
       {std::tuple{2, 1, 64, 128, 8, 8, 8},
        {2, 1, 16, 16, 16, 16, 4},
        {1, 2, 7, 11, 3, 4, 3},
        {3, 0, 5, 9, 5, 2, 5},
        {1, 0, 3, 3, 2, 2, 2},
        {4, 3, 5, 7, 2, 3, 1},
        {2, 1, 1, 1, 1, 1, 1},
        {24, 7, 3, 5, 3, 1, 2},
        {2, 1, 9, 5, 4, 6, 4},
        {2, 2, 4, 0, 4, 1, 4}}) {
    const OwnerTiles near = {others, rows, columns, block_rows, block_columns, group};
    const int block = block_rows * block_columns;
    made.push_back({far, 3, near, std::min(near.size(), 2 * others * block), 3});
    made.push_back({far, 3, near, near.size(), 0});  // a reduce-scatter's
  }
  return made;
}

}  // namespace

TEST_CASE("chunks are numbered group by group, and each tile is in the chunk that it is said to be in") {
  for (const NetworkSchedule& schedule : schedules()) {
    for (const TileChunks& chunks : {schedule.sums, schedule.finished}) {
      std::set<std::pair<int, int>> seen;
      int last_group = 0;
      for (int number = 0; number < chunks.size(); ++number) {
        const TileChunk chunk = chunks.at(number);
        CHECK(chunk.num_tiles >= 1);
        CHECK(chunk.m_tile / chunks.group_rows >= last_group);
        last_group = chunk.m_tile / chunks.group_rows;
        for (int i = 0; i < chunk.num_tiles; ++i) {
          CHECK(chunks.of_tile(chunk.m_tile, chunk.first_n_tile + i) == number);
          CHECK(seen.insert({chunk.m_tile, chunk.first_n_tile + i}).second);
        }
      }
      CHECK(static_cast<int>(seen.size()) == schedule.tiles());
    }
  }
}

TEST_CASE("sums cover every tile of every owner relayed once, chunk by chunk") {
  for (const NetworkSchedule& schedule : schedules()) {
    for (const int num_relayed : {1, 3}) {
      // Tiles of the last row have fewer bytes with rows in them.
      const auto bytes_of = [&](int m_tile) {
        return m_tile + 1 < schedule.sums.tile_rows ? schedule.tile_bytes : schedule.tile_bytes / 8 * 3;
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
        REQUIRE(unit.tile.n_tile < schedule.num_n_tiles());
        CHECK(schedule.sums.of_tile(unit.tile.m_tile, unit.tile.n_tile) == unit.tile.chunk);
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
        CHECK(schedule.units_of_chunk(chunk.second, bytes_of(schedule.sums.at(chunk.second).m_tile)) == count);
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
      CHECK(static_cast<int>(seen.size()) == num_owners * schedule.finished.size());
      for (const auto& [turn, sum] : seen) {
        CHECK(sum.first == schedule.finished.at(turn.first).num_tiles * schedule.finished_tile_bytes);
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
          view.num_nodes, max_local_nranks(view), max_reductions(view), {5, 3, 2, 2}, {5, 3, 5, 1}, 8192, 4096};
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
        for (int chunk = 0; chunk < schedule.sums.size(); ++chunk) add_flag(schedule.arrived_flag(node, chunk));
      }
      std::set<int> signals;
      for (int node = 0; node < view.num_nodes; ++node) {
        for (int chunk = 0; chunk < schedule.sums.size(); ++chunk)
          CHECK(signals.insert(schedule.signal(node, chunk)).second);
      }
      for (int owner = 0; owner < nranks; ++owner) {
        for (int chunk = 0; chunk < schedule.finished.size(); ++chunk) {
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
        for (int chunk = 0; chunk < schedule.sums.size(); ++chunk)
          add_flag(schedule.summed_flag(reduction, chunk));
      }
    }
  }
}

TEST_CASE("owners elsewhere come first, this rank last") {
  for (const auto& nodes : TOPOLOGIES) {
    const int nranks = static_cast<int>(nodes.size());
    for (int rank = 0; rank < nranks; ++rank) {
      const TopologyArrays arrays(topology_of(rank, nodes));
      const TopologyView& view = arrays.view();
      const Reducers reducers = make_reducers(view);
      const int num_far = nranks - view.local_nranks();
      for (int position = 0; position < nranks; ++position) {
        CHECK(view.is_local(reducers.owner_at[position]) == (position >= num_far));
        CHECK((reducers.owner_at[position] == rank) == (position == nranks - 1));
      }
    }
  }
}

TEST_CASE("every owner's tile is computed once: those of owners elsewhere first, row by row in turn") {
  for (const NetworkTiles& order : orders()) {
    const OwnerTiles& near = order.near;
    std::set<std::tuple<int, int, int>> seen;
    for (int number = 0; number < order.size(); ++number) {
      const OwnerTile tile = order.at(number);
      CHECK((tile.position >= 0 && tile.position <= order.num_far + near.num_owners));
      CHECK((tile.position < order.num_far) == (number < order.num_far * near.tiles_of_owner()));
      CHECK((tile.row >= 0 && tile.row < near.tile_rows));
      CHECK((tile.column >= 0 && tile.column < near.num_n_tiles));
      CHECK(seen.insert({tile.position, tile.row, tile.column}).second);
      CHECK(order.m_tile(tile) == tile.position * near.tile_rows + tile.row);
      if (tile.position >= order.num_far) continue;
      // Of each owner about as many have been.
      const int in_turn = tile.row * order.num_far + tile.position;
      CHECK(in_turn / order.far_group_rows == number / (order.far_group_rows * near.num_n_tiles));
    }
    CHECK(static_cast<int>(seen.size()) == order.size());
  }
}

TEST_CASE("workers share an order out, a wave after the other") {
  constexpr int NUM_WORKERS = 8;
  for (const NetworkTiles& order : orders()) {
    std::vector<int> worker_of(static_cast<size_t>(order.size()), -1);
    for (int worker = 0; worker < NUM_WORKERS; ++worker) {
      int wave = 0;
      for (int number = worker; number < order.size(); number = order.after(number, NUM_WORKERS), ++wave) {
        CHECK(number / NUM_WORKERS == wave);
        CHECK(worker_of[static_cast<size_t>(number)] == -1);
        worker_of[static_cast<size_t>(number)] = worker;
      }
    }
    for (size_t number = 0; number < worker_of.size(); ++number) {
      const int wave = static_cast<int>(number) / NUM_WORKERS;
      CHECK((worker_of[number] + wave * order.rotation) % NUM_WORKERS ==
            static_cast<int>(number) % NUM_WORKERS);
    }
    OwnerTileCursor tiles(order, 1, 0, NUM_WORKERS);
    TileWork work{};
    for (int number = 0; number < order.size(); number = order.after(number, NUM_WORKERS)) {
      REQUIRE(tiles.next(&work, [](const OwnerTile&) { return true; }));
      CHECK(std::pair(work.m_tile, work.n_tile) ==
            std::pair(order.m_tile(order.at(number)), order.at(number).column));
    }
  }
}

TEST_CASE("no tile of this rank's own is computed before those that its node computes of the others'") {
  for (const NetworkTiles& order : orders()) {
    // By the order of each owner's tiles, which is the same for all of the node.
    std::vector<std::vector<std::pair<int, int>>> had(static_cast<size_t>(order.near.num_owners) + 1);
    std::map<std::pair<int, int>, size_t> of_others;
    size_t num_of_others = 0, num_own = 0, most_ahead = 0;
    for (int number = order.num_far * order.near.tiles_of_owner(); number < order.size(); ++number) {
      const OwnerTile tile = order.at(number);
      const std::pair<int, int> place = {tile.row, tile.column};
      const int owner = tile.position - order.num_far;
      had[static_cast<size_t>(owner)].push_back(place);
      if (owner < order.near.num_owners) {
        ++of_others[place];
        ++num_of_others;
        continue;
      }
      CHECK(static_cast<int>(of_others[place]) == order.near.num_owners);
      ++num_own;
      const size_t due = num_own * static_cast<size_t>(order.near.num_owners);
      most_ahead = std::max(most_ahead, num_of_others > due ? num_of_others - due : 0);
    }
    for (const auto& tiles : had) CHECK(tiles == had.back());
    const int round = order.near.num_owners * order.near.block_rows * order.near.block_columns;
    CHECK(static_cast<int>(most_ahead) <= std::max(order.lead, round));
  }
}
