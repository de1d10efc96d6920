// SPDX-License-Identifier: MIT
// A rank's side of ring attention on GPUs: an AttentionLaunch whose tensors are on the device, one run of it,
// the same bits from many, replays of a captured launch.
#pragma once

#include <deque>
#include <string>

#include "operators_run.h"
#include "test/ops/attention_launch.h"

namespace operators {

using mk::test::AttentionCase;
using mk::test::AttentionLaunch;
using mk::test::AttentionProblem;

constexpr int64_t kGuard = 32;  // elements behind an output of AttentionLaunch

// A rank's tensors on its device, in place of the host's of an AttentionLaunch.
class DeviceTensors {
 public:
  DeviceTensors(const AttentionCase& attention, int64_t rows, cudaStream_t stream)
      : queries_(attention.batch * rows * attention.heads * attention.dim * 2),
        keys_(attention.batch * rows * attention.kv_heads * attention.dim * 2),
        rows_lse_(attention.batch * rows * attention.heads * 4),
        bounds_(static_cast<int64_t>(attention.cu_seqlens.size()) * 4),
        stream_(stream) {}

  // Brings the host's inputs and poisoned outputs over, and puts itself in their place.
  void replace(mk_ring_attention_args_t& args) {
    begin();
    input(args.q, queries_), input(args.k, keys_), input(args.v, keys_);
    output(args.o, queries_, kGuard * 2);
    output(args.lse, rows_lse_, kGuard * 4);
    if (bounds_ > 0) input(args.cu_seqlens, bounds_);
    require_cuda(cudaStreamSynchronize(stream_), "upload");
  }
  void replace(mk_ring_attention_backward_args_t& args) {
    begin();
    input(args.q, queries_), input(args.k, keys_), input(args.v, keys_);
    input(args.o, queries_), input(args.lse, rows_lse_), input(args.d_o, queries_);
    output(args.dq, queries_, kGuard * 2);
    output(args.dk, keys_, kGuard * 2), output(args.dv, keys_, kGuard * 2);
    if (bounds_ > 0) input(args.cu_seqlens, bounds_);
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
    Tensor(int64_t size, cudaStream_t stream) : bytes(size), device(static_cast<size_t>(size), stream) {}
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
    if (used_ == tensors_.size()) tensors_.emplace_back(bytes, stream_);
    Tensor& tensor = tensors_[used_++];
    tensor.host = const_cast<void*>(static_cast<const void*>(pointer));
    copy(tensor.device.data, tensor.host, bytes);
    pointer = static_cast<T*>(tensor.device.data);
  }
  void copy(void* to, const void* from, int64_t bytes) const {
    if (bytes > 0)
      require_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
  }
  const int64_t queries_, keys_, rows_lse_, bounds_;  // bytes
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

inline int64_t rows_of(const AttentionProblem& problem, const Seat& seat) {
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

inline bool runs_on_gpu(const AttentionCase& attention) { return attention.dim <= 128; }

// A key of -inf, which fp16 has and no query sees, still makes gradients that are not finite: 0 times it.
inline bool has_gradients(const AttentionCase& attention) {
  return attention.numbers != mk::test::Numbers::masked || attention.dtype != MK_DTYPE_FP16;
}

// Of those that run on GPUs.
inline std::deque<AttentionProblem> make_gpu_problems(std::vector<AttentionCase> cases) {
  std::erase_if(cases, [](const AttentionCase& attention) { return !runs_on_gpu(attention); });
  // Keys are there twice, or next to their like, or are almost all that a query sees, and their shares of dq
  // and dk cancel out.
  for (AttentionCase& attention : cases) {
    attention.rounded_factors = attention.numbers == mk::test::Numbers::large ||
                                attention.numbers == mk::test::Numbers::rising ||
                                attention.numbers == mk::test::Numbers::masked;
  }
  // Tiles of queries in turn, since of a small case the plan would always choose the same; not those that some
  // cases want of the host.
  constexpr int TILES[] = {192, 128, 192, 0};
  int turn = 0;
  for (AttentionCase& attention : cases) attention.tuning.tile_m = attention.dim <= 64 ? TILES[turn++ % 4] : 0;
  return mk::test::make_problems(cases);
}

template <class Direction>
void run_same_bits(Seat& seat, Tally& tally, Watchdog& watchdog, int rank, const AttentionProblem& problem,
                   int runs) {
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
void run_replays(Seat& seat, Tally& tally, Watchdog& watchdog, int rank,
                 const std::deque<AttentionProblem>& problems) {
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

// A launch that must fail with `status` and say so, and write nothing.
template <class Direction>
void run_bad_bounds(Seat& seat, Tally& tally, Watchdog& watchdog, int rank, const AttentionProblem& problem,
                    const std::vector<int32_t>& bounds, mk_status_t status, const std::string& says) {
  watchdog.stage(rank, std::string("wrong cu_seqlens: ") + Direction::NAME, 60, seat.comm);
  AttentionLaunch launch(seat.session, problem);
  launch.cu_seqlens = bounds;
  DeviceTensors tensors(problem.attention, rows_of(problem, seat), seat.stream);
  const mk_status_t enqueued = Direction::call(seat, arguments_on<Direction>(launch, tensors));
  const mk_status_t seen = mk_comm_synchronize(seat.comm, seat.stream);
  const std::string sentence = mk_get_last_error(seat.comm);
  tally.check(enqueued == MK_SUCCESS && seen == status && sentence.find(says) != std::string::npos,
              text("%s: expected %s, %s; saw %s, %s", Direction::NAME, mk_status_string(status), says.c_str(),
                   mk_status_string(seen), sentence.c_str()));
  tensors.download();
  if (status == MK_ERROR_DATA)
    tally.check(launch.outputs_untouched(), text("%s: wrong cu_seqlens, and an output", Direction::NAME));
}

}  // namespace operators
