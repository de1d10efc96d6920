// SPDX-License-Identifier: MIT
// Little-endian integers, arrays and short texts, written to and read from bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "exchange.h"

namespace mk {

class WireWriter {
 public:
  template <class Integer>
  WireWriter& integer(Integer value) {
    for (size_t i = 0; i < sizeof value; ++i) {
      bytes_.push_back(static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i) & 0xff));
    }
    return *this;
  }
  WireWriter& raw(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  // A length of 16 bits, then the bytes; longer texts are cut at `limit`.
  WireWriter& text(std::string_view value, size_t limit) {
    value = value.substr(0, limit);
    integer(static_cast<uint16_t>(value.size()));
    return raw(std::as_bytes(std::span(value.data(), value.size())));
  }
  Bytes take() { return std::move(bytes_); }

 private:
  Bytes bytes_;
};

// Reads what WireWriter wrote. A read past the end yields zeros and is remembered: ask complete() at the end.
class WireReader {
 public:
  explicit WireReader(std::span<const std::byte> bytes) : rest_(bytes) {}

  template <class Integer>
  Integer integer() {
    uint64_t value = 0;
    const auto bytes = take(sizeof(Integer));
    for (size_t i = 0; i < bytes.size(); ++i) value |= std::to_integer<uint64_t>(bytes[i]) << (8 * i);
    return static_cast<Integer>(value);
  }
  template <class Element, size_t Size>
  void array(std::array<Element, Size>& out) {
    static_assert(sizeof(Element) == 1);
    const auto bytes = take(Size);
    if (!bytes.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
  }
  std::string text(size_t limit) {
    const size_t length = integer<uint16_t>();
    if (length > limit) broken_ = true;
    const auto bytes = take(length);
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  // Everything was there, and nothing is left over.
  bool complete() const { return !broken_ && rest_.empty(); }
  bool broken() const { return broken_; }

 private:
  std::span<const std::byte> take(size_t count) {
    if (broken_ || count > rest_.size()) {
      broken_ = true;
      return {};
    }
    const auto bytes = rest_.first(count);
    rest_ = rest_.subspan(count);
    return bytes;
  }

  std::span<const std::byte> rest_;
  bool broken_ = false;
};

}  // namespace mk
