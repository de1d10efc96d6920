// SPDX-License-Identifier: MIT
#include "kernels/cuda/query_items_plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace mk::ring_attention {
namespace {

// Together are handed out as many tiles as this many for each CTA.
constexpr int JOINT_TILES_PER_CTA = 4;
// For so many times as long as a tile has keys of its own rank, all others' may travel.
constexpr double MOST_TRAVEL = 1.25;
// Where keys take so much longer to come than all tiles to compute, tiles wait for them: they are taken whole,
// and head by head, as keys arrive.
constexpr double MOST_WAIT_US = 50;
// Of more tiles than that for each CTA, what whole ones leave idle is not worth it.
constexpr int MOST_TILES_PER_CTA = 24;
// No part is longer than this many times what is then left for each CTA to do,
constexpr double MOST_OF_REST = 2;
// but neither shorter than one of these parts of all that a CTA does, nor than so many blocks.
constexpr double LEAST_OF_ALL[] = {0.01, 0.02, 0.04};
constexpr int LEAST_BLOCKS = 4;
// What a part costs more than that much of a whole tile: its outputs are fp32.
constexpr double PART_US = 2.5;
// All warps of a CTA together join half a tile at a time, which takes that long.
constexpr double JOINS_A_CTA = 2;
constexpr double JOIN_ROUND_US = 4.0;
// What is estimated to be only so much shorter is not worth it: another order; cut tiles; cut tiles where keys
// travel, of which the estimate was 5 % short.
constexpr double LEAST_GAIN = 0.005;
constexpr double LEAST_GAIN_OF_CUTS = 0.01;
constexpr double LEAST_GAIN_OF_CUTS_BETWEEN_RANKS = 0.03;

struct Stretch {
  int num_tiles;
  int num_parts;
};

// From the last tile backwards.
struct Cut {
  std::array<Stretch, MOST_STRETCHES - 1> stretches;
  int num_stretches = 0;
  int64_t num_parts = 0;
  int num_tiles = 0;

  bool add(int count, int parts) {
    if (num_stretches > 0 && stretches[num_stretches - 1].num_parts == parts) {
      stretches[num_stretches - 1].num_tiles += count;
    } else {
      if (num_stretches == static_cast<int>(stretches.size())) return false;
      stretches[num_stretches++] = {count, parts};
    }
    if (parts > 1) {
      num_tiles += count;
      num_parts += int64_t{count} * parts;
    }
    return true;
  }
};

int blocks_of(const QueryItemsShape& shape, const QueryTiles& tiles, const QueryTile& tile) {
  const int end = tiles.slices.causal ? tile.position + tile.num_rows : tiles.slices.seq;
  return blocks_before(tiles.slices, end, shape.tile.block_n);
}

class Planner {
 public:
  Planner(const QueryItemsShape& shape, const QueryTiles& tiles) : shape_(shape), tiles_(tiles) {
    const int num_tiles = tiles.size();
    const int heads =
        tiles.slices.causal ? tiles.joint_heads * (tiles.heads / tiles.kv_heads) : tiles.batch * tiles.heads;
    first_ = num_tiles - heads * tiles.tiles_of_head();
    alike_ = tiles.slices.causal ? heads : num_tiles;
    sum_us_ = std::min(shape.num_late_ctas, shape.num_ctas) * shape.late_us;
    for (int at = 0; at < num_tiles; ++at) {
      blocks_.push_back(blocks_of(shape, tiles, tiles.at(at)));
      sum_us_ += us_of(blocks_.back());
      longest_us_ = std::max(longest_us_, us_of(blocks_.back()));
    }
  }

  // What all CTAs together take at least.
  double ideal_us() const { return sum_us_ / shape_.num_ctas; }
  QueryItems whole() const { return whole_items(num_tiles()); }
  // No part is to be shorter than `least` of all that a CTA does. Whole tiles if that cuts none, or too many.
  QueryItems cut(double least) const {
    const Cut cut = cut_tiles(least);
    const int64_t part_bytes = PartPlaces{shape_.tile.block_m, shape_.tile.head_dim}.part_bytes();
    const bool has_room =
        cut.num_tiles <= shape_.most_cuts && cut.num_parts * part_bytes <= shape_.staging_bytes;
    return has_room && cut.num_tiles > 0 ? items_of(cut) : whole();
  }

  // How long CTAs take that take one item after the other.
  double us_of(const QueryItems& items) const {
    std::vector<double> free_at(static_cast<size_t>(shape_.num_ctas), 0.0);
    std::fill_n(free_at.begin(), std::min(shape_.num_late_ctas, shape_.num_ctas), shape_.late_us);
    std::priority_queue<double, std::vector<double>, std::greater<>> ctas({}, std::move(free_at));
    double end = 0;
    for (int item = 0; item < items.num_items; ++item) {
      const QueryItem work = items.at(item);
      const int blocks = blocks_[static_cast<size_t>(work.tile)];
      const int of_part =
          part_begin(blocks, work.part + 1, work.num_parts) - part_begin(blocks, work.part, work.num_parts);
      const double done = ctas.top() + us_of(of_part) + (work.num_parts > 1 ? PART_US : 0);
      ctas.pop();
      ctas.push(done);
      end = std::max(end, done);
    }
    if (items.num_cuts == 0) return end;
    return end + JOIN_US + JOIN_ROUND_US * std::floor(JOINS_A_CTA * items.num_cuts / shape_.num_ctas);
  }

 private:
  int num_tiles() const { return static_cast<int>(blocks_.size()); }
  double us_of(int blocks) const { return tile_us(shape_.tile, blocks, tiles_.slices.causal); }

