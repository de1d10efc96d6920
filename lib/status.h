// SPDX-License-Identifier: MIT
// The error a call returns inside the library: a status and the sentence that goes with it.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include "mkernel.h"

namespace mk {

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(mk_status_t code, std::string sentence) : code_(code), sentence_(std::move(sentence)) {}

  bool ok() const { return code_ == MK_SUCCESS; }
  mk_status_t code() const { return code_; }
  const std::string& sentence() const { return sentence_; }

 private:
  mk_status_t code_ = MK_SUCCESS;
  std::string sentence_;
};

// A printf-formatted sentence: what happened, expected and seen, what to do.
[[gnu::format(printf, 1, 2)]] inline std::string format(const char* pattern, ...) {
  va_list arguments;
  va_start(arguments, pattern);
  va_list again;
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, pattern, arguments);
  va_end(arguments);
  std::string text(length > 0 ? static_cast<size_t>(length) : 0, '\0');
  if (length > 0) std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(again);
  return text;
}

// A value or the error that stands in its place.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() { return *value_; }
  const T& value() const { return *value_; }
  T* operator->() { return &*value_; }
  T take() { return std::move(*value_); }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace mk

// Leaves the function with the error of `expression` (a Status) if there is one.
#define MK_RETURN_IF_ERROR(expression)                              \
  do {                                                              \
    if (::mk::Status mk_status_ = (expression); !mk_status_.ok()) { \
      return mk_status_;                                            \
    }                                                               \
  } while (0)
