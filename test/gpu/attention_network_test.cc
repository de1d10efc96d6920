// SPDX-License-Identifier: MIT
// Ring attention and its gradients between emulated nodes on GPUs, over rc and srd (emulated NICs, calm and
// nasty) and over ofi: against float64 loops over the whole sequence, outputs poisoned before, receive areas
// full of NaN; puts small and large; the same bits from many runs, and from many in a row; replays of a
// captured launch.
//
//   attention_network_test [--ranks N] [--quick]      MK_TEST_TRANSPORT=rc: over this one alone
#include "attention_network_run.h"

namespace {

using namespace operators;
using mk::test::Numbers;

Tally tally;

std::vector<AttentionCase> mask_cases() {
  std::vector<AttentionCase> cases;
  int number = 0;
  for (const int64_t seq : {3, 257, 1030}) {
    for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
      for (const int dim : {64, 128}) {
        AttentionCase& attention = cases.emplace_back();
        ++number;
        attention.seq = seq;
        attention.causal = causal;
        attention.dim = number % 6 == 0 ? dim - 56 : dim;
        attention.kv_heads = 1 + number % 3;
        attention.heads = attention.kv_heads * (1 + number % 2);
        attention.batch = 1 + number % 2;
        attention.layout = number % 2 == 0 ? MK_ATTENTION_BHSD : MK_ATTENTION_BSHD;
        attention.dtype = number % 3 == 0 ? MK_DTYPE_FP16 : MK_DTYPE_BF16;
        attention.seed = 2000 + number;
        if (number % 2 == 0) attention.tuning.chunk_bytes = kSmallPuts;
      }
    }
  }
  return cases;
}

std::vector<AttentionCase> exact_cases() {
  std::vector<AttentionCase> cases;
  for (const Numbers numbers : {Numbers::uniform, Numbers::one_hot, Numbers::masked}) {
    for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
      AttentionCase& attention = cases.emplace_back();
      attention.seq = numbers == Numbers::one_hot ? 250 : 700;  // of 8 bits
      attention.numbers = numbers;
      attention.causal = causal;
      attention.dim = 128;
      attention.heads = 4;
      attention.kv_heads = 2;
      attention.softmax_scale = 1;
      if (causal == MK_CAUSAL_ZIGZAG) attention.tuning.chunk_bytes = kSmallPuts;
    }
  }
  return cases;
}

std::deque<AttentionProblem> problems_for(int nranks, bool quick) {
  std::vector<AttentionCase> cases = mask_cases();
  for (const AttentionCase& attention : exact_cases()) cases.push_back(attention);
  for (const AttentionCase& attention : mk::test::attention_corner_cases(nranks)) cases.push_back(attention);
  if (!quick) {
    for (uint64_t index = 0; index < 20; ++index)
      cases.push_back(mk::test::mixed_attention_case(5, index, nranks));
    AttentionCase& attention = cases.emplace_back();  // several panels a put, and several puts
    attention.seq = 2200;
    attention.dim = 128;
    attention.causal = MK_CAUSAL_ZIGZAG;
  }
  std::erase_if(cases, [](const AttentionCase& attention) { return attention.num_sequences() > 0; });
  return make_gpu_problems(std::move(cases));
}

void run_split(const Options& options, Watchdog& watchdog, const Transport& transport,
               const std::vector<int32_t>& nodes, const std::deque<AttentionProblem>& problems,
               const std::deque<AttentionProblem>& replayed) {
  mk::test::RankJob job;
  job.node_of_rank = nodes;
  run_between_nodes(options.nranks, tally, transport, nodes, [&](Rank& rank, const std::string& where) {
    Seat seat(job, rank.rank, rank.comm, rank.stream);
    run_all(seat, tally, watchdog, where, problems);
    run_same_bits<Forward>(seat, tally, watchdog, rank.rank, replayed[0], options.quick ? 10 : 50);
    run_same_bits<Backward>(seat, tally, watchdog, rank.rank, replayed[0], options.quick ? 10 : 50);
    run_replays<Forward>(seat, tally, watchdog, rank.rank, replayed);
    run_replays<Backward>(seat, tally, watchdog, rank.rank, replayed);
    run_in_a_row<Forward>(seat, tally, watchdog, where, replayed[0], options.quick ? 50 : 300);
    run_in_a_row<Backward>(seat, tally, watchdog, where, replayed[0], options.quick ? 50 : 300);
    watchdog.stage(rank.rank, where + ": leaving", 60, rank.comm);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = start(argc, argv);
  const std::vector<Transport> all = transports(tally);
  if (all.empty()) return 77;
  const std::deque<AttentionProblem> problems = problems_for(options.nranks, options.quick);
  std::vector<AttentionCase> alike(3);
  for (size_t at = 0; at < alike.size(); ++at) {
    alike[at].seq = 1400;
    alike[at].dim = 128;
    alike[at].heads = 2;
    alike[at].kv_heads = 2;
    alike[at].causal = MK_CAUSAL_ZIGZAG;
    alike[at].tuning.chunk_bytes = kSmallPuts;
    alike[at].seed = 70 + at;
  }
  const std::deque<AttentionProblem> replayed = mk::test::make_problems(alike);
  Watchdog watchdog(tally, options.nranks);
  const std::vector<std::vector<int32_t>> layouts = splits(options.nranks);
  for (size_t at = 0; at < all.size(); ++at) {
    // Every way to lie on nodes over the first; the others take turns.
    for (size_t layout = 0; layout < layouts.size(); ++layout) {
      if (at > 0 && layout != at % layouts.size()) continue;
      run_split(options, watchdog, all[at], layouts[layout], problems, replayed);
    }
  }
  return tally.finish();
}
