// SPDX-License-Identifier: MIT
// Bad arguments of the mixture-of-experts operators' functions.
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "test/multi_rank/bad_call_builder.h"

namespace mk::test {
namespace {

// Large enough for every matrix of the good calls: 4 tokens, hidden 16, inter 8, 30 experts, topk 2, 16 rows.
struct Operands {
  alignas(16) std::array<uint16_t, 1024> x{};
  alignas(16) std::array<int64_t, 64> topk_idx{};
  alignas(16) std::array<uint16_t, 4096> w{};
  alignas(16) std::array<float, 1024> y{};
  alignas(16) std::array<uint16_t, 1024> dispatched{};
  alignas(16) std::array<float, 64> factors{};
  alignas(16) std::array<unsigned char, 4096> routing{};
};
Operands operands;

mk_moe_routing_t* record() { return reinterpret_cast<mk_moe_routing_t*>(operands.routing.data()); }

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr auto kInvalid = MK_ERROR_INVALID_ARGUMENT;
constexpr auto kUnsupported = MK_ERROR_UNSUPPORTED;

template <class Args>
void set_sizes(Args& args) {
  args.tokens = 4, args.hidden = 16, args.inter = 8, args.experts = 30, args.topk = 2;
}

struct Moe {
  using Maxima = mk_moe_maxima_t;
  static Maxima good_maxima() {
    Maxima maxima = MK_MOE_MAXIMA_INIT;
    set_sizes(maxima);
    return maxima;
  }
};
struct Dispatch : Moe {
  using Args = mk_moe_dispatch_gemm_args_t;
  static constexpr const char* kName = "mk_moe_dispatch_gemm";
  static constexpr auto kPrepare = mk_moe_dispatch_gemm_prepare;
  static constexpr auto kWorkspaceBytes = mk_moe_dispatch_gemm_workspace_bytes;
  static constexpr auto kPlan = mk_moe_dispatch_gemm_plan;
  static constexpr auto kLaunch = mk_moe_dispatch_gemm;
  static Args good() {
    Args args = MK_MOE_DISPATCH_GEMM_ARGS_INIT;
    set_sizes(args);
    args.capacity_rows = 16;
    args.out_dtype = MK_DTYPE_FP32;
    args.x = operands.x.data(), args.ldx = 16;
    args.topk_idx = operands.topk_idx.data();
    args.w = operands.w.data();
    args.y = operands.y.data(), args.ldy = 8;
    args.routing = record(), args.routing_bytes = operands.routing.size();
    args.dispatched_rows = operands.dispatched.data(), args.ld_dispatched_rows = 16;
    args.row_scale = operands.factors.data();
    return args;
  }
};
struct Combine : Moe {
  using Args = mk_moe_gemm_combine_args_t;
  static constexpr const char* kName = "mk_moe_gemm_combine";
  static constexpr auto kPrepare = mk_moe_gemm_combine_prepare;
  static constexpr auto kWorkspaceBytes = mk_moe_gemm_combine_workspace_bytes;
  static constexpr auto kPlan = mk_moe_gemm_combine_plan;
  static constexpr auto kLaunch = mk_moe_gemm_combine;
  static Args good() {
    Args args = MK_MOE_GEMM_COMBINE_ARGS_INIT;
    set_sizes(args);
    args.out_dtype = MK_DTYPE_FP32;
    args.rows = operands.x.data(), args.ld_rows = 8;
    args.w = operands.w.data();
    args.routing = record(), args.routing_bytes = operands.routing.size();
    args.topk_weights = operands.factors.data();
    args.y = operands.y.data(), args.ldy = 16;
    return args;
  }
};

template <class Op>
class Builder : public BadCallBuilder<Op> {
 public:
  using Args = typename Op::Args;
  using BadCallBuilder<Op>::launch, BadCallBuilder<Op>::plan, BadCallBuilder<Op>::maxima;
  using BadCallBuilder<Op>::any, BadCallBuilder<Op>::tuned;

