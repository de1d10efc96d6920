// SPDX-License-Identifier: MIT
// The set-up messages of two ranks, carried by all: what only these two do may fail, and all stay in step.
#pragma once

#include <array>

#include "lib/bootstrap.h"

namespace perf {

// Every rank makes one for the same two ranks. The two are 0 and 1 to each other; they may exchange, and end
// with finish(). The others call finish() at once.
class PairExchange : public mk::Exchange {
 public:
  PairExchange(mk::Bootstrap& all, int low, int high) : all_(all), ranks_{low, high} {}

  int rank() const override { return all_.rank() == ranks_[0] ? 0 : 1; }
  int nranks() const override { return 2; }
  // MK_ERROR_ABORTED when the other has come to finish() instead. Both ranks' waits have deadlines of their
  // own: this one is longer, so that the job survives them.
  mk::Result<std::vector<mk::Bytes>> all_gather(std::span<const std::byte> mine, mk::Deadline,
                                                const char* what) override;

  // Returns on all ranks, when both have called it, what each of the two had to say.
  mk::Result<std::array<mk::Bytes, 2>> finish(std::span<const std::byte> outcome, bool gave_up);
  // The other one of the two waits in finish(), and for nothing else.
  bool peer_gave_up();

 private:
  enum class Stage : uint8_t { open, finished, gave_up };
  mk::Result<std::array<mk::Bytes, 2>> step(Stage stage, std::span<const std::byte> data, const char* what);

  mk::Bootstrap& all_;
  const std::array<int, 2> ranks_;
};

}  // namespace perf
