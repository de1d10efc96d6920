// SPDX-License-Identifier: MIT
// Mode WGRAD on GPUs: a tile takes every gathered row exactly once, its own rank's first and the others' in
// turn, and reads nothing of what lies behind a source's rows.
#include "kernels/ops/allgather_gemm/wgrad_order.h"

#include <algorithm>
#include <string>
#include <vector>

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

RankOrder ranks_of(int rank, const std::vector<int32_t>& nodes) {
  const TopologyArrays arrays(Topology::make(rank, std::vector<std::string>(nodes.size(), "host"), nodes));
  return make_rank_order(arrays.view());
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
    for (int rank = 0; rank < shape.nranks; ++rank) {
      const WgradOrder order = WgradOrder::of(shape.m, rank, shape.nranks, aligned);
      std::vector<int> times(static_cast<size_t>(shape.m));
      for (int i = 0; i < order.num_steps(); ++i) {
        const WgradStep step = order.at(i);
        const auto rows = static_cast<int>(rows_count(shape.m, shape.nranks, step.source));
        const WgradPlace place = wgrad_place(step.source, rank, rows, max_rows);
        CHECK((place.map == WgradMap::own) == (step.source == rank && rows > 0));
        for (int row = step.row; row < step.row + WgradOrder::STEP_ROWS; ++row) {
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
  const WgradOrder order = WgradOrder::of(4 * 150, 2, 4, false);
  CHECK(order.source_steps == 3);
  CHECK(order.num_steps() == 12);
  const std::vector<std::pair<int, int>> expected = {{2, 0},  {2, 64}, {2, 128}, {3, 0},   {0, 0},   {1, 0},
                                                     {3, 64}, {0, 64}, {1, 64},  {3, 128}, {0, 128}, {1, 128}};
  for (int i = 0; i < order.num_steps(); ++i) {
    INFO("step " << i);
    CHECK(order.at(i).source == expected[static_cast<size_t>(i)].first);
    CHECK(order.at(i).row == expected[static_cast<size_t>(i)].second);
  }
}

TEST_CASE("where columns of dY are loaded, every step begins at a multiple of 8 of them") {
  for (const Shape& shape : shapes()) {
    const int max_rows = static_cast<int>(ceil_div(shape.m, shape.nranks));
    const WgradOrder order = WgradOrder::of(shape.m, shape.nranks - 1, shape.nranks, true);
    for (int i = 0; i < order.num_steps(); ++i) {
      const WgradStep step = order.at(i);
      INFO(shape.m << " rows, " << shape.nranks << " ranks, source " << step.source << ", row " << step.row);
      CHECK((step.source * max_rows + step.row) % WgradOrder::ALIGNMENT == 0);
      CHECK(step.row > -WgradOrder::ALIGNMENT);
    }
  }
}

TEST_CASE("every step of every source is there once") {
  for (const Shape& shape : shapes()) {
    for (int rank = 0; rank < shape.nranks; ++rank) {
      const WgradOrder order = WgradOrder::of(shape.m, rank, shape.nranks, false);
      std::vector<std::pair<int, int>> steps;
      for (int i = 0; i < order.num_steps(); ++i) steps.emplace_back(order.at(i).source, order.at(i).row);
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
  const WgradOrder order = WgradOrder::of(5 * 100, 3, 5, false);
  const NearFarTileOrder turns = order.turns(ranks.num_local);
  const std::vector<std::pair<int, int>> expected = {{3, 0},  {3, 64}, {4, 0}, {2, 0},  {4, 64},
                                                     {2, 64}, {1, 0},  {0, 0}, {1, 64}, {0, 64}};
  CHECK(order.num_steps() == static_cast<int>(expected.size()));
  for (int i = 0; i < order.num_steps(); ++i) {
    const WgradStep step = order.at(i, turns, ranks);
    INFO("step " << i << ": rank " << step.source << ", row " << step.row);
    CHECK(step.source == expected[static_cast<size_t>(i)].first);
    CHECK(step.row == expected[static_cast<size_t>(i)].second);
  }
}

TEST_CASE("between nodes the steps are those of one node in another order, nearest ranks first") {
  const bool aligned = GENERATE(false, true);
  for (const std::vector<int32_t>& nodes : LAYOUTS) {
    const int nranks = static_cast<int>(nodes.size());
    for (const int64_t m : {0, 1, 9, 64, 129, 1000, 4095}) {
      for (int rank = 0; rank < nranks; ++rank) {
        const RankOrder ranks = ranks_of(rank, nodes);
        const WgradOrder order = WgradOrder::of(m, rank, nranks, aligned);
        const NearFarTileOrder turns = order.turns(ranks.num_local);
        std::vector<std::pair<int, int>> in_node, between;
        int farthest = 0;  // 0: this rank; 1: its node; 2: another
        std::vector<int> last_row(static_cast<size_t>(nranks), -WgradOrder::STEP_ROWS);
        for (int i = 0; i < order.num_steps(); ++i) {
          const WgradStep step = order.at(i, turns, ranks);
          const WgradStep other = order.at(i);
          between.emplace_back(step.source, step.row);
          in_node.emplace_back(other.source, other.row);
          const auto source = static_cast<size_t>(step.source);
          const int distance = step.source == rank                                 ? 0
                               : nodes[source] == nodes[static_cast<size_t>(rank)] ? 1
                                                                                   : 2;
          CHECK(distance >= farthest);
          farthest = distance;
          CHECK(step.row > last_row[source]);
          last_row[source] = step.row;
        }
        std::sort(in_node.begin(), in_node.end());
        std::sort(between.begin(), between.end());
        INFO(nranks << " ranks, m " << m << ", rank " << rank << ", aligned " << aligned);
        CHECK(between == in_node);
      }
    }
  }
}
