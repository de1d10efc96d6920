// SPDX-License-Identifier: MIT
// AllGather+GEMM inside a node on emulated warps and host memory: rows are pushed beside a product, by CTAs
// that do nothing else or that compute afterwards, and brought to the gathered A; a producer walks its tiles
// and waits for their panels as the kernel's does, and looks at what it would have loaded.
#include "shim/device_words.h"

#include <memory>
#include <mutex>
#include <vector>

#include "../support/catch.h"
#include "gather_rank.h"

namespace mk {

// A producer and the copy warps.
struct EmulatedConfig {
  static constexpr int NUM_THREADS = 32 * (1 + NUM_COPY_WARPS);
  static constexpr int BLOCK_M = 64;
};
template <>
struct alignas(128) RankGemmStorage<EmulatedConfig> {
  PushStorage<NUM_PUSH_WARPS, PUSH_PIECE_BYTES> push;
  allgather_gemm::PanelBarriers panels;
  uint8_t rest[sizeof(PushCtaStorage<EmulatedConfig::NUM_THREADS>)];  // of a push CTA
};

namespace test {
namespace {

using allgather_gemm::CudaParams;
using allgather_gemm::SourceTile;

constexpr int kComputeCtas = 4;
constexpr int kMostPushCtas = 2;
constexpr int kColumnTiles = 2;

// swept: of sources, all rows of tiles before the next column.
enum class Tiles { of_sources, swept, merged, shared };

struct GatherShape {
  Shape rows;
  int push_ctas;
  bool compute_afterwards;  // push CTAs
  Tiles tiles;
  bool gathered;
  int push_warps = 1;  // between two ranks all
  int parts = 1;       // CTAs that share a tile's inner dimension
};

class NodeGatherRank : public GatherRank {
 public:
  using GatherRank::GatherRank;
  using GatherRank::wrong_gathered;

  Status set_up() { return GatherRank::set_up(kComputeCtas + kMostPushCtas); }

  CudaParams params(const GatherShape& shape) {
    CudaParams params{};
    describe(shape.rows, &params);
    const int nranks = params.comm.nranks;
    params.num_push_warps = std::max(params.num_push_warps, shape.push_warps);
    params.merged = shape.tiles == Tiles::merged;
    params.num_split_ctas = shape.parts;
    for (int i = 0; i < shape.parts; ++i) {
      params.panel_parts[i] = allgather_gemm::PanelPart(static_cast<int>(ceil_div(shape.rows.columns, 64)),
                                                        params.panel_steps, i, shape.parts);
    }
    const auto tile_rows =
        static_cast<int>(ceil_div(params.merged ? shape.rows.m : params.max_rows, EmulatedConfig::BLOCK_M));
    params.order = {std::max(1, tile_rows), params.merged ? 0 : nranks - 1};
    const int num_m_tiles = (params.merged ? 1 : nranks) * tile_rows;
    const bool shares = shape.tiles == Tiles::shared;
    const int num_early = shares ? num_m_tiles * kColumnTiles : kComputeCtas;
    const int group_m = shape.tiles == Tiles::swept ? std::max(1, num_m_tiles) : 2;
    params.tiles = {num_m_tiles, kColumnTiles, static_cast<int>(ceil_div(shape.rows.columns, 64)), num_early,
                    0,           group_m};
    params.late_tiles = {params.tiles, num_early, 0, shares};
    if (params.merged && !shape.compute_afterwards) params.late_tiles.spread();
    if (shape.compute_afterwards) {
      params.late_tiles.num_workers += shape.push_ctas;
      params.late_tiles.late_tile = num_early;
    }
    params.push_units =
        make_push_units(params, {tile_rows, nranks - 1, group_m, kColumnTiles, num_early, 1, shares},
                        shape.push_ctas > 0 ? PUSH_CTA_PIECE_BYTES : PUSH_PIECE_BYTES);
    params.piece_rows = 16;
    make_gathered(shape.gathered, &params);
    return params;
  }

