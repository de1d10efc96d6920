// SPDX-License-Identifier: MIT
// A strict reader of JSON (RFC 8259), independent of the writer that it reads after.
#pragma once

#include <string>
#include <vector>

namespace json {

struct Value {
  enum class Type { kNull, kBool, kNumber, kString, kArray, kObject };
  Type type = Type::kNull;
  bool truth = false;
  double number = 0;
  std::string text;
  std::vector<Value> items;        // of an array, or the values of an object
  std::vector<std::string> names;  // of an object: the key of each item

  bool is(Type other) const { return type == other; }
  // The member; throws std::runtime_error when there is none.
  const Value& operator[](const std::string& key) const;
  // "a b c": the keys of an object in order.
  std::string keys() const;
};

// Throws std::runtime_error with the offset of the first mistake.
Value parse(const std::string& text);

}  // namespace json
