// SPDX-License-Identifier: MIT
// The GPU end of the command FIFO: every command that warps post arrives whole, once and in its warp's order,
// over many laps, from few and many warps, through a FIFO that is full for seconds; a kernel whose FIFO nobody
// empties gives up by its deadline. Then figures: commands per second that one proxy thread takes, and
// latencies.
//
//   fifo_test [--quick] [--bench]     --bench: the figures alone
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../transport/harness.h"
#include "kernels/cuda/mapped_pages.h"
#include "kernels/device/command_queue.cuh"
#include "kernels/ptx/warp.cuh"
#include "transport/proxy.h"

namespace {

using mk::Command;
using mk::CommandFifo;
using mk::CommandKind;
using mk::CommandQueue;
using mk::CommandQueueState;
using mk::MappedPages;
using Clock = std::chrono::steady_clock;

constexpr uint64_t SECOND_NS = 1000000000;
constexpr int DEADLINE_SECONDS = 60;

int num_passed = 0;
int num_failed = 0;

bool check(bool condition, const std::string& what) {
  ++(condition ? num_passed : num_failed);
  if (!condition) std::printf("FAILED: %s\n", what.c_str());
  std::fflush(stdout);
  return condition;
}

void require_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("FAILED: %s: %s\n", what, cudaGetErrorString(error));
  std::_Exit(1);
}

