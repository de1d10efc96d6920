// SPDX-License-Identifier: MIT
// Merged tiles of a reduce-scatter hold rows of the product whoever owns them. Each row goes to its owner, who
// sums units of 16 of its own rows and some columns, whichever tiles they come from. Host and device.
#pragma once

#include "kernels/protocol.h"

namespace mk::gemm_reduce_scatter {

// A row of the product as its owner counts it.
struct OwnedRow {
  int owner;
  int row;
};

// Whom of the owners [first, end) a rank gives its rows first; the others follow, `first` behind the last one,
// and the rank itself comes last. As many ranks as there are owners begin with one each: if all began with the
// same, one after the other would have all that is on its way, and the links of the rest nothing.
MK_HOST_DEVICE int first_in_turn(int rank, int first, int end) {
  int owner = rank + 1;
  while (owner >= end) owner -= end - first;
  while (owner < first) owner += end - first;
  return owner;
}

// What an owner sums at a time.
struct MergedUnit {
  int row_unit;  // 16 rows of its own
  int column_unit;
};

struct MergedRows {
  static constexpr int UNIT_ROWS = 16;
  int m;
  int max_rows;          // of an owner: what all but the last ones have
  int num_column_units;  // of the product

  MK_HOST_DEVICE OwnedRow owned(int row) const {
    const int owner = row / max_rows;
    return {owner, row - owner * max_rows};
  }
  MK_HOST_DEVICE int first_row(int owner) const {
    return static_cast<int>(min_of(m, int64_t{owner} * max_rows));
  }
  MK_HOST_DEVICE int rows(int owner) const { return static_cast<int>(min_of(max_rows, m - first_row(owner))); }

  // Units that an owner sums, those of the same columns one after another.
  MK_HOST_DEVICE int row_units(int owner) const { return num_chunks(rows(owner), UNIT_ROWS); }
  MK_HOST_DEVICE int num_units(int owner) const { return row_units(owner) * num_column_units; }
  MK_HOST_DEVICE MergedUnit unit(int owner, int number) const {
    const int column_unit = number / row_units(owner);
    return {number - column_unit * row_units(owner), column_unit};
  }

  // Where a unit lies among a source's: every owner has room for the most that one has.
  MK_HOST_DEVICE int pitch() const { return num_chunks(max_rows, UNIT_ROWS); }
  MK_HOST_DEVICE int place(const MergedUnit& unit) const { return unit.column_unit * pitch() + unit.row_unit; }
  MK_HOST_DEVICE int size() const { return num_column_units * pitch(); }
};

}  // namespace mk::gemm_reduce_scatter
