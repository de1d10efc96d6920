// SPDX-License-Identifier: MIT
// The roles of AllGather+GEMM between nodes that move data, on emulated warps and host memory, over the real
// transports: pushes, puts, arrivals, forwards and entries of several launches in a row; ranks that disagree; a
// rank that does not come up with its rows. The code is the kernel's own; only the product is missing, and
// someone who waits for all flags stands in for it.
#include "shim/device_words.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "../support/catch.h"
#include "../transport/harness.h"
#include "kernels/ops/allgather_gemm/cuda_network_kernel.cuh"
#include "kernels/topology_arrays.h"

namespace mk {

struct EmulatedConfig {
  static constexpr int NUM_THREADS = 96;  // two push warps and the one that signals; the network's three
};
template <>
struct RankGemmStorage<EmulatedConfig> {
  allgather_gemm::CudaParams unused;
  uint8_t bytes[sizeof(PushCtaStorage<EmulatedConfig::NUM_THREADS>)];
};

namespace test {
namespace {

using allgather_gemm::NetworkParams;

struct Shape {
  int64_t m, k;
  int64_t chunk_rows = 32;
  int panel_steps = 1;
};

constexpr int kPushCtas = 2;
constexpr int64_t kMaxArea = 1 << 20;

uint16_t element(uint64_t epoch, int64_t row, int64_t column) {
  return static_cast<uint16_t>(epoch * 40503 + static_cast<uint64_t>(row) * 331 +
                               static_cast<uint64_t>(column) * 7);
}

// Ranks of one test find each other's memory here; those of other nodes keep their hands off.
struct Job {
  explicit Job(size_t nranks) : memory(nranks) {}
  std::vector<std::vector<std::byte>> memory;
  std::byte* base(int rank) {
    auto address = reinterpret_cast<uintptr_t>(memory[static_cast<size_t>(rank)].data());
    return reinterpret_cast<std::byte*>((address + 4095) / 4096 * 4096);
  }
};

class EmulatedGpu {
 public:
  EmulatedGpu(Job& job, Rank& rank) : job_(job), rank_(rank), arrays_(rank.topology) {}

  Status set_up() {
    const size_t control = static_cast<size_t>(round_up(static_cast<int64_t>(layout().bytes()), 4096));
    job_.memory[static_cast<size_t>(rank_.rank)].resize(control + 2 * kMaxArea + 4096);
    EndpointOptions options;
    options.fifo_capacity = 16;
    options.idle = {std::chrono::microseconds(0), std::chrono::microseconds(200)};
    MK_RETURN_IF_ERROR(rank_.connect(std::move(options)));
    std::byte* const base = job_.base(rank_.rank);
    auto region = rank_.endpoint->register_region(base, layout().bytes(), Deadline::after(rank_.timeout));
    if (!region.ok()) return region.status();
    control_region_ = region.value();
    region = rank_.endpoint->register_region(base + control, 2 * kMaxArea, Deadline::after(rank_.timeout));
    if (!region.ok()) return region.status();
    arena_region_ = region.value();
    shared_ = rank_.endpoint->shared_with_gpu();
    arena_ = control;
    return {};
  }

  NetworkParams params(const Shape& shape) {
    NetworkParams params{};
    RankComm& comm = params.comm;
    comm.rank = rank_.rank;
    comm.nranks = rank_.nranks;
    comm.order = make_rank_order(arrays_.view());
    for (int i = 0; i < comm.order.num_local; ++i)
      comm.memory[comm.order.rank_at[i]] = job_.base(comm.order.rank_at[i]);
    comm.arena = arena_;
    comm.bank_bytes = kMaxArea;
    comm.state = state_.get();
    comm.mailbox = mailbox_.get();
    comm.wait_timeout_ns = timeout_ns;
    comm.entry.op = 1;
    comm.entry.shape[0] = shape.m;
    comm.entry.shape[1] = shape.k;
    comm.network.queue = {shared_.fifo->data(), &network_->queue, shared_.fifo_capacity};
    comm.network.counters = shared_.counters->data();
    comm.network.signals_taken = network_->signals_taken;
    comm.network.control_address = region_address(control_region_, 0);
    comm.network.arena_address = region_address(arena_region_, 0);
    const int64_t max_rows = ceil_div(shape.m, comm.nranks);
    params.schedule.topology.nranks = comm.nranks;
    params.schedule.topology.rank = comm.rank;
    params.schedule.m = shape.m;
    params.schedule.k = shape.k;
    params.schedule.chunk_rows = shape.chunk_rows;
    params.schedule.max_chunks = std::max(1, num_chunks(max_rows, shape.chunk_rows));
    params.m = static_cast<int>(shape.m);
    params.max_rows = static_cast<int>(std::max<int64_t>(1, max_rows));
    params.push_order = {4, 2, 3, 3, 5};
    params.panel_steps = shape.panel_steps;
    params.num_panels =
        static_cast<int>(std::max<int64_t>(1, ceil_div(ceil_div(shape.k, 64), shape.panel_steps)));
    params.a_pitch = round_up(shape.k, 8) * 2;
    rows_.assign(static_cast<size_t>(max_rows * params.a_pitch / 2 + 8), 0xdead);
    params.a = reinterpret_cast<const std::byte*>(rows_.data());
    return params;
  }

