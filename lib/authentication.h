// SPDX-License-Identifier: MIT
// The few pieces of cryptography the bootstrap needs: HMAC-SHA-256, a constant-time comparison, random bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "status.h"

namespace mk {

using Secret = std::array<std::byte, 32>;
using Nonce = std::array<std::byte, 32>;
using Tag = std::array<std::byte, 32>;

// Fills `bytes` from the system's cryptographic generator.
Status fill_random(std::span<std::byte> bytes);

// HMAC-SHA-256 (RFC 2104, FIPS 180-4) of the concatenation of `parts`.
Tag hmac_sha256(const Secret& key, std::initializer_list<std::span<const std::byte>> parts);

// Compares in a time that does not depend on where the two differ.
bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b);

}  // namespace mk
