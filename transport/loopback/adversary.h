// SPDX-License-Identifier: MIT
// The worst delivery that the weak promise allows, for tests: what arrives is held back, cut into pieces,
// placed in random order across puts and peers, and signalled late. Seeded; bounded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <random>
#include <span>
#include <vector>

#include "../../lib/status.h"
#include "../command.h"
#include "wire.h"

namespace mk::loopback {

class Adversary {
 public:
  // Copies bytes to their place; an error ends the link to the peer.
  using Place = std::function<Status(const PacketHeader&, uint64_t region_offset, std::span<const std::byte>)>;

  Adversary(uint64_t seed, int rank);

  // True when it holds so much that nothing more should be read from the channels.
  bool full() const { return held_bytes_ >= kMaxHeldBytes || held_.size() >= kMaxHeldPuts; }
  bool idle() const { return held_.empty(); }
  // Takes a checked packet of a peer; packets of one put come in order, puts of one peer one after the other.
  void hold(int peer, const PacketHeader& header, std::span<const std::byte> payload);
  // Forgets what came from a peer.
  void drop(int peer);
  // Places some pieces, then appends the signals of some puts whose bytes are all in place. Every piece and
  // signal has an even chance a step.
  struct Failure {
    int peer;
    Status status;
  };
  void step(const Place& place, std::vector<uint32_t>& signals, std::vector<Failure>& failures);

  bool coin() { return (random_() & 1) != 0; }
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>(random_() % bound); }
  std::mt19937_64& random() { return random_; }

 private:
  static constexpr size_t kMaxHeldBytes = 1 << 20;
  static constexpr size_t kMaxHeldPuts = 256;

  struct Piece {
    uint64_t region_offset;
    std::vector<std::byte> bytes;
  };
  struct HeldPut {
    int peer;
    PacketHeader header;
    uint32_t received = 0;
    bool delivered = false;
    std::vector<Piece> pieces;  // received, not placed
  };

  std::mt19937_64 random_;
  size_t held_bytes_ = 0;
  std::list<HeldPut> held_;  // addresses stay while others come and go
};

}  // namespace mk::loopback
