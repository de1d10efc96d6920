// SPDX-License-Identifier: MIT
// MoE dispatch + GEMM between nodes on emulated warps and host memory, over the real transports: counts, the
// verdict, packets, puts, arrivals and forwards of several launches in a row, whose tokens go elsewhere each
// time; indices that are wrong; a rank that does not come up with its packets. The code is the kernel's own;
// only the product is missing, and someone who waits for all rows stands in for it.
#include "shim/device_words.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <random>
#include <set>
#include <vector>

#include "../support/catch.h"
#include "emulated_gpu.h"
#include "kernels/cuda/moe_plan.h"
#include "kernels/device/partial_sums.cuh"
#include "kernels/ops/moe_dispatch_gemm/cuda_network_kernel.cuh"
#include "kernels/topology_arrays.h"

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

struct Shape {
  int64_t tokens;  // of a rank, at most
  int64_t hidden;
  int experts;
  int topk;
  int64_t chunk_bytes = 4096;
  bool is_skewed = false;
  bool reads_record = false;
};

constexpr int kComputeCtas = 1;
constexpr int kPushCtas = 2;
constexpr size_t kBankBytes = 8 << 20;

// Every rank can work out everyone's tokens.
struct Tokens {
  std::vector<int32_t> experts;  // [token * topk + k]
};
Tokens tokens_of(const Shape& shape, uint64_t seed, int rank) {
  std::mt19937_64 random(seed * 64 + static_cast<uint64_t>(rank));
  const int64_t count = (rank + static_cast<int>(seed)) % 3 == 0
                            ? static_cast<int64_t>(seed % 2)
                            : static_cast<int64_t>(random() % (shape.tokens + 1));
  Tokens made;
  for (int64_t token = 0; token < count; ++token) {
    std::set<int> taken = {-1};
    for (int k = 0; k < shape.topk; ++k) {
      int expert = static_cast<int>(random() % (shape.experts + 1)) - 1;
      if (shape.is_skewed) expert = k == 0 ? shape.experts - 1 : -1;
      made.experts.push_back(taken.insert(expert).second ? expert : -1);
    }
  }
  return made;
}
uint16_t element(uint64_t seed, int rank, int64_t token, int64_t column) {
  return static_cast<uint16_t>(seed * 40503 + static_cast<uint64_t>(rank) * 9973 +
                               static_cast<uint64_t>(token) * 331 + static_cast<uint64_t>(column) * 7);
}
float factor(uint64_t seed, int rank, int64_t item) {
  return static_cast<float>((seed * 3 + static_cast<uint64_t>(rank) * 5 + static_cast<uint64_t>(item)) % 97);
}

class DispatchRank {
 public:
  explicit DispatchRank(Rank& rank) : rank_(rank), gpu_(rank), arrays_(rank.topology) {}

  Status set_up(int64_t wait_timeout_ms = 60000) {
    return gpu_.set_up(kComputeCtas + kPushCtas + 1, kBankBytes, wait_timeout_ms);
  }
  EmulatedGpu& gpu() { return gpu_; }

  // As the launch makes them.
  NetworkParams params(const Shape& shape, uint64_t seed) {
    MoeCall call;
    call.op = MK_OPERATOR_MOE_DISPATCH_GEMM;
    tokens_ = tokens_of(shape, seed, rank_.rank);
    call.tokens = static_cast<int64_t>(tokens_.experts.size()) / shape.topk;
    call.hidden = shape.hidden;
    call.inter = 8;
    call.experts = shape.experts;
    call.topk = shape.topk;
    call.capacity_rows = shape.tokens * rank_.nranks * std::min(shape.topk, shape.experts);
    call.tuning.chunk_bytes = shape.chunk_bytes;
    record_.resize(static_cast<size_t>(
        moe::RecordLayout{shape.experts, shape.topk, call.tokens}.bytes(call.capacity_rows) / 16 + 1));
    call.routing = reinterpret_cast<mk_moe_routing_t*>(record_.data());
    call.routing_bytes = record_.size() * 16;
    call.use_routing = shape.reads_record;
    const Result<MoePlan> planned = moe_plan(call, rank_.nranks, 132, &arrays_.view());
    if (!planned.ok()) std::abort();  // Catch2 has no checks for several threads
    const MoePlan& plan = planned.value();
    NetworkParams params{};
    params.comm = gpu_.comm();
    params.comm.entry.op = MK_OPERATOR_MOE_DISPATCH_GEMM;
    params.comm.entry.output_offset = kNoOutput;
    params.comm.entry.shape[0] = shape.hidden;
    params.routing = cuda_routing(call, rank_.rank, rank_.nranks, arrays_.view().num_nodes);
    params.routing.topk_idx = tokens_.experts.data();
    params.routing.num_counting_ctas = 2;
    params.layout = plan.layout;
    params.num_compute_ctas = kComputeCtas;
    params.first_flag = rank_.nranks;
    params.blocks_per_source = plan.blocks_per_source;
    const auto row_bytes = static_cast<int>(plan.layout.row_bytes);
    params.unit_rows = moe::unit_rows_for(row_bytes);
    params.piece_rows = std::clamp(PUSH_CTA_PIECE_BYTES / row_bytes, 1, 32);
    params.piece_bytes =
        static_cast<int>(round_up(ceil_div(row_bytes, ceil_div(row_bytes, PUSH_CTA_PIECE_BYTES)), 16));
    params.x_pitch = shape.hidden * 2;
    rows_.resize(static_cast<size_t>(call.tokens * shape.hidden + 8));
    factors_.resize(tokens_.experts.size() + 1);
    for (int64_t token = 0; token < call.tokens; ++token) {
      for (int64_t column = 0; column < shape.hidden; ++column)
        rows_[static_cast<size_t>(token * shape.hidden + column)] = element(seed, rank_.rank, token, column);
    }
    for (size_t i = 0; i < tokens_.experts.size(); ++i)
      factors_[i] = factor(seed, rank_.rank, static_cast<int64_t>(i));
    params.x = reinterpret_cast<const std::byte*>(rows_.data());
    params.row_scale = factors_.data();
    params.nodes = plan.network.nodes;
    params.chunks = plan.network.chunks;
    params.network = plan.network.layout;
    params.num_split = static_cast<int>((seed + static_cast<uint64_t>(rank_.rank)) % 3);
    params.numbers = plan.network.numbers;
    return params;
  }

