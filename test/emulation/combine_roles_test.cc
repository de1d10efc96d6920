// SPDX-License-Identifier: MIT
// MoE GEMM + combine between nodes on emulated warps and host memory, over the real transports: counts, the
// verdict, pushes, routes, node sums, puts, arrivals and last sums of several launches in a row, each element
// compared with loops that add in the order that is promised; records that are wrong; a rank whose routes do
// not come. The code is the kernel's own; only the product is missing, and someone who leaves its rows in a
// random order stands in for it. Areas are filled with NaN after each launch.
#include "shim/device_words.h"

#include <vector>

#include "../support/catch.h"
#include "combine_rank.h"
#include "kernels/device/partial_sums.cuh"
#include "kernels/ops/moe_gemm_combine/cuda_network_kernel.cuh"

namespace mk {

struct EmulatedConfig {
  static constexpr bool IS_LARGE = true;
  static constexpr int BLOCK_M = 128;
  static constexpr int NUM_THREADS = 96;  // two push warps and the one that signals; the network's three
  static constexpr int NUM_CONSUMER_WARPS = 2;
};
template <>
struct moe::ProductStorage<EmulatedConfig> {
  uint8_t bytes[16];
};

namespace test {
namespace {

using moe_gemm_combine::NetworkParams;
using Smem = moe_gemm_combine::NetworkStorage<EmulatedConfig>;

constexpr int kComputeCtas = 2;
constexpr int kPushCtas = 1;
constexpr int kRelayCtas = 2;
constexpr int kCtas = kComputeCtas + kPushCtas + kRelayCtas + 1;

class NetworkCombineRank : public CombineRank {
 public:
  using CombineRank::CombineRank;

  NetworkParams params(const CombineShape& shape, uint64_t seed) {
    const MoeCall call = make_call(shape, seed);
    const MoePlan plan = this->plan(call);
    NetworkParams params{};
    describe(call, plan, &params);
    params.routing.num_counting_ctas = 3;
    params.num_compute_ctas = kComputeCtas;
    params.nodes = plan.network.nodes;
    params.route_chunks = plan.network.route_chunks;
    params.sum_chunks = plan.network.sum_chunks;
    params.network = plan.network.sum_layout;
    params.num_split = static_cast<int>((seed + static_cast<uint64_t>(rank_.rank)) % 3);
    params.numbers = plan.network.sum_numbers;
    params.num_push_ctas = kPushCtas;
    params.num_relay_ctas = kRelayCtas;
    return params;
  }

  void launch(const NetworkParams& params) {
    std::vector<std::vector<uint8_t>> smem(kCtas, std::vector<uint8_t>(sizeof(Smem) + 1024));
    emulation::run_ctas(kCtas, EmulatedConfig::NUM_THREADS / 32, [&] {
      auto address = reinterpret_cast<uintptr_t>(smem[blockIdx.x].data());
      Smem& storage = *reinterpret_cast<Smem*>((address + 1023) / 1024 * 1024);
      moe_gemm_combine::run_between_nodes<EmulatedConfig>(params, storage, [&](const RankLaunch& launch) {
        if (threadIdx.x == 0) moe_gemm_combine::sums_init(storage.sums());
        __syncthreads();
        if (threadIdx.x < 32) produce(launch, params, storage.tables);
        constexpr int kWarps = EmulatedConfig::NUM_THREADS / 32;
        moe_gemm_combine::sum_own_tokens(
            launch, params, storage.tables, storage.network, kComputeCtas * kWarps,
            moe_gemm_combine::SumBuffers<kWarps>(storage.sums(), static_cast<int>(threadIdx.x / 32)));
      });
    });
  }

 private:
  float product(const Row& row, int, int64_t column) const override {
    return number_of(seed_, row.source, row.item, static_cast<uint64_t>(column));
  }

