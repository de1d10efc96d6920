// SPDX-License-Identifier: MIT
// A layer of a mixture of experts, dispatch and combine, between emulated nodes on GPUs, over rc and srd
// (emulated NICs, calm and nasty) and over ofi, against plain loops on the host: exact on integers, records and
// all; the same bits when repeated, by its record, and many in a row; graphs whose topk_idx changes between
// replays; and errors that only the data show.
//
//   operators_moe_network_test [--ranks N] [--quick]      MK_TEST_TRANSPORT=rc: over this one alone
#include <deque>

#include "moe_layer.h"
#include "network_transports.h"

namespace {

using namespace operators;
using mk::test::Spread;

Tally tally;

// Short chunks, so that there are many; some of the length that calls have.
constexpr int64_t SHORT_CHUNK = 4096;

std::vector<MoeCase> cases(bool quick) {
  std::vector<MoeCase> made;
  const auto add = [&](MoeCase moe) {
    made.push_back(moe);
    made.back().tuning.chunk_bytes = SHORT_CHUNK;
  };
  for (const MoeCase& moe : common_cases()) add(moe);
  for (int topk = 1; topk <= 8; ++topk) {
    add({.tokens = 70, .hidden = 64, .inter = 72, .experts = 24, .topk = topk, .seed = 30u + topk});
  }
  // Rows longer than a push warp's buffer, in chunks as they are without tuning.
  made.push_back(
      {.tokens = 60, .hidden = 7168, .inter = 24, .experts = 8, .topk = 8, .dispatched_rows = true, .seed = 6});
  add({.tokens = 90, .hidden = 128, .inter = 128, .experts = 16, .topk = 16, .integers = false, .seed = 7});
  made.push_back({.tokens = quick ? 150 : 300,
                  .same_tokens = true,
                  .hidden = 520,
                  .inter = 584,
                  .experts = 8,
                  .topk = 4,
                  .w_layout = MK_LAYOUT_NK,
                  .row_scale = true,
                  .seed = 8});
  made.push_back(made.back());
  made.back().spread = Spread::one_expert;
  made.back().tuning.copy_ctas = 1;
  made.back().tuning.compute_ctas = 5;
  made.back().tuning.reduce_ctas = 1;
  // Last tiles that are cut along k.
  made.push_back(
      {.tokens = 120, .same_tokens = true, .hidden = 1544, .inter = 520, .experts = 8, .topk = 4, .seed = 9});
  made.back().tuning.tile_m = 128;
  made.back().tuning.compute_ctas = 7;
  return made;
}

// Three times: the second with the same bits, the third by the record of the second.
void run_layer(Rank& rank, const MoeProblem& problem, const std::string& where, Watchdog& watchdog) {
  watchdog.stage(rank.rank, where + ": " + describe(problem.moe), STAGE_SECONDS, rank.comm);
  MoeLayer layer(rank, rank.comm, rank.nranks, problem, problem.capacity());
  const mk_moe_maxima_t maxima = layer.maxima();
  rank.meet();
  require(mk_moe_dispatch_gemm_prepare(rank.comm, &maxima), "mk_moe_dispatch_gemm_prepare", rank.comm);
  std::string bits;
  for (int turn = 0; turn < 3; ++turn) {
    layer.poison();
    rank.meet();
    require(layer.dispatch(turn == 2), "mk_moe_dispatch_gemm", rank.comm);
    require(layer.combine(), "mk_moe_gemm_combine", rank.comm);
    require(mk_comm_synchronize(rank.comm, rank.stream), describe(problem.moe).c_str(), rank.comm);
    if (turn == 0) {
      check(tally, rank, problem, (where + ": dispatch").c_str(), layer.wrong_dispatch());
      check(tally, rank, problem, (where + ": combine").c_str(), layer.wrong_combine());
      bits = layer.dispatch_bits() + layer.combine_bits();
    } else {
      check(tally, rank, problem, turn == 1 ? "repeated" : "by its record",
            layer.dispatch_bits() + layer.combine_bits() == bits ? "" : "other bits");
    }
  }
  rank.meet();
}

// Launches of two problems in turn, without waiting for any but the last of each.
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
    for (const MoeLayer* layer : {&first, &second}) {
      require(layer->dispatch(), "mk_moe_dispatch_gemm", rank.comm);
      require(layer->combine(), "mk_moe_gemm_combine", rank.comm);
    }
    leash.mark(rank.stream);
  }
  rank.synchronize();
  check(tally, rank, problems[0], "dispatch after many", first.wrong_dispatch());
  check(tally, rank, problems[0], "combine after many", first.wrong_combine());
  check(tally, rank, problems[1], "dispatch after many", second.wrong_dispatch());
  check(tally, rank, problems[1], "combine after many", second.wrong_combine());
  rank.meet();
}

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
  for (int turn = 0; turn < 3; ++turn) {
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
  MoeLayer layer(rank, rank.comm, rank.nranks, problems[0], problems[0].capacity());
  const MoeLayer other(rank, rank.comm, rank.nranks, problems[1], problems[1].capacity());
  for (const MoeLayer* each : {static_cast<const MoeLayer*>(&layer), &other}) {
    const mk_moe_maxima_t maxima = each->maxima();
    require(mk_moe_dispatch_gemm_prepare(rank.comm, &maxima), "mk_moe_dispatch_gemm_prepare", rank.comm);
  }
  run_bad_indices(tally, rank, layer, watchdog);
  run_mixed_records(tally, rank, layer, other, watchdog);
  rank.meet();
}

