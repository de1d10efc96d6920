// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter and GEMM+AllReduce inside a node on emulated warps and host memory, all but the products,
// which are made up: the consumers' epilogues, the ring of staged tiles, pushes, sums, and what brings finished
// rows to C. (In tagged packets: reduction_roles_test.cc.)
#include "shim/device_words.h"

#include <cstring>
#include <memory>
#include <vector>

#include "../support/catch.h"
#include "emulated_gpu.h"
#include "kernels/ops/gemm_reduce_scatter/cuda_kernel.cuh"
#include "reduced_output.h"

namespace mk {

struct EmulatedTiles {
  static constexpr int BLOCK_M = 64;
  static constexpr int BLOCK_N = 96;  // sums of 32 columns: several units of a slab
  static constexpr int NUM_ROW_BLOCKS = 1;
  static constexpr int NUM_CONSUMER_WARPS = BLOCK_M / 16;
  static constexpr int NUM_WARPS = NUM_CONSUMER_WARPS + NUM_COPY_WARPS;
};
template <>
struct RankGemmStorage<EmulatedTiles> {
  EpilogueBuffers<1> epilogue[EmulatedTiles::NUM_CONSUMER_WARPS];
  PushStorage<NUM_PUSH_WARPS, PUSH_PIECE_BYTES> push;
  uint64_t staged_full[NUM_STAGED_TILES];
  uint64_t staged_empty[NUM_STAGED_TILES];
};

namespace test {
namespace {

using gemm_reduce_scatter::CudaParams;
using gemm_reduce_scatter::Reduction;
using Smem = RankGemmStorage<EmulatedTiles>;

constexpr int kCtas = 3;
constexpr size_t kBankBytes = 2 << 20;
constexpr size_t kMaxTileBytes = EmulatedTiles::BLOCK_M * EmulatedTiles::BLOCK_N * 4;

// Who offers C for the others to write to.
enum class Offers { nobody, all, all_but_one };

struct Shape {
  Reduction reduction = Reduction::scatter;
  int64_t m = 0, n = 0;
  bool is_direct = false;
  GemmType comm_type = GemmType::bf16;
  GemmType out_type = GemmType::bf16;
  int64_t margin = 0;  // columns of C that are not of the product
  bool by_columns = false;
  bool is_paced = false;
  bool accumulates = false;
  bool has_bias = false;
  Offers offers = Offers::nobody;
};

float bias_of(int64_t column) { return static_cast<float>(column % 13 - 6); }

class NodeReductionRank {
 public:
  // `outputs`: where each rank's C lies, as all ranks see it.
  NodeReductionRank(Rank& rank, std::vector<std::byte*>& outputs)
      : rank_(rank), gpu_(rank), outputs_(outputs) {}

  Status set_up() { return gpu_.set_up(kCtas, kBankBytes); }
  EmulatedGpu& gpu() { return gpu_; }
  const RankComm& comm() const { return params_.comm; }

  // Between two barriers; false: the shape is too large.
  bool prepare(const Shape& shape) {
    params_ = CudaParams{};
    params_.comm = gpu_.comm();
    params_.comm.entry.op =
        shape.reduction == Reduction::scatter ? MK_OPERATOR_GEMM_REDUCE_SCATTER : MK_OPERATOR_GEMM_ALLREDUCE;
    params_.comm.entry.shape[0] = shape.m;
    params_.comm.entry.shape[1] = shape.n;
    const bool offers = shape.offers == Offers::all || (shape.offers == Offers::all_but_one && rank_.rank > 0);
    params_.comm.entry.output_offset = offers ? 0 : kNoOutput;
    params_.comm_type = shape.comm_type;
    params_.reduction = shape.reduction;
    params_.is_direct = shape.is_direct;
    params_.sums_beside =
        !shape.is_direct && shape.comm_type == shape.out_type && shape.comm_type != GemmType::fp32;
    params_.is_paced = shape.is_paced;
    share_out(shape);
    make_output(shape);
    for (const uint64_t epoch : {1, 2}) std::memset(gpu_.area(epoch, 0), kNan, kBankBytes);
    return lay_out();
  }

