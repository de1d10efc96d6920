// SPDX-License-Identifier: MIT
// Ring attention and its gradients between GPUs through the C interface, and on one: outputs against float64
// loops over the whole sequence, poisoned before, receive areas full of NaN; the same bits from many runs;
// replays of a captured launch with other inputs.
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
        rows_lse_(attention.batch * rows * attention.heads * 4),
        stream_(stream) {}

  // Brings the host's inputs and poisoned outputs over, and puts itself in their place.
  void replace(mk_ring_attention_args_t& args) {
    begin();
    input(args.q, queries_), input(args.k, keys_), input(args.v, keys_);
    output(args.o, queries_, kGuard * 2);
    output(args.lse, rows_lse_, kGuard * 4);
    require_cuda(cudaStreamSynchronize(stream_), "upload");
  }
  void replace(mk_ring_attention_backward_args_t& args) {
    begin();
    input(args.q, queries_), input(args.k, keys_), input(args.v, keys_);
    input(args.o, queries_), input(args.lse, rows_lse_), input(args.d_o, queries_);
    output(args.dq, queries_, kGuard * 2);
    output(args.dk, keys_, kGuard * 2), output(args.dv, keys_, kGuard * 2);
    require_cuda(cudaStreamSynchronize(stream_), "upload");
  }
  // After the launch: what is there, to the host's tensors, inputs among them.
  void download() const {
    for (const Tensor& tensor : tensors_) copy(tensor.host, tensor.device.data, tensor.bytes);
    require_cuda(cudaStreamSynchronize(stream_), "download");
  }

 private:
  struct Tensor {
    void* host = nullptr;
    const int64_t bytes;
    Buffer device;
    explicit Tensor(int64_t size) : bytes(size), device(static_cast<size_t>(size)) {}
  };

  void begin() { used_ = 0; }
  template <class T>
  void input(T*& pointer, int64_t bytes) {
    take(pointer, bytes);
  }
  template <class T>
  void output(T*& pointer, int64_t bytes, int64_t guard_bytes) {
    take(pointer, bytes > 0 ? bytes + guard_bytes : 0);
  }
  template <class T>
  void take(T*& pointer, int64_t bytes) {
    if (used_ == tensors_.size()) tensors_.emplace_back(bytes);
    Tensor& tensor = tensors_[used_++];
    tensor.host = const_cast<void*>(static_cast<const void*>(pointer));
    copy(tensor.device.data, tensor.host, bytes);
    pointer = static_cast<T*>(tensor.device.data);
  }
  void copy(void* to, const void* from, int64_t bytes) const {
    if (bytes > 0)
      require_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
  }
  const int64_t queries_, keys_, rows_lse_;  // bytes
  cudaStream_t stream_;
  std::deque<Tensor> tensors_;
  size_t used_ = 0;
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

struct Forward {
  using Args = mk_ring_attention_args_t;
  static constexpr Args INIT = MK_RING_ATTENTION_ARGS_INIT;
  static constexpr const char* NAME = "mk_ring_attention";
  static constexpr size_t NUM_NODES = 1;  // of a captured call
  static void fill(const AttentionLaunch& launch, Args& args) { launch.fill_forward(args); }
  static mk_status_t call(Seat& seat, const Args& args) {
    return mk_ring_attention(seat.comm, &args, seat.stream);
  }
  static void verify(AttentionLaunch& launch) { launch.verify_forward(); }
  static std::string bits(const AttentionLaunch& launch) { return launch.forward_bits(); }
};

struct Backward {
  using Args = mk_ring_attention_backward_args_t;
  static constexpr Args INIT = MK_RING_ATTENTION_BACKWARD_ARGS_INIT;
  static constexpr const char* NAME = "mk_ring_attention_backward";
  static constexpr size_t NUM_NODES = 2;
  static void fill(const AttentionLaunch& launch, Args& args) { launch.fill_backward(args); }
  static mk_status_t call(Seat& seat, const Args& args) {
    return mk_ring_attention_backward(seat.comm, &args, seat.stream);
  }
  static void verify(AttentionLaunch& launch) { launch.verify_backward(); }
  static std::string bits(const AttentionLaunch& launch) { return launch.backward_bits(); }
};

// The launch's arguments, its tensors on the device.
template <class Direction>
typename Direction::Args arguments_on(const AttentionLaunch& launch, DeviceTensors& tensors) {
  typename Direction::Args args = Direction::INIT;
  Direction::fill(launch, args);
  tensors.replace(args);
  return args;
}

template <class Direction>
bool run_on(Seat& seat, const AttentionLaunch& launch, DeviceTensors& tensors) {
  return seat.session.ok(Direction::call(seat, arguments_on<Direction>(launch, tensors)), Direction::NAME) &&
         seat.session.ok(mk_comm_synchronize(seat.comm, seat.stream), "mk_comm_synchronize");
}

