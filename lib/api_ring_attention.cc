// SPDX-License-Identifier: MIT
// The C interface of ring attention.
#include "api_unbuilt.h"

using namespace mk::api;

extern "C" {
MK_UNBUILT_OPERATOR(ring_attention, mk_ring_attention_maxima_t)
MK_UNBUILT_OPERATOR(ring_attention_backward, mk_ring_attention_maxima_t)
}
