// SPDX-License-Identifier: MIT
#include "api.h"
#include "struct_size.h"

using namespace mk;
using namespace mk::api;

namespace {

constexpr int64_t kMaxSpans = int64_t{1} << 20;

Status start(Communicator& communicator, const mk_trace_config_t* config) {
  mk_trace_config_t checked = MK_TRACE_CONFIG_INIT;
  if (config != nullptr) {
    MK_RETURN_IF_ERROR(read_struct(config, sizeof(mk_trace_config_t), "mk_trace_start: config", checked));
  }
  if (checked.max_spans < 0 || checked.max_spans > kMaxSpans) {
    return Status(MK_ERROR_INVALID_ARGUMENT,
                  format("mk_trace_start: config.max_spans: expected 0 to %lld, saw %lld",
                         static_cast<long long>(kMaxSpans), static_cast<long long>(checked.max_spans)));
  }
  return communicator.start_trace(checked.max_spans);
}

}  // namespace

extern "C" {

mk_status_t mk_trace_start(mk_comm_t comm, const mk_trace_config_t* config) {
  return with_communicator(comm, "mk_trace_start",
                           [config](Communicator& communicator) { return start(communicator, config); });
}

mk_status_t mk_trace_stop(mk_comm_t comm, const char* path) {
  return with_communicator(comm, "mk_trace_stop",
                           [path](Communicator& communicator) { return communicator.stop_trace(path); });
}

}  // extern "C"