  void fill(const CudaParams& params, uint64_t epoch) {
    fill_rows(params, epoch);
    clear_gathered();
  }

  // A launch but for its product; what its producers found wrong.
  std::string launch(const CudaParams& params, int push_ctas, uint64_t epoch) {
    using Smem = RankGemmStorage<EmulatedConfig>;
    const int num_early = params.tiles.num_workers;
    std::vector<std::unique_ptr<Smem>> storage;
    for (int cta = 0; cta < num_early + push_ctas; ++cta) storage.push_back(std::make_unique<Smem>());
    wrong_.clear();
    emulation::run_ctas(static_cast<unsigned>(storage.size()), EmulatedConfig::NUM_THREADS / 32, [&] {
      Smem& smem = *storage[blockIdx.x];
      const RankLaunch launch(params.comm);
      launch.begin_cta();
      const bool is_late = static_cast<int>(blockIdx.x) >= num_early;
      if (is_late && params.schedule.k > 0)
        allgather_gemm::run_push_cta<EmulatedConfig>(launch, params, reinterpret_cast<uint8_t*>(&smem));
      if (!is_late || params.late_tiles.num_workers > num_early) {
        if (is_late) push_cta_end(reinterpret_cast<PushCtaStorage<EmulatedConfig::NUM_THREADS>&>(smem));
        if (threadIdx.x == 0) {
          push_init(smem.push);
          allgather_gemm::panels_init(smem.panels);
        }
        __syncthreads();
        const int warp = static_cast<int>(threadIdx.x / 32) - 1;
        if (warp < 0 && threadIdx.x == 0) produce(launch, params, smem.panels, epoch);
        if (warp >= 0)
          allgather_gemm::run_copy_warp(launch, params, smem.push, &smem.panels, CopyWarp{warp, num_early});
      }
      launch.end_cta();
    });
    return wrong_;
  }

 private:
  void produce(const RankLaunch& launch, const CudaParams& params, allgather_gemm::PanelBarriers& here,
               uint64_t epoch) {
    RankTileCursor tiles(params.late_tiles, static_cast<int>(blockIdx.x), params.order);
    allgather_gemm::PanelWaits<EmulatedConfig::BLOCK_M, CudaParams> panels(launch, params, here);
    TileWork work;
    while (tiles.next(&work, EmulatedConfig::BLOCK_M,
                      [&](int position) { return allgather_gemm::rows_at(params, position); })) {
      const SourceTile tile = allgather_gemm::source_tile<EmulatedConfig::BLOCK_M>(params, work);
      const auto load = [&](int begin, int end) {
        for (int k_step = begin; k_step < end; ++k_step) {
          panels(k_step);
          look_at(launch, params, tile, k_step, epoch);
        }
      };
      if (params.num_split_ctas == 1) {
        panels.begin(tile, work);
        load(work.k_begin, work.k_end);
        continue;
      }
      // As a producer of those that share a tile, here one tile after the other.
      const auto& part = params.panel_parts[static_cast<int>(blockIdx.x) % params.num_split_ctas];
      work.k_end = work.k_begin + part.num_steps;
      panels.begin(tile, work);
      for (int panel = 0; panel < part.num_panels; ++panel)
        load(part.range(panel).begin, part.range(panel).end);
    }
  }

  void look_at(const RankLaunch& launch, const CudaParams& params, const SourceTile& tile, int k_step,
               uint64_t epoch) {
    const bool is_own = tile.source == rank_.rank;
    const int end = std::min(tile.begin + EmulatedConfig::BLOCK_M, tile.end);
    for (int row = tile.begin; row < end; ++row) {
      const std::byte* const from =
          is_own ? params.a + (row - tile.begin + tile.first_row) * params.a_pitch
                 : launch.area(rank_.rank, static_cast<size_t>(row) * params.schedule.row_pitch());
      const auto* const elements = reinterpret_cast<const uint16_t*>(from);
      for (int64_t column = k_step * 64; column < std::min<int64_t>(params.schedule.k, k_step * 64 + 64);
           ++column) {
        if (elements[column] == element(epoch, row, column)) continue;
        std::lock_guard lock(mutex_);
        if (wrong_.empty())
          wrong_ = format("launch %llu: row %d, column %lld is wrong; ", (unsigned long long)epoch, row,
                          (long long)column);
        return;
      }
    }
  }