template <class T>
T require(mk::Result<T> result) {
  if (result.ok()) return result.take();
  std::printf("FAILED: %s\n", result.status().sentence().c_str());
  std::_Exit(1);
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

template <class T>
T* allocate_zeroed() {
  T* memory = nullptr;
  require_cuda(cudaMalloc(&memory, sizeof(T)), "cudaMalloc");
  require_cuda(cudaMemset(memory, 0, sizeof(T)), "cudaMemset");
  require_cuda(cudaDeviceSynchronize(), "cudaMemset");
  return memory;
}

// A FIFO, as both ends have it.
struct Queue {
  explicit Queue(uint32_t capacity, uint64_t first_index = 0)
      : fifo(require(CommandFifo::create(capacity, first_index))),
        pages(require(MappedPages::map(fifo->pages()))),
        state(allocate_zeroed<CommandQueueState>()) {
    const CommandQueueState start = {first_index, first_index};
    require_cuda(cudaMemcpy(state, &start, sizeof start, cudaMemcpyHostToDevice), "cudaMemcpy");
    require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Queue() {
    cudaStreamDestroy(stream);
    cudaFree(state);
  }

  CommandQueue device() const { return {pages->device(), state, fifo->capacity()}; }

  std::unique_ptr<CommandFifo> fifo;
  std::unique_ptr<MappedPages> pages;
  CommandQueueState* state;
  cudaStream_t stream = nullptr;  // beside the kernel's
};

// What the kernel leaves: warps that gave up.
struct Outcome {
  uint32_t num_gave_up;
};

__host__ __device__ Command numbered(uint64_t poster, uint64_t number) {
  Command command{};
  command.kind = CommandKind::put;
  command.peer = static_cast<uint16_t>(poster);
  command.signal = static_cast<uint32_t>(number);
  command.source = poster << 40 | number;
  command.target = ~command.source;
  command.bytes = static_cast<uint32_t>(number * 2654435761u + poster);
  return command;
}

// Each warp posts `rounds` times `batch` commands at once, numbered through.
__global__ void post(CommandQueue queue, int rounds, int batch, uint64_t deadline_ns, Outcome* outcome) {
  const uint64_t poster = (uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  const uint64_t give_up_at = mk::ptx::globaltimer() + deadline_ns;
  for (int round = 0; round < rounds; ++round) {
    const Command command = numbered(poster, uint64_t{static_cast<uint32_t>(round)} * batch + lane);
    const bool goes_on = mk::post_commands(queue, lane < batch, command,
                                           [&](uint64_t) { return mk::ptx::globaltimer() < give_up_at; });
    if (goes_on) continue;
    if (lane == 0) atomicAdd(&outcome->num_gave_up, 1u);
    return;
  }
}

struct Run {
  uint32_t capacity;
  int ctas, warps, rounds, batch;
  uint64_t first_index = 0;
  uint64_t num_posters() const { return static_cast<uint64_t>(ctas) * warps; }
  uint64_t total() const { return num_posters() * rounds * batch; }
  std::string text() const {
    return mk::format("%d CTAs x %d warps x %d rounds of %d commands, capacity %u", ctas, warps, rounds, batch,
                      capacity);
  }
};

// Takes all of a run's commands; "" when each was right and in its poster's order.
std::string take_all(CommandFifo& fifo, const Run& run) {
  std::vector<uint64_t> next(run.num_posters(), 0);
  const auto begin = Clock::now();
  for (uint64_t taken = 0; taken < run.total();) {
    const auto command = fifo.front();
    if (!command) {
      if (seconds_since(begin) > DEADLINE_SECONDS) return mk::format("%llu came", (unsigned long long)taken);
      continue;
    }
    const uint64_t poster = command->source >> 40;
    if (poster >= next.size()) return mk::format("poster %llu", (unsigned long long)poster);
    const Command expected = numbered(poster, next[poster]++);
    if (std::memcmp(static_cast<const void*>(&*command), &expected, offsetof(Command, turn)) != 0) {
      return mk::format("poster %llu: source %llx where %llx was to come", (unsigned long long)poster,
                        (unsigned long long)command->source, (unsigned long long)expected.source);
    }
    ++taken;
    fifo.pop();
  }
  return fifo.front() ? "more came than were posted" : "";
}

void run_checked(const Run& run, std::chrono::milliseconds pause = {}) {
  Queue queue(run.capacity, run.first_index);
  Outcome* const outcome = allocate_zeroed<Outcome>();
  const auto begin = Clock::now();
  post<<<run.ctas, run.warps * 32>>>(queue.device(), run.rounds, run.batch, DEADLINE_SECONDS * SECOND_NS,
                                     outcome);
  require_cuda(cudaGetLastError(), "launching");
  if (pause.count() > 0) {
    std::this_thread::sleep_for(pause);
    check(cudaStreamQuery(nullptr) == cudaErrorNotReady, "a kernel waits while its FIFO is full");
    CommandQueueState state{};
    require_cuda(cudaMemcpyAsync(&state, queue.state, sizeof state, cudaMemcpyDeviceToHost, queue.stream),
                 "head");
    require_cuda(cudaStreamSynchronize(queue.stream), "head");
    check(state.head > run.capacity && state.tail_seen == 0, "warps have claimed more than there is room for");
  }
  const std::string wrong = take_all(*queue.fifo, run);
  check(wrong.empty(), run.text() + ": " + wrong);
  require_cuda(cudaDeviceSynchronize(), "posting");
  const double seconds = seconds_since(begin);
  Outcome seen{};
  require_cuda(cudaMemcpy(&seen, outcome, sizeof seen, cudaMemcpyDeviceToHost), "cudaMemcpy");
  check(seen.num_gave_up == 0, run.text() + ": warps gave up");
  std::printf("%s: %.2f M commands/s, checked\n", run.text().c_str(), run.total() / seconds / 1e6);
  cudaFree(outcome);
}

void test_deadline() {
  Queue queue(64);
  Outcome* const outcome = allocate_zeroed<Outcome>();
  const auto begin = Clock::now();
  post<<<4, 64>>>(queue.device(), 100, 32, SECOND_NS / 5, outcome);
  require_cuda(cudaDeviceSynchronize(), "giving up");
  Outcome seen{};
  require_cuda(cudaMemcpy(&seen, outcome, sizeof seen, cudaMemcpyDeviceToHost), "cudaMemcpy");
  // Of 64 slots two warps at most get all of theirs, and then ask for more.
  check(seen.num_gave_up == 8, mk::format("%u of 8 warps gave up", seen.num_gave_up));
  check(seconds_since(begin) < 5, "a deadline is kept");
  cudaFree(outcome);
}

void test_all(bool quick) {
  const int scale = quick ? 1 : 8;
  run_checked({64, 1, 1, 16384 * scale, 32});  // over and over the same slots
  run_checked({4096, 1, 8, 2048 * scale, 32});
  run_checked({4096, 132, 8, 64 * scale, 32});  // many posters
  run_checked({4096, 132, 4, 512 * scale, 1});  // of one command each
  run_checked({4096, 33, 4, 256 * scale, 7});   // lanes without a command
  run_checked({4, 2, 2, 128 * scale, 32});      // less room than a batch takes
  run_checked({1, 1, 2, 64 * scale, 3});
  run_checked({64, 3, 2, 256 * scale, 32, ((uint64_t{1} << 32) - 2) * 64});  // the turn wraps
  run_checked({256, 8, 4, 64, 32}, std::chrono::milliseconds(quick ? 1000 : 5000));
  test_deadline();
}

class CountingHandler : public mk::ProxyHandler {
 public:
  bool handle(const Command& command) override {
    checksum += command.bytes;
    if (echo != nullptr) std::atomic_ref<uint64_t>(*echo).store(command.source, std::memory_order_release);
    count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    return true;
  }
  bool progress() override { return false; }
  std::chrono::microseconds prepare_wait(std::vector<pollfd>&) override {
    return std::chrono::microseconds::max();
  }
  uint64_t* echo = nullptr;
  uint64_t checksum = 0;
  std::atomic<uint64_t> count{0};
};

constexpr mk::IdleStrategy BUSY{std::chrono::seconds(60), std::chrono::microseconds(50)};

void measure_rate(const Run& run) {
  Queue queue(run.capacity);
  Outcome* const outcome = allocate_zeroed<Outcome>();
  CountingHandler handler;
  mk::AbortToken abort;
  const auto proxy = require(mk::Proxy::start(*queue.fifo, handler, abort, BUSY));
  const auto begin = Clock::now();
  post<<<run.ctas, run.warps * 32>>>(queue.device(), run.rounds, run.batch, DEADLINE_SECONDS * SECOND_NS,
                                     outcome);
  while (handler.count.load(std::memory_order_acquire) < run.total() &&
         seconds_since(begin) < DEADLINE_SECONDS) {
  }
  const double seconds = seconds_since(begin);
  require_cuda(cudaDeviceSynchronize(), "posting");
  std::printf("one proxy thread, %s: %.2f M commands/s (goal: 5)\n", run.text().c_str(),
              run.total() / seconds / 1e6);
  cudaFree(outcome);
}

constexpr int TRIPS = 2000;
constexpr uint64_t TRIPS_NS = 20 * SECOND_NS;  // at most

// Of round trips, and of all of them together, since the clock's rate is not known.
struct Trips {
  uint32_t cycles[TRIPS];
  uint64_t all_cycles;
  uint64_t all_ns;
};

// send(turn), by the warp, then a wait until *word >= turn.
template <class Send>
__device__ void round_trips(const uint64_t* word, Trips* trips, Send&& send) {
  const uint64_t begin_ns = mk::ptx::globaltimer();
  const long long first = clock64();
  for (uint64_t turn = 1; turn <= TRIPS; ++turn) {
    const long long begin = clock64();
    if (!send(turn)) return;
    while (mk::ptx::ld_relaxed_sys(word) < turn) {
      if (mk::ptx::globaltimer() > begin_ns + TRIPS_NS) return;
    }
    __syncwarp();
    if (threadIdx.x == 0) trips->cycles[turn - 1] = static_cast<uint32_t>(clock64() - begin);
  }
  if (threadIdx.x != 0) return;
  trips->all_cycles = clock64() - first;
  trips->all_ns = mk::ptx::globaltimer() - begin_ns;
}

__global__ void ping(uint64_t* to_host, const uint64_t* from_host, Trips* trips) {
  round_trips(from_host, trips, [&](uint64_t turn) {
    if (threadIdx.x == 0) mk::ptx::st_release_sys(to_host, turn);
    return true;
  });
}

__global__ void ping_by_command(CommandQueue queue, const uint64_t* from_host, Trips* trips) {
  round_trips(from_host, trips, [&](uint64_t turn) {
    Command command{};
    command.kind = CommandKind::put;
    command.source = turn;
    return mk::post_commands(queue, threadIdx.x == 0, command, [](uint64_t) { return false; });
  });
}

// Two ranks in turn: a signal to the peer, then the peer's. `leads`: sends first.
__global__ void ping_by_signal(CommandQueue queue, const uint64_t* signal, int peer, bool leads, Trips* trips) {
  const auto send = [&](uint64_t) {
    Command command{};
    command.kind = CommandKind::signal;
    command.peer = static_cast<uint16_t>(peer);
    command.signal = 0;
    return mk::post_commands(queue, threadIdx.x == 0, command, [](uint64_t) { return false; });
  };
  if (leads) {
    round_trips(signal, trips, send);
    return;
  }
  const uint64_t give_up_at = mk::ptx::globaltimer() + TRIPS_NS;
  for (uint64_t turn = 1; turn <= TRIPS; ++turn) {
    while (mk::ptx::ld_relaxed_sys(signal) < turn) {
      if (mk::ptx::globaltimer() > give_up_at) return;
    }
    __syncwarp();
    send(turn);
  }
}

double median_us(const Trips* trips) {
  Trips seen;
  require_cuda(cudaMemcpy(&seen, trips, sizeof seen, cudaMemcpyDeviceToHost), "cudaMemcpy");
  check(seen.all_ns > 0, "all round trips were made");
  std::sort(std::begin(seen.cycles), std::end(seen.cycles));
  return seen.cycles[TRIPS / 2] * 1e-3 * static_cast<double>(seen.all_ns) /
         static_cast<double>(std::max<uint64_t>(1, seen.all_cycles));
}

void measure_latency() {
  Trips* const trips = allocate_zeroed<Trips>();
  const auto words = require(MappedPages::map(require(mk::SharedPages::make(4096))));
  auto* const host = reinterpret_cast<uint64_t*>(words->host());
  auto* const device = reinterpret_cast<uint64_t*>(words->device());
  ping<<<1, 32>>>(device, device + 16, trips);
  const auto begin = Clock::now();
  for (uint64_t seen = 0; seen < TRIPS && seconds_since(begin) < 20;) {
    seen = std::atomic_ref<uint64_t>(host[0]).load(std::memory_order_acquire);
    std::atomic_ref<uint64_t>(host[16]).store(seen, std::memory_order_release);
  }
  require_cuda(cudaDeviceSynchronize(), "ping");
  const double bare = median_us(trips);
  host[16] = 0;

  Queue queue(64);
  CountingHandler handler;
  handler.echo = host + 16;
  mk::AbortToken abort;
  const auto proxy = require(mk::Proxy::start(*queue.fifo, handler, abort, BUSY));
  ping_by_command<<<1, 32>>>(queue.device(), device + 16, trips);
  require_cuda(cudaDeviceSynchronize(), "ping by command");
  const double by_command = median_us(trips);
  std::printf(
      "a word to a CPU thread and back: %.2f us; a command to the proxy and a word back: %.2f us, so the proxy "
      "sees a post after about %.2f us\n",
      bare, by_command, by_command - bare / 2);
  cudaFree(trips);
}

// The way of a signal: kernel, proxy, network, peer's proxy, peer's kernel.
std::string measure_signals(mk::test::Rank& rank, const char* name) {
  int num_devices = 1;
  require_cuda(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount");
  const int device = rank.rank % num_devices;
  require_cuda(cudaSetDevice(device), "cudaSetDevice");
  mk::EndpointOptions options;
  options.idle = BUSY;
  if (const mk::Status status = rank.connect(std::move(options)); !status.ok()) {
    if (rank.rank == 0) std::printf("%s: not measured: %s\n", name, status.sentence().c_str());
    return "";
  }
  {
    const mk::SharedWithGpu shared = rank.endpoint->shared_with_gpu();
    const auto fifo = require(MappedPages::map(shared.fifo));
    const auto counters = require(MappedPages::map(shared.counters));
    auto* const state = allocate_zeroed<CommandQueueState>();
    Trips* const trips = allocate_zeroed<Trips>();
    cudaStream_t stream = nullptr;
    require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    if (!rank.barrier()) return "the barrier failed";
    ping_by_signal<<<1, 32, 0, stream>>>({fifo->device(), state, shared.fifo_capacity},
                                         reinterpret_cast<const uint64_t*>(counters->device()), 1 - rank.rank,
                                         rank.rank == 0, trips);
    require_cuda(cudaStreamSynchronize(stream), "ping by signal");
    const uint64_t came = rank.endpoint->signal(0);
    if (rank.rank == 0) {
      std::printf("%s: a kernel's post to the peer's kernel: %.2f us (half a round trip)\n", name,
                  median_us(trips) / 2);
      check(came == TRIPS, mk::format("%s: %llu of %d signals", name, (unsigned long long)came, TRIPS));
    }
    if (!rank.barrier()) return "the barrier failed";
    cudaStreamDestroy(stream);
    cudaFree(trips);
    cudaFree(state);
  }
  return "";
}

void measure_signals_over(const char* name, const mk::test::BackendCase& backend) {
  const std::string report =
      mk::test::run_ranks(mk::test::RankKind::threads, backend, {0, 1},
                          [&](mk::test::Rank& rank) { return measure_signals(rank, name); });
  check(report.empty(), std::string(name) + ": " + report);
}

void measure_all(bool quick) {
  const int scale = quick ? 1 : 8;
  measure_rate({4096, 1, 1, 8192 * scale, 32});
  measure_rate({4096, 1, 8, 4096 * scale, 32});
  measure_rate({4096, 16, 4, 512 * scale, 32});
  measure_rate({4096, 132, 4, 128 * scale, 32});
  measure_rate({4096, 132, 4, 512 * scale, 1});
  measure_latency();
  measure_signals_over("loopback", {"loopback", "0"});
  measure_signals_over("rc over softnic", {"rc", "0", true,
                                           "MK_SOFTNIC_KIND=ib MK_SOFTNIC_NICS=1 "
                                           "MK_SOFTNIC_BUSY_US=1000000"});
  measure_signals_over("srd over softnic", {"srd", "0", true,
                                            "MK_SOFTNIC_KIND=efa MK_SOFTNIC_NICS=1 "
                                            "MK_SOFTNIC_BUSY_US=1000000"});
}

}  // namespace

int main(int argc, char** argv) {
  bool quick = false, bench = false;
  for (int i = 1; i < argc; ++i) {
    quick = quick || std::strcmp(argv[i], "--quick") == 0;
    bench = bench || std::strcmp(argv[i], "--bench") == 0;
  }
  // Two kernels that wait for each other may share a GPU: nothing may be loaded, or queued, behind one of them.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  int num_devices = 0;
  if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) {
    std::printf("skipped: no GPU\n");
    return 77;
  }
  if (!bench) test_all(quick);
  measure_all(quick);
  std::printf("%d passed, %d failed\n", num_passed, num_failed);
  return num_failed > 0 ? 1 : 0;
}
