// SPDX-License-Identifier: MIT
// A shape as it is written on the command line: m=4096,n=1024,k=4096.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace perf {

struct ShapeKey {
  const char* name;
  int64_t low = 1;
  int64_t high = int64_t{1} << 40;
  int64_t default_value = -1;  // -1: must be given
};
using ShapeKeys = std::vector<ShapeKey>;

class Shape {
 public:
  using Entry = std::pair<std::string, int64_t>;
  Shape() = default;
  Shape(std::initializer_list<Entry> entries) : entries_(entries) {}

  int64_t operator[](const char* key) const;
  const std::vector<Entry>& entries() const { return entries_; }
  std::string text() const;
  bool operator==(const Shape&) const = default;

 private:
  friend Shape complete_shape(const Shape& given, const ShapeKeys& keys, const std::string& operator_name);
  friend Shape parse_shape(const std::string& text, const std::string& option);
  std::vector<Entry> entries_;
};

// Reads the keys and values; a UsageError says what is malformed. Which keys there may be is complete_shape's
// matter. `option` is named in the sentence.
Shape parse_shape(const std::string& text, const std::string& option = "--shape");

// True when every key of the shape is one of `keys`.
bool keys_belong(const Shape& shape, const ShapeKeys& keys);

// True when the shape has every key of `values`, with the same value.
bool agrees(const Shape& shape, const Shape& values);

// The shape with exactly `keys`, in their order, defaults filled in; a UsageError for an unknown or missing key
// or a value out of range.
Shape complete_shape(const Shape& given, const ShapeKeys& keys, const std::string& operator_name);

// A whole decimal number in [low, high]; else a UsageError that names `what`.
int64_t parse_integer(const std::string& text, const std::string& what, int64_t low, int64_t high);

}  // namespace perf
