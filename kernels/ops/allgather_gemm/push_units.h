// SPDX-License-Identifier: MIT
// How a rank's rows are cut up to be pushed: a unit, which goes to every peer, is as many rows of a panel as
// fit into a push warp's buffer, or a part of one row.
#pragma once

#include "kernels/device/divisor.h"
#include "kernels/protocol.h"

namespace mk::allgather_gemm {

// Of a row that travels: columns that have a flag of their own.
constexpr int MAX_PANELS = 8;

struct PushUnit {
  int panel;
  int chunk;
  int row;        // of the rank's
  int num_rows;   // 0: there is nothing to push
  int column;     // in bytes
  int num_bytes;  // of a row
};

// When chunks are wanted. Behind the first `own_rows` rows of tiles a chunk, or `chunks_in_turn` of one row of
// tiles, takes its turn with those of the other ranks, `rows_in_turn` rows of tiles in all; tiles are walked in
// groups of `group_rows` rows, and `num_workers` of them, a wave, are computed at the same time.
struct PushOrder {
  int own_rows;
  int rows_in_turn;
  int group_rows;
  int num_n_tiles;
  int num_workers;
  int chunks_in_turn = 1;
  // Of a row, the panels of either half in turn: who shares a tile begins with both.
  bool halves_in_turn = false;

  // The wave that the first of a chunk's tiles is in.
  MK_HOST_DEVICE int wave_of(int chunk) const {
    const int row = own_rows + chunk / chunks_in_turn * rows_in_turn;
    const int group = row / group_rows;
    return static_cast<int>((int64_t{group} * group_rows * num_n_tiles + row - group * group_rows) /
                            num_workers);
  }
};

// One chunk after the other, all its panels; one panel after the other, all its chunks.
constexpr PushOrder CHUNK_BY_CHUNK = {0, 1, 1, 1, 1};
constexpr PushOrder PANEL_BY_PANEL = {0, 0, 1, 1, 1};

// Units in the order in which they are wanted: the chunks of a wave, panel by panel, and of each panel chunk by
// chunk.
class PushUnits {
 public:
  static constexpr int MAX_UNIT_ROWS = 32;  // a lane each

  PushUnits() = default;
  // Rows of `row_bytes`, panels of `panel_bytes`, buffers of `buffer_bytes`; `chunk_rows` a multiple of
  // MAX_UNIT_ROWS.
  MK_HOST_DEVICE PushUnits(const PushOrder& order, int rows, int chunk_rows, int row_bytes, int panel_bytes,
                           int buffer_bytes)
      : order_(order),
        rows_(rows),
        chunk_rows_(chunk_rows),
        num_chunks_((rows + chunk_rows - 1) / chunk_rows),
        row_bytes_(row_bytes),
        panel_bytes_(panel_bytes < row_bytes ? panel_bytes : row_bytes),
        buffer_bytes_(buffer_bytes),
        unit_columns_(panel_bytes_ < buffer_bytes ? panel_bytes_ : buffer_bytes) {
    const int padded = (unit_columns_ + 15) / 16 * 16;
    while (unit_rows_ < MAX_UNIT_ROWS && 2 * unit_rows_ * padded <= buffer_bytes) unit_rows_ *= 2;
    units_across_ = (panel_bytes_ + unit_columns_ - 1) / unit_columns_;
    // Of a rank whose only chunk is short, none is without rows: a warp would lose a microsecond with each.
    const int most_rows = num_chunks_ == 1 ? rows : chunk_rows_;
    per_chunk_ = (most_rows + unit_rows_ - 1) / unit_rows_ * units_across_;
    units_of_row_ = Divisor(units_across_);
    units_of_chunk_ = Divisor(per_chunk_);
    num_panels_ = (row_bytes_ + panel_bytes_ - 1) / panel_bytes_;
    end_chunk_ = end_of_wave(0);
  }

  // The same for another number of rows.
  MK_HOST_DEVICE PushUnits of_rows(int rows) const {
    return PushUnits(order_, rows, chunk_rows_, row_bytes_, panel_bytes_, buffer_bytes_);
  }

  MK_HOST_DEVICE int size() const { return num_chunks_ * num_panels_ * per_chunk_; }

  // Indices are asked for in rising order.
  MK_HOST_DEVICE PushUnit at(int index) {
    PushUnit unit;
    while (index >= end_chunk_ * num_panels_ * per_chunk_) {
      first_chunk_ = end_chunk_;
      end_chunk_ = end_of_wave(first_chunk_);
    }
    index -= first_chunk_ * num_panels_ * per_chunk_;
    const int chunks = index / units_of_chunk_;  // of this panel and those before it
    const int num_chunks = end_chunk_ - first_chunk_;
    const int turn = num_chunks == 1 ? chunks : chunks / num_chunks;
    unit.panel = order_.halves_in_turn ? turn % 2 * ((num_panels_ + 1) / 2) + turn / 2 : turn;
    unit.chunk = first_chunk_ + chunks - turn * num_chunks;
    index -= chunks * per_chunk_;
    const int row = index / units_of_row_;
    const int in_panel = (index - row * units_across_) * unit_columns_;
    unit.row = unit.chunk * chunk_rows_ + row * unit_rows_;
    unit.column = unit.panel * panel_bytes_ + in_panel;
    unit.num_bytes = min_of(min_of(panel_bytes_ - in_panel, row_bytes_ - unit.column), unit_columns_);
    unit.num_rows = unit.num_bytes > 0 ? max_of(0, min_of(unit_rows_, rows_ - unit.row)) : 0;
    return unit;
  }

  // Units with rows of a chunk's panel.
  MK_HOST_DEVICE int expected(int chunk, int panel) const { return expected(rows_, chunk, panel); }
  // The same of a rank that has `num_rows` rows.
  MK_HOST_DEVICE int expected(int num_rows, int chunk, int panel) const {
    const int rows = min_of(chunk_rows_, num_rows - chunk * chunk_rows_);
    const int bytes = min_of(panel_bytes_, row_bytes_ - panel * panel_bytes_);
    return (rows + unit_rows_ - 1) / unit_rows_ * ((bytes + unit_columns_ - 1) / unit_columns_);
  }

  MK_HOST_DEVICE static int min_of(int a, int b) { return a < b ? a : b; }
  MK_HOST_DEVICE static int max_of(int a, int b) { return a > b ? a : b; }

 private:
  // Behind the last of those chunks that are wanted with `first`.
  MK_HOST_DEVICE int end_of_wave(int first) const {
    const int wave = order_.wave_of(first);
    int end = first + 1;
    while (end < num_chunks_ && order_.wave_of(end) == wave) ++end;
    return end;
  }

  PushOrder order_{};
  int rows_ = 0;
  int chunk_rows_ = 0;
  int num_chunks_ = 0;
  int row_bytes_ = 0;
  int panel_bytes_ = 0;
  int buffer_bytes_ = 0;
  int unit_columns_ = 0;  // in bytes
  int unit_rows_ = 1;
  int units_across_ = 0;
  int per_chunk_ = 0;
  Divisor units_of_row_;
  Divisor units_of_chunk_;
  int num_panels_ = 0;
  int first_chunk_ = 0;  // of the wave that at() is in; the first is known from the beginning
  int end_chunk_ = 0;
};

}  // namespace mk::allgather_gemm
