// SPDX-License-Identifier: MIT
// MoE dispatch + GEMM inside a node on emulated warps and host memory: counts, the verdict, pushes by CTAs that
// do nothing else and by those that compute, tiles that are dealt out or known beforehand, waits for their
// rows, records, dispatched rows, in several launches in a row, whose tokens go elsewhere each time; indices
// that are wrong. The code is the kernel's own, but for the tensor cores.
#include "shim/device_words.h"

#include <vector>

#include "../support/catch.h"
#include "dispatch_rank.h"
#include "emulated_product.h"
#include "kernels/ops/moe_dispatch_gemm/cuda_kernel.cuh"

namespace mk::test {
namespace {

using moe_dispatch_gemm::CudaParams;

constexpr int kComputeCtas = 2;
constexpr int kMostPushCtas = 2;

struct Shape : ExpertShape {
  int columns;  // of y
  int push_ctas = 1;
  bool copies_rows = false;  // to where the caller wants them
  bool reads_record = false;
};

class NodeDispatchRank : public DispatchRank {
 public:
  using DispatchRank::DispatchRank;

  CudaParams params(const Shape& shape, uint64_t seed, bool reads_record) {
    MoeCall call = make_call(shape, seed, reads_record);
    call.inter = columns_ = shape.columns;
    CudaParams params{};
    describe(call, plan(call), &params);
    params.routing.num_counting_ctas = 1 + static_cast<int>(seed) % (kComputeCtas + shape.push_ctas);
    params.num_n_tiles = static_cast<int>(ceil_div(columns_, EmulatedConfig<true>::BLOCK_N));
    params.num_k_steps = static_cast<int>(ceil_div(call.hidden, EmulatedConfig<true>::BLOCK_K));
    params.group_m = 2;
    params.num_compute_ctas = kComputeCtas;
    weights_.resize(static_cast<size_t>(num_experts() * call.hidden * columns_));
    for (size_t i = 0; i < weights_.size(); ++i) weights_[i] = static_cast<uint16_t>((i + seed) * 40503 >> 5);
    params.map_w = emulated_map(weights_.data(), {columns_, call.hidden, num_experts()}, columns_ * 2);
    for (int bank = 0; bank < 2; ++bank) {
      params.map_rows[bank] = emulated_map(gpu_.area(static_cast<uint64_t>(bank), 0) + params.layout.rows(),
                                           {call.hidden, call.capacity_rows, 1}, call.hidden * 2);
    }
    y_.assign(static_cast<size_t>(call.capacity_rows * columns_), kNotWritten);
    params.epilogue.c = y_.data();
    params.epilogue.ldc = params.epilogue.n = columns_;
    params.dispatched_pitch = call.hidden * 2 + 16;
    dispatched_.assign(static_cast<size_t>(call.capacity_rows * params.dispatched_pitch / 2 + 8), 0xbeef);
    if (shape.copies_rows) params.dispatched_rows = reinterpret_cast<std::byte*>(dispatched_.data());
    return params;
  }

  // As the kernel is.
  template <class Config>
  void launch(const CudaParams& params, int push_ctas) {
    using Smem = moe_dispatch_gemm::Storage<Config>;
    run_ctas_of<Config, Smem>(kComputeCtas + push_ctas, [&](Smem& smem) {
      const RankLaunch launch(params.comm);
      launch.begin_cta();
      moe::route(launch, params.comm, params.routing, smem.counting(), smem.decision,
                 [&](int, int64_t, int64_t) { return static_cast<size_t>(params.layout.bytes()); });
      if (smem.decision.has_counts) {
        const bool goes_on = smem.decision.verdict.kind == moe::Verdict::go;
        if (goes_on) moe_dispatch_gemm::fill_tables<Config::NUM_THREADS>(launch, params, smem.tables);
        if (static_cast<int>(blockIdx.x) < params.routing.num_counting_ctas) {
          moe_dispatch_gemm::place_items<Config::NUM_THREADS>(launch, params, smem.tables, smem.counting(),
                                                              goes_on);
        }
        if (blockIdx.x == gridDim.x - 1 && params.routing.writes_record)
          moe_dispatch_gemm::begin_record<Config::NUM_THREADS>(params, smem.tables, smem.decision.verdict);
      }
      if (moe::finish_routing(launch, params.comm, params.routing, smem.decision)) {
        const bool pushes = static_cast<int>(blockIdx.x) >= params.num_compute_ctas;
        if (pushes) {
          moe_dispatch_gemm::run_push_cta<Config>(params, smem);
        } else {
          moe_dispatch_gemm::push_first_turn<Config>(params, smem);
        }
        if (!pushes || moe::DEALS_TILES<Config>)
          moe_dispatch_gemm::run_product_cta<Config>(launch, params, smem);
      }
      launch.end_cta();
    });
  }

  // What a launch has left; "" when all is right.
  std::string wrong_result(const CudaParams& params) const {
    const int64_t hidden = params.layout.row_bytes / 2;
    int64_t row = 0;
    for (int local = 0; local < num_experts(); ++local) {
      for (const Row& from : rows_of(first_expert() + local)) {
        if (std::string wrong = wrong_row(params, local, row, from); !wrong.empty())
          return format("row %lld, of expert %d: ", (long long)row, first_expert() + local) + wrong;
        ++row;
      }
    }
    for (size_t i = static_cast<size_t>(row * columns_); i < y_.size(); ++i)
      if (y_[i] != kNotWritten) return "y has more rows; ";
    if (params.dispatched_rows == nullptr) row = 0;
    for (size_t i = 0; i < dispatched_.size(); ++i) {
      const auto at = static_cast<int64_t>(i), pitch = params.dispatched_pitch / 2;
      if ((at / pitch >= row || at % pitch >= hidden) && dispatched_[i] != 0xbeef)
        return "more is dispatched; ";
    }
    return wrong_record(params);
  }

