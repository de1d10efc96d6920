// SPDX-License-Identifier: MIT
// MoE GEMM + combine between nodes on emulated warps and host memory, over the real transports: counts, the
// verdict, pushes, routes, node sums, puts, arrivals and last sums of several launches in a row, each element
// compared with loops that add in the order that is promised; records that are wrong; a rank whose routes do
// not come. The code is the kernel's own; only the product is missing, and someone who leaves its rows in a
// random order stands in for it. Areas are filled with NaN after each launch.
#include "shim/device_words.h"

#include <array>
#include <cmath>
#include <cstdlib>
#include <random>
#include <set>
#include <vector>

#include "../support/catch.h"
#include "emulated_gpu.h"
#include "kernels/cuda/gemm_type.h"
#include "kernels/cuda/moe_plan.h"
#include "kernels/device/partial_sums.cuh"
#include "kernels/host/number_format.h"
#include "kernels/ops/moe_gemm_combine/cuda_network_kernel.cuh"
#include "kernels/topology_arrays.h"

namespace mk {

struct EmulatedConfig {
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

struct Shape {
  int64_t tokens;  // of a rank, at most
  int64_t hidden;
  int experts;
  int topk;
  mk_dtype_t out_dtype = MK_DTYPE_BF16;
  int64_t chunk_bytes = 1024;
  bool is_skewed = false;
};

constexpr int kComputeCtas = 2;
constexpr int kPushCtas = 1;
constexpr int kRelayCtas = 2;
constexpr int kCtas = kComputeCtas + kPushCtas + kRelayCtas + 1;
constexpr size_t kBankBytes = 8 << 20;

struct Item {
  int expert;
  int slot;  // among the rank's rows for the expert
};

// Every rank can work out everyone's tokens, [token * topk + k].
std::vector<Item> items_of(const Shape& shape, uint64_t seed, int rank) {
  std::mt19937_64 random(seed * 64 + static_cast<uint64_t>(rank));
  const int64_t count = (rank + static_cast<int>(seed)) % 3 == 0
                            ? static_cast<int64_t>(seed % 2)
                            : static_cast<int64_t>(random() % (shape.tokens + 1));
  std::vector<int> slots(static_cast<size_t>(shape.experts));
  std::vector<Item> made;
  for (int64_t token = 0; token < count; ++token) {
    std::set<int> taken = {-1};
    for (int k = 0; k < shape.topk; ++k) {
      int expert = static_cast<int>(random() % (shape.experts + 1)) - 1;
      if (shape.is_skewed) expert = k == 0 ? shape.experts - 1 : -1;
      if (!taken.insert(expert).second) expert = -1;
      made.push_back({expert, expert < 0 ? 0 : slots[static_cast<size_t>(expert)]++});
    }
  }
  return made;
}
uint64_t mix(uint64_t value) {
  value = (value ^ value >> 31) * 0x9e3779b97f4a7c15;
  return value ^ value >> 29;
}
// Of any size and sign, so that sums in another order, or rounded elsewhere, are others.
float number(uint64_t bits) { return (static_cast<float>(mix(bits) % 20011) - 10005.0f) / 4096.0f; }
float product(uint64_t seed, int rank, size_t item, int64_t column) {
  return number((seed * 32 + static_cast<uint64_t>(rank)) << 40 | item << 20 | static_cast<uint64_t>(column));
}
float weight(uint64_t seed, int rank, size_t item) {
  return number((seed * 32 + static_cast<uint64_t>(rank)) << 40 | item << 20 | 0xfffff);
}

class CombineRank {
 public:
  explicit CombineRank(Rank& rank) : rank_(rank), gpu_(rank), arrays_(rank.topology) {}

  Status set_up(int64_t wait_timeout_ms = 60000) {
    MK_RETURN_IF_ERROR(gpu_.set_up(kCtas, kBankBytes, wait_timeout_ms));
    for (uint64_t epoch : {0, 1}) poison(epoch);
    return {};
  }
  EmulatedGpu& gpu() { return gpu_; }

