// SPDX-License-Identifier: MIT
#include "bootstrap_id.h"

#include <algorithm>
#include <cstring>

#include "wire.h"

namespace mk {
namespace {

constexpr uint64_t kIdMagic = 0x64692d6c656b6d00;  // "\0mkel-id"
constexpr uint16_t kVersion = 1;
constexpr size_t kIdBytes = sizeof(mk_unique_id_t::bytes);
constexpr size_t kChecksumBytes = 8;

// Against bytes that were cut, mixed up or never made by us; the secret itself is what keeps others out.
Tag checksum(std::span<const std::byte> bytes) { return hmac_sha256(Secret{}, {bytes}); }

}  // namespace

mk_unique_id_t encode_unique_id(const UniqueId& id) {
  WireWriter out;
  out.integer(kIdMagic).integer(kVersion).integer(id.root.family).integer(uint8_t{0}).integer(id.root.port);
  out.raw(std::as_bytes(std::span(id.root.bytes))).integer(id.job).raw(id.secret);
  Bytes bytes = out.take();
  bytes.resize(kIdBytes - kChecksumBytes);
  const Tag sum = checksum(bytes);
  bytes.insert(bytes.end(), sum.begin(), sum.begin() + kChecksumBytes);
  mk_unique_id_t result;
  std::memcpy(result.bytes, bytes.data(), kIdBytes);
  return result;
}

Result<UniqueId> decode_unique_id(const mk_unique_id_t& bytes) {
  const auto all = std::as_bytes(std::span(bytes.bytes));
  WireReader in(all.first(kIdBytes - kChecksumBytes));
  UniqueId id;
  const auto magic = in.integer<uint64_t>();
  const auto version = in.integer<uint16_t>();
  id.root.family = in.integer<uint8_t>();
  in.integer<uint8_t>();
  id.root.port = in.integer<uint16_t>();
  in.array(id.root.bytes);
  id.job = in.integer<uint64_t>();
  in.array(id.secret);
  const Tag sum = checksum(all.first(kIdBytes - kChecksumBytes));
  const bool intact = std::equal(sum.begin(), sum.begin() + kChecksumBytes, all.end() - kChecksumBytes);
  if (magic == kIdMagic && version != kVersion) {
    return Status(MK_ERROR_INVALID_ARGUMENT,
                  format("id: made by another version of the library (id format %u, expected %u)",
                         static_cast<unsigned>(version), static_cast<unsigned>(kVersion)));
  }
  if (magic != kIdMagic || !intact || !id.root.valid() || id.root.port == 0) {
    return Status(MK_ERROR_INVALID_ARGUMENT,
                  "id: these 128 bytes were not made by mk_get_unique_id, or were changed on their way (pass "
                  "all 128, as bytes)");
  }
  return id;
}

}  // namespace mk
