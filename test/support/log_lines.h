// SPDX-License-Identifier: MIT
// What the library logs while an object of this lives.
#pragma once

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "mkernel.h"

namespace mk::test {

class LogLines {
 public:
  explicit LogLines(mk_log_level_t level) { mk_set_log_callback(&keep, this, level); }
  ~LogLines() { mk_set_log_callback(nullptr, nullptr, MK_LOG_NONE); }
  LogLines(const LogLines&) = delete;
  LogLines& operator=(const LogLines&) = delete;

  std::vector<std::string> all() const {
    std::lock_guard lock(mutex_);
    return lines_;
  }
  // How many have all the parts.
  int count(const std::vector<std::string>& parts) const {
    const std::vector<std::string> lines = all();
    return static_cast<int>(std::count_if(lines.begin(), lines.end(), [&](const std::string& line) {
      return std::all_of(parts.begin(), parts.end(),
                         [&](const std::string& part) { return line.find(part) != std::string::npos; });
    }));
  }

 private:
  static void keep(void* user, mk_log_level_t, const char* line) {
    auto& own = *static_cast<LogLines*>(user);
    std::lock_guard lock(own.mutex_);
    own.lines_.emplace_back(line);
  }
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

}  // namespace mk::test
