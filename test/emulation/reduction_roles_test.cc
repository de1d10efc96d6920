// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter and GEMM+AllReduce between nodes on emulated warps and host memory, over the real
// transports, all but the products, which are made up: the consumers' epilogues, pushes to the node, sums,
// puts, arrivals, forwards, and what brings finished rows to C. Inside a node those of few bytes, in tagged
// packets, and those of some hundred rows, in swapped tiles.
#include "shim/device_words.h"

#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "../support/catch.h"
#include "emulated_gpu.h"
#include "kernels/cuda/rank_gemm_plan.h"
#include "kernels/ops/gemm_reduce_scatter/cuda_network_kernel.cuh"
#include "kernels/ops/gemm_reduce_scatter/cuda_swapped_exchange.cuh"
#include "kernels/ops/gemm_reduce_scatter/cuda_tagged_kernel.cuh"
#include "reduced_output.h"

namespace mk {

struct EmulatedTiles {
  static constexpr int BLOCK_M = 64;
  static constexpr int BLOCK_N = 32;
  static constexpr int NUM_CONSUMER_WARPS = BLOCK_M / 16;
  static constexpr int NUM_WARPS = NUM_CONSUMER_WARPS + NUM_COPY_WARPS;
  static constexpr int NUM_THREADS = NUM_WARPS * 32;
};
template <>
struct RankGemmStorage<EmulatedTiles> {
  EpilogueBuffers<1> epilogue[EmulatedTiles::NUM_CONSUMER_WARPS];
  PushStorage<NUM_PUSH_WARPS, PUSH_PIECE_BYTES> push;
  uint64_t staged_full[NUM_STAGED_TILES];
  uint64_t staged_empty[NUM_STAGED_TILES];
  uint8_t rest[sizeof(PushCtaStorage<EmulatedTiles::NUM_THREADS>)];  // a CTA that sums has no products
};

struct EmulatedPacketTiles {
  static constexpr int BLOCK_M = 64;
  static constexpr int BLOCK_N = 128;
  static constexpr int NUM_CONSUMER_WARPS = 4;
};
template <>
struct RankGemmStorage<EmulatedPacketTiles> {
  EpilogueBuffers<1> epilogue[EmulatedPacketTiles::NUM_CONSUMER_WARPS];
};

namespace test {
namespace {

using gemm_reduce_scatter::NetworkParams;
using gemm_reduce_scatter::NetworkSchedule;
using gemm_reduce_scatter::OwnerTiles;

struct Shape {
  int64_t m, n;
  int group_rows = 2;
  int chunk_tiles = 2;
  int finished_tiles = 1;  // of a chunk of finished ones
  int blocks_across = 2;   // chunks of those that an owner has computed in a round
};

constexpr int kComputeCtas = 2;
constexpr int kReduceCtas = 2;
constexpr int kMaxCtas = kComputeCtas + kReduceCtas + gemm_reduce_scatter::NUM_NETWORK_CTAS;
constexpr size_t kBankBytes = 4 << 20;
constexpr int kTileBytes = EmulatedTiles::BLOCK_M * EmulatedTiles::BLOCK_N * 4;

class ReductionRank {
 public:
  ReductionRank(Rank& rank, bool reduces_all)
      : rank_(rank), reduces_all_(reduces_all), gpu_(rank), arrays_(rank.topology) {}

  Status set_up() { return gpu_.set_up(kMaxCtas, kBankBytes); }
  EmulatedGpu& gpu() { return gpu_; }

