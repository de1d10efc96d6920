// SPDX-License-Identifier: MIT
#include "gemm_cases.h"

#include <random>

namespace mk::test {

const std::vector<std::vector<int32_t>>& node_layouts() {
  static const std::vector<std::vector<int32_t>> layouts = {
      {0},
      {0, 0},
      {0, 1},
      {0, 0, 0},
      {0, 0, 1},
      {0, 1, 2},
      {0, 1, 0, 1},
      {0, 1, 2, 3},
      {0, 0, 0, 1, 1},
      {0, 1, 0, 1, 0},
      {7, 3, 7, 3, 3, 9},
      {0, 0, 0, 0, 1, 1, 1},
      {0, 0, 0, 0, 0, 0, 0, 0},
      {0, 1, 0, 1, 0, 1, 0, 1},
      {0, 0, 0, 0, 1, 2, 2, 2, 3},
      {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2},
      {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
      {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3},
      {2, 2, 2, 2, 2, 5, 5, 5, 1, 1, 1, 1, 1, 1, 1, 8},
  };
  return layouts;
}

namespace {

// Mode WGRAD: m is the inner dimension, k the rank-local one.
void add_wgrad_corners(std::vector<GemmCase>& cases, int nranks) {
  const auto add = [&](int64_t m, int64_t n, int64_t k) -> GemmCase& {
    GemmCase& gemm = cases.emplace_back();
    gemm.wgrad = true;
    gemm.m = m;
    gemm.n = n;
    gemm.k = k;
    gemm.seed = cases.size();
    gemm.out_dtype = MK_DTYPE_FP32;
    return gemm;
  };
  add(nranks * 16, 32, 32).out_dtype = MK_DTYPE_DEFAULT;
  add(0, 9, 8);
  add(0, 9, 8).accumulate = true;
  add(5, 0, 8).gathered = Gathered::plain;
  add(7, 5, 0).gathered = Gathered::symmetric;
  add(0, 0, 0);
  add(1, 1, 1);
  add(nranks > 1 ? nranks - 1 : 1, 17, 9).gathered = Gathered::symmetric;
  GemmCase& wide = add(nranks + 1, 300, 70);
  wide.accumulate = true;
  GemmCase& uneven = add(3 * nranks + 1, 20, 5);
  uneven.local_step = 3;
  uneven.b_layout = MK_LAYOUT_NK;
  uneven.padding = 1;
  GemmCase& some_empty = add(3 * nranks, 12, 0);  // rank 0 has no rows of C
  some_empty.local_step = 1;
  some_empty.gathered = Gathered::symmetric_uneven;
  for (const Gathered gathered : {Gathered::symmetric, Gathered::symmetric_uneven, Gathered::mixed}) {
    GemmCase& gemm = add(10 * nranks + 3, 40, 11);
    gemm.gathered = gathered;
    gemm.registered = gathered == Gathered::symmetric;
    gemm.accumulate = true;
    gemm.tuning.tile_m = 2;
    gemm.tuning.chunk_bytes = 160;
  }
  GemmCase& many_chunks = add(33 * nranks, 10, 16);
  many_chunks.tuning.tile_m = 1;
  many_chunks.tuning.tile_n = 3;
  many_chunks.tuning.chunk_bytes = 1;
  many_chunks.tuning.compute_ctas = 2;
}

}  // namespace

std::vector<GemmCase> corner_cases(mk_operator_t op, int nranks) {
  std::vector<GemmCase> cases;
  const auto add = [&](int64_t m, int64_t n, int64_t k) -> GemmCase& {
    GemmCase& gemm = cases.emplace_back();
    gemm.op = op;
    gemm.m = m;
    gemm.n = n;
    gemm.k = k;
    gemm.seed = cases.size();
    return gemm;
  };
  const bool gathers = op == MK_OPERATOR_ALLGATHER_GEMM;
  add(nranks * 16, 32, 32);  // everything even
  add(0, 9, 8);
  add(5, 0, 8).gathered = gathers ? Gathered::plain : Gathered::none;
  add(7, 5, 0).gathered = gathers ? Gathered::symmetric : Gathered::none;
  GemmCase& empty_sum = add(nranks + 1, 6, 0);
  empty_sum.bias = empty_sum.accumulate = true;
  add(0, 0, 0);
  add(1, 1, 1);
  add(nranks > 1 ? nranks - 1 : 1, 17, 9).gathered = gathers ? Gathered::symmetric : Gathered::none;
  add(nranks + 1, 300, 8).out_dtype = MK_DTYPE_FP32;
  GemmCase& fp32 = add(2 * nranks + 1, 33, 24);
  fp32.out_dtype = MK_DTYPE_FP32;
  fp32.comm_dtype = gathers ? MK_DTYPE_DEFAULT : MK_DTYPE_FP32;
  fp32.bias = true;
  fp32.bias_dtype = MK_DTYPE_FP32;
  fp32.accumulate = true;
  GemmCase& uneven = add(3 * nranks + 1, 20, 5);
  uneven.local_step = 3;
  uneven.b_layout = MK_LAYOUT_NK;
  uneven.padding = 1;
  GemmCase& some_empty = add(3 * nranks, gathers ? 0 : 12, gathers ? 12 : 0);  // rank 0's local size is 0
  some_empty.local_step = 1;
  some_empty.gathered = gathers ? Gathered::symmetric_uneven : Gathered::none;
  for (const Gathered gathered : {Gathered::symmetric, Gathered::symmetric_uneven, Gathered::mixed}) {
    if (!gathers) break;
    GemmCase& gemm = add(10 * nranks + 3, 11, 40);
    gemm.gathered = gathered;
    gemm.registered = gathered == Gathered::symmetric;
    gemm.tuning.tile_m = 2;
    gemm.tuning.chunk_bytes = 160;
  }
  GemmCase& many_chunks = add(33 * nranks, 10, 16);
  many_chunks.tuning.tile_m = 1;
  many_chunks.tuning.tile_n = 3;
  many_chunks.tuning.chunk_bytes = 1;
  many_chunks.tuning.compute_ctas = 2;
  many_chunks.registered = true;
  if (gathers) add_wgrad_corners(cases, nranks);
  return cases;
}

GemmCase mixed_case(uint64_t seed, uint64_t index, int nranks) {
  std::mt19937_64 random(seed * 0x9e3779b97f4a7c15ull + index);
  const auto below = [&](uint64_t bound) { return static_cast<int64_t>(random() % bound); };
  const auto one_in = [&](uint64_t chances) { return below(chances) == 0; };
  GemmCase gemm;
  gemm.seed = random() >> 32;
  gemm.op = kGemmOperators[below(3)];
  gemm.m = one_in(8) ? below(nranks + 1) : below(static_cast<uint64_t>(nranks) * 12) + 1;
  gemm.n = one_in(16) ? 0 : one_in(6) ? 1 + below(300) : 1 + below(40);
  gemm.k = one_in(16) ? 0 : gemm.gathers() ? 1 + below(160) : 1 + below(40);
  if (one_in(3)) gemm.local_step = below(4);
  const mk_dtype_t types[] = {MK_DTYPE_BF16, MK_DTYPE_FP16, MK_DTYPE_FP32};
  gemm.dtype = types[below(2)];
  gemm.out_dtype = types[below(3)];
  gemm.bias_dtype = types[below(3)];
  if (!gemm.gathers() && one_in(2)) gemm.comm_dtype = types[below(3)];
  gemm.b_layout = one_in(2) ? MK_LAYOUT_NK : MK_LAYOUT_KN;
  gemm.accumulate = one_in(3);
  gemm.bias = one_in(3);
  gemm.padding = one_in(2) ? 0 : static_cast<int>(below(3));
  if (gemm.gathers()) gemm.gathered = static_cast<Gathered>(below(5));
  gemm.registered = one_in(3);
  if (one_in(2)) {
    gemm.tuning.tile_m = static_cast<int32_t>(1 + below(9));
    gemm.tuning.tile_n = static_cast<int32_t>(1 + below(70));
    gemm.tuning.chunk_bytes = 1 + below(600);
  }
  if (gemm.gathers() && one_in(3)) {
    gemm.wgrad = true;
    gemm.bias = false;
    gemm.k = one_in(16) ? 0 : 1 + below(100);
  }
  if (one_in(4)) gemm.tuning.compute_ctas = static_cast<int32_t>(1 + below(3));
  return gemm;
}

std::vector<GemmCase> mixed_cases(uint64_t seed, size_t count, int nranks) {
  std::vector<GemmCase> cases;
  for (size_t index = 0; index < count; ++index) cases.push_back(mixed_case(seed, index, nranks));
  return cases;
}

}  // namespace mk::test
