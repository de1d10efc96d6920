// SPDX-License-Identifier: MIT
// Ring attention and its gradients between GPUs through the C interface, and on one: outputs against float64
// loops over the whole sequence, poisoned before, receive areas full of NaN; the same bits from many runs;
// replays of a captured launch with other inputs; a rank that is late, and one that aborts instead of
// launching.
//
//   attention_test [--ranks N] [--quick]
#include <deque>

#include "absent_rank.h"
#include "attention_packed.h"

namespace {

using namespace operators;
using mk::test::Numbers;

Tally tally;

AttentionCase long_case(mk_causal_t causal, int dim) {
  AttentionCase attention;
  attention.seq = 2600;
  attention.heads = 2;
  attention.kv_heads = 1;
  attention.causal = causal;
  attention.dim = dim;
  attention.seed = 3000 + dim;
  return attention;
}

// Tiles, blocks, runs and heads of every kind.
std::vector<AttentionCase> device_cases(bool quick) {
  std::vector<AttentionCase> cases;
  int number = 0;
  for (const int64_t seq : {129, 257, 640, 1000}) {
    if (quick && seq > 640) continue;
    for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
      for (const int dim : {64, 128, 72}) {
        AttentionCase& attention = cases.emplace_back();
        ++number;
        attention.seq = seq;
        attention.causal = causal;
        attention.dim = dim;
        attention.kv_heads = 1 + number % 2;
        attention.heads = attention.kv_heads * (1 + number % 3);
        attention.batch = 1 + number % 2;
        attention.layout = number % 2 == 0 ? MK_ATTENTION_BHSD : MK_ATTENTION_BSHD;
        attention.dtype = number % 3 == 0 ? MK_DTYPE_FP16 : MK_DTYPE_BF16;
        attention.softmax_scale = number % 5 == 0 ? -0.5f : 0.0f;
        attention.seed = 1000 + number;
      }
    }
  }
  for (const Numbers numbers :
       {Numbers::uniform, Numbers::one_hot, Numbers::large, Numbers::rising, Numbers::masked}) {
    for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_ZIGZAG}) {
      AttentionCase& attention = cases.emplace_back();
      attention.seq = numbers == Numbers::one_hot ? 250 : 530;  // of 8 bits
      attention.numbers = numbers;
      attention.causal = causal;
      attention.dim = 128;
      attention.heads = 2;
      attention.softmax_scale = numbers == Numbers::large ? 0.5f : 1;
    }
  }
  // Few tiles that see many keys, which are cut.
  for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
    if (quick && causal != MK_CAUSAL_ZIGZAG) continue;
    for (const int dim : {64, 128}) cases.push_back(long_case(causal, dim));
  }
  for (const Numbers numbers : {Numbers::large, Numbers::rising, Numbers::masked}) {
    if (quick) continue;
    AttentionCase& attention = cases.emplace_back(long_case(MK_CAUSAL_NONE, 128));
    attention.numbers = numbers;
    attention.softmax_scale = numbers == Numbers::large ? 0.5f : 1;
  }
  return cases;
}

std::deque<AttentionProblem> problems_for(int nranks, bool quick) {
  std::vector<AttentionCase> cases;
  for (const AttentionCase& attention : mk::test::attention_corner_cases(nranks)) cases.push_back(attention);
  for (uint64_t index = 0; index < (quick ? 8 : 40); ++index)
    cases.push_back(mk::test::mixed_attention_case(3, index, nranks));
  for (const AttentionCase& attention : device_cases(quick)) cases.push_back(attention);
  for (const AttentionCase& attention : packed_cases(quick)) cases.push_back(attention);
  return make_gpu_problems(std::move(cases));
}

void run_all(Seat& seat, Watchdog& watchdog, int rank, const std::deque<AttentionProblem>& problems,
             const char* what) {
  for (size_t number = 0; number < problems.size(); ++number) {
    const AttentionProblem& problem = problems[number];
    watchdog.stage(rank, describe(problem.attention), 60, seat.comm);
    const size_t before = seat.session.failures().size();
    run_case<Forward>(seat, problem, number % 5 == 0);
    if (has_gradients(problem.attention)) run_case<Backward>(seat, problem, number % 5 == 1);
    const auto& failures = seat.session.failures();
    tally.check(failures.size() == before, failures.empty() ? what : failures.back());
    if (failures.size() >= 5) return;
  }
}

