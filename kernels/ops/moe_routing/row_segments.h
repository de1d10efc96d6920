// SPDX-License-Identifier: MIT
// How rows that travel between experts' ranks and tokens' ranks are cut up on GPUs: blocks, of which a flag
// tells, units, which a warp pushes, and the turns that the units of several lists take. Host and device.
#pragma once

#include <cstdint>

#include "../../device/host_device.h"

namespace mk::moe {

// Rows that one flag tells of: the height of the highest tile.
constexpr int BLOCK_ROWS = 128;

MK_HOST_DEVICE constexpr uint32_t num_row_blocks(uint32_t rows) { return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }

// `count` rows from row `begin` of a list on. Units end where `unit_rows`, a power of two up to BLOCK_ROWS,
// divides a row's number in the list, so that none crosses the border of two blocks.
struct RowSegment {
  uint32_t begin;
  uint32_t count;

  MK_HOST_DEVICE uint32_t end() const { return begin + count; }
  MK_HOST_DEVICE uint32_t num_units(uint32_t unit_rows) const {
    return count == 0 ? 0 : (end() - 1) / unit_rows - begin / unit_rows + 1;
  }
  MK_HOST_DEVICE uint32_t unit_begin(uint32_t unit, uint32_t unit_rows) const {
    const uint32_t row = (begin / unit_rows + unit) * unit_rows;
    return row > begin ? row : begin;
  }
  MK_HOST_DEVICE uint32_t unit_end(uint32_t unit, uint32_t unit_rows) const {
    const uint32_t row = (begin / unit_rows + unit + 1) * unit_rows;
    return row < end() ? row : end();
  }
  // The part of it in a block of the list.
  MK_HOST_DEVICE RowSegment in_block(uint32_t block) const {
    const uint32_t first = block * BLOCK_ROWS > begin ? block * BLOCK_ROWS : begin;
    const uint32_t last = (block + 1) * BLOCK_ROWS < end() ? (block + 1) * BLOCK_ROWS : end();
    return {first, last > first ? last - first : 0};
  }
};

// Deals out the units of up to MAX_LISTS lists in turn, as long as each has some.
struct Turns {
  static constexpr int MAX_LISTS = 32;
  int num_lists;
  int lists[MAX_LISTS];        // those with fewer units first
  uint32_t counts[MAX_LISTS];  // of their units

  MK_HOST_DEVICE void clear() { num_lists = 0; }
  // Of two lists as long as each other the one that was added first comes first.
  MK_HOST_DEVICE void add(int list, uint32_t count) {
    int place = num_lists++;
    for (; place > 0 && counts[place - 1] > count; --place) {
      lists[place] = lists[place - 1];
      counts[place] = counts[place - 1];
    }
    lists[place] = list;
    counts[place] = count;
  }
  // Whose unit the `turn`-th is, and its number there; false when all have been dealt out.
  MK_HOST_DEVICE bool at(uint32_t turn, int* list, uint32_t* unit) const {
    uint32_t dealt = 0;  // of each list still in play
    for (int first = 0; first < num_lists; ++first) {
      const uint32_t players = static_cast<uint32_t>(num_lists - first);
      const uint32_t rounds = counts[first] - dealt;
      if (turn < rounds * players) {
        const uint32_t round = turn / players;
        *list = lists[first + static_cast<int>(turn - round * players)];
        *unit = dealt + round;
        return true;
      }
      turn -= rounds * players;
      dealt = counts[first];
    }
    return false;
  }
};

// A power of two: about as many rows as make a unit of 32 KB, 32 at most, and no more than it takes for
// `num_warps` warps to have all `num_rows` rows at once.
MK_HOST_DEVICE constexpr int unit_rows_for(int64_t row_bytes, int64_t num_rows = INT64_MAX,
                                           int64_t num_warps = 1) {
  int rows = 1;
  while (rows < 32 && 2 * rows * row_bytes <= 32768 && rows * num_warps < num_rows) rows *= 2;
  return rows;
}

// The last of `count` prefix sums that is at most `value` beyond the first.
MK_HOST_DEVICE int find_interval(const uint32_t* begins, int count, uint32_t value) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (begins[middle] - begins[0] <= value) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace mk::moe
