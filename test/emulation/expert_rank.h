// SPDX-License-Identifier: MIT
// One rank of a mixture-of-experts operator on an emulated GPU: tokens that go elsewhere in each launch, some
// ranks' none at all. Every rank can work out everyone's.
#pragma once

#include "shim/device_words.h"

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "emulated_gpu.h"
#include "kernels/cuda/moe_plan.h"
#include "kernels/topology_arrays.h"

namespace mk::test {

struct ExpertShape {
  int64_t tokens;  // of a rank, at most
  int64_t hidden;
  int experts;
  int topk;
  bool is_skewed = false;  // all to the last expert
};

// A rank's, [token * topk + k].
inline std::vector<int32_t> experts_of(const ExpertShape& shape, uint64_t seed, int rank) {
  std::mt19937_64 random(seed * 64 + static_cast<uint64_t>(rank));
  const int64_t count = (rank + static_cast<int>(seed)) % 3 == 0
                            ? static_cast<int64_t>(seed % 2)
                            : static_cast<int64_t>(random() % (shape.tokens + 1));
  std::vector<int32_t> made;
  for (int64_t token = 0; token < count; ++token) {
    std::set<int> taken = {-1};
    for (int k = 0; k < shape.topk; ++k) {
      int expert = static_cast<int>(random() % (shape.experts + 1)) - 1;
      if (shape.is_skewed) expert = k == 0 ? shape.experts - 1 : -1;
      made.push_back(taken.insert(expert).second ? expert : -1);
    }
  }
  return made;
}

class ExpertRank {
 public:
  explicit ExpertRank(Rank& rank) : rank_(rank), gpu_(rank), arrays_(rank.topology) {}

  Status set_up(int num_ctas, int64_t wait_timeout_ms = kPatienceMs) {
    MK_RETURN_IF_ERROR(gpu_.set_up(num_ctas, kBankBytes, wait_timeout_ms));
    for (uint64_t epoch : {0, 1}) poison(epoch);
    return {};
  }
  // After a launch that has waited for all that was sent to it: what is in its bank is not taken for a later
  // one's.
  void poison(uint64_t epoch) { std::memset(gpu_.area(epoch, 0), 0xff, kBankBytes); }
  EmulatedGpu& gpu() { return gpu_; }
  size_t num_items() const { return own().size(); }

 protected:
  static constexpr size_t kBankBytes = 8 << 20;
  struct alignas(16) Line {
    std::byte bytes[16];
  };
  struct Row {
    int source;
    size_t item;
  };

  // What a call says of its tokens.
  MoeCall begin_call(mk_operator_t op, const ExpertShape& shape, uint64_t seed) {
    experts_ = shape.experts;
    topk_ = shape.topk;
    seed_ = seed;
    all_.clear();
    for (int rank = 0; rank < rank_.nranks; ++rank) all_.push_back(experts_of(shape, seed, rank));
    MoeCall call;
    call.op = op;
    call.tokens = num_tokens();
    call.hidden = shape.hidden;
    call.inter = 8;
    call.experts = shape.experts;
    call.topk = shape.topk;
    return call;
  }
  // With memory for its record.
  void make_record(MoeCall* call, int64_t num_rows) {
    const moe::RecordLayout layout{num_experts(), topk_, num_tokens()};
    record_.assign(static_cast<size_t>(layout.bytes(num_rows)) / sizeof(Line) + 1, Line{});
    call->routing = reinterpret_cast<mk_moe_routing_t*>(record_.data());
    call->routing_bytes = record_.size() * sizeof(Line);
  }
  MoePlan plan(const MoeCall& call) const {
    const TopologyView& view = arrays_.view();
    const Result<MoePlan> planned = moe_plan(call, rank_.nranks, 132, view.num_nodes > 1 ? &view : nullptr);
    if (!planned.ok()) std::abort();  // Catch2 has no checks for several threads
    return planned.value();
  }
  RankComm comm(const MoeCall& call) const {
    RankComm comm = gpu_.comm();
    comm.entry.op = call.op;
    comm.entry.output_offset = kNoOutput;
    comm.entry.shape[0] = call.hidden;
    return comm;
  }

  const std::vector<int32_t>& own() const { return all_[static_cast<size_t>(rank_.rank)]; }
  int64_t num_tokens() const { return static_cast<int64_t>(own().size()) / topk_; }
  int experts_per_rank() const { return static_cast<int>(ceil_div(experts_, rank_.nranks)); }
  int first_expert() const { return std::min(experts_, rank_.rank * experts_per_rank()); }
  int num_experts() const { return std::min(experts_, first_expert() + experts_per_rank()) - first_expert(); }
  // An expert's, in their order.
  std::vector<Row> rows_of(int expert) const {
    std::vector<Row> rows;
    for (int source = 0; source < rank_.nranks; ++source) {
      const std::vector<int32_t>& items = all_[static_cast<size_t>(source)];
      for (size_t item = 0; item < items.size(); ++item) {
        if (items[item] == expert) rows.push_back({source, item});
      }
    }
    return rows;
  }
  // Of each item of this rank's, its number among those of the same expert.
  std::vector<int32_t> slots() const {
    std::vector<int32_t> next(static_cast<size_t>(experts_)), made;
    for (const int expert : own()) made.push_back(expert < 0 ? 0 : next[static_cast<size_t>(expert)]++);
    return made;
  }

  Rank& rank_;
  EmulatedGpu gpu_;
  TopologyArrays arrays_;
  int experts_ = 0;
  int topk_ = 1;
  uint64_t seed_ = 0;
  std::vector<std::vector<int32_t>> all_;
  std::vector<Line> record_;
};

// Inside a node, launches of each shape in a row: run(experts, shape, seed) is one of them, which goes on
// though something was wrong, since the others would wait for it.
template <class Experts, class Shape, class Run>
std::string run_in_node(int nranks, int num_ctas, const std::vector<Shape>& shapes, Run&& run) {
  const std::vector<int> nodes(static_cast<size_t>(nranks), 0);
  return run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
    Experts experts(rank);
    MK_EXPECT_OK(experts.set_up(num_ctas));
    MK_EXPECT(rank.barrier());
    std::string wrong;
    uint64_t seed = 1;
    for (const Shape& shape : shapes) {
      for (int turn = 0; turn < 2; ++turn, ++seed) {
        if (std::string text = run(experts, shape, seed); !text.empty())
          wrong += format("tokens %lld, hidden %lld, experts %d, topk %d: ", (long long)shape.tokens,
                          (long long)shape.hidden, shape.experts, shape.topk) +
                   text;
        if (const std::string sentence = experts.gpu().sentence(); !sentence.empty()) return wrong + sentence;
      }
    }
    MK_EXPECT(rank.barrier());
    return wrong + rank.failure();
  });
}

}  // namespace mk::test