  // A launch but for its product: what it would have waited for, and then found.
  std::string launch(const NetworkParams& params, const Shape& shape, uint64_t seed) {
    std::vector<std::vector<uint8_t>> smem(kComputeCtas + kPushCtas + 1,
                                           std::vector<uint8_t>(sizeof(Smem) + 1024));
    std::string wrong;
    num_products_ = 0;
    emulation::run_ctas(kComputeCtas + kPushCtas + 1, EmulatedConfig::NUM_THREADS / 32, [&] {
      auto address = reinterpret_cast<uintptr_t>(smem[blockIdx.x].data());
      Smem& storage = *reinterpret_cast<Smem*>((address + 1023) / 1024 * 1024);
      moe_dispatch_gemm::run_between_nodes<EmulatedConfig>(params, storage, [&](const RankLaunch& launch) {
        if (threadIdx.x == 0) ++num_products_;
        if (threadIdx.x >= 32 || static_cast<int>(blockIdx.x) >= kComputeCtas) return;
        const std::string text = consume(launch, params, storage.tables, shape, seed);
        if (threadIdx.x == 0) wrong = text;
      });
    });
    return wrong;
  }
  // CTAs that have come to the product in the last launch.
  int num_products() const { return num_products_; }

  std::string wrong_record(const NetworkParams& params) const {
    const moe::RecordItem* const items = params.routing.items;
    std::vector<int> slots(static_cast<size_t>(params.routing.experts));
    for (size_t i = 0; i < tokens_.experts.size(); ++i) {
      const int expert = tokens_.experts[i];
      const int slot = expert < 0 ? 0 : slots[static_cast<size_t>(expert)]++;
      if (items[i].expert != expert || items[i].slot != slot)
        return format("item %zu of the record is %d, %d; ", i, items[i].expert, items[i].slot);
    }
    return params.routing.record->status == MK_SUCCESS ? "" : "the record has no success; ";
  }
  void spoil_index(size_t item, int32_t value) { tokens_.experts[item] = value; }
  size_t num_items() const { return tokens_.experts.size(); }

