// SPDX-License-Identifier: MIT
// Traces of this rank's launches: mk_trace_*.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "communicator.h"

namespace mk {
namespace {

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

}  // namespace

Status Communicator::start_trace(int64_t max_spans) {
  MK_RETURN_IF_ERROR(usable());
  if (tracing_) {
    return Status(MK_ERROR_INVALID_ARGUMENT,
                  "mk_trace_start: a trace of this communicator is under way; end it with mk_trace_stop first");
  }
  MK_RETURN_IF_ERROR(executor_->start_trace(max_spans));
  tracing_ = true;
  return {};
}

// Not usable(): after an error one wants to see the last launches most.
Status Communicator::stop_trace(const char* path) {
  if (finalized_) return usable();
  if (!tracing_) {
    return Status(MK_ERROR_INVALID_ARGUMENT,
                  "mk_trace_stop: expected a trace that mk_trace_start began on this communicator, saw none");
  }
  if (path != nullptr) {
    File file(std::fopen(path, "w"), std::fclose);
    if (file == nullptr) {
      return Status(MK_ERROR_INVALID_ARGUMENT,
                    format("mk_trace_stop: path: \"%s\" cannot be written: %s", path, std::strerror(errno)));
    }
    const Result<Trace> trace = executor_->collect_trace();
    if (!trace.ok()) return trace.status();
    if (!write_trace(trace.value(), rank_, file.get())) {
      return Status(MK_ERROR_SYSTEM, format("mk_trace_stop: writing \"%s\": %s", path, std::strerror(errno)));
    }
  }
  executor_->stop_trace();
  tracing_ = false;
  return {};
}

}  // namespace mk