  // As the launch makes them.
  NetworkParams params(const Shape& shape, uint64_t seed) {
    shape_ = shape;
    seed_ = seed;
    all_.clear();
    for (int rank = 0; rank < rank_.nranks; ++rank) all_.push_back(items_of(shape, seed, rank));
    MoeCall call;
    call.op = MK_OPERATOR_MOE_GEMM_COMBINE;
    call.tokens = num_tokens();
    call.hidden = shape.hidden;
    call.inter = 8;
    call.experts = shape.experts;
    call.topk = shape.topk;
    call.out_dtype = shape.out_dtype;
    call.tuning.chunk_bytes = shape.chunk_bytes;
    make_record(call);
    const Result<MoePlan> planned = moe_plan(call, rank_.nranks, 132, &arrays_.view());
    if (!planned.ok()) std::abort();  // Catch2 has no checks for several threads
    const MoePlan& plan = planned.value();
    NetworkParams params{};
    params.comm = gpu_.comm();
    params.comm.entry.op = MK_OPERATOR_MOE_GEMM_COMBINE;
    params.comm.entry.output_offset = kNoOutput;
    params.comm.entry.shape[0] = shape.hidden;
    params.routing = cuda_routing(call, rank_.rank, rank_.nranks, arrays_.view().num_nodes);
    params.routing.has_rows = true;
    params.routing.num_counting_ctas = 3;
    params.layout = {plan.layout.counts_bytes, row_bytes()};
    params.products.out_type = gemm_type(shape.out_dtype);
    params.num_compute_ctas = kComputeCtas;
    params.first_flag = rank_.nranks;
    params.unit_rows = moe::unit_rows_for(row_bytes());
    weights_.assign(own().size() + 1, 0);
    for (size_t i = 0; i < own().size(); ++i) weights_[i] = weight(seed, rank_.rank, i);
    params.weights = weights_.data();
    y_.assign(static_cast<size_t>(num_tokens() + 1) * y_pitch() / sizeof(Line), Line{});
    std::memset(static_cast<void*>(y_.data()), 0xff, y_.size() * sizeof(Line));
    params.y = y_.data()->bytes;
    params.y_pitch = y_pitch();
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
    const uint64_t epoch = gpu_.epoch() + 1;
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
    // To one that has failed peers may still be writing.
    if (gpu_.sentence().empty()) poison(epoch);
  }

  std::string wrong_result() const {
    const auto row_size = static_cast<size_t>(row_bytes());
    for (int64_t token = 0; token <= num_tokens(); ++token) {
      const std::byte* const seen = y_.data()->bytes + token * y_pitch();
      std::vector<std::byte> expected(static_cast<size_t>(y_pitch()), std::byte{0xff});
      if (token < num_tokens()) {
        for (int64_t column = 0; column < shape_.hidden; ++column)
          store_element(expected.data(), shape_.out_dtype, column, sum(token, column));
      }
      if (std::memcmp(seen, expected.data(), expected.size()) == 0) continue;
      size_t at = 0;
      while (seen[at] == expected[at]) ++at;
      return format("token %lld of %lld: byte %zu of %zu; ", (long long)token, (long long)num_tokens(), at,
                    row_size);
    }
    return "";
  }

  size_t num_items() const { return own().size(); }
  moe::RecordItem& record_item(size_t item) { return items_[item]; }

 private:
  struct alignas(16) Line {
    std::byte bytes[16];
  };

  const std::vector<Item>& own() const { return all_[static_cast<size_t>(rank_.rank)]; }
  int64_t num_tokens() const { return static_cast<int64_t>(own().size()) / shape_.topk; }
  int64_t row_bytes() const { return shape_.hidden * element_bytes(shape_.out_dtype); }
  int64_t y_pitch() const { return row_bytes() + 16; }
  int experts_per_rank() const { return static_cast<int>(ceil_div(shape_.experts, rank_.nranks)); }
  int node_of(int expert) const { return arrays_.view().node_of_rank[expert / experts_per_rank()]; }

  void poison(uint64_t epoch) { std::memset(gpu_.area(epoch, 0), 0xff, kBankBytes); }

