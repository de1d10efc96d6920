// SPDX-License-Identifier: MIT
// Mode WGRAD on GPUs: the order in which a tile takes the inner dimension, which is the gathered rows, and how
// it waits for them. Functions of rank and shape alone, and with them the bits of the result.
#pragma once

#include "kernels/protocol.h"

namespace mk::allgather_gemm {

// One k-step: rows of one source.
struct WgradStep {
  int position;  // of the source, in the order in which this rank turns to them: 0 is itself
  int turn;      // of the source's
};

// Where X is read: in slices of max_rows rows, of which what a source does not have is read as zero, and not as
// what lies there. Three maps: this rank's own rows; the receive area's sources with all rows; and the one
// source that may have fewer, yet some.
enum class WgradMap { own, whole, last };
struct WgradPlace {
  WgradMap map;
  int slice;
};
MK_HOST_DEVICE WgradPlace wgrad_place(int source, int rank, int rows, int max_rows) {
  if (rows > 0 && source == rank) return {WgradMap::own, 0};
  if (rows > 0 && rows < max_rows) return {WgradMap::last, 0};
  return {WgradMap::whole, source};  // without rows it lies behind the last slice
}

// This rank's rows first, which need not be waited for, then those of the `num_near` next ranks in turn, step
// by step: they arrive side by side. Then, between nodes, those of the `num_far` ranks behind them in turn,
// which come last. Every source has as many steps as one with `max_rows` rows; those before and beyond its own
// rows are of zeros, in X. Where dY is [k, m] its columns are loaded from multiples of 8 on, for TMA takes no
// others (an illegal instruction): a source's first step begins with up to 7 rows before its own.
//
// Inside a node, of ranks that have less than a step's rows each, steps run across their borders (`merged`):
// from the first row of all to the last, with this rank's own as gathered.
struct WgradOrder {
  static constexpr int STEP_ROWS = 64;
  static constexpr int ALIGNMENT = 8;  // 16 bytes
  int num_near;
  int num_far;
  int max_rows;
  int source_steps;
  bool aligned;
  bool merged = false;

  MK_HOST_DEVICE static bool merges(int64_t m, int nranks) {
    return nranks > 1 && m > 0 && ceil_div(m, nranks) < STEP_ROWS;
  }
  // One source, which has all rows.
  MK_HOST_DEVICE static WgradOrder of_merged(int64_t m) {
    return {0, 0, static_cast<int>(m), static_cast<int>(ceil_div(m, STEP_ROWS)), false, true};
  }
  MK_HOST_DEVICE static WgradOrder of(int64_t m, int num_near, int num_far, bool aligned) {
    const int64_t max_rows = ceil_div(m, 1 + num_near + num_far);
    const int most_before = aligned && max_rows % ALIGNMENT != 0 ? ALIGNMENT - 1 : 0;
    return {num_near, num_far, static_cast<int>(max_rows),
            static_cast<int>(ceil_div(max_rows + most_before, STEP_ROWS)), aligned};
  }
  MK_HOST_DEVICE int num_steps() const { return (1 + num_near + num_far) * source_steps; }
  // The first step that has to be waited for.
  MK_HOST_DEVICE int first_wait() const { return merged ? 0 : source_steps; }
  // Behind the steps of this rank, and of the near ones.
  MK_HOST_DEVICE int end_of_own() const { return source_steps; }
  MK_HOST_DEVICE int end_of_near() const { return (1 + num_near) * source_steps; }

  MK_HOST_DEVICE WgradStep at(int step) const {
    if (step < end_of_own()) return {0, step};
    const bool is_near = step < end_of_near();
    const int others = step - (is_near ? end_of_own() : end_of_near());
    const int count = is_near ? num_near : num_far;
    const int turn = count > 0 ? others / count : 0;  // without rows there is no step
    return {(is_near ? 1 : 1 + num_near) + others - turn * count, turn};
  }
  // The one after another: a producer has no time for divisions.
  MK_HOST_DEVICE WgradStep after(const WgradStep& step) const {
    const bool is_near = step.position <= num_near;
    const int first = step.position == 0 ? 0 : is_near ? 1 : 1 + num_near;
    const int last = step.position == 0 ? 0 : is_near ? num_near : num_near + num_far;
    if (step.position < last) return {step.position + 1, step.turn};
    if (step.turn + 1 < source_steps) return {first, step.turn + 1};
    return {last + 1, 0};
  }

