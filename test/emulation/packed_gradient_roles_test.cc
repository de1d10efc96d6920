// SPDX-License-Identifier: MIT
// What a launch of ring attention's gradients over packed sequences does beside its products between nodes, on
// emulated warps and host memory, over the real transports: the check of cu_seqlens and what follows from it,
// keys and values as forward, parts of their gradients; launches in a row, each with other sequences; a rank
// whose parts do not come. The code is the kernel's own; warps that stand in for its products wait for a tile's
// keys, store a part of known numbers, tell of it, and look for what the others have made of their own keys.
#include "packed_rank.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "../support/catch.h"
#include "gradient_parts.h"
#include "kernels/ops/ring_attention_backward/cuda_packed_network.cuh"
#include "kernels/topology_arrays.h"

namespace mk::test {
namespace {

namespace gradients = ring_attention_backward;
using GradientParams = gradients::PackedNetworkParams;
using gradients::KeyTile;
using gradients::TILE_BLOCKS;

constexpr int kComputeCtas = 3;
constexpr int kPushCtas = 2;
constexpr int kForwardCtas = 1;
constexpr int kCtas = kComputeCtas + kForwardCtas + 1;
constexpr size_t kGradientBankBytes = 24 << 20;

struct Puts {
  int panel_blocks = TILE_BLOCKS;
  int put_heads = 1;
  int put_panels = 1;
};

class PackedGradientRank : public PackedRankOf<GradientParams, kCtas, GradientConfig> {
 public:
  explicit PackedGradientRank(Rank& rank) : PackedRankOf(rank), topology_(rank.topology) {}

  Status set_up(int64_t wait_timeout_ms = kPatienceMs) {
    return PackedRankOf::set_up(kGradientBankBytes, wait_timeout_ms);
  }

  void prepare(const Shape& shape, int64_t seq, const Puts& puts) {
    prepare_call(shape, seq, kPushCtas);
    GradientParams& params = arguments_.params;
    params.comm.entry.op = MK_OPERATOR_RING_ATTENTION_BACKWARD;
    auto& panels = params.panels;
    static_cast<KeyPanels&>(panels) = panels_in_node(puts.panel_blocks);
    panels.slices = params.tiles.slices;
    panels.block_n = GradientConfig::BLOCK_N;
    panels.put_heads = puts.put_heads;
    panels.put_panels = puts.put_heads > 1 ? panels.run_panels : puts.put_panels;
    panels.num_query_heads = params.tiles.heads;
    panels.head_dim = GradientConfig::HEAD_DIM;
    panels.num_slots = gradients::most_part_slots(topology_.view());
    params.nodes = make_node_ranks(topology_.view());
    panels.own = params.nodes.own;
    params.routes = gradients::make_part_routes(topology_.view());
    params.num_compute_ctas = kComputeCtas;
  }

  // What was wrong; a launch but for its products. Without `stores_parts` the rank tells nobody of its parts.
  std::string launch(bool stores_parts = true) {
    wrong_.clear();
    num_added_ = 0;
    std::vector<std::vector<uint8_t>> memory(kCtas, std::vector<uint8_t>(sizeof(Smem) + 128));
    emulation::run_ctas(kCtas, GradientConfig::NUM_THREADS / 32, [&] {
      const auto address = reinterpret_cast<uintptr_t>(memory[blockIdx.x].data());
      Smem& smem = *reinterpret_cast<Smem*>((address + 127) / 128 * 128);
      const RankLaunch launch(arguments_.params.comm);
      launch.begin_cta();
      const bool goes_on = begin_packed(
          arguments_, smem.packed, [&](GradientParams& params, int) { settle_network(params, smem.needs); });
      const auto cta = static_cast<int>(blockIdx.x);
      const GradientParams& params = smem.packed.params;
      if (goes_on) {
        choose_heads(smem.packed);
        if (threadIdx.x == 0 && params.heads_at_once != expected_heads()) say("other heads at once; ");
      }
      if (!goes_on) {
        if (cta + 1 == kCtas && threadIdx.x < 32) end_without_keys(smem.packed);
      } else if (cta < kComputeCtas) {
        if (threadIdx.x == 0) num_rows_[cta] = params.tiles.slices.rows(rank_.rank);
        if (cta >= kComputeCtas - kPushCtas) find_needs<GradientConfig::NUM_THREADS, false>(params, smem.needs);
        run_gradient_roles(launch, params, smem.role.compute, cta - (kComputeCtas - kPushCtas), [&](int warp) {
          stand_in(launch, params, smem.role.compute, cta, warp, stores_parts);
        });
      } else {
        if (threadIdx.x == 0) num_rows_[cta] = params.tiles.slices.rows(rank_.rank);
        find_needs<GradientConfig::NUM_THREADS, true>(params, smem.needs);
        if (cta + 1 == kCtas) {
          run_network_cta(RankLaunch(params.comm), params);
        } else {
          run_forward_cta<GradientConfig>(launch, params, smem.role.forward);
        }
      }
      launch.end_cta();
    });
    return wrong_;
  }