  Cut cut_tiles(double least) const {
    const double least_us = std::max(least * ideal_us(), us_of(LEAST_BLOCKS) - us_of(0));
    const int step = std::max(1, shape_.num_ctas / 8);
    Cut cut;
    double rest_us = 0;
    for (int tile = num_tiles(); tile > first_;) {
      const int blocks = blocks_[static_cast<size_t>(tile - 1)];
      const double most_us = MOST_OF_REST * (rest_us + us_of(blocks)) / shape_.num_ctas;
      if (most_us >= longest_us_) break;
      const int count = std::min((tile - first_ - 1) % alike_ + 1, step);
      if (!cut.add(count, parts_of(blocks, std::max(least_us, most_us)))) break;
      rest_us += count * us_of(blocks);
      tile -= count;
    }
    return cut;
  }

  int parts_of(int blocks, double most_us) const {
    for (const int parts : {1, 2, 3, 4, 5, 6, 8, 10, 12}) {
      if (parts > blocks) break;
      if (us_of(blocks) <= most_us * parts) return parts;
    }
    return std::max(1, std::min(blocks, MOST_PARTS));
  }

  QueryItems items_of(const Cut& cut) const {
    QueryItems items = whole();
    int tile = num_tiles();
    for (int i = 0; i < cut.num_stretches; ++i) tile -= cut.stretches[i].num_tiles;
    if (tile == 0) items.num_stretches = 0;
    int item = tile, slot = 0, cuts = 0;
    for (int i = cut.num_stretches - 1; i >= 0; --i) {
      const Stretch& from = cut.stretches[i];
      ItemStretch& to = items.stretches[items.num_stretches++];
      to = {tile, item, slot, cuts, from.num_parts};
      tile += from.num_tiles;
      item += from.num_tiles * from.num_parts;
      if (from.num_parts == 1) continue;
      slot += from.num_tiles * from.num_parts;
      cuts += from.num_tiles;
    }
    items.num_items = item;
    items.num_cuts = cuts;
    return items;
  }

  const QueryItemsShape& shape_;
  const QueryTiles& tiles_;
  int first_ = 0;            // the first tile that may be cut
  int alike_ = 0;            // from there on so many see as much, then so many less
  std::vector<int> blocks_;  // of each tile
  double sum_us_ = 0, longest_us_ = 0;
};

}  // namespace

// Where keys travel for longer than a tile has those of its own rank, and some, the first tiles are taken head
// by head, as keys arrive.
int choose_joint_heads(const QueryItemsShape& shape, const QueryTiles& tiles) {
  if (tiles.size() == 0) return 1;
  const int64_t heads = int64_t{tiles.batch} * tiles.kv_heads;
  const CudaSlices& slices = tiles.slices;
  const int64_t tiles_of_head = int64_t{tiles.tiles_of_head()} * (tiles.heads / tiles.kv_heads);
  const auto heads_of = [&](int64_t num_tiles) { return (num_tiles + tiles_of_head - 1) / tiles_of_head; };
  const double own_us = tile_us(shape.tile, blocks_of(shape, tiles, tiles.at(0)), true) / slices.nranks;
  const int64_t in_turn = shape.keys_us > MOST_TRAVEL * own_us ? heads_of(shape.num_ctas) : 0;
  const int64_t wanted = heads_of(int64_t{JOINT_TILES_PER_CTA} * shape.num_ctas);
  return static_cast<int>(std::max<int64_t>(1, std::min(wanted, heads - in_turn)));
}

int blocks_before(const CudaSlices& slices, int64_t end, int block_n) {
  const auto blocks_of = [&](int64_t rows) { return static_cast<int>((rows + block_n - 1) / block_n); };
  const int64_t whole = end / slices.slice_rows;
  return static_cast<int>(whole) * blocks_of(slices.slice_rows) + blocks_of(end - whole * slices.slice_rows);
}

double items_us(const QueryItemsShape& shape, const QueryTiles& tiles, const QueryItems& items) {
  return Planner(shape, tiles).us_of(items);
}

QueryItems plan_query_items(const QueryItemsShape& shape, QueryTiles* tiles) {
  tiles->joint_heads = 1;
  QueryItems best = whole_items(tiles->size());
  if (best.num_items == 0) return best;
  double best_us = 0;
  const auto consider = [&](const Planner& planner, const QueryItems& items, double least_gain) {
    const double us = planner.us_of(items);
    if (best_us > 0 && us > (1 - least_gain) * best_us) return;
    best_us = us;
    best = items;
  };
  const int joint_heads = tiles->slices.causal ? choose_joint_heads(shape, *tiles) : 1;
  if (tiles->size() > MOST_TILES_PER_CTA * shape.num_ctas) {
    tiles->joint_heads = joint_heads;
    return best;
  }
  const Planner in_turn(shape, *tiles);
  if (shape.keys_us > in_turn.ideal_us() + MOST_WAIT_US) return best;
  consider(in_turn, in_turn.whole(), LEAST_GAIN);
  QueryTiles joint = *tiles;
  joint.joint_heads = joint_heads;
  const Planner together(shape, joint);
  const double in_turn_us = best_us;
  if (joint_heads > 1) consider(together, together.whole(), LEAST_GAIN);
  const double whole_us = best_us;
  const double of_cuts = shape.num_late_ctas > 0 ? LEAST_GAIN_OF_CUTS_BETWEEN_RANKS : LEAST_GAIN_OF_CUTS;
  for (const double least : LEAST_OF_ALL) {
    if (whole_us * (1 - of_cuts) < together.ideal_us()) break;
    consider(together, together.cut(least), best_us < whole_us ? LEAST_GAIN : of_cuts);
  }
  if (best_us < in_turn_us) *tiles = joint;
  return best;
}

}  // namespace mk::ring_attention