  NetworkParams params(const Shape& shape) {
    NetworkParams params{};
    params.comm = gpu_.comm();
    params.comm.entry.op = reduces_all_ ? MK_OPERATOR_GEMM_ALLREDUCE : MK_OPERATOR_GEMM_REDUCE_SCATTER;
    params.comm.entry.output_offset = kNoOutput;
    params.comm.entry.shape[0] = shape.m;
    const int64_t max_rows = ceil_div(shape.m, rank_.nranks);
    params.m = static_cast<int>(shape.m);
    params.max_rows = static_cast<int>(std::max<int64_t>(1, max_rows));
    params.reduction =
        reduces_all_ ? gemm_reduce_scatter::Reduction::two_shot : gemm_reduce_scatter::Reduction::scatter;
    params.comm_type = GemmType::fp32;
    params.order = {static_cast<int>(std::max<int64_t>(1, ceil_div(max_rows, EmulatedTiles::BLOCK_M))), 0};
    params.splits_rows = true;
    params.tiles.num_m_tiles = rank_.nranks * params.order.tile_rows;
    params.tiles.num_n_tiles = static_cast<int>(ceil_div(shape.n, EmulatedTiles::BLOCK_N));
    params.tiles.num_workers = kComputeCtas;
    const int num_n_tiles = params.tiles.num_n_tiles;
    const int group_rows = std::min(shape.group_rows, params.order.tile_rows);
    params.network = {rank_.topology.num_nodes,
                      gemm_reduce_scatter::max_local_nranks(arrays_.view()),
                      gemm_reduce_scatter::max_reductions(arrays_.view()),
                      {params.order.tile_rows, num_n_tiles, group_rows, shape.chunk_tiles},
                      {params.order.tile_rows, num_n_tiles, group_rows, shape.finished_tiles},
                      kTileBytes,
                      reduces_all_ ? kTileBytes : 0};
    const int num_local = arrays_.view().local_nranks();
    params.network_tiles = {rank_.nranks - num_local,
                            3,
                            {num_local - 1, params.order.tile_rows, num_n_tiles, params.order.tile_rows,
                             std::max(1, num_n_tiles), 3},
                            0,
                            0};
    OwnerTiles& near = params.network_tiles.near;
    params.network_tiles.lead = near.size();
    if (reduces_all_) {
      params.network_tiles.rotation = 2;
      near = {near.num_owners,
              near.tile_rows,
              near.num_n_tiles,
              group_rows,
              shape.finished_tiles * shape.blocks_across,
              group_rows};
      params.network_tiles.lead =
          std::min(near.size(), 2 * near.num_owners * near.block_rows * near.block_columns);
    }
    params.reducers = gemm_reduce_scatter::make_reducers(arrays_.view());
    output_.make(reduces_all_ ? shape.m : rows_count(shape.m, rank_.nranks, rank_.rank), shape.n, shape.n,
                 GemmType::fp32, &params.output);
    params.output.accumulate = reduces_all_ && shape.n % 3 == 0;
    return params;
  }

  void launch(const NetworkParams& params) {
    const unsigned num_ctas = kMaxCtas - (gemm_reduce_scatter::is_alone(params) ? kReduceCtas : 0);
    for (int slot = 0; slot < kComputeCtas * NUM_STAGED_TILES; ++slot)
      std::memset(params.comm.staging + slot * (STAGING_BYTES / NUM_STAGED_TILES), 0xff, kTileBytes);
    std::vector<std::unique_ptr<Smem>> storage;
    while (storage.size() < num_ctas) storage.push_back(std::make_unique<Smem>());
    emulation::run_ctas(num_ctas, EmulatedTiles::NUM_WARPS, [&] { run_cta(params, *storage[blockIdx.x]); });
  }

  std::string check(const NetworkParams& params, uint64_t epoch) const {
    const int64_t first = reduces_all_ ? 0 : int64_t{rank_.rank} * params.max_rows;
    return output_.wrong(params.output.accumulate, [&](int64_t row, int64_t column) {
      return sum_of_partials(epoch, rank_.nranks, first + row, column);
    });
  }

 private:
  using Smem = RankGemmStorage<EmulatedTiles>;

