// SPDX-License-Identifier: MIT
// What the programs on operators between GPUs have in common beside the ranks: the command line, the count of
// checks, operands on the device with their turn and their verdict, and an end by a deadline whatever happens.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>

#include "operators_job.h"
#include "operators_pattern.h"

namespace operators {

__attribute__((format(printf, 1, 2))) inline std::string text(const char* pattern, ...) {
  char buffer[1024];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(buffer, sizeof buffer, pattern, arguments);
  va_end(arguments);
  return buffer;
}

struct Options {
  int nranks = 0;
  int nodes = 1;  // emulated, of consecutive ranks
  bool quick = false;
  bool strict = false;  // times are asserted, too
};

// Of "[--ranks N] [--nodes N] [--quick] [--strict]"; without ranks 0, for the caller to choose.
inline Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--ranks") == 0 && i + 1 < argc) {
      options.nranks = std::atoi(argv[++i]);
    } else if (std::strcmp(argv[i], "--nodes") == 0 && i + 1 < argc) {
      options.nodes = std::max(1, std::atoi(argv[++i]));
    } else if (std::strcmp(argv[i], "--quick") == 0) {
      options.quick = true;
    } else if (std::strcmp(argv[i], "--strict") == 0) {
      options.strict = true;
    } else {
      std::fprintf(stderr, "usage: %s [--ranks N] [--nodes N] [--quick] [--strict]\n", argv[0]);
      std::exit(2);
    }
  }
  return options;
}

// GPUs that the kernels run on, from the first on; exits with 77, "skipped", when there is none.
inline int require_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  int usable = 0;
  for (int major = 0, minor = 0; usable < count; ++usable) {
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, usable);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, usable);
    if (major != 9 || minor != 0) break;
  }
  if (usable > 0) return usable;
  std::printf("skipped: no GPU of compute capability 9.0\n");
  std::exit(77);
}

inline int num_sms(int device) {
  int sms = 0;
  require_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return sms;
}

inline Options start(int argc, char** argv) {
  set_environment();
  Options options = read_options(argc, argv);
  const int devices = require_devices();
  if (options.nranks < 1) options.nranks = std::max(2, devices);
  return options;
}

// Checks passed and failed, from any thread; the last line of a program is finish()'s.
class Tally {
 public:
  bool check(bool right, const std::string& what) {
    ++(right ? passed_ : failed_);
    if (!right) say("FAILED: " + what);
    return right;
  }
  void say(const std::string& line) {
    std::lock_guard lock(mutex_);
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }
  int finish() {
    say(text("%d passed, %d failed", passed_.load(), failed_.load()));
    return failed_ > 0 ? 1 : 0;
  }

 private:
  std::atomic<int> passed_{0};
  std::atomic<int> failed_{0};
  std::mutex mutex_;
};

// Ends the program when a stage of a rank outlasts its deadline, and says where every rank was: a thread that
// is inside the driver cannot be ended otherwise.
class Watchdog {
 public:
  Watchdog(Tally& tally, int nranks) : tally_(tally), ranks_(nranks), thread_([this] { watch(); }) {}
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
    }
    ending_.notify_all();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // What `rank` does from now on, and how long at most; `comm` is the communicator to ask when it does not end.
  void stage(int rank, const std::string& name, int seconds, mk_comm_t comm = nullptr) {
    std::lock_guard lock(mutex_);
    ranks_[rank] = {name, Clock::now() + std::chrono::seconds(seconds), comm, seconds};
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Stage {
    std::string name = "starting";
    Clock::time_point deadline = Clock::now() + std::chrono::seconds(120);
    mk_comm_t comm = nullptr;
    int seconds = 120;
  };

  void watch() {
    std::unique_lock lock(mutex_);
    while (!ended_) {
      ending_.wait_for(lock, std::chrono::milliseconds(200));
      const auto late = [](const Stage& stage) { return Clock::now() > stage.deadline; };
      if (!ended_ && std::any_of(ranks_.begin(), ranks_.end(), late)) give_up();
    }
  }
  void give_up() {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      const Stage& stage = ranks_[rank];
      tally_.say(text("rank %zu: in \"%s\"%s, which has %d s", rank, stage.name.c_str(),
                      Clock::now() > stage.deadline ? " beyond its deadline" : "", stage.seconds));
      mk_flight_entry_t flights[3];
      size_t count = 0;
      if (stage.comm == nullptr) continue;
      if (mk_comm_get_flight_record(stage.comm, flights, 3, &count) != MK_SUCCESS) count = 0;
      for (size_t i = 0; i < count; ++i) {
        const mk_flight_entry_t& flight = flights[i];
        const char* states[] = {"unknown", "running", "completed", "failed"};
        tally_.say(text("  launch %llu: operator %d, m=%lld n=%lld k=%lld, %s, %lld us",
                        static_cast<unsigned long long>(flight.epoch), flight.op,
                        static_cast<long long>(flight.shape[0]), static_cast<long long>(flight.shape[1]),
                        static_cast<long long>(flight.shape[2]), states[std::clamp(flight.state, 0, 3)],
                        static_cast<long long>(flight.duration_us)));
      }
      tally_.say(std::string("  its last error: ") + mk_get_last_error(stage.comm));
    }
    tally_.check(false, "a deadline of the test passed");
    tally_.finish();
    std::_Exit(1);
  }

  Tally& tally_;
  std::mutex mutex_;
  std::condition_variable ending_;
  bool ended_ = false;
  std::vector<Stage> ranks_;
  std::thread thread_;
};

