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
  // 1: the region is in a GPU's memory, and key and base are those of the rank's landing area, where each peer
  // has kStagesPerPeer slots of kStageBytes.
  uint64_t staged;
};
static_assert(sizeof(RegionKey) == 24);

inline constexpr uint32_t kStagesPerPeer = 8;
inline constexpr uint32_t kStageBytes = 128 << 10;

inline constexpr uint32_t kMessageMagic = 0x4f4b4d31;  // "1MKO"
inline constexpr uint32_t kWordsPerMessage = 56;

enum class MessageKind : uint16_t {
  hello = 1,    // from the higher rank of a pair to the lower
  answer = 2,   // the lower rank's
  signals = 3,  // counters to add one to: the bytes of their puts are in place
  bye = 4,      // the endpoint will close, and that is no failure
  landed = 5,   // a piece of a put is in a slot of the landing area: Landed
  placed = 6,   // the piece in that slot has been copied to its place, and the slot is free: its number
};

// The words of a message of that kind.
struct Landed {
  uint32_t slot;
  uint32_t region;
  uint32_t generation;
  uint32_t bytes;
  uint32_t offset_low;  // in the region
  uint32_t offset_high;
};
inline constexpr uint32_t kLandedWords = sizeof(Landed) / 4;
static_assert(kLandedWords == 6);

struct Message {
  uint32_t magic;
  MessageKind kind;
  uint16_t sender;  // its rank
  Token token;      // of the receiver
  uint32_t count;   // of words
  uint32_t words[kWordsPerMessage];
};
static_assert(sizeof(Message) == 28 + 4 * kWordsPerMessage && offsetof(Message, count) == 24);

// Without the words that are not there.
inline constexpr size_t message_bytes(uint32_t count) { return offsetof(Message, words) + 4 * size_t{count}; }

}  // namespace mk::ofi
