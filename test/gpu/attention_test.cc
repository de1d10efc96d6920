// SPDX-License-Identifier: MIT
// Ring attention between GPUs through the C interface, and on one: o and lse against float64 loops over the
// whole sequence, outputs poisoned, receive areas full of NaN; the same bits from many runs; replays of a
// captured launch with other inputs.
//
//   attention_test [--ranks N] [--quick]
#include <deque>
#include <memory>

#include "operators_run.h"
#include "test/ops/attention_launch.h"

namespace {

using namespace operators;
using mk::test::AttentionCase;
using mk::test::AttentionLaunch;
using mk::test::AttentionProblem;
using mk::test::Numbers;

Tally tally;

constexpr int64_t kGuard = 32;  // elements behind an output of AttentionLaunch

// A rank's tensors on its device, in place of the host's of an AttentionLaunch.
class DeviceTensors {
 public:
  DeviceTensors(const AttentionCase& attention, int64_t rows, cudaStream_t stream)
      : queries_(attention.batch * rows * attention.heads * attention.dim * 2),
        keys_(attention.batch * rows * attention.kv_heads * attention.dim * 2),
        rows_lse_((attention.batch * rows * attention.heads + kGuard) * 4),
        stream_(stream),
        q_(queries_),
        k_(keys_),
        v_(keys_),
        o_(queries_ + kGuard * 2),
        lse_(rows_lse_) {}

  // Brings the host's inputs and poisoned outputs over, and puts itself in their place.
  void replace(mk_ring_attention_args_t& args) {
    host_ = args;
    upload();
    args.q = q_.data, args.k = k_.data, args.v = v_.data;
    args.o = o_.data;
    args.lse = static_cast<float*>(lse_.data);
  }
  void upload() const {
    copy(q_.data, host_.q, queries_), copy(k_.data, host_.k, keys_), copy(v_.data, host_.v, keys_);
    if (queries_ > 0) copy(o_.data, host_.o, queries_ + kGuard * 2);
    copy(lse_.data, host_.lse, rows_lse_);
    require_cuda(cudaStreamSynchronize(stream_), "upload");
  }
  // After the launch: what it wrote, to the host's outputs.
  void download() const {
    if (queries_ > 0) copy(host_.o, o_.data, queries_ + kGuard * 2);
    copy(host_.lse, lse_.data, rows_lse_);
    require_cuda(cudaStreamSynchronize(stream_), "download");
  }

 private:
  void copy(void* to, const void* from, int64_t bytes) const {
    if (bytes > 0)
      require_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
  }
  const int64_t queries_, keys_, rows_lse_;  // bytes
  cudaStream_t stream_;
  Buffer q_, k_, v_, o_, lse_;
  mk_ring_attention_args_t host_ = MK_RING_ATTENTION_ARGS_INIT;
};

// One rank's session and stream of a job of GPUs.
struct Seat {
  mk_comm_t comm;
  cudaStream_t stream;
  mk::test::RankSession session;

