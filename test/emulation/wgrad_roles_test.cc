// SPDX-License-Identifier: MIT
// AllGather+GEMM in mode WGRAD on emulated warps and host memory, inside a node and, over the real transports,
// between nodes: rows of X are pushed, put, forwarded and brought to the gathered X, and the kernel's own
// producer waits for them and loads them step by step. The tensor cores are missing: one thread stands in for
// them, and its sums must have the bits of sums in the order that docs/protocol.md promises.
#include "shim/device_words.h"

#include <vector>

#include "../support/catch.h"
#include "gather_rank.h"
#include "kernels/ops/allgather_gemm/cuda_network_wgrad.cuh"

namespace mk {

// A producer, the copy warps, and who stands in for consumers; four push warps and the one that signals.
struct EmulatedConfig {
  static constexpr int NUM_THREADS = 160;
  static constexpr int BLOCK_M = 64;
  static constexpr bool A_TRANSPOSED = true;
  static constexpr bool B_TRANSPOSED = false;
  static constexpr GemmCluster CLUSTER = {};
  static constexpr int BLOCK_N = 64;
  static constexpr int BLOCK_K = 64;
  static constexpr int NUM_STAGES = 3;
};
template <>
struct MainloopStorage<EmulatedConfig> {
  uint8_t a[EmulatedConfig::NUM_STAGES][64 * 128];
  uint8_t b[EmulatedConfig::NUM_STAGES][64 * 128];
  uint64_t stage_full[EmulatedConfig::NUM_STAGES];
  uint64_t stage_empty[EmulatedConfig::NUM_STAGES];
};
template <>
struct alignas(128) RankGemmStorage<EmulatedConfig> {
  MainloopStorage<EmulatedConfig> mainloop;
  PushStorage<NUM_PUSH_WARPS, PUSH_PIECE_BYTES> push;
  uint8_t rest[sizeof(PushCtaStorage<EmulatedConfig::NUM_THREADS>)];  // of a push CTA
};

// 64 rows of dY, [m, k].
template <class Config>
void load_a_stage(MainloopStorage<Config>& smem, int stage, const CUtensorMap* map_a, const StageBoxes&, int m,
                  int k) {
  uint64_t not_counted = 0;
  ptx::cp_async_bulk_tensor_3d_shared_global(smem.a[stage], map_a, &not_counted, m, k, 0);
}

namespace test {
namespace {

using allgather_gemm::ChunkGroups;
using allgather_gemm::NetworkWgradParams;
using allgather_gemm::WgradOrder;
using allgather_gemm::WgradParams;

constexpr int kNetworkCtas = allgather_gemm::NUM_NETWORK_CTAS;
constexpr int kComputeCtas = 2;
constexpr int kMostPushCtas = 1;

struct WgradShape {
  int64_t m, n, k;
  bool aligned = false;  // as if dY were [k, m]
  bool gathered = true;
  int push_ctas = 1;
  int chunk_rows = WgradOrder::STEP_ROWS;
  int panel_steps = 100;  // by default one panel
};

// Of 16 bits: products and sums are rounded, so that their order shows.
float number(uint16_t bits) { return (static_cast<float>(bits) - 32768.0f) / 1024.0f; }

// Slices of `slice_rows` rows, of which those from `rows` on are read as zero.
CUtensorMap slices_map(const void* data, int64_t slices, int64_t slice_rows, int64_t rows, int64_t columns,
                       int64_t pitch) {
  const ptx::EmulatedTensor tensor = {static_cast<const uint16_t*>(data),
                                      {columns, rows, slices, 1},
                                      {pitch, slice_rows * pitch, 0},
                                      WgradOrder::STEP_ROWS};
  CUtensorMap map{};
  std::memcpy(&map, &tensor, sizeof tensor);
  return map;
}

class WgradRank : public GatherRank {
 public:
  using GatherRank::GatherRank;

  Status set_up(int64_t wait_timeout_ms = kPatienceMs) {
    return GatherRank::set_up(kComputeCtas + kMostPushCtas + kNetworkCtas, wait_timeout_ms);
  }

