// SPDX-License-Identifier: MIT
// The roles of ring attention between nodes that move keys and values, on emulated warps and host memory, over
// the real transports: pushes, puts, arrivals, forwards and entries of several launches in a row; a rank that
// does not come up with its keys. The code is the kernel's own; only the attention is missing, and someone who
// waits for all flags of what this rank's queries see stands in for it.
#include "shim/device_words.h"

#include <thread>
#include <vector>

#include "../support/catch.h"
#include "emulated_gpu.h"
#include "kernels/ops/ring_attention/cuda_network.cuh"
#include "kernels/topology_arrays.h"

namespace mk::test {
namespace {

using namespace ring_attention;

struct Config {
  static constexpr int NUM_THREADS = 128;
  static constexpr int BLOCK_N = 32;
  static constexpr int NUM_COLUMN_BLOCKS = 2;
  static constexpr int KEY_COLUMN_BYTES = BLOCK_N * 128;
  static constexpr int KEY_BYTES = NUM_COLUMN_BLOCKS * KEY_COLUMN_BYTES;
};
constexpr int kDim = 128;
constexpr int kPushCtas = 2;
constexpr int kForwardCtas = 2;
constexpr int kCtas = kPushCtas + kForwardCtas + 1;
constexpr size_t kBankBytes = 4 << 20;

struct Shape {
  int seq;
  bool causal;
  bool zigzag;
  int kv_heads = 2;
  int panel_blocks = 1;
  int put_heads = 1;
  int put_panels = 1;
};

uint16_t element(uint64_t epoch, bool value, int head, int position, int column) {
  return static_cast<uint16_t>(epoch * 40503 + (value ? 9973u : 0u) + static_cast<unsigned>(head) * 1709u +
                               static_cast<unsigned>(position) * 331u + static_cast<unsigned>(column) * 7u);
}

// Of one rank: keys and values, a launch, and who takes what has come.
class KeyRank {
 public:
  explicit KeyRank(Rank& rank) : rank_(rank), gpu_(rank), topology_(rank.topology) {}

  Status set_up(int64_t wait_timeout_ms = kPatienceMs) {
    return gpu_.set_up(kCtas, kBankBytes, wait_timeout_ms);
  }
  EmulatedGpu& gpu() { return gpu_; }

  NetworkParams params(const Shape& shape) {
    NetworkParams params{};
    params.comm = gpu_.comm();
    params.comm.entry.op = MK_OPERATOR_RING_ATTENTION;
    params.comm.entry.output_offset = kNoOutput;
    params.comm.entry.shape[0] = shape.seq;
    const int nranks = params.comm.nranks, num_slices = shape.zigzag ? 2 * nranks : nranks;
    const CudaSlices slices = {shape.seq, nranks, std::max(1, (shape.seq + num_slices - 1) / num_slices),
                               shape.causal, shape.zigzag};
    params.tiles = {slices, rank_.rank, 1, shape.kv_heads, shape.kv_heads, 16};
    NetworkPanels& panels = params.panels;
    panels.nranks = nranks;
    panels.num_heads = shape.kv_heads;
    panels.num_runs = slices.num_runs();
    panels.run_blocks = (slices.slice_rows + Config::BLOCK_N - 1) / Config::BLOCK_N;
    panels.panel_blocks = shape.panel_blocks;
    panels.run_panels = (panels.run_blocks + shape.panel_blocks - 1) / shape.panel_blocks;
    panels.image_bytes = Config::KEY_BYTES;
    panels.slices = slices;
    panels.block_n = Config::BLOCK_N;
    panels.put_heads = shape.put_heads;
    panels.put_panels = shape.put_heads > 1 ? panels.run_panels : shape.put_panels;
    set_needs(slices, &panels);
    params.nodes = make_node_ranks(topology_.view());
    params.num_push_ctas = kPushCtas;
    params.num_compute_ctas = kPushCtas;
    for (const bool value : {false, true}) {
      std::vector<uint16_t>& rows = value ? values_ : keys_;
      const int64_t num_rows = slices.rows(rank_.rank);
      rows.assign(static_cast<size_t>(shape.kv_heads * num_rows * kDim + 1), 0xdead);
      const ptx::EmulatedTensor tensor = {rows.data(),
                                          {kDim, num_rows, shape.kv_heads, 1},
                                          {kDim * 2, num_rows * kDim * 2, 0},
                                          Config::BLOCK_N};
      std::memcpy(value ? &params.map_v : &params.map_k, &tensor, sizeof tensor);
    }
    return params;
  }

