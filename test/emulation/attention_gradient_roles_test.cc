// SPDX-License-Identifier: MIT
// The roles of ring attention's gradients between nodes that move keys, values and parts of their gradients, on
// emulated warps and host memory, over the real transports: launches in a row; a rank whose parts do not come.
// The code is the kernel's own; only the products are missing. Warps that stand in for them wait for a tile's
// keys, store a part of known numbers, tell of it, and look for what the others have made of their own keys.
#include "shim/device_words.h"

#include <atomic>
#include <mutex>
#include <vector>

#include "../support/catch.h"
#include "gradient_parts.h"
#include "kernels/topology_arrays.h"

namespace mk::test {
namespace {

using namespace ring_attention_backward;
using ring_attention::set_needs;

using Config = GradientConfig;
constexpr int kComputeCtas = 3;
constexpr int kPushCtas = 2;
constexpr int kForwardCtas = 1;
constexpr int kCtas = kComputeCtas + kForwardCtas + 1;
constexpr size_t kBankBytes = 24 << 20;

struct Shape {
  int seq;
  bool causal;
  bool zigzag;
  int kv_heads = 2;
  int panel_blocks = TILE_BLOCKS;
  int put_heads = 1;
  int put_panels = 1;
};

uint16_t key_of(uint64_t epoch, int rank) { return static_cast<uint16_t>(epoch * 641 + 17 * rank + 1); }

class GradientRank {
 public:
  explicit GradientRank(Rank& rank) : rank_(rank), gpu_(rank), topology_(rank.topology) {}

  Status set_up(int64_t wait_timeout_ms = kPatienceMs) {
    return gpu_.set_up(kCtas, kBankBytes, wait_timeout_ms);
  }
  EmulatedGpu& gpu() { return gpu_; }

  NetworkParams params(const Shape& shape) {
    NetworkParams params{};
    params.comm = gpu_.comm();
    params.comm.entry.op = MK_OPERATOR_RING_ATTENTION_BACKWARD;
    params.comm.entry.output_offset = kNoOutput;
    params.comm.entry.shape[0] = shape.seq;
    const int nranks = params.comm.nranks, num_slices = shape.zigzag ? 2 * nranks : nranks;
    const CudaSlices slices = {shape.seq, nranks, std::max(1, (shape.seq + num_slices - 1) / num_slices),
                               shape.causal, shape.zigzag};
    params.tiles = {slices, rank_.rank, 1, shape.kv_heads, shape.kv_heads, TILE_ROWS};
    NetworkGradientPanels& panels = params.panels;
    panels.nranks = nranks;
    panels.num_heads = shape.kv_heads;
    panels.num_runs = slices.num_runs();
    panels.run_blocks = blocks_of(slices.slice_rows);
    panels.panel_blocks = shape.panel_blocks;
    panels.run_panels = (panels.run_blocks + shape.panel_blocks - 1) / shape.panel_blocks;
    panels.image_bytes = Config::KEY_BYTES;
    panels.slices = slices;
    panels.block_n = BLOCK_ROWS;
    panels.put_heads = shape.put_heads;
    panels.put_panels = shape.put_heads > 1 ? panels.run_panels : shape.put_panels;
    panels.num_query_heads = shape.kv_heads;
    panels.head_dim = Config::HEAD_DIM;
    panels.num_slots = most_part_slots(topology_.view());
    set_needs(slices, &panels);
    params.nodes = ring_attention::make_node_ranks(topology_.view());
    params.routes = make_part_routes(topology_.view());
    params.num_push_ctas = kPushCtas;
    params.num_compute_ctas = kComputeCtas;
    params.num_key_tiles = static_cast<int>(key_tiles_of(params).size());
    const int64_t num_rows = slices.rows(rank_.rank);
    keys_.assign(static_cast<size_t>(shape.kv_heads * num_rows * Config::HEAD_DIM + 1), 0);
    const ptx::EmulatedTensor tensor = {keys_.data(),
                                        {Config::HEAD_DIM, num_rows, shape.kv_heads, 1},
                                        {Config::HEAD_DIM * 2, num_rows * Config::HEAD_DIM * 2, 0},
                                        BLOCK_ROWS};
    std::memcpy(&params.map_k, &tensor, sizeof tensor);
    std::memcpy(&params.map_v, &tensor, sizeof tensor);
    return params;
  }