  // As the kernel's, but for the producer.
  void run_cta(const NetworkParams& params, Smem& smem) {
    using namespace gemm_reduce_scatter;
    const RankLaunch launch(params.comm);
    launch.begin_cta();
    if (blockIdx.x >= kComputeCtas) {
      if (blockIdx.x + NUM_NETWORK_CTAS == gridDim.x) {
        run_network_cta<EmulatedTiles>(launch, params);
      } else {
        run_reduce_cta<EmulatedTiles>(launch, params, reinterpret_cast<uint8_t*>(&smem));
      }
      launch.end_cta();
      return;
    }
    if (threadIdx.x == 0) staging_init(smem);
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int copy_warp = warp - EmulatedTiles::NUM_CONSUMER_WARPS;
    if (copy_warp < 0) {
      consume(launch, params, smem, warp);
    } else {
      if (copy_warp < NUM_PUSH_WARPS) push_to_node<EmulatedTiles>(launch, params, smem, copy_warp);
      if (reduces_all_) bring_finished<EmulatedTiles>(launch, params);
    }
    launch.end_cta();
  }

  void consume(const RankLaunch& launch, const NetworkParams& params, Smem& smem, int warp) {
    using namespace gemm_reduce_scatter;
    constexpr int N = EmulatedTiles::BLOCK_N;
    auto tiles = tile_cursor(params);
    TileWork work{};
    while (next_tile<EmulatedTiles>(params, tiles, &work)) {
      const RankTile place = params.order.place(work);
      const int owner = owner_at(params, place.position);
      const int64_t first = first_row_of(params, owner);
      float accumulators[N / 2];
      multiply(accumulators, launch.epoch(), rank_.rank,
               first + place.index * EmulatedTiles::BLOCK_M + warp * 16, first + rows_of(params, owner),
               work.n_tile * N, params.output.n);
      finish_network_block<EmulatedTiles>(launch, params, smem, work, 0, accumulators);
    }
  }

  Rank& rank_;
  const bool reduces_all_;
  EmulatedGpu gpu_;
  const TopologyArrays arrays_;
  ReducedOutput output_;
};

// A launch and what it leaves; "" when all is right.
template <class LaunchingRank, class Params>
std::string run_launch(LaunchingRank& rank, const Params& params) {
  const uint64_t epoch = rank.gpu().epoch() + 1;
  rank.launch(params);
  if (std::string text = state_after(rank.gpu(), params.comm, epoch); !text.empty()) return text;
  const std::string wrong = rank.check(params, epoch);
  return wrong.empty() ? "" : format("launch %llu: ", (unsigned long long)epoch) + wrong;
}

std::string run_launches(ReductionRank& reduction, const Shape& shape) {
  for (int turn = 0; turn < 4; ++turn) {
    const NetworkParams params = reduction.params(shape);
    if (params.network.num_flags(params.comm.nranks) > kFlagsPerBank ||
        params.network.finished_offset(params.comm.nranks, 0, 0) > static_cast<int64_t>(kBankBytes))
      return "the shape is too large for the test; ";
    if (std::string text = run_launch(reduction, params); !text.empty()) return text;
  }
  return "";
}

// With a sanitizer the first and the fourth.
const std::vector<std::vector<int>> kTopologies = {
    {0, 0, 1, 1}, {0, 1}, {0, 1, 0, 1}, {0, 0, 0, 1, 1}, {0, 1, 2}};

}  // namespace

TEST_CASE("partial tiles are summed in each node and then between them, launch after launch", "[emulation]") {
  const std::vector<int> nodes = GENERATE(from_range(fewer_if_slow(kTopologies)));
  const bool reduces_all = GENERATE(false, true);
  for (const BackendCase& backend : fewer_if_slow(backend_cases())) {
    INFO(backend.backend << " seed " << backend.seed << " " << backend.environment << ", " << nodes.size()
                         << " ranks, " << (reduces_all ? "all-reduce" : "reduce-scatter"));
    CHECK(run_ranks(RankKind::threads, backend, nodes, [&](Rank& rank) -> std::string {
            ReductionRank reduction(rank, reduces_all);
            MK_EXPECT_OK(reduction.set_up());
            MK_EXPECT(rank.barrier());
            for (const Shape& shape :
                 {Shape{300, 100}, Shape{3, 40}, Shape{0, 64}, Shape{70, 0}, Shape{640, 170, 3, 4, 2, 1},
                  Shape{33, 33, 1, 1}, Shape{450, 290, 2, 3, 2, 3}}) {
              if (std::string text = run_launches(reduction, shape); !text.empty()) {
                return format("m %lld, n %lld: ", (long long)shape.m, (long long)shape.n) + text;
              }
            }
            MK_EXPECT(rank.barrier());
            return rank.failure();
          }) == "");
  }
}

namespace {

using gemm_reduce_scatter::Reduction;
using gemm_reduce_scatter::TaggedParams;

struct PacketShape {
  mk_operator_t op;
  int64_t m, n;
  mk_algorithm_t algorithm = MK_ALGORITHM_AUTO;
  mk_dtype_t dtype = MK_DTYPE_BF16;
  bool accumulate = false;
};

class PacketRank {
 public:
  static constexpr int NUM_CTAS = 4;

