// SPDX-License-Identifier: MIT
// Mode WGRAD on GPUs: the order in which a tile takes the inner dimension, which is the gathered rows. A
// function of rank and shape alone, and with it the bits of the result.
#pragma once

#include "kernels/device/network_comm.h"
#include "kernels/device/rank_tiles.h"
#include "kernels/protocol.h"

namespace mk::allgather_gemm {

// One k-step: rows of one source.
struct WgradStep {
  int source;
  int row;  // the first, of the source's; below 0 those of the source before it
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

// This rank's rows first, which need not be waited for, then the others' in turn, from the next rank on, step
// by step: they arrive side by side. Every source has as many steps as one with `max_rows` rows; those before
// and beyond its own rows are of zeros, in X. Where dY is [k, m] its columns are loaded from multiples of 8 on,
// for TMA takes no others (an illegal instruction): a source's first step begins with up to 7 rows before its
// own.
struct WgradOrder {
  static constexpr int STEP_ROWS = 64;
  static constexpr int ALIGNMENT = 8;  // 16 bytes
  int rank;
  int nranks;
  int max_rows;
  int source_steps;
  bool aligned;

  MK_HOST_DEVICE static WgradOrder of(int64_t m, int rank, int nranks, bool aligned) {
    const int64_t max_rows = ceil_div(m, nranks);
    const int most_before = aligned && max_rows % ALIGNMENT != 0 ? ALIGNMENT - 1 : 0;
    return {rank, nranks, static_cast<int>(max_rows),
            static_cast<int>(ceil_div(max_rows + most_before, STEP_ROWS)), aligned};
  }
  MK_HOST_DEVICE int num_steps() const { return nranks * source_steps; }

  MK_HOST_DEVICE WgradStep at(int step) const {
    if (step < source_steps) return step_of(rank, step);
    const int others = step - source_steps;
    const int turn = others / (nranks - 1);
    const int source = rank + 1 + others - turn * (nranks - 1);
    return step_of(source < nranks ? source : source - nranks, turn);
  }

  // Between nodes: this rank's rows, then those of its node's other ranks in turn, then those of the other
  // nodes' ranks in turn, which come last. Steps take turns as rows of tiles do.
  NearFarTileOrder turns(int num_local) const { return {source_steps, num_local - 1, nranks - num_local}; }
  MK_HOST_DEVICE WgradStep at(int step, const NearFarTileOrder& turns, const RankOrder& ranks) const {
    TileWork row{};
    row.m_tile = step;
    const RankTile found = turns.place(row);
    return step_of(ranks.rank_at[found.position], found.index);
  }

 private:
  MK_HOST_DEVICE WgradStep step_of(int source, int turn) const {
    // As unsigned: modulo 2^32 the remainder is the same.
    const auto begin = static_cast<uint32_t>(source) * static_cast<uint32_t>(max_rows);
    return {source, turn * STEP_ROWS - (aligned ? static_cast<int>(begin % ALIGNMENT) : 0)};
  }
};

}  // namespace mk::allgather_gemm
