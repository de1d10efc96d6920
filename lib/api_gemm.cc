// SPDX-License-Identifier: MIT
// The C interface of the GEMM operators.
#include "api.h"
#include "gemm_arguments.h"
#include "group.h"
#include "struct_size.h"

namespace mk::api {
namespace {

mk_status_t prepare(mk_comm_t comm, mk_operator_t op, const char* function, const mk_gemm_maxima_t* maxima) {
  const Result<GemmCall> call = to_call(op, maxima);
  if (!call.ok()) return finish(call.status(), communicators().find(reinterpret_cast<uint64_t>(comm)).get());
  return host_collective(
      comm, function, [call = call.value()](Communicator& communicator) { return communicator.prepare(call); });
}

mk_status_t workspace_bytes(mk_comm_t comm, mk_operator_t op, const char* function,
                            const mk_gemm_maxima_t* maxima, size_t* bytes) {
  return with_communicator(comm, function, [&](Communicator& communicator) -> Status {
    if (bytes == nullptr) {
      return Status(MK_ERROR_INVALID_ARGUMENT, format("%s: bytes: expected a pointer, saw NULL", function));
    }
    const Result<GemmCall> call = to_call(op, maxima);
    if (!call.ok()) return call.status();
    const Result<size_t> needed = communicator.workspace_needed(call.value());
    if (needed.ok()) *bytes = needed.value();
    return needed.status();
  });
}

template <class Arguments>
mk_status_t plan(mk_comm_t comm, const char* function, const Arguments* args, mk_plan_t* plan_out) {
  return with_communicator(comm, function, [&](Communicator& communicator) -> Status {
    const Result<GemmCall> call = to_call(args);
    if (!call.ok()) return call.status();
    const Result<mk_plan_t> chosen = communicator.executor().plan(call.value());
    if (!chosen.ok()) return chosen.status();
    return write_struct(chosen.value(), sizeof(mk_plan_t), format("%s: plan", function).c_str(), plan_out);
  });
}

template <class Arguments>
mk_status_t launch(mk_comm_t comm, const char* function, const Arguments* args, mk_stream_t stream) {
  return with_communicator(comm, function, [&](Communicator& communicator) -> Status {
    MK_RETURN_IF_ERROR(communicator.usable());
    const Result<GemmCall> call = to_call(args);
    if (!call.ok()) return call.status();
    MK_RETURN_IF_ERROR(check_buffers(call.value(), communicator.rank(), communicator.nranks()));
    MK_RETURN_IF_ERROR(communicator.check_stream(stream));
    return communicator.enqueue(call.value(), stream, !group::active());
  });
}

}  // namespace
}  // namespace mk::api

using namespace mk::api;

// One operator: its four functions.
#define MK_GEMM_OPERATOR(name, operator_id)                                                                \
  mk_status_t mk_##name##_prepare(mk_comm_t comm, const mk_gemm_maxima_t* maxima) {                        \
    return prepare(comm, operator_id, "mk_" #name "_prepare", maxima);                                     \
  }                                                                                                        \
  mk_status_t mk_##name##_workspace_bytes(mk_comm_t comm, const mk_gemm_maxima_t* maxima, size_t* bytes) { \
    return workspace_bytes(comm, operator_id, "mk_" #name "_workspace_bytes", maxima, bytes);              \
  }                                                                                                        \
  mk_status_t mk_##name##_plan(mk_comm_t comm, const mk_##name##_args_t* args, mk_plan_t* plan_out) {      \
    return plan(comm, "mk_" #name "_plan", args, plan_out);                                                \
  }                                                                                                        \
  mk_status_t mk_##name(mk_comm_t comm, const mk_##name##_args_t* args, mk_stream_t stream) {              \
    return launch(comm, "mk_" #name, args, stream);                                                        \
  }

extern "C" {
MK_GEMM_OPERATOR(allgather_gemm, MK_OPERATOR_ALLGATHER_GEMM)
MK_GEMM_OPERATOR(gemm_reduce_scatter, MK_OPERATOR_GEMM_REDUCE_SCATTER)
MK_GEMM_OPERATOR(gemm_allreduce, MK_OPERATOR_GEMM_ALLREDUCE)
}
