// SPDX-License-Identifier: MIT
// The arithmetic of attention on the host, for a tile of queries of one head against the keys of one chunk.
// fp32 throughout; each sum runs over keys (or queries) in ascending order, so that its bits depend on tile,
// block and chunk sizes alone.
#pragma once

#include <cstdint>
#include <vector>

#include "plan.h"

namespace mk::ring_attention {

// Rows of one head, 16-bit elements.
struct HeadRows {
  const uint16_t* data = nullptr;
  int64_t stride = 0;  // elements from row to row
  int dim = 0;
  mk_dtype_t dtype = MK_DTYPE_BF16;

  HeadRows from(int64_t row) const { return {data + row * stride, stride, dim, dtype}; }
  void load(int count, float* out) const;             // [count][dim]
  void load_transposed(int count, float* out) const;  // [dim][kMostTileRows]
};

// Rows of the chunk that a query sees: [begin, end).
struct KeyRange {
  int64_t begin;
  int64_t end;
};

// What some keys give to each query of a tile: the softmax of their logits not yet divided by its sum, or, in
// the backward call, a part of dQ.
struct Part {
  std::vector<float> values;   // [rows][dim]
  std::vector<float> maximum;  // [rows] of the logits, -inf: none
  std::vector<float> sum;      // [rows] of exp(logit - maximum)

  Part() = default;
  Part(int rows, int dim);
};

// Keys and values of a block, and logits, as fp32. One a thread.
struct BlockScratch {
  explicit BlockScratch(int dim);
  std::vector<float> keys;     // [dim][kMostTileRows]
  std::vector<float> values;   // [kMostTileRows][dim]
  std::vector<float> queries;  // [kMostTileRows][dim]
  std::vector<float> weights;  // [kMostTileRows][kMostTileRows]
};

// out[i][j] = a_i . b_j for i < rows and all columns j of b_transposed [dim][kMostTileRows].
void multiply_transposed(const float* a, int rows, const float* b_transposed, int dim, float* out);
// sum += factor * row
void add_scaled(float* sum, float factor, const float* row, int dim);

// A tile of queries, rows of them, against `num_keys` keys of a chunk, `block` at a time; visible: [rows].
struct TileAgainstChunk {
  HeadRows queries;
  int rows;
  HeadRows keys;
  HeadRows values;
  int64_t num_keys;
  int block;
  const KeyRange* visible;
  float scale;

  // Does any query see one of the keys [begin, begin + count)?
  bool sees(int64_t begin, int64_t count) const;
};
Part attend(const TileAgainstChunk& work, BlockScratch& scratch);

// The part of both key sets together.
void merge_softmax(Part& into, const Part& from, int dim);

}  // namespace mk::ring_attention
