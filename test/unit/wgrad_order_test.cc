// SPDX-License-Identifier: MIT
// Mode WGRAD on GPUs: a tile takes every gathered row exactly once, its own rank's first and the others' in
// turn, reads nothing of what lies behind a source's rows, and waits for what it reads.
#include "kernels/ops/allgather_gemm/wgrad_order.h"

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/device/network_comm.h"
#include "kernels/topology_arrays.h"
#include "test/support/catch.h"

namespace {

using namespace mk;
using namespace mk::allgather_gemm;

struct Shape {
  int64_t m;
  int nranks;
};

std::vector<Shape> shapes() {
  std::vector<Shape> shapes;
  for (const int nranks : {2, 3, 4, 5, 8, 32}) {
    for (const int64_t m : {0, 1, 2, 5, 8, 9, 63, 64, 65, 127, 128, 129, 512, 1000, 1024, 4095, 7000})
      shapes.push_back({m, nranks});
  }
  return shapes;
}

// What TMA makes of a row of a slice: the gathered row that lies there, or -1 for a row of zeros.
int64_t row_read(const Shape& shape, int rank, const WgradPlace& place, int row) {
  const int64_t max_rows = std::max<int64_t>(1, ceil_div(shape.m, shape.nranks));
  const int64_t whole = shape.m / max_rows;
  switch (place.map) {
    case WgradMap::own:
      return row >= 0 && row < rows_count(shape.m, shape.nranks, rank)
                 ? rows_begin(shape.m, shape.nranks, rank) + row
                 : -1;
    case WgradMap::whole:
      return place.slice < whole && row >= 0 && row < max_rows ? place.slice * max_rows + row : -1;
    case WgradMap::last:
      return row >= 0 && row < shape.m - whole * max_rows ? whole * max_rows + row : -1;
  }
  return -1;
}

// A step's rows, as a rank of a job of one node turns to the others.
struct Rows {
  int source;
  int first;
  bool operator<(const Rows& other) const {
    return source != other.source ? source < other.source : first < other.first;
  }
  bool operator==(const Rows& other) const { return source == other.source && first == other.first; }
};
Rows rows_of(const WgradOrder& order, int rank, int step) {
  const WgradStep found = order.at(step);
  const int source = (rank + found.position) % (1 + order.num_near + order.num_far);
  return {source, order.first_row(source, found.turn)};
}
// The same of a job of several nodes.
Rows rows_of(const WgradOrder& order, const RankOrder& ranks, int step) {
  const WgradStep found = order.at(step);
  const int source = ranks.rank_at[found.position];
  return {source, order.first_row(source, found.turn)};
}
WgradOrder in_node(const Shape& shape, bool aligned) {
  return WgradOrder::of(shape.m, shape.nranks - 1, 0, aligned);
}

RankOrder ranks_of(int rank, const std::vector<int32_t>& nodes) {
  const TopologyArrays arrays(Topology::make(rank, std::vector<std::string>(nodes.size(), "host"), nodes));
  return make_rank_order(arrays.view());
}

WgradOrder between_nodes(int64_t m, const RankOrder& ranks, int nranks, bool aligned) {
  return WgradOrder::of(m, ranks.num_local - 1, nranks - ranks.num_local, aligned);
}

const std::vector<std::vector<int32_t>> LAYOUTS = {
    {0, 1},       {0, 0, 1, 1},    {0, 1, 0, 1}, {0, 0, 0, 1},
    {0, 1, 2, 3}, {0, 0, 0, 1, 1}, {0, 1, 1, 2}, {0, 0, 1, 1, 2, 2, 3, 3}};

}  // namespace

TEST_CASE("every gathered row is multiplied once, with the row of dY that is its own") {
  const bool aligned = GENERATE(false, true);
  for (const Shape& shape : shapes()) {
    INFO(shape.m << " rows, " << shape.nranks << " ranks, aligned " << aligned);
    const int max_rows = static_cast<int>(std::max<int64_t>(1, ceil_div(shape.m, shape.nranks)));
    const WgradOrder order = in_node(shape, aligned);
    for (int rank = 0; rank < shape.nranks; ++rank) {
      std::vector<int> times(static_cast<size_t>(shape.m));
      for (int i = 0; i < order.num_steps(); ++i) {
        const Rows step = rows_of(order, rank, i);
        const auto rows = static_cast<int>(rows_count(shape.m, shape.nranks, step.source));
        const WgradPlace place = wgrad_place(step.source, rank, rows, max_rows);
        CHECK((place.map == WgradMap::own) == (step.source == rank && rows > 0));
        for (int row = step.first; row < step.first + WgradOrder::STEP_ROWS; ++row) {
          const int64_t x = row_read(shape, rank, place, row);
          if (x < 0) continue;
          ++times[static_cast<size_t>(x)];
          // dY is one matrix of all rows.
          CHECK(x == int64_t{step.source} * max_rows + row);
        }
      }
      CHECK(std::all_of(times.begin(), times.end(), [](int count) { return count == 1; }));
    }
  }
}

