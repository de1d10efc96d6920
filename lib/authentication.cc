// SPDX-License-Identifier: MIT
#include "authentication.h"

#include <sodium.h>

namespace mk {
namespace {

const unsigned char* octets(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }

}  // namespace

Status fill_random(std::span<std::byte> bytes) {
  // 1 means that another user of the same libsodium initialised it already.
  if (sodium_init() < 0) {
    return Status(MK_ERROR_SYSTEM,
                  "the system's random generator is not available (libsodium cannot initialise)");
  }
  randombytes_buf(bytes.data(), bytes.size());
  return Status();
}

Tag hmac_sha256(const Secret& key, std::initializer_list<std::span<const std::byte>> parts) {
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, octets(key.data()), key.size());
  for (const auto& part : parts) crypto_auth_hmacsha256_update(&state, octets(part.data()), part.size());
  Tag tag;
  crypto_auth_hmacsha256_final(&state, reinterpret_cast<unsigned char*>(tag.data()));
  sodium_memzero(&state, sizeof state);
  return tag;
}

bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && sodium_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace mk
