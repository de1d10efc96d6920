// SPDX-License-Identifier: MIT
#include "json_writer.h"

#include <cmath>
#include <cstdio>

namespace perf {

JsonWriter& JsonWriter::key(std::string_view name) {
  separate();
  quote(name);
  text_ += ": ";
  after_key_ = true;
  return *this;
}

JsonWriter& JsonWriter::value(std::string_view text) {
  separate();
  quote(text);
  return *this;
}

JsonWriter& JsonWriter::value(double number) {
  if (!std::isfinite(number)) return null();
  char digits[40];
  std::snprintf(digits, sizeof digits, "%.9g", number);
  return item(digits);
}

JsonWriter& JsonWriter::open(char bracket) {
  separate();
  text_ += bracket;
  has_items_.push_back(false);
  return *this;
}

JsonWriter& JsonWriter::close(char bracket) {
  const bool had_items = has_items_.back();
  has_items_.pop_back();
  if (had_items) new_line();
  text_ += bracket;
  if (has_items_.empty()) text_ += '\n';
  return *this;
}

JsonWriter& JsonWriter::item(std::string_view literal) {
  separate();
  text_ += literal;
  return *this;
}

void JsonWriter::separate() {
  if (after_key_) {
    after_key_ = false;
    return;
  }
  if (has_items_.empty()) return;
  if (has_items_.back()) text_ += ',';
  has_items_.back() = true;
  new_line();
}

void JsonWriter::new_line() { text_ += '\n' + std::string(2 * has_items_.size(), ' '); }

void JsonWriter::quote(std::string_view text) {
  text_ += '"';
  for (const char character : text) {
    if (character == '"' || character == '\\') {
      text_ += '\\';
      text_ += character;
    } else if (static_cast<unsigned char>(character) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(character));
      text_ += escape;
    } else {
      text_ += character;
    }
  }
  text_ += '"';
}

}  // namespace perf
