// SPDX-License-Identifier: MIT
#include "adversary.h"

#include <algorithm>

namespace mk::loopback {

Adversary::Adversary(uint64_t seed, int rank) {
  std::seed_seq sequence{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                         static_cast<uint32_t>(rank)};
  random_.seed(sequence);
}

void Adversary::hold(int peer, const PacketHeader& header, std::span<const std::byte> payload) {
  const auto unfinished = [&](const HeldPut& put) {
    return put.peer == peer && put.received < put.header.put_bytes;
  };
  auto put = std::find_if(held_.begin(), held_.end(), unfinished);
  if (put == held_.end()) {
    held_.push_back({peer, header, 0, false, {}});
    put = std::prev(held_.end());
  }
  put->received += static_cast<uint32_t>(payload.size());
  held_bytes_ += payload.size();
  uint64_t offset = header.offset + header.piece_offset;
  while (!payload.empty()) {
    const size_t part = std::min<size_t>(payload.size(), 1 + below(static_cast<uint32_t>(payload.size())));
    put->pieces.push_back({offset, {payload.begin(), payload.begin() + static_cast<std::ptrdiff_t>(part)}});
    payload = payload.subspan(part);
    offset += part;
  }
}

void Adversary::drop(int peer) {
  std::erase_if(held_, [&](const HeldPut& put) {
    if (put.peer != peer) return false;
    for (const Piece& piece : put.pieces) held_bytes_ -= piece.bytes.size();
    return true;
  });
}

void Adversary::step(const Place& place, std::vector<uint32_t>& signals, std::vector<Failure>& failures) {
  std::vector<HeldPut*> order;
  for (HeldPut& put : held_) order.push_back(&put);
  std::shuffle(order.begin(), order.end(), random_);
  for (HeldPut* put : order) {
    std::shuffle(put->pieces.begin(), put->pieces.end(), random_);
    for (size_t left = put->pieces.size(); left > 0; --left) {
      if (coin()) continue;
      Piece& piece = put->pieces[left - 1];
      const Status status = place(put->header, piece.region_offset, piece.bytes);
      if (!status.ok()) failures.push_back({put->peer, status});
      held_bytes_ -= piece.bytes.size();
      std::swap(piece, put->pieces.back());
      put->pieces.pop_back();
    }
  }
  for (HeldPut* put : order) {
    if (put->received < put->header.put_bytes || !put->pieces.empty() || coin()) continue;
    if (put->header.signal != kNoSignal) signals.push_back(put->header.signal);
    put->delivered = true;
  }
  std::erase_if(held_, [](const HeldPut& put) { return put.delivered; });
}

}  // namespace mk::loopback
