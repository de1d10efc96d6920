// SPDX-License-Identifier: MIT
// Bad arguments of ring attention's functions.
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "test/multi_rank/bad_call_builder.h"

namespace mk::test {
namespace {

// Large enough for every tensor of the good call: batch 1, seq 20 (rows on each of up to 5 ranks), heads 4,
// kv_heads 2, dim 16.
using Elements = std::array<uint16_t, 1024>;
struct Operands {
  alignas(16) Elements q{}, k{}, v{}, o{}, d_o{}, dq{}, dk{}, dv{};
  alignas(16) std::array<float, 64> lse{};
  alignas(16) std::array<int32_t, 4> cu_seqlens{0, 5, 12, 20};
};
Operands operands;

constexpr auto kInvalid = MK_ERROR_INVALID_ARGUMENT;
constexpr auto kUnsupported = MK_ERROR_UNSUPPORTED;
constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

template <class Value>
void set_sizes(Value& value) {
  value.batch = 1, value.seq = 20;
  value.heads = 4, value.kv_heads = 2, value.dim = 16;
}

// What both directions have.
template <class OpArgs>
OpArgs filled(OpArgs args) {
  set_sizes(args);
  args.q = operands.q.data(), args.k = operands.k.data(), args.v = operands.v.data();
  args.o = operands.o.data();
  args.lse = operands.lse.data();
  return args;
}
template <class OpArgs>
void pack(OpArgs& args) {
  args.num_sequences = 3;
  args.cu_seqlens = operands.cu_seqlens.data();
}

struct Attention {
  using Maxima = mk_ring_attention_maxima_t;
  static Maxima good_maxima() {
    Maxima maxima = MK_RING_ATTENTION_MAXIMA_INIT;
    set_sizes(maxima);
    return maxima;
  }
};
struct Forward : Attention {
  using Args = mk_ring_attention_args_t;
  static constexpr const char* kName = "mk_ring_attention";
  static constexpr auto kPrepare = mk_ring_attention_prepare;
  static constexpr auto kWorkspaceBytes = mk_ring_attention_workspace_bytes;
  static constexpr auto kPlan = mk_ring_attention_plan;
  static constexpr auto kLaunch = mk_ring_attention;
  static Args good() { return filled<Args>(MK_RING_ATTENTION_ARGS_INIT); }
};
struct Backward : Attention {
  using Args = mk_ring_attention_backward_args_t;
  static constexpr const char* kName = "mk_ring_attention_backward";
  static constexpr auto kPrepare = mk_ring_attention_backward_prepare;
  static constexpr auto kWorkspaceBytes = mk_ring_attention_backward_workspace_bytes;
  static constexpr auto kPlan = mk_ring_attention_backward_plan;
  static constexpr auto kLaunch = mk_ring_attention_backward;
  static Args good() {
    Args args = filled<Args>(MK_RING_ATTENTION_BACKWARD_ARGS_INIT);
    args.d_o = operands.d_o.data();
    args.dq = operands.dq.data(), args.dk = operands.dk.data(), args.dv = operands.dv.data();
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
  void modes();
  void tuning();
  void packed();
  void buffers();
  void buffer(const char* name, const void* Args::*field);
  void buffer(const char* name, void* Args::*field);
  void overlaps();
};

template <class Op>
void Builder<Op>::sizes() {
  any("batch -1", kInvalid, {Op::kName, " batch: expected", "-1"}, [](auto& value) { value.batch = -1; });
  any("seq -3", kInvalid, {Op::kName, " seq: expected", "-3"}, [](auto& value) { value.seq = -3; });
  any("batch INT64_MAX", kInvalid, {" batch: expected", "9223372036854775807"},
      [](auto& value) { value.batch = kHuge; });
  any("seq INT64_MAX", kInvalid, {" seq: expected", "9223372036854775807"},
      [](auto& value) { value.seq = kHuge; });
  any("heads 0", kInvalid, {" heads: expected 1", "saw 0"}, [](auto& value) { value.heads = 0; });
  any("heads -4", kInvalid, {" heads: expected 1", "saw -4"}, [](auto& value) { value.heads = -4; });
  any("heads 2^30", kInvalid, {" heads: expected", "1073741824"}, [](auto& value) { value.heads = 1 << 30; });
  any("kv_heads 0", kInvalid, {" kv_heads: expected 1", "saw 0"}, [](auto& value) { value.kv_heads = 0; });
  any("kv_heads 3", kInvalid, {" kv_heads: expected", "(4)", "saw 3"}, [](auto& value) { value.kv_heads = 3; });
  any("kv_heads 8", kInvalid, {" kv_heads: expected", "(4)", "saw 8"}, [](auto& value) { value.kv_heads = 8; });
  for (const int dim : {0, -8, 4, 12, 1032})
    any("dim", kInvalid, {" dim: expected", "multiple of 8", "saw " + std::to_string(dim)},
        [dim](auto& value) { value.dim = dim; });
  any("too many elements", kInvalid, {" q: expected", "elements"},
      [](auto& value) { value.seq = value.batch = int64_t{1} << 30; });
  any("too many elements without rows", kInvalid, {" q: expected", "elements"}, [](auto& value) {
    value.seq = 0;
    value.batch = int64_t{1} << 44;
  });
  any("num_sequences -1", kInvalid, {"num_sequences", "-1"}, [](auto& value) { value.num_sequences = -1; });
  any("num_sequences INT32_MAX", kInvalid, {"num_sequences", "2147483647"},
      [](auto& value) { value.num_sequences = INT32_MAX; });
  maxima("chunks too large", kUnsupported, {"transfer"}, [](auto& value) { value.seq = int64_t{1} << 37; });
}

template <class Op>
void Builder<Op>::modes() {
  for (const mk_dtype_t fp8 : {MK_DTYPE_FP8_E4M3, MK_DTYPE_FP8_E5M2}) {
    any("dtype fp8", kUnsupported, {Op::kName, "dtype", fp8 == MK_DTYPE_FP8_E4M3 ? "fp8_e4m3" : "fp8_e5m2"},
        [fp8](auto& value) { value.dtype = fp8; });
  }
  any("dtype fp32", kUnsupported, {"dtype", "fp32"}, [](auto& value) { value.dtype = MK_DTYPE_FP32; });
  any("dtype 77", kInvalid, {"dtype", "expected", "77"},
      [](auto& value) { value.dtype = static_cast<mk_dtype_t>(77); });
  plan("causal 7", kInvalid, {"causal", "expected", "7"},
       [](Args& args) { args.causal = static_cast<mk_causal_t>(7); });
  plan("layout 5", kInvalid, {"layout", "expected", "5"},
       [](Args& args) { args.layout = static_cast<mk_attention_layout_t>(5); });
  plan("softmax_scale NaN", kInvalid, {"softmax_scale", "nan"},
       [](Args& args) { args.softmax_scale = std::nanf(""); });
  plan("softmax_scale inf", kInvalid, {"softmax_scale", "inf"},
       [](Args& args) { args.softmax_scale = -std::numeric_limits<float>::infinity(); });
}

template <class Op>
void Builder<Op>::tuning() {
  tuned("tuning.struct_size", kInvalid, {"tuning.struct_size", "saw 3"}, [](auto& t) { t.struct_size = 3; });
  tuned("tuning.algorithm", kInvalid, {"tuning.algorithm", "9"},
        [](auto& t) { t.algorithm = static_cast<mk_algorithm_t>(9); });
  tuned("tuning.compute_ctas", kInvalid, {"tuning.compute_ctas", "-1"}, [](auto& t) { t.compute_ctas = -1; });
  tuned("tuning.tile_m", kInvalid, {"tuning.tile_m", "100000"}, [](auto& t) { t.tile_m = 100000; });
  tuned("tuning.chunk_bytes", kInvalid, {"tuning.chunk_bytes", "-1"}, [](auto& t) { t.chunk_bytes = -1; });
}

template <class Op>
void Builder<Op>::packed() {
  plan("packed batch", kInvalid, {"batch: expected 1", "saw 2"}, [](Args& args) {
    pack(args);
    args.batch = 2;
  });
  plan("cu_seqlens without num_sequences", kInvalid, {"num_sequences", "cu_seqlens"}, [](Args& args) {
    pack(args);
    args.num_sequences = 0;
  });
  any("packed seq", kInvalid, {"seq: expected", "2147483648"}, [](auto& value) {
    value.num_sequences = 3;
    value.seq = int64_t{1} << 31;
  });
  launch("cu_seqlens NULL", kInvalid, {"cu_seqlens: expected", "NULL"}, [](Args& args) {
    pack(args);
    args.cu_seqlens = nullptr;
  });
  launch("cu_seqlens misaligned", kInvalid, {"cu_seqlens: expected", "0x"}, [](Args& args) {
    pack(args);
    args.cu_seqlens = shifted(args.cu_seqlens, 2);
  });
  launch("q NULL, packed zigzag", kInvalid, {" q: expected", "NULL"}, [](Args& args) {
    pack(args);
    args.causal = MK_CAUSAL_ZIGZAG;
    args.q = nullptr;
  });
}

template <class Op>
void Builder<Op>::buffer(const char* name, const void* Args::*field) {
  launch(name, kInvalid, {std::string(" ") + name + ": expected", "NULL"},
         [field](Args& args) { args.*field = nullptr; });
  launch(name, kInvalid, {std::string(" ") + name + ": expected", "16-byte", "0x"},
         [field](Args& args) { args.*field = shifted(args.*field, 8); });
}

template <class Op>
void Builder<Op>::buffer(const char* name, void* Args::*field) {
  launch(name, kInvalid, {std::string(" ") + name + ": expected", "NULL"},
         [field](Args& args) { args.*field = nullptr; });
  launch(name, kInvalid, {std::string(" ") + name + ": expected", "16-byte", "0x"},
         [field](Args& args) { args.*field = shifted(args.*field, 2); });
}

template <class Op>
void Builder<Op>::buffers() {
  buffer("q", &Args::q);
  buffer("k", &Args::k);
  buffer("v", &Args::v);
  buffer("o", &Args::o);
  launch("lse misaligned", kInvalid, {" lse: expected", "4-byte", "0x"},
         [](Args& args) { args.lse = shifted(args.lse, 2); });
  if constexpr (std::is_same_v<Op, Backward>) {
    buffer("d_o", &Args::d_o);
    buffer("dq", &Args::dq);
    buffer("dk", &Args::dk);
    buffer("dv", &Args::dv);
    launch("lse NULL", kInvalid, {" lse: expected", "NULL"}, [](Args& args) { args.lse = nullptr; });
  }
}

template <class Op>
void Builder<Op>::overlaps() {
  const auto overlap = [this](const char* output, const char* other, std::function<void(Args&)> change) {
    launch("overlap", kInvalid, {std::string(output) + " [", std::string("overlaps ") + other + " ["}, change);
  };
  if constexpr (std::is_same_v<Op, Forward>) {
    overlap("o", "q", [](Args& args) { args.o = operands.q.data(); });
    overlap("o", "k", [](Args& args) { args.o = operands.k.data() + 8; });
    overlap("o", "v", [](Args& args) { args.o = operands.v.data(); });
    overlap("lse", "v", [](Args& args) { args.lse = reinterpret_cast<float*>(operands.v.data()); });
    overlap("lse", "o", [](Args& args) { args.lse = reinterpret_cast<float*>(operands.o.data()); });
    overlap("o", "cu_seqlens", [](Args& args) {
      pack(args);
      args.cu_seqlens = reinterpret_cast<const int32_t*>(operands.o.data());
    });
    overlap("o", "q", [](Args& args) {
      pack(args);
      args.causal = MK_CAUSAL_ZIGZAG;
      args.o = operands.q.data();
    });
  } else {
    overlap("dq", "q", [](Args& args) { args.dq = operands.q.data(); });
    overlap("dk", "k", [](Args& args) { args.dk = operands.k.data(); });
    overlap("dv", "o", [](Args& args) { args.dv = operands.o.data(); });
    overlap("dv", "d_o", [](Args& args) { args.dv = operands.d_o.data(); });
    overlap("dq", "lse", [](Args& args) { args.dq = operands.lse.data(); });
    overlap("dv", "dk", [](Args& args) { args.dv = operands.dk.data() + 8; });
    overlap("dk", "dq", [](Args& args) { args.dk = operands.dq.data(); });
  }
}

template <class Op>
std::vector<BadCall> calls_of() {
  Builder<Op> builder;
  builder.pointers();
  builder.stream();
  builder.sizes();
  builder.modes();
  builder.tuning();
  builder.packed();
  builder.buffers();
  builder.overlaps();
  return builder.calls;
}

}  // namespace

std::vector<BadCall> bad_attention_calls() {
  std::vector<BadCall> calls = calls_of<Forward>();
  const std::vector<BadCall> more = calls_of<Backward>();
  calls.insert(calls.end(), more.begin(), more.end());
  return calls;
}

}  // namespace mk::test
