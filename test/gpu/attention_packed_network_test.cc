// SPDX-License-Identifier: MIT
// Ring attention over packed sequences and its gradients between emulated nodes on GPUs, transports as
// attention_network_test: sequences of every kind against float64 loops, puts small and large; the same bits
// from many runs, and from many in a row; replays of a captured launch whose cu_seqlens change; wrong
// cu_seqlens, after which the next launch is right, and at last different ones, which end every rank's launch
// and the communicator.
//
//   attention_packed_network_test [--ranks N] [--quick]      MK_TEST_TRANSPORT=rc: over this one alone
#include <atomic>

#include "attention_network_run.h"
#include "attention_packed.h"

namespace {

using namespace operators;

Tally tally;

std::deque<AttentionProblem> problems_for(int nranks, bool quick) {
  std::vector<AttentionCase> cases = packed_cases(quick);
  for (const AttentionCase& attention : mk::test::attention_corner_cases(nranks)) cases.push_back(attention);
  for (uint64_t index = 0; index < (quick ? 10 : 60); ++index)
    cases.push_back(mk::test::mixed_attention_case(6, index, nranks));
  std::erase_if(cases, [](const AttentionCase& attention) {
    return !runs_on_gpu(attention) || attention.num_sequences() == 0;
  });
  for (size_t at = 0; at < cases.size(); at += 2) cases[at].tuning.chunk_bytes = kSmallPuts;
  return make_gpu_problems(std::move(cases));
}

// Every rank's launch ends. Its answer is what it found itself or, if that came first, the news of another's.
template <class Direction>
void run_different_bounds(Seat& seat, Watchdog& watchdog, int rank, const std::string& where,
                          const AttentionProblem& problem, std::atomic<int>& num_named) {
  watchdog.stage(rank, where + ": different cu_seqlens: " + Direction::NAME, 60, seat.comm);
  AttentionLaunch launch(seat.session, problem);
  launch.cu_seqlens[1] = differing_bound(problem, rank);
  DeviceTensors tensors(problem.attention, rows_of(problem, seat), seat.stream);
  const mk_status_t enqueued = Direction::call(seat, arguments_on<Direction>(launch, tensors));
  const mk_status_t seen = mk_comm_synchronize(seat.comm, seat.stream);
  const std::string sentence = mk_get_last_error(seat.comm);
  num_named += seen == MK_ERROR_MISMATCH ? 1 : 0;
  tally.check(enqueued == MK_SUCCESS && (seen == MK_ERROR_MISMATCH || seen == MK_ERROR_REMOTE) &&
                  sentence.find("ranks disagree") != std::string::npos,
              where + text(": rank %d: expected a disagreement, saw %s, %s", rank, mk_status_string(seen),
                           sentence.c_str()));
  require_cuda(cudaStreamSynchronize(seat.stream), "a launch that ranks disagree on");
}

template <class Direction>
void run_direction(const Options& options, Seat& seat, Watchdog& watchdog, int rank, const std::string& where,
                   const std::deque<AttentionProblem>& alike) {
  run_same_bits<Direction>(seat, tally, watchdog, rank, alike[0], options.quick ? 10 : 50);
  run_replays<Direction>(seat, tally, watchdog, rank, alike);
  run_in_a_row<Direction>(seat, tally, watchdog, where, alike[0], options.quick ? 50 : 300);
  run_wrong_bounds<Direction>(seat, tally, watchdog, rank, alike);
}

// The launch that ends the communicator is one of either direction.
void run_split(const Options& options, Watchdog& watchdog, const Transport& transport,
               const std::vector<int32_t>& nodes, const std::deque<AttentionProblem>& problems,
               const std::deque<AttentionProblem>& alike, bool ends_backward) {
  mk::test::RankJob job;
  job.node_of_rank = nodes;
  std::atomic<int> num_named = 0;
  run_between_nodes(options.nranks, tally, transport, nodes, [&](Rank& rank, const std::string& where) {
    Seat seat(job, rank.rank, rank.comm, rank.stream);
    run_all(seat, tally, watchdog, where, problems);
    run_direction<Forward>(options, seat, watchdog, rank.rank, where, alike);
    run_direction<Backward>(options, seat, watchdog, rank.rank, where, alike);
    rank.meet();
    if (ends_backward) {
      run_different_bounds<Backward>(seat, watchdog, rank.rank, where, alike[0], num_named);
    } else {
      run_different_bounds<Forward>(seat, watchdog, rank.rank, where, alike[0], num_named);
    }
    watchdog.stage(rank.rank, where + ": leaving", 60, rank.comm);
    rank.meet();
    require(mk_comm_destroy(rank.comm), "mk_comm_destroy", nullptr);
    rank.comm = nullptr;
    watchdog.stage(rank.rank, where + ": left", 60);
  });
  tally.check(num_named > 0, "no rank names the ranks that disagree");
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = start(argc, argv);
  const std::vector<Transport> all = transports(tally);
  if (all.empty()) return 77;
  const std::deque<AttentionProblem> problems = problems_for(options.nranks, options.quick);
  const std::deque<AttentionProblem> alike = packed_alike(options.nranks);
  Watchdog watchdog(tally, options.nranks);
  const std::vector<std::vector<int32_t>> layouts = splits(options.nranks);
  for (size_t at = 0; at < all.size(); ++at) {
    // Every way to lie on nodes over the first; the others take turns.
    for (size_t layout = 0; layout < layouts.size(); ++layout) {
      if (at > 0 && layout != at % layouts.size()) continue;
      run_split(options, watchdog, all[at], layouts[layout], problems, alike, (at + layout) % 2 == 0);
    }
  }
  return tally.finish();
}