  void fill(const NetworkParams& params, uint64_t epoch) {
    const CudaSlices& slices = params.tiles.slices;
    const int num_rows = slices.rows(rank_.rank);
    for (int head = 0; head < params.panels.num_heads; ++head) {
      for (int run = 0; run < slices.num_runs(); ++run) {
        for (int i = 0; i < slices.count(rank_.rank, run); ++i) {
          const int row = slices.first_row(rank_.rank, run) + i, position = slices.begin(rank_.rank, run) + i;
          for (int column = 0; column < kDim; ++column) {
            const auto at = static_cast<size_t>((head * num_rows + row) * kDim + column);
            keys_[at] = element(epoch, false, head, position, column);
            values_[at] = element(epoch, true, head, position, column);
          }
        }
      }
    }
  }

  // A launch but for its attention.
  void launch(const NetworkParams& params, bool has_keys = true) {
    std::vector<std::vector<uint8_t>> smem(kCtas, std::vector<uint8_t>(sizeof(Smem) + 128));
    emulation::run_ctas(kCtas, Config::NUM_THREADS / 32, [&] {
      const RankLaunch launch(params.comm);
      launch.begin_cta();
      const auto address = reinterpret_cast<uintptr_t>(smem[blockIdx.x].data());
      auto* const room = reinterpret_cast<uint8_t*>((address + 127) / 128 * 128);
      const auto cta = static_cast<int>(blockIdx.x);
      if (cta < kPushCtas) {
        if (has_keys) push(launch, params, *reinterpret_cast<PushSmem*>(room), cta);
      } else if (blockIdx.x + 1 == gridDim.x) {
        run_network_cta(launch, params);
      } else {
        run_forward_cta<Config>(launch, params, room);
      }
      launch.end_cta();
    });
  }

  // What the attention would have waited for, and then found.
  std::string consume(const NetworkParams& params, uint64_t epoch) {
    const NetworkPanels& panels = params.panels;
    for (int source = 0; source < rank_.nranks; ++source) {
      for (int run = 0; run < panels.num_runs; ++run) {
        if (!is_in(panels.needed_by[run][source], rank_.rank)) continue;
        for (int head = 0; head < panels.num_heads; ++head) {
          for (int block = 0; block < panels.num_blocks(source, run); ++block) {
            const int panel = block / panels.panel_blocks;
            const std::string what = format("launch %llu: block %d of rank %d, run %d, head %d",
                                            (unsigned long long)epoch, block, source, run, head);
            if (!wait(panels.flag(source, head, run, panel), epoch)) return what + " did not come; ";
            if (!is_right(panels, source, run, head, block, epoch)) return what + " is wrong; ";
          }
        }
      }
    }
    return "";
  }

  // After a launch: flags of what this rank neither needs nor passes on.
  std::string surplus(const NetworkParams& params, uint64_t epoch) const {
    const NetworkPanels& panels = params.panels;
    const RankOrder& order = params.comm.order;
    for (int source = 0; source < rank_.nranks; ++source) {
      const bool relays = std::find(order.relayed, order.relayed + order.num_relayed, source) !=
                          order.relayed + order.num_relayed;
      for (int run = 0; run < panels.num_runs; ++run) {
        const RankSet needed_by = panels.needed_by[run][source];
        if (source == rank_.rank ? (needed_by & ~params.nodes.own) != 0 : is_in(needed_by, rank_.rank))
          continue;
        if (relays && (needed_by & params.nodes.own) != 0) continue;
        for (int head = 0; head < panels.num_heads; ++head) {
          for (int panel = 0; panel < panels.run_panels; ++panel) {
            if (*flag(panels.flag(source, head, run, panel), epoch) == epoch)
              return format("panel %d of rank %d, run %d came and nobody wants it; ", panel, source, run);
          }
        }
      }
    }
    return "";
  }

 private:
  struct PushSmem {
    KeyPushStorage signals;
    alignas(128) uint8_t room[KEY_PUSH_BYTES<Config>];
  };
  union Smem {
    PushSmem push;
    PushCtaStorage<Config::NUM_THREADS> forward;
  };

  static void push(const RankLaunch& launch, const NetworkParams& params, PushSmem& smem, int cta) {
    if (threadIdx.x == 0) key_push_init(smem.signals);
    __syncthreads();
    const auto warp = static_cast<int>(threadIdx.x / 32);
    if (warp > 0) {
      push_keys<Config>(launch, params, smem.signals, smem.room, warp - 1, cta);
    } else {
      signal_keys<Config>(launch, params, smem.signals);
    }
  }

