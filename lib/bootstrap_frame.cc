// SPDX-License-Identifier: MIT
#include "bootstrap_frame.h"

#include <algorithm>

#include "wire.h"

namespace mk {
namespace {

constexpr uint32_t kFrameMagic = 0x42524b4d;  // "MKRB"
constexpr uint8_t kProtocolVersion = 1;

bool is_known(uint8_t kind) {
  switch (static_cast<FrameKind>(kind)) {
    case FrameKind::hello:
    case FrameKind::challenge:
    case FrameKind::proof:
    case FrameKind::check_in:
    case FrameKind::verdict:
    case FrameKind::assignment:
    case FrameKind::welcome:
    case FrameKind::heartbeat:
    case FrameKind::block:
    case FrameKind::leave:
    case FrameKind::news:
    case FrameKind::bye:
      return true;
  }
  return false;
}

FrameParse invalid(const char* why) {
  FrameParse parse;
  parse.state = FrameParse::State::invalid;
  parse.why = why;
  return parse;
}

void write_address(WireWriter& out, const SocketAddress& address) {
  out.integer(address.family).integer(address.port).raw(std::as_bytes(std::span(address.bytes)));
}

SocketAddress read_address(WireReader& in) {
  SocketAddress address;
  address.family = in.integer<uint8_t>();
  address.port = in.integer<uint16_t>();
  in.array(address.bytes);
  return address;
}

bool is_rank(uint32_t value) { return value < static_cast<uint32_t>(kMaxRanks); }

}  // namespace

bool is_tagged(FrameKind kind) { return kind >= FrameKind::check_in; }

FrameParse parse_frame(std::span<const std::byte> input, size_t max_payload) {
  // The magic is looked at as soon as its first byte is here: whoever speaks another protocol goes at once.
  for (size_t i = 0; i < std::min<size_t>(input.size(), 4); ++i) {
    if (std::to_integer<uint32_t>(input[i]) != (kFrameMagic >> (8 * i) & 0xff))
      return invalid("not this library's protocol");
  }
  FrameParse parse;
  if (input.size() < kFrameHeaderBytes) return parse;
  WireReader in(input.first(kFrameHeaderBytes));
  in.integer<uint32_t>();
  const auto version = in.integer<uint8_t>();
  const auto kind = in.integer<uint8_t>();
  const auto reserved = in.integer<uint16_t>();
  const size_t length = in.integer<uint32_t>();
  if (version != kProtocolVersion) return invalid("another version of the bootstrap protocol");
  if (reserved != 0 || !is_known(kind)) return invalid("an unknown kind of frame");
  if (length > max_payload) return invalid("a frame over the size allowed");
  FrameView& frame = parse.frame;
  frame.kind = static_cast<FrameKind>(kind);
  const size_t tag_bytes = is_tagged(frame.kind) ? sizeof(Tag) : 0;
  frame.size = parse.wanted = kFrameHeaderBytes + length + tag_bytes;
  if (input.size() < frame.size) return parse;
  parse.state = FrameParse::State::complete;
  frame.header = input.first(kFrameHeaderBytes);
  frame.payload = input.subspan(kFrameHeaderBytes, length);
  frame.tag = input.subspan(kFrameHeaderBytes + length, tag_bytes);
  return parse;
}

void append_frame_header(Bytes& out, FrameKind kind, size_t payload_bytes) {
  const Bytes header = WireWriter()
                           .integer(kFrameMagic)
                           .integer(kProtocolVersion)
                           .integer(static_cast<uint8_t>(kind))
                           .integer(uint16_t{0})
                           .integer(static_cast<uint32_t>(payload_bytes))
                           .take();
  out.insert(out.end(), header.begin(), header.end());
}

Bytes encode(const Hello& message) {
  return WireWriter()
      .integer(static_cast<uint8_t>(message.purpose))
      .integer(message.job)
      .integer(message.from)
      .integer(message.to)
      .raw(message.nonce)
      .take();
}

std::optional<Hello> decode_hello(std::span<const std::byte> payload) {
  WireReader in(payload);
  Hello message;
  const auto purpose = in.integer<uint8_t>();
  message.purpose = static_cast<Purpose>(purpose);
  message.job = in.integer<uint64_t>();
  message.from = in.integer<uint32_t>();
  message.to = in.integer<uint32_t>();
  in.array(message.nonce);
  if (!in.complete() || purpose < 1 || purpose > 2 || !is_rank(message.from) || !is_rank(message.to)) return {};
  return message;
}

Bytes encode(const Challenge& message) { return WireWriter().raw(message.nonce).raw(message.proof).take(); }

std::optional<Challenge> decode_challenge(std::span<const std::byte> payload) {
  WireReader in(payload);
  Challenge message;
  in.array(message.nonce);
  in.array(message.proof);
  if (!in.complete()) return {};
  return message;
}

std::optional<Tag> decode_proof(std::span<const std::byte> payload) {
  WireReader in(payload);
  Tag proof{};
  in.array(proof);
  if (!in.complete()) return {};
  return proof;
}

Bytes encode(const CheckIn& message) {
  WireWriter out;
  out.integer(message.rank).integer(message.nranks).integer(message.abi_version);
  out.integer(message.timeout_ms).integer(message.left_ms);
  write_address(out, message.address);
  out.text(message.build_id, kMaxBuildIdBytes).text(message.config, kMaxConfigBytes);
  return out.take();
}

std::optional<CheckIn> decode_check_in(std::span<const std::byte> payload) {
  WireReader in(payload);
  CheckIn message;
  message.rank = in.integer<uint32_t>();
  message.nranks = in.integer<uint32_t>();
  message.abi_version = in.integer<uint32_t>();
  message.timeout_ms = in.integer<uint32_t>();
  message.left_ms = in.integer<uint32_t>();
  message.address = read_address(in);
  message.build_id = in.text(kMaxBuildIdBytes);
  message.config = in.text(kMaxConfigBytes);
  if (!in.complete() || !is_rank(message.rank) || message.nranks < 1 || !is_rank(message.nranks - 1) ||
      !message.address.valid()) {
    return {};
  }
  return message;
}

Bytes encode(const Verdict& message) {
  return WireWriter().integer(message.status).text(message.sentence, kMaxTextBytes).take();
}

std::optional<Verdict> decode_verdict(std::span<const std::byte> payload) {
  WireReader in(payload);
  Verdict message;
  message.status = in.integer<uint32_t>();
  message.sentence = printable(in.text(kMaxTextBytes), kMaxTextBytes);
  if (!in.complete() || message.status == MK_SUCCESS || message.status > MK_ERROR_INTERNAL) return {};
  return message;
}

Bytes encode(const Assignment& message) {
  WireWriter out;
  out.integer(message.predecessor);
  write_address(out, message.successor);
  return out.take();
}

std::optional<Assignment> decode_assignment(std::span<const std::byte> payload) {
  WireReader in(payload);
  Assignment message;
  message.predecessor = in.integer<uint32_t>();
  message.successor = read_address(in);
  if (!in.complete() || !is_rank(message.predecessor) || !message.successor.valid()) return {};
  return message;
}

Bytes encode(const BlockPrefix& message) {
  return WireWriter().integer(message.sequence).integer(message.origin).take();
}

std::optional<BlockPrefix> decode_block_prefix(std::span<const std::byte> payload) {
  WireReader in(payload);
  BlockPrefix message;
  message.sequence = in.integer<uint64_t>();
  message.origin = in.integer<uint32_t>();
  if (in.broken() || !is_rank(message.origin)) return {};
  return message;
}

Bytes encode(const News& message) {
  return WireWriter()
      .integer(static_cast<uint8_t>(message.fate))
      .integer(message.subject)
      .integer(message.reporter)
      .text(message.why, kMaxTextBytes)
      .take();
}

std::optional<News> decode_news(std::span<const std::byte> payload) {
  WireReader in(payload);
  News message;
  const auto fate = in.integer<uint8_t>();
  message.fate = static_cast<Fate>(fate);
  message.subject = in.integer<uint32_t>();
  message.reporter = in.integer<uint32_t>();
  message.why = printable(in.text(kMaxTextBytes), kMaxTextBytes);
  if (!in.complete() || fate < 1 || fate > 4 || !is_rank(message.subject) || !is_rank(message.reporter))
    return {};
  return message;
}

std::string printable(std::string_view text, size_t limit) {
  std::string out(text.substr(0, limit));
  for (char& c : out) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return out;
}

}  // namespace mk
