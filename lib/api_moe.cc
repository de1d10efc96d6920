// SPDX-License-Identifier: MIT
// The C interface of the mixture-of-experts operators.
#include "api_operator.h"
#include "moe_arguments.h"

namespace mk::api {
namespace {

template <class Arguments>
ReadCall read_sizes(const Arguments* args) {
  return [args](const Communicator&) { return any_call(to_call(args)); };
}

ReadCall read_maxima(mk_operator_t op, const mk_moe_maxima_t* maxima) {
  return [op, maxima](const Communicator&) { return any_call(to_call(op, maxima)); };
}

// A combine cannot prepare itself: of what it needs, the capacity, it has only what the record says, and that
// is rank-local and perhaps not written yet.
Status check_prepared(Communicator& communicator, const MoeCall& call) {
  if (call.op != MK_OPERATOR_MOE_GEMM_COMBINE) return {};
  const Result<mk_plan_t> plan = communicator.executor().plan(call);
  if (!plan.ok() || plan.value().prepared) return plan.status();
  return Status(
      MK_ERROR_NOT_PREPARED,
      format("moe_gemm_combine(%s) is beyond what was prepared; call mk_moe_gemm_combine_prepare, or "
             "mk_moe_dispatch_gemm or its prepare with these hidden, experts, topk and out_dtype or more",
             sizes_of(call).c_str()));
}

template <class Arguments>
ReadCall read_checked(const Arguments* args) {
  return [args](Communicator& communicator) -> Result<OperatorCall> {
    const Result<MoeCall> call = to_call(args);
    if (!call.ok()) return call.status();
    MK_RETURN_IF_ERROR(check_buffers(call.value(), communicator.rank(), communicator.nranks()));
    MK_RETURN_IF_ERROR(check_prepared(communicator, call.value()));
    return any_call(call);
  };
}

}  // namespace
}  // namespace mk::api

using namespace mk;
using namespace mk::api;

// One operator: its four functions.
#define MK_MOE_OPERATOR(name, operator_id)                                                                 \
  mk_status_t mk_##name##_prepare(mk_comm_t comm, const mk_moe_maxima_t* maxima) {                         \
    return prepare(comm, "mk_" #name "_prepare", any_call(to_call(operator_id, maxima)));                  \
  }                                                                                                        \
  mk_status_t mk_##name##_workspace_bytes(mk_comm_t comm, const mk_moe_maxima_t* maxima, size_t* bytes) {  \
    return workspace_bytes(comm, "mk_" #name "_workspace_bytes", read_maxima(operator_id, maxima), bytes); \
  }                                                                                                        \
  mk_status_t mk_##name##_plan(mk_comm_t comm, const mk_##name##_args_t* args, mk_plan_t* plan_out) {      \
    return plan(comm, "mk_" #name "_plan", read_sizes(args), plan_out);                                    \
  }                                                                                                        \
  mk_status_t mk_##name(mk_comm_t comm, const mk_##name##_args_t* args, mk_stream_t stream) {              \
    return launch(comm, "mk_" #name, read_checked(args), stream);                                          \
  }

extern "C" {

mk_status_t mk_moe_routing_bytes(const mk_moe_maxima_t* maxima, int nranks, size_t* bytes) {
  if (bytes == nullptr) {
    return finish(
        Status(MK_ERROR_INVALID_ARGUMENT, "mk_moe_routing_bytes: bytes: expected a pointer, saw NULL"));
  }
  const Result<size_t> needed = routing_bytes(maxima, nranks);
  if (needed.ok()) *bytes = needed.value();
  return finish(needed.status());
}

MK_MOE_OPERATOR(moe_dispatch_gemm, MK_OPERATOR_MOE_DISPATCH_GEMM)
MK_MOE_OPERATOR(moe_gemm_combine, MK_OPERATOR_MOE_GEMM_COMBINE)

}  // extern "C"
