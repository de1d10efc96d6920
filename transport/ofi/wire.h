// SPDX-License-Identifier: MIT
// What ranks tell each other: cards and keys through the exchange of the bootstrap, messages through the
// provider. Integers are little-endian, as is every machine that this library runs on.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace mk::ofi {

static_assert(std::endian::native == std::endian::little);

using Token = std::array<uint8_t, 16>;

// A rank's card, followed by its address in the provider's form.
struct Card {
  Token token;  // who writes to this rank proves with it that it took part in the exchange
  char provider[48];
};
static_assert(sizeof(Card) == 64);
inline constexpr size_t kMaxAddressBytes = 256;

// What peers need to write to a region.
struct RegionKey {
  uint64_t key;
  uint64_t base;  // what its first byte is called in a remote write
};
static_assert(sizeof(RegionKey) == 16);

inline constexpr uint32_t kMessageMagic = 0x4f4b4d31;  // "1MKO"
inline constexpr uint32_t kSignalsPerMessage = 56;

enum class MessageKind : uint16_t {
  hello = 1,    // from the higher rank of a pair to the lower
  answer = 2,   // the lower rank's
  signals = 3,  // counters to add one to: the bytes of their puts are in place
  bye = 4,      // the endpoint will close, and that is no failure
};

struct Message {
  uint32_t magic;
  MessageKind kind;
  uint16_t sender;  // its rank
  Token token;      // of the receiver
  uint32_t count;   // of signals
  uint32_t signals[kSignalsPerMessage];
};
static_assert(sizeof(Message) == 28 + 4 * kSignalsPerMessage && offsetof(Message, count) == 24);

// Without the signals that are not there.
inline constexpr size_t message_bytes(uint32_t count) { return offsetof(Message, signals) + 4 * size_t{count}; }

}  // namespace mk::ofi
