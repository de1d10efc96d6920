// SPDX-License-Identifier: MIT
#include "shape.h"

#include <algorithm>
#include <charconv>

#include "errors.h"

namespace perf {
namespace {

const ShapeKey* find_key(const ShapeKeys& keys, const std::string& name) {
  const auto found =
      std::find_if(keys.begin(), keys.end(), [&](const ShapeKey& key) { return name == key.name; });
  return found == keys.end() ? nullptr : &*found;
}

std::string names_of(const ShapeKeys& keys) {
  std::string names;
  for (const ShapeKey& key : keys) names += (names.empty() ? "" : " ") + std::string(key.name);
  return names;
}

}  // namespace

int64_t Shape::operator[](const char* key) const {
  for (const Entry& entry : entries_) {
    if (entry.first == key) return entry.second;
  }
  throw std::logic_error(std::string("shape has no key ") + key);
}

std::string Shape::text() const {
  std::string text;
  for (const Entry& entry : entries_) {
    text += (text.empty() ? "" : ",") + entry.first + "=" + std::to_string(entry.second);
  }
  return text;
}

int64_t parse_integer(const std::string& text, const std::string& what, int64_t low, int64_t high) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (text.empty() || stop != end || error != std::errc() || value < low || value > high) {
    throw UsageError(what + ": expected an integer from " + std::to_string(low) + " to " +
                     std::to_string(high) + ", saw \"" + text + "\"");
  }
  return value;
}

Shape parse_shape(const std::string& text, const std::string& option) {
  const std::string where = option + " \"" + text + "\": ";
  Shape shape;
  for (size_t start = 0; start <= text.size();) {
    const size_t comma = std::min(text.find(',', start), text.size());
    const std::string item = text.substr(start, comma - start);
    const size_t equals = item.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw UsageError(where + "expected key=value, saw \"" + item + "\"");
    }
    const std::string key = item.substr(0, equals);
    for (const Shape::Entry& entry : shape.entries_) {
      if (entry.first == key) throw UsageError(where + "key " + key + " is given twice");
    }
    shape.entries_.emplace_back(key, parse_integer(item.substr(equals + 1), where + key, 0, int64_t{1} << 40));
    start = comma + 1;
  }
  return shape;
}

bool keys_belong(const Shape& shape, const ShapeKeys& keys) {
  return std::all_of(shape.entries().begin(), shape.entries().end(),
                     [&](const Shape::Entry& entry) { return find_key(keys, entry.first) != nullptr; });
}

bool agrees(const Shape& shape, const Shape& values) {
  return std::all_of(values.entries().begin(), values.entries().end(), [&](const Shape::Entry& value) {
    return std::find(shape.entries().begin(), shape.entries().end(), value) != shape.entries().end();
  });
}

Shape complete_shape(const Shape& given, const ShapeKeys& keys, const std::string& operator_name) {
  const std::string where = "--shape \"" + given.text() + "\": ";
  for (const Shape::Entry& entry : given.entries()) {
    if (!find_key(keys, entry.first)) {
      throw UsageError(where + operator_name + " has no key " + entry.first + "; its keys are " +
                       names_of(keys));
    }
  }
  Shape complete;
  for (const ShapeKey& key : keys) {
    int64_t value = key.default_value;
    for (const Shape::Entry& entry : given.entries()) {
      if (entry.first == key.name) value = entry.second;
    }
    if (value == -1)
      throw UsageError(where + "key " + key.name + " is missing; " + operator_name + " takes " +
                       names_of(keys));
    if (value < key.low || value > key.high) {
      throw UsageError(where + key.name + ": expected " + std::to_string(key.low) + " to " +
                       std::to_string(key.high) + ", saw " + std::to_string(value));
    }
    complete.entries_.emplace_back(key.name, value);
  }
  return complete;
}

}  // namespace perf