  Seat(const mk::test::RankJob& job, int rank, mk_comm_t comm_in, cudaStream_t stream_in)
      : comm(comm_in), stream(stream_in), session(job, rank) {
    session.use(comm);
  }
};

int64_t rows_of(const AttentionProblem& problem, const Seat& seat) {
  return static_cast<int64_t>(problem.attention.positions(seat.session.nranks(), seat.session.rank()).size());
}

mk_status_t launch_on(Seat& seat, AttentionLaunch& launch, DeviceTensors& tensors) {
  launch.change = [&](mk_ring_attention_args_t& args) { tensors.replace(args); };
  mk_ring_attention_args_t args = MK_RING_ATTENTION_ARGS_INIT;
  launch.fill_forward(args);
  launch.change = nullptr;
  return mk_ring_attention(seat.comm, &args, seat.stream);
}

void run_case(Seat& seat, const AttentionProblem& problem, bool stale) {
  AttentionLaunch launch(seat.session, problem);
  DeviceTensors tensors(problem.attention, rows_of(problem, seat), seat.stream);
  const auto go = [&] {
    return seat.session.ok(launch_on(seat, launch, tensors), "mk_ring_attention") &&
           seat.session.ok(mk_comm_synchronize(seat.comm, seat.stream), "mk_comm_synchronize");
  };
  if (stale) {  // both banks
    launch.poison_inputs();
    if (!go() || !go()) return;
    launch.restore_inputs();
    launch.poison_outputs();
  }
  if (!go()) return;
  tensors.download();
  launch.verify_forward();
}

bool runs_on_gpu(const AttentionCase& attention) {
  return attention.cu_seqlens.empty() && attention.dim <= 128;
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
  for (const Numbers numbers : {Numbers::uniform, Numbers::one_hot, Numbers::large, Numbers::masked}) {
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
  return cases;
}

std::deque<AttentionProblem> problems_for(int nranks, bool quick) {
  std::vector<AttentionCase> cases;
  for (const AttentionCase& attention : mk::test::attention_corner_cases(nranks)) cases.push_back(attention);
  for (uint64_t index = 0; index < (quick ? 8 : 40); ++index)
    cases.push_back(mk::test::mixed_attention_case(3, index, nranks));
  for (const AttentionCase& attention : device_cases(quick)) cases.push_back(attention);
  std::erase_if(cases, [](const AttentionCase& attention) { return !runs_on_gpu(attention); });
  return mk::test::make_problems(cases);
}

void run_all(Seat& seat, Watchdog& watchdog, int rank, const std::deque<AttentionProblem>& problems,
             const char* what) {
  for (size_t number = 0; number < problems.size(); ++number) {
    const AttentionProblem& problem = problems[number];
    watchdog.stage(rank, describe(problem.attention), 60, seat.comm);
    const size_t before = seat.session.failures().size();
    run_case(seat, problem, number % 5 == 0);
    const auto& failures = seat.session.failures();
    tally.check(failures.size() == before, failures.empty() ? what : failures.back());
    if (failures.size() >= 5) return;
  }
}

void run_same_bits(Seat& seat, Watchdog& watchdog, int rank, const AttentionProblem& problem, int runs) {
  watchdog.stage(rank, "the same bits", 120, seat.comm);
  AttentionLaunch launch(seat.session, problem);
  DeviceTensors tensors(problem.attention, rows_of(problem, seat), seat.stream);
  std::string first;
  for (int run = 0; run < runs; ++run) {
    if (!seat.session.ok(launch_on(seat, launch, tensors), "mk_ring_attention")) return;
    if (!seat.session.ok(mk_comm_synchronize(seat.comm, seat.stream), "mk_comm_synchronize")) return;
    tensors.download();
    if (run == 0) first = launch.forward_bits();
    if (!tally.check(launch.forward_bits() == first, text("run %d has other bits than the first", run))) return;
  }
}

// One kernel node; replays with the inputs of problems of the same shape.
void run_replays(Seat& seat, Watchdog& watchdog, int rank, const std::deque<AttentionProblem>& problems) {
  watchdog.stage(rank, "replays", 120, seat.comm);
  AttentionLaunch captured(seat.session, problems[0]);
  DeviceTensors tensors(problems[0].attention, rows_of(problems[0], seat), seat.stream);
  if (!seat.session.ok(launch_on(seat, captured, tensors), "mk_ring_attention")) return;
  if (!seat.session.ok(mk_comm_synchronize(seat.comm, seat.stream), "mk_comm_synchronize")) return;
  mk_ring_attention_args_t args = MK_RING_ATTENTION_ARGS_INIT;
  captured.change = [&](mk_ring_attention_args_t& changed) { tensors.replace(changed); };
  captured.fill_forward(args);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  require_cuda(cudaStreamBeginCapture(seat.stream, cudaStreamCaptureModeThreadLocal), "capture");
  const mk_status_t status = mk_ring_attention(seat.comm, &args, seat.stream);
  require_cuda(cudaStreamEndCapture(seat.stream, &graph), "capture");
  if (!seat.session.ok(status, "a captured mk_ring_attention")) return;
  size_t nodes = 0;
  require_cuda(cudaGraphGetNodes(graph, nullptr, &nodes), "cudaGraphGetNodes");
  tally.check(nodes == 1, text("a captured call is %zu nodes", nodes));
  require_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  for (size_t replay = 0; replay < 4 * problems.size(); ++replay) {
    AttentionLaunch launch(seat.session, problems[replay % problems.size()]);
    mk_ring_attention_args_t other = MK_RING_ATTENTION_ARGS_INIT;
    launch.change = [&](mk_ring_attention_args_t& changed) { tensors.replace(changed); };
    launch.fill_forward(other);
    launch.change = nullptr;
    require_cuda(cudaGraphLaunch(executable, seat.stream), "cudaGraphLaunch");
    if (!seat.session.ok(mk_comm_synchronize(seat.comm, seat.stream), "a replay")) return;
    tensors.download();
    const size_t before = seat.session.failures().size();
    launch.verify_forward();
    const auto& failures = seat.session.failures();
    tally.check(failures.size() == before, failures.empty() ? "" : "replay: " + failures.back());
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
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
  mk::test::RankJob all, one;
  all.node_of_rank.assign(static_cast<size_t>(options.nranks), 0);
  one.node_of_rank.assign(1, 0);
  Watchdog watchdog(tally, options.nranks);
  run_ranks(options.nranks, [&](Rank& rank) {
    Seat own(one, 0, rank.alone, rank.stream);
    if (rank.rank == 0) run_all(own, watchdog, 0, alone, "alone");
    rank.meet();
    Seat seat(all, rank.rank, rank.comm, rank.stream);
    run_all(seat, watchdog, rank.rank, together, "together");
    run_same_bits(seat, watchdog, rank.rank, replayed[0], options.quick ? 20 : 200);
    run_replays(seat, watchdog, rank.rank, replayed);
    watchdog.stage(rank.rank, "ending", 60, rank.comm);
  });
  return tally.finish();
}
