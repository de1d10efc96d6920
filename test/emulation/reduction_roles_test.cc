// SPDX-License-Identifier: MIT
// The roles of GEMM+ReduceScatter between nodes that sum and that have the network, on emulated warps and host
// memory, over the real transports. Someone who writes partial tiles in any order stands in for the products
// and their pushes.
#include "shim/device_words.h"

#include <random>
#include <thread>
#include <vector>

#include "../support/catch.h"
#include "emulated_gpu.h"
#include "kernels/ops/gemm_reduce_scatter/cuda_network_kernel.cuh"

namespace mk {

struct EmulatedTiles {
  static constexpr int BLOCK_M = 32;
  static constexpr int BLOCK_N = 32;
  static constexpr int NUM_THREADS = 96;
};

namespace test {
namespace {

using gemm_reduce_scatter::NetworkParams;
using gemm_reduce_scatter::NetworkSchedule;

struct Shape {
  int64_t m, n;
  int group_rows = 2;
  int chunk_tiles = 2;
};

constexpr int kReduceCtas = 2;
constexpr size_t kBankBytes = 4 << 20;
constexpr int kTileBytes = EmulatedTiles::BLOCK_M * EmulatedTiles::BLOCK_N * 4;

float partial(uint64_t epoch, int rank, int64_t row, int64_t column) {
  return static_cast<float>((epoch * 5 + static_cast<uint64_t>(rank * 3 + row * 7 + column * 11)) % 17) - 8;
}

class ReductionRank {
 public:
  explicit ReductionRank(Rank& rank) : rank_(rank), gpu_(rank), arrays_(rank.topology) {}

  Status set_up() { return gpu_.set_up(kReduceCtas + 1, kBankBytes); }
  EmulatedGpu& gpu() { return gpu_; }

  NetworkParams params(const Shape& shape) {
    NetworkParams params{};
    params.comm = gpu_.comm();
    params.comm.entry.op = MK_OPERATOR_GEMM_REDUCE_SCATTER;
    params.comm.entry.output_offset = kNoOutput;
    params.comm.entry.shape[0] = shape.m;
    const int64_t max_rows = ceil_div(shape.m, rank_.nranks);
    params.m = static_cast<int>(shape.m);
    params.max_rows = static_cast<int>(std::max<int64_t>(1, max_rows));
    params.reduction = gemm_reduce_scatter::Reduction::scatter;
    params.comm_type = GemmType::fp32;
    params.tile_rows = static_cast<int>(std::max<int64_t>(1, ceil_div(max_rows, EmulatedTiles::BLOCK_M)));
    params.tiles.num_n_tiles = static_cast<int>(ceil_div(shape.n, EmulatedTiles::BLOCK_N));
    params.network = {rank_.topology.num_nodes,
                      gemm_reduce_scatter::max_local_nranks(arrays_.view()),
                      gemm_reduce_scatter::max_reductions(arrays_.view()),
                      params.tile_rows,
                      params.tiles.num_n_tiles,
                      std::min(shape.group_rows, params.tile_rows),
                      shape.chunk_tiles,
                      kTileBytes};
    params.reducers = gemm_reduce_scatter::make_reducers(arrays_.view());
    c_.assign(static_cast<size_t>(max_rows * shape.n + 1), -1000);
    params.output.c = c_.data();
    params.output.ldc = shape.n;
    params.output.n = static_cast<int>(shape.n);
    return params;
  }

  // Partial tiles of all owners, in an order of their own, to whom the kernel would push them.
  void produce(const NetworkParams& params, uint64_t epoch, uint32_t seed) {
    struct Tile {
      int owner, m_tile, n_tile;
    };
    std::vector<Tile> tiles;
    for (int owner = 0; owner < rank_.nranks; ++owner) {
      for (int m = 0; m * EmulatedTiles::BLOCK_M < rows_of(params, owner); ++m) {
        for (int n = 0; n < params.tiles.num_n_tiles; ++n) tiles.push_back({owner, m, n});
      }
    }
    std::mt19937 random(seed);
    std::shuffle(tiles.begin(), tiles.end(), random);
    const NetworkSchedule& schedule = params.network;
    for (const Tile& tile : tiles) {
      const int reducer = params.reducers.reducer[tile.owner];
      const int reduction = params.reducers.reduction[tile.owner];
      const int local = params.reducers.local_rank;
      std::byte* const base = params.comm.memory[reducer];
      auto* const to = reinterpret_cast<float*>(base + (gpu_.area(epoch, 0) - params.comm.memory[rank_.rank]) +
                                                schedule.partial_offset(reduction, local) +
                                                schedule.tile_offset(tile.m_tile, tile.n_tile));
      for (int i = 0; i < EmulatedTiles::BLOCK_M; ++i) {
        for (int j = 0; j < EmulatedTiles::BLOCK_N; ++j) {
          const int64_t row = int64_t{tile.owner} * params.max_rows + tile.m_tile * EmulatedTiles::BLOCK_M + i;
          to[i * EmulatedTiles::BLOCK_N + j] =
              partial(epoch, rank_.rank, row, tile.n_tile * EmulatedTiles::BLOCK_N + j);
        }
      }
      const int flag =
          schedule.partial_flag(reduction, local, tile.m_tile * params.tiles.num_n_tiles + tile.n_tile);
      __atomic_store_n(
          reinterpret_cast<uint64_t*>(base + ControlLayout{rank_.nranks}.flag(bank_of(epoch), flag)), epoch,
          __ATOMIC_RELEASE);
    }
  }

