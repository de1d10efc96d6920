// SPDX-License-Identifier: MIT
#include "api_operator.h"

#include "group.h"
#include "struct_size.h"

namespace mk::api {

mk_status_t prepare(mk_comm_t comm, const char* function, const Result<OperatorCall>& maxima) {
  if (!maxima.ok())
    return finish(maxima.status(), communicators().find(reinterpret_cast<uint64_t>(comm)).get());
  return host_collective(comm, function, [call = maxima.value()](Communicator& communicator) {
    return communicator.prepare(call);
  });
}

mk_status_t workspace_bytes(mk_comm_t comm, const char* function, const ReadCall& maxima, size_t* bytes) {
  return with_communicator(comm, function, [&](Communicator& communicator) -> Status {
    if (bytes == nullptr) {
      return Status(MK_ERROR_INVALID_ARGUMENT, format("%s: bytes: expected a pointer, saw NULL", function));
    }
    const Result<OperatorCall> call = maxima(communicator);
    if (!call.ok()) return call.status();
    const Result<size_t> needed = communicator.workspace_needed(call.value());
    if (needed.ok()) *bytes = needed.value();
    return needed.status();
  });
}

mk_status_t plan(mk_comm_t comm, const char* function, const ReadCall& read, mk_plan_t* plan_out) {
  return with_communicator(comm, function, [&](Communicator& communicator) -> Status {
    const Result<OperatorCall> call = read(communicator);
    if (!call.ok()) return call.status();
    const Result<mk_plan_t> chosen = communicator.executor().plan(call.value());
    if (!chosen.ok()) return chosen.status();
    return write_struct(chosen.value(), sizeof(mk_plan_t), format("%s: plan", function).c_str(), plan_out);
  });
}

mk_status_t launch(mk_comm_t comm, const char* function, const ReadCall& read, mk_stream_t stream) {
  return with_communicator(comm, function, [&](Communicator& communicator) -> Status {
    MK_RETURN_IF_ERROR(communicator.usable());
    const Result<OperatorCall> call = read(communicator);
    if (!call.ok()) return call.status();
    MK_RETURN_IF_ERROR(communicator.check_stream(stream));
    return communicator.enqueue(call.value(), stream, !group::active());
  });
}

}  // namespace mk::api