  // What was wrong; a launch but for its products. Without `stores_parts` the rank tells nobody of its parts.
  std::string launch(const NetworkParams& params, bool stores_parts = true) {
    wrong_.clear();
    std::fill(keys_.begin(), keys_.end(), key_of(gpu_.epoch() + 1, rank_.rank));
    std::vector<std::vector<uint8_t>> smem(kCtas, std::vector<uint8_t>(sizeof(Smem) + 128));
    emulation::run_ctas(kCtas, Config::NUM_THREADS / 32, [&] {
      const RankLaunch launch(params.comm);
      launch.begin_cta();
      const auto address = reinterpret_cast<uintptr_t>(smem[blockIdx.x].data());
      auto* const room = reinterpret_cast<uint8_t*>((address + 127) / 128 * 128);
      const auto cta = static_cast<int>(blockIdx.x);
      if (cta < kComputeCtas) {
        auto& compute = *reinterpret_cast<GradientComputeSmem*>(room);
        run_gradient_roles(launch, params, compute, cta - (kComputeCtas - kPushCtas), [&](int of_consumer) {
          stand_in(launch, params, compute, cta, of_consumer, stores_parts);
        });
      } else if (blockIdx.x + 1 == gridDim.x) {
        run_network_cta(launch, params);
      } else {
        ring_attention::run_forward_cta<Config>(launch, params, room);
      }
      launch.end_cta();
    });
    return wrong_;
  }

 private:
  union Smem {
    GradientComputeSmem compute;
    PushCtaStorage<Config::NUM_THREADS> forward;
  };

  // A consumer warp: every kComputeCtas-th tile.
  void stand_in(const RankLaunch& launch, const NetworkParams& params, GradientComputeSmem& smem, int cta,
                int warp, bool stores_parts) {
    PushNotes notes(smem.stored, warp);
    const auto tiles = key_tiles_of(params);
    const auto num_tiles = static_cast<int>(tiles.size());
    for (int number = cta; number < num_tiles; number += kComputeCtas) {
      const KeyTile tile = tiles.at(number);
      if (warp == 0 && threadIdx.x % 32 == 0) atomicAdd(&launch.progress().gather_ticket, 1u);
      if (tile.step == 0) {
        look_at_shares(launch, params, tile, warp, [&](const std::string& what) { say(what); });
        num_added_ += warp == 0 && threadIdx.x % 32 == 0 ? 1 : 0;
        continue;
      }
      await_keys(launch, params, tile);
      if (!stores_parts) continue;
      store_share(launch, params, tile, warp);
      notes.add(static_cast<uint64_t>(number));
    }
    notes.end();
  }

  void await_keys(const RankLaunch& launch, const NetworkParams& params, const KeyTile& tile) {
    const NetworkGradientPanels& panels = params.panels;
    const int source = source_of(params, tile.step), block = tile.index * TILE_BLOCKS;
    if (threadIdx.x % 32 == 0) {
      const int flag = panels.flag(source, tile.head, tile.run, block / panels.panel_blocks);
      if (launch.wait_flag(flag, DeviceRole::compute, DeviceObject::chunk, source, flag)) {
        const std::byte* const keys =
            launch.area(rank_.rank, panels.offset(source, tile.head, tile.run, block));
        if (*reinterpret_cast<const uint16_t*>(keys) != key_of(launch.epoch(), source))
          say(format("keys of rank %d, head %d, run %d, block %d are wrong; ", source, tile.head, tile.run,
                     block));
      }
    }
    __syncwarp();
  }

