// SPDX-License-Identifier: MIT
// Tiles where some workers come late: each once, those before `late_tile` by the others alone, and the cut ones
// shared out by all.
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "kernels/device/tile_scheduler.h"
#include "test/support/catch.h"

namespace {

using namespace mk;

// 7 x 9 tiles of 5 k-steps, the last `num_cut` of them cut along k.
LateTileSchedule schedule_of(int num_early, int num_late, int late_rounds, int num_cut) {
  return {{7, 9, 5, num_early + num_late, num_cut, 3, true}, num_early, late_rounds * num_early};
}

const std::vector<LateTileSchedule> SCHEDULES = {
    schedule_of(6, 2, 4, 0), schedule_of(6, 2, 4, 7), schedule_of(7, 3, 8, 7),
    schedule_of(5, 0, 0, 4), schedule_of(1, 4, 3, 2), schedule_of(6, 2, 1, 1),
};

}  // namespace

TEST_CASE(
    "every step of every tile is one worker's, and whole tiles before the late ones come are the others'") {
  for (const LateTileSchedule& schedule : SCHEDULES) {
    std::map<int, std::set<std::pair<int, int>>> pieces;  // of a tile: where its k-steps begin and end
    std::map<int, int> whole;                             // tile by number: worker
    for (int worker = 0; worker < schedule.num_workers; ++worker) {
      TileCursor tiles(schedule, worker);
      TileWork work;
      while (tiles.next(&work)) {
        const int tile = work.m_tile * schedule.num_n_tiles + work.n_tile;
        CHECK(work.k_begin < work.k_end);
        CHECK(pieces[tile].insert({work.k_begin, work.k_end}).second);
        CHECK(work.is_owner == (work.k_end == schedule.num_k_steps));
        // Nobody waits for a worker that may come later.
        if (work.num_peers > 0) CHECK(work.first_peer + work.num_peers == worker);
        if (work.k_end - work.k_begin == schedule.num_k_steps) whole[tile] = worker;
      }
    }
    CHECK(static_cast<int>(pieces.size()) == schedule.num_tiles());
    for (const auto& [tile, of_tile] : pieces) {
      int next = 0;
      for (const auto& [begin, end] : of_tile) {
        CHECK(begin == next);
        next = end;
      }
      CHECK(next == schedule.num_k_steps);
    }
    for (int number = 0; number < schedule.num_whole_tiles(); ++number) {
      int m_tile = 0, n_tile = 0;
      schedule.place(number, &m_tile, &n_tile);
      const int worker = whole.at(m_tile * schedule.num_n_tiles + n_tile);
      if (number < schedule.late_tile) CHECK(worker == number % schedule.num_early);
      if (number >= schedule.late_tile) CHECK(worker == (number - schedule.late_tile) % schedule.num_workers);
    }
  }
}

TEST_CASE("with nobody late tiles are dealt out as without") {
  const LateTileSchedule late = schedule_of(6, 0, 0, 4);
  for (int worker = 0; worker < late.num_workers; ++worker) {
    TileCursor tiles(late, worker);
    TileCursor plain(static_cast<const TileSchedule&>(late), worker);
    TileWork work{}, expected{};
    while (plain.next(&expected)) {
      REQUIRE(tiles.next(&work));
      CHECK(std::pair(work.m_tile, work.n_tile) == std::pair(expected.m_tile, expected.n_tile));
      CHECK(std::pair(work.k_begin, work.k_end) == std::pair(expected.k_begin, expected.k_end));
    }
    CHECK(!tiles.next(&work));
  }
}
