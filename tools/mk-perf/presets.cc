// SPDX-License-Identifier: MIT
#include "presets.h"

#include "errors.h"

namespace perf {
namespace {

using Shapes = std::vector<Shape>;

bool is_gemm(const std::string& name) {
  return name == "allgather_gemm" || name == "allgather_gemm_wgrad" || name == "gemm_reduce_scatter" ||
         name == "gemm_allreduce";
}

bool is_attention(const std::string& name) {
  return name == "ring_attention" || name == "ring_attention_backward";
}

bool is_moe(const std::string& name) { return name == "moe_dispatch_gemm" || name == "moe_gemm_combine"; }

// A mask is balanced: zigzag.
Shape attention(int64_t batch, int64_t seq, int64_t heads, int64_t kv_heads, int64_t dim, int64_t causal) {
  return {{"batch", batch}, {"seq", seq},       {"heads", heads},   {"kv_heads", kv_heads},
          {"dim", dim},     {"causal", causal}, {"zigzag", causal}, {"packed", 0}};
}

// The part of a size that is split between the ranks.
int64_t share(const char* preset, int64_t size, int nranks) {
  if (size % nranks) {
    throw UsageError("--preset " + std::string(preset) + ": " + std::to_string(nranks) +
                     " ranks do not divide " + std::to_string(size) + "; choose a number of ranks that does");
  }
  return size / nranks;
}

// Small enough for the host executor on two cores; the second shape has remainders everywhere.
Shapes default_shapes(const std::string& name, int nranks) {
  if (is_gemm(name)) return {{{"m", 384}, {"n", 192}, {"k", 384}}, {{"m", 197}, {"n", 75}, {"k", 131}}};
  if (is_moe(name))
    return {{{"tokens", 64 * nranks}, {"hidden", 128}, {"inter", 64}, {"experts", 2 * nranks}, {"topk", 2}}};
  return {attention(1, 128 * nranks, 2, 1, 64, 1)};
}

// What a run on GPUs has that names none: a few sizes that a GPU is made for.
Shapes gpu(const std::string& name, int nranks) {
  constexpr int64_t kHidden = 8192;
  constexpr int64_t kPart = 3584;  // of a feed-forward size of 28672 an eighth
  const int64_t n = name == "allgather_gemm" ? kPart : kHidden;
  const int64_t k = name == "allgather_gemm" ? kHidden : kPart;
  if (is_gemm(name))
    return {{{"m", 64}, {"n", n}, {"k", k}},
            {{"m", 4096}, {"n", n}, {"k", k}},
            {{"m", 1000}, {"n", 1000}, {"k", 1000}}};
  if (is_moe(name)) {
    Shapes shapes;
    for (const int64_t tokens : {16, 2048})
      shapes.push_back({{"tokens", tokens * nranks},
                        {"hidden", 7168},
                        {"inter", 2048},
                        {"experts", 8 * nranks},
                        {"topk", 4}});
    return shapes;
  }
  return {attention(1, 4096 * nranks, 16, 8, 128, 1)};
}

// A square weight spread over the ranks: by columns for the all-gather, whose gradient has as many rows a rank,
// by the inner dimension otherwise.
Shapes square(const std::string& name, int nranks) {
  Shapes shapes;
  if (!is_gemm(name)) return shapes;
  for (int64_t size = 2048; size <= 32768; size *= 2) {
    const int64_t part = share("square", size, nranks);
    if (name == "allgather_gemm") {
      shapes.push_back({{"m", size}, {"n", part}, {"k", size}});
    } else {
      shapes.push_back({{"m", size}, {"n", size}, {"k", part}});
    }
  }
  return shapes;
}

// A projection of a tensor-parallel layer: the full sizes of its weight [inner, columns].
struct Projection {
  int64_t inner;
  int64_t columns;
};

// Projections that read the residual stream are split by columns and gather rows; those that write it are split
// by the inner dimension and reduce: scattered in training and prefill, everywhere in decoding.
Shapes tensor_parallel(const char* preset, const std::string& name, int nranks,
                       const std::vector<Projection>& reading, const std::vector<Projection>& writing) {
  const bool gather = name == "allgather_gemm" || name == "allgather_gemm_wgrad";
  const std::vector<int64_t> row_counts = name == "gemm_allreduce"
                                              ? std::vector<int64_t>{16, 32, 64, 128, 256, 1024}
                                              : std::vector<int64_t>{1024, 2048, 4096, 8192, 16384};
  Shapes shapes;
  for (const Projection& projection : gather ? reading : writing) {
    const int64_t n = gather ? share(preset, projection.columns, nranks) : projection.columns;
    const int64_t k = gather ? projection.inner : share(preset, projection.inner, nranks);
    // The gradient of a weight [inner, columns] of which a rank has n columns: [n, inner], summed over m rows.
    const bool gradient = name == "allgather_gemm_wgrad";
    for (const int64_t m : row_counts)
      shapes.push_back({{"m", m}, {"n", gradient ? k : n}, {"k", gradient ? n : k}});
  }
  return shapes;
}

// Hidden size 8192, 64 heads and 8 key-value heads of 128, feed-forward size 28672 (The Llama 3 Herd of Models,
// table 3).
Shapes llama3_70b(const std::string& name, int nranks) {
  constexpr int64_t kHidden = 8192;
  constexpr int64_t kQkv = (64 + 2 * 8) * 128;
  constexpr int64_t kFeedForward = 28672;
  if (is_gemm(name)) {
    return tensor_parallel("llama3-70b", name, nranks, {{kHidden, kQkv}, {kHidden, 2 * kFeedForward}},
                           {{kHidden, kHidden}, {kFeedForward, kHidden}});
  }
  Shapes shapes;
  if (is_attention(name)) {
    for (int64_t seq = 8192; seq <= 131072; seq *= 2) {
      shapes.push_back(attention(1, seq, 64, 8, 128, 1));
    }
  }
  return shapes;
}

// Hidden size 7168, 128 heads, low-rank queries of 1536 and keys and values of 512, heads of 128 + 64 rotary,
// 256 routed experts of 2048, 8 a token, three dense layers of 18432 (DeepSeek-V3 Technical Report,
// section 4.2).
Shapes deepseek_v3(const std::string& name, int nranks) {
  constexpr int64_t kHidden = 7168;
  constexpr int64_t kHeads = 128;
  constexpr int64_t kDenseFeedForward = 18432;
  if (is_gemm(name)) {
    return tensor_parallel(
        "deepseek-v3", name, nranks,
        {{1536, kHeads * (128 + 64)}, {512, kHeads * (128 + 128)}, {kHidden, 2 * kDenseFeedForward}},
        {{kHeads * 128, kHidden}, {kDenseFeedForward, kHidden}});
  }
  Shapes shapes;
  if (is_moe(name)) {
    for (int64_t tokens = 8192; tokens <= 65536; tokens *= 2) {
      shapes.push_back(
          {{"tokens", tokens}, {"hidden", kHidden}, {"inter", 2048}, {"experts", 256}, {"topk", 8}});
    }
  }
  return shapes;
}

// The experts of DeepSeek-V3 at a sixteenth of its sizes, for executors that are not GPUs.
Shapes deepseek_v3_small(const std::string& name, int) {
  if (!is_moe(name)) return {};
  return {{{"tokens", 512}, {"hidden", 448}, {"inter", 128}, {"experts", 32}, {"topk", 8}}};
}

// The ring attention that others publish times of: heads of 128, as many for keys as for queries.
Shapes ring_attention(const std::string& name, int) {
  Shapes shapes;
  for (const int64_t causal : {0, 1}) {
    for (int64_t seq = 6144; is_attention(name) && seq <= 98304; seq *= 2) {
      shapes.push_back(attention(4, seq, 16, 16, 128, causal));
    }
  }
  return shapes;
}

struct Preset {
  const char* name;
  Shapes (*shapes)(const std::string& operator_name, int nranks);
};
constexpr Preset kPresets[] = {{"gpu", gpu},
                               {"square", square},
                               {"llama3-70b", llama3_70b},
                               {"deepseek-v3", deepseek_v3},
                               {"deepseek-v3-small", deepseek_v3_small},
                               {"ring-attention", ring_attention}};

}  // namespace

std::string preset_names() {
  std::string names;
  for (const Preset& preset : kPresets) names += (names.empty() ? "" : ", ") + std::string(preset.name);
  return names;
}

std::vector<Shape> preset_shapes(const std::string& preset, const std::string& operator_name, int nranks) {
  if (preset == "default") return default_shapes(operator_name, nranks);
  for (const Preset& candidate : kPresets) {
    if (preset == candidate.name) return candidate.shapes(operator_name, nranks);
  }
  throw UsageError("--preset: expected one of " + preset_names() + ", saw \"" + preset + "\"");
}

}  // namespace perf