 private:
  // A warp: all rows of this rank's experts, block by block.
  std::string consume(const RankLaunch& launch, const NetworkParams& params,
                      const moe_dispatch_gemm::Tables& tables, const Shape& shape, uint64_t seed) const {
    const moe::CudaRouting& routing = params.routing;
    const int first = routing.first_expert(routing.rank);
    std::vector<Tokens> all;
    for (int rank = 0; rank < rank_.nranks; ++rank) all.push_back(tokens_of(shape, seed, rank));
    for (int local = 0; local < routing.num_experts(routing.rank); ++local) {
      std::vector<std::pair<int, int64_t>> expected;  // source, item
      for (int rank = 0; rank < rank_.nranks; ++rank) {
        const std::vector<int32_t>& items = all[static_cast<size_t>(rank)].experts;
        for (size_t i = 0; i < items.size(); ++i) {
          if (items[i] == first + local) expected.emplace_back(rank, i);
        }
      }
      const int64_t begin = tables.rows[first + local] - tables.rows[first];
      if (tables.rows[first + local + 1] - tables.rows[first + local] != expected.size())
        return format("expert %d has other rows; ", first + local);
      for (size_t block = 0; block * moe::BLOCK_ROWS < expected.size(); ++block) {
        if (!moe_dispatch_gemm::wait_block(launch, params, tables, DeviceRole::compute, local,
                                           static_cast<int>(block)))
          return "";  // the launch says why
        const size_t end = std::min(expected.size(), (block + 1) * moe::BLOCK_ROWS);
        for (size_t i = block * moe::BLOCK_ROWS; threadIdx.x == 0 && i < end; ++i) {
          const auto [source, item] = expected[i];
          if (!is_right(launch, params, begin + static_cast<int64_t>(i), source, item, seed))
            return format("row %zu of expert %d is wrong; ", i, first + local);
        }
      }
    }
    return "";
  }
  bool is_right(const RankLaunch& launch, const NetworkParams& params, int64_t row, int source, int64_t item,
                uint64_t seed) const {
    const int64_t token = item / params.routing.topk;
    const auto* const found =
        reinterpret_cast<const uint16_t*>(launch.area(rank_.rank, static_cast<size_t>(params.layout.row(row))));
    for (int64_t column = 0; column < params.layout.row_bytes / 2; ++column) {
      if (found[column] != element(seed, source, token, column)) return false;
    }
    const auto& origin = *reinterpret_cast<const RowOrigin*>(
        launch.area(rank_.rank, static_cast<size_t>(params.layout.origin(row))));
    return origin.token == token && origin.rank == source && origin.k == item % params.routing.topk &&
           origin.factor == factor(seed, source, item);
  }

  struct alignas(16) Line {
    std::byte bytes[16];
  };

  Rank& rank_;
  EmulatedGpu gpu_;
  TopologyArrays arrays_;
  Tokens tokens_;
  std::vector<uint16_t> rows_;
  std::vector<float> factors_;
  std::vector<Line> record_;
  std::atomic<int> num_products_ = 0;
};

std::string run_launches(DispatchRank& dispatch, Rank& rank, const Shape& shape, uint64_t first_seed,
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
      const std::string wrong = dispatch.launch(params, one, seed);
      if (const std::string sentence = gpu.sentence(); !sentence.empty()) return sentence + "; ";
      if (!wrong.empty()) return wrong;
      MK_EXPECT(dispatch.num_products() == kComputeCtas + kPushCtas);
      if (const std::string record = dispatch.wrong_record(params); !record.empty()) return record;
      MK_EXPECT(gpu.is_idle());
      MK_EXPECT(EmulatedGpu::is_clean(*params.comm.state));
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
            DispatchRank dispatch(rank);
            MK_EXPECT_OK(dispatch.set_up());
            MK_EXPECT(rank.barrier());
            uint64_t seed = 1;
            for (const Shape& shape :
                 {Shape{40, 64, 8, 2}, Shape{7, 8, 3, 3, 512 << 10}, Shape{150, 16, 12, 8, 1000},
                  Shape{20, 8 * 640, 5, 4}, Shape{200, 24, 7, 1, 2000, true},
                  Shape{50, 128, 40, 6, 3000, false, true}}) {
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
          DispatchRank dispatch(rank);
          MK_EXPECT_OK(dispatch.set_up());
          MK_EXPECT(rank.barrier());
          const Shape shape{40, 64, 8, 2};
          for (uint64_t seed = 1; seed < 5; ++seed) {
            const NetworkParams params = dispatch.params(shape, seed);
            const bool has_items = tokens_of(shape, seed, 3).experts.size() > 4;
            if (rank.rank == 3 && has_items) dispatch.spoil_index(4, 8);
            const std::string wrong = dispatch.launch(params, shape, seed);
            MK_EXPECT(wrong.empty());
            if (has_items) MK_EXPECT(dispatch.gpu().error().status == MK_ERROR_DATA);
            if (has_items) MK_EXPECT(dispatch.gpu().error().rank == 3);
            MK_EXPECT(!rank.abort.raised());
            MK_EXPECT(EmulatedGpu::is_clean(*params.comm.state));
            MK_EXPECT(rank.endpoint->completed() == params.comm.network.queue.state->head);
          }
          MK_EXPECT(rank.barrier());
          return "";
        }) == "");
}

TEST_CASE("who waits for packets that do not come says for what", "[emulation]") {
  const std::vector<int> nodes = {0, 1};
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          DispatchRank dispatch(rank);
          MK_EXPECT_OK(dispatch.set_up(rank.rank == 0 ? 300 : 60000));
          MK_EXPECT(rank.barrier());
          const Shape shape{40, 64, 8, 4};
          NetworkParams params = dispatch.params(shape, 3);
          // Rank 1 puts under other numbers.
          if (rank.rank == 1) params.numbers.max_chunks = 600;
          dispatch.launch(params, shape, 3);
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