  explicit PacketRank(Rank& rank) : rank_(rank), gpu_(rank) {}
  Status set_up() { return gpu_.set_up(NUM_CTAS, PACKET_BANK_BYTES); }
  EmulatedGpu& gpu() { return gpu_; }

  // Empty: not of few bytes.
  std::optional<TaggedParams> params(const PacketShape& shape) {
    GemmCall call;
    call.op = shape.op;
    call.m = shape.m, call.n = shape.n, call.k = 64;
    call.dtype = call.out_dtype = call.comm_dtype = shape.dtype;
    call.tuning.tile_m = EmulatedPacketTiles::BLOCK_M, call.tuning.tile_n = EmulatedPacketTiles::BLOCK_N;
    call.tuning.algorithm = shape.algorithm;
    const Result<RankGemmPlan> chosen = rank_gemm_plan(call, rank_.rank, rank_.nranks, NUM_CTAS);
    if (!chosen.ok() || !chosen.value().is_tagged) return {};
    const RankGemmPlan& plan = chosen.value();
    TaggedParams params{};
    params.comm = gpu_.comm();
    params.comm.entry.op = shape.op;
    params.comm.entry.output_offset = kNoOutput;
    params.comm.entry.shape[0] = shape.m;
    params.tiles.num_n_tiles = static_cast<int>(ceil_div(shape.n, EmulatedPacketTiles::BLOCK_N));
    params.tiles.num_k_steps = 1;
    params.tiles.num_workers = NUM_CTAS;
    params.owner_tiles = plan.owner_tiles;
    params.comm_type = shape.dtype == MK_DTYPE_FP16 ? GemmType::fp16 : GemmType::bf16;
    params.reduction = plan.reduction;
    params.order = {plan.tile_rows, 0};
    params.m = static_cast<int>(shape.m);
    params.max_rows = static_cast<int>(plan.splits_rows ? ceil_div(shape.m, rank_.nranks) : shape.m);
    params.splits_rows = plan.splits_rows;
    params.splits_columns = plan.splits_columns;
    params.is_direct = plan.is_direct;
    params.tiles_per_owner = static_cast<int>(plan.tiles_per_owner);
    params.packets = params.comm.arena;
    params.packet_slot_bytes = plan.packet_slot_bytes;
    params.packet_gather_begin = rank_.nranks * plan.packet_slot_bytes;
    params.merged_rows = plan.merged_rows;
    const bool scatters = plan.reduction == Reduction::scatter;
    first_row_ = scatters ? rows_begin(shape.m, rank_.nranks, rank_.rank) : 0;
    output_.make(scatters ? rows_count(shape.m, rank_.nranks, rank_.rank) : shape.m, shape.n, shape.n + 1,
                 params.comm_type, &params.output);
    params.output.accumulate = shape.accumulate;
    return params;
  }

  void launch(const TaggedParams& params) {
    RankGemmStorage<EmulatedPacketTiles> smem[NUM_CTAS];
    constexpr unsigned NUM_WARPS = EmulatedPacketTiles::NUM_CONSUMER_WARPS;
    emulation::run_ctas(NUM_CTAS, NUM_WARPS + 1, [&] {
      const RankLaunch launch(params.comm);
      launch.begin_cta();
      if (threadIdx.x / 32 < NUM_WARPS) {
        consume(launch, params, smem[blockIdx.x]);
      } else if (blockIdx.x == 0) {
        launch.greet();
      }
      launch.end_cta();
    });
  }