  NetworkWgradParams params(const WgradShape& shape) {
    NetworkWgradParams params{};
    describe({shape.m, shape.n, shape.chunk_rows, shape.panel_steps}, &params);
    const RankComm& comm = params.comm;
    const int64_t pitch = static_cast<int64_t>(params.schedule.row_pitch());
    params.push_units = make_push_units(params, allgather_gemm::PANEL_BY_PANEL,
                                        shape.push_ctas > 0 ? PUSH_CTA_PIECE_BYTES : PUSH_PIECE_BYTES);
    params.merged = is_one_node() && WgradOrder::merges(shape.m, comm.nranks);
    if (params.merged) {
      params.wgrad_order = WgradOrder::of_merged(shape.m);
      params.chunk_groups = ChunkGroups::of_merged(comm.nranks);
    } else {
      const int num_near = comm.order.num_local - 1;
      params.wgrad_order = WgradOrder::of(shape.m, num_near, comm.nranks - 1 - num_near, shape.aligned);
      params.chunk_groups = {params.wgrad_order, params.schedule.max_chunks, shape.chunk_rows};
    }
    params.c_rows = static_cast<int>(shape.k);
    params.tiles = {static_cast<int>(ceil_div(shape.k, 64)),
                    static_cast<int>(ceil_div(shape.n, 64)),
                    params.wgrad_order.num_steps(),
                    kComputeCtas,
                    0,
                    1,
                    true};
    params.late_tiles = {params.tiles, params.tiles.num_workers};
    params.piece_rows = 16;
    dy_.resize(static_cast<size_t>(shape.m * shape.k));
    c_.resize(static_cast<size_t>(shape.k * shape.n));
    params.load.n = static_cast<int>(shape.n);
    params.load.map_a = slices_map(dy_.data(), 1, shape.m, shape.m, shape.k, shape.k * 2);
    params.load.map_b =
        slices_map(params.a, 1, params.max_rows, params.schedule.rows(rank_.rank), shape.n, params.a_pitch);
    const int64_t slice_rows = std::max(1, params.wgrad_order.max_rows), whole = shape.m / slice_rows;
    for (int bank = 0; bank < 2; ++bank) {
      std::byte* const area = gpu_.area(static_cast<uint64_t>(bank), 0);
      params.map_gathered[bank] = slices_map(area, whole, slice_rows, slice_rows, shape.n, pitch);
      params.map_last[bank] = slices_map(area + whole * slice_rows * pitch, 1, slice_rows,
                                         shape.m - whole * slice_rows, shape.n, pitch);
    }
    make_gathered(shape.gathered, &params);
    return params;
  }

  void fill(const NetworkWgradParams& params, uint64_t epoch) {
    fill_rows(params, epoch);
    std::fill(c_.begin(), c_.end(), -1.0f);
    clear_gathered();
    for (size_t i = 0; i < dy_.size(); ++i)
      dy_[i] = static_cast<uint16_t>(epoch * 977 + i * 40503 + static_cast<size_t>(rank_.rank) * 31);
  }

  void launch(const NetworkWgradParams& params, int push_ctas) {
    using Smem = allgather_gemm::WgradStorage<EmulatedConfig>;
    std::vector<std::unique_ptr<Smem>> storage;
    for (int cta = 0; cta < kComputeCtas + push_ctas + (is_one_node() ? 0 : kNetworkCtas); ++cta)
      storage.push_back(std::make_unique<Smem>());
    emulation::run_ctas(static_cast<unsigned>(storage.size()), EmulatedConfig::NUM_THREADS / 32, [&] {
      Smem& smem = *storage[blockIdx.x];
      const RankLaunch launch(params.comm);
      launch.begin_cta();
      const bool computes = static_cast<int>(blockIdx.x) < params.tiles.num_workers;
      if (is_one_node()) {
        const WgradParams& in_node = params;
        if (computes) {
          run_roles(launch, smem, in_node, [&](const CopyWarp& warp) {
            allgather_gemm::run_copy_warp(launch, in_node, smem.push, nullptr, warp, [&] {
              allgather_gemm::watch_chunks<EmulatedConfig>(launch, in_node, smem.chunks);
            });
          });
        } else if (in_node.schedule.k > 0) {
          allgather_gemm::run_push_cta<EmulatedConfig>(launch, in_node, reinterpret_cast<uint8_t*>(&smem));
        }
      } else if (computes) {
        run_roles(launch, smem, params, [&](const CopyWarp& warp) {
          allgather_gemm::run_network_copy_warp(launch, params, smem.push, nullptr, warp, [&] {
            allgather_gemm::watch_chunks<EmulatedConfig>(launch, params, smem.chunks);
          });
        });
      } else {
        allgather_gemm::run_moving_cta<EmulatedConfig>(launch, params, reinterpret_cast<uint8_t*>(&smem));
      }
      launch.end_cta();
    });
  }

  // What is in C and in the gathered X after a launch; "" when all is right.
  std::string check(const NetworkWgradParams& params, const WgradShape& shape, uint64_t epoch) const {
    const std::vector<float> expected = expected_c(params, shape, epoch);
    for (size_t i = 0; i < c_.size(); ++i) {
      if (c_[i] == expected[i]) continue;
      return format("launch %llu: row %zu, column %zu of C: %.9g, not %.9g; ", (unsigned long long)epoch,
                    i / static_cast<size_t>(shape.n), i % static_cast<size_t>(shape.n),
                    static_cast<double>(c_[i]), static_cast<double>(expected[i]));
    }
    return wrong_gathered(params, epoch);
  }

