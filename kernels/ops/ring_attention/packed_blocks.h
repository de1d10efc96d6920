// SPDX-License-Identifier: MIT
// Ring attention over packed sequences on GPUs: which rows a rank holds and which rows a query sees, how rows
// are cut into tiles and blocks, which blocks a tile takes and a peer needs. Pure, host and device.
//
// Everything is counted in rows of a rank. Positions grow with the row, so of another rank's rows, too, a query
// sees consecutive ones. Tiles and blocks are cut from all of a rank's rows, whatever sequences those belong
// to: a rank has one run.
#pragma once

#include "kernels/ops/ring_attention/cuda_blocks.h"

namespace mk::ring_attention {

struct RowRange {
  int begin;
  int end;
};

MK_HOST_DEVICE constexpr int clamp_to(int value, int low, int high) { return most(low, least(value, high)); }

// What a rank holds of one sequence, zigzag: slices r and 2W-1-r of 2W.
struct ZigzagShare {
  int low_begin, low_count;
  int high_begin, high_count;

  MK_HOST_DEVICE ZigzagShare(int length, int nranks, int rank) {
    const int slice_rows = (length + 2 * nranks - 1) / (2 * nranks);
    low_begin = least(length, slice_rows * rank);
    low_count = least(slice_rows, length - low_begin);
    high_begin = least(length, slice_rows * (2 * nranks - 1 - rank));
    high_count = least(slice_rows, length - high_begin);
  }
  MK_HOST_DEVICE int count() const { return low_count + high_count; }
  // How many of its rows lie before a place in the sequence.
  MK_HOST_DEVICE int rows_before(int place) const {
    return clamp_to(place - low_begin, 0, low_count) + clamp_to(place - high_begin, 0, high_count);
  }
  MK_HOST_DEVICE int place_of(int row) const {
    return row < low_count ? low_begin + row : high_begin + row - low_count;
  }
};

// Which positions a rank holds: what schedule.h's Slices says, in 32 bits and by tables.
struct PackedSlices {
  int seq;
  int nranks;
  int slice_rows;  // of all slices but the last; not zigzag
  bool causal;
  bool zigzag;  // of each sequence
  int num_sequences;
  const int32_t* cu_seqlens;  // [num_sequences + 1], checked
  const int32_t* row_begins;  // [nranks][num_sequences + 1]: a rank's rows before a sequence

  // What the table is made of: the rows before a sequence, or with zigzag those of one.
  MK_HOST_DEVICE int slice_begin(int rank) const {
    return static_cast<int>(int64_t{slice_rows} * rank < seq ? slice_rows * rank : seq);
  }
  MK_HOST_DEVICE int slice_rows_before(int rank, int position) const {
    const int begin = slice_begin(rank);
    return clamp_to(position - begin, 0, least(slice_rows, seq - begin));
  }
  MK_HOST_DEVICE int share_rows(int rank, int sequence) const { return share(rank, sequence).count(); }

  MK_HOST_DEVICE int row_begin(int rank, int sequence) const {
    return row_begins[static_cast<size_t>(rank) * (num_sequences + 1) + sequence];
  }
  MK_HOST_DEVICE int rows(int rank) const { return row_begin(rank, num_sequences); }
  MK_HOST_DEVICE RowRange rows_of(int rank, int sequence) const {
    return {row_begin(rank, sequence), row_begin(rank, sequence + 1)};
  }
  // As CudaSlices' of a rank's only run, whose rows stand for positions.
  MK_HOST_DEVICE int first_row(int, int) const { return 0; }
  MK_HOST_DEVICE int begin(int, int) const { return 0; }
  MK_HOST_DEVICE int count(int rank, int) const { return rows(rank); }

  // The sequence of a row that there is.
  MK_HOST_DEVICE int sequence_of(int rank, int row) const {
    return sequence_of(rank, row, 0, num_sequences - 1);
  }
  // Of one that is known to be from `first` to `last`.
  MK_HOST_DEVICE int sequence_of(int rank, int row, int first, int last) const {
    int low = first, high = last + 1;
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      (row_begin(rank, middle) <= row ? low : high) = middle;
    }
    return low;
  }
  MK_HOST_DEVICE int position_of(int rank, int sequence, int row) const {
    if (!zigzag) return slice_begin(rank) + row;
    return cu_seqlens[sequence] + share(rank, sequence).place_of(row - row_begin(rank, sequence));
  }
  // A rank's rows before a position of a sequence, or behind its last.
  MK_HOST_DEVICE int rows_before(int rank, int sequence, int position) const {
    if (!zigzag) return slice_rows_before(rank, position);
    return row_begin(rank, sequence) + share(rank, sequence).rows_before(position - cu_seqlens[sequence]);
  }

  // Of `source`'s rows those that a query sees, and of `rank`'s those that see a key.
  MK_HOST_DEVICE RowRange visible_rows(int source, int sequence, int position) const {
    const RowRange all = rows_of(source, sequence);
    return {all.begin, causal ? rows_before(source, sequence, position + 1) : all.end};
  }
  MK_HOST_DEVICE RowRange seeing_rows(int rank, int sequence, int position) const {
    const RowRange all = rows_of(rank, sequence);
    return {causal ? rows_before(rank, sequence, position) : all.begin, all.end};
  }