  // A warp of a CTA that computes: its blocks of rows, in whatever order.
  void produce(const RankLaunch& launch, const NetworkParams& params,
               const moe_gemm_combine::Tables& tables) const {
    const moe::CudaRouting& routing = params.routing;
    const int first = routing.first_expert(routing.rank);
    const int num_experts = routing.num_experts(routing.rank);
    std::vector<uint32_t> blocks;
    for (uint32_t block = blockIdx.x; num_experts > 0 && block < tables.blocks[num_experts];
         block += kComputeCtas)
      blocks.push_back(block);
    std::mt19937_64 random(seed_ * 7 + blockIdx.x);
    std::shuffle(blocks.begin(), blocks.end(), random);
    for (const uint32_t block : blocks) {
      const int local = moe::find_interval(tables.blocks, num_experts, block);
      if (threadIdx.x == 0) {
        for (uint64_t pause = random() % 4; pause > 0; --pause) __nanosleep(1000);
        leave_rows(launch, params, tables, first + local, local, block - tables.blocks[local]);
        launch.raise_flag(routing.rank, static_cast<int>(moe_gemm_combine::HALF_FLAGS + block));
      }
      __syncwarp();
    }
  }
  void leave_rows(const RankLaunch& launch, const NetworkParams& params, const moe_gemm_combine::Tables& tables,
                  int expert, int local, uint32_t block) const {
    const std::vector<Row> rows = rows_of(expert);
    const size_t begin = size_t{block} * moe::BLOCK_ROWS;
    for (size_t i = begin; i < std::min(rows.size(), begin + moe::BLOCK_ROWS); ++i) {
      const int64_t at = params.layout.product_row(tables.home_rows[shape_.experts],
                                                   static_cast<int64_t>(tables.rows[local] + i));
      std::byte* const to = launch.area(rank_.rank, static_cast<size_t>(at));
      for (int64_t column = 0; column < shape_.hidden; ++column)
        store_element(to, shape_.out_dtype, column, product(rows[i], expert, column));
    }
  }
};

std::string run_launches(NetworkCombineRank& combine, Rank& rank, const CombineShape& shape,
                         uint64_t first_seed, int launches) {
  EmulatedGpu& gpu = combine.gpu();
  for (int turn = 0; turn < launches; ++turn) {
    const uint64_t epoch = gpu.epoch() + 1;
    const NetworkParams params = combine.params(shape, first_seed + static_cast<uint64_t>(turn));
    combine.launch(params);
    if (const std::string sentence = gpu.sentence(); !sentence.empty()) return sentence + "; ";
    combine.poison(epoch);
    if (const std::string wrong = combine.wrong_result(); !wrong.empty()) return wrong;
    MK_EXPECT(gpu.is_idle());
    MK_EXPECT(gpu.epoch() == epoch);
    MK_EXPECT(gpu.is_clean());
    MK_EXPECT(rank.endpoint->completed() == params.comm.network.queue.state->head);
  }
  return "";
}

// With a sanitizer the first and the fourth.
const std::vector<std::vector<int>> kTopologies = {{0, 0, 1, 1}, {0, 1},       {0, 1, 0, 1},
                                                   {0, 0, 0, 1}, {0, 1, 2, 3}, {0, 0, 1, 1, 2, 2}};

}  // namespace

TEST_CASE("tokens are summed in nodes and at home, launch after launch", "[emulation]") {
  const std::vector<int> nodes = GENERATE(from_range(fewer_if_slow(kTopologies)));
  for (const BackendCase& backend : fewer_if_slow(backend_cases())) {
    INFO(backend.backend << " seed " << backend.seed << " " << backend.environment << ", " << nodes.size()
                         << " ranks");
    CHECK(run_ranks(RankKind::threads, backend, nodes, [&](Rank& rank) -> std::string {
            NetworkCombineRank combine(rank);
            MK_EXPECT_OK(combine.set_up(kCtas));
            MK_EXPECT(rank.barrier());
            uint64_t seed = 1;
            for (const CombineShape& shape :
                 {CombineShape{{40, 64, 8, 2}}, CombineShape{{7, 8, 3, 3}, MK_DTYPE_FP32, 512 << 10},
                  CombineShape{{80, 16, 12, 8}, MK_DTYPE_FP16, 1000},
                  CombineShape{{12, 8 * 640, 5, 4}, MK_DTYPE_BF16, 40000},
                  CombineShape{{150, 24, 7, 1, true}, MK_DTYPE_BF16, 500},
                  CombineShape{{30, 40, 40, 16}, MK_DTYPE_FP32, 2000}}) {
              if (std::string text = run_launches(combine, rank, shape, seed, 2); !text.empty()) {
                return format("tokens %lld, hidden %lld, experts %d, topk %d: ", (long long)shape.tokens,
                              (long long)shape.hidden, shape.experts, shape.topk) +
                       text;
              }
              seed += 2;
            }
            MK_EXPECT(rank.barrier());
            return rank.failure();
          }) == "");
  }
}

TEST_CASE("a record that is none moves nothing on any rank, and the next launch is as ever", "[emulation]") {
  const std::vector<int> nodes = {0, 0, 1, 1};
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          NetworkCombineRank combine(rank);
          MK_EXPECT_OK(combine.set_up(kCtas));
          MK_EXPECT(rank.barrier());
          const CombineShape shape{{40, 64, 8, 2}};
          for (uint64_t seed = 1; seed < 5; ++seed) {
            const NetworkParams params = combine.params(shape, seed);
            const bool has_items = experts_of(shape, seed, 3).size() > 4;
            if (rank.rank == 3 && has_items) combine.record_item(4).expert = 8;
            combine.launch(params);
            if (has_items) MK_EXPECT(combine.gpu().error().status == MK_ERROR_DATA);
            if (has_items) MK_EXPECT(combine.gpu().error().rank == 3);
            MK_EXPECT(!rank.abort.raised());
            MK_EXPECT(combine.gpu().is_clean());
            MK_EXPECT(rank.endpoint->completed() == params.comm.network.queue.state->head);
          }
          MK_EXPECT(rank.barrier());
          return "";
        }) == "");
}

