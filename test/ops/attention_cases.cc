// SPDX-License-Identifier: MIT
#include <algorithm>
#include <random>

#include "attention_launch.h"

namespace mk::test {

const std::vector<std::vector<int32_t>>& attention_layouts() {
  static const std::vector<std::vector<int32_t>> layouts = {
      {0},
      {0, 0},
      {0, 1},
      {0, 0, 0},
      {0, 0, 1},
      {0, 1, 2},
      {0, 1, 0, 1},
      {0, 0, 0, 1, 1},
      {0, 1, 0, 2, 0},
      {7, 3, 7, 3, 3, 9},
      {0, 0, 0, 0, 1, 1, 1},
      {0, 0, 0, 0, 0, 0, 0, 0},
      {0, 1, 0, 1, 0, 1, 0, 1},
  };
  return layouts;
}

namespace {

constexpr mk_causal_t kCausal[] = {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG};

// Sequences of random lengths, empty ones among them.
std::vector<int32_t> random_bounds(std::mt19937_64& random, int64_t seq, int num_sequences) {
  std::vector<int32_t> bounds{0, static_cast<int32_t>(seq)};
  for (int at = 1; at < num_sequences; ++at)
    bounds.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(seq + 1)));
  std::sort(bounds.begin(), bounds.end());
  return bounds;
}

}  // namespace

std::vector<AttentionCase> attention_corner_cases(int nranks) {
  std::vector<AttentionCase> cases;
  const auto add = [&](int64_t seq, mk_causal_t causal, int dim) -> AttentionCase& {
    AttentionCase& attention = cases.emplace_back();
    attention.seq = seq;
    attention.causal = causal;
    attention.dim = dim;
    attention.seed = cases.size();
    return attention;
  };
  for (const mk_causal_t causal : kCausal) {
    add(8 * nranks, causal, 16);
    add(0, causal, 8);
    add(1, causal, 8);
    add(nranks > 1 ? nranks - 1 : 1, causal, 24);  // ranks without rows
    AttentionCase& groups = add(5 * nranks + 3, causal, 40);
    groups.batch = 2;
    groups.heads = 4;
    groups.kv_heads = 2;
    groups.layout = MK_ATTENTION_BHSD;
    groups.tuning.chunk_bytes = 1;
    for (const Numbers numbers : {Numbers::uniform, Numbers::one_hot, Numbers::large, Numbers::masked}) {
      AttentionCase& adverse = add(6 * nranks + 1, causal, 16);
      adverse.numbers = numbers;
      adverse.heads = 2;
      adverse.softmax_scale = numbers == Numbers::large ? 0.5f : 1;
      adverse.tuning.chunk_bytes = 200;
      adverse.tuning.tile_m = 3;
    }
    // Sequences inside a rank, over several, of one position, and empty.
    AttentionCase& packed = add(9 * nranks + 2, causal, 16);
    packed.cu_seqlens = {0, 0, 3, 4, static_cast<int32_t>(7 * nranks), static_cast<int32_t>(packed.seq)};
    packed.cu_seqlens.push_back(packed.cu_seqlens.back());
    packed.heads = packed.kv_heads = 2;
    packed.tuning.chunk_bytes = 300;
    AttentionCase& local = add(6 * nranks, causal, 8);  // each rank its own sequences
    for (int32_t bound = 0; bound <= local.seq; bound += 3) local.cu_seqlens.push_back(bound);
  }
  AttentionCase& wide = add(4 * nranks, MK_CAUSAL_ZIGZAG, 128);
  wide.dtype = MK_DTYPE_FP16;
  add(3 * nranks + 1, MK_CAUSAL_CONTIGUOUS, 256).dtype = MK_DTYPE_FP16;
  add(2 * nranks + 1, MK_CAUSAL_NONE, 72).heads = 3;
  // More rows than a tile and than chunks.
  AttentionCase& long_rows = add(nranks <= 2 ? 70 * nranks : 7 * nranks, MK_CAUSAL_ZIGZAG, 8);
  long_rows.tuning.chunk_bytes = 1;
  long_rows.tuning.compute_ctas = 2;
  AttentionCase& mqa = add(3 * nranks, MK_CAUSAL_NONE, 64);
  mqa.heads = 5;
  AttentionCase& infinite = add(12 * nranks, MK_CAUSAL_NONE, 16);
  infinite.dtype = MK_DTYPE_FP16;
  infinite.numbers = Numbers::masked;
  for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_ZIGZAG}) {
    AttentionCase& rising = add(20 * nranks + 3, causal, 16);
    rising.numbers = Numbers::rising;
    rising.softmax_scale = 1;
  }
  return cases;
}

AttentionCase mixed_attention_case(uint64_t seed, uint64_t index, int nranks) {
  std::mt19937_64 random(seed * 0x9e3779b97f4a7c15ull + index);
  const auto below = [&](uint64_t bound) { return static_cast<int64_t>(random() % bound); };
  const auto one_in = [&](uint64_t chances) { return below(chances) == 0; };
  AttentionCase attention;
  attention.seed = random() >> 32;
  attention.seq =
      one_in(6) ? below(static_cast<uint64_t>(nranks) + 1) : 1 + below(static_cast<uint64_t>(nranks) * 9);
  attention.batch = one_in(3) ? 1 + below(3) : 1;
  attention.kv_heads = static_cast<int>(1 + below(2));
  attention.heads = attention.kv_heads * static_cast<int>(1 + below(3));
  attention.dim = static_cast<int>(8 * (1 + below(one_in(5) ? 16 : 4)));
  attention.causal = kCausal[below(3)];
  attention.layout = one_in(2) ? MK_ATTENTION_BHSD : MK_ATTENTION_BSHD;
  attention.dtype = one_in(2) ? MK_DTYPE_FP16 : MK_DTYPE_BF16;
  if (one_in(4)) attention.softmax_scale = one_in(2) ? 0.25f : -0.5f;
  if (one_in(3)) {
    attention.batch = 1;
    attention.cu_seqlens = random_bounds(random, attention.seq, static_cast<int>(1 + below(6)));
  }
  if (one_in(2)) {
    attention.tuning.chunk_bytes = 1 + below(2000);
    attention.tuning.tile_m = static_cast<int32_t>(1 + below(9));
    attention.tuning.tile_n = static_cast<int32_t>(1 + below(9));
  }
  if (one_in(3)) attention.tuning.compute_ctas = static_cast<int32_t>(1 + below(3));
  return attention;
}

}  // namespace mk::test
