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

}  // namespace mk::api
