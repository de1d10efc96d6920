// SPDX-License-Identifier: MIT
#include "lib/authentication.h"

#include <cstring>
#include <string>

#include "../support/catch.h"

using namespace mk;

namespace {

std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) text += format("%02x", std::to_integer<unsigned>(byte));
  return text;
}

std::span<const std::byte> bytes_of(const char* text) {
  return std::as_bytes(std::span(text, std::strlen(text)));
}

}  // namespace

// RFC 4231, test cases 1 and 2; their keys are shorter than 32 bytes, and HMAC pads a key with zeros up to its
// block.
TEST_CASE("HMAC-SHA-256 gives the values of RFC 4231") {
  Secret key{};
  std::fill_n(key.begin(), 20, std::byte{0x0b});
  CHECK(hex(hmac_sha256(key, {bytes_of("Hi There")})) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  Secret jefe{};
  std::memcpy(jefe.data(), "Jefe", 4);
  CHECK(hex(hmac_sha256(jefe, {bytes_of("what do ya want "), bytes_of("for nothing?")})) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

TEST_CASE("tags compare by value, random bytes differ") {
  Nonce a, b;
  REQUIRE(fill_random(a).ok());
  REQUIRE(fill_random(b).ok());
  CHECK(!equal_in_constant_time(a, b));
  CHECK(equal_in_constant_time(a, a));
  CHECK(!equal_in_constant_time(a, std::span(a).first(31)));
}