  void say(const std::string& what) {
    std::lock_guard lock(mutex_);
    if (wrong_.empty()) wrong_ = what;
  }

  Rank& rank_;
  EmulatedGpu gpu_;
  const TopologyArrays topology_;
  std::vector<uint16_t> keys_;
  std::mutex mutex_;
  std::string wrong_;

 public:
  std::atomic<int> num_added_{0};  // tiles of own keys
};

std::string run_launches(GradientRank& gradients, Rank& rank, const Shape& shape, int launches) {
  EmulatedGpu& gpu = gradients.gpu();
  const NetworkParams params = gradients.params(shape);
  MK_EXPECT(params.panels.area_bytes() <= kBankBytes);
  std::string first;
  for (int turn = 0; turn < launches; ++turn) {
    const uint64_t epoch = gpu.epoch() + 1;
    gradients.num_added_ = 0;
    const std::string wrong = gradients.launch(params);
    if (const std::string sentence = gpu.sentence(); !sentence.empty()) return sentence + "; ";
    // The other ranks wait for this one in the launches to come.
    if (first.empty() && !wrong.empty())
      first = format("launch %llu: ", static_cast<unsigned long long>(epoch)) + wrong;
    MK_EXPECT(gradients.num_added_ == shape.kv_heads * key_tiles_of(params).tiles_of_step(0));
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

TEST_CASE("parts of gradients travel between nodes and inside them, launch after launch", "[emulation]") {
  const std::vector<int> nodes = GENERATE(from_range(fewer_if_slow(kTopologies)));
  for (const BackendCase& backend : fewer_if_slow(backend_cases())) {
    INFO(backend.backend << " seed " << backend.seed << " " << backend.environment << ", " << nodes.size()
                         << " ranks");
    CHECK(run_ranks(RankKind::threads, backend, nodes, [&](Rank& rank) -> std::string {
            GradientRank gradients(rank);
            MK_EXPECT_OK(gradients.set_up());
            MK_EXPECT(rank.barrier());
            std::string wrong;
            for (const Shape& shape :
                 {Shape{900, false, false}, Shape{900, true, false}, Shape{900, true, true},
                  Shape{700, true, true, 3, TILE_BLOCKS, 2}, Shape{1300, false, false, 2, TILE_BLOCKS, 1, 2},
                  Shape{3, false, false}, Shape{0, true, true}, Shape{1500, true, true, 2, 2 * TILE_BLOCKS}}) {
              const std::string text = run_launches(gradients, rank, shape, 3);
              if (!text.empty() && wrong.empty())
                wrong = format("seq %d, causal %d, zigzag %d: ", shape.seq, shape.causal, shape.zigzag) + text;
            }
            MK_EXPECT(rank.barrier());
            return wrong + rank.failure();
          }) == "");
  }
}

TEST_CASE("who waits for parts that do not come says for whose", "[emulation]") {
  const std::vector<int> nodes = {0, 0, 1};
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          GradientRank gradients(rank);
          MK_EXPECT_OK(gradients.set_up(3000));
          MK_EXPECT(rank.barrier());
          gradients.launch(gradients.params({900, false, false}), rank.rank != 1);
          const mk_async_error_t error = gradients.gpu().error();
          // Rank 0 relays rank 1's parts to rank 2, and is owed some itself.
          const bool is_said =
              error.status == MK_ERROR_TIMEOUT && error.rank == 1 && std::string(error.object) == "partial";
          const std::string wrong = rank.rank == 1 || is_said ? "" : gradients.gpu().sentence() + "; ";
          MK_EXPECT(rank.barrier());
          rank.abort.raise(Status(MK_ERROR_TIMEOUT, "as a communicator would"));
          return wrong;
        }) == "");
}

}  // namespace mk::test
