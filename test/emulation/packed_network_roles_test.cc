// SPDX-License-Identifier: MIT
// What a launch of ring attention over packed sequences does beside its products between nodes, on emulated
// warps and host memory, over the real transports: the check of cu_seqlens and what follows from it, entries
// with their hash, pushes, puts, arrivals and forwards of what some query sees; launches in a row, each with
// other sequences. The code is the kernel's own; who walks through this rank's tiles and waits for the flags of
// their blocks stands in for the attention.
#include "packed_rank.h"

#include <algorithm>
#include <set>

#include "../support/catch.h"
#include "kernels/ops/ring_attention/cuda_packed_network.cuh"
#include "kernels/topology_arrays.h"

namespace mk::test {
namespace {

constexpr int kPushCtas = 2;
constexpr int kForwardCtas = 2;
constexpr int kCtas = kPushCtas + kForwardCtas + 1;

struct Puts {
  int panel_blocks = 1;
  int put_heads = 1;
  int put_panels = 1;
};

class PackedNetworkRank : public PackedRankOf<PackedNetworkParams, kCtas> {
 public:
  explicit PackedNetworkRank(Rank& rank) : PackedRankOf(rank), topology_(rank.topology) {}

  void prepare(const Shape& shape, int64_t seq, const Puts& puts) {
    prepare_call(shape, seq, kPushCtas);
    PackedNetworkParams& params = arguments_.params;
    PackedNetworkPanels& panels = params.panels;
    static_cast<KeyPanels&>(panels) = panels_in_node(puts.panel_blocks);
    panels.slices = params.tiles.slices;
    panels.block_n = Config::BLOCK_N;
    panels.put_heads = puts.put_heads;
    panels.put_panels = puts.put_heads > 1 ? panels.run_panels : puts.put_panels;
    params.nodes = make_node_ranks(topology_.view());
    panels.own = params.nodes.own;
    params.num_compute_ctas = kPushCtas;
  }

  // A launch but for its attention.
  void launch() {
    std::vector<std::vector<uint8_t>> memory(kCtas, std::vector<uint8_t>(sizeof(Smem) + 128));
    emulation::run_ctas(kCtas, Config::NUM_THREADS / 32, [&] {
      const auto address = reinterpret_cast<uintptr_t>(memory[blockIdx.x].data());
      Smem& smem = *reinterpret_cast<Smem*>((address + 127) / 128 * 128);
      const RankLaunch launch(arguments_.params.comm);
      launch.begin_cta();
      const bool goes_on = begin_packed(arguments_, smem.packed, [&](PackedNetworkParams& params, int rows) {
        params.lse_rows = rows;
        settle_network(params, smem.needs);
      });
      const auto warp = static_cast<int>(threadIdx.x / 32), cta = static_cast<int>(blockIdx.x);
      const PackedNetworkParams& params = smem.packed.params;
      if (goes_on && threadIdx.x == 0) num_rows_[cta] = static_cast<int>(params.lse_rows);
      if (!goes_on) {
        if (cta + 1 == kCtas && warp == 0) end_without_keys(smem.packed);
      } else if (cta < kPushCtas) {
        find_needs<Config::NUM_THREADS, false>(params, smem.needs);
        if (threadIdx.x == 0) key_push_init(smem.role.push.signals);
        __syncthreads();
        if (warp > 0) {
          push_keys<Config>(launch, params, smem.role.push.signals, smem.role.push.room, warp - 1, cta);
        } else {
          signal_keys<Config>(launch, params, smem.role.push.signals);
        }
      } else {
        find_needs<Config::NUM_THREADS, true>(params, smem.needs);
        if (cta + 1 == kCtas) {
          run_network_cta(RankLaunch(params.comm), params);
        } else {
          run_forward_cta<Config>(launch, params, smem.role.forward);
        }
      }
      launch.end_cta();
    });
  }

  // What the attention would have waited for, and then found.
  std::string consume(uint64_t epoch) {
    seen_.clear();
    PackedQueryTiles tiles = arguments_.params.tiles;
    tiles.slices = slices_;
    const PackedNetworkPanels panels = panels_here();
    const RankOrder& order = arguments_.params.comm.order;
    for (int index = 0; index < tiles.size(); ++index) {
      const QueryTile tile = tiles.at(index);
      PackedKeyWalk walk(slices_, NodeOrder{order.rank_at}, rank_.rank, Config::BLOCK_N,
                         {tile.row, tile.row + tile.num_rows});
      for (PackedBlock block; walk.next(&block);) {
        if (block.step == 0) continue;
        const int source = order.rank_at[block.step];
        const std::string what = format("launch %llu: block %d of rank %d, head %d", (unsigned long long)epoch,
                                        block.index, source, tile.kv_head);
        const int flag = panels.flag(source, tile.kv_head, 0, block.index / panels.panel_blocks);
        seen_.insert(flag);
        if (!wait(flag, epoch)) return what + " did not come; ";
        const size_t offset = panels.offset(source, tile.kv_head, 0, block.index);
        if (!is_right(source, block.index, tile.kv_head, offset, epoch)) return what + " is wrong; ";
      }
    }
    return "";
  }

