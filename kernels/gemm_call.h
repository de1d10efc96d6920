// SPDX-License-Identifier: MIT
// One call of a GEMM operator after the API has checked and completed it: no defaults left, whatever the
// operator.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "operator_names.h"
#include "protocol.h"

namespace mk {

struct GemmCall {
  mk_operator_t op = MK_OPERATOR_NONE;
  mk_allgather_mode_t mode = MK_ALLGATHER_FORWARD;
  int64_t m = 0;  // rows over all ranks
  int64_t n = 0;
  int64_t k = 0;
  mk_dtype_t dtype = MK_DTYPE_BF16;
  mk_dtype_t out_dtype = MK_DTYPE_BF16;
  mk_dtype_t comm_dtype = MK_DTYPE_BF16;  // equal to dtype for the all-gather
  mk_dtype_t bias_dtype = MK_DTYPE_BF16;
  mk_layout_t b_layout = MK_LAYOUT_KN;
  bool accumulate = false;
  const void* a = nullptr;
  int64_t lda = 0;
  const void* b = nullptr;
  int64_t ldb = 0;
  void* c = nullptr;
  int64_t ldc = 0;
  const void* bias = nullptr;
  void* a_gathered = nullptr;
  int64_t lda_gathered = 0;
  mk_tuning_t tuning = MK_TUNING_INIT;
};

// The width of the rows that travel: of A for the all-gather (of X in mode WGRAD), of C for the reductions.
constexpr int64_t travelling_columns(const GemmCall& call) {
  return call.op == MK_OPERATOR_ALLGATHER_GEMM && call.mode == MK_ALLGATHER_FORWARD ? call.k : call.n;
}

// Are they equal in all but addresses?
bool equal_but_addresses(const GemmCall& one, const GemmCall& other);

// What operator_call.h asks of every kind of call.
std::string sizes_of(const GemmCall& call);
std::array<int64_t, 4> flight_shape(const GemmCall& call);
bool covers(const GemmCall& maxima, const GemmCall& call);
GemmCall maxima_of(const GemmCall& call);
std::vector<int64_t> agreed_fields(const GemmCall& call);
void fill_entry(const GemmCall& call, EntryRecord& record);
PeerOutput peer_output(const GemmCall& call);
std::string describe_gemm_entry(const EntryRecord& entry);

}  // namespace mk
