// SPDX-License-Identifier: MIT
// Tiles where some workers come late: each once, those before `late_tile` by the others alone, and the cut ones
// shared out by all. And tiles that two workers share: each once, and all workers with both kinds.
#include <cstdlib>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "kernels/device/shared_partials.h"
#include "kernels/device/tile_scheduler.h"
#include "test/support/catch.h"

namespace {

using namespace mk;

// 7 x 9 tiles of 5 k-steps, the last `num_cut` of them cut along k.
LateTileSchedule schedule_of(int num_early, int num_late, int late_rounds, int num_cut) {
  return {{7, 9, 5, num_early + num_late, num_cut, 3, true}, num_early, late_rounds * num_early, false};
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

TEST_CASE("tiles that are spread are each one worker's, and those of the last wave lie all over the workers") {
  for (const int num_workers : {1, 2, 3, 4, 7, 16, 66, 114, 120, 131, 132}) {
    for (const int num_tiles : {0, 1, 130, 160, 191, 224, 263, 264, 288, 448}) {
      LateTileSchedule schedule = {{1, num_tiles, 5, num_workers, 0, 1}, num_workers, 0};
      schedule.spread();
      INFO(num_workers << " workers, " << num_tiles << " tiles, stride " << schedule.stride);
      const int waves = num_tiles / num_workers, rest = num_tiles % num_workers;
      std::set<int> seen;
      std::vector<int> in_last_wave(static_cast<size_t>(num_workers));
      for (int worker = 0; worker < num_workers; ++worker) {
        TileCursor tiles(schedule, worker);
        TileWork work;
        int count = 0;
        for (; tiles.next(&work); ++count) CHECK(seen.insert(work.n_tile).second);
        CHECK((count == waves || count == waves + 1));
        in_last_wave[static_cast<size_t>(worker)] = count - waves;
      }
      CHECK(static_cast<int>(seen.size()) == num_tiles);
      // As many of any 16 that follow one another as of all, or two more or less.
      for (int first = 0; first + 16 <= num_workers; ++first) {
        int count = 0;
        for (int i = 0; i < 16; ++i) count += in_last_wave[static_cast<size_t>(first + i)];
        CHECK(std::abs(count - 16.0 * rest / num_workers) <= 2);
      }
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

TEST_CASE("tiles that two workers share: each a half, first of one of the first half of the tiles") {
  for (const int num_k_steps : {2, 24, 25}) {
    const LateTileSchedule schedule = {{8, 9, num_k_steps, 72, 0, 4, true}, 72, 0, true};
    const int half = schedule.num_workers / 2;
    std::map<int, std::set<std::pair<int, int>>> pieces;  // of a tile by number
    for (int worker = 0; worker < schedule.num_workers; ++worker) {
      TileCursor tiles(schedule, worker);
      TileWork work;
      for (int turn = 0; turn < 2; ++turn) {
        REQUIRE(tiles.next(&work));
        const int number = turn * half + worker % half;
        int m_tile = 0, n_tile = 0;
        schedule.place(number, &m_tile, &n_tile);
        CHECK(std::pair(work.m_tile, work.n_tile) == std::pair(m_tile, n_tile));
        CHECK(pieces[number].insert({work.k_begin, work.k_end}).second);
      }
      CHECK(!tiles.next(&work));
    }
    CHECK(static_cast<int>(pieces.size()) == schedule.num_tiles());
    const int middle = num_k_steps / 2;
    for (const auto& [number, of_tile] : pieces)
      CHECK(of_tile == std::set<std::pair<int, int>>{{0, middle}, {middle, num_k_steps}});
  }
}

// Every block of both turns: one of the two gives it, and the other finishes it from that place.
template <int BLOCK_M, int BLOCK_N>
void check_partials(int num_workers) {
  using Partials = SharedPartials<BLOCK_M, BLOCK_N>;
  REQUIRE(num_workers <= Partials::MOST_WORKERS);
  std::vector<std::byte> memory(STAGING_FLAGS_BYTES + num_workers * STAGING_BYTES);
  std::set<uint32_t*> flags;
  std::set<float*> blocks;
  for (int worker = 0; worker < num_workers; ++worker) {
    for (int turn = 0; turn < 2; ++turn) {
      const Partials partials = {num_workers / 2, turn};
      CHECK(partials.partner(partials.partner(worker)) == worker);
      for (int block = 0; block < BLOCK_M / 64; ++block) {
        CHECK(partials.finishes(worker, block) != partials.finishes(partials.partner(worker), block));
        if (partials.finishes(worker, block)) continue;
        uint32_t* flag = partials.flag(memory.data(), worker, block);
        CHECK(flags.insert(flag).second);
        CHECK(reinterpret_cast<std::byte*>(flag + 1) <= memory.data() + STAGING_FLAGS_BYTES);
        float* first = partials.block(memory.data(), worker, block);
        for (const float* other : blocks) CHECK(std::abs(first - other) >= 64 * BLOCK_N);
        blocks.insert(first);
        const auto* begin = memory.data() + STAGING_FLAGS_BYTES + worker * STAGING_BYTES;
        CHECK(reinterpret_cast<std::byte*>(first) >= begin);
        CHECK(reinterpret_cast<std::byte*>(first + 64 * BLOCK_N) <= begin + STAGING_BYTES);
      }
    }
  }
}

TEST_CASE("what two workers give each other of shared tiles has a place and a flag of its own") {
  check_partials<128, 256>(6);
  check_partials<256, 160>(6);
  CHECK(SharedPartials<256, 160>::MOST_WORKERS >= 132);
}
