// SPDX-License-Identifier: MIT
// The four functions of an operator, whatever the operator: each reads and checks its own argument struct.
#pragma once

#include <functional>

#include "../kernels/operator_call.h"
#include "api.h"

namespace mk::api {

// From the caller's struct to a checked call, for this communicator's rank.
using ReadCall = std::function<Result<OperatorCall>(Communicator& communicator)>;

mk_status_t prepare(mk_comm_t comm, const char* function, const Result<OperatorCall>& maxima);
mk_status_t workspace_bytes(mk_comm_t comm, const char* function, const ReadCall& maxima, size_t* bytes);
mk_status_t plan(mk_comm_t comm, const char* function, const ReadCall& call, mk_plan_t* plan_out);
// `call` checks pointers, too.
mk_status_t launch(mk_comm_t comm, const char* function, const ReadCall& call, mk_stream_t stream);

// Any kind of call as an OperatorCall.
template <class Call>
Result<OperatorCall> any_call(const Result<Call>& call) {
  if (!call.ok()) return call.status();
  return OperatorCall(call.value());
}

// The same with its pointers checked, for this communicator's rank.
template <class Call>
Result<OperatorCall> checked_call(const Communicator& communicator, const Result<Call>& call) {
  if (call.ok()) MK_RETURN_IF_ERROR(check_buffers(call.value(), communicator.rank(), communicator.nranks()));
  return any_call(call);
}

}  // namespace mk::api

// The four functions of one operator. In scope are to_call, from its argument struct and from (operator,
// maxima), and `checked`, which makes of (communicator, call) what is launched.
#define MK_OPERATOR_FUNCTIONS(name, operator_id, maxima_type, checked)                                     \
  mk_status_t mk_##name##_prepare(mk_comm_t comm, const maxima_type* maxima) {                             \
    return prepare(comm, "mk_" #name "_prepare", any_call(to_call(operator_id, maxima)));                  \
  }                                                                                                        \
  mk_status_t mk_##name##_workspace_bytes(mk_comm_t comm, const maxima_type* maxima, size_t* bytes) {      \
    const auto read = [maxima](const Communicator&) { return any_call(to_call(operator_id, maxima)); };    \
    return workspace_bytes(comm, "mk_" #name "_workspace_bytes", read, bytes);                             \
  }                                                                                                        \
  mk_status_t mk_##name##_plan(mk_comm_t comm, const mk_##name##_args_t* args, mk_plan_t* plan_out) {      \
    const auto read = [args](const Communicator&) { return any_call(to_call(args)); };                     \
    return plan(comm, "mk_" #name "_plan", read, plan_out);                                                \
  }                                                                                                        \
  mk_status_t mk_##name(mk_comm_t comm, const mk_##name##_args_t* args, mk_stream_t stream) {              \
    const auto read = [args](Communicator& communicator) { return checked(communicator, to_call(args)); }; \
    return launch(comm, "mk_" #name, read, stream);                                                        \
  }
