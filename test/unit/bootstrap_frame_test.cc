// SPDX-License-Identifier: MIT
#include "lib/bootstrap_frame.h"

#include "../support/catch.h"
#include "lib/bootstrap_id.h"

using namespace mk;

namespace {

Bytes frame_of(FrameKind kind, const Bytes& payload) {
  Bytes frame;
  append_frame_header(frame, kind, payload.size());
  frame.insert(frame.end(), payload.begin(), payload.end());
  if (is_tagged(kind)) frame.resize(frame.size() + sizeof(Tag));
  return frame;
}

SocketAddress address() {
  SocketAddress made;
  made.family = 6;
  made.port = 0x1234;
  made.bytes[3] = 9;
  return made;
}

CheckIn check_in() {
  return CheckIn{3, 8, 100, 60000, 59000, address(), "0.1.0-abc", "device=host;max_ctas=0"};
}

}  // namespace

TEST_CASE("a frame is found once it is whole, and not before") {
  const Bytes frame = frame_of(FrameKind::check_in, encode(check_in()));
  for (size_t length = 0; length < frame.size(); ++length) {
    const auto parse = parse_frame(std::span(frame).first(length), kMaxRootPayload);
    REQUIRE(parse.state == FrameParse::State::incomplete);
    CHECK(parse.wanted > length);
  }
  Bytes more = frame;
  more.resize(more.size() + 5);
  const auto parse = parse_frame(more, kMaxRootPayload);
  REQUIRE(parse.state == FrameParse::State::complete);
  CHECK(parse.frame.size == frame.size());
  CHECK(parse.frame.tag.size() == 32);
  CHECK(decode_check_in(parse.frame.payload)->config == "device=host;max_ctas=0");
}

TEST_CASE("the bytes of a frame are the same on every machine") {
  const Bytes frame = frame_of(FrameKind::hello, encode(Hello{Purpose::ring, 0x0102030405060708, 9, 10, {}}));
  const unsigned char expected[] = {'M', 'K', 'R', 'B', 1, 1, 0, 0, 49, 0, 0, 0, 2,
                                    8,   7,   6,   5,   4, 3, 2, 1, 9,  0, 0, 0, 10};
  REQUIRE(frame.size() == 12 + 49);
  CHECK(std::equal(std::begin(expected), std::end(expected), frame.begin(),
                   [](unsigned char a, std::byte b) { return a == std::to_integer<unsigned char>(b); }));
}

TEST_CASE("what is no frame is invalid as early as it shows") {
  const auto state = [](const Bytes& bytes, size_t limit) { return parse_frame(bytes, limit).state; };
  CHECK(state({std::byte{'G'}}, 128) == FrameParse::State::invalid);
  const Bytes good = frame_of(FrameKind::proof, Bytes(32));
  CHECK(state(good, 128) == FrameParse::State::complete);
  CHECK(state(good, 31) == FrameParse::State::invalid);
  for (size_t i = 0; i < 8; ++i) {
    Bytes bad = good;
    bad[i] ^= std::byte{0x40};
    CHECK(state(bad, 128) == FrameParse::State::invalid);
  }
  Bytes huge = good;
  huge[11] = std::byte{0xff};
  CHECK(state(huge, kMaxRingPayload) == FrameParse::State::invalid);
}

TEST_CASE("messages come back as they were") {
  const auto hello = decode_hello(encode(Hello{Purpose::ring, 77, 3, 4, {std::byte{5}}}));
  REQUIRE(hello);
  CHECK((hello->purpose == Purpose::ring && hello->job == 77 && hello->from == 3 && hello->to == 4));
  CHECK(hello->nonce[0] == std::byte{5});
  const auto in = decode_check_in(encode(check_in()));
  REQUIRE(in);
  CHECK((in->rank == 3 && in->nranks == 8 && in->left_ms == 59000 && in->address == address()));
  const auto verdict = decode_verdict(encode(Verdict{MK_ERROR_MISMATCH, "no\nway"}));
  REQUIRE(verdict);
  CHECK(verdict->sentence == "no?way");
  const auto assignment = decode_assignment(encode(Assignment{2, address()}));
  REQUIRE(assignment);
  CHECK((assignment->predecessor == 2 && assignment->successor == address()));
  const auto news = decode_news(encode(News{Fate::aborted, 3, 4, "why"}));
  REQUIRE(news);
  CHECK((news->fate == Fate::aborted && news->subject == 3 && news->reporter == 4 && news->why == "why"));
  CHECK(decode_block_prefix(encode(BlockPrefix{1u << 20, 6}))->sequence == 1u << 20);
}

TEST_CASE("cut, extended and out-of-range messages are refused") {
  const Bytes good = encode(check_in());
  for (size_t length = 0; length < good.size(); ++length)
    CHECK(!decode_check_in(std::span(good).first(length)));
  Bytes longer = good;
  longer.push_back({});
  CHECK(!decode_check_in(longer));
  CheckIn wrong = check_in();
  wrong.nranks = 0;
  CHECK(!decode_check_in(encode(wrong)));
  wrong = check_in();
  wrong.address.family = 5;
  CHECK(!decode_check_in(encode(wrong)));
  wrong = check_in();
  wrong.rank = 1u << 20;
  CHECK(!decode_check_in(encode(wrong)));
  CHECK(!decode_verdict(encode(Verdict{MK_SUCCESS, "fine"})));
  CHECK(!decode_verdict(encode(Verdict{99, "what"})));
  CHECK(!decode_news(encode(News{static_cast<Fate>(9), 0, 0, ""})));
  CHECK(!decode_proof(Bytes(31)));
}

TEST_CASE("an id comes back as it was, and no changed byte passes") {
  UniqueId id;
  id.root = address();
  id.job = 42;
  id.secret.fill(std::byte{6});
  const mk_unique_id_t bytes = encode_unique_id(id);
  auto back = decode_unique_id(bytes);
  REQUIRE(back.ok());
  CHECK((back->root == id.root && back->job == 42 && back->secret == id.secret));
  for (size_t i = 0; i < sizeof bytes.bytes; ++i) {
    mk_unique_id_t changed = bytes;
    changed.bytes[i] ^= 0x10;
    CHECK(decode_unique_id(changed).status().code() == MK_ERROR_INVALID_ARGUMENT);
  }
}