  // As a dispatch would have left it.
  void make_record(MoeCall& call) {
    const int first = std::min(shape_.experts, rank_.rank * experts_per_rank());
    const int end = std::min(shape_.experts, first + experts_per_rank());
    const moe::RecordLayout layout{end - first, shape_.topk, num_tokens()};
    std::vector<int32_t> counts(static_cast<size_t>(end - first));
    int64_t rows = 0;
    for (const std::vector<Item>& items : all_) {
      for (const Item& item : items) {
        if (item.expert < first || item.expert >= end) continue;
        ++counts[static_cast<size_t>(item.expert - first)];
        ++rows;
      }
    }
    record_.assign(static_cast<size_t>(layout.bytes(rows)) / 16 + 1, Line{});
    call.routing = reinterpret_cast<mk_moe_routing_t*>(record_.data());
    call.routing_bytes = record_.size() * 16;
    *call.routing = {moe::kRecordMagic,
                     moe::kRecordVersion,
                     MK_SUCCESS,
                     end - first,
                     num_tokens(),
                     rows,
                     rows,
                     layout.counts_offset(),
                     layout.offsets_offset(),
                     layout.rows_offset()};
    const moe::RecordView record{call.routing};
    *record.at<moe::RecordHead>(moe::RecordLayout::kHead) = {
        rank_.nranks, rank_.rank, shape_.experts, shape_.topk, layout.items_offset(), 0};
    std::copy(counts.begin(), counts.end(), record.expert_counts());
    items_ = record.items();
    for (size_t i = 0; i < own().size(); ++i) items_[i] = {own()[i].expert, own()[i].slot};
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
    std::vector<std::pair<int, size_t>> rows;  // source, item
    for (int source = 0; source < rank_.nranks; ++source) {
      const std::vector<Item>& items = all_[static_cast<size_t>(source)];
      for (size_t i = 0; i < items.size(); ++i) {
        if (items[i].expert == expert) rows.emplace_back(source, i);
      }
    }
    const size_t begin = size_t{block} * moe::BLOCK_ROWS;
    for (size_t i = begin; i < std::min(rows.size(), begin + moe::BLOCK_ROWS); ++i) {
      const int64_t at = params.layout.product_row(tables.home_rows[shape_.experts],
                                                   static_cast<int64_t>(tables.rows[local] + i));
      std::byte* const to = launch.area(rank_.rank, static_cast<size_t>(at));
      for (int64_t column = 0; column < shape_.hidden; ++column)
        store_element(to, shape_.out_dtype, column, product(seed_, rows[i].first, rows[i].second, column));
    }
  }

  float rounded(float value) const {
    std::byte bytes[4];
    store_element(bytes, shape_.out_dtype, 0, value);
    return load_element(bytes, shape_.out_dtype, 0);
  }
  // What a node adds for a token to `before`, in the order of the experts.
  float node_sum(int64_t token, int node, int64_t column, float before, bool* has_any) const {
    std::vector<std::pair<int, size_t>> rows;
    for (int k = 0; k < shape_.topk; ++k) {
      const auto item = static_cast<size_t>(token * shape_.topk + k);
      if (own()[item].expert >= 0 && node_of(own()[item].expert) == node)
        rows.emplace_back(own()[item].expert, item);
    }
    std::sort(rows.begin(), rows.end());
    *has_any = !rows.empty();
    for (const auto& [expert, item] : rows) {
      before =
          std::fma(weight(seed_, rank_.rank, item), rounded(product(seed_, rank_.rank, item, column)), before);
    }
    return before;
  }
  float sum(int64_t token, int64_t column) const {
    float all = 0;
    for (int node = 0; node < arrays_.view().num_nodes; ++node) {
      bool has_any = false;
      if (node == arrays_.view().node()) {
        all = node_sum(token, node, column, all, &has_any);
      } else {
        const float one = node_sum(token, node, column, 0, &has_any);
        if (has_any) all += rounded(one);
      }
    }
    return all;
  }