  void launch(const NetworkParams& params) {
    std::vector<EpilogueBuffers<1>> buffers(EmulatedTiles::NUM_THREADS / 32);
    emulation::run_ctas(kReduceCtas + 1, EmulatedTiles::NUM_THREADS / 32, [&] {
      const RankLaunch launch(params.comm);
      launch.begin_cta();
      if (blockIdx.x + gemm_reduce_scatter::NUM_NETWORK_CTAS == gridDim.x) {
        gemm_reduce_scatter::run_network_cta<EmulatedTiles>(launch, params);
      } else {
        gemm_reduce_scatter::run_reduce_cta<EmulatedTiles>(launch, params,
                                                           reinterpret_cast<uint8_t*>(buffers.data()));
      }
      launch.end_cta();
    });
  }

  std::string check(const NetworkParams& params, uint64_t epoch) const {
    for (int row = 0; row < rows_of(params, rank_.rank); ++row) {
      for (int column = 0; column < params.output.n; ++column) {
        float expected = 0;
        for (int rank = 0; rank < rank_.nranks; ++rank)
          expected += partial(epoch, rank, int64_t{rank_.rank} * params.max_rows + row, column);
        const float seen = c_[static_cast<size_t>(row * params.output.ldc + column)];
        if (seen != expected)
          return format("launch %llu: row %d, column %d is %g, not %g; ", (unsigned long long)epoch, row,
                        column, seen, expected);
      }
    }
    return c_.back() == -1000 ? "" : "a write behind the end; ";
  }

 private:
  Rank& rank_;
  EmulatedGpu gpu_;
  const TopologyArrays arrays_;
  std::vector<float> c_;
};

std::string run_launches(ReductionRank& reduction, Rank& rank, const Shape& shape) {
  for (int turn = 0; turn < 4; ++turn) {
    const NetworkParams params = reduction.params(shape);
    const uint64_t epoch = reduction.gpu().epoch() + 1;
    if (params.network.num_flags() > kFlagsPerBank ||
        params.network.num_slots() * params.network.slot_bytes() > static_cast<int64_t>(kBankBytes))
      return "the shape is too large for the test; ";
    std::thread producer(
        [&] { reduction.produce(params, epoch, static_cast<uint32_t>(epoch) * 31 + rank.rank); });
    reduction.launch(params);
    producer.join();
    if (const std::string sentence = reduction.gpu().sentence(); !sentence.empty()) return sentence + "; ";
    if (std::string wrong = reduction.check(params, epoch); !wrong.empty()) return wrong;
    MK_EXPECT(reduction.gpu().epoch() == epoch && reduction.gpu().is_idle());
    MK_EXPECT(EmulatedGpu::is_clean(*params.comm.state));
    MK_EXPECT(rank.endpoint->completed() == params.comm.network.queue.state->head);
  }
  return "";
}

const std::vector<std::vector<int>> kTopologies = {
    {0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 2}, {0, 0, 0, 1, 1}};

}  // namespace

TEST_CASE("partial tiles are summed in each node and then between them, launch after launch", "[emulation]") {
  const std::vector<int> nodes = GENERATE(from_range(kTopologies));
  for (const BackendCase& backend : backend_cases()) {
    INFO(backend.backend << " seed " << backend.seed << " " << backend.environment << ", " << nodes.size()
                         << " ranks");
    CHECK(run_ranks(RankKind::threads, backend, nodes, [&](Rank& rank) -> std::string {
            ReductionRank reduction(rank);
            MK_EXPECT_OK(reduction.set_up());
            MK_EXPECT(rank.barrier());
            for (const Shape& shape : {Shape{300, 100}, Shape{3, 40}, Shape{0, 64}, Shape{70, 0},
                                       Shape{640, 170, 3, 4}, Shape{33, 33, 1, 1}}) {
              if (std::string text = run_launches(reduction, rank, shape); !text.empty()) {
                return format("m %lld, n %lld: ", (long long)shape.m, (long long)shape.n) + text;
              }
            }
            MK_EXPECT(rank.barrier());
            return rank.failure();
          }) == "");
  }
}

TEST_CASE("chunks of tiles cover an owner's tiles once, those of a group of rows together", "[emulation]") {
  for (const int tile_rows : {1, 3, 8}) {
    for (const int num_n_tiles : {1, 4, 7}) {
      for (const int chunk_tiles : {1, 3, 4}) {
        const NetworkSchedule schedule = {2,           2, 2, tile_rows, num_n_tiles, std::min(3, tile_rows),
                                          chunk_tiles, 64};
        std::vector<int> seen(static_cast<size_t>(schedule.tiles()));
        for (int number = 0; number < schedule.max_chunks(); ++number) {
          const auto chunk = schedule.chunk(number);
          for (int i = 0; i < chunk.num_tiles; ++i)
            ++seen[static_cast<size_t>(chunk.m_tile * num_n_tiles + chunk.first_n_tile + i)];
        }
        CHECK(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
        CHECK(schedule.arrived_flag(1, schedule.max_chunks() - 1) + 1 == schedule.num_flags());
        CHECK(schedule.sum_offset(2) == schedule.num_slots() * schedule.slot_bytes());
      }
    }
  }
}

}  // namespace test
}  // namespace mk