  std::string check(const TaggedParams& params, uint64_t epoch) const {
    return output_.wrong(params.output.accumulate, [&](int64_t row, int64_t column) {
      return sum_of_partials(epoch, rank_.nranks, first_row_ + row, column);
    });
  }

 private:
  void consume(const RankLaunch& launch, const TaggedParams& params,
               RankGemmStorage<EmulatedPacketTiles>& smem) const {
    using namespace gemm_reduce_scatter;
    using Config = EmulatedPacketTiles;
    const int warp = static_cast<int>(threadIdx.x / 32);
    auto tiles = tile_cursor(params);
    TileWork work{};
    while (next_tile<Config>(params, tiles, &work)) {
      const TilePlace place = place_of(params, work, Config::BLOCK_M);
      float accumulators[Config::BLOCK_N / 2];
      const int64_t first = first_row_of(params, place.owner);
      multiply(accumulators, launch.epoch(), rank_.rank, first + place.row + warp * 16,
               first + rows_of(params, place.owner), place.n_tile * Config::BLOCK_N, params.output.n);
      tagged::finish_block<Config>(launch, params, smem, work, 0, accumulators);
    }
    if (params.reduction != Reduction::one_shot) tagged::finish_units<Config>(launch, params, smem);
    if (params.reduction == Reduction::two_shot) tagged::gather_packets<Config>(launch, params, smem);
  }

  Rank& rank_;
  EmulatedGpu gpu_;
  int64_t first_row_ = 0;  // of C
  ReducedOutput output_;
};

std::string run_packet_launches(PacketRank& packets, const PacketShape& shape, bool must_be_tagged) {
  for (int turn = 0; turn < 3; ++turn) {
    const std::optional<TaggedParams> params = packets.params(shape);
    MK_EXPECT(params || !must_be_tagged);
    if (!params) return "";
    if (std::string text = run_launch(packets, *params); !text.empty()) return text;
  }
  return "";
}

}  // namespace

TEST_CASE("tagged packets bring each row to its owner, or to all, launch after launch", "[emulation]") {
  constexpr auto scatter = MK_OPERATOR_GEMM_REDUCE_SCATTER, reduce = MK_OPERATOR_GEMM_ALLREDUCE;
  const int nranks = GENERATE(2, 3, 5);
  CAPTURE(nranks);
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, std::vector<int>(static_cast<size_t>(nranks), 0),
                  [&](Rank& rank) -> std::string {
                    PacketRank packets(rank);
                    MK_EXPECT_OK(packets.set_up());
                    MK_EXPECT(rank.barrier());
                    std::vector<PacketShape> shapes;
                    for (const int64_t m : {1, 2, 4, 7, 16, 17, 33, 48, 50, 64}) {
                      shapes.push_back({scatter, m, 136, MK_ALGORITHM_AUTO, MK_DTYPE_BF16, m % 2 == 0});
                      shapes.push_back({scatter, m, 8, MK_ALGORITHM_AUTO, MK_DTYPE_FP16});
                    }
                    shapes.push_back({scatter, 100, 250});
                    shapes.push_back({scatter, 128, 129});
                    const size_t num_scatters = shapes.size();
                    for (const int64_t m : {1, 17, 64}) {
                      shapes.push_back({reduce, m, 136, MK_ALGORITHM_ONE_SHOT});
                      shapes.push_back({reduce, m, 136, MK_ALGORITHM_TWO_SHOT});
                    }
                    for (const PacketShape& shape : shapes) {
                      const bool scatters = static_cast<size_t>(&shape - shapes.data()) < num_scatters;
                      const std::string text = run_packet_launches(packets, shape, scatters);
                      if (!text.empty())
                        return format("operator %d, m %lld, n %lld: ", shape.op, (long long)shape.m,
                                      (long long)shape.n) +
                               text;
                    }
                    MK_EXPECT(rank.barrier());
                    return rank.failure();
                  }) == "");
}

