// SPDX-License-Identifier: MIT
// Reading and writing the public structs of callers that were built against another version of the header.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "status.h"

namespace mk {

// No version of a struct is larger: a struct_size beyond it was never set, and must not be read to its end.
constexpr size_t kLargestStruct = 1 << 16;

// Copies a caller's struct. `first_size` is the struct's size in the version that introduced it. A larger
// struct is accepted when the part unknown here is zero, a smaller one reads as if the rest were zero.
template <class Struct>
Status read_struct(const Struct* from, size_t first_size, const char* name, Struct& to) {
  if (from == nullptr)
    return Status(MK_ERROR_INVALID_ARGUMENT, format("%s: expected a pointer, saw NULL", name));
  const size_t size = from->struct_size;
  if (size < first_size || size > kLargestStruct) {
    return Status(MK_ERROR_INVALID_ARGUMENT,
                  format("%s.struct_size: expected %zu to %zu, saw %zu; initialise it with its _INIT macro",
                         name, first_size, kLargestStruct, size));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  for (size_t offset = sizeof(Struct); offset < size; ++offset) {
    if (bytes[offset] == 0) continue;
    return Status(
        MK_ERROR_INVALID_ARGUMENT,
        format("%s: this library knows %zu bytes of it, and byte %zu of the caller's %zu is not zero; the "
               "program needs a newer library, or struct_size is wrong",
               name, sizeof(Struct), offset, size));
  }
  std::memset(&to, 0, sizeof to);
  std::memcpy(&to, from, std::min(size, sizeof to));
  to.struct_size = sizeof to;
  return {};
}

// Writes what fits into a caller's struct, whose struct_size stays.
template <class Struct>
Status write_struct(const Struct& from, size_t first_size, const char* name, Struct* to) {
  if (to == nullptr) return Status(MK_ERROR_INVALID_ARGUMENT, format("%s: expected a pointer, saw NULL", name));
  const size_t size = to->struct_size;
  if (size < first_size || size > kLargestStruct) {
    return Status(MK_ERROR_INVALID_ARGUMENT,
                  format("%s.struct_size: expected %zu to %zu, saw %zu; initialise it with its _INIT macro",
                         name, first_size, kLargestStruct, size));
  }
  std::memcpy(reinterpret_cast<char*>(to) + sizeof size, reinterpret_cast<const char*>(&from) + sizeof size,
              std::min(size, sizeof from) - sizeof size);
  return {};
}

}  // namespace mk