  Rank& rank_;
  EmulatedGpu gpu_;
  TopologyArrays arrays_;
  Shape shape_{};
  uint64_t seed_ = 0;
  std::vector<std::vector<Item>> all_;
  std::vector<float> weights_;
  std::vector<Line> record_, y_;
  moe::RecordItem* items_ = nullptr;
};

std::string run_launches(CombineRank& combine, Rank& rank, const Shape& shape, uint64_t first_seed,
                         int launches) {
  EmulatedGpu& gpu = combine.gpu();
  for (int turn = 0; turn < launches; ++turn) {
    const uint64_t epoch = gpu.epoch() + 1;
    const NetworkParams params = combine.params(shape, first_seed + static_cast<uint64_t>(turn));
    combine.launch(params);
    if (const std::string sentence = gpu.sentence(); !sentence.empty()) return sentence + "; ";
    if (const std::string wrong = combine.wrong_result(); !wrong.empty()) return wrong;
    MK_EXPECT(gpu.is_idle());
    MK_EXPECT(gpu.epoch() == epoch);
    MK_EXPECT(EmulatedGpu::is_clean(*params.comm.state));
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
            CombineRank combine(rank);
            MK_EXPECT_OK(combine.set_up());
            MK_EXPECT(rank.barrier());
            uint64_t seed = 1;
            for (const Shape& shape :
                 {Shape{40, 64, 8, 2}, Shape{7, 8, 3, 3, MK_DTYPE_FP32, 512 << 10},
                  Shape{80, 16, 12, 8, MK_DTYPE_FP16, 1000}, Shape{12, 8 * 640, 5, 4, MK_DTYPE_BF16, 40000},
                  Shape{150, 24, 7, 1, MK_DTYPE_BF16, 500, true}, Shape{30, 40, 40, 16, MK_DTYPE_FP32, 2000}}) {
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
          CombineRank combine(rank);
          MK_EXPECT_OK(combine.set_up());
          MK_EXPECT(rank.barrier());
          const Shape shape{40, 64, 8, 2};
          for (uint64_t seed = 1; seed < 5; ++seed) {
            const NetworkParams params = combine.params(shape, seed);
            const bool has_items = items_of(shape, seed, 3).size() > 4;
            if (rank.rank == 3 && has_items) combine.record_item(4).expert = 8;
            combine.launch(params);
            if (has_items) MK_EXPECT(combine.gpu().error().status == MK_ERROR_DATA);
            if (has_items) MK_EXPECT(combine.gpu().error().rank == 3);
            MK_EXPECT(!rank.abort.raised());
            MK_EXPECT(EmulatedGpu::is_clean(*params.comm.state));
            MK_EXPECT(rank.endpoint->completed() == params.comm.network.queue.state->head);
          }
          MK_EXPECT(rank.barrier());
          return "";
        }) == "");
}

TEST_CASE("slots that no row has are left out, and nothing waits for them", "[emulation]") {
  const std::vector<int> nodes = {0, 0, 1, 1};
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          CombineRank combine(rank);
          MK_EXPECT_OK(combine.set_up());
          MK_EXPECT(rank.barrier());
          const Shape shape{40, 64, 8, 4};
          for (uint64_t seed = 1; seed < 5; ++seed) {
            const NetworkParams params = combine.params(shape, seed);
            for (size_t i = 0; rank.rank == 1 && i < combine.num_items(); i += 3)
              combine.record_item(i).slot = i % 2 == 0 ? 1 << 20 : -5;
            combine.launch(params);
            MK_EXPECT(combine.gpu().sentence().empty());
            if (rank.rank != 1) MK_EXPECT(combine.wrong_result().empty());
            MK_EXPECT(EmulatedGpu::is_clean(*params.comm.state));
          }
          MK_EXPECT(rank.barrier());
          return "";
        }) == "");
}

TEST_CASE("who waits for routes, or for sums, that do not come says for which", "[emulation]") {
  const std::vector<int> nodes = {0, 1};
  const bool has_routes = GENERATE(false, true);
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          CombineRank combine(rank);
          MK_EXPECT_OK(combine.set_up(rank.rank == 0 ? 1000 : 5000));
          MK_EXPECT(rank.barrier());
          const Shape shape{40, 64, 8, 4};
          const auto has_tokens = [&](uint64_t seed, int one) {
            return items_of(shape, seed, one).size() > 40;
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