  void fill(const NetworkParams& params, uint64_t epoch) {
    for (int64_t row = 0; row < params.schedule.rows(rank_.rank); ++row) {
      for (int64_t column = 0; column < params.schedule.k; ++column) {
        rows_[static_cast<size_t>(row * params.a_pitch / 2 + column)] =
            element(epoch, int64_t{rank_.rank} * params.max_rows + row, column);
      }
    }
  }

  // A launch but for its product.
  void launch(const NetworkParams& params) {
    std::vector<std::vector<uint8_t>> smem(kPushCtas + 1, std::vector<uint8_t>(sizeof(Smem) + 128));
    emulation::run_ctas(kPushCtas + 1, EmulatedConfig::NUM_THREADS / 32, [&] {
      const RankLaunch launch(params.comm);
      launch.begin_cta();
      if (blockIdx.x + allgather_gemm::NUM_NETWORK_CTAS == gridDim.x) {
        allgather_gemm::run_network_cta(launch, params);
      } else if (params.schedule.k > 0) {
        auto address = reinterpret_cast<uintptr_t>(smem[blockIdx.x].data());
        allgather_gemm::run_network_push_cta<EmulatedConfig>(
            launch, params, reinterpret_cast<uint8_t*>((address + 127) / 128 * 128));
      }
      launch.end_cta();
    });
  }

  // What the product would have waited for, and then found.
  std::string consume(const NetworkParams& params, uint64_t epoch) {
    const allgather_gemm::Schedule& schedule = params.schedule;
    const std::byte* const area = job_.base(rank_.rank) + arena_ + bank_of(epoch) * kMaxArea;
    for (int source = 0; source < rank_.nranks && schedule.k > 0; ++source) {
      for (int chunk = 0; chunk < schedule.chunks(source); ++chunk) {
        for (int panel = 0; panel < params.num_panels; ++panel) {
          const int index = schedule.flag(source, chunk) * params.num_panels + panel;
          auto* const flag =
              reinterpret_cast<uint64_t*>(job_.base(rank_.rank) + layout().flag(bank_of(epoch), index));
          const Deadline deadline = Deadline::after(rank_.timeout);
          while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) < epoch) {
            if (deadline.passed() || rank_.abort.raised())
              return format("launch %llu: chunk %d of rank %d, panel %d did not come; ",
                            (unsigned long long)epoch, chunk, source, panel);
            std::this_thread::yield();
          }
        }
      }
      for (int64_t row = 0; row < schedule.rows(source); ++row) {
        const int64_t gathered = int64_t{source} * params.max_rows + row;
        const auto* const at =
            reinterpret_cast<const uint16_t*>(area + static_cast<size_t>(gathered) * schedule.row_pitch());
        for (int64_t column = 0; column < schedule.k; ++column) {
          if (at[column] == element(epoch, gathered, column)) continue;
          return format("launch %llu: row %lld of rank %d, column %lld is wrong; ", (unsigned long long)epoch,
                        (long long)row, source, (long long)column);
        }
      }
    }
    return "";
  }

  std::string complaint() const {
    if (mailbox_->failed == 0) return "";
    const DeviceError& error = mailbox_->error;
    return format("kind %u role %u object %u peer %d index %llu seen %llu expected %llu; ", error.kind,
                  static_cast<unsigned>(error.role), static_cast<unsigned>(error.object), error.peer,
                  (unsigned long long)error.index, (unsigned long long)error.seen,
                  (unsigned long long)error.expected);
  }
  const DeviceError& error() const { return mailbox_->error; }
  uint32_t failed() const { return mailbox_->failed; }
  uint64_t epoch() const { return state_->epoch; }
  bool is_clean() const {
    const bool counts = std::all_of(std::begin(state_->counts), std::end(state_->counts),
                                    [](uint32_t count) { return count == 0; });
    return counts && state_->running == 0 && state_->num_exited == 0 && state_->push_ticket == 0 &&
           state_->gather_ticket == 0;
  }
  uint64_t posted() const { return network_->queue.head; }

  uint64_t timeout_ns = 60'000'000'000;

 private:
  using Smem = PushCtaStorage<EmulatedConfig::NUM_THREADS>;
  ControlLayout layout() const { return {rank_.nranks}; }