struct Problems {
  std::deque<MoeProblem> all;
  std::deque<MoeProblem> replayed;
  std::deque<MoeProblem> faulty;
};

Problems make_all(const Options& options) {
  const MoeCase replayed{
      .tokens = 300, .same_tokens = true, .hidden = 264, .inter = 136, .experts = 9, .topk = 3};
  std::vector<MoeCase> replays(3, replayed);
  for (size_t i = 0; i < replays.size(); ++i) {
    replays[i].seed = 20 + i;
    replays[i].tuning.chunk_bytes = 16 * SHORT_CHUNK;
  }
  replays[1].spread = Spread::one_expert;
  const MoeCase faulty{.tokens = 6,
                       .same_tokens = true,
                       .experts = 7,
                       .topk = 3,
                       .index_type = MK_INDEX_INT64,
                       .dispatched_rows = true};
  std::vector<MoeCase> faults(2, faulty);
  faults[1].seed = 9;
  return {make_problems(cases(options.quick), options.nranks), make_problems(replays, options.nranks),
          make_problems(faults, options.nranks)};
}

// All cases over one split and transport; over the others, those that differ most.
void run_split(const Options& options, const Problems& problems, Watchdog& watchdog, const Transport& transport,
               const std::vector<int32_t>& nodes, bool runs_all) {
  run_between_nodes(options.nranks, tally, transport, nodes, [&](Rank& rank, const std::string& where) {
    watchdog.stage(rank.rank, where + ": starting", STAGE_SECONDS, rank.comm);
    load_pattern_kernels(rank.stream);
    rank.meet();
    for (size_t i = 0; i < problems.all.size(); ++i) {
      if (runs_all || i % 4 == 2) run_layer(rank, problems.all[i], where, watchdog);
    }
    run_repeatedly(rank, problems.replayed, watchdog, options.quick ? 20 : 100);
    run_replays(rank, problems.replayed, watchdog);
    run_data_errors(rank, problems.faulty, watchdog);
    run_layer(rank, problems.all[2], where, watchdog);
    watchdog.stage(rank.rank, where + ": leaving", 60, rank.comm);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = start(argc, argv);
  Watchdog watchdog(tally, options.nranks);
  const std::vector<Transport> all = transports(tally);
  if (all.empty()) return 77;
  const Problems problems = make_all(options);
  const std::vector<std::vector<int32_t>> layouts = splits(options.nranks);
  for (size_t i = 0; i < layouts.size(); ++i)
    run_split(options, problems, watchdog, all[0], layouts[i], i == 0);
  for (size_t i = 1; i < all.size(); ++i)
    run_split(options, problems, watchdog, all[i], layouts[i % layouts.size()], false);
  return tally.finish();
}
