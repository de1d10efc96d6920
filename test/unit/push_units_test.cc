// SPDX-License-Identifier: MIT
// How an all-gather's rows are cut up to be pushed: everything once, each chunk's panel counted in full, panels
// of a wave's chunks before the next wave's chunks.
#include "kernels/ops/allgather_gemm/push_units.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "test/support/catch.h"

namespace {

using namespace mk::allgather_gemm;

struct Shape {
  int rows;
  int row_bytes;
  int panel_bytes;
  int buffer_bytes;
};

constexpr int CHUNK_ROWS = 128;
// 5 rows of tiles of this rank, then 3 others in turn; 15 tiles a group of rows, 30 of them a wave.
constexpr PushOrder ORDER = {5, 3, 5, 3, 30};

std::vector<PushUnit> units_of(const Shape& shape) {
  PushUnits units(ORDER, shape.rows, CHUNK_ROWS, shape.row_bytes, shape.panel_bytes, shape.buffer_bytes);
  std::vector<PushUnit> found;
  for (int i = 0; i < units.size(); ++i) {
    const PushUnit unit = units.at(i);
    if (unit.num_rows > 0) found.push_back(unit);
  }
  return found;
}

constexpr Shape SHAPES[] = {{2048, 16384, 2048, 8192}, {2048, 16384, 2048, 4096}, {1000, 776, 512, 4096},
                            {1, 16, 128, 4096},        {127, 14, 128, 8192},      {129, 8200, 8200, 4096},
                            {640, 4104, 1024, 8192},   {0, 256, 128, 4096}};

}  // namespace

TEST_CASE("every byte of every row is in one unit, which fits into the buffer") {
  for (const Shape& shape : SHAPES) {
    INFO(shape.rows << " rows of " << shape.row_bytes);
    std::vector<char> seen(static_cast<size_t>(shape.rows) * shape.row_bytes);
    for (const PushUnit& unit : units_of(shape)) {
      CHECK(unit.num_rows <= PushUnits::MAX_UNIT_ROWS);
      CHECK(unit.num_rows * ((unit.num_bytes + 15) / 16 * 16) <= shape.buffer_bytes);
      CHECK(unit.chunk == unit.row / CHUNK_ROWS);
      CHECK((unit.row + unit.num_rows - 1) / CHUNK_ROWS == unit.chunk);
      CHECK(unit.column / shape.panel_bytes == unit.panel);
      CHECK(unit.column % 16 == 0);
      for (int row = unit.row; row < unit.row + unit.num_rows; ++row) {
        for (int byte = unit.column; byte < unit.column + unit.num_bytes; ++byte) {
          ++seen[static_cast<size_t>(row) * shape.row_bytes + byte];
        }
      }
    }
    CHECK(std::all_of(seen.begin(), seen.end(), [](char times) { return times == 1; }));
  }
}

