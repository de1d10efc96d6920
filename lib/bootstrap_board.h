// SPDX-License-Identifier: MIT
// The bookkeeping of the ring's collectives: which rank's block has arrived for which step. No sockets, no
// locks.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "bootstrap_frame.h"

namespace mk {

class BlockBoard {
 public:
  BlockBoard(int rank, int nranks);

  // Enters the next collective with this rank's block, and returns its sequence number.
  uint64_t enter(FrameKind kind, std::shared_ptr<const Bytes> mine);
  // A block from another rank. A rank that has not entered a collective can hear of that one only; one that is
  // inside, of that one and the next, because nobody leaves a collective before everybody has entered it.
  // Anything else, and a block given twice, is a violation: MK_ERROR_NETWORK naming the origin.
  Status arrive(int origin, uint64_t sequence, FrameKind kind, std::shared_ptr<const Bytes> block);

  bool entered() const { return entered_; }
  // Every rank's block of the collective entered is here.
  bool complete() const { return entered_ && steps_[0].count == nranks_; }
  // Ranks whose block has not arrived, ascending.
  std::vector<int> missing() const;
  // A rank that is in another kind of step (all_gather against leave), if any.
  std::optional<int> odd_one() const;
  // The blocks of the complete collective, by rank; ends it.
  std::vector<std::shared_ptr<const Bytes>> finish();

  // What `peer` has given to the collective that this rank has not entered yet.
  std::shared_ptr<const Bytes> peek(int peer) const;

 private:
  struct Step {
    std::vector<std::shared_ptr<const Bytes>> blocks;
    std::vector<FrameKind> kinds;
    int count = 0;
  };

  Step empty_step() const;
  bool put(Step& step, int origin, FrameKind kind, std::shared_ptr<const Bytes> block);

  int rank_;
  int nranks_;
  uint64_t sequence_ = 0;  // of steps_[0]
  bool entered_ = false;
  Step steps_[2];
};

}  // namespace mk