// Keeps the host at most `depth` marks ahead of the device without ever draining the stream: a full queue would
// block the launching thread inside the driver, where its peers' threads could not launch either.
class Leash {
 public:
  explicit Leash(size_t depth) : events_(depth) {
    for (cudaEvent_t& event : events_)
      require_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  }
  ~Leash() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  Leash(const Leash&) = delete;
  Leash& operator=(const Leash&) = delete;

  // The watchdog ends a wait for what never comes.
  void mark(cudaStream_t stream) {
    const cudaEvent_t event = events_[next_++ % events_.size()];
    while (true) {
      const cudaError_t state = cudaEventQuery(event);
      if (state == cudaSuccess) break;
      if (state != cudaErrorNotReady) require_cuda(state, "cudaEventQuery");
      usleep(20);
    }
    require_cuda(cudaEventRecord(event, stream), "cudaEventRecord");
  }

 private:
  std::vector<cudaEvent_t> events_;
  size_t next_ = 0;
};

// What enqueue() puts into a stream, captured, to be launched any number of times.
class Replay {
 public:
  Replay(cudaStream_t stream, const std::function<void()>& enqueue) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    enqueue();
    require_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    require_cuda(cudaGraphGetNodes(graph, nullptr, &num_nodes_), "cudaGraphGetNodes");
    require_cuda(cudaGraphInstantiate(&replay_, graph, 0), "cudaGraphInstantiate");
    require_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    require_cuda(cudaGraphUpload(replay_, stream), "cudaGraphUpload");
    require_cuda(cudaStreamSynchronize(stream), "cudaGraphUpload");
  }
  ~Replay() { cudaGraphExecDestroy(replay_); }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  size_t num_nodes() const { return num_nodes_; }
  void launch() const { require_cuda(cudaGraphLaunch(replay_, stream_), "cudaGraphLaunch"); }

 private:
  const cudaStream_t stream_;
  cudaGraphExec_t replay_ = nullptr;
  size_t num_nodes_ = 0;
};

// The turn and the verdict of one rank, on its device.
class Judge {
 public:
  Judge() : turn_(sizeof(uint32_t)), wrong_(sizeof(Wrong)) {
    require_cuda(cudaMemset(turn_.data, 0, turn_.bytes), "cudaMemset");
    require_cuda(cudaMemset(wrong_.data, 0, wrong_.bytes), "cudaMemset");
    require_cuda(cudaDeviceSynchronize(), "clearing the verdict");
  }
  uint32_t* turn() const { return static_cast<uint32_t*>(turn_.data); }
  Wrong* wrong() const { return static_cast<Wrong*>(wrong_.data); }
  // Waits for the stream; the next verdict starts anew.
  Wrong verdict(cudaStream_t stream) const {
    Wrong seen{};
    require_cuda(cudaMemcpyAsync(&seen, wrong_.data, sizeof seen, cudaMemcpyDeviceToHost, stream),
                 "the verdict");
    require_cuda(cudaMemsetAsync(wrong_.data, 0, wrong_.bytes, stream), "cudaMemsetAsync");
    require_cuda(cudaStreamSynchronize(stream), "the verdict");
    return seen;
  }

 private:
  Buffer turn_, wrong_;
};

// A launch on new operands, checked; all of it enqueued.
inline void checked_launch(mk_comm_t comm, const Problem& problem, const Operands& operands, const Judge& judge,
                           int label, cudaStream_t stream) {
  next_turn(judge.turn(), stream);
  fill_operands(operands, Filling::pattern, judge.turn(), stream);
  require(call(comm, problem, operands, stream), describe(problem, operands.nranks).c_str(), comm);
  check_results(operands, judge.turn(), label, judge.wrong(), stream);
}

// A problem on one rank of a communicator: prepared, with operands and a verdict of its own.
class Bench {
 public:
  Bench(int rank, int nranks, mk_comm_t comm, const Problem& problem)
      : problem_(problem),
        comm_(comm),
        matrices_(sizes_of(problem, rank, nranks)),
        operands_(matrices_.operands(problem, rank, nranks)) {
    require(prepare(comm, problem), describe(problem, nranks).c_str(), comm);
  }
  Bench(const Rank& rank, const Problem& problem) : Bench(rank.rank, rank.nranks, rank.comm, problem) {}

  const Operands& operands() const { return operands_; }
  const Judge& judge() const { return judge_; }
  void launch(cudaStream_t stream, int label = 0) const {
    checked_launch(comm_, problem_, operands_, judge_, label, stream);
  }
  // The call alone.
  mk_status_t call(cudaStream_t stream) const { return operators::call(comm_, problem_, operands_, stream); }
  Wrong verdict(cudaStream_t stream) const { return judge_.verdict(stream); }

 private:
  static Sizes sizes_of(const Problem& problem, int rank, int nranks) {
    Sizes sizes;
    sizes.cover(problem, rank, nranks);
    return sizes;
  }

  const Problem problem_;
  const mk_comm_t comm_;
  const Matrices matrices_;
  const Operands operands_;
  const Judge judge_;
};

}  // namespace operators
