// SPDX-License-Identifier: MIT
// MoE dispatch + GEMM between nodes on emulated warps and host memory, over the real transports: counts, the
// verdict, packets, puts, arrivals and forwards of several launches in a row, whose tokens go elsewhere each
// time; indices that are wrong; a rank that does not come up with its packets. The code is the kernel's own;
// only the product is missing, and someone who waits for all rows stands in for it.
#include "shim/device_words.h"

#include <atomic>
#include <vector>

#include "../support/catch.h"
#include "dispatch_rank.h"
#include "kernels/device/partial_sums.cuh"
#include "kernels/ops/moe_dispatch_gemm/cuda_network_kernel.cuh"

namespace mk {

struct EmulatedConfig {
  static constexpr int BLOCK_M = 128;
  static constexpr int NUM_CONSUMER_WARPGROUPS = 2;  // so that they push first
  static constexpr bool IS_LARGE = false;            // so that push CTAs compute in the end
  static constexpr int NUM_THREADS = 96;  // two push warps and the one that signals; the network's three
};
template <>
struct moe::ProductStorage<EmulatedConfig> {
  uint8_t bytes[16];
};

namespace test {
namespace {

using moe_dispatch_gemm::NetworkParams;
using moe_dispatch_gemm::RowOrigin;
using Smem = moe_dispatch_gemm::NetworkStorage<EmulatedConfig>;

struct Shape : ExpertShape {
  int64_t chunk_bytes = 4096;
  bool reads_record = false;
};

constexpr int kComputeCtas = 1;
constexpr int kPushCtas = 2;
constexpr int kCtas = kComputeCtas + kPushCtas + 1;

class NetworkDispatchRank : public DispatchRank {
 public:
  using DispatchRank::DispatchRank;

  NetworkParams params(const Shape& shape, uint64_t seed) {
    MoeCall call = make_call(shape, seed, shape.reads_record);
    call.tuning.chunk_bytes = shape.chunk_bytes;
    const MoePlan plan = this->plan(call);
    NetworkParams params{};
    describe(call, plan, &params);
    params.num_compute_ctas = kComputeCtas;
    params.nodes = plan.network.nodes;
    params.chunks = plan.network.chunks;
    params.network = plan.network.layout;
    params.num_split = static_cast<int>((seed + static_cast<uint64_t>(rank_.rank)) % 3);
    params.numbers = plan.network.numbers;
    return params;
  }

  // A launch but for its product: what it would have waited for, and then found.
  std::string launch(const NetworkParams& params) {
    std::vector<std::vector<uint8_t>> smem(kCtas, std::vector<uint8_t>(sizeof(Smem) + 1024));
    std::string wrong;
    num_products_ = 0;
    emulation::run_ctas(kCtas, EmulatedConfig::NUM_THREADS / 32, [&] {
      auto address = reinterpret_cast<uintptr_t>(smem[blockIdx.x].data());
      Smem& storage = *reinterpret_cast<Smem*>((address + 1023) / 1024 * 1024);
      moe_dispatch_gemm::run_between_nodes<EmulatedConfig>(params, storage, [&](const RankLaunch& launch) {
        if (threadIdx.x == 0) ++num_products_;
        if (threadIdx.x >= 32 || static_cast<int>(blockIdx.x) >= kComputeCtas) return;
        const std::string text = consume(launch, params, storage.tables);
        if (threadIdx.x == 0) wrong = text;
      });
    });
    return wrong;
  }
  // CTAs that have come to the product in the last launch.
  int num_products() const { return num_products_; }

 private:
  // A warp: all rows of this rank's experts, block by block.
  std::string consume(const RankLaunch& launch, const NetworkParams& params,
                      const moe_dispatch_gemm::Tables& tables) const {
    const moe::CudaRouting& routing = params.routing;
    const int first = routing.first_expert(routing.rank);
    for (int local = 0; local < routing.num_experts(routing.rank); ++local) {
      const std::vector<Row> expected = rows_of(first + local);
      const int64_t begin = tables.rows[first + local] - tables.rows[first];
      if (tables.rows[first + local + 1] - tables.rows[first + local] != expected.size())
        return format("expert %d has other rows; ", first + local);
      for (size_t block = 0; block * moe::BLOCK_ROWS < expected.size(); ++block) {
        if (!moe_dispatch_gemm::wait_block(launch, params, tables, DeviceRole::compute, local,
                                           static_cast<int>(block)))
          return "";  // the launch says why
        const size_t end = std::min(expected.size(), (block + 1) * moe::BLOCK_ROWS);
        for (size_t i = block * moe::BLOCK_ROWS; threadIdx.x == 0 && i < end; ++i) {
          if (!is_right(launch, params, begin + static_cast<int64_t>(i), expected[i]))
            return format("row %zu of expert %d is wrong; ", i, first + local);
        }
      }
    }
    return "";
  }
  bool is_right(const RankLaunch& launch, const NetworkParams& params, int64_t row, const Row& from) const {
    const auto item = static_cast<int64_t>(from.item), token = item / params.routing.topk;
    const auto* const found =
        reinterpret_cast<const uint16_t*>(launch.area(rank_.rank, static_cast<size_t>(params.layout.row(row))));
    for (int64_t column = 0; column < params.layout.row_bytes / 2; ++column) {
      if (found[column] != element(seed_, from.source, token, column)) return false;
    }
    const auto& origin = *reinterpret_cast<const RowOrigin*>(
        launch.area(rank_.rank, static_cast<size_t>(params.layout.origin(row))));
    return origin.token == token && origin.rank == from.source && origin.k == item % params.routing.topk &&
           origin.factor == factor(seed_, from.source, item);
  }

