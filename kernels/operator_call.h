// SPDX-License-Identifier: MIT
// One call of any operator, checked and completed, and what communicator and executors ask of it without
// knowing which. A kind of call answers with overloads of its own (gemm_call.h is the model).
#pragma once

#include <variant>

#include "gemm_call.h"
#include "moe_call.h"
#include "ring_attention_call.h"

namespace mk {

using OperatorCall = std::variant<GemmCall, MoeCall, RingAttentionCall>;

mk_operator_t operator_of(const OperatorCall& call);
// Its sizes for a sentence: "m=4096, n=1024, k=4096, bf16".
std::string sizes_of(const OperatorCall& call);
// What a flight entry says of it; mk_flight_entry_t says what stands where.
std::array<int64_t, 4> flight_shape(const OperatorCall& call);
// Were buffers prepared for `maxima` also prepared for `call`? Looks at globally equal fields only, so that all
// ranks come to the same answer.
bool covers(const OperatorCall& maxima, const OperatorCall& call);
// What an unprepared call prepares: globally equal fields alone.
OperatorCall maxima_of(const OperatorCall& call);
// What all ranks that prepare must have equal, tuning included.
std::vector<int64_t> agreed_fields(const OperatorCall& call);
// The launch record but for the place of a symmetric output.
EntryRecord make_entry(const OperatorCall& call, uint64_t epoch);
PeerOutput peer_output(const OperatorCall& call);

// "allgather_gemm(m=4096, k=4096, bf16)": the globally equal part of a launch.
std::string describe(const EntryRecord& entry);
// The first thing in which two entries differ, e.g. "rank 0 called ..., rank 2 called ..."; empty if none.
std::string difference(const EntryRecord& a, int rank_a, const EntryRecord& b, int rank_b);

}  // namespace mk