  void launch() {
    for (int rank = 0; rank < rank_.nranks; ++rank)
      params_.comm.outputs[rank] = outputs_[static_cast<size_t>(rank)];
    output_.clear();
    for (int slot = 0; slot < kCtas * NUM_STAGED_TILES; ++slot)
      std::memset(params_.comm.staging + slot * (STAGING_BYTES / NUM_STAGED_TILES), kNan, kMaxTileBytes);
    std::vector<std::unique_ptr<Smem>> storage;
    while (storage.size() < kCtas) storage.push_back(std::make_unique<Smem>());
    emulation::run_ctas(kCtas, EmulatedTiles::NUM_WARPS, [&] { run_cta(*storage[blockIdx.x]); });
  }

  std::string wrong(uint64_t epoch) const {
    const int64_t first = params_.reduction == Reduction::scatter ? first_row_of(params_, rank_.rank) : 0;
    return output_.wrong(params_.output.accumulate, [&](int64_t row, int64_t column) {
      return sum_of_partials(epoch, rank_.nranks, first + row, column) +
             (params_.output.bias != nullptr ? bias_of(column) : 0);
    });
  }

 private:
  static constexpr int kNan = 0xff;  // bytes of one, of any type

  // Owners, and their tiles, as the plan has them.
  void share_out(const Shape& shape) {
    const bool one_shot = shape.reduction == Reduction::one_shot;
    const int num_owners = one_shot ? 1 : rank_.nranks;
    params_.m = static_cast<int>(shape.m);
    params_.splits_columns = shape.by_columns;
    params_.splits_rows = !one_shot && !shape.by_columns;
    const int64_t max_rows = params_.splits_rows ? ceil_div(shape.m, rank_.nranks) : shape.m;
    params_.max_rows = static_cast<int>(std::max<int64_t>(1, max_rows));
    params_.order = {static_cast<int>(std::max<int64_t>(1, ceil_div(max_rows, EmulatedTiles::BLOCK_M))), 0};
    params_.tiles = {num_owners * params_.order.tile_rows,
                     static_cast<int>(ceil_div(shape.n, EmulatedTiles::BLOCK_N)),
                     1,
                     kCtas,
                     0,
                     2};
    const int num_n_tiles = static_cast<int>(
        ceil_div(shape.n, EmulatedTiles::BLOCK_N * int64_t{shape.by_columns ? num_owners : 1}));
    const int group = std::min(2, params_.order.tile_rows);
    const bool is_scatter = shape.reduction == Reduction::scatter;
    params_.owner_tiles = {num_owners,
                           params_.order.tile_rows,
                           num_n_tiles,
                           is_scatter ? params_.order.tile_rows : group,
                           is_scatter ? num_n_tiles : 1,
                           group};
    params_.tiles_per_owner = params_.owner_tiles.tiles_of_owner();
  }

  void make_output(const Shape& shape) {
    const bool scatters = shape.reduction == Reduction::scatter;
    output_.make(scatters ? rows_of(params_, rank_.rank) : shape.m, shape.n, shape.n + shape.margin,
                 shape.out_type, &params_.output);
    outputs_[static_cast<size_t>(rank_.rank)] = static_cast<std::byte*>(params_.output.c);
    params_.output.accumulate = shape.accumulates;
    if (!shape.has_bias) return;
    bias_.resize(static_cast<size_t>(shape.n));
    for (int64_t column = 0; column < shape.n; ++column) bias_[static_cast<size_t>(column)] = bias_of(column);
    params_.output.bias = bias_.data();
    params_.output.bias_type = GemmType::fp32;
  }

