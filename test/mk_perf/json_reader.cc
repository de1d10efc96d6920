// SPDX-License-Identifier: MIT
#include "json_reader.h"

#include <cctype>
#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace json {
namespace {

class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}

  Value document() {
    Value value = any();
    space();
    if (at_ != text_.size()) fail("something after the value");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("JSON, offset " + std::to_string(at_) + ": " + what);
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void space() {
    while (peek() == ' ' || peek() == '\n' || peek() == '\t' || peek() == '\r') ++at_;
  }

  bool take(char expected) {
    space();
    if (peek() != expected) return false;
    ++at_;
    return true;
  }

  void expect(char expected) {
    if (!take(expected)) fail(std::string("expected ") + expected);
  }

  Value any() {
    space();
    switch (peek()) {
      case '{':
        return object();
      case '[':
        return array();
      case '"':
        return string();
      case 't':
        return literal("true", Value::Type::kBool, true);
      case 'f':
        return literal("false", Value::Type::kBool, false);
      case 'n':
        return literal("null", Value::Type::kNull, false);
      default:
        return number();
    }
  }

  Value literal(const std::string& word, Value::Type type, bool truth) {
    if (text_.compare(at_, word.size(), word) != 0) fail("expected " + word);
    at_ += word.size();
    Value value;
    value.type = type;
    value.truth = truth;
    return value;
  }

  void digits() {
    if (!std::isdigit(static_cast<unsigned char>(peek()))) fail("expected a digit");
    while (std::isdigit(static_cast<unsigned char>(peek()))) ++at_;
  }

  Value number() {
    const size_t start = at_;
    if (peek() == '-') ++at_;
    if (peek() == '0') {
      ++at_;
    } else {
      digits();
    }
    if (peek() == '.') {
      ++at_;
      digits();
    }
    if (peek() == 'e' || peek() == 'E') {
      ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      digits();
    }
    Value value;
    value.type = Value::Type::kNumber;
    value.number = std::strtod(text_.substr(start, at_ - start).c_str(), nullptr);
    return value;
  }

  Value string() {
    Value value;
    value.type = Value::Type::kString;
    expect('"');
    for (; peek() != '"'; ++at_) {
      if (at_ >= text_.size() || static_cast<unsigned char>(peek()) < 0x20) fail("unterminated string");
      if (peek() == '\\' && std::string("\"\\/bfnrtu").find(text_[++at_]) == std::string::npos)
        fail("bad escape");
      value.text += peek();
    }
    ++at_;
    return value;
  }

  Value array() {
    Value value;
    value.type = Value::Type::kArray;
    expect('[');
    if (take(']')) return value;
    do {
      value.items.push_back(any());
    } while (take(','));
    expect(']');
    return value;
  }

  Value object() {
    Value value;
    value.type = Value::Type::kObject;
    expect('{');
    if (take('}')) return value;
    do {
      space();
      std::string key = string().text;
      expect(':');
      value.names.push_back(std::move(key));
      value.items.push_back(any());
    } while (take(','));
    expect('}');
    return value;
  }

  const std::string& text_;
  size_t at_ = 0;
};

}  // namespace

const Value& Value::operator[](const std::string& key) const {
  for (size_t index = 0; index < names.size(); ++index) {
    if (names[index] == key) return items[index];
  }
  throw std::runtime_error("no member " + key);
}

std::string Value::keys() const {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : " ") + name;
  return list;
}

Value parse(const std::string& text) { return Reader(text).document(); }

}  // namespace json