namespace {

using gemm_reduce_scatter::SwappedParams;

struct EmulatedSwappedTiles {
  static constexpr int BLOCK_M = 64;
  static constexpr int BLOCK_N = 40;
  static constexpr int NUM_CONSUMER_WARPS = BLOCK_M / 16;
};

struct PanelShape {
  Reduction reduction;
  int m, n;
  int num_n_tiles;  // that share out the rows
  int num_ctas;     // that have the tiles in turn
  GemmType comm_type = GemmType::bf16;
  GemmType out_type = GemmType::bf16;
  bool accumulate = false;
  int more_columns = 0;  // of C
};

class PanelRank {
 public:
  explicit PanelRank(Rank& rank) : rank_(rank), gpu_(rank) {}
  Status set_up() { return gpu_.set_up(64, 1 << 20); }
  EmulatedGpu& gpu() { return gpu_; }

  // As the plan and the launch would have it.
  SwappedParams params(const PanelShape& shape) {
    using namespace gemm_reduce_scatter;
    using Tiles = EmulatedSwappedTiles;
    const bool one_shot = shape.reduction == Reduction::one_shot;
    const int max_rows = static_cast<int>(ceil_div(shape.m, rank_.nranks));
    SwappedParams params{};
    params.comm = gpu_.comm();
    params.comm.entry.op =
        shape.reduction == Reduction::scatter ? MK_OPERATOR_GEMM_REDUCE_SCATTER : MK_OPERATOR_GEMM_ALLREDUCE;
    params.comm.entry.output_offset = kNoOutput;
    params.comm.entry.shape[0] = shape.m;
    params.comm_type = shape.comm_type;
    params.reduction = shape.reduction;
    params.m = shape.m;
    params.max_rows = one_shot ? shape.m : max_rows;
    params.splits_rows = !one_shot;
    params.merged_rows = {shape.m, params.max_rows, static_cast<int>(ceil_div(shape.n, UNIT_COLUMNS))};
    params.rows_of_owner = Divisor(params.max_rows);
    params.swapped_tiles = {static_cast<int>(ceil_div(shape.n, Tiles::BLOCK_M)), shape.num_n_tiles,
                            even_columns(shape.m, shape.num_n_tiles), Tiles::BLOCK_M};
    params.tiles.num_workers = std::min(shape.num_ctas, params.swapped_tiles.size());
    params.slot_bytes = PartialPanels{params.max_rows}.bytes(params.merged_rows.num_column_units);
    params.first_gather_flag = rank_.nranks * params.swapped_tiles.size();
    params.gather_begin = round_up(rank_.nranks * params.slot_bytes, 128);
    params.gather_pitch = round_up(int64_t{shape.n} * element_bytes_of(shape.out_type), 16);
    const bool scatters = shape.reduction == Reduction::scatter;
    first_row_ = scatters ? std::min(shape.m, rank_.rank * max_rows) : 0;
    output_.make(scatters ? rows_count(shape.m, rank_.nranks, rank_.rank) : shape.m, shape.n,
                 shape.n + shape.more_columns, shape.out_type, &params.output);
    params.output.accumulate = shape.accumulate;
    return params;
  }

  void launch(const SwappedParams& params) {
    constexpr unsigned NUM_WARPS = EmulatedSwappedTiles::NUM_CONSUMER_WARPS;
    emulation::run_ctas(static_cast<unsigned>(params.tiles.num_workers), NUM_WARPS + 1, [&] {
      const RankLaunch launch(params.comm);
      launch.begin_cta();
      if (threadIdx.x / 32 < NUM_WARPS) {
        consume(launch, params);
      } else if (blockIdx.x == 0) {
        launch.greet();
      }
      launch.end_cta();
    });
  }

  std::string check(const SwappedParams& params, uint64_t epoch) const {
    return output_.wrong(params.output.accumulate, [&](int64_t row, int64_t column) {
      return sum_of_partials(epoch, rank_.nranks, first_row_ + row, column);
    });
  }

