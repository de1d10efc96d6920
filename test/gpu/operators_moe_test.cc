// SPDX-License-Identifier: MIT
// The mixture-of-experts operators on GPUs, against plain loops on the host: exact on integers, records and
// all; the same bits when repeated; graphs whose topk_idx changes between replays; errors that only the data
// show; a rank that is late, and one that aborts instead of launching.
//
//   operators_moe_test [--ranks N] [--quick]
#include <deque>

#include "absent_rank.h"
#include "moe_layer.h"

namespace {

using namespace operators;
using mk::test::Spread;

Tally tally;

std::vector<MoeCase> small_cases() {
  std::vector<MoeCase> cases = common_cases();
  const auto add = [&](const MoeCase& moe) { cases.push_back(moe); };
  add({.tokens = 40, .hidden = 72, .inter = 40, .experts = 3, .topk = 3, .seed = 2});
  // Rows longer than a push warp's buffer.
  add({.tokens = 30, .hidden = 7168, .inter = 24, .experts = 8, .topk = 8, .dispatched_rows = true, .seed = 6});
  add({.tokens = 50, .hidden = 128, .inter = 128, .topk = 4, .integers = false, .seed = 7});
  return cases;
}

std::vector<MoeCase> large_cases(bool quick) {
  std::vector<MoeCase> cases;
  const MoeCase large{.tokens = quick ? 300 : 700,
                      .same_tokens = true,
                      .hidden = 520,
                      .inter = 584,
                      .experts = 8,
                      .topk = 4,
                      .dispatched_rows = true,
                      .seed = 8};
  cases.push_back(large);
  cases.push_back(large);
  cases.back().w_layout = MK_LAYOUT_NK;
  cases.back().row_scale = true;
  cases.back().same_tokens = false;
  cases.push_back(large);
  cases.back().spread = Spread::one_expert;
  cases.back().out_dtype = MK_DTYPE_FP32;
  // Either tile for rows that it is not chosen for, few CTAs, one that pushes.
  for (const int tile_m : {64, 128}) {
    cases.push_back(large);
    cases.back().tokens = tile_m == 64 ? 400 : 20;
    cases.back().tuning.tile_m = tile_m;
    cases.back().tuning.copy_ctas = 1;
    cases.back().tuning.compute_ctas = 5;
  }
  // Last tiles that are cut along k: into two parts and more, of experts that have all rows or some, and where
  // there are no others.
  MoeCase cut{
      .tokens = 120, .same_tokens = true, .hidden = 1544, .inter = 520, .experts = 8, .topk = 4, .seed = 9};
  cut.tuning.tile_m = 128;
  for (const int compute_ctas : {7, 16, 29}) {
    cut.tuning.compute_ctas = compute_ctas;
    cut.w_layout = compute_ctas == 16 ? MK_LAYOUT_NK : MK_LAYOUT_KN;
    cut.out_dtype = compute_ctas == 7 ? MK_DTYPE_FP32 : MK_DTYPE_BF16;
    for (const Spread spread : {Spread::even, Spread::few, Spread::one_expert}) {
      cut.spread = spread;
      cut.row_scale = spread == Spread::even;
      cases.push_back(cut);
    }
  }
  cut.spread = Spread::half;
  cut.dtype = MK_DTYPE_FP16;
  cut.integers = false;
  cases.push_back(cut);
  return cases;
}

// A layer three times: dispatch and combine; again, with the same bits; and a dispatch by the record.
void run_layer(Rank& rank, mk_comm_t comm, int nranks, const MoeProblem& problem, Watchdog& watchdog) {
  watchdog.stage(rank.rank, describe(problem.moe), STAGE_SECONDS, comm);
  MoeLayer layer(rank, comm, nranks, problem, problem.capacity());
  const mk_moe_maxima_t maxima = layer.maxima();
  rank.meet();
  require(mk_moe_dispatch_gemm_prepare(comm, &maxima), "mk_moe_dispatch_gemm_prepare", comm);
  std::string bits;
  for (int turn = 0; turn < 3; ++turn) {
    layer.poison();
    rank.meet();
    require(layer.dispatch(turn == 2), "mk_moe_dispatch_gemm", comm);
    require(layer.combine(), "mk_moe_gemm_combine", comm);
    require(mk_comm_synchronize(comm, rank.stream), describe(problem.moe).c_str(), comm);
    if (turn == 0) {
      check(tally, rank, problem, "dispatch", layer.wrong_dispatch());
      check(tally, rank, problem, "combine", layer.wrong_combine());
      bits = layer.dispatch_bits() + layer.combine_bits();
    } else {
      check(tally, rank, problem, turn == 1 ? "repeated" : "by its record",
            layer.dispatch_bits() + layer.combine_bits() == bits ? "" : "other bits");
    }
  }
  rank.meet();
}

// Many launches of two problems in turn, without waiting for any but the last of each.
void run_repeatedly(Rank& rank, const std::deque<MoeProblem>& problems, Watchdog& watchdog, int turns) {
  watchdog.stage(rank.rank, "launches one after the other", STAGE_SECONDS, rank.comm);
  MoeLayer first(rank, rank.comm, rank.nranks, problems[0], problems[0].capacity());
  MoeLayer second(rank, rank.comm, rank.nranks, problems[1], problems[1].capacity());
  for (MoeLayer* layer : {&first, &second}) {
    const mk_moe_maxima_t maxima = layer->maxima();
    require(mk_moe_dispatch_gemm_prepare(rank.comm, &maxima), "mk_moe_dispatch_gemm_prepare", rank.comm);
    layer->poison();
  }
  rank.meet();
  Leash leash(8);
  for (int turn = 0; turn < turns; ++turn) {
    for (MoeLayer* layer : {&first, &second}) {
      require(layer->dispatch(), "mk_moe_dispatch_gemm", rank.comm);
      require(layer->combine(), "mk_moe_gemm_combine", rank.comm);
    }
    if (turn % 4 == 0) leash.mark(rank.stream);
  }
  rank.synchronize();
  check(tally, rank, problems[0], "dispatch after many", first.wrong_dispatch());
  check(tally, rank, problems[0], "combine after many", first.wrong_combine());
  check(tally, rank, problems[1], "dispatch after many", second.wrong_dispatch());
  check(tally, rank, problems[1], "combine after many", second.wrong_combine());
  rank.meet();
}

// A graph of a dispatch and a combine, replayed on other tokens, weights and indices each time.
void run_replays(Rank& rank, const std::deque<MoeProblem>& problems, Watchdog& watchdog) {
  watchdog.stage(rank.rank, "replays", STAGE_SECONDS, rank.comm);
  int64_t capacity = 0;
  for (const MoeProblem& problem : problems) capacity = std::max(capacity, problem.capacity());
  MoeLayer layer(rank, rank.comm, rank.nranks, problems[0], capacity);
  const mk_moe_maxima_t maxima = layer.maxima();
  require(mk_moe_dispatch_gemm_prepare(rank.comm, &maxima), "mk_moe_dispatch_gemm_prepare", rank.comm);
  rank.meet();
  const Replay replay(rank.stream, [&] {
    require(layer.dispatch(), "a captured dispatch", rank.comm);
    require(layer.combine(), "a captured combine", rank.comm);
  });
  tally.check(replay.num_nodes() == 2,
              text("rank %d: captured %zu nodes, expected 2", rank.rank, replay.num_nodes()));
  for (int turn = 0; turn < 2; ++turn) {
    for (const MoeProblem& problem : problems) {
      layer.load(problem);
      layer.poison();
      rank.meet();
      replay.launch();
      rank.synchronize();
      check(tally, rank, problem, "dispatch replayed", layer.wrong_dispatch());
      check(tally, rank, problem, "combine replayed", layer.wrong_combine());
      rank.meet();
    }
  }
}

void run_data_errors(Rank& rank, const std::deque<MoeProblem>& problems, Watchdog& watchdog) {
  const MoeProblem& problem = problems[0];
  MoeLayer layer(rank, rank.comm, rank.nranks, problem, problem.capacity());
  MoeLayer other(rank, rank.comm, rank.nranks, problems[1], problems[1].capacity());
  for (MoeLayer* each : {&layer, &other}) {
    const mk_moe_maxima_t maxima = each->maxima();
    require(mk_moe_dispatch_gemm_prepare(rank.comm, &maxima), "mk_moe_dispatch_gemm_prepare", rank.comm);
  }
  run_bad_indices(tally, rank, layer, watchdog);
  watchdog.stage(rank.rank, "too little capacity", STAGE_SECONDS, rank.comm);
  mk_moe_dispatch_gemm_args_t args = layer.dispatch_args();
  args.capacity_rows = problem.capacity() - 1;
  layer.poison();
  rank.meet();
  require(mk_moe_dispatch_gemm(rank.comm, &args, rank.stream), "mk_moe_dispatch_gemm", rank.comm);
  expect_data_error(tally, rank, -1,
                    text("capacity_rows: expected at least %lld", static_cast<long long>(problem.capacity())));
  expect_nothing(tally, rank, layer, problem.capacity());
  run_mixed_records(tally, rank, layer, other, watchdog);
  watchdog.stage(rank.rank, "a record that is none", STAGE_SECONDS, rank.comm);
  if (rank.rank == 1) layer.fill_record(0x5a);
  rank.meet();
  require(layer.dispatch(true), "mk_moe_dispatch_gemm", rank.comm);
  expect_data_error(tally, rank, 1, "routing: expected the record of a dispatch");
  rank.meet();
}

void run_without_last(Rank& rank, const mk::test::LogLines& lines, const MoeProblem& problem, bool combines,
                      Watchdog& watchdog) {
  MoeLayer layer(rank, rank.comm, rank.nranks, problem, problem.capacity());
  const mk_moe_maxima_t maxima = layer.maxima();
  require(mk_moe_dispatch_gemm_prepare(rank.comm, &maxima), "mk_moe_dispatch_gemm_prepare", rank.comm);
  const auto checked = [&] {
    layer.poison();
    require(layer.dispatch(), "mk_moe_dispatch_gemm", rank.comm);
    require(layer.combine(), "mk_moe_gemm_combine", rank.comm);
    rank.synchronize();
    check(tally, rank, problem, "dispatch, a late rank", layer.wrong_dispatch());
    check(tally, rank, problem, "combine, a late rank", layer.wrong_combine());
  };
  run_absent(rank, lines, tally, watchdog, combines ? "mk_moe_gemm_combine" : "mk_moe_dispatch_gemm", checked,
             [&] { return combines ? layer.combine() : layer.dispatch(); });
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = start(argc, argv);
  const int nranks = options.nranks;
  std::vector<MoeCase> cases = small_cases();
  for (const MoeCase& large : large_cases(options.quick)) cases.push_back(large);
  const std::deque<MoeProblem> problems = make_problems(cases, nranks);
  const std::deque<MoeProblem> alone = make_problems(
      {{.same_tokens = true}, {.tokens = 200, .same_tokens = true, .hidden = 136, .inter = 264, .topk = 3}}, 1);
  const MoeCase replayed{
      .tokens = 300, .same_tokens = true, .hidden = 264, .inter = 136, .experts = 9, .topk = 3};
  std::vector<MoeCase> replays(3, replayed);
  for (size_t i = 0; i < replays.size(); ++i) replays[i].seed = 20 + i;
  replays[1].spread = Spread::one_expert;
  const std::deque<MoeProblem> replay_problems = make_problems(replays, nranks);
  const MoeCase faulty{.tokens = 6,
                       .same_tokens = true,
                       .experts = 7,
                       .topk = 3,
                       .index_type = MK_INDEX_INT64,
                       .dispatched_rows = true};
  std::vector<MoeCase> faults(2, faulty);
  faults[1].seed = 9;
  const std::deque<MoeProblem> fault_problems = make_problems(faults, nranks);
  Watchdog watchdog(tally, nranks);
  run_ranks(nranks, [&](Rank& rank) {
    load_pattern_kernels(rank.stream);
    rank.meet();
    if (rank.nranks > 1) {
      for (const MoeProblem& problem : problems) run_layer(rank, rank.comm, rank.nranks, problem, watchdog);
      run_repeatedly(rank, replay_problems, watchdog, options.quick ? 50 : 500);
      run_replays(rank, replay_problems, watchdog);
      run_data_errors(rank, fault_problems, watchdog);
      run_layer(rank, rank.comm, rank.nranks, problems[3], watchdog);
    }
    for (const MoeProblem& problem : alone) run_layer(rank, rank.alone, 1, problem, watchdog);
    watchdog.stage(rank.rank, "leaving", 60, rank.comm);
  });
  for (const bool combines : {false, true}) {
    run_impatient_ranks(nranks, [&](Rank& rank, const mk::test::LogLines& lines) {
      run_without_last(rank, lines, replay_problems[0], combines, watchdog);
    });
  }
  return tally.finish();
}