 private:
  MK_HOST_DEVICE ZigzagShare share(int rank, int sequence) const {
    return {cu_seqlens[sequence + 1] - cu_seqlens[sequence], nranks, rank};
  }
};

// A row with its place.
struct PackedRow {
  int sequence;
  int position;
};
MK_HOST_DEVICE PackedRow packed_row(const PackedSlices& slices, int rank, int row) {
  const int sequence = slices.sequence_of(rank, row);
  return {sequence, slices.position_of(rank, sequence, row)};
}

// The first stretch of `keys`, rows of `source`, of which each is seen by one of `queries`, rows of `rank`.
// False: there is none.
MK_HOST_DEVICE bool next_seen(const PackedSlices& slices, int source, const RowRange& keys, int rank,
                              const RowRange& queries, RowRange* seen) {
  int row = keys.begin;
  while (row < keys.end) {
    const int sequence = slices.sequence_of(source, row);
    const RowRange all = slices.rows_of(rank, sequence);
    const int last = least(queries.end, all.end) - 1;
    if (last >= most(queries.begin, all.begin)) {
      const int position = slices.causal ? slices.position_of(rank, sequence, last) : 0;
      *seen = {row, least(keys.end, slices.visible_rows(source, sequence, position).end)};
      if (seen->begin < seen->end) return true;
    }
    const int following = most(queries.begin, all.end);  // the first query behind this sequence
    if (following >= queries.end) return false;
    row = slices.row_begin(source, slices.sequence_of(rank, following));
  }
  return false;
}

// The last of `keys` that one of `queries` sees; -1: none does.
MK_HOST_DEVICE int last_seen(const PackedSlices& slices, int source, const RowRange& keys, int rank,
                             const RowRange& queries) {
  int row = keys.end - 1;
  while (row >= keys.begin) {
    const int sequence = slices.sequence_of(source, row);
    const RowRange all = slices.rows_of(rank, sequence);
    const int last = least(queries.end, all.end) - 1;
    if (last >= most(queries.begin, all.begin)) {
      const int position = slices.causal ? slices.position_of(rank, sequence, last) : 0;
      const RowRange seen = slices.visible_rows(source, sequence, position);
      const int end = least(row + 1, seen.end);
      if (end > most(keys.begin, seen.begin)) return end - 1;
    }
    const int preceding = least(queries.end, all.begin) - 1;  // the last query before this sequence
    if (preceding < queries.begin) return -1;
    row = slices.row_begin(source, slices.sequence_of(rank, preceding) + 1) - 1;
  }
  return -1;
}

// Keys of one head: block_n of a rank's rows, or what is left of them.
struct PackedBlock {
  int step;        // whose: the order's source `step`
  int row;         // its first
  int index;       // of another rank's, among its source's
  bool is_masked;  // some query of the tile does not see all of it
};

// What takes long to find out of a tile of queries.
struct PackedTile {
  int num_blocks;  // of keys
  int first_sequence, last_sequence;
};

// The blocks of which some of `queries`, at least one row, see something: source after source of the order.
// Other ranks' keys arrive in blocks; this rank's own begin where the first is seen.
template <class Order>
class PackedKeyWalk {
 public:
  MK_HOST_DEVICE PackedKeyWalk(const PackedSlices& slices, const Order& order, int rank, int block_n,
                               const RowRange& queries)
      : PackedKeyWalk(slices, order, rank, block_n, queries,
                      {0, slices.sequence_of(rank, queries.begin), slices.sequence_of(rank, queries.end - 1)}) {
    PackedKeyWalk stretches(*this);
    while (stretches.next_stretch()) {
      tile_.num_blocks += (stretches.end_ - stretches.row_) / block_n_;
      stretches.row_ = stretches.end_;
    }
  }
  // `tile`: that of the queries.
  MK_HOST_DEVICE PackedKeyWalk(const PackedSlices& slices, const Order& order, int rank, int block_n,
                               const RowRange& queries, const PackedTile& tile)
      : slices_(slices),
        order_(order),
        rank_(rank),
        block_n_(block_n),
        queries_(queries),
        tile_(tile),
        first_position_(slices.position_of(rank, tile.first_sequence, queries.begin)) {}

  MK_HOST_DEVICE const PackedTile& tile() const { return tile_; }
  // How many there are in all.
  MK_HOST_DEVICE int count() const { return tile_.num_blocks; }
  MK_HOST_DEVICE bool next(PackedBlock* block) {
    if (row_ == end_ && !next_stretch()) return false;
    *block = {step_, row_, row_ / block_n_, last_begin_ > row_ || first_end_ < row_ + block_n_};
    row_ += block_n_;
    return true;
  }