 private:
  void consume(const RankLaunch& launch, const SwappedParams& params) const {
    using namespace gemm_reduce_scatter;
    const SwappedTiles& tiles = params.swapped_tiles;
    for (int number = static_cast<int>(blockIdx.x); number < tiles.size(); number += params.tiles.num_workers) {
      TileWork work{};
      work.m_tile = number / tiles.num_n_tiles;
      work.n_tile = number % tiles.num_n_tiles;
      exchange(launch, params, work);
    }
    swapped::finish_units<EmulatedSwappedTiles>(launch, params);
    if (params.reduction == Reduction::two_shot) swapped::gather_units<EmulatedSwappedTiles>(launch, params);
  }

  void exchange(const RankLaunch& launch, const SwappedParams& params, const TileWork& work) const {
    using namespace gemm_reduce_scatter;
    using Tiles = EmulatedSwappedTiles;
    const int column = work.m_tile * Tiles::BLOCK_M + static_cast<int>(threadIdx.x) / 32 * 16;
    const int row = work.n_tile * params.swapped_tiles.tile_rows;
    const int row_end = std::min(params.m, row + params.swapped_tiles.tile_rows);
    const int lane = static_cast<int>(threadIdx.x % 32);
    float accumulators[Tiles::BLOCK_N / 2];
    for (int i = 0; i < Tiles::BLOCK_N / 2; ++i) {
      const int n = column + lane / 4 + i / 2 % 2 * 8, m = row + i / 4 * 8 + lane % 4 * 2 + i % 2;
      const bool is_inside = m < row_end && n < params.output.n;
      accumulators[i] = is_inside ? partial(launch.epoch(), rank_.rank, m, n) : NAN;
    }
    swapped::ExchangeColumns{launch, params}(accumulators, column, row, row_end);
    swapped::raise_flags<Tiles>(launch, params, work);
  }

  Rank& rank_;
  EmulatedGpu gpu_;
  int64_t first_row_ = 0;  // of C
  ReducedOutput output_;
};

std::string run_panel_launches(PanelRank& panels, const PanelShape& shape) {
  for (int turn = 0; turn < 3; ++turn) {
    if (std::string text = run_launch(panels, panels.params(shape)); !text.empty()) return text;
  }
  return "";
}

}  // namespace

TEST_CASE("rows of swapped tiles come to their owners, or to all, whichever tile they are in", "[emulation]") {
  const int nranks = GENERATE(2, 3, 5);
  CAPTURE(nranks);
  CHECK(run_ranks(
            RankKind::threads, {"loopback", "0"}, std::vector<int>(static_cast<size_t>(nranks), 0),
            [&](Rank& rank) -> std::string {
              PanelRank panels(rank);
              MK_EXPECT_OK(panels.set_up());
              MK_EXPECT(rank.barrier());
              std::vector<PanelShape> shapes;
              for (const Reduction reduction : {Reduction::scatter, Reduction::two_shot, Reduction::one_shot}) {
                shapes.push_back({reduction, 37, 136, 1, 3});
                shapes.push_back({reduction, 6, 72, 1, 2});  // of five ranks two have no rows
                shapes.push_back({reduction, 75, 64, 2, 2, GemmType::fp16, GemmType::fp16, true});
                shapes.push_back({reduction, 50, 77, 2, 4, GemmType::bf16, GemmType::fp32, true, 1});
                shapes.push_back({reduction, 100, 40, 3, 3, GemmType::bf16, GemmType::bf16, false, 3});
                shapes.push_back({reduction, 75, 136, 2, 4});  // CTAs with two tiles, and with one
                shapes.push_back({reduction, 100, 72, 3, 2, GemmType::fp16});
              }
              for (const PanelShape& shape : shapes) {
                const std::string text = run_panel_launches(panels, shape);
                if (!text.empty())
                  return format("reduction %d, m %d, n %d: ", static_cast<int>(shape.reduction), shape.m,
                                shape.n) +
                         text;
              }
              MK_EXPECT(rank.barrier());
              return rank.failure();
            }) == "");
}

}  // namespace test
}  // namespace mk
