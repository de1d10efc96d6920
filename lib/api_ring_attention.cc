// SPDX-License-Identifier: MIT
// The C interface of ring attention.
#include "api_operator.h"
#include "ring_attention_arguments.h"

namespace mk::api {
namespace {

template <class Arguments>
ReadCall read_sizes(const Arguments* args) {
  return [args](const Communicator&) { return any_call(to_call(args)); };
}

template <class Arguments>
ReadCall read_checked(const Arguments* args) {
  return [args](const Communicator& communicator) -> Result<OperatorCall> {
    const Result<RingAttentionCall> call = to_call(args);
    if (call.ok()) MK_RETURN_IF_ERROR(check_buffers(call.value(), communicator.rank(), communicator.nranks()));
    return any_call(call);
  };
}

ReadCall read_maxima(mk_operator_t op, const mk_ring_attention_maxima_t* maxima) {
  return [op, maxima](const Communicator&) { return any_call(to_call(op, maxima)); };
}

}  // namespace
}  // namespace mk::api

using namespace mk;
using namespace mk::api;

// One operator: its four functions.
#define MK_RING_ATTENTION_OPERATOR(name, operator_id)                                                      \
  mk_status_t mk_##name##_prepare(mk_comm_t comm, const mk_ring_attention_maxima_t* maxima) {              \
    return prepare(comm, "mk_" #name "_prepare", any_call(to_call(operator_id, maxima)));                  \
  }                                                                                                        \
  mk_status_t mk_##name##_workspace_bytes(mk_comm_t comm, const mk_ring_attention_maxima_t* maxima,        \
                                          size_t* bytes) {                                                 \
    return workspace_bytes(comm, "mk_" #name "_workspace_bytes", read_maxima(operator_id, maxima), bytes); \
  }                                                                                                        \
  mk_status_t mk_##name##_plan(mk_comm_t comm, const mk_##name##_args_t* args, mk_plan_t* plan_out) {      \
    return plan(comm, "mk_" #name "_plan", read_sizes(args), plan_out);                                    \
  }                                                                                                        \
  mk_status_t mk_##name(mk_comm_t comm, const mk_##name##_args_t* args, mk_stream_t stream) {              \
    return launch(comm, "mk_" #name, read_checked(args), stream);                                          \
  }

extern "C" {
MK_RING_ATTENTION_OPERATOR(ring_attention, MK_OPERATOR_RING_ATTENTION)
MK_RING_ATTENTION_OPERATOR(ring_attention_backward, MK_OPERATOR_RING_ATTENTION_BACKWARD)
}
