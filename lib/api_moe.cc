// SPDX-License-Identifier: MIT
// The C interface of the mixture-of-experts operators.
#include "api_operator.h"
#include "moe_arguments.h"

namespace mk::api {
namespace {

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

Result<OperatorCall> checked_moe_call(Communicator& communicator, const Result<MoeCall>& call) {
  Result<OperatorCall> checked = checked_call(communicator, call);
  if (checked.ok()) MK_RETURN_IF_ERROR(check_prepared(communicator, call.value()));
  return checked;
}

}  // namespace
}  // namespace mk::api

using namespace mk;
using namespace mk::api;

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

MK_OPERATOR_FUNCTIONS(moe_dispatch_gemm, MK_OPERATOR_MOE_DISPATCH_GEMM, mk_moe_maxima_t, checked_moe_call)
MK_OPERATOR_FUNCTIONS(moe_gemm_combine, MK_OPERATOR_MOE_GEMM_COMBINE, mk_moe_maxima_t, checked_moe_call)

}  // extern "C"