 private:
  static constexpr float kNotWritten = -1;

  std::string wrong_row(const CudaParams& params, int local, int64_t row, const Row& from) const {
    const int64_t hidden = params.layout.row_bytes / 2;
    const auto item = static_cast<int64_t>(from.item), token = item / topk_;
    std::vector<uint32_t> sums(static_cast<size_t>(columns_));
    for (int64_t k = 0; k < hidden; ++k) {
      const uint32_t x = element(seed_, from.source, token, k);
      const uint16_t* const w = &weights_[static_cast<size_t>((local * hidden + k) * columns_)];
      for (int64_t column = 0; column < columns_; ++column)
        sums[static_cast<size_t>(column)] += x * w[static_cast<size_t>(column)];
      if (params.dispatched_rows != nullptr &&
          dispatched_[static_cast<size_t>(row * params.dispatched_pitch / 2 + k)] != x)
        return format("column %lld is dispatched wrongly; ", (long long)k);
    }
    for (int64_t column = 0; column < columns_; ++column) {
      const float right =
          static_cast<float>(sums[static_cast<size_t>(column)] % 65536) * factor(seed_, from.source, item);
      if (y_[static_cast<size_t>(row * columns_ + column)] != right)
        return format("column %lld of y is wrong; ", (long long)column);
    }
    const moe::RecordView record{params.routing.record};
    const mk_moe_row_t& origin = record.rows()[row];
    if (origin.rank != from.source || origin.token != token || origin.k != item % topk_)
      return "the record has another origin; ";
    return "";
  }

  int64_t columns_ = 0;
  std::vector<uint16_t> weights_, dispatched_;
  std::vector<float> y_;
};

template <class Config>
std::string run_node(int nranks, const std::vector<Shape>& shapes) {
  const auto run = [](NodeDispatchRank& dispatch, const Shape& shape, uint64_t seed) -> std::string {
    EmulatedGpu& gpu = dispatch.gpu();
    for (const bool reads_record : {false, true}) {
      if (reads_record && !shape.reads_record) break;
      const uint64_t epoch = gpu.epoch() + 1;
      const CudaParams params = dispatch.params(shape, seed, reads_record);
      dispatch.launch<Config>(params, shape.push_ctas);
      if (gpu.sentence().empty()) dispatch.poison(epoch);
      MK_EXPECT(gpu.epoch() == epoch && gpu.is_idle());
      MK_EXPECT(gpu.is_clean());
      if (const std::string wrong = dispatch.wrong_result(params); !wrong.empty()) return wrong;
    }
    return "";
  };
  return run_in_node<NodeDispatchRank>(nranks, kComputeCtas + kMostPushCtas, shapes, run);
}

}  // namespace

TEST_CASE("inside a node a tile's rows are there when it is computed", "[emulation]") {
  const int nranks = GENERATE(1, 2, 3);
  CAPTURE(nranks);
  const std::vector<Shape> shapes = {Shape{{40, 64, 8, 2}, 24, 1, true},
                                     Shape{{240, 72, 3, 2}, 16, 2},
                                     Shape{{12, 8 * 640, 5, 4}, 8},
                                     Shape{{5, 8, 2, 2}, 40, 1, true},
                                     Shape{{150, 24, 7, 1, true}, 8, 1, true},
                                     Shape{{30, 136, 40, 6}, 16, 1, false, true}};
  SECTION("tiles known beforehand") { CHECK(run_node<EmulatedConfig<true>>(nranks, shapes) == ""); }
  SECTION("tiles dealt out") { CHECK(run_node<EmulatedConfig<false>>(nranks, shapes) == ""); }
}

TEST_CASE("inside a node an index that is none, or twice a token's, moves nothing", "[emulation]") {
  const std::vector<int> nodes(3, 0);
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          NodeDispatchRank dispatch(rank);
          MK_EXPECT_OK(dispatch.set_up(kComputeCtas + kMostPushCtas));
          MK_EXPECT(rank.barrier());
          const Shape shape{{40, 64, 8, 2}, 8};
          for (uint64_t seed = 1; seed < 7; ++seed) {
            const std::vector<int32_t> experts = experts_of(shape, seed, 2);
            const bool is_spoilt = experts.size() > 4 && (seed % 2 == 0 || experts[4] >= 0);
            const CudaParams params = dispatch.params(shape, seed, false);
            if (rank.rank == 2 && is_spoilt) {
              dispatch.spoil_index(seed % 2 == 0 ? 4 : 5, seed % 2 == 0 ? 8 : experts[4]);
            }
            dispatch.launch<EmulatedConfig<true>>(params, shape.push_ctas);
            if (is_spoilt) MK_EXPECT(dispatch.gpu().error().status == MK_ERROR_DATA);
            if (is_spoilt) MK_EXPECT(dispatch.gpu().error().rank == 2);
            if (!is_spoilt) MK_EXPECT(dispatch.wrong_result(params).empty());
            MK_EXPECT(!rank.abort.raised());
            MK_EXPECT(dispatch.gpu().is_clean());
          }
          MK_EXPECT(rank.barrier());
          return "";
        }) == "");
}

}  // namespace mk::test