  // A step's first row, of the source's; below 0 those of the source before it.
  MK_HOST_DEVICE int first_row(int source, int turn) const {
    // As unsigned: modulo 2^32 the remainder is the same.
    const auto begin = static_cast<uint32_t>(source) * static_cast<uint32_t>(max_rows);
    return turn * STEP_ROWS - (aligned ? static_cast<int>(begin % ALIGNMENT) : 0);
  }
};

// Other ranks' chunks, in the order in which a tile takes them, in few groups: it waits for one after the
// other. A group has so many chunks of every near rank, or of every far one.
class ChunkGroups {
 public:
  static constexpr int NUM_GROUPS = 8;
  // Chunks [begin, end) of the ranks at [position, position + count); none: begin >= end.
  struct Range {
    int position;
    int count;
    int begin;
    int end;
  };
  struct Needed {
    int group;
    int end_step;  // behind the steps that need no later group
  };

  ChunkGroups() = default;
  // Chunks of `chunk_rows` rows, a multiple of a step's.
  ChunkGroups(const WgradOrder& order, int max_chunks, int chunk_rows)
      : num_near_groups_(order.num_far > 0 ? NUM_GROUPS / 2 : NUM_GROUPS),
        max_chunks_(max_chunks),
        chunks_(static_cast<int>(ceil_div(max_chunks, num_near_groups_))),
        turns_(chunks_ * (chunk_rows / WgradOrder::STEP_ROWS)) {}
  // Of steps that run across ranks' borders: one group, of all ranks' only chunks.
  static ChunkGroups of_merged(int nranks) {
    ChunkGroups groups;
    groups.max_chunks_ = 1;
    groups.num_merged_ = nranks;
    return groups;
  }

  MK_HOST_DEVICE Range range(const WgradOrder& order, int group) const {
    if (order.merged) return {0, num_merged_, group, max_chunks_};
    const bool is_near = group < num_near_groups_;
    const int begin = (is_near ? group : group - num_near_groups_) * chunks_;
    const int end = begin + chunks_ < max_chunks_ ? begin + chunks_ : max_chunks_;
    return is_near ? Range{1, order.num_near, begin, end}
                   : Range{1 + order.num_near, order.num_far, begin, end};
  }

  // What a step that is not this rank's own needs: this group, and those before it.
  MK_HOST_DEVICE Needed needed(const WgradOrder& order, const WgradStep& step) const {
    if (order.merged) return {0, order.num_steps()};
    const bool is_near = step.position <= order.num_near;
    const int count = is_near ? order.num_near : order.num_far;
    const int first_step = is_near ? order.end_of_own() : order.end_of_near();
    // Of up to 7 rows that a turn begins earlier it needs no later chunk; behind the last one it may be one
    // more.
    const int last = num_near_groups_ - 1;
    const int group = step.turn / turns_ < last ? step.turn / turns_ : last;
    const int end_turn = group == last ? order.source_steps : (group + 1) * turns_;
    const int end_step = first_step + (end_turn < order.source_steps ? end_turn : order.source_steps) * count;
    return {is_near ? group : num_near_groups_ + group, end_step};
  }

 private:
  int num_near_groups_ = NUM_GROUPS;  // and as many far ones, if there are any
  int max_chunks_ = 0;
  int chunks_ = 1;      // of a rank in a group
  int turns_ = 1;       // in which they are taken
  int num_merged_ = 0;  // ranks
};

}  // namespace mk::allgather_gemm
