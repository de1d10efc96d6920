// SPDX-License-Identifier: MIT
// The operators that faults are tried on: a row each.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mkernel.h"

namespace mk::test {

// One rank's part of one call whose result is known.
class CheckedCall {
 public:
  virtual ~CheckedCall() = default;
  virtual mk_status_t launch(mk_comm_t comm) = 0;
  // After it has completed: "" when the result is right.
  virtual std::string wrong() = 0;
};

struct FaultOperator {
  const char* name;
  // Sizes follow from the seed, which is the same on every rank; small, so that a call takes about a
  // millisecond.
  std::unique_ptr<CheckedCall> (*make)(int nranks, int rank, uint64_t seed);
};

const std::vector<FaultOperator>& fault_operators();

}  // namespace mk::test
