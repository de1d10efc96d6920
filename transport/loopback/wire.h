// SPDX-License-Identifier: MIT
// What travels on a loopback channel: packets of a SOCK_SEQPACKET socket, in order, each a header and, in a
// piece, its payload. Both ends are processes of one host, so integers are in its byte order.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mk::loopback {

inline constexpr uint32_t kHelloMagic = 0x4c4b4d31;  // "1MKL"
inline constexpr size_t kTokenBytes = 16;

// The first packet in each direction, proof that the sender took part in the exchange: the connecting rank
// sends the token of the rank it connects to, the accepting rank answers with that of the rank it has accepted.
struct Hello {
  uint32_t magic;
  uint32_t rank;  // of the sender
  uint8_t token[kTokenBytes];
};
static_assert(sizeof(Hello) == 24 && offsetof(Hello, token) == 8);

enum class PacketKind : uint32_t {
  piece = 1,  // the next bytes of a put; a put of no bytes is one empty piece
  bye = 2,    // the channel will close, and that is no failure
};

// Pieces of a put follow one another, and the next put begins when the last byte has been sent.
struct PacketHeader {
  PacketKind kind;
  uint32_t signal;
  uint32_t region;
  uint32_t generation;
  uint64_t offset;        // of the put in the region
  uint32_t put_bytes;     // of the whole put
  uint32_t piece_offset;  // of this piece in the put
};
static_assert(sizeof(PacketHeader) == 32 && offsetof(PacketHeader, offset) == 16);

inline constexpr size_t kMaxPieceBytes = 1 << 16;

}  // namespace mk::loopback