  // After all ranks' launches: flags of what this rank neither sees nor passes on, neither out of the node nor
  // inside it, as part of a put.
  std::string verify(uint64_t epoch) const {
    const PackedNetworkPanels panels = panels_here();
    const NodeRanks& nodes = arguments_.params.nodes;
    const RankOrder& order = arguments_.params.comm.order;
    for (int source = 0; source < rank_.nranks; ++source) {
      const bool relays = std::find(order.relayed, order.relayed + order.num_relayed, source) !=
                          order.relayed + order.num_relayed;
      for (int flag = panels.flag(source, 0, 0, 0); flag < panels.flag(source + 1, 0, 0, 0); ++flag) {
        if (*word(flag, epoch) != epoch || seen_.count(flag) == 1) continue;
        const int panel = flag % panels.run_panels;
        RankSet needed_by = 0;
        for (int peer = 0; peer < rank_.nranks; ++peer) {
          const int first = panel / panels.put_panels * panels.put_panels;
          for (int i = first; i < std::min(first + panels.put_panels, panels.run_panels); ++i) {
            if (peer != source && needs_panel(panels, slices_, Config::BLOCK_N, source, i, peer))
              needed_by |= RankSet{1} << peer;
          }
        }
        if (source == rank_.rank && (needed_by & ~nodes.own) != 0) continue;
        if (relays && (needed_by & nodes.own) != 0) continue;
        return format("panel %d of rank %d came and nobody wants it; ", panel, source);
      }
    }
    return verify_rows();
  }

  bool has_ended_puts() const {
    return rank_.endpoint->completed() == arguments_.params.comm.network.queue.state->head;
  }

 private:
  struct PushSmem {
    KeyPushStorage signals;
    alignas(128) uint8_t room[KEY_PUSH_BYTES<Config>];
  };
  struct Smem {
    union {
      PushSmem push;
      alignas(128) uint8_t forward[sizeof(PushCtaStorage<Config::NUM_THREADS>)];
    } role;
    PackedStorage<PackedNetworkParams, Config::NUM_THREADS> packed;
    PanelNeeds needs;
  };

  // With this rank's own table of rows.
  PackedNetworkPanels panels_here() const {
    PackedNetworkPanels panels = arguments_.params.panels;
    panels.slices = slices_;
    return panels;
  }

  const TopologyArrays topology_;
  std::set<int> seen_;
};

// With a sanitizer the first and the fourth.
const std::vector<std::vector<int>> kTopologies = {{0, 0, 1, 1}, {0, 1},    {0, 1, 0, 1},
                                                   {0, 0, 0, 1}, {0, 1, 2}, {0, 0, 1, 1, 1}};

}  // namespace

TEST_CASE("keys of packed sequences travel between nodes and inside them", "[emulation]") {
  const std::vector<int> nodes = GENERATE(from_range(fewer_if_slow(kTopologies)));
  for (const BackendCase& backend : fewer_if_slow(backend_cases())) {
    INFO(backend.backend << " seed " << backend.seed << " " << backend.environment << ", " << nodes.size()
                         << " ranks");
    CHECK(run_ranks(RankKind::threads, backend, nodes, [&](Rank& rank) -> std::string {
            PackedNetworkRank packed(rank);
            MK_EXPECT_OK(packed.set_up());
            MK_EXPECT(rank.barrier());
            std::string first;
            size_t number = 0;
            for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
              for (const std::vector<int32_t>& bounds : bounds_of_shapes()) {
                const Puts puts = std::vector<Puts>{{1, 1, 1}, {1, 1, 3}, {2, 1, 2}, {1, 2, 1}}[number++ % 4];
                packed.prepare({causal, bounds.size() % 2 == 0, bounds}, bounds.back(), puts);
                const uint64_t epoch = packed.gpu().epoch() + 1;
                packed.fill(epoch);
                std::string wrong;
                std::thread consumer([&] { wrong = packed.consume(epoch); });
                packed.launch();
                consumer.join();
                if (const std::string sentence = packed.gpu().sentence(); !sentence.empty()) return sentence;
                MK_EXPECT(rank.barrier());
                if (wrong.empty()) wrong = packed.verify(epoch);
                if (first.empty() && !wrong.empty())
                  first = format("causal %d, %zu sequences: ", causal, bounds.size() - 1) + wrong;
                MK_EXPECT(packed.is_clean(epoch) && packed.has_ended_puts());
              }
            }
            return first + rank.failure();
          }) == "");
  }
}

TEST_CASE("wrong cu_seqlens between nodes are named, and the next launch is as any other", "[emulation]") {
  const std::vector<int> nodes = {0, 0, 1};
  for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_ZIGZAG}) {
    for (const BadBounds& bad : bad_bounds()) {
      CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
              PackedNetworkRank packed(rank);
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
              packed.launch();
              const std::string wrong = packed.consume(epoch);
              MK_EXPECT(packed.gpu().sentence() == before);
              MK_EXPECT(rank.barrier());
              MK_EXPECT(packed.is_clean(epoch) && packed.has_ended_puts());
              return wrong + rank.failure();
            }) == "");
    }
  }
}

TEST_CASE("different cu_seqlens end the launch on every rank of every node", "[emulation]") {
  const std::vector<int> nodes = GENERATE(from_range(fewer_if_slow(kTopologies)));
  for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
    // Rank 1 is right, but alone with it; or wrong.
    for (const int32_t other : {301, 401}) {
      CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
              PackedNetworkRank packed(rank);
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
}

}  // namespace mk::test
