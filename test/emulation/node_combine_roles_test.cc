// SPDX-License-Identifier: MIT
// MoE GEMM + combine inside a node on emulated warps and host memory: counts, the verdict, tiles of products
// and who tells of them, pushes home, waits for them and sums of several launches in a row, each element
// compared with loops that add in the order that is promised; records that are wrong. The code is the kernel's
// own, but for the tensor cores. Areas are filled with NaN after each launch.
#include "shim/device_words.h"

#include <vector>

#include "../support/catch.h"
#include "combine_rank.h"
#include "emulated_product.h"
#include "kernels/ops/moe_gemm_combine/cuda_kernel.cuh"

namespace mk::test {
namespace {

using moe_gemm_combine::CudaParams;

constexpr int kComputeCtas = 2;
constexpr int kMostPushCtas = 2;

struct Shape : ExpertShape {
  int depth;  // of the products
  int push_ctas = 1;
};

class NodeCombineRank : public CombineRank {
 public:
  using CombineRank::CombineRank;

  CudaParams params(const Shape& shape, uint64_t seed) {
    const MoeCall call = make_call({shape, MK_DTYPE_FP32}, seed);
    depth_ = shape.depth;
    CudaParams params{};
    describe(call, plan(call), &params);
    params.routing.num_counting_ctas = 1 + static_cast<int>(seed) % (kComputeCtas + shape.push_ctas);
    params.products.ldc = params.products.n = static_cast<int>(shape.hidden);
    params.products.rows_aligned = true;
    params.num_n_tiles = static_cast<int>(ceil_div(shape.hidden, EmulatedConfig<true>::BLOCK_N));
    params.num_k_steps = static_cast<int>(ceil_div(depth_, EmulatedConfig<true>::BLOCK_K));
    params.group_m = 2;
    params.num_compute_ctas = kComputeCtas;
    rows_.clear();
    for (int local = 0; local < num_experts(); ++local) {
      for (const Row& row : rows_of(first_expert() + local))
        for (int64_t k = 0; k < depth_; ++k) rows_.push_back(element(row, k));
    }
    weights_.clear();
    for (int local = 0; local < num_experts(); ++local) {
      for (int64_t k = 0; k < depth_; ++k)
        for (int64_t column = 0; column < shape.hidden; ++column)
          weights_.push_back(expert_weight(first_expert() + local, k, column));
    }
    // How many rows there are the kernel finds out.
    params.map_rows = emulated_map(rows_.data(), {depth_, 1, 1}, depth_ * 2);
    params.map_w = emulated_map(weights_.data(), {shape.hidden, depth_, num_experts()}, shape.hidden * 2);
    return params;
  }

  // As the kernel is.
  template <class Config>
  void launch(const CudaParams& params, int push_ctas) {
    using Smem = moe_gemm_combine::Storage<Config>;
    run_ctas_of<Config, Smem>(kComputeCtas + push_ctas, [&](Smem& smem) {
      const RankLaunch launch(params.comm);
      launch.begin_cta();
      moe::route(launch, params.comm, params.routing, smem.counting(), smem.decision,
                 [&](int, int64_t received, int64_t sent) {
                   return static_cast<size_t>(params.layout.bytes(received, sent));
                 });
      if (smem.decision.has_counts && smem.decision.verdict.kind == moe::Verdict::go)
        moe_gemm_combine::fill_tables<Config::NUM_THREADS>(launch, params, smem.tables);
      if (moe::finish_routing(launch, params.comm, params.routing, smem.decision)) {
        if (static_cast<int>(blockIdx.x) >= params.num_compute_ctas) {
          push_cta_init(smem.push());
          moe_gemm_combine::push_products(launch, params, smem.tables, smem.push());
        } else {
          moe_gemm_combine::run_product_cta<Config>(launch, params, smem, [&](auto&& buffers) {
            moe_gemm_combine::sum_tokens(launch, params, params.num_compute_ctas * Config::NUM_CONSUMER_WARPS,
                                         buffers, [&](int64_t token, moe_gemm_combine::TokenRows* rows) {
                                           return moe_gemm_combine::find_rows(launch, params, smem.tables,
                                                                              token, rows);
                                         });
          });
        }
      }
      launch.end_cta();
    });
  }