  // After all ranks' launches.
  std::string verify() const {
    const int rows = slices_.rows(rank_.rank);
    const int expected = kKvHeads * gradients::tiles_of(rows);
    if (num_added_ != expected) return format("%d tiles of %d; ", num_added_.load(), expected);
    return verify_rows();
  }
  bool has_ended_puts() const {
    return rank_.endpoint->completed() == arguments_.params.comm.network.queue.state->head;
  }
  bool fits() const { return arguments_.params.panels.area_bytes() <= kGradientBankBytes; }

 private:
  struct Smem {
    union {
      GradientComputeSmem compute;
      alignas(128) uint8_t forward[sizeof(PushCtaStorage<GradientConfig::NUM_THREADS>)];
    } role;
    PackedStorage<GradientParams, GradientConfig::NUM_THREADS> packed;
    PanelNeeds needs;
  };

  int expected_heads() const {
    int64_t squares = 0;
    for (int i = 0; i < slices_.num_sequences; ++i) {
      const int64_t rows = slices_.cu_seqlens[i + 1] - slices_.cu_seqlens[i];
      squares += rows * rows;
    }
    const auto rows = static_cast<int>(squares / std::max(1, slices_.seq)) / slices_.nranks;
    return arguments_.params.panels.heads_at_once(slices_.causal, gradients::blocks_of(rows));
  }

  // A consumer warp: every kComputeCtas-th tile.
  void stand_in(const RankLaunch& launch, const GradientParams& params, GradientComputeSmem& smem, int cta,
                int warp, bool stores_parts) {
    PushNotes notes(smem.stored, warp);
    const bool counts = warp == 0 && threadIdx.x % 32 == 0;
    const auto tiles = key_tiles_of(params);
    for (int number = cta; number < params.num_key_tiles; number += kComputeCtas) {
      if (counts) atomicAdd(&launch.progress().gather_ticket, 1u);
      const KeyTile tile = tiles.at(number);
      if (!tiles.is_seen(tile)) continue;
      if (tile.step == 0) {
        look_at_shares(launch, params, tile, warp, [&](const std::string& what) { say(what); });
        num_added_ += counts ? 1 : 0;
        continue;
      }
      for (int block = 0; block < gradients::blocks_of(tile.num_rows); ++block)
        await_keys(launch, params, tile.step, tile.head, tile.index * TILE_BLOCKS + block);
      if (!stores_parts) continue;
      store_share(launch, params, tile, warp);
      notes.add(static_cast<uint64_t>(number));
    }
    notes.end();
  }

  void await_keys(const RankLaunch& launch, const GradientParams& params, int step, int head, int block) {
    const auto& panels = params.panels;
    const int source = source_of(params, step);
    if (threadIdx.x % 32 == 0) {
      const int flag = panels.flag(source, head, 0, block / panels.panel_blocks);
      if (launch.wait_flag(flag, DeviceRole::compute, DeviceObject::chunk, source, flag) &&
          !is_right(source, block, head, panels.offset(source, head, 0, block), launch.epoch()))
        say(format("keys of rank %d, head %d, block %d are wrong; ", source, head, block));
    }
    __syncwarp();
  }

  void say(const std::string& what) {
    std::lock_guard lock(mutex_);
    if (wrong_.empty()) wrong_ = what;
  }

  const TopologyArrays topology_;
  std::mutex mutex_;
  std::string wrong_;
  std::atomic<int> num_added_{0};  // tiles of own keys
};

// With a sanitizer the first and the fourth.
const std::vector<std::vector<int>> kTopologies = {{0, 0, 1, 1}, {0, 1},       {0, 1, 0, 1},
                                                   {0, 0, 0, 1}, {0, 1, 2, 3}, {0, 0, 1, 1, 1}};

// Empty ones, of one position, within a rank and over several, one; less than a tile a rank, several panels.
std::vector<std::vector<int32_t>> bounds_of_gradients() {
  return {{0, 0, 3, 4, 120, 121, 333, 500, 500}, {0, 1}, every(3, 300), {0, 600, 601, 900, 1300}, {0, 1300}};
}

// One launch on entries that are right.
std::string run_launch(PackedGradientRank& packed, Rank& rank) {
  const uint64_t epoch = packed.gpu().epoch() + 1;
  packed.fill(epoch);
  if (!packed.fits()) return "a bank is too small; ";
  std::string wrong = packed.launch();
  if (const std::string sentence = packed.gpu().sentence(); !sentence.empty()) return sentence;
  MK_EXPECT(rank.barrier());
  if (wrong.empty()) wrong = packed.verify();
  MK_EXPECT(packed.is_clean(epoch) && packed.has_ended_puts());
  return wrong;
}

}  // namespace

TEST_CASE("parts of packed keys travel between nodes and inside them, launch after launch", "[emulation]") {
  const std::vector<int> nodes = GENERATE(from_range(fewer_if_slow(kTopologies)));
  for (const BackendCase& backend : fewer_if_slow(backend_cases())) {
    INFO(backend.backend << " seed " << backend.seed << " " << backend.environment << ", " << nodes.size()
                         << " ranks");
    CHECK(run_ranks(RankKind::threads, backend, nodes, [&](Rank& rank) -> std::string {
            PackedGradientRank packed(rank);
            MK_EXPECT_OK(packed.set_up());
            MK_EXPECT(rank.barrier());
            std::string first;
            size_t number = 0;
            for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
              for (const std::vector<int32_t>& bounds : bounds_of_gradients()) {
                const Puts puts = std::vector<Puts>{{2, 1, 1}, {2, 1, 3}, {2, 2, 1}, {4, 1, 2}}[number++ % 4];
                packed.prepare({causal, bounds.size() % 2 == 0, bounds}, bounds.back(), puts);
                const std::string wrong = run_launch(packed, rank);
                if (first.empty() && !wrong.empty())
                  first = format("causal %d, %zu sequences: ", causal, bounds.size() - 1) + wrong;
                if (!packed.gpu().sentence().empty()) return first;
              }
            }
            return first + rank.failure();
          }) == "");
  }
}