  void sizes();
  void types();
  void tuning();
  void buffers();
  void record_and_factors();
};

template <class Op>
void Builder<Op>::sizes() {
  any("tokens -1", kInvalid, {" tokens: expected", "-1"}, [](auto& value) { value.tokens = -1; });
  any("tokens huge", kInvalid, {" tokens: expected", "9223372036854775807"},
      [](auto& value) { value.tokens = kHuge; });
  any("tokens * topk", kInvalid, {"tokens * topk", "2000000000 * 2"},
      [](auto& value) { value.tokens = 2000000000; });
  for (const int64_t bad : {int64_t{-8}, int64_t{0}, int64_t{12}, kHuge - 7}) {
    any("hidden", kInvalid, {" hidden: expected a positive multiple of 8", std::to_string(bad)},
        [bad](auto& value) { value.hidden = bad; });
    any("inter", kInvalid, {" inter: expected a positive multiple of 8", std::to_string(bad)},
        [bad](auto& value) { value.inter = bad; });
  }
  for (const int bad : {-1, 0, 65537}) {
    any("experts", kInvalid, {" experts: expected 1 to 65536", std::to_string(bad)},
        [bad](auto& value) { value.experts = bad; });
  }
  for (const int bad : {-1, 0, 17}) {
    any("topk", kInvalid, {" topk: expected 1 to 16", std::to_string(bad)},
        [bad](auto& value) { value.topk = bad; });
  }
  any("weights too large", kInvalid, {"w of one expert", "1073741824"},
      [](auto& value) { value.hidden = value.inter = int64_t{1} << 30, value.tokens = 0; });
  maxima("capacity_rows -1", kInvalid, {"capacity_rows: expected", "-1"},
         [](mk_moe_maxima_t& value) { value.capacity_rows = -1; });
  maxima("more than can be moved", kUnsupported, {Op::kName, "lower capacity_rows or tokens"},
         [](mk_moe_maxima_t& value) {
           value.capacity_rows = 2000000000, value.hidden = int64_t{1} << 20, value.tokens = 0;
         });
  if constexpr (std::is_same_v<Op, Dispatch>) {
    plan("capacity_rows -1", kInvalid, {"capacity_rows: expected", "-1"},
         [](Args& args) { args.capacity_rows = -1; });
    plan("use_routing 2", kInvalid, {"use_routing: expected 0 or 1", "2"},
         [](Args& args) { args.use_routing = 2; });
  }
}

template <class Op>
void Builder<Op>::types() {
  any("dtype fp8", kUnsupported, {"dtype", "fp8_e4m3"}, [](auto& value) { value.dtype = MK_DTYPE_FP8_E4M3; });
  any("dtype fp32", kUnsupported, {"dtype", "fp32"}, [](auto& value) { value.dtype = MK_DTYPE_FP32; });
  any("dtype 77", kInvalid, {"dtype", "77"}, [](auto& value) { value.dtype = static_cast<mk_dtype_t>(77); });
  any("out_dtype fp8", kUnsupported, {"out_dtype", "fp8_e5m2"},
      [](auto& value) { value.out_dtype = MK_DTYPE_FP8_E5M2; });
  any("out_dtype 77", kInvalid, {"out_dtype", "77"},
      [](auto& value) { value.out_dtype = static_cast<mk_dtype_t>(77); });
  plan("w_layout 5", kInvalid, {"w_layout", "5"},
       [](Args& args) { args.w_layout = static_cast<mk_layout_t>(5); });
  if constexpr (std::is_same_v<Op, Dispatch>) {
    plan("index_type 2", kInvalid, {"index_type", "2"},
         [](Args& args) { args.index_type = static_cast<mk_index_type_t>(2); });
  }
}

template <class Op>
void Builder<Op>::tuning() {
  tuned("tuning.struct_size", kInvalid, {"tuning.struct_size", "saw 3"}, [](auto& t) { t.struct_size = 3; });
  tuned("tuning.tile_m", kInvalid, {"tuning.tile_m", "100000"}, [](auto& t) { t.tile_m = 100000; });
  tuned("tuning.chunk_bytes", kInvalid, {"tuning.chunk_bytes", "-1"}, [](auto& t) { t.chunk_bytes = -1; });
}

template <class Op>
void Builder<Op>::buffers() {
  launch("w NULL", kInvalid, {" w: expected", "NULL"}, [](Args& args) { args.w = nullptr; });
  launch("w misaligned", kInvalid, {" w: expected", "16-byte"},
         [](Args& args) { args.w = shifted(args.w, 2); });
  launch("y NULL", kInvalid, {" y: expected", "NULL"}, [](Args& args) { args.y = nullptr; });
  launch("y misaligned", kInvalid, {" y: expected", "16-byte"},
         [](Args& args) { args.y = shifted(args.y, 4); });
  launch("ldy too small", kInvalid, {" ldy: expected at least", "saw 4"}, [](Args& args) { args.ldy = 4; });
  launch("ldy misaligned", kInvalid, {" ldy: expected", "4 elements", "saw 18"},
         [](Args& args) { args.ldy = 18; });
  launch("y overlaps w", kInvalid, {"y [", "overlaps w ["}, [](Args& args) { args.w = args.y; });
  if constexpr (std::is_same_v<Op, Dispatch>) {
    launch("x NULL", kInvalid, {" x: expected", "NULL"}, [](Args& args) { args.x = nullptr; });
    launch("x misaligned", kInvalid, {" x: expected", "16-byte"},
           [](Args& args) { args.x = shifted(args.x, 2); });
    launch("ldx", kInvalid, {" ldx: expected at least 16", "saw 8"}, [](Args& args) { args.ldx = 8; });
    launch("ldx misaligned", kInvalid, {" ldx: expected", "saw 17"}, [](Args& args) { args.ldx = 17; });
    launch("y overlaps x", kInvalid, {"y [", "overlaps x ["}, [](Args& args) { args.x = args.y; });
    launch("dispatched_rows misaligned", kInvalid, {"dispatched_rows: expected", "16-byte"},
           [](Args& args) { args.dispatched_rows = shifted(args.dispatched_rows, 2); });
    launch("ld_dispatched_rows", kInvalid, {" ld_dispatched_rows: expected", "saw 8"},
           [](Args& args) { args.ld_dispatched_rows = 8; });
    launch("dispatched_rows overlaps x", kInvalid, {"dispatched_rows [", "overlaps x ["},
           [](Args& args) { args.x = args.dispatched_rows; });
    launch("y overlaps dispatched_rows", kInvalid, {"y [", "overlaps dispatched_rows ["},
           [](Args& args) { args.dispatched_rows = args.y; });
  } else {
    launch("rows misaligned", kInvalid, {" rows: expected", "16-byte"},
           [](Args& args) { args.rows = shifted(args.rows, 2); });
    launch("ld_rows", kInvalid, {" ld_rows: expected at least 8", "saw 0"},
           [](Args& args) { args.ld_rows = 0; });
    launch("y overlaps rows", kInvalid, {"y [", "overlaps rows ["}, [](Args& args) { args.rows = args.y; });
  }
}

template <class Op>
void Builder<Op>::record_and_factors() {
  launch("routing NULL", kInvalid, {"routing: expected", "NULL"}, [](Args& args) { args.routing = nullptr; });
  launch("routing misaligned", kInvalid, {"routing: expected", "16-byte"},
         [](Args& args) { args.routing = shifted(args.routing, 8); });
  launch("routing_bytes", kInvalid, {"routing_bytes: expected at least", "4 tokens", "saw 64"},
         [](Args& args) { args.routing_bytes = 64; });
  launch("y overlaps routing", kInvalid, {"y [", "overlaps routing ["},
         [](Args& args) { args.y = operands.routing.data(); });
  if constexpr (std::is_same_v<Op, Dispatch>) {
    launch("topk_idx NULL", kInvalid, {"topk_idx: expected", "NULL"},
           [](Args& args) { args.topk_idx = nullptr; });
    launch("topk_idx misaligned", kInvalid, {"topk_idx: expected", "aligned"},
           [](Args& args) { args.topk_idx = shifted(args.topk_idx, 2); });
    launch("topk_idx half misaligned", kInvalid, {"topk_idx: expected", "aligned"}, [](Args& args) {
      args.index_type = MK_INDEX_INT64;
      args.topk_idx = shifted(args.topk_idx, 4);
    });
    launch("row_scale misaligned", kInvalid, {"row_scale: expected", "aligned"},
           [](Args& args) { args.row_scale = shifted(args.row_scale, 1); });
    launch("routing overlaps topk_idx", kInvalid, {"routing [", "overlaps topk_idx ["},
           [](Args& args) { args.topk_idx = operands.routing.data(); });
  } else {
    launch("topk_weights NULL", kInvalid, {"topk_weights: expected", "NULL"},
           [](Args& args) { args.topk_weights = nullptr; });
    launch("topk_weights misaligned", kInvalid, {"topk_weights: expected", "aligned"},
           [](Args& args) { args.topk_weights = shifted(args.topk_weights, 2); });
    launch("y overlaps topk_weights", kInvalid, {"y [", "overlaps topk_weights ["},
           [](Args& args) { args.y = operands.factors.data(); });
    launch("not prepared", MK_ERROR_NOT_PREPARED, {"mk_moe_gemm_combine_prepare", "hidden=1024"},
           [](Args& args) {
             args.hidden = 1024;
             args.tokens = 0;
             alignas(16) static std::array<uint16_t, 1024 * 8 * 16> wide;
             args.w = wide.data();
           });
  }
}

void add_routing_bytes(std::vector<BadCall>& calls) {
  const auto add = [&](const char* name, std::vector<std::string> says, int nranks,
                       const std::function<void(mk_moe_maxima_t&)>& change) {
    says.push_back("mk_moe_routing_bytes");
    calls.push_back(
        {std::string("mk_moe_routing_bytes: ") + name, kInvalid, std::move(says), [nranks, change](mk_comm_t) {
           mk_moe_maxima_t maxima = MK_MOE_MAXIMA_INIT;
           set_sizes(maxima);
           change(maxima);
           size_t bytes = 0;
           return mk_moe_routing_bytes(&maxima, nranks, &bytes);
         }});
  };
  const auto nothing = [](mk_moe_maxima_t&) {};
  add("nranks 0", {"nranks", "0"}, 0, nothing);
  add("nranks 5000", {"nranks", "5000"}, 5000, nothing);
  add("tokens", {"maxima.tokens", "-3"}, 2, [](auto& maxima) { maxima.tokens = -3; });
  add("experts", {"maxima.experts", "0"}, 2, [](auto& maxima) { maxima.experts = 0; });
  add("topk", {"maxima.topk", "17"}, 2, [](auto& maxima) { maxima.topk = 17; });
  add("capacity_rows", {"maxima.capacity_rows", "-1"}, 2, [](auto& maxima) { maxima.capacity_rows = -1; });
  add("too many rows", {"set capacity_rows"}, 4000, [](auto& maxima) { maxima.tokens = 1000000; });
}

template <class Op>
std::vector<BadCall> calls_of() {
  Builder<Op> builder;
  builder.pointers();
  // A combine has to be prepared before it looks at its stream.
  if constexpr (std::is_same_v<Op, Dispatch>) builder.stream();
  builder.sizes();
  builder.types();
  builder.tuning();
  builder.buffers();
  builder.record_and_factors();
  return builder.calls;
}

}  // namespace

std::vector<BadCall> bad_moe_calls() {
  std::vector<BadCall> calls = calls_of<Dispatch>();
  const std::vector<BadCall> more = calls_of<Combine>();
  calls.insert(calls.end(), more.begin(), more.end());
  return calls;
}

std::vector<BadCall> bad_routing_bytes_calls() {
  std::vector<BadCall> calls;
  add_routing_bytes(calls);
  return calls;
}

}  // namespace mk::test
