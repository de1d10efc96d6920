// SPDX-License-Identifier: MIT
// Why a launch of a mixture-of-experts operator did not go on, as the executors record it, and its sentence.
#pragma once

#include <cstdint>
#include <string>

#include "schedule.h"

namespace mk::moe {

struct DataError {
  Verdict verdict;
  CountsHead counts;  // of the verdict's rank
  int32_t experts;
  int32_t topk;
};

std::string describe(const DataError& error, uint64_t epoch);

}  // namespace mk::moe
