// SPDX-License-Identifier: MIT
#include "bootstrap_board.h"

namespace mk {

BlockBoard::BlockBoard(int rank, int nranks)
    : rank_(rank), nranks_(nranks), steps_{empty_step(), empty_step()} {}

BlockBoard::Step BlockBoard::empty_step() const {
  Step step;
  step.blocks.resize(static_cast<size_t>(nranks_));
  step.kinds.resize(static_cast<size_t>(nranks_), FrameKind::block);
  return step;
}

bool BlockBoard::put(Step& step, int origin, FrameKind kind, std::shared_ptr<const Bytes> block) {
  const auto slot = static_cast<size_t>(origin);
  if (step.blocks[slot]) return false;
  step.blocks[slot] = std::move(block);
  step.kinds[slot] = kind;
  ++step.count;
  return true;
}

uint64_t BlockBoard::enter(FrameKind kind, std::shared_ptr<const Bytes> mine) {
  entered_ = true;
  put(steps_[0], rank_, kind, std::move(mine));
  return sequence_;
}

Status BlockBoard::arrive(int origin, uint64_t sequence, FrameKind kind, std::shared_ptr<const Bytes> block) {
  const uint64_t newest = sequence_ + (entered_ ? 1 : 0);
  if (sequence < sequence_ || sequence > newest) {
    return Status(MK_ERROR_NETWORK,
                  format("rank %d sent a block of step %llu, expected %llu to %llu", origin,
                         static_cast<unsigned long long>(sequence), static_cast<unsigned long long>(sequence_),
                         static_cast<unsigned long long>(newest)));
  }
  if (origin == rank_ || !put(steps_[sequence - sequence_], origin, kind, std::move(block))) {
    return Status(MK_ERROR_NETWORK, format("rank %d sent its block of step %llu twice", origin,
                                           static_cast<unsigned long long>(sequence)));
  }
  return Status();
}

std::vector<int> BlockBoard::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < nranks_; ++rank) {
    if (!steps_[0].blocks[static_cast<size_t>(rank)]) ranks.push_back(rank);
  }
  return ranks;
}

std::optional<int> BlockBoard::odd_one() const {
  const Step& step = steps_[0];
  for (int rank = 0; rank < nranks_; ++rank) {
    const auto slot = static_cast<size_t>(rank);
    if (step.blocks[slot] && step.kinds[slot] != step.kinds[static_cast<size_t>(rank_)]) return rank;
  }
  return {};
}

std::vector<std::shared_ptr<const Bytes>> BlockBoard::finish() {
  std::vector<std::shared_ptr<const Bytes>> blocks = std::move(steps_[0].blocks);
  steps_[0] = std::move(steps_[1]);
  steps_[1] = empty_step();
  ++sequence_;
  entered_ = false;
  return blocks;
}

std::shared_ptr<const Bytes> BlockBoard::peek(int peer) const {
  if (peer < 0 || peer >= nranks_ || peer == rank_) return nullptr;
  return steps_[entered_ ? 1 : 0].blocks[static_cast<size_t>(peer)];
}

}  // namespace mk
