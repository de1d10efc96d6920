// SPDX-License-Identifier: MIT
// libFuzzer target: whatever bytes arrive, the frame parser and the decoders answer, read nothing outside of
// them, and what they accept encodes to the same bytes again.
#include <algorithm>
#include <cstdlib>

#include "lib/bootstrap_frame.h"

using namespace mk;

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

template <class Message>
void require_same(const std::optional<Message>& message, std::span<const std::byte> payload) {
  if (!message) return;
  const Bytes again = encode(*message);
  require(std::equal(again.begin(), again.end(), payload.begin(), payload.end()));
}

void decode(const FrameView& frame) {
  switch (frame.kind) {
    case FrameKind::hello:
      return require_same(decode_hello(frame.payload), frame.payload);
    case FrameKind::challenge:
      return require_same(decode_challenge(frame.payload), frame.payload);
    case FrameKind::proof:
      return require(!decode_proof(frame.payload) || frame.payload.size() == sizeof(Tag));
    case FrameKind::check_in:
      return require_same(decode_check_in(frame.payload), frame.payload);
    case FrameKind::assignment:
      return require_same(decode_assignment(frame.payload), frame.payload);
    case FrameKind::verdict:
      // Its text is made printable, so only the length comes back.
      if (const auto verdict = decode_verdict(frame.payload))
        require(encode(*verdict).size() == frame.payload.size());
      return;
    case FrameKind::news:
      if (const auto news = decode_news(frame.payload)) require(encode(*news).size() == frame.payload.size());
      return;
    case FrameKind::block:
    case FrameKind::leave:
      require(!decode_block_prefix(frame.payload) || frame.payload.size() >= kBlockPrefixBytes);
      return;
    case FrameKind::welcome:
    case FrameKind::heartbeat:
    case FrameKind::bye:
      return;
  }
}

}  // namespace

// The first byte chooses the limit, as the state of a connection does; the rest is what the peer sent.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t limits[] = {kMaxHandshakePayload, kMaxRootPayload, kMaxRingPayload};
  const size_t limit = limits[data[0] % std::size(limits)];
  auto input = std::as_bytes(std::span(data + 1, size - 1));
  while (true) {
    const FrameParse parse = parse_frame(input, limit);
    if (parse.state == FrameParse::State::incomplete) {
      require(parse.wanted > input.size() && parse.wanted <= kFrameHeaderBytes + limit + sizeof(Tag));
      return 0;
    }
    if (parse.state == FrameParse::State::invalid) return 0;
    require(parse.frame.size <= input.size() && parse.frame.payload.size() <= limit);
    decode(parse.frame);
    input = input.subspan(parse.frame.size);
  }
}
