// SPDX-License-Identifier: MIT
// The C interface of ring attention.
#include "api_operator.h"
#include "ring_attention_arguments.h"

using namespace mk;
using namespace mk::api;

extern "C" {
MK_OPERATOR_FUNCTIONS(ring_attention, MK_OPERATOR_RING_ATTENTION, mk_ring_attention_maxima_t, checked_call)
MK_OPERATOR_FUNCTIONS(ring_attention_backward, MK_OPERATOR_RING_ATTENTION_BACKWARD, mk_ring_attention_maxima_t,
                      checked_call)
}