template <class Direction>
void run_packed(Seat& seat, Watchdog& watchdog, int rank, int nranks, const std::deque<AttentionProblem>& alike,
                bool quick) {
  run_same_bits<Direction>(seat, tally, watchdog, rank, alike[0], quick ? 20 : 100);
  run_replays<Direction>(seat, tally, watchdog, rank, alike);
  run_wrong_bounds<Direction>(seat, tally, watchdog, rank, alike);
  if (nranks == 1) return;
  run_spoilt<Direction>(seat, tally, watchdog, rank, alike[0], 1, differing_bound(alike[0], rank),
                        MK_ERROR_MISMATCH, "cu_seqlens of hash");
  tally.check(mk_comm_clear_async_error(seat.comm) == MK_SUCCESS, "mk_comm_clear_async_error");
  run_case<Direction>(seat, alike[1], false);
}

// The others have tiles that are cut, and parts of them that never get their keys.
template <class Direction>
void run_without_last(Rank& rank, const mk::test::LogLines& lines, const mk::test::RankJob& job,
                      const AttentionProblem& problem, Watchdog& watchdog) {
  Seat seat(job, rank.rank, rank.comm, rank.stream);
  AttentionLaunch launch(seat.session, problem);
  DeviceTensors tensors(problem.attention, rows_of(problem, seat), seat.stream);
  run_absent(
      rank, lines, tally, watchdog, Direction::NAME, [&] { run_case<Direction>(seat, problem, false); },
      [&] { return Direction::call(seat, arguments_on<Direction>(launch, tensors)); });
  const auto& failures = seat.session.failures();
  tally.check(failures.empty(), failures.empty() ? "" : "a late rank: " + failures.back());
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = start(argc, argv);
  const std::deque<AttentionProblem> together = problems_for(options.nranks, options.quick);
  const std::deque<AttentionProblem> alone = problems_for(1, options.quick);
  std::vector<AttentionCase> alike(3);
  for (size_t at = 0; at < alike.size(); ++at) {
    alike[at].seq = 700;
    alike[at].dim = 128;
    alike[at].heads = 4;
    alike[at].kv_heads = 2;
    alike[at].causal = MK_CAUSAL_ZIGZAG;
    alike[at].seed = 50 + at;
  }
  const std::deque<AttentionProblem> replayed = mk::test::make_problems(alike);
  const std::deque<AttentionProblem> cut = mk::test::make_problems({long_case(MK_CAUSAL_ZIGZAG, 128)});
  // One rank's tiles of keys that go around.
  const std::deque<AttentionProblem> around = mk::test::make_problems({long_case(MK_CAUSAL_NONE, 128)});
  mk::test::RankJob all, one;
  all.node_of_rank.assign(static_cast<size_t>(options.nranks), 0);
  one.node_of_rank.assign(1, 0);
  const std::deque<AttentionProblem> packed = packed_alike(options.nranks);
  Watchdog watchdog(tally, options.nranks);
  run_ranks(options.nranks, [&](Rank& rank) {
    Seat own(one, 0, rank.alone, rank.stream);
    if (rank.rank == 0) {
      run_all(own, watchdog, 0, alone, "alone");
      run_same_bits<Backward>(own, tally, watchdog, 0, around[0], options.quick ? 20 : 200);
    }
    rank.meet();
    Seat seat(all, rank.rank, rank.comm, rank.stream);
    run_all(seat, watchdog, rank.rank, together, "together");
    run_same_bits<Forward>(seat, tally, watchdog, rank.rank, replayed[0], options.quick ? 20 : 200);
    run_same_bits<Forward>(seat, tally, watchdog, rank.rank, cut[0], options.quick ? 20 : 200);
    run_same_bits<Backward>(seat, tally, watchdog, rank.rank, replayed[0], options.quick ? 20 : 200);
    run_replays<Forward>(seat, tally, watchdog, rank.rank, replayed);
    run_replays<Backward>(seat, tally, watchdog, rank.rank, replayed);
    run_packed<Forward>(seat, watchdog, rank.rank, options.nranks, packed, options.quick);
    run_packed<Backward>(seat, watchdog, rank.rank, options.nranks, packed, options.quick);
    watchdog.stage(rank.rank, "ending", 60, rank.comm);
  });
  run_impatient_ranks(options.nranks, [&](Rank& rank, const mk::test::LogLines& lines) {
    run_without_last<Forward>(rank, lines, all, cut[0], watchdog);
  });
  run_impatient_ranks(options.nranks, [&](Rank& rank, const mk::test::LogLines& lines) {
    run_without_last<Backward>(rank, lines, all, cut[0], watchdog);
  });
  return tally.finish();
}