TEST_CASE("own rows come first, then a step of each other rank in turn") {
  const WgradOrder order = in_node({4 * 150, 4}, false);
  CHECK(order.source_steps == 3);
  CHECK(order.num_steps() == 12);
  const std::vector<Rows> expected = {{2, 0},  {2, 64}, {2, 128}, {3, 0},   {0, 0},   {1, 0},
                                      {3, 64}, {0, 64}, {1, 64},  {3, 128}, {0, 128}, {1, 128}};
  for (int i = 0; i < order.num_steps(); ++i) {
    INFO("step " << i);
    CHECK(rows_of(order, 2, i) == expected[static_cast<size_t>(i)]);
  }
}

TEST_CASE("where columns of dY are loaded, every step begins at a multiple of 8 of them") {
  for (const Shape& shape : shapes()) {
    const int max_rows = static_cast<int>(ceil_div(shape.m, shape.nranks));
    const WgradOrder order = in_node(shape, true);
    for (int i = 0; i < order.num_steps(); ++i) {
      const Rows step = rows_of(order, shape.nranks - 1, i);
      INFO(shape.m << " rows, " << shape.nranks << " ranks, source " << step.source << ", row " << step.first);
      CHECK((step.source * max_rows + step.first) % WgradOrder::ALIGNMENT == 0);
      CHECK(step.first > -WgradOrder::ALIGNMENT);
    }
  }
}

TEST_CASE("every step of every source is there once") {
  for (const Shape& shape : shapes()) {
    const WgradOrder order = in_node(shape, false);
    for (int rank = 0; rank < shape.nranks; ++rank) {
      std::vector<Rows> steps;
      for (int i = 0; i < order.num_steps(); ++i) steps.push_back(rows_of(order, rank, i));
      std::sort(steps.begin(), steps.end());
      CHECK(std::unique(steps.begin(), steps.end()) == steps.end());
      for (const auto& [source, row] : steps) {
        CHECK((source >= 0 && source < shape.nranks));
        CHECK((row >= 0 && row < order.source_steps * WgradOrder::STEP_ROWS));
      }
    }
  }
}

TEST_CASE("between nodes own rows come first, then the node's in turn, then the other nodes' in turn") {
  const RankOrder ranks = ranks_of(3, {0, 0, 1, 1, 1});
  const WgradOrder order = between_nodes(5 * 100, ranks, 5, false);
  const std::vector<Rows> expected = {{3, 0},  {3, 64}, {4, 0}, {2, 0},  {4, 64},
                                      {2, 64}, {1, 0},  {0, 0}, {1, 64}, {0, 64}};
  CHECK(order.num_steps() == static_cast<int>(expected.size()));
  for (int i = 0; i < order.num_steps(); ++i) {
    INFO("step " << i);
    CHECK(rows_of(order, ranks, i) == expected[static_cast<size_t>(i)]);
  }
}

TEST_CASE("between nodes the steps are those of one node in another order, nearest ranks first") {
  const bool aligned = GENERATE(false, true);
  for (const std::vector<int32_t>& nodes : LAYOUTS) {
    const int nranks = static_cast<int>(nodes.size());
    for (const int64_t m : {0, 1, 9, 64, 129, 1000, 4095}) {
      for (int rank = 0; rank < nranks; ++rank) {
        const RankOrder ranks = ranks_of(rank, nodes);
        const WgradOrder order = between_nodes(m, ranks, nranks, aligned);
        std::vector<Rows> one_node, between;
        int farthest = 0;  // 0: this rank; 1: its node; 2: another
        std::vector<int> last_row(static_cast<size_t>(nranks), -WgradOrder::STEP_ROWS);
        for (int i = 0; i < order.num_steps(); ++i) {
          const Rows step = rows_of(order, ranks, i);
          between.push_back(step);
          one_node.push_back(rows_of(in_node({m, nranks}, aligned), rank, i));
          const auto source = static_cast<size_t>(step.source);
          const int distance = step.source == rank                                 ? 0
                               : nodes[source] == nodes[static_cast<size_t>(rank)] ? 1
                                                                                   : 2;
          CHECK(distance >= farthest);
          farthest = distance;
          CHECK(step.first > last_row[source]);
          last_row[source] = step.first;
        }
        std::sort(one_node.begin(), one_node.end());
        std::sort(between.begin(), between.end());
        INFO(nranks << " ranks, m " << m << ", rank " << rank << ", aligned " << aligned);
        CHECK(between == one_node);
      }
    }
  }
}

TEST_CASE("the step after another is the next one") {
  for (const auto& [num_near, num_far] : {std::pair{0, 0}, {1, 0}, {3, 0}, {0, 1}, {0, 3}, {1, 2}, {3, 4}}) {
    for (const int64_t m : {1, 64, 65, 700, 4095}) {
      const WgradOrder order = WgradOrder::of(m, num_near, num_far, true);
      for (int i = 0; i + 1 < order.num_steps(); ++i) {
        INFO(num_near << " near ranks, " << num_far << " far, m " << m << ", step " << i);
        const WgradStep next = order.after(order.at(i));
        CHECK(next.position == order.at(i + 1).position);
        CHECK(next.turn == order.at(i + 1).turn);
      }
    }
  }
}