  Job& job_;
  Rank& rank_;
  const TopologyArrays arrays_;
  std::unique_ptr<LaunchState> state_ = std::make_unique<LaunchState>();
  std::unique_ptr<HostMailbox> mailbox_ = std::make_unique<HostMailbox>();
  std::unique_ptr<NetworkState> network_ = std::make_unique<NetworkState>();
  std::vector<uint16_t> rows_;
  SharedWithGpu shared_;
  size_t arena_ = 0;
  uint32_t control_region_ = 0;
  uint32_t arena_region_ = 0;
};

std::string run_launches(EmulatedGpu& gpu, Rank& rank, const Shape& shape, int launches) {
  const NetworkParams params = gpu.params(shape);
  for (int turn = 0; turn < launches; ++turn) {
    const uint64_t epoch = gpu.epoch() + 1;
    gpu.fill(params, epoch);
    std::string wrong;
    std::thread consumer([&] { wrong = gpu.consume(params, epoch); });
    gpu.launch(params);
    consumer.join();
    MK_EXPECT(gpu.complaint() == "" || (std::printf("%s\n", gpu.complaint().c_str()), false));
    if (!wrong.empty()) return wrong;
    MK_EXPECT(gpu.epoch() == epoch);
    MK_EXPECT(gpu.is_clean());
    MK_EXPECT(rank.endpoint->completed() == gpu.posted());
  }
  return "";
}

const std::vector<std::vector<int>> kTopologies = {
    {0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 2}, {0, 0, 0, 1, 1}};

}  // namespace

TEST_CASE("rows travel between nodes and inside them, launch after launch", "[emulation]") {
  const std::vector<int> nodes = GENERATE(from_range(kTopologies));
  for (const BackendCase& backend : backend_cases()) {
    INFO(backend.backend << " seed " << backend.seed << " " << backend.environment << ", " << nodes.size()
                         << " ranks");
    Job job(nodes.size());
    CHECK(run_ranks(RankKind::threads, backend, nodes, [&](Rank& rank) -> std::string {
            EmulatedGpu gpu(job, rank);
            MK_EXPECT_OK(gpu.set_up());
            MK_EXPECT(rank.barrier());
            for (const Shape& shape : {Shape{500, 200}, Shape{3, 72}, Shape{0, 64}, Shape{70, 0},
                                       Shape{257, 33, 64, 1}, Shape{130, 520, 32, 4}, Shape{40, 8}}) {
              if (std::string text = run_launches(gpu, rank, shape, 3); !text.empty()) {
                return format("m %lld, k %lld: ", (long long)shape.m, (long long)shape.k) + text;
              }
            }
            MK_EXPECT(rank.barrier());
            return rank.failure();
          }) == "");
  }
}

TEST_CASE("a disagreement between nodes ends the launch on every rank", "[emulation]") {
  const std::vector<int> nodes = {0, 0, 1, 1};
  Job job(nodes.size());
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          EmulatedGpu gpu(job, rank);
          MK_EXPECT_OK(gpu.set_up());
          MK_EXPECT(rank.barrier());
          const NetworkParams params = gpu.params({rank.rank == 3 ? 300 : 500, 200});
          gpu.launch(params);
          MK_EXPECT(gpu.failed() == 1);
          MK_EXPECT(gpu.error().kind == DEVICE_MISMATCH);
          MK_EXPECT(rank.rank == 3 || gpu.error().peer == 3);
          MK_EXPECT(rank.barrier());
          rank.abort.raise(Status(MK_ERROR_MISMATCH, "as a communicator would"));
          return "";
        }) == "");
}

TEST_CASE("who waits for a put that does not come says for what", "[emulation]") {
  const std::vector<int> nodes = {0, 1};
  Job job(nodes.size());
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          EmulatedGpu gpu(job, rank);
          MK_EXPECT_OK(gpu.set_up());
          MK_EXPECT(rank.barrier());
          gpu.timeout_ns = rank.rank == 0 ? 300'000'000 : 60'000'000'000;
          NetworkParams params = gpu.params({500, 200});
          // Rank 1 believes that it has no rows to send, but all else is as agreed.
          if (rank.rank == 1) params.schedule.k = 0;
          gpu.launch(params);
          if (rank.rank == 0) {
            MK_EXPECT(gpu.failed() == 1);
            MK_EXPECT(gpu.error().kind == DEVICE_TIMEOUT);
            MK_EXPECT(gpu.error().role == DeviceRole::receive && gpu.error().object == DeviceObject::chunk);
            MK_EXPECT(gpu.error().peer == 1 && gpu.error().index == 0);
          }
          MK_EXPECT(rank.barrier());
          rank.abort.raise(Status(MK_ERROR_TIMEOUT, "as a communicator would"));
          return "";
        }) == "");
}

}  // namespace test
}  // namespace mk
