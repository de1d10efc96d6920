// SPDX-License-Identifier: MIT
// The order of a reduction's tiles: each once, the same for all workers together, and in every round a rank's
// own tiles behind those that it computes for others.
#include "kernels/ops/gemm_reduce_scatter/owner_tiles.h"

#include <set>
#include <tuple>
#include <vector>

#include "test/support/catch.h"

namespace {

using namespace mk;
using namespace mk::gemm_reduce_scatter;

const OwnerTiles SHAPES[] = {{4, 16, 32, 16, 9, 16}, {4, 32, 32, 32, 32, 16}, {3, 5, 7, 2, 3, 2},
                             {1, 4, 9, 4, 2, 3},     {2, 1, 1, 1, 1, 1},      {4, 8, 3, 3, 5, 2},
                             {8, 0, 4, 1, 1, 1},     {5, 33, 64, 16, 8, 5}};

std::vector<OwnerTile> order_of(const OwnerTiles& tiles) {
  std::vector<OwnerTile> found;
  for (int number = 0; number < tiles.size(); ++number) found.push_back(tiles.at(number));
  return found;
}

}  // namespace

TEST_CASE("every owner's tile comes once") {
  for (const OwnerTiles& tiles : SHAPES) {
    std::set<std::tuple<int, int, int>> seen;
    for (const OwnerTile& tile : order_of(tiles)) {
      CHECK((tile.position >= 0 && tile.position < tiles.num_owners));
      CHECK((tile.row >= 0 && tile.row < tiles.tile_rows));
      CHECK((tile.column >= 0 && tile.column < tiles.num_n_tiles));
      CHECK(seen.insert({tile.position, tile.row, tile.column}).second);
    }
    CHECK(static_cast<int>(seen.size()) == tiles.size());
  }
}

TEST_CASE("owners take turns, each with the same block, in the order of their positions") {
  for (const OwnerTiles& tiles : SHAPES) {
    // What owners have had so far: each as much as the one before it, or a block less.
    std::vector<std::vector<std::pair<int, int>>> had(static_cast<size_t>(tiles.num_owners));
    for (const OwnerTile& tile : order_of(tiles)) {
      const auto owner = static_cast<size_t>(tile.position);
      had[owner].push_back({tile.row, tile.column});
      if (owner > 0) {
        CHECK(had[owner].size() <= had[owner - 1].size());
        CHECK(had[owner].size() + static_cast<size_t>(tiles.block_rows * tiles.block_columns) >=
              had[owner - 1].size());
      }
    }
    for (const auto& tiles_of_owner : had) CHECK(tiles_of_owner == had[0]);
    for (int number = 0; number < tiles.tiles_of_owner(); ++number) {
      const OwnerTile tile = tiles.of_owner(number);
      CHECK(std::pair(tile.row, tile.column) == had[0][static_cast<size_t>(number)]);
    }
  }
}

TEST_CASE("workers share the tiles out, and pass over those that are not there") {
  constexpr int NUM_WORKERS = 7, K_STEPS = 3;
  for (const OwnerTiles& tiles : SHAPES) {
    std::vector<std::vector<TileWork>> of_worker(NUM_WORKERS);
    const auto exists = [](const OwnerTile& tile) { return tile.row != 3 && tile.column != 1; };
    int expected = 0;
    for (const OwnerTile& tile : order_of(tiles)) expected += exists(tile);
    std::set<std::pair<int, int>> seen;
    for (int worker = 0; worker < NUM_WORKERS; ++worker) {
      OwnerTileCursor cursor(tiles, K_STEPS, worker, NUM_WORKERS);
      TileWork work;
      bool was_last = false;
      for (int ordinal = 0; cursor.next(&work, exists); ++ordinal) {
        CHECK((ordinal == 0 || !was_last));
        was_last = work.is_last;
        CHECK(work.ordinal == ordinal);
        CHECK((work.k_begin == 0 && work.k_end == K_STEPS && work.is_owner && work.num_peers == 0));
        CHECK(seen.insert({work.m_tile, work.n_tile}).second);
        CHECK(exists({work.m_tile / tiles.tile_rows, work.m_tile % tiles.tile_rows, work.n_tile}));
      }
      // Unless what an owner does not have comes last.
      const int last = worker + (tiles.size() - 1 - worker) / NUM_WORKERS * NUM_WORKERS;
      if (worker < tiles.size() && exists(tiles.at(last))) CHECK(was_last);
    }
    CHECK(static_cast<int>(seen.size()) == expected);
  }
}
