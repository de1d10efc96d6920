// SPDX-License-Identifier: MIT
// How the rows that come from other nodes are cut up to be forwarded inside this one: as their owners push
// their own, those of several ranks in turn.
#pragma once

#include "kernels/ops/allgather_gemm/push_units.h"

namespace mk::allgather_gemm {

struct ForwardUnit {
  int relayed;  // which of the ranks that this one relays for
  PushUnit unit;
};

class ForwardUnits {
 public:
  // `units`: of a rank with the most rows.
  MK_HOST_DEVICE ForwardUnits(const PushUnits& units, int num_relayed)
      : units_(units), num_relayed_(num_relayed) {}

  MK_HOST_DEVICE int size() const { return units_.size() * num_relayed_; }

  // Indices are asked for in rising order. rows_of(relayed): rows of that rank.
  template <class RowsOf>
  MK_HOST_DEVICE ForwardUnit at(int index, RowsOf&& rows_of) {
    const int number = index / num_relayed_;
    ForwardUnit found = {index - number * num_relayed_, units_.at(number)};
    const int rows = rows_of(found.relayed) - found.unit.row;
    found.unit.num_rows = PushUnits::max_of(0, PushUnits::min_of(found.unit.num_rows, rows));
    return found;
  }

 private:
  PushUnits units_;
  const int num_relayed_;
};

}  // namespace mk::allgather_gemm