  std::atomic<int> num_products_ = 0;
};

std::string run_launches(NetworkDispatchRank& dispatch, Rank& rank, const Shape& shape, uint64_t first_seed,
                         int launches) {
  EmulatedGpu& gpu = dispatch.gpu();
  for (int turn = 0; turn < launches; ++turn) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(turn);
    const uint64_t epoch = gpu.epoch() + 1;
    // A dispatch by the record follows the one that wrote it.
    for (const bool reads_record : {false, true}) {
      if (reads_record && !shape.reads_record) break;
      Shape one = shape;
      one.reads_record = reads_record;
      const NetworkParams params = dispatch.params(one, seed);
      const std::string wrong = dispatch.launch(params);
      if (const std::string sentence = gpu.sentence(); !sentence.empty()) return sentence + "; ";
      if (!wrong.empty()) return wrong;
      MK_EXPECT(dispatch.num_products() == kComputeCtas + kPushCtas);
      if (const std::string record = dispatch.wrong_record(params); !record.empty()) return record;
      MK_EXPECT(gpu.is_idle());
      MK_EXPECT(gpu.is_clean());
      MK_EXPECT(rank.endpoint->completed() == params.comm.network.queue.state->head);
    }
    MK_EXPECT(gpu.epoch() == epoch + (shape.reads_record ? 1 : 0));
  }
  return "";
}

// With a sanitizer the first and the fourth.
const std::vector<std::vector<int>> kTopologies = {{0, 0, 1, 1}, {0, 1},       {0, 1, 0, 1},
                                                   {0, 0, 0, 1}, {0, 1, 2, 3}, {0, 0, 1, 1, 2, 2}};

}  // namespace

TEST_CASE("tokens travel between nodes and inside them, launch after launch", "[emulation]") {
  const std::vector<int> nodes = GENERATE(from_range(fewer_if_slow(kTopologies)));
  for (const BackendCase& backend : fewer_if_slow(backend_cases())) {
    INFO(backend.backend << " seed " << backend.seed << " " << backend.environment << ", " << nodes.size()
                         << " ranks");
    CHECK(run_ranks(RankKind::threads, backend, nodes, [&](Rank& rank) -> std::string {
            NetworkDispatchRank dispatch(rank);
            MK_EXPECT_OK(dispatch.set_up(kCtas));
            MK_EXPECT(rank.barrier());
            uint64_t seed = 1;
            for (const Shape& shape :
                 {Shape{{40, 64, 8, 2}}, Shape{{7, 8, 3, 3}, 512 << 10}, Shape{{150, 16, 12, 8}, 1000},
                  Shape{{20, 8 * 640, 5, 4}}, Shape{{200, 24, 7, 1, true}, 2000},
                  Shape{{50, 128, 40, 6}, 3000, true}}) {
              if (std::string text = run_launches(dispatch, rank, shape, seed, 2); !text.empty()) {
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

TEST_CASE("an index that is none moves nothing on any rank, and the next launch is as ever", "[emulation]") {
  const std::vector<int> nodes = {0, 0, 1, 1};
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          NetworkDispatchRank dispatch(rank);
          MK_EXPECT_OK(dispatch.set_up(kCtas));
          MK_EXPECT(rank.barrier());
          const Shape shape{{40, 64, 8, 2}};
          for (uint64_t seed = 1; seed < 5; ++seed) {
            const NetworkParams params = dispatch.params(shape, seed);
            const bool has_items = experts_of(shape, seed, 3).size() > 4;
            if (rank.rank == 3 && has_items) dispatch.spoil_index(4, 8);
            const std::string wrong = dispatch.launch(params);
            MK_EXPECT(wrong.empty());
            if (has_items) MK_EXPECT(dispatch.gpu().error().status == MK_ERROR_DATA);
            if (has_items) MK_EXPECT(dispatch.gpu().error().rank == 3);
            MK_EXPECT(!rank.abort.raised());
            MK_EXPECT(dispatch.gpu().is_clean());
            MK_EXPECT(rank.endpoint->completed() == params.comm.network.queue.state->head);
          }
          MK_EXPECT(rank.barrier());
          return "";
        }) == "");
}

TEST_CASE("who waits for packets that do not come says for what", "[emulation]") {
  const std::vector<int> nodes = {0, 1};
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          NetworkDispatchRank dispatch(rank);
          MK_EXPECT_OK(dispatch.set_up(kCtas, rank.rank == 0 ? 3000 : kPatienceMs));
          MK_EXPECT(rank.barrier());
          const Shape shape{{40, 64, 8, 4}};
          NetworkParams params = dispatch.params(shape, 3);
          // Rank 1 puts under other numbers.
          if (rank.rank == 1) params.numbers.max_chunks = 600;
          dispatch.launch(params);
          if (rank.rank == 0) {
            const mk_async_error_t error = dispatch.gpu().error();
            MK_EXPECT(error.status == MK_ERROR_TIMEOUT && error.rank == 1);
          }
          MK_EXPECT(rank.barrier());
          rank.abort.raise(Status(MK_ERROR_TIMEOUT, "as a communicator would"));
          return "";
        }) == "");
}

}  // namespace test
}  // namespace mk
