// SPDX-License-Identifier: MIT
// A seeded schedule of puts between all ranks of different nodes, played and checked.
#pragma once

#include <cstdint>
#include <string>

#include "harness.h"

namespace mk::test {

struct PutSchedule {
  uint64_t seed = 1;
  int rounds = 2;
  int puts_per_pair = 32;
  uint32_t largest_bytes = 3u << 20;
};

// The body of one rank: registers regions, posts its puts of each round in batches, overwrites the sources of a
// batch as soon as it is locally complete, and checks, whenever a signal is seen, all bytes of the put that
// carried it; then the gaps between the puts, the counters, and that every signal came exactly once.
std::string play(Rank& rank, const PutSchedule& schedule);

}  // namespace mk::test