  // The receive area and the flags.
  bool lay_out() {
    constexpr int SLABS = EmulatedTiles::BLOCK_M / 16;
    constexpr int UNITS = EmulatedTiles::BLOCK_N / SUM_COLUMNS<EmulatedTiles::BLOCK_N>;
    const int num_tiles = rank_.nranks * params_.tiles_per_owner;
    params_.slot_bytes = int64_t{params_.tiles_per_owner} * EmulatedTiles::BLOCK_M * EmulatedTiles::BLOCK_N *
                         element_bytes_of(params_.comm_type);
    params_.first_gather_flag = num_tiles * (params_.is_direct ? SLABS : 1);
    params_.gather_begin = round_up(rank_.nranks * params_.slot_bytes, 128);
    params_.gather_pitch = round_up(int64_t{params_.output.n} * element_bytes_of(params_.output.out_type), 16);
    const int num_flags = params_.first_gather_flag + num_tiles * (params_.is_direct ? SLABS * UNITS : 1);
    return num_flags <= kFlagsPerBank &&
           params_.gather_begin + params_.m * params_.gather_pitch <= static_cast<int64_t>(kBankBytes);
  }

  // As the kernel's, but for the producer.
  void run_cta(Smem& smem) {
    const RankLaunch launch(params_.comm);
    if (threadIdx.x == 0) staging_init(smem);
    launch.begin_cta();
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x / 32);
    if (warp < EmulatedTiles::NUM_CONSUMER_WARPS) {
      consume(launch, smem, warp);
    } else {
      const int copy_warp = warp - EmulatedTiles::NUM_CONSUMER_WARPS;
      if (copy_warp == NUM_PUSH_WARPS && blockIdx.x == 0) launch.greet();
      if (copy_warp < NUM_PUSH_WARPS && !params_.is_direct)
        gemm_reduce_scatter::push_tiles<EmulatedTiles>(launch, params_, smem, copy_warp);
    }
    if (params_.reduction == Reduction::two_shot)
      gemm_reduce_scatter::gather_finished<EmulatedTiles>(launch, params_);
    launch.end_cta();
  }

  void consume(const RankLaunch& launch, Smem& smem, int warp) {
    using namespace gemm_reduce_scatter;
    auto tiles = tile_cursor(params_);
    TileWork work{};
    while (next_tile<EmulatedTiles>(params_, tiles, &work)) {
      const TilePlace place = place_of(params_, work, EmulatedTiles::BLOCK_M);
      const int64_t first = first_row_of(params_, place.owner);
      float accumulators[EmulatedTiles::BLOCK_N / 2];
      multiply(accumulators, launch.epoch(), rank_.rank, first + place.row + warp * 16,
               first + rows_of(params_, place.owner), int64_t{place.n_tile} * EmulatedTiles::BLOCK_N,
               params_.output.n);
      finish_block<EmulatedTiles>(launch, params_, smem, work, 0, accumulators);
    }
    if (params_.is_direct && params_.reduction != Reduction::one_shot)
      finish_units<EmulatedTiles>(launch, params_, smem);
  }

  Rank& rank_;
  EmulatedGpu gpu_;
  std::vector<std::byte*>& outputs_;
  CudaParams params_{};
  ReducedOutput output_;
  std::vector<float> bias_;
};

std::string run_shapes(Rank& rank, std::vector<std::byte*>& outputs, const std::vector<Shape>& shapes) {
  NodeReductionRank reduction(rank, outputs);
  MK_EXPECT_OK(reduction.set_up());
  std::string first;
  for (const Shape& shape : shapes) {
    MK_EXPECT(rank.barrier());
    MK_EXPECT(reduction.prepare(shape));
    MK_EXPECT(rank.barrier());
    // No barrier between launches: one's receive area fills up while another rank is in the one before.
    for (int turn = 0; turn < 3; ++turn) {
      const uint64_t epoch = reduction.gpu().epoch() + 1;
      reduction.launch();
      if (std::string text = state_after(reduction.gpu(), reduction.comm(), epoch); !text.empty())
        return first + text;
      const std::string wrong = reduction.wrong(epoch);
      if (first.empty() && !wrong.empty())
        first = format("shape %d, m %lld, n %lld, launch %llu: ", static_cast<int>(&shape - shapes.data()),
                       (long long)shape.m, (long long)shape.n, (unsigned long long)epoch) +
                wrong;
    }
  }
  MK_EXPECT(rank.barrier());
  return first + rank.failure();
}

void check_shapes(const std::vector<Shape>& shapes) {
  for (const int nranks : {2, 3}) {
    CAPTURE(nranks);
    std::vector<std::byte*> outputs(static_cast<size_t>(nranks));
    CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, std::vector<int>(outputs.size(), 0),
                    [&](Rank& rank) { return run_shapes(rank, outputs, shapes); }) == "");
  }
}

