// SPDX-License-Identifier: MIT
// Gradients of ring attention on GPUs: which tiles of keys a rank computes parts of dK and dV for, which
// queries such a tile takes, and where parts and what is known of query rows lie. Pure, host and device;
// without packed sequences.
//
// Keys and values travel as in the forward call (ring_attention/cuda_blocks.h), in blocks of BLOCK_ROWS. Each
// rank computes its parts for tiles of other ranks' keys, which it pushes to their owners, then those of its
// own keys, to which it adds the others' parts. Each tile adds to dQ of the queries that see it: block by
// block, one tile after the other in the order in which they are handed out.
#pragma once

#include "kernels/ops/ring_attention/cuda_blocks.h"

namespace mk::ring_attention_backward {

using ring_attention::CudaSlices;
using ring_attention::KeyPanels;
using ring_attention::least;
using ring_attention::most;

constexpr int BLOCK_ROWS = 64;  // that stream past a tile, and of a warpgroup's half of the tile
constexpr int TILE_BLOCKS = 2;
constexpr int TILE_ROWS = TILE_BLOCKS * BLOCK_ROWS;

MK_HOST_DEVICE constexpr int blocks_of(int rows) { return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }
MK_HOST_DEVICE constexpr int tiles_of(int rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

// Tiles of a run of `source` of which some query of `receiver` sees something: the first ones. Of a run that is
// not its own a rank sees all or nothing.
MK_HOST_DEVICE int seen_tiles(const CudaSlices& slices, int receiver, int source, int run) {
  int end = 0;
  for (int queries = 0; queries < slices.num_runs(); ++queries) {
    const int count = slices.count(receiver, queries);
    if (count > 0) end = most(end, slices.visible_end(slices.begin(receiver, queries) + count - 1));
  }
  return tiles_of(most(0, least(end - slices.begin(source, run), slices.count(source, run))));
}

// Keys of one head.
struct KeyTile {
  int step;  // whose: that of the order's source `step`, inside a node the rank `step` places after this one
  int head;  // of all batches
  int run;
  int index;     // in its run
  int position;  // of its first key
  int num_rows;  // at most TILE_ROWS
};

// In which order a rank takes other ranks' tiles of keys, from step to step; its own, of step 0, come last.
// Inside a node the next ranks' in turn.
struct NextRanksFirst : ring_attention::RingOrder {
  MK_HOST_DEVICE int own() const { return rank; }
  MK_HOST_DEVICE int first_step(int nranks) const { return nranks > 1 ? 1 : 0; }
  MK_HOST_DEVICE int next_step(int step, int nranks) const { return step + 1 < nranks ? step + 1 : 0; }
  MK_HOST_DEVICE int step_before(int step, int nranks) const { return step > 0 ? step - 1 : nranks - 1; }
};

// Tile `index` of a rank's in the order in which they are handed out, source after source: of a source those of
// some heads in turn, then those of the next heads. Its number is that among the source's tiles of the head.
struct KeyTilePlace {
  int step;
  int head;
  int number;
};
template <class Tiles>
MK_HOST_DEVICE KeyTilePlace key_tile_place(const Tiles& tiles, int index) {
  const int nranks = tiles.slices.nranks;
  int step = tiles.order.first_step(nranks), of_head = tiles.tiles_of_step(step);
  while (index >= tiles.num_heads * of_head && step != 0) {
    index -= tiles.num_heads * of_head;
    step = tiles.order.next_step(step, nranks);
    of_head = tiles.tiles_of_step(step);
  }
  const int first_head = index / (tiles.heads_at_once * of_head) * tiles.heads_at_once;
  const int heads = least(tiles.heads_at_once, tiles.num_heads - first_head);
  index -= first_head * of_head;
  const int number = index / heads;
  return {step, first_head + index - number * heads, number};
}

// Of `count` tiles of a head from the longest to the shortest: a long one and a short one in turn. Then about
// as many begin at any time, and none waits long for its turn; the shortest ones one behind the other would
// begin faster than turns are taken.
MK_HOST_DEVICE constexpr int folded_tile(int place, int count) {
  return place % 2 == 0 ? place / 2 : count - 1 - place / 2;
}
MK_HOST_DEVICE constexpr int folded_place(int tile, int count) {
  return tile < (count + 1) / 2 ? 2 * tile : 2 * (count - 1 - tile) + 1;
}

// A rank's tiles of keys, all of which it sees.
template <class Order>
struct KeyTilesOf {
  CudaSlices slices;
  Order order;
  int num_heads;      // key heads of all batches
  int heads_at_once;  // see heads_at_once()

  MK_HOST_DEVICE int source(int step) const { return order.source(step, slices.nranks); }
  MK_HOST_DEVICE int seen_tiles_of(int step, int run) const {
    return seen_tiles(slices, order.own(), source(step), run);
  }
  MK_HOST_DEVICE int tiles_of_step(int step) const {
    return seen_tiles_of(step, 0) + (slices.zigzag ? seen_tiles_of(step, 1) : 0);
  }
  MK_HOST_DEVICE int64_t size() const {
    int64_t tiles = 0;
    for (int step = 0; step < slices.nranks; ++step) tiles += int64_t{num_heads} * tiles_of_step(step);
    return tiles;
  }
  // Of a rank's own keys, which differ in how many queries see them; but the last tiles of all are short ones.
  MK_HOST_DEVICE bool is_folded(int step, int head) const {
    return slices.causal && step == 0 && head < (num_heads - 1) / heads_at_once * heads_at_once;
  }
  MK_HOST_DEVICE KeyTile at(int index) const {
    const KeyTilePlace place = key_tile_place(*this, index);
    if (!is_folded(place.step, place.head)) return at_number(place.step, place.head, place.number);
    return at_number(place.step, place.head, folded_tile(place.number, tiles_of_step(place.step)));
  }
  // Of a head's tiles of a step, by position.
  MK_HOST_DEVICE KeyTile at_number(int step, int head, int number) const {
    const int first_run_tiles = seen_tiles_of(step, 0);
    KeyTile tile;
    tile.step = step;
    tile.head = head;
    tile.run = number >= first_run_tiles ? 1 : 0;
    tile.index = number - (tile.run == 1 ? first_run_tiles : 0);
    const int from = tile.index * TILE_ROWS;
    tile.position = slices.begin(source(step), tile.run) + from;
    tile.num_rows = least(TILE_ROWS, slices.count(source(step), tile.run) - from);
    return tile;
  }
  MK_HOST_DEVICE static constexpr bool is_seen(const KeyTile&) { return true; }
};
using KeyTiles = KeyTilesOf<NextRanksFirst>;

// Queries of one head.
struct QueryBlock {
  int head;  // of all batches, or not said
  int run;
  int index;     // in its run
  int row;       // its first among the rank's rows
  int position;  // of that row
  int num_rows;  // at most BLOCK_ROWS
};

// Blocks of a run, of which the last are taken first.
struct QueryStretch {
  int run;
  int first, last;
};

// The first block of a run of this rank's queries that sees a key; of causal ones the last queries see most.
// All blocks, if none does.
MK_HOST_DEVICE int first_seeing_block(const CudaSlices& slices, int rank, int run, int key_position) {
  const int count = slices.count(rank, run);
  const int from = slices.causal ? most(0, key_position - slices.begin(rank, run)) : 0;
  return from < count ? from / BLOCK_ROWS : blocks_of(count);
}

// A tile's turn with each of its blocks of queries: its number among the rank's tiles of that head in the order
// in which they are handed out, from 1 on.
struct KeyTurn {
  int number;
  int before[2];   // the turn before it, by the run of the block; 0: it is the first
  int key_before;  // a block that does not see this position has that turn one earlier
};

// The turn that a tile waits for with a block, and with those before it down to `first`.
struct TurnBefore {
  int number;
  int first;
};

// When a head's tiles of keys add to dQ. Of a step's tiles a block of queries sees the first ones by position:
// those of both runs, one run behind the other; but for own keys, which come last, either all of a run or none.
template <class Order>
struct KeyTurnsOf {
  const KeyTilesOf<Order>& tiles;

  MK_HOST_DEVICE KeyTurn of(const KeyTile& tile) const {
    const int number = tile.index + (tile.run == 1 ? tiles.seen_tiles_of(tile.step, 0) : 0);
    const bool is_folded = tiles.is_folded(tile.step, tile.head);
    const int count = is_folded ? tiles.tiles_of_step(tile.step) : 0;
    const int place = is_folded ? folded_place(number, count) : number;
    int turn = place + 1;
    walk_steps(tile.step, [&](int step) { turn += tiles.tiles_of_step(step); });
    if (place == 0) return {turn, {last_before(tile.step, 0), last_before(tile.step, 1)}, 0};
    // Of folded tiles the one before may be too late for a block to see. The one before that is not.
    const int before = is_folded ? folded_tile(place - 1, count) : 0;
    return {turn, {turn - 1, turn - 1}, is_folded ? tiles.at_number(tile.step, tile.head, before).position : 0};
  }
  // Of a stretch of the tile's walk, with its block `last`.
  template <class Walk>
  MK_HOST_DEVICE TurnBefore before(const KeyTile&, const KeyTurn& turn, const Walk&,
                                   const QueryStretch& stretch, int last) const {
    const int before = stretch.run == 0 ? turn.before[0] : turn.before[1];
    const int seeing = first_seeing_block(tiles.slices, tiles.order.own(), stretch.run, turn.key_before);
    if (last >= seeing) return {before, most(stretch.first, seeing)};
    return {before - 1, stretch.first};
  }
  // The tile's, which is the same with all blocks.
  MK_HOST_DEVICE static int own(const KeyTurn& turn, int) { return turn.number; }
  // The last of all of a key head with a block, which sees own keys.
  MK_HOST_DEVICE int last(int head, const QueryBlock& block) const {
    const int seen = num_seen(0, tiles.slices.visible_end(block.position + block.num_rows - 1));
    const int count = tiles.tiles_of_step(0);
    int turn = seen;
    if (tiles.is_folded(0, head)) turn = seen > (count + 1) / 2 ? count : 2 * seen - 1;
    walk_steps(0, [&](int step) { turn += tiles.tiles_of_step(step); });
    return turn;
  }

 private:
  // Of a step's tiles of a head those with keys before `end`.
  MK_HOST_DEVICE int num_seen(int step, int end) const {
    const CudaSlices& slices = tiles.slices;
    const int source = tiles.source(step);
    int seen = 0;
    for (int run = 0; run < slices.num_runs(); ++run)
      seen += tiles_of(most(0, least(end - slices.begin(source, run), slices.count(source, run))));
    return seen;
  }
  // The last turn of those of steps before `end_step` with the blocks of a run of this rank's queries.
  MK_HOST_DEVICE int last_before(int end_step, int run) const {
    const int end = run < tiles.slices.num_runs()
                        ? tiles.slices.visible_end(tiles.slices.begin(tiles.order.own(), run))
                        : 0;
    int last = 0, before = 0;
    walk_steps(end_step, [&](int step) {
      const int seen = num_seen(step, end);
      if (seen > 0) last = before + seen;
      before += tiles.tiles_of_step(step);
    });
    return last;
  }
  // use(step) of those before `end` in the order of their tiles.
  template <class Use>
  MK_HOST_DEVICE void walk_steps(int end, Use&& use) const {
    const int nranks = tiles.slices.nranks;
    for (int step = tiles.order.first_step(nranks); step != end; step = tiles.order.next_step(step, nranks))
      use(step);
  }
};

template <class Order>
MK_HOST_DEVICE KeyTurnsOf<Order> turns_of(const KeyTilesOf<Order>& tiles) {
  return {tiles};
}

// The blocks of this rank's queries that see something of a tile of keys: the last positions first, which see
// all tiles. So tiles of a head that take turns with the same blocks begin with the same one, and none waits
// for another to get to where it begins.
class QueryBlockWalk {
 public:
  MK_HOST_DEVICE QueryBlockWalk(const CudaSlices& slices, int rank, int key_position)
      : slices_(slices), rank_(rank), key_position_(key_position), run_(slices.num_runs()) {}

  // How many there are: before the first next().
  MK_HOST_DEVICE int count() const {
    int blocks = 0;
    for (int run = 0; run < slices_.num_runs(); ++run)
      blocks += blocks_of(slices_.count(rank_, run)) - first_block(run);
    return blocks;
  }
  MK_HOST_DEVICE bool next(QueryStretch* stretch) {
    while (--run_ >= 0) {
      *stretch = {run_, first_block(run_), blocks_of(slices_.count(rank_, run_)) - 1};
      if (stretch->first <= stretch->last) return true;
    }
    return false;
  }
  MK_HOST_DEVICE QueryBlock block(const QueryStretch& stretch, int index) const {
    const int run = stretch.run, from = index * BLOCK_ROWS;
    return {0,
            run,
            index,
            slices_.first_row(rank_, run) + from,
            slices_.begin(rank_, run) + from,
            least(BLOCK_ROWS, slices_.count(rank_, run) - from)};
  }

 private:
  MK_HOST_DEVICE int first_block(int run) const {
    return first_seeing_block(slices_, rank_, run, key_position_);
  }

  const CudaSlices& slices_;
  const int rank_;
  const int key_position_;
  int run_;  // the last that has been taken
};

// Where what is known of query rows lies in the receive area, block by block: the logarithms of the sums of
// their weights, then the sums of dO o.
struct QueryRowPlaces {
  static constexpr int BLOCK_BYTES = 2 * BLOCK_ROWS * 4;
  size_t begin;
  int num_query_heads;  // of all batches
  int num_runs;
  int run_blocks;

  MK_HOST_DEVICE int64_t number(int query_head, int run, int block) const {
    return (int64_t{query_head} * num_runs + run) * run_blocks + block;
  }
  MK_HOST_DEVICE size_t offset(int64_t number) const {
    return begin + static_cast<size_t>(number) * BLOCK_BYTES;
  }
  MK_HOST_DEVICE size_t offset(int query_head, int run, int block) const {
    return offset(number(query_head, run, block));
  }
  MK_HOST_DEVICE int64_t num_blocks() const { return number(num_query_heads, 0, 0); }
  MK_HOST_DEVICE size_t end() const { return offset(num_query_heads, 0, 0); }
};

// Where dQ is summed up, in the receive area too: blocks in fp32, each in the order of the accumulators of the
// warps that computed it, of all of them together as QueryRowPlaces numbers them; then whose turn was the last
// with each.
struct QuerySumPlaces {
  size_t begin;
  int64_t num_blocks;
  int block_bytes;

  MK_HOST_DEVICE size_t sums(int64_t block) const { return begin + static_cast<size_t>(block) * block_bytes; }
  MK_HOST_DEVICE size_t turn(int64_t block) const { return sums(num_blocks) + static_cast<size_t>(block) * 4; }
  MK_HOST_DEVICE size_t end() const { return (turn(num_blocks) + 127) / 128 * 128; }
};

// A tile's part is one of dK, then of dV, in fp32, in the order of the accumulators of the warps that computed
// it. `Panels`: of keys and values.
template <class Panels>
struct GradientPanelsOf : Panels {
  int num_query_heads;  // of all batches
  int head_dim;         // of the kernel

  static constexpr int ROW_BYTES = QueryRowPlaces::BLOCK_BYTES;
  MK_HOST_DEVICE int part_bytes() const { return 2 * TILE_ROWS * head_dim * 4; }
  MK_HOST_DEVICE int run_tiles() const { return (this->run_blocks + TILE_BLOCKS - 1) / TILE_BLOCKS; }
  MK_HOST_DEVICE int panel_tiles() const { return this->panel_blocks / TILE_BLOCKS; }
  // All parts that a rank may have of another's keys.
  MK_HOST_DEVICE size_t slot_bytes() const {
    return static_cast<size_t>(this->num_heads) * this->num_runs * run_tiles() * part_bytes();
  }
  MK_HOST_DEVICE QueryRowPlaces row_places(size_t begin) const {
    return {begin, num_query_heads, this->num_runs, this->run_blocks};
  }
  // Key heads whose tiles are handed out in turn. Tiles of one head begin one after the other, a turn apart:
  // the more heads, the fewer wait for each other. But what their tiles share, queries, dO and dQ, is to stay
  // in the L2: about 24 MiB, and of causal tiles, which use a part of it at a time, 48 MiB. If all heads share
  // no more than 64 MiB, all are in turn; but between ranks at most 16, for keys arrive head by head.
  // `blocks`: of a query head, that the same tiles see.
  MK_HOST_DEVICE int heads_at_once(bool causal, int blocks) const {
    constexpr int64_t MIB = 1 << 20;
    const int64_t some_bytes = (causal ? 48 : 24) * MIB;
    const int64_t bytes = int64_t{num_query_heads} * blocks * (BLOCK_ROWS * (2 + 2 + 4) * head_dim);
    const bool is_alone = this->nranks == 1;
    if (is_alone && bytes <= 64 * MIB) return most(1, this->num_heads);
    int times = most(1, static_cast<int>(bytes / some_bytes));
    if (!is_alone) times = most(times, (this->num_heads + 15) / 16);
    const int heads = (this->num_heads + times - 1) / times;
    return most(1, least(this->num_heads, most(2, heads)));
  }
  MK_HOST_DEVICE int heads_at_once(bool causal) const {
    return heads_at_once(causal, this->num_runs * this->run_blocks);
  }
  // Behind the rows.
  MK_HOST_DEVICE QuerySumPlaces query_sums(const QueryRowPlaces& rows) const {
    return {rows.end(), rows.num_blocks(), BLOCK_ROWS * head_dim * 4};
  }
};

// A bank of the receive area, and flags. First lie the images of keys and values. Behind them, for each step
// (of an owner of keys to another rank), key head, run and tile, that rank's part. At last, for this rank
// alone, what is known of its queries' rows.
struct GradientPanels : GradientPanelsOf<KeyPanels> {
  MK_HOST_DEVICE size_t part(int step, int head, int run, int tile) const {
    const size_t at =
        ((static_cast<size_t>(step - 1) * num_heads + head) * num_runs + run) * run_tiles() + tile;
    return KeyPanels::area_bytes() + at * part_bytes();
  }
  MK_HOST_DEVICE QueryRowPlaces row_places() const {
    return GradientPanelsOf::row_places(nranks > 1 ? part(nranks, 0, 0, 0) : 0);
  }
  MK_HOST_DEVICE size_t rows(int query_head, int run, int block) const {
    return row_places().offset(query_head, run, block);
  }
  MK_HOST_DEVICE QuerySumPlaces query_sums() const { return GradientPanelsOf::query_sums(row_places()); }
  MK_HOST_DEVICE size_t area_bytes() const { return query_sums().end(); }

  // Flags of a panel's parts lie behind those of its keys; `step` is from the owner to the rank whose they are.
  MK_HOST_DEVICE int part_flag(int step, int head, int run, int tile) const {
    return static_cast<int>(KeyPanels::num_flags()) + flag(step, head, run, tile / panel_tiles());
  }
  MK_HOST_DEVICE int64_t num_flags() const { return 2 * KeyPanels::num_flags(); }
};

}  // namespace mk::ring_attention_backward
