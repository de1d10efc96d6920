// SPDX-License-Identifier: MIT
// The mixture-of-experts operators on GPUs, against plain loops on the host: exact on integers, records and
// all; the same bits when repeated; graphs whose topk_idx changes between replays; errors that only the data
// show.
//
//   operators_moe_test [--ranks N] [--quick]
#include <deque>

#include "moe_layer.h"

namespace {

using namespace operators;
using mk::test::Spread;

Tally tally;

constexpr int STAGE_SECONDS = 90;

std::vector<MoeCase> small_cases() {
  std::vector<MoeCase> cases;
  const auto add = [&](const MoeCase& moe) { cases.push_back(moe); };
  add({});
  add({.same_tokens = true, .hidden = 8, .experts = 1, .topk = 1});
  add({.tokens = 40, .hidden = 72, .inter = 40, .experts = 3, .topk = 3, .seed = 2});
  add({.tokens = 60,
       .hidden = 136,
       .inter = 264,
       .experts = 12,
       .topk = 5,
       .dtype = MK_DTYPE_FP16,
       .out_dtype = MK_DTYPE_FP16,
       .w_layout = MK_LAYOUT_NK,
       .index_type = MK_INDEX_INT64,
       .row_scale = true,
       .dispatched_rows = true,
       .spare_rows = 7,
       .padding = 2,
       .seed = 3});
  add({.tokens = 33,
       .hidden = 64,
       .inter = 72,
       .experts = 64,
       .topk = 16,
       .out_dtype = MK_DTYPE_FP32,
       .seed = 4});
  for (const Spread spread : {Spread::one_expert, Spread::few, Spread::half, Spread::nowhere}) {
    add({.tokens = 150,
         .hidden = 64,
         .inter = 136,
         .experts = 10,
         .topk = 3,
         .spread = spread,
         .row_scale = true,
         .dispatched_rows = true,
         .seed = 5});
  }
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
  return cases;
}

void check(const Rank& rank, const MoeProblem& problem, const char* what, const std::string& wrong) {
  tally.check(wrong.empty(), text("rank %d of %d: %s: %s: %s", rank.rank, problem.nranks, what,
                                  describe(problem.moe).c_str(), wrong.c_str()));
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
      check(rank, problem, "dispatch", layer.wrong_dispatch());
      check(rank, problem, "combine", layer.wrong_combine());
      bits = layer.dispatch_bits() + layer.combine_bits();
    } else {
      check(rank, problem, turn == 1 ? "repeated" : "by its record",
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
  check(rank, problems[0], "dispatch after many", first.wrong_dispatch());
  check(rank, problems[0], "combine after many", first.wrong_combine());
  check(rank, problems[1], "dispatch after many", second.wrong_dispatch());
  check(rank, problems[1], "combine after many", second.wrong_combine());
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
  require_cuda(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  require(layer.dispatch(), "a captured dispatch", rank.comm);
  require(layer.combine(), "a captured combine", rank.comm);
  cudaGraph_t graph = nullptr;
  require_cuda(cudaStreamEndCapture(rank.stream, &graph), "cudaStreamEndCapture");
  size_t num_nodes = 0;
  require_cuda(cudaGraphGetNodes(graph, nullptr, &num_nodes), "cudaGraphGetNodes");
  tally.check(num_nodes == 2, text("rank %d: captured %zu nodes, expected 2", rank.rank, num_nodes));
  cudaGraphExec_t replay = nullptr;
  require_cuda(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  require_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  require_cuda(cudaGraphUpload(replay, rank.stream), "cudaGraphUpload");
  require_cuda(cudaStreamSynchronize(rank.stream), "cudaGraphUpload");
  for (int turn = 0; turn < 2; ++turn) {
    for (const MoeProblem& problem : problems) {
      layer.load(problem);
      layer.poison();
      rank.meet();
      require_cuda(cudaGraphLaunch(replay, rank.stream), "cudaGraphLaunch");
      rank.synchronize();
      check(rank, problem, "dispatch replayed", layer.wrong_dispatch());
      check(rank, problem, "combine replayed", layer.wrong_combine());
      rank.meet();
    }
  }
  require_cuda(cudaGraphExecDestroy(replay), "cudaGraphExecDestroy");
}

// After a launch that must have failed: MK_ERROR_DATA that blames `guilty` and says `says`, which is then
// cleared.
void expect_data_error(const Rank& rank, int guilty, const std::string& says) {
  const mk_status_t seen = mk_comm_synchronize(rank.comm, rank.stream);
  const std::string sentence = mk_get_last_error(rank.comm);
  tally.check(seen == MK_ERROR_DATA && sentence.find(says) != std::string::npos &&
                  sentence.find("no rows were moved") != std::string::npos,
              text("rank %d: expected a data error that says \"%s\", saw %s: %s", rank.rank, says.c_str(),
                   mk_status_string(seen), sentence.c_str()));
  mk_async_error_t error = MK_ASYNC_ERROR_INIT;
  require(mk_comm_get_async_error(rank.comm, &error), "mk_comm_get_async_error", rank.comm);
  tally.check(error.status == MK_ERROR_DATA && (guilty < 0 || error.rank == guilty),
              text("rank %d: the error is %d of rank %d, expected of rank %d", rank.rank, error.status,
                   error.rank, guilty));
  require(mk_comm_clear_async_error(rank.comm), "mk_comm_clear_async_error", rank.comm);
}

void expect_nothing(const Rank& rank, MoeLayer& layer, int64_t needed_rows) {
  const mk_moe_routing_t head = layer.head();
  tally.check(head.status == MK_ERROR_DATA && head.num_rows == 0 && head.needed_rows == needed_rows,
              text("rank %d: record: status %d, rows %lld, needed %lld; expected %lld", rank.rank, head.status,
                   static_cast<long long>(head.num_rows), static_cast<long long>(head.needed_rows),
                   static_cast<long long>(needed_rows)));
  const std::string wrong = layer.untouched_outputs();
  tally.check(wrong.empty(), text("rank %d: after an error: %s", rank.rank, wrong.c_str()));
}

void run_bad_indices(Rank& rank, MoeLayer& layer, Watchdog& watchdog) {
  struct Bad {
    std::vector<int64_t> row;
    std::string says;
  };
  const Bad all[] = {{{1, 7, 2}, "topk_idx[4, 1]: expected -1 to 6, saw 7"},
                     {{-2, 1, 2}, "topk_idx[4, 0]: expected -1 to 6, saw -2"},
                     {{3, 1, 3}, "topk_idx[4, 2]: expected each expert once in a row, saw 3 again"},
                     {{0, 1, int64_t{1} << 32}, "topk_idx[4, 2]: expected -1 to 6, saw 4294967296"}};
  const int guilty = rank.nranks - 1;
  for (const Bad& bad : all) {
    watchdog.stage(rank.rank, bad.says, STAGE_SECONDS, rank.comm);
    std::vector<int64_t> indices = layer.topk_idx();
    if (rank.rank == guilty) {
      std::copy(bad.row.begin(), bad.row.end(), indices.begin() + 4 * 3);
      indices[5 * 3] = 1000;  // a later one
    }
    layer.load_indices(indices);
    layer.poison();
    rank.meet();
    require(layer.dispatch(), "mk_moe_dispatch_gemm", rank.comm);
    expect_data_error(rank, guilty, bad.says);
    expect_nothing(rank, layer, 0);
    rank.meet();
  }
  layer.load_indices(layer.topk_idx());
}

void run_data_errors(Rank& rank, const std::deque<MoeProblem>& problems, Watchdog& watchdog) {
  const MoeProblem& problem = problems[0];
  MoeLayer layer(rank, rank.comm, rank.nranks, problem, problem.capacity());
  MoeLayer other(rank, rank.comm, rank.nranks, problems[1], problems[1].capacity());
  for (MoeLayer* each : {&layer, &other}) {
    const mk_moe_maxima_t maxima = each->maxima();
    require(mk_moe_dispatch_gemm_prepare(rank.comm, &maxima), "mk_moe_dispatch_gemm_prepare", rank.comm);
  }
  run_bad_indices(rank, layer, watchdog);
  watchdog.stage(rank.rank, "too little capacity", STAGE_SECONDS, rank.comm);
  mk_moe_dispatch_gemm_args_t args = layer.dispatch_args();
  args.capacity_rows = problem.capacity() - 1;
  layer.poison();
  rank.meet();
  require(mk_moe_dispatch_gemm(rank.comm, &args, rank.stream), "mk_moe_dispatch_gemm", rank.comm);
  expect_data_error(rank, -1,
                    text("capacity_rows: expected at least %lld", static_cast<long long>(problem.capacity())));
  expect_nothing(rank, layer, problem.capacity());
  watchdog.stage(rank.rank, "records of two dispatches", STAGE_SECONDS, rank.comm);
  require(layer.dispatch(), "mk_moe_dispatch_gemm", rank.comm);
  require(other.dispatch(), "mk_moe_dispatch_gemm", rank.comm);
  rank.synchronize();
  mk_moe_gemm_combine_args_t combine = layer.combine_args();
  if (rank.rank == rank.nranks - 1) combine.routing = other.combine_args().routing;
  rank.meet();
  require(mk_moe_gemm_combine(rank.comm, &combine, rank.stream), "mk_moe_gemm_combine", rank.comm);
  expect_data_error(rank, -1, "pass the records of one dispatch");
  watchdog.stage(rank.rank, "a record that is none", STAGE_SECONDS, rank.comm);
  if (rank.rank == 1) layer.fill_record(0x5a);
  rank.meet();
  require(layer.dispatch(true), "mk_moe_dispatch_gemm", rank.comm);
  expect_data_error(rank, 1, "routing: expected the record of a dispatch");
  rank.meet();
}

std::deque<MoeProblem> make_problems(const std::vector<MoeCase>& cases, int nranks) {
  std::deque<MoeProblem> problems;
  for (const MoeCase& moe : cases) problems.emplace_back(moe, nranks);
  return problems;
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
  return tally.finish();
}