  std::mutex mutex_;
  std::string wrong_;
};

std::string run_launches(NodeGatherRank& gather, const GatherShape& shape) {
  const CudaParams params = gather.params(shape);
  std::string first;
  for (int turn = 0; turn < 4; ++turn) {
    const uint64_t epoch = gather.gpu().epoch() + 1;
    gather.fill(params, epoch);
    const std::string wrong = gather.launch(params, shape.push_ctas, epoch);
    if (std::string text = state_after(gather.gpu(), params.comm, epoch); !text.empty()) return text;
    if (first.empty()) first = wrong + gather.wrong_gathered(params, epoch);
  }
  return first;
}

}  // namespace

TEST_CASE("inside a node a tile's rows are there when its panels have been waited for", "[emulation]") {
  const int nranks = GENERATE(1, 2, 3, 4);
  CAPTURE(nranks);
  const std::vector<int> nodes(static_cast<size_t>(nranks), 0);
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          NodeGatherRank gather(rank);
          MK_EXPECT_OK(gather.set_up());
          MK_EXPECT(rank.barrier());
          std::string wrong;
          for (const GatherShape& shape : {
                   GatherShape{{500, 200}, 0, false, Tiles::of_sources, true},
                   GatherShape{{500, 330, 64, 2}, 2, false, Tiles::of_sources, false},
                   GatherShape{{700, 200, 32, 1}, 2, true, Tiles::of_sources, true},
                   GatherShape{{nranks * 60, 520, 64, 3}, 0, false, Tiles::shared, false},
                   GatherShape{{37, 200, 32, 2}, 0, false, Tiles::merged, true},
                   GatherShape{{130, 72}, 1, false, Tiles::merged, false},
                   GatherShape{{600, 330, 32, 3}, 1, true, Tiles::merged, true},
                   GatherShape{{3, 24}, 0, false, Tiles::merged, true},
                   GatherShape{{200, 256, 32, 4}, 0, false, Tiles::merged, false},
                   GatherShape{{150, 520, 32, 2}, 0, false, Tiles::merged, true},
                   GatherShape{{300, 520, 32, 2}, 0, false, Tiles::merged, true, NUM_PUSH_WARPS},
                   GatherShape{{3, 24}, 0, false, Tiles::merged, true, NUM_PUSH_WARPS},
                   GatherShape{{150, 1100, 32, 4}, 0, false, Tiles::merged, false, 1, 2},
                   GatherShape{{90, 1000, 32, 5}, 0, false, Tiles::merged, true, NUM_PUSH_WARPS, 3},
                   GatherShape{{37, 200, 32, 8}, 0, false, Tiles::merged, false, 1, 4},
                   GatherShape{{300, 520, 32, 2}, 0, false, Tiles::swept, false},
                   GatherShape{{1, 600, 32, 4}, 0, false, Tiles::of_sources, true},
                   GatherShape{{0, 64}, 0, false, Tiles::of_sources, false},
                   GatherShape{{70, 0}, 1, false, Tiles::of_sources, true},
               }) {
            if (std::string text = run_launches(gather, shape); !text.empty())
              wrong +=
                  format("m %lld, k %lld: ", (long long)shape.rows.m, (long long)shape.rows.columns) + text;
          }
          MK_EXPECT(rank.barrier());
          return wrong + rank.failure();
        }) == "");
}

}  // namespace test
}  // namespace mk
