// SPDX-License-Identifier: MIT
// The C interface of the mixture-of-experts operators.
#include "../kernels/operator_call.h"
#include "api_unbuilt.h"

namespace mk::api {
namespace {

Result<size_t> routing_bytes(const mk_moe_maxima_t* from, int nranks) {
  mk_moe_maxima_t maxima;
  MK_RETURN_IF_ERROR(read_struct(from, sizeof(mk_moe_maxima_t), "mk_moe_routing_bytes: maxima", maxima));
  constexpr int64_t kMaxRows = int64_t{1} << 31;
  const auto refuse = [](const char* field, const char* expected, long long seen) {
    return Status(MK_ERROR_INVALID_ARGUMENT,
                  format("mk_moe_routing_bytes: %s: expected %s, saw %lld", field, expected, seen));
  };
  if (nranks < 1 || nranks > 4096) return refuse("nranks", "1 to 4096", nranks);
  if (maxima.tokens < 0 || maxima.tokens >= kMaxRows)
    return refuse("maxima.tokens", "0 to 2^31 - 1", maxima.tokens);
  if (maxima.experts < 1 || maxima.experts > 65536)
    return refuse("maxima.experts", "1 to 65536", maxima.experts);
  if (maxima.topk < 1 || maxima.topk > 16) return refuse("maxima.topk", "1 to 16", maxima.topk);
  if (maxima.capacity_rows < 0 || maxima.capacity_rows >= kMaxRows) {
    return refuse("maxima.capacity_rows", "0 (the worst case) to 2^31 - 1", maxima.capacity_rows);
  }
  const int64_t worst = nranks * maxima.tokens * maxima.topk;
  const int64_t rows = maxima.capacity_rows > 0 ? min_of(maxima.capacity_rows, worst) : worst;
  if (rows >= kMaxRows) return refuse("maxima", "fewer than 2^31 rows a rank; set capacity_rows", rows);
  const int64_t local_experts = ceil_div(maxima.experts, nranks);
  // Head; counts and offsets per local expert; received rows; and the library's own: where each of this rank's
  // (token, k) went, and how many rows every rank sent to each local expert.
  int64_t bytes = static_cast<int64_t>(sizeof(mk_moe_routing_t));
  bytes = round_up(bytes, 16) + local_experts * 4;
  bytes = round_up(bytes, 16) + (local_experts + 1) * 4;
  bytes = round_up(bytes, 16) + rows * static_cast<int64_t>(sizeof(mk_moe_row_t));
  bytes = round_up(bytes, 16) + maxima.tokens * maxima.topk * 8;
  bytes = round_up(bytes, 16) + local_experts * nranks * 4;
  return static_cast<size_t>(round_up(bytes, 256));
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

MK_UNBUILT_OPERATOR(moe_dispatch_gemm, mk_moe_maxima_t)
MK_UNBUILT_OPERATOR(moe_gemm_combine, mk_moe_maxima_t)

}  // extern "C"