  uint64_t* flag(int index, uint64_t epoch) const {
    return reinterpret_cast<uint64_t*>(gpu_.comm().memory[rank_.rank] +
                                       ControlLayout{rank_.nranks}.flag(bank_of(epoch), index));
  }
  bool wait(int index, uint64_t epoch) const {
    const Deadline deadline = Deadline::after(rank_.timeout);
    while (__atomic_load_n(flag(index, epoch), __ATOMIC_ACQUIRE) < epoch) {
      if (deadline.passed() || rank_.abort.raised()) return false;
      std::this_thread::yield();
    }
    return true;
  }
  // Rows behind the run's end are zeros.
  bool is_right(const NetworkPanels& panels, int source, int run, int head, int block, uint64_t epoch) const {
    const std::byte* const image = gpu_.area(epoch, panels.offset(source, head, run, block));
    const int first = block * Config::BLOCK_N, count = panels.slices.count(source, run);
    for (const bool value : {false, true}) {
      const auto* at = reinterpret_cast<const uint16_t*>(image + (value ? Config::KEY_BYTES : 0));
      for (int columns = 0; columns < kDim; columns += 64) {
        for (int row = first; row < first + Config::BLOCK_N; ++row) {
          const int position = panels.slices.begin(source, run) + row;
          for (int column = columns; column < columns + 64; ++column, ++at) {
            // Rows of a next run follow in memory.
            if (row < count && *at != element(epoch, value, head, position, column)) return false;
          }
        }
      }
    }
    return true;
  }

  Rank& rank_;
  EmulatedGpu gpu_;
  const TopologyArrays topology_;
  std::vector<uint16_t> keys_, values_;
};

std::string run_launches(KeyRank& keys, Rank& rank, const Shape& shape, int launches) {
  EmulatedGpu& gpu = keys.gpu();
  const NetworkParams params = keys.params(shape);
  std::string first;
  for (int turn = 0; turn < launches; ++turn) {
    const uint64_t epoch = gpu.epoch() + 1;
    keys.fill(params, epoch);
    std::string wrong;
    std::thread consumer([&] { wrong = keys.consume(params, epoch); });
    keys.launch(params);
    consumer.join();
    if (const std::string sentence = gpu.sentence(); !sentence.empty()) return sentence + "; ";
    // The other ranks wait for this one in the launches to come.
    if (first.empty()) first = wrong.empty() ? keys.surplus(params, epoch) : wrong;
    MK_EXPECT(gpu.epoch() == epoch && gpu.is_idle());
    MK_EXPECT(gpu.is_clean());
    MK_EXPECT(rank.endpoint->completed() == params.comm.network.queue.state->head);
  }
  return first;
}

// With a sanitizer the first and the fourth.
const std::vector<std::vector<int>> kTopologies = {{0, 0, 1, 1}, {0, 1},    {0, 1, 0, 1},
                                                   {0, 0, 0, 1}, {0, 1, 2}, {0, 0, 1, 1, 1}};

}  // namespace

TEST_CASE("keys travel between nodes and inside them, launch after launch", "[emulation]") {
  const std::vector<int> nodes = GENERATE(from_range(fewer_if_slow(kTopologies)));
  for (const BackendCase& backend : fewer_if_slow(backend_cases())) {
    INFO(backend.backend << " seed " << backend.seed << " " << backend.environment << ", " << nodes.size()
                         << " ranks");
    CHECK(run_ranks(RankKind::threads, backend, nodes, [&](Rank& rank) -> std::string {
            KeyRank keys(rank);
            MK_EXPECT_OK(keys.set_up());
            MK_EXPECT(rank.barrier());
            std::string wrong;
            for (const Shape& shape :
                 {Shape{500, false, false}, Shape{500, true, false}, Shape{500, true, true},
                  Shape{330, true, true, 3, 1, 2}, Shape{330, false, false, 3, 2, 3}, Shape{3, false, false},
                  Shape{0, true, true}, Shape{600, true, true, 2, 1, 1, 2}, Shape{700, false, false, 1, 2}}) {
              const std::string text = run_launches(keys, rank, shape, 3);
              if (!text.empty() && wrong.empty())
                wrong = format("seq %d, causal %d, zigzag %d: ", shape.seq, shape.causal, shape.zigzag) + text;
            }
            MK_EXPECT(rank.barrier());
            return wrong + rank.failure();
          }) == "");
  }
}

TEST_CASE("who waits for keys that do not come says for what", "[emulation]") {
  const std::vector<int> nodes = {0, 1};
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          KeyRank keys(rank);
          MK_EXPECT_OK(keys.set_up(3000));
          MK_EXPECT(rank.barrier());
          const NetworkParams params = keys.params({500, false, false});
          keys.launch(params, rank.rank == 0);
          const mk_async_error_t error = keys.gpu().error();
          MK_EXPECT(error.status == MK_ERROR_TIMEOUT && error.rank == 1);
          MK_EXPECT(std::string(error.role) == (rank.rank == 0 ? "receive" : "send"));
          MK_EXPECT(std::string(error.object) == "chunk");
          MK_EXPECT(rank.barrier());
          rank.abort.raise(Status(MK_ERROR_TIMEOUT, "as a communicator would"));
          return "";
        }) == "");
}

}  // namespace mk::test
