// SPDX-License-Identifier: MIT
// Packed sequences for the tests of ring attention on GPUs: cases of every kind, some of one shape, and what
// wrong cu_seqlens say.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "attention_run.h"

namespace operators {

// Some and empty ones, many of one position, many that end within tiles, one.
inline std::vector<int32_t> bounds_of(int kind, int seq) {
  if (kind == 0) return {0, seq / 3, seq / 3, 2 * seq / 3 + 5, seq, seq};
  std::vector<int32_t> bounds = {0};
  const int length = kind == 1 ? 1 : 17, count = kind == 1 ? 40 : kind == 2 ? seq / length : 0;
  for (int i = 1; i <= count; ++i) bounds.push_back(i * length);
  bounds.push_back(seq);
  return bounds;
}

inline std::vector<AttentionCase> packed_cases(bool quick) {
  std::vector<AttentionCase> cases;
  int number = 0;
  for (const int seq : {129, 640, 1000}) {
    if (quick && seq > 640) continue;
    for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
      for (int kind = 0; kind < 4; ++kind) {
        AttentionCase& attention = cases.emplace_back();
        ++number;
        attention.seq = seq;
        attention.causal = causal;
        attention.cu_seqlens = bounds_of(kind, seq);
        attention.dim = number % 3 == 0 ? 128 : number % 3 == 1 ? 64 : 72;
        attention.kv_heads = 1 + number % 2;
        attention.heads = attention.kv_heads * (1 + number % 3);
        attention.layout = number / 2 % 2 == 0 ? MK_ATTENTION_BHSD : MK_ATTENTION_BSHD;
        attention.dtype = number % 5 == 0 ? MK_DTYPE_FP16 : MK_DTYPE_BF16;
        attention.seed = 3000 + number;
      }
    }
  }
  for (const mk::test::Numbers numbers :
       {mk::test::Numbers::uniform, mk::test::Numbers::one_hot, mk::test::Numbers::large,
        mk::test::Numbers::rising, mk::test::Numbers::masked}) {
    for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
      for (int kind = 0; kind < 3; ++kind) {
        AttentionCase& attention = cases.emplace_back();
        attention.seq = numbers == mk::test::Numbers::one_hot ? 250 : 530;  // of 8 bits
        attention.numbers = numbers;
        attention.causal = causal;
        attention.cu_seqlens = bounds_of(kind, static_cast<int>(attention.seq));
        attention.dim = kind == 1 ? 64 : 128;
        attention.heads = 2;
        attention.layout = kind == 2 ? MK_ATTENTION_BHSD : MK_ATTENTION_BSHD;
        attention.softmax_scale = numbers == mk::test::Numbers::large ? 0.5f : 1;
      }
    }
  }
  // More sequences than threads; more rows than the CTAs' tiles.
  AttentionCase& many = cases.emplace_back();
  many.seq = 1200;
  many.causal = MK_CAUSAL_ZIGZAG;
  for (int bound = 0; bound <= many.seq; bound += 2) many.cu_seqlens.push_back(bound);
  // So many that they do not fit into the shared memory that there is for them.
  AttentionCase& most = cases.emplace_back();
  most.seq = 6400;
  most.causal = MK_CAUSAL_CONTIGUOUS;
  for (int bound = 0; bound <= most.seq; bound += 2) most.cu_seqlens.push_back(bound);
  AttentionCase& large = cases.emplace_back();
  large.seq = 3000;
  large.causal = MK_CAUSAL_ZIGZAG;
  large.heads = large.kv_heads = 2;
  large.cu_seqlens = {0, 1000, 1003, static_cast<int32_t>(large.seq)};
  // More tiles than CTAs, which are listed.
  for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
    AttentionCase& listed = cases.emplace_back();
    listed.seq = 700;
    listed.causal = causal;
    listed.heads = 30;
    listed.kv_heads = 10;
    listed.dim = causal == MK_CAUSAL_CONTIGUOUS ? 128 : 64;
    listed.cu_seqlens = {0, 190, 190, 450, static_cast<int32_t>(listed.seq)};
  }
  return cases;
}

// Of one shape, and so many rows a rank whatever the bounds.
inline std::deque<AttentionProblem> packed_alike(int nranks) {
  const int unit = 2 * nranks * 16;
  std::vector<AttentionCase> cases(3);
  for (size_t at = 0; at < cases.size(); ++at) {
    const int first = static_cast<int>(at) * unit;
    cases[at].seq = 10 * unit;
    cases[at].cu_seqlens = {0, first, 4 * unit, 4 * unit, 9 * unit - first, 10 * unit};
    cases[at].dim = 128;
    cases[at].heads = 4;
    cases[at].kv_heads = 2;
    cases[at].causal = MK_CAUSAL_ZIGZAG;
    cases[at].layout = MK_ATTENTION_BHSD;
    cases[at].seed = 60 + at;
  }
  return mk::test::make_problems(cases);
}

// cu_seqlens[1] of packed_alike()[0] by which rank 1 differs from the others: each has as many rows as before,
// for its tensors have no more.
inline int32_t differing_bound(const AttentionProblem& first_alike, int rank) {
  const int32_t unit = first_alike.attention.cu_seqlens[2] / 4;
  return rank == 1 ? 2 * unit : unit;
}

template <class Direction>
void run_spoilt(Seat& seat, Tally& tally, Watchdog& watchdog, int rank, const AttentionProblem& problem,
                size_t at, int32_t value, mk_status_t status, const std::string& says) {
  std::vector<int32_t> spoilt = problem.attention.cu_seqlens;
  spoilt[at] = value;
  run_bad_bounds<Direction>(seat, tally, watchdog, rank, problem, spoilt, status, says);
}

// Wrong on all ranks alike: each is named, and the next launch is as any other.
template <class Direction>
void run_wrong_bounds(Seat& seat, Tally& tally, Watchdog& watchdog, int rank,
                      const std::deque<AttentionProblem>& alike) {
  const std::vector<int32_t>& bounds = alike[0].attention.cu_seqlens;
  const auto spoil = [&](size_t at, int32_t value, const std::string& says) {
    run_spoilt<Direction>(seat, tally, watchdog, rank, alike[0], at, value, MK_ERROR_DATA, says);
    tally.check(mk_comm_clear_async_error(seat.comm) == MK_SUCCESS, "mk_comm_clear_async_error");
    run_case<Direction>(seat, alike[1], false);
  };
  spoil(0, 1, "cu_seqlens[0]: expected 0, saw 1");
  spoil(3, -7, text("cu_seqlens[3]: expected at least %d", bounds[2]));
  spoil(5, 3, text("cu_seqlens[5]: expected at least %d", bounds[4]));
  spoil(5, bounds[5] + 1, text("cu_seqlens[5]: expected %d (seq)", bounds[5]));
}

}  // namespace operators