TEST_CASE("a chunk's panel has as many units as are expected") {
  for (const Shape& shape : SHAPES) {
    INFO(shape.rows << " rows of " << shape.row_bytes);
    const PushUnits units(ORDER, shape.rows, CHUNK_ROWS, shape.row_bytes, shape.panel_bytes,
                          shape.buffer_bytes);
    std::map<std::pair<int, int>, int> counts;
    for (const PushUnit& unit : units_of(shape)) ++counts[{unit.chunk, unit.panel}];
    const int chunks = (shape.rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
    const int panels = (shape.row_bytes + shape.panel_bytes - 1) / shape.panel_bytes;
    CHECK(static_cast<int>(counts.size()) == chunks * panels);
    for (const auto& [place, count] : counts) CHECK(count == units.expected(place.first, place.second));
  }
}

TEST_CASE("a wave's chunks come panel by panel, before the next wave's") {
  for (const Shape& shape : SHAPES) {
    std::vector<std::pair<int, int>> order;
    for (const PushUnit& unit : units_of(shape)) order.emplace_back(ORDER.wave_of(unit.chunk), unit.panel);
    CHECK(std::is_sorted(order.begin(), order.end()));
  }
  // The first tile of rows 5, 8 and 11 is number 15, 18 and 31.
  CHECK(ORDER.wave_of(0) == 0);
  CHECK(ORDER.wave_of(1) == 0);
  CHECK(ORDER.wave_of(2) == 1);
}

TEST_CASE("chunks of one row of tiles belong to its wave") {
  constexpr PushOrder HIGH_TILES = {5, 3, 5, 3, 30, 2};
  for (int chunk = 0; chunk < 20; ++chunk) CHECK(HIGH_TILES.wave_of(chunk) == ORDER.wave_of(chunk / 2));
}

TEST_CASE("panels of either half in turn: each once") {
  constexpr PushOrder HALVES = {5, 3, 5, 3, 1000, 1, true};
  for (const int num_panels : {1, 2, 5, 8}) {
    PushUnits units(HALVES, 200, CHUNK_ROWS, num_panels * 256, 256, 4096);
    std::vector<int> panels;
    for (int i = 0; i < units.size(); ++i) {
      const int panel = units.at(i).panel;
      if (panels.empty() || panels.back() != panel) panels.push_back(panel);
    }
    REQUIRE(static_cast<int>(panels.size()) == num_panels);
    for (int i = 0; i < num_panels; ++i) CHECK(panels[i] == i % 2 * ((num_panels + 1) / 2) + i / 2);
  }
}

TEST_CASE("mode WGRAD: panel by panel, and of each chunk by chunk") {
  constexpr int STEP_ROWS = 64;
  const int buffer_bytes = GENERATE(4096, 8192);
  const int panel_bytes = GENERATE(4096, 57344);
  for (const int row_bytes : {16, 14, 776, 8192, 8200, 57344}) {
    for (const int rows : {0, 1, 63, 64, 65, 1000}) {
      INFO(rows << " rows of " << row_bytes << ", panels of " << panel_bytes);
      PushUnits units(PANEL_BY_PANEL, rows, STEP_ROWS, row_bytes, panel_bytes, buffer_bytes);
      std::vector<int64_t> bytes(static_cast<size_t>(rows));
      std::map<std::pair<int, int>, int> counts;
      std::pair<int, int> last;
      for (int i = 0; i < units.size(); ++i) {
        const PushUnit unit = units.at(i);
        if (unit.num_rows == 0) continue;
        const std::pair place = {unit.panel, unit.chunk};
        CHECK(place >= last);
        last = place;
        ++counts[place];
        CHECK(unit.column / panel_bytes == unit.panel);
        CHECK((unit.column + unit.num_bytes - 1) / panel_bytes == unit.panel);
        for (int row = unit.row; row < unit.row + unit.num_rows; ++row) {
          CHECK(row / STEP_ROWS == unit.chunk);
          bytes[static_cast<size_t>(row)] += unit.num_bytes;
        }
      }
      CHECK(std::all_of(bytes.begin(), bytes.end(), [&](int64_t sum) { return sum == row_bytes; }));
      const int panels = (row_bytes + panel_bytes - 1) / panel_bytes;
      CHECK(static_cast<int>(counts.size()) == (rows + STEP_ROWS - 1) / STEP_ROWS * panels);
      for (const auto& [place, count] : counts) CHECK(count == units.expected(place.second, place.first));
    }
  }
}

TEST_CASE("a rank whose only chunk is short has no units without rows") {
  for (const int rows : {1, 8, 17, 127, 128}) {
    const Shape shape = {rows, 16384, 16384, 4096};
    PushUnits units(ORDER, shape.rows, CHUNK_ROWS, shape.row_bytes, shape.panel_bytes, shape.buffer_bytes);
    CHECK(static_cast<size_t>(units.size()) == units_of(shape).size());
  }
}

TEST_CASE("units of another number of rows are those that it would have had") {
  const Shape shape = {300, 16384, 4096, 4096};
  const PushUnits made(ORDER, shape.rows, CHUNK_ROWS, shape.row_bytes, shape.panel_bytes, shape.buffer_bytes);
  for (const int rows : {0, 8, 128, 1000}) {
    PushUnits one = made.of_rows(rows);
    PushUnits other(ORDER, rows, CHUNK_ROWS, shape.row_bytes, shape.panel_bytes, shape.buffer_bytes);
    REQUIRE(one.size() == other.size());
    for (int i = 0; i < one.size(); ++i) {
      const PushUnit a = one.at(i), b = other.at(i);
      CHECK(std::tie(a.panel, a.chunk, a.row, a.num_rows, a.column, a.num_bytes) ==
            std::tie(b.panel, b.chunk, b.row, b.num_rows, b.column, b.num_bytes));
    }
  }
}