constexpr GemmType bf16 = GemmType::bf16, fp16 = GemmType::fp16, fp32 = GemmType::fp32;

}  // namespace

// Of 5 rows the third of three ranks has one, of 4 none, and of 1 the first alone has any.
TEST_CASE("inside a node rows are summed by their owners, launch after launch", "[emulation]") {
  std::vector<Shape> shapes;
  for (const bool is_direct : {false, true}) {
    for (const bool is_paced : {false, true}) {
      if (is_direct && is_paced) continue;
      const auto add = [&](Shape shape) {
        shape.reduction = Reduction::scatter;
        shape.is_direct = is_direct;
        shape.is_paced = is_paced;
        shapes.push_back(shape);
      };
      add({.m = 300, .n = 200, .margin = 8});
      add({.m = 400, .n = 184, .comm_type = fp16, .out_type = fp16});
      add({.m = 5, .n = 97, .comm_type = fp32, .out_type = fp16, .margin = 3, .accumulates = true});
      add({.m = 290, .n = 96, .comm_type = fp16, .out_type = fp32, .has_bias = true});
      add({.m = 4, .n = 300, .accumulates = true, .has_bias = true});
      add({.m = 1, .n = 1, .comm_type = fp32, .out_type = fp32});
    }
  }
  shapes.push_back({Reduction::scatter, 0, 64});
  shapes.push_back({Reduction::scatter, 70, 0});
  check_shapes(shapes);
}

TEST_CASE("inside a node all ranks get what owners have summed, launch after launch", "[emulation]") {
  std::vector<Shape> shapes;
  for (const bool is_direct : {false, true}) {
    for (const bool by_columns : {false, true}) {
      const auto add = [&](Shape shape) {
        shape.reduction = Reduction::two_shot;
        shape.is_direct = is_direct;
        shape.by_columns = by_columns;
        shapes.push_back(shape);
      };
      add({.m = 200, .n = 200, .margin = 4, .has_bias = true});
      add({.m = 135, .n = 264, .comm_type = fp16, .out_type = fp16, .margin = 8, .offers = Offers::all});
      add({.m = 70, .n = 121, .comm_type = fp32, .out_type = bf16, .margin = 1, .accumulates = true});
      add({.m = 4, .n = 300, .out_type = fp32, .is_paced = true, .has_bias = true, .offers = Offers::all});
      add({.m = 150, .n = 104, .margin = 16, .offers = Offers::all_but_one});
      add({.m = 1,
           .n = 33,
           .comm_type = fp16,
           .out_type = fp32,
           .margin = 3,
           .accumulates = true,
           .has_bias = true});
    }
  }
  shapes.push_back({Reduction::two_shot, 0, 64});
  shapes.push_back({Reduction::two_shot, 70, 0, true});
  check_shapes(shapes);
}

TEST_CASE("inside a node all ranks sum what each has sent to all, launch after launch", "[emulation]") {
  check_shapes({{Reduction::one_shot, 150, 200, true, bf16, bf16, 8},
                {.reduction = Reduction::one_shot,
                 .m = 64,
                 .n = 99,
                 .is_direct = true,
                 .comm_type = fp32,
                 .out_type = fp16,
                 .margin = 5,
                 .accumulates = true,
                 .has_bias = true},
                {Reduction::one_shot, 3, 300, true, fp16, fp32},
                {Reduction::one_shot, 0, 64, true}});
}

}  // namespace test
}  // namespace mk