template <class Direction>
void run_case(Seat& seat, const AttentionProblem& problem, bool stale) {
  AttentionLaunch launch(seat.session, problem);
  DeviceTensors tensors(problem.attention, rows_of(problem, seat), seat.stream);
  if (stale) {  // both banks
    launch.poison_inputs();
    if (!run_on<Direction>(seat, launch, tensors) || !run_on<Direction>(seat, launch, tensors)) return;
    launch.restore_inputs();
    launch.poison_outputs();
  }
  if (!run_on<Direction>(seat, launch, tensors)) return;
  tensors.download();
  Direction::verify(launch);
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

// A key of -inf, which fp16 has and no query sees, still makes gradients that are not finite: 0 times it.
bool has_gradients(const AttentionCase& attention) {
  return attention.numbers != Numbers::masked || attention.dtype != MK_DTYPE_FP16;
}

std::deque<AttentionProblem> problems_for(int nranks, bool quick) {
  std::vector<AttentionCase> cases;
  for (const AttentionCase& attention : mk::test::attention_corner_cases(nranks)) cases.push_back(attention);
  for (uint64_t index = 0; index < (quick ? 8 : 40); ++index)
    cases.push_back(mk::test::mixed_attention_case(3, index, nranks));
  for (const AttentionCase& attention : device_cases(quick)) cases.push_back(attention);
  std::erase_if(cases, [](const AttentionCase& attention) { return !runs_on_gpu(attention); });
  // Keys are there twice, and their shares of dq cancel out.
  for (AttentionCase& attention : cases) attention.rounded_factors = attention.numbers == Numbers::large;
  return mk::test::make_problems(cases);
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
void run_same_bits(Seat& seat, Watchdog& watchdog, int rank, const AttentionProblem& problem, int runs) {
  watchdog.stage(rank, std::string("the same bits: ") + Direction::NAME, 120, seat.comm);
  AttentionLaunch launch(seat.session, problem);
  DeviceTensors tensors(problem.attention, rows_of(problem, seat), seat.stream);
  std::string first;
  for (int run = 0; run < runs; ++run) {
    launch.poison_outputs();
    if (!run_on<Direction>(seat, launch, tensors)) return;
    tensors.download();
    if (run == 0) first = Direction::bits(launch);
    if (!tally.check(Direction::bits(launch) == first,
                     text("%s: run %d has other bits than the first", Direction::NAME, run))) {
      return;
    }
  }
}

// As many kernel nodes as kernels; replays with the inputs of problems of the same shape.
template <class Direction>
void run_replays(Seat& seat, Watchdog& watchdog, int rank, const std::deque<AttentionProblem>& problems) {
  watchdog.stage(rank, std::string("replays: ") + Direction::NAME, 120, seat.comm);
  AttentionLaunch captured(seat.session, problems[0]);
  DeviceTensors tensors(problems[0].attention, rows_of(problems[0], seat), seat.stream);
  if (!run_on<Direction>(seat, captured, tensors)) return;
  const typename Direction::Args args = arguments_on<Direction>(captured, tensors);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  require_cuda(cudaStreamBeginCapture(seat.stream, cudaStreamCaptureModeThreadLocal), "capture");
  const mk_status_t status = Direction::call(seat, args);
  require_cuda(cudaStreamEndCapture(seat.stream, &graph), "capture");
  if (!seat.session.ok(status, "a captured call")) return;
  size_t nodes = 0;
  require_cuda(cudaGraphGetNodes(graph, nullptr, &nodes), "cudaGraphGetNodes");
  tally.check(nodes == Direction::NUM_NODES, text("a captured %s is %zu nodes", Direction::NAME, nodes));
  require_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  for (size_t replay = 0; replay < 4 * problems.size(); ++replay) {
    AttentionLaunch launch(seat.session, problems[replay % problems.size()]);
    arguments_on<Direction>(launch, tensors);
    require_cuda(cudaGraphLaunch(executable, seat.stream), "cudaGraphLaunch");
    if (!seat.session.ok(mk_comm_synchronize(seat.comm, seat.stream), "a replay")) return;
    tensors.download();
    const size_t before = seat.session.failures().size();
    Direction::verify(launch);
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
    run_same_bits<Forward>(seat, watchdog, rank.rank, replayed[0], options.quick ? 20 : 200);
    run_same_bits<Backward>(seat, watchdog, rank.rank, replayed[0], options.quick ? 20 : 200);
    run_replays<Forward>(seat, watchdog, rank.rank, replayed);
    run_replays<Backward>(seat, watchdog, rank.rank, replayed);
    watchdog.stage(rank.rank, "ending", 60, rank.comm);
  });
  return tally.finish();
}