 private:
  uint16_t element(const Row& row, int64_t k) const {
    return static_cast<uint16_t>(seed_ * 40503 + static_cast<uint64_t>(row.source) * 9973 + row.item * 331 +
                                 static_cast<uint64_t>(k) * 7);
  }
  uint16_t expert_weight(int expert, int64_t k, int64_t column) const {
    return static_cast<uint16_t>(seed_ * 12289 + static_cast<uint64_t>(expert) * 4099 +
                                 static_cast<uint64_t>(k) * 257 + static_cast<uint64_t>(column) * 31);
  }
  float product(const Row& row, int expert, int64_t column) const override {
    uint32_t sum = 0;
    for (int64_t k = 0; k < depth_; ++k) sum += uint32_t{element(row, k)} * expert_weight(expert, k, column);
    return static_cast<float>(sum % 65536);
  }

  int64_t depth_ = 0;
  std::vector<uint16_t> rows_, weights_;
};

template <class Config>
std::string run_node(int nranks, const std::vector<Shape>& shapes) {
  const auto run = [](NodeCombineRank& combine, const Shape& shape, uint64_t seed) -> std::string {
    EmulatedGpu& gpu = combine.gpu();
    const uint64_t epoch = gpu.epoch() + 1;
    const CudaParams params = combine.params(shape, seed);
    combine.launch<Config>(params, shape.push_ctas);
    if (gpu.sentence().empty()) combine.poison(epoch);
    MK_EXPECT(gpu.epoch() == epoch && gpu.is_idle());
    MK_EXPECT(gpu.is_clean());
    return combine.wrong_result();
  };
  return run_in_node<NodeCombineRank>(nranks, kComputeCtas + kMostPushCtas, shapes, run);
}

}  // namespace

TEST_CASE("inside a node tokens are summed when their rows are home", "[emulation]") {
  const int nranks = GENERATE(1, 2, 3);
  CAPTURE(nranks);
  const std::vector<Shape> shapes = {Shape{{40, 64, 8, 2}, 72},       Shape{{300, 24, 3, 2}, 8, 2},
                                     Shape{{6, 520, 5, 4}, 8},        Shape{{5, 8, 2, 2}, 200},
                                     Shape{{150, 20, 7, 1, true}, 8}, Shape{{30, 40, 24, 16}, 8}};
  SECTION("rows of a tile stored beside the next") {
    CHECK(run_node<EmulatedConfig<true>>(nranks, shapes) == "");
  }
  SECTION("rows of a tile stored at once") { CHECK(run_node<EmulatedConfig<false>>(nranks, shapes) == ""); }
}

TEST_CASE("inside a node slots that no row has are left out, and a record that is none moves nothing",
          "[emulation]") {
  const std::vector<int> nodes(3, 0);
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          NodeCombineRank combine(rank);
          MK_EXPECT_OK(combine.set_up(kComputeCtas + kMostPushCtas));
          MK_EXPECT(rank.barrier());
          const Shape shape{{40, 64, 8, 4}, 8};
          for (uint64_t seed = 1; seed < 7; ++seed) {
            const bool spoils_expert = seed % 2 == 0 && experts_of(shape, seed, 2).size() > 4;
            const CudaParams params = combine.params(shape, seed);
            if (rank.rank == 2 && spoils_expert) combine.record_item(4).expert = 8;
            for (size_t i = 0; rank.rank == 1 && seed % 2 != 0 && i < combine.num_items(); i += 3)
              combine.record_item(i).slot = i % 2 == 0 ? 1 << 20 : -5;
            combine.launch<EmulatedConfig<true>>(params, shape.push_ctas);
            if (spoils_expert) {
              MK_EXPECT(combine.gpu().error().status == MK_ERROR_DATA);
              MK_EXPECT(combine.gpu().error().rank == 2);
            } else if (rank.rank != 1 || seed % 2 == 0) {
              MK_EXPECT(combine.wrong_result().empty());
            }
            MK_EXPECT(!rank.abort.raised());
            MK_EXPECT(combine.gpu().is_clean());
          }
          MK_EXPECT(rank.barrier());
          return "";
        }) == "");
}

}  // namespace mk::test
