// SPDX-License-Identifier: MIT
// What a launch of ring attention over packed sequences does beside its products, on emulated warps and host
// memory: the check of cu_seqlens, the table of rows, the maps, entries with their hash, pushes of what some
// query sees and of nothing else. The code is the kernel's own; who walks through this rank's tiles and waits
// for the flags of their blocks stands in for the attention.
#include "packed_rank.h"

#include <set>

#include "../support/catch.h"

namespace mk::test {
namespace {

constexpr int kCtas = 3;  // all of them push

class PackedRank : public PackedRankOf<PackedParams, kCtas> {
 public:
  using PackedRankOf::PackedRankOf;

  void prepare(const Shape& shape, int64_t seq) {
    prepare_call(shape, seq, kCtas);
    arguments_.params.panels = panels_in_node(1);
  }

  // A launch but for its attention.
  void launch() {
    std::vector<std::vector<uint8_t>> memory(kCtas, std::vector<uint8_t>(sizeof(Smem) + 128));
    emulation::run_ctas(kCtas, Config::NUM_THREADS / 32, [&] {
      const auto address = reinterpret_cast<uintptr_t>(memory[blockIdx.x].data());
      Smem& smem = *reinterpret_cast<Smem*>((address + 127) / 128 * 128);
      const RankLaunch launch(arguments_.params.comm);
      launch.begin_cta();
      const bool goes_on = begin_packed(arguments_, smem.packed,
                                        [&](PackedParams& params, int rows) { params.lse_rows = rows; });
      const auto warp = static_cast<int>(threadIdx.x / 32), cta = static_cast<int>(blockIdx.x);
      if (goes_on) {
        if (threadIdx.x == 0) {
          key_push_init(smem.signals);
          num_rows_[cta] = static_cast<int>(smem.packed.params.lse_rows);
        }
        __syncthreads();
        const PackedParams& params = smem.packed.params;
        if (warp > 0) {
          push_keys<Config>(launch, params, smem.signals, smem.room, warp - 1, cta);
        } else {
          signal_keys<Config>(launch, params, smem.signals);
        }
      }
      if (cta == 0 && warp == 3) greet_packed(smem.packed);
      launch.end_cta();
    });
  }

  // What the attention would have waited for, and then found.
  std::string consume(uint64_t epoch) {
    needed_.clear();
    PackedQueryTiles tiles = arguments_.params.tiles;
    tiles.slices = slices_;
    const KeyPanels& panels = arguments_.params.panels;
    for (int index = 0; index < tiles.size(); ++index) {
      const QueryTile tile = tiles.at(index);
      PackedKeyWalk walk(slices_, RingOrder{rank_.rank}, rank_.rank, Config::BLOCK_N,
                         {tile.row, tile.row + tile.num_rows});
      for (PackedBlock block; walk.next(&block);) {
        if (block.step == 0) continue;
        const std::string what = format("launch %llu: block %d of step %d, head %d", (unsigned long long)epoch,
                                        block.index, block.step, tile.kv_head);
        const int flag = panels.flag(block.step, tile.kv_head, 0, block.index / panels.panel_blocks);
        needed_.insert(flag);
        if (!wait(flag, epoch)) return what + " did not come; ";
        const int source = (rank_.rank + block.step) % rank_.nranks;
        const size_t offset = panels.offset(block.step, tile.kv_head, 0, block.index);
        if (!is_right(source, block.index, tile.kv_head, offset, epoch)) return what + " is wrong; ";
      }
    }
    return "";
  }

  // After all ranks' launches.
  std::string verify(uint64_t epoch) const {
    for (int flag = 0; flag < arguments_.params.panels.num_flags(); ++flag) {
      if (*word(flag, epoch) == epoch && needed_.count(flag) == 0)
        return format("flag %d is raised and nobody wants it; ", flag);
    }
    return verify_rows();
  }

 private:
  struct Smem {
    PackedStorage<PackedParams, Config::NUM_THREADS> packed;
    KeyPushStorage signals;
    alignas(128) uint8_t room[KEY_PUSH_BYTES<Config>];
  };

  std::set<int> needed_;
};

}  // namespace

TEST_CASE("keys of packed sequences go to who sees some of them", "[emulation]") {
  const int nranks = GENERATE(1, 2, 3, 5);
  INFO(nranks << " ranks");
  const std::vector<int> nodes(static_cast<size_t>(nranks), 0);
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          PackedRank packed(rank);
          MK_EXPECT_OK(packed.set_up());
          MK_EXPECT(rank.barrier());
          std::string first;
          for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
            for (const std::vector<int32_t>& bounds : bounds_of_shapes()) {
              packed.prepare({causal, bounds.size() % 2 == 0, bounds}, bounds.back());
              for (int turn = 0; turn < 2; ++turn) {
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
                MK_EXPECT(packed.is_clean(epoch));
              }
            }
          }
          return first + rank.failure();
        }) == "");
}

TEST_CASE("wrong cu_seqlens move nothing and are named, different ones are a disagreement", "[emulation]") {
  const std::vector<int> nodes = {0, 0, 0};
  for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_ZIGZAG}) {
    for (const BadBounds& bad : bad_bounds()) {
      CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
              PackedRank packed(rank);
              MK_EXPECT_OK(packed.set_up());
              MK_EXPECT(rank.barrier());
              packed.prepare({causal, false, bad.bounds}, 400);
              packed.launch();
              MK_EXPECT(packed.gpu().error().status == MK_ERROR_DATA);
              MK_EXPECT(packed.gpu().sentence().find(bad.says) != std::string::npos);
              MK_EXPECT(rank.barrier());
              MK_EXPECT(packed.is_untouched(packed.gpu().epoch()) && packed.gpu().is_idle());
              // Nothing is asked for: entries are not looked at.
              packed.prepare({causal, false, bad.bounds}, 0);
              const std::string before = packed.gpu().sentence();
              packed.launch();
              MK_EXPECT(packed.gpu().sentence() == before);
              MK_EXPECT(rank.barrier());
              return rank.failure();
            }) == "");
    }
    CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
            PackedRank packed(rank);
            MK_EXPECT_OK(packed.set_up());
            MK_EXPECT(rank.barrier());
            packed.prepare({causal, false, {0, rank.rank == 1 ? 301 : 300, 400}}, 400);
            packed.fill(1);
            packed.launch();
            MK_EXPECT(packed.gpu().error().status == MK_ERROR_MISMATCH);
            MK_EXPECT(packed.gpu().sentence().find("cu_seqlens of hash") != std::string::npos);
            MK_EXPECT(rank.barrier());
            return rank.failure();
          }) == "");
  }
}

}  // namespace mk::test