TEST_CASE(
    "every other rank's chunk is in one group, and no step needs one of a later group than it waits for") {
  const auto [num_near, num_far] = GENERATE(std::pair{1, 0}, std::pair{3, 0}, std::pair{0, 1}, std::pair{0, 3},
                                            std::pair{1, 2}, std::pair{3, 4});
  const bool aligned = GENERATE(false, true);
  const int nranks = 1 + num_near + num_far;
  for (const int chunk_rows : {64, 256}) {
    for (const int64_t m : {1, 9, 64, 65, 700, 1000, 4095, 9000, 30011}) {
      const WgradOrder order = WgradOrder::of(m, num_near, num_far, aligned);
      const int max_chunks = std::max(1, num_chunks(order.max_rows, chunk_rows));
      const ChunkGroups groups(order, max_chunks, chunk_rows);
      INFO(num_near << " near ranks, " << num_far << " far, m " << m << ", chunks of " << chunk_rows);
      std::vector<std::vector<int>> group_of(static_cast<size_t>(nranks),
                                             std::vector<int>(static_cast<size_t>(max_chunks), -1));
      for (int group = 0; group < ChunkGroups::NUM_GROUPS; ++group) {
        const ChunkGroups::Range range = groups.range(order, group);
        for (int position = range.position; position < range.position + range.count; ++position) {
          for (int chunk = range.begin; chunk < range.end; ++chunk) {
            int& of = group_of[static_cast<size_t>(position)][static_cast<size_t>(chunk)];
            CHECK(of == -1);
            of = group;
          }
        }
      }
      for (size_t position = 1; position < group_of.size(); ++position) {
        CHECK(
            std::all_of(group_of[position].begin(), group_of[position].end(), [](int of) { return of >= 0; }));
      }
      // As a producer does, from any step on.
      for (const int first : {order.end_of_own(), order.end_of_own() + 1, order.num_steps() / 2 + 1}) {
        int next_wait = first, group = -1, waits = 0;
        for (int i = std::max(first, order.end_of_own()); i < order.num_steps(); ++i) {
          const WgradStep step = order.at(i);
          if (i >= next_wait) {
            const ChunkGroups::Needed needed = groups.needed(order, step);
            CHECK(needed.group > group);
            CHECK(needed.end_step > i);
            group = needed.group, next_wait = needed.end_step, ++waits;
          }
          // Of whatever rank it is.
          for (int source = 0; source < nranks; ++source) {
            const int last = std::min(order.first_row(source, step.turn) + WgradOrder::STEP_ROWS,
                                      static_cast<int>(rows_count(m, nranks, source))) -
                             1;
            if (last < 0) continue;
            CHECK(group_of[static_cast<size_t>(step.position)][static_cast<size_t>(last / chunk_rows)] <=
                  group);
          }
        }
        CHECK(waits <= ChunkGroups::NUM_GROUPS);
      }
    }
  }
}

TEST_CASE("ranks of fewer rows than a step share steps, every row in one of them, and wait for all ranks") {
  CHECK(WgradOrder::merges(64, 2));
  CHECK(WgradOrder::merges(126, 2));
  CHECK(WgradOrder::merges(1, 4));
  CHECK(!WgradOrder::merges(127, 2));
  CHECK(!WgradOrder::merges(0, 2));
  CHECK(!WgradOrder::merges(64, 1));
  for (const Shape& shape : shapes()) {
    if (!WgradOrder::merges(shape.m, shape.nranks)) continue;
    INFO(shape.m << " rows, " << shape.nranks << " ranks");
    const WgradOrder order = WgradOrder::of_merged(shape.m);
    CHECK(order.num_steps() == ceil_div(shape.m, WgradOrder::STEP_ROWS));
    CHECK(order.num_steps() <= in_node(shape, false).num_steps());
    CHECK(order.first_wait() == 0);
    for (int i = 0; i < order.num_steps(); ++i) {
      CHECK(order.at(i).position == 0);
      CHECK(order.first_row(0, order.at(i).turn) == i * WgradOrder::STEP_ROWS);
      if (i + 1 < order.num_steps()) CHECK(order.after(order.at(i)).turn == order.at(i + 1).turn);
    }
    const ChunkGroups groups = ChunkGroups::of_merged(shape.nranks);
    const ChunkGroups::Range range = groups.range(order, 0);
    CHECK((range.position == 0 && range.count == shape.nranks && range.begin == 0 && range.end == 1));
    for (int group = 1; group < ChunkGroups::NUM_GROUPS; ++group) {
      const ChunkGroups::Range none = groups.range(order, group);
      CHECK(none.begin >= none.end);
    }
    CHECK(groups.needed(order, order.at(0)).group == 0);
    CHECK(groups.needed(order, order.at(0)).end_step == order.num_steps());
  }
}
