// SPDX-License-Identifier: MIT
// Bad arguments of the GEMM operators' functions.
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "test/multi_rank/bad_call_builder.h"

namespace mk::test {
namespace {

// Large enough for every matrix of the good call: m 32, n 16, k 24.
struct Operands {
  alignas(16) std::array<uint16_t, 2048> a{};
  alignas(16) std::array<uint16_t, 2048> b{};
  alignas(16) std::array<float, 2048> c{};
  alignas(16) std::array<uint16_t, 2048> gathered{};
  alignas(16) std::array<float, 64> bias{};
};
Operands operands;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr auto kInvalid = MK_ERROR_INVALID_ARGUMENT;
constexpr auto kUnsupported = MK_ERROR_UNSUPPORTED;

// Inputs, sizes and outputs that all three have.
template <class OpArgs>
OpArgs filled(OpArgs args) {
  args.m = 32, args.n = 16, args.k = 24;
  args.out_dtype = MK_DTYPE_FP32;
  args.a = operands.a.data(), args.lda = 24;
  args.b = operands.b.data(), args.ldb = 16;
  args.c = operands.c.data(), args.ldc = 16;
  return args;
}

struct Gemm {
  using Maxima = mk_gemm_maxima_t;
  static Maxima good_maxima() {
    Maxima maxima = MK_GEMM_MAXIMA_INIT;
    maxima.m = 32, maxima.n = 16, maxima.k = 24;
    return maxima;
  }
};
struct AllgatherGemm : Gemm {
  using Args = mk_allgather_gemm_args_t;
  static constexpr const char* kName = "mk_allgather_gemm";
  static constexpr auto kPrepare = mk_allgather_gemm_prepare;
  static constexpr auto kWorkspaceBytes = mk_allgather_gemm_workspace_bytes;
  static constexpr auto kPlan = mk_allgather_gemm_plan;
  static constexpr auto kLaunch = mk_allgather_gemm;
  static Args good() { return filled<Args>(MK_ALLGATHER_GEMM_ARGS_INIT); }
};
struct GemmReduceScatter : Gemm {
  using Args = mk_gemm_reduce_scatter_args_t;
  static constexpr const char* kName = "mk_gemm_reduce_scatter";
  static constexpr auto kPrepare = mk_gemm_reduce_scatter_prepare;
  static constexpr auto kWorkspaceBytes = mk_gemm_reduce_scatter_workspace_bytes;
  static constexpr auto kPlan = mk_gemm_reduce_scatter_plan;
  static constexpr auto kLaunch = mk_gemm_reduce_scatter;
  static Args good() { return filled<Args>(MK_GEMM_REDUCE_SCATTER_ARGS_INIT); }
};
struct GemmAllreduce : Gemm {
  using Args = mk_gemm_allreduce_args_t;
  static constexpr const char* kName = "mk_gemm_allreduce";
  static constexpr auto kPrepare = mk_gemm_allreduce_prepare;
  static constexpr auto kWorkspaceBytes = mk_gemm_allreduce_workspace_bytes;
  static constexpr auto kPlan = mk_gemm_allreduce_plan;
  static constexpr auto kLaunch = mk_gemm_allreduce;
  static Args good() { return filled<Args>(MK_GEMM_ALLREDUCE_ARGS_INIT); }
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
  void matrices();
  void overlaps();
  void gather_only();
  void wgrad();
};

template <class Op>
void Builder<Op>::sizes() {
  any("m -1", kInvalid, {Op::kName, " m: expected", "-1"}, [](auto& value) { value.m = -1; });
  any("n -7", kInvalid, {Op::kName, " n: expected", "-7"}, [](auto& value) { value.n = -7; });
  any("k -8", kInvalid, {Op::kName, " k: expected", "-8"}, [](auto& value) { value.k = -8; });
  any("m INT64_MAX", kInvalid, {" m: expected", "9223372036854775807"}, [](auto& value) { value.m = kHuge; });
  any("n INT64_MAX", kInvalid, {" n: expected", "9223372036854775807"}, [](auto& value) { value.n = kHuge; });
  any("k INT64_MAX", kInvalid, {" k: expected", "9223372036854775807"}, [](auto& value) { value.k = kHuge; });
  any("m * k overflows", kInvalid, {" a: expected", "4398046511104"}, [](auto& value) {
    value.m = int64_t{1} << 42;
    value.k = int64_t{1} << 42;
  });
  any("k * n overflows", kInvalid, {" b: expected", "4398046511104"}, [](auto& value) {
    value.k = int64_t{1} << 42;
    value.n = int64_t{1} << 42;
    value.m = 1;
  });
  any("m * n too large", kInvalid, {" c: expected", "1073741824"},
      [](auto& value) { value.m = value.n = int64_t{1} << 30; });
}

template <class Op>
void Builder<Op>::types() {
  for (const mk_dtype_t fp8 : {MK_DTYPE_FP8_E4M3, MK_DTYPE_FP8_E5M2}) {
    const char* const seen = fp8 == MK_DTYPE_FP8_E4M3 ? "fp8_e4m3" : "fp8_e5m2";
    any("dtype fp8", kUnsupported, {Op::kName, "dtype", seen}, [fp8](auto& value) { value.dtype = fp8; });
    any("out_dtype fp8", kUnsupported, {"out_dtype", seen}, [fp8](auto& value) { value.out_dtype = fp8; });
    plan("bias_dtype fp8", kUnsupported, {"bias_dtype", seen}, [fp8](Args& args) { args.bias_dtype = fp8; });
  }
  any("dtype fp32", kUnsupported, {"dtype", "fp32"}, [](auto& value) { value.dtype = MK_DTYPE_FP32; });
  const auto bad = static_cast<mk_dtype_t>(77);
  any("dtype 77", kInvalid, {"dtype", "expected", "77"}, [bad](auto& value) { value.dtype = bad; });
  any("out_dtype 77", kInvalid, {"out_dtype", "77"}, [bad](auto& value) { value.out_dtype = bad; });
  plan("bias_dtype 77", kInvalid, {"bias_dtype", "77"},
       [](Args& args) { args.bias_dtype = static_cast<mk_dtype_t>(77); });
  plan("b_layout 5", kInvalid, {"b_layout", "5"},
       [](Args& args) { args.b_layout = static_cast<mk_layout_t>(5); });
  plan("accumulate 2", kInvalid, {"accumulate", "0 or 1", "2"}, [](Args& args) { args.accumulate = 2; });
  plan("accumulate -1", kInvalid, {"accumulate", "0 or 1", "-1"}, [](Args& args) { args.accumulate = -1; });
  if constexpr (!std::is_same_v<Op, AllgatherGemm>) {
    any("comm_dtype fp8", kUnsupported, {"comm_dtype", "fp8_e4m3"},
        [](auto& value) { value.comm_dtype = MK_DTYPE_FP8_E4M3; });
    any("comm_dtype 77", kInvalid, {"comm_dtype", "77"}, [bad](auto& value) { value.comm_dtype = bad; });
    maxima("mode of another operator", kInvalid, {"mode", "1"},
           [](mk_gemm_maxima_t& value) { value.mode = MK_ALLGATHER_WGRAD; });
  }
}

template <class Op>
void Builder<Op>::tuning() {
  tuned("tuning.struct_size", kInvalid, {"tuning.struct_size", "saw 3"}, [](auto& t) { t.struct_size = 3; });
  tuned("tuning.algorithm", kInvalid, {"tuning.algorithm", "9"},
        [](auto& t) { t.algorithm = static_cast<mk_algorithm_t>(9); });
  tuned("tuning.compute_ctas", kInvalid, {"tuning.compute_ctas", "-1"}, [](auto& t) { t.compute_ctas = -1; });
  tuned("tuning.copy_ctas", kInvalid, {"tuning.copy_ctas", "-2"}, [](auto& t) { t.copy_ctas = -2; });
  tuned("tuning.send_ctas", kInvalid, {"tuning.send_ctas", "70000"}, [](auto& t) { t.send_ctas = 70000; });
  tuned("tuning.receive_ctas", kInvalid, {"tuning.receive_ctas", "-3"}, [](auto& t) { t.receive_ctas = -3; });
  tuned("tuning.reduce_ctas", kInvalid, {"tuning.reduce_ctas", "-4"}, [](auto& t) { t.reduce_ctas = -4; });
  tuned("tuning.tile_m", kInvalid, {"tuning.tile_m", "100000"}, [](auto& t) { t.tile_m = 100000; });
  tuned("tuning.tile_n", kInvalid, {"tuning.tile_n", "-64"}, [](auto& t) { t.tile_n = -64; });
  tuned("tuning.chunk_bytes", kInvalid, {"tuning.chunk_bytes", "-1"}, [](auto& t) { t.chunk_bytes = -1; });
  if constexpr (std::is_same_v<Op, GemmAllreduce>) {
    tuned("one shot", kUnsupported, {"MK_ALGORITHM_ONE_SHOT"},
          [](auto& t) { t.algorithm = MK_ALGORITHM_ONE_SHOT; });
  }
}

template <class Op>
void Builder<Op>::matrices() {
  launch("a NULL", kInvalid, {" a: expected", "NULL"}, [](Args& args) { args.a = nullptr; });
  launch("b NULL", kInvalid, {" b: expected", "NULL"}, [](Args& args) { args.b = nullptr; });
  launch("c NULL", kInvalid, {" c: expected", "NULL"}, [](Args& args) { args.c = nullptr; });
  launch("a misaligned", kInvalid, {" a: expected", "16-byte", "0x"},
         [](Args& args) { args.a = shifted(args.a, 2); });
  launch("b misaligned", kInvalid, {" b: expected", "16-byte", "0x"},
         [](Args& args) { args.b = shifted(args.b, 8); });
  launch("c misaligned", kInvalid, {" c: expected", "16-byte", "0x"},
         [](Args& args) { args.c = shifted(args.c, 4); });
  launch("lda too small", kInvalid, {"lda: expected", "24", "saw 16"}, [](Args& args) { args.lda = 16; });
  launch("lda 0", kInvalid, {"lda: expected", "24", "saw 0"}, [](Args& args) { args.lda = 0; });
  launch("lda -24", kInvalid, {"lda: expected", "-24"}, [](Args& args) { args.lda = -24; });
  launch("ldb too small", kInvalid, {"ldb: expected", "16", "saw 8"}, [](Args& args) { args.ldb = 8; });
  launch("ldb too small for [n, k]", kInvalid, {"ldb: expected", "24", "saw 16"},
         [](Args& args) { args.b_layout = MK_LAYOUT_NK; });
  launch("ldc too small", kInvalid, {"ldc: expected", "16", "saw 12"}, [](Args& args) { args.ldc = 12; });
  launch("lda misaligned", kInvalid, {"lda: expected", "8 elements", "saw 25"},
         [](Args& args) { args.lda = 25; });
  launch("ldb misaligned", kInvalid, {"ldb: expected", "8 elements", "saw 20"},
         [](Args& args) { args.ldb = 20; });
  launch("ldc misaligned", kInvalid, {"ldc: expected", "4 elements", "saw 18"},
         [](Args& args) { args.ldc = 18; });
  launch("lda overflows", kInvalid, {" a: expected", "9223372036854775800"},
         [](Args& args) { args.lda = kHuge - 7; });
  launch("bias misaligned", kInvalid, {"bias: expected", "0x"}, [](Args& args) {
    args.bias_dtype = MK_DTYPE_FP32;
    args.bias = shifted(operands.bias.data(), 2);
  });
}

template <class Op>
void Builder<Op>::overlaps() {
  launch("c overlaps a", kInvalid, {"c [", "overlaps a ["}, [](Args& args) { args.c = operands.a.data(); });
  launch("c overlaps b", kInvalid, {"c [", "overlaps b ["}, [](Args& args) { args.c = operands.b.data(); });
  launch("c overlaps bias", kInvalid, {"c [", "overlaps bias ["}, [](Args& args) {
    args.bias_dtype = MK_DTYPE_FP32;
    args.bias = shifted(operands.c.data(), 16);
  });
}

// Mode WGRAD: X[m_r, n] in a, dY[m, k] in b, C[k, n].
template <class Op>
void Builder<Op>::wgrad() {
  const auto in_mode = [this](const char* name, std::vector<std::string> says, auto change) {
    this->launch(name, kInvalid, std::move(says), [change](Args& args) {
      args.mode = MK_ALLGATHER_WGRAD;
      args.lda = 16, args.ldb = 24, args.ldc = 16;
      change(args);
    });
  };
  in_mode("WGRAD, bias", {"bias: expected NULL", "MK_ALLGATHER_WGRAD", "0x"},
          [](Args& args) { args.bias = operands.bias.data(); });
  in_mode("WGRAD, a NULL", {" a: expected", "x 16", "NULL"}, [](Args& args) { args.a = nullptr; });
  in_mode("WGRAD, b NULL", {" b: expected", "32 x 24", "NULL"}, [](Args& args) { args.b = nullptr; });
  in_mode("WGRAD, c NULL", {" c: expected", "24 x 16", "NULL"}, [](Args& args) { args.c = nullptr; });
  in_mode("WGRAD, lda too small", {"lda: expected", "16", "saw 8"}, [](Args& args) { args.lda = 8; });
  in_mode("WGRAD, ldb too small", {"ldb: expected", "24", "saw 16"}, [](Args& args) { args.ldb = 16; });
  in_mode("WGRAD, ldb too small for [k, m]", {"ldb: expected", "32", "saw 24"},
          [](Args& args) { args.b_layout = MK_LAYOUT_NK; });
  in_mode("WGRAD, ldc too small", {"ldc: expected", "16", "saw 12"}, [](Args& args) { args.ldc = 12; });
  in_mode("WGRAD, lda_gathered too small", {"lda_gathered: expected", "16", "saw 8"}, [](Args& args) {
    args.a_gathered = operands.gathered.data();
    args.lda_gathered = 8;
  });
  in_mode("WGRAD, c overlaps b", {"c [", "overlaps b ["}, [](Args& args) { args.c = operands.b.data(); });
  any("WGRAD, m * n too large", kInvalid, {" a: expected", "4398046511104"}, [](auto& value) {
    value.mode = MK_ALLGATHER_WGRAD;
    value.m = value.n = int64_t{1} << 42;
    value.k = 1;
  });
  any("WGRAD, m * k too large", kInvalid, {" b: expected", "4398046511104"}, [](auto& value) {
    value.mode = MK_ALLGATHER_WGRAD;
    value.m = value.k = int64_t{1} << 42;
    value.n = 1;
  });
}

template <class Op>
void Builder<Op>::gather_only() {
  wgrad();
  any("mode 9", kInvalid, {"mode", "9"}, [](auto& value) { value.mode = static_cast<mk_allgather_mode_t>(9); });
  const auto gathered = [this](const char* name, std::vector<std::string> says, void* where, int64_t ld) {
    launch(name, kInvalid, std::move(says), [where, ld](Args& args) {
      args.a_gathered = where;
      args.lda_gathered = ld;
    });
  };
  gathered("a_gathered misaligned", {"a_gathered: expected", "16-byte"}, shifted(operands.gathered.data(), 2),
           24);
  gathered("lda_gathered too small", {"lda_gathered: expected", "24", "saw 16"}, operands.gathered.data(), 16);
  gathered("lda_gathered misaligned", {"lda_gathered: expected", "saw 26"}, operands.gathered.data(), 26);
  gathered("a_gathered overlaps a", {"a_gathered [", "overlaps a ["}, operands.a.data(), 24);
  gathered("a_gathered overlaps b", {"a_gathered [", "overlaps b ["}, operands.b.data(), 24);
  gathered("a_gathered overlaps c", {"overlaps", "c [", "a_gathered ["}, operands.c.data(), 24);
  launch("a_gathered overlaps bias", kInvalid, {"a_gathered [", "overlaps bias ["}, [](Args& args) {
    args.a_gathered = operands.gathered.data();
    args.lda_gathered = 24;
    args.bias = operands.gathered.data() + 8;
  });
}

template <class Op>
std::vector<BadCall> calls_of() {
  Builder<Op> builder;
  builder.pointers();
  builder.stream();
  builder.sizes();
  builder.types();
  builder.tuning();
  builder.matrices();
  builder.overlaps();
  if constexpr (std::is_same_v<Op, AllgatherGemm>) builder.gather_only();
  return builder.calls;
}

}  // namespace

std::vector<BadCall> bad_gemm_calls() {
  std::vector<BadCall> calls = calls_of<AllgatherGemm>();
  for (const auto& more : {calls_of<GemmReduceScatter>(), calls_of<GemmAllreduce>()}) {
    calls.insert(calls.end(), more.begin(), more.end());
  }
  return calls;
}

}  // namespace mk::test
