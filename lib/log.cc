// SPDX-License-Identifier: MIT
#include "log.h"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <string>

#include "env.h"

namespace mk {
namespace {

struct Sink {
  std::mutex mutex;
  mk_log_callback_t callback = nullptr;
  void* user = nullptr;
  mk_log_level_t level;

  Sink() : level(level_of_environment()) {}

  static mk_log_level_t level_of_environment() {
    const std::string wanted = env::text("MK_LOG");
    if (wanted == "none") return MK_LOG_NONE;
    if (wanted == "error") return MK_LOG_ERROR;
    if (wanted == "info") return MK_LOG_INFO;
    if (wanted == "debug") return MK_LOG_DEBUG;
    return MK_LOG_WARN;
  }
};

// Never destroyed: threads of the library may log while the process exits.
Sink& sink() {
  static Sink* const instance = new Sink;
  return *instance;
}

const char* level_name(mk_log_level_t level) {
  switch (level) {
    case MK_LOG_ERROR:
      return "error";
    case MK_LOG_WARN:
      return "warning";
    case MK_LOG_INFO:
      return "info";
    default:
      return "debug";
  }
}

}  // namespace

void log(mk_log_level_t level, const char* pattern, ...) {
  Sink& out = sink();
  std::lock_guard lock(out.mutex);
  if (level > out.level) return;
  char line[1024];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(line, sizeof line, pattern, arguments);
  va_end(arguments);
  if (out.callback) {
    out.callback(out.user, level, line);
  } else {
    std::fprintf(stderr, "libmkernel[%d] %s: %s\n", static_cast<int>(getpid()), level_name(level), line);
  }
}

Status set_log_callback(mk_log_callback_t callback, void* user, mk_log_level_t level) {
  if (level < MK_LOG_NONE || level > MK_LOG_DEBUG) {
    return Status(
        MK_ERROR_INVALID_ARGUMENT,
        format("mk_set_log_callback: level: expected MK_LOG_NONE (0) to MK_LOG_DEBUG (4), saw %d", level));
  }
  Sink& out = sink();
  std::lock_guard lock(out.mutex);
  out.callback = callback;
  out.user = user;
  out.level = callback ? level : Sink::level_of_environment();
  return {};
}

}  // namespace mk
