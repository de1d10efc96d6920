// SPDX-License-Identifier: MIT
// What the bootstrap's connections carry, as bytes: frames and the messages in them. Pure functions: nothing
// here reads a socket or a clock, and every input, however malformed, has an answer.
//
// A frame: magic (4 bytes), protocol version (1), kind (1), zero (2), payload length (4), payload, and, for
// every kind after the handshake, an HMAC-SHA-256 tag (32). All integers are little-endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "authentication.h"
#include "exchange.h"
#include "socket.h"

namespace mk {

enum class FrameKind : uint8_t {
  // Handshake, not tagged.
  hello = 1,      // client to server: who it is, for whom, its nonce
  challenge = 2,  // server to client: its nonce and its proof
  proof = 3,      // client to server: its proof
  // Between a rank and the root.
  check_in = 16,
  verdict = 17,
  assignment = 18,
  // On the ring.
  welcome = 32,  // first frame of the accepting end
  heartbeat = 33,
  block = 34,
  leave = 35,
  news = 36,
  bye = 37,  // last frame of an orderly close
};

inline constexpr size_t kFrameHeaderBytes = 12;
inline constexpr size_t kMaxTextBytes = 2048;
inline constexpr size_t kMaxConfigBytes = 8192;
inline constexpr size_t kMaxBuildIdBytes = 64;
inline constexpr int kMaxRanks = 1 << 16;
// Payload limits by what the other end may be entitled to send.
inline constexpr size_t kMaxHandshakePayload = 128;
inline constexpr size_t kMaxRootPayload = 16384;
inline constexpr size_t kBlockPrefixBytes = 12;
inline constexpr size_t kMaxRingPayload = Exchange::kMaxBlockBytes + kBlockPrefixBytes;

bool is_tagged(FrameKind kind);

struct FrameView {
  FrameKind kind;
  std::span<const std::byte> header;
  std::span<const std::byte> payload;
  std::span<const std::byte> tag;  // empty for the handshake
  size_t size;                     // bytes of the whole frame
};

struct FrameParse {
  enum class State : uint8_t { incomplete, complete, invalid } state = State::incomplete;
  size_t wanted = kFrameHeaderBytes;  // incomplete: bytes in all before another try makes sense
  const char* why = "";               // invalid
  FrameView frame{};                  // complete; points into the input
};

// Looks for one frame at the start of `input`; a payload over `max_payload` is invalid, as is an unknown kind.
FrameParse parse_frame(std::span<const std::byte> input, size_t max_payload);
void append_frame_header(Bytes& out, FrameKind kind, size_t payload_bytes);

enum class Purpose : uint8_t { root = 1, ring = 2 };

struct Hello {
  Purpose purpose = Purpose::root;
  uint64_t job = 0;
  uint32_t from = 0;  // rank of the client
  uint32_t to = 0;    // rank of the server; 0 for the root
  Nonce nonce{};
};

struct Challenge {
  Nonce nonce{};
  Tag proof{};
};

struct CheckIn {
  uint32_t rank = 0;
  uint32_t nranks = 0;
  uint32_t abi_version = 0;
  uint32_t timeout_ms = 0;  // what the caller of join() gave
  uint32_t left_ms = 0;     // what is left of it
  SocketAddress address;    // where it listens for its ring predecessor
  std::string build_id;
  std::string config;
};

struct Verdict {
  uint32_t status = 0;
  std::string sentence;
};

struct Assignment {
  uint32_t predecessor = 0;
  SocketAddress successor;
};

struct BlockPrefix {
  uint64_t sequence = 0;
  uint32_t origin = 0;
};

enum class Fate : uint8_t {
  died = 1,      // its connection ended
  aborted = 2,   // it said so
  violated = 3,  // it broke the protocol
  silent = 4     // its connection stands, but nothing comes: stopped, or cut off
};

struct News {
  Fate fate = Fate::died;
  uint32_t subject = 0;
  uint32_t reporter = 0;
  std::string why;
};

Bytes encode(const Hello& message);
Bytes encode(const Challenge& message);
Bytes encode(const CheckIn& message);
Bytes encode(const Verdict& message);
Bytes encode(const Assignment& message);
Bytes encode(const BlockPrefix& message);
Bytes encode(const News& message);

// Nothing when the payload is not exactly one message with fields in range.
std::optional<Hello> decode_hello(std::span<const std::byte> payload);
std::optional<Challenge> decode_challenge(std::span<const std::byte> payload);
std::optional<Tag> decode_proof(std::span<const std::byte> payload);
std::optional<CheckIn> decode_check_in(std::span<const std::byte> payload);
std::optional<Verdict> decode_verdict(std::span<const std::byte> payload);
std::optional<Assignment> decode_assignment(std::span<const std::byte> payload);
// The prefix; the block's bytes follow it.
std::optional<BlockPrefix> decode_block_prefix(std::span<const std::byte> payload);
std::optional<News> decode_news(std::span<const std::byte> payload);

// `text` cut to `limit` bytes, with bytes that are not printable ASCII replaced: fit for a sentence.
std::string printable(std::string_view text, size_t limit);

}  // namespace mk
