// SPDX-License-Identifier: MIT
#include "transport/loopback/adversary.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "../support/catch.h"

namespace mk::loopback {
namespace {

constexpr uint32_t kPutBytes = 1000;

PacketHeader piece_of(uint32_t put, uint32_t piece_offset) {
  return {PacketKind::piece, put, 0, 1, uint64_t{put} * kPutBytes, kPutBytes, piece_offset};
}

std::vector<std::byte> content(uint32_t put, uint32_t bytes) {
  return std::vector<std::byte>(bytes, static_cast<std::byte>(put + 1));
}

// What became of puts given to an adversary in two halves each.
struct Delivery {
  std::vector<uint32_t> signals;
  std::vector<uint64_t> offsets;  // of the pieces, as placed
  bool early = false;             // a signal came before a byte
};

Delivery deliver(uint64_t seed, uint32_t puts) {
  Adversary adversary(seed, 3);
  std::vector<std::byte> memory(puts * kPutBytes);
  Delivery delivery;
  const Adversary::Place place = [&](const PacketHeader&, uint64_t offset, std::span<const std::byte> bytes) {
    delivery.offsets.push_back(offset);
    std::memcpy(memory.data() + offset, bytes.data(), bytes.size());
    return Status();
  };
  const auto step = [&] {
    std::vector<uint32_t> signals;
    std::vector<Adversary::Failure> failures;
    adversary.step(place, signals, failures);
    CHECK(failures.empty());
    for (const uint32_t put : signals) {
      const auto first = memory.begin() + put * kPutBytes;
      const auto is_there = [&](std::byte b) { return b == static_cast<std::byte>(put + 1); };
      if (!std::all_of(first, first + kPutBytes, is_there)) delivery.early = true;
      delivery.signals.push_back(put);
    }
  };
  for (uint32_t put = 0; put < puts; ++put) {
    adversary.hold(1, piece_of(put, 0), content(put, 400));
    if (put % 4 == 0) step();
    adversary.hold(1, piece_of(put, 400), content(put, 600));
  }
  for (int n = 0; n < 1000 && !adversary.idle(); ++n) step();
  CHECK(adversary.idle());
  return delivery;
}

}  // namespace

TEST_CASE("the adversary reorders pieces and signals and keeps the weak promise", "[loopback]") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const Delivery delivery = deliver(seed, 64);
    CHECK_FALSE(delivery.early);
    CHECK(delivery.signals.size() == 64);
    CHECK(std::set<uint32_t>(delivery.signals.begin(), delivery.signals.end()).size() == 64);
    CHECK_FALSE(std::is_sorted(delivery.signals.begin(), delivery.signals.end()));
    CHECK_FALSE(std::is_sorted(delivery.offsets.begin(), delivery.offsets.end()));
    CHECK(delivery.offsets.size() > 128);
  }
}

TEST_CASE("an adversary's seed decides what it does", "[loopback]") {
  CHECK(deliver(5, 64).offsets == deliver(5, 64).offsets);
  CHECK(deliver(5, 64).signals == deliver(5, 64).signals);
  CHECK(deliver(5, 64).signals != deliver(6, 64).signals);
}

TEST_CASE("an adversary holds a bounded amount, forgets the dead, and reports what cannot be placed",
          "[loopback]") {
  Adversary adversary(1, 0);
  uint32_t held = 0;
  for (; !adversary.full() && held < 10000; ++held)
    adversary.hold(1, piece_of(held, 0), content(held, kPutBytes));
  CHECK(held < 10000);
  adversary.drop(1);
  CHECK(adversary.idle());
  CHECK_FALSE(adversary.full());

  adversary.hold(2, piece_of(0, 0), content(0, kPutBytes));
  const Adversary::Place refuse = [](const PacketHeader&, uint64_t, std::span<const std::byte>) {
    return Status(MK_ERROR_INTERNAL, "the region is gone");
  };
  std::vector<uint32_t> signals;
  std::vector<Adversary::Failure> failures;
  for (int n = 0; n < 100 && failures.empty(); ++n) adversary.step(refuse, signals, failures);
  REQUIRE_FALSE(failures.empty());
  CHECK(failures[0].peer == 2);
}

}  // namespace mk::loopback