TEST_CASE("slots that no row has are left out, and nothing waits for them", "[emulation]") {
  const std::vector<int> nodes = {0, 0, 1, 1};
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          NetworkCombineRank combine(rank);
          MK_EXPECT_OK(combine.set_up(kCtas));
          MK_EXPECT(rank.barrier());
          const CombineShape shape{{40, 64, 8, 4}};
          for (uint64_t seed = 1; seed < 5; ++seed) {
            const NetworkParams params = combine.params(shape, seed);
            for (size_t i = 0; rank.rank == 1 && i < combine.num_items(); i += 3)
              combine.record_item(i).slot = i % 2 == 0 ? 1 << 20 : -5;
            combine.launch(params);
            MK_EXPECT(combine.gpu().sentence().empty());
            if (rank.rank != 1) MK_EXPECT(combine.wrong_result().empty());
            MK_EXPECT(combine.gpu().is_clean());
          }
          MK_EXPECT(rank.barrier());
          return "";
        }) == "");
}

TEST_CASE("who waits for routes, or for sums, that do not come says for which", "[emulation]") {
  const std::vector<int> nodes = {0, 1};
  const bool has_routes = GENERATE(false, true);
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          NetworkCombineRank combine(rank);
          MK_EXPECT_OK(combine.set_up(kCtas, rank.rank == 0 ? 1000 : 5000));
          MK_EXPECT(rank.barrier());
          const CombineShape shape{{40, 64, 8, 4}};
          const auto has_tokens = [&](uint64_t seed, int one) {
            return experts_of(shape, seed, one).size() > 40;
          };
          uint64_t seed = 1;
          while (!has_tokens(seed, 0) || !has_tokens(seed, 1)) ++seed;
          NetworkParams params = combine.params(shape, seed);
          // Rank 1 puts under other numbers.
          if (rank.rank == 1 && !has_routes) params.numbers.max_route_chunks = 70;
          if (rank.rank == 1 && has_routes) params.numbers.max_sum_chunks = 600;
          combine.launch(params);
          if (rank.rank == 0) {
            const mk_async_error_t error = combine.gpu().error();
            const std::string sentence = combine.gpu().sentence();
            MK_EXPECT(error.status == MK_ERROR_TIMEOUT && error.rank == 1);
            // Without routes there are no sums either; which is missed first is open.
            const bool is_named = sentence.find("partial") != std::string::npos ||
                                  (!has_routes && sentence.find("chunk") != std::string::npos);
            MK_EXPECT(is_named);
          }
          MK_EXPECT(rank.barrier());
          rank.abort.raise(Status(MK_ERROR_TIMEOUT, "as a communicator would"));
          return "";
        }) == "");
}

}  // namespace test
}  // namespace mk
