// SPDX-License-Identifier: MIT
// Mode WGRAD on GPUs: the order in which a tile takes the inner dimension, which is the gathered rows. A
// function of rank and shape alone, and with it the bits of the result.
#pragma once

#include "kernels/protocol.h"

namespace mk::allgather_gemm {

// One k-step: rows of one source.
struct WgradStep {
  int source;
  int row;  // the first, of the source's
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
// by step: they arrive side by side. Every source has as many steps as one with `max_rows` rows; those beyond
// its own rows are of zeros.
struct WgradOrder {
  static constexpr int STEP_ROWS = 64;
  int rank;
  int nranks;
  int source_steps;

  MK_HOST_DEVICE static WgradOrder of(int64_t m, int rank, int nranks) {
    return {rank, nranks, static_cast<int>(ceil_div(ceil_div(m, nranks), STEP_ROWS))};
  }
  MK_HOST_DEVICE int num_steps() const { return nranks * source_steps; }

  MK_HOST_DEVICE WgradStep at(int step) const {
    if (step < source_steps) return {rank, step * STEP_ROWS};
    const int others = step - source_steps;
    const int turn = others / (nranks - 1);
    const int source = rank + 1 + others - turn * (nranks - 1);
    return {source < nranks ? source : source - nranks, turn * STEP_ROWS};
  }
};

}  // namespace mk::allgather_gemm