TEST_CASE("wrong cu_seqlens of gradients are named, and the next launch is as any other", "[emulation]") {
  const std::vector<int> nodes = {0, 0, 1};
  for (const BadBounds& bad : bad_bounds()) {
    const mk_causal_t causal = bad.bounds[1] == 500 ? MK_CAUSAL_NONE : MK_CAUSAL_ZIGZAG;
    CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
            PackedGradientRank packed(rank);
            MK_EXPECT_OK(packed.set_up());
            MK_EXPECT(rank.barrier());
            packed.prepare({causal, false, bad.bounds}, 400, {});
            packed.launch();
            MK_EXPECT(packed.gpu().error().status == MK_ERROR_DATA);
            MK_EXPECT(packed.gpu().sentence().find(bad.says) != std::string::npos);
            MK_EXPECT(packed.has_ended_puts() && !rank.abort.raised());
            MK_EXPECT(rank.barrier());
            MK_EXPECT(packed.is_untouched(packed.gpu().epoch()) && packed.gpu().is_idle());
            // Nothing is asked for: entries are not looked at.
            packed.prepare({causal, false, bad.bounds}, 0, {});
            const std::string before = packed.gpu().sentence();
            packed.launch();
            MK_EXPECT(packed.gpu().sentence() == before && packed.has_ended_puts());
            MK_EXPECT(rank.barrier());
            packed.prepare({causal, false, {0, 300, 400}}, 400, {});
            const uint64_t epoch = packed.gpu().epoch() + 1;
            packed.fill(epoch);
            const std::string wrong = packed.launch();
            MK_EXPECT(packed.gpu().sentence() == before);
            MK_EXPECT(rank.barrier());
            MK_EXPECT(packed.is_clean(epoch) && packed.has_ended_puts());
            return wrong + packed.verify() + rank.failure();
          }) == "");
  }
}

TEST_CASE("different cu_seqlens of gradients end the launch on every rank of every node", "[emulation]") {
  const std::vector<int> nodes = GENERATE(from_range(fewer_if_slow(kTopologies)));
  // Rank 1 is right, but alone with it; or wrong.
  for (const int32_t other : {301, 401}) {
    const mk_causal_t causal = other == 301 ? MK_CAUSAL_ZIGZAG : MK_CAUSAL_CONTIGUOUS;
    CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
            PackedGradientRank packed(rank);
            MK_EXPECT_OK(packed.set_up());
            MK_EXPECT(rank.barrier());
            packed.prepare({causal, false, {0, rank.rank == 1 ? other : 300, 400}}, 400, {});
            if (rank.rank != 1 || other <= 400) packed.fill(1);
            packed.launch();
            MK_EXPECT(packed.gpu().error().status == MK_ERROR_MISMATCH);
            MK_EXPECT(packed.gpu().sentence().find("cu_seqlens of hash") != std::string::npos);
            MK_EXPECT(rank.abort.raised() && packed.gpu().is_idle());
            MK_EXPECT(rank.barrier());
            return "";
          }) == "");
  }
}

TEST_CASE("who waits for parts of packed keys that do not come says for whose", "[emulation]") {
  const std::vector<int> nodes = {0, 0, 1};
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          PackedGradientRank packed(rank);
          MK_EXPECT_OK(packed.set_up(3000));
          MK_EXPECT(rank.barrier());
          packed.prepare({MK_CAUSAL_NONE, false, {0, 900}}, 900, {});
          packed.fill(1);
          packed.launch(rank.rank != 1);
          const mk_async_error_t error = packed.gpu().error();
          // Rank 0 relays rank 1's parts to rank 2, and is owed some itself.
          const bool is_said =
              error.status == MK_ERROR_TIMEOUT && error.rank == 1 && std::string(error.object) == "partial";
          const std::string wrong = rank.rank == 1 || is_said ? "" : packed.gpu().sentence() + "; ";
          MK_EXPECT(rank.barrier());
          rank.abort.raise(Status(MK_ERROR_TIMEOUT, "as a communicator would"));
          return wrong;
        }) == "");
}

}  // namespace mk::test
