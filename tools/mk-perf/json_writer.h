// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace perf {

// Writes JSON (RFC 8259) with two-space indentation. Inside an object each value follows its key.
class JsonWriter {
 public:
  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }
  JsonWriter& key(std::string_view name);

  JsonWriter& value(std::string_view text);
  JsonWriter& value(const char* text) { return value(std::string_view(text)); }
  JsonWriter& value(const std::string& text) { return value(std::string_view(text)); }
  JsonWriter& value(bool truth) { return item(truth ? "true" : "false"); }
  JsonWriter& value(int64_t number) { return item(std::to_string(number)); }
  JsonWriter& value(int number) { return value(int64_t{number}); }
  JsonWriter& value(double number);  // null unless finite
  JsonWriter& null() { return item("null"); }
  template <typename T>
  JsonWriter& value(const std::optional<T>& maybe) {
    return maybe ? value(*maybe) : null();
  }
  template <typename T>
  JsonWriter& member(std::string_view name, const T& content) {
    return key(name).value(content);
  }

  const std::string& text() const { return text_; }

 private:
  JsonWriter& open(char bracket);
  JsonWriter& close(char bracket);
  JsonWriter& item(std::string_view literal);
  void separate();
  void new_line();
  void quote(std::string_view text);

  std::string text_;
  std::vector<bool> has_items_;  // of each open bracket
  bool after_key_ = false;
};

}  // namespace perf