 private:
  bool is_one_node() const { return gpu_.comm().order.num_rail_peers == 0; }

  // The warps of a CTA that computes.
  template <class Smem, class Params, class Copy>
  void run_roles(const RankLaunch& launch, Smem& smem, const Params& params, Copy&& run_copy) {
    if (threadIdx.x == 0) {
      push_init(smem.push);
      allgather_gemm::chunks_init(smem.chunks);
    }
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x / 32);
    if (warp == 0 && threadIdx.x % 32 == 0) {
      allgather_gemm::produce_wgrad<EmulatedConfig>(launch, smem, params);
    } else if (warp == 1 + NUM_COPY_WARPS && threadIdx.x % 32 == 0) {
      consume(smem.mainloop, params);
    } else if (warp >= 1 && warp <= NUM_COPY_WARPS) {
      run_copy(CopyWarp{warp - 1, params.tiles.num_workers});
    }
  }

  // A tile's sums, in the order in which its steps come.
  void consume(MainloopStorage<EmulatedConfig>& smem, const WgradParams& params) {
    TileCursor tiles(params.late_tiles, static_cast<int>(blockIdx.x));
    StageCursor<EmulatedConfig::NUM_STAGES> stages;
    TileWork work;
    std::vector<float> sums(64 * 64);
    while (tiles.next(&work)) {
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int k_step = work.k_begin; k_step < work.k_end; ++k_step) {
        mbarrier_wait(&smem.stage_full[stages.stage], stages.phase);
        const auto* const dy = reinterpret_cast<const uint16_t*>(smem.a[stages.stage]);
        const auto* const x = reinterpret_cast<const uint16_t*>(smem.b[stages.stage]);
        for (int row = 0; row < 64; ++row) {
          // Rows that a source does not have are loaded as zeros, and add nothing.
          for (int p = 0; p < 64; ++p) {
            const float factor = number(dy[row * 64 + p]);
            for (int q = 0; q < 64; ++q) {
              if (x[row * 64 + q] != 0)
                sums[static_cast<size_t>(p * 64 + q)] += factor * number(x[row * 64 + q]);
            }
          }
        }
        __atomic_fetch_add(&smem.stage_empty[stages.stage], 1, __ATOMIC_RELEASE);
        stages.advance();
      }
      for (int64_t p = work.m_tile * 64; p < std::min(params.c_rows, work.m_tile * 64 + 64); ++p) {
        for (int64_t q = work.n_tile * 64; q < std::min<int64_t>(params.schedule.k, work.n_tile * 64 + 64); ++q)
          c_[static_cast<size_t>(p * params.schedule.k + q)] = sums[static_cast<size_t>(p % 64 * 64 + q % 64)];
      }
    }
  }

  // Own rows, then steps of the node's other ranks in turn, then those of the other nodes' ranks; or all rows
  // as they lie.
  std::vector<float> expected_c(const NetworkWgradParams& params, const WgradShape& shape,
                                uint64_t epoch) const {
    std::vector<float> sums(c_.size(), 0.0f);
    std::vector<std::vector<int>> groups(3);
    for (int position = 0; position < rank_.nranks; ++position) {
      const int source = params.comm.order.rank_at[position];
      const bool is_near = rank_.topology.same_node(rank_.rank, source);
      groups[source == rank_.rank ? 0 : is_near ? 1 : 2].push_back(source);
    }
    if (params.merged) {
      groups.assign(1, {});
      for (int source = 0; source < rank_.nranks; ++source) groups[0].push_back(source);
    }
    for (const std::vector<int>& group : groups) {
      for (int64_t step = 0; step < params.max_rows + 64; step += 64) {
        for (const int source : group) {
          const int64_t begin = int64_t{source} * params.max_rows;
          const int64_t first = step - (shape.aligned ? begin % 8 : 0);
          for (int64_t row = std::max<int64_t>(0, first); row < first + 64; ++row) {
            if (row >= params.schedule.rows(source)) break;
            for (int64_t p = 0; p < shape.k; ++p) {
              const float factor = number(dy_[static_cast<size_t>((begin + row) * shape.k + p)]);
              for (int64_t q = 0; q < shape.n; ++q) {
                const uint16_t x = element(epoch, begin + row, q);
                if (x != 0) sums[static_cast<size_t>(p * shape.n + q)] += factor * number(x);
              }
            }
          }
        }
      }
    }
    return sums;
  }