 private:
  // Blocks behind those that have been taken: what the queries of the next sequence see, together as much as
  // the last of them.
  MK_HOST_DEVICE bool next_stretch() {
    while (true) {
      while (step_ >= 0 && sequence_ <= tile_.last_sequence) {
        const int sequence = sequence_++;
        const RowRange all = slices_.rows_of(rank_, sequence);
        const int last = least(queries_.end, all.end) - 1;
        if (last < most(queries_.begin, all.begin)) continue;
        const int position = slices_.causal ? slices_.position_of(rank_, sequence, last) : 0;
        const RowRange seen = slices_.visible_rows(source_, sequence, position);
        const int begin = most(end_, step_ == 0 ? seen.begin : seen.begin / block_n_ * block_n_);
        if (seen.begin >= seen.end || begin >= seen.end) continue;
        row_ = begin;
        end_ = begin + (seen.end - begin + block_n_ - 1) / block_n_ * block_n_;
        return true;
      }
      if (step_ + 1 >= slices_.nranks) return false;
      begin_source(step_ + 1);
    }
  }
  MK_HOST_DEVICE void begin_source(int step) {
    step_ = step;
    source_ = order_.source(step, slices_.nranks);
    first_end_ = slices_.visible_rows(source_, tile_.first_sequence, first_position_).end;
    last_begin_ = slices_.row_begin(source_, tile_.last_sequence);
    sequence_ = tile_.first_sequence;
    row_ = end_ = 0;
  }

  const PackedSlices& slices_;
  const Order order_;
  const int rank_;
  const int block_n_;
  const RowRange queries_;
  PackedTile tile_;
  const int first_position_;
  int step_ = -1, source_ = 0;
  int sequence_ = 0;  // the next, of the queries'
  // Rows of the source: where what the first query sees ends, and where what the last one sees begins.
  int first_end_ = 0, last_begin_ = 0;
  int row_ = 0, end_ = 0;  // of the stretch, in blocks: the next, and behind the last
};

// A rank's tiles of queries, in the order of QueryTiles, or those of a head in another one. `position` is not
// theirs: the rows have several sequences.
struct PackedQueryTiles {
  PackedSlices slices;
  int rank;
  int heads;
  int kv_heads;
  int block_m;
  int joint_heads = 1;              // of the key heads, the last so many together
  const uint16_t* order = nullptr;  // of a head's tiles; null: the last first

  MK_HOST_DEVICE int tiles_of_head() const { return (slices.rows(rank) + block_m - 1) / block_m; }
  MK_HOST_DEVICE int size() const { return heads * tiles_of_head(); }
  MK_HOST_DEVICE QueryTile at(int index) const {
    const int tiles = tiles_of_head(), group = heads / kv_heads;
    const QueryTilePlace place = query_tile_place(index, tiles, group, kv_heads, joint_heads);
    QueryTile tile;
    tile.batch = 0;
    tile.kv_head = place.kv_head;
    tile.head = place.kv_head * group + place.head_of_group;
    tile.row = (order != nullptr ? order[place.from_end] : tiles - 1 - place.from_end) * block_m;
    tile.position = 0;
    tile.num_rows = least(block_m, slices.rows(rank) - tile.row);
    return tile;
  }
};

// What a rank has to push, as PanelUnit, and to whom: blocks that nobody needs are none.
struct PackedPanelUnit : PanelUnit {
  uint32_t needed_by;  // ranks, as bits
};
MK_HOST_DEVICE PackedPanelUnit panel_unit(const KeyPanels& panels, const PackedSlices& slices, int rank,
                                          int block_n, int index) {
  PackedPanelUnit unit;
  unit.head = index / panels.run_panels;
  unit.run = 0;
  unit.panel = index - unit.head * panels.run_panels;
  unit.block = unit.panel * panels.panel_blocks;
  const int rows = slices.rows(rank), blocks = (rows + block_n - 1) / block_n;
  unit.num_blocks = most(0, least(panels.panel_blocks, blocks - unit.block));
  unit.needed_by = 0;
  const RowRange keys = {unit.block * block_n, least((unit.block + unit.num_blocks) * block_n, rows)};
  for (int peer = 0; unit.num_blocks > 0 && peer < slices.nranks; ++peer) {
    RowRange seen;
    if (peer != rank && next_seen(slices, rank, keys, peer, {0, slices.rows(peer)}, &seen))
      unit.needed_by |= 1u << peer;
  }
  if (unit.needed_by == 0) unit.num_blocks = 0;
  return unit;
}

// In the staging memory of a rank's CTAs, where no other rank writes, whatever it was called with: each CTA's
// tensor maps, and behind them the table of row_begins.
constexpr int MOST_PACKED_MAPS = 4;
constexpr size_t PACKED_MAP_BYTES = MOST_PACKED_MAPS * 128;  // of a CTA
MK_HOST_DEVICE constexpr size_t row_table_offset(int num_ctas) { return num_ctas * PACKED_MAP_BYTES; }
MK_HOST_DEVICE constexpr size_t row_table_bytes(int nranks, int num_sequences) {
  return static_cast<size_t>(nranks) * (static_cast<size_t>(num_sequences) + 1) * sizeof(int32_t);
}

}  // namespace mk::ring_attention
