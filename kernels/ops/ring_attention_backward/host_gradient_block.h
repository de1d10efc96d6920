// SPDX-License-Identifier: MIT
// The arithmetic of the gradients on the host: a tile of queries of one head against the keys of one chunk,
// fp32. With P = exp(scale * Q K^T - lse), dP = dO V^T, delta_i = dO_i . O_i and dS = P * (dP - delta):
//   dV = P^T dO, dQ = scale * dS K, dK = scale * dS^T Q
// (Dao, FlashAttention-2, section 3.2.1). The factor `scale` is left to whoever finishes a sum.
#pragma once

#include "../ring_attention/host_block.h"

namespace mk::ring_attention_backward {

struct QueryTile {
  ring_attention::HeadRows queries;
  ring_attention::HeadRows outputs;
  ring_attention::HeadRows d_outputs;
  const float* lse;  // [rows]; a row of -inf gives nothing
  int rows;
};

// A thread's fp32 copies: load queries and keys, then weigh, then add.
class GradientScratch {
 public:
  explicit GradientScratch(int dim);

  void load_queries(const QueryTile& tile);
  void load_keys(const ring_attention::HeadRows& keys, const ring_attention::HeadRows& values, int count);
  // P and dS of the queries loaded against the keys loaded, which begin at row `begin` of their chunk. visible:
  // [rows], rows of the chunk.
  void weigh(const ring_attention::KeyRange* visible, int64_t begin, float scale);

  void add_to_d_queries(float* d_queries) const;                    // [rows][dim] += dS K
  void add_to_d_keys_values(float* d_keys, float* d_values) const;  // [count][dim] += dS^T Q, += P^T dO

 private:
  const int dim_;
  int rows_ = 0;
  int count_ = 0;
  std::vector<float> queries_, outputs_, d_outputs_, keys_;  // [row][dim]
  std::vector<float> keys_transposed_, values_transposed_;   // [dim][row]
  std::vector<float> lse_, delta_;                           // [row]
  std::vector<float> weights_, d_weights_;                   // P and dS, [query][key]
  std::vector<ring_attention::KeyRange> ranges_;             // of the block, [query]
};

}  // namespace mk::ring_attention_backward