  std::vector<uint16_t> dy_;
  std::vector<float> c_;
};

// A rank whose sums are wrong goes on all the same: the others would wait for it.
std::string run_launches(WgradRank& rows, const WgradShape& shape, int launches) {
  const NetworkWgradParams params = rows.params(shape);
  std::string wrong;
  for (int turn = 0; turn < launches; ++turn) {
    const uint64_t epoch = rows.gpu().epoch() + 1;
    rows.fill(params, epoch);
    rows.launch(params, shape.push_ctas);
    if (std::string text = state_after(rows.gpu(), params.comm, epoch); !text.empty()) return text;
    if (wrong.empty()) wrong = rows.check(params, shape, epoch);
  }
  return wrong;
}

// What is wrong after three launches of each; every rank's part.
std::string run_shapes(Rank& rank, const std::vector<WgradShape>& shapes) {
  WgradRank rows(rank);
  MK_EXPECT_OK(rows.set_up());
  MK_EXPECT(rank.barrier());
  std::string wrong;
  for (const WgradShape& shape : shapes) {
    if (std::string text = run_launches(rows, shape, 3); !text.empty())
      wrong += format("m %lld, n %lld: ", (long long)shape.m, (long long)shape.n) + text;
  }
  MK_EXPECT(rank.barrier());
  return wrong + rank.failure();
}

// With a sanitizer the first and the fourth.
const std::vector<std::vector<int>> kTopologies = {
    {0, 0, 1, 1}, {0, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 1, 2, 3}};
const std::vector<std::vector<int>> kNodes = {{0, 0, 0}, {0, 0}, {0, 0, 0, 0}};

}  // namespace

TEST_CASE("a product takes rows of its own rank, of its node and of other nodes in one order", "[emulation]") {
  const std::vector<int> nodes = GENERATE(from_range(fewer_if_slow(kTopologies)));
  for (const BackendCase& backend : fewer_if_slow(backend_cases())) {
    INFO(backend.backend << " seed " << backend.seed << " " << backend.environment << ", " << nodes.size()
                         << " ranks");
    CHECK(run_ranks(RankKind::threads, backend, nodes, [&](Rank& rank) {
            // A rank's k is its own.
            const int64_t k = 9 + 7 * rank.rank;
            return run_shapes(rank, {{500, 130, k},
                                     {333, 72, k, true},
                                     {3, 24, k},
                                     {0, 64, k},
                                     {70, 0, k},
                                     {700, 33, k, true, false, 0},
                                     {130, 200, rank.rank == 1 ? 0 : 70, false, true, 0},
                                     {900, 300, k, true, true, 1, 128, 1},
                                     {1500, 200, k, false, false, 0, 64, 2}});
          }) == "");
  }
}

TEST_CASE("inside a node ranks of few rows share their steps, which wait for all", "[emulation]") {
  const std::vector<int> nodes = GENERATE(from_range(fewer_if_slow(kNodes)));
  INFO(nodes.size() << " ranks");
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) {
          const int64_t k = 9 + 7 * rank.rank;
          // Also with more rows, of which each rank's have steps of their own.
          return run_shapes(rank, {{64, 130, k, false, true, 0},
                                   {1, 24, k, true, true, 0},
                                   {3, 300, k, false, false, 0, 64, 2},
                                   {100, 72, k, true, true, 1},
                                   {63 * rank.nranks, 65, k, false, true, 0, 256, 1},
                                   {5, 0, k},
                                   {120, 200, rank.rank == 1 ? 0 : 70, true, true, 0},
                                   {64 * rank.nranks, 65, k, false, true, 0, 256, 1},
                                   {500, 130, k, true, false, 1, 64, 2},
                                   {0, 64, k}});
        }) == "");
}

TEST_CASE("a product whose rows do not come says whose", "[emulation]") {
  const std::vector<int> nodes = {0, 1};
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          WgradRank rows(rank);
          MK_EXPECT_OK(rows.set_up(rank.rank == 0 ? 3000 : kPatienceMs));
          MK_EXPECT(rank.barrier());
          const WgradShape shape = {500, 200, 24};
          NetworkWgradParams params = rows.params(shape);
          // Rank 1 believes that it has no rows to send and nothing to compute, but all else is as agreed.
          if (rank.rank == 1)
            params.schedule.k = params.late_tiles.num_n_tiles = 0, params.a_gathered = nullptr;
          rows.launch(params, shape.push_ctas);
          if (rank.rank == 0) {
            const mk_async_error_t error = rows.gpu().error();
            MK_EXPECT(error.status == MK_ERROR_TIMEOUT && error.rank == 1);
            const std::string role = error.role;
            MK_EXPECT(role == "compute" || role == "receive" || role == "gather");
            MK_EXPECT(std::string(error.object) == "chunk");
          }
          MK_EXPECT(rank.barrier());
          rank.abort.raise(Status(MK_ERROR_TIMEOUT, "as a communicator would"));
          return "";
        }) == "");
}

}  // namespace test
}  // namespace mk
