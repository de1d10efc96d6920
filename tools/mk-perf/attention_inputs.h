// SPDX-License-Identifier: MIT
// The inputs of an attention as functions of their indices, on the host and on the device.
#pragma once

#include <cstdint>

#include "input_matrix.h"
#include "kernels/device/host_device.h"
#include "mkernel.h"

namespace perf {

enum class AttentionTensor { kQ, kK, kV, kDO };

// Packed sequences of different lengths: of N the i-th has i + 1 of N (N + 1) / 2 equal parts. One: the whole.
constexpr int kMostSequences = 16;
struct AttentionSequences {
  int64_t seq;
  int count;

  MK_HOST_DEVICE int64_t begin(int64_t sequence) const {
    return seq * (sequence * (sequence + 1)) / (int64_t{count} * (count + 1));
  }
  MK_HOST_DEVICE int of(int64_t position) const {
    int sequence = 0;
    while (begin(sequence + 1) <= position) ++sequence;
    return sequence;
  }
};

// Tensors are [batch][position][head][dim].
struct AttentionInputs {
  int64_t batch;
  int64_t seq;
  int heads;
  int kv_heads;
  int dim;
  bool causal;
  Pattern pattern;
  mk_dtype_t dtype;
  uint64_t seed;
  int num_sequences = 1;

  // kRandom: as in InputMatrix, q and k twice as large. kIntegers: keys are the bits of their position as +-1,
  // and a query is 64 times the key of one position that it sees: the logits of all other keys are smaller by
  // 128 and more, whose exponential is zero in fp32. So o is a row of v, which has small integers, dv a sum of
  // rows of d_o, and dq and dk are zero.
  float q(int64_t b, int64_t position, int head, int d) const;
  float k(int64_t b, int64_t position, int head, int d) const;
  float v(int64_t b, int64_t position, int head, int d) const;
  float d_o(int64_t b, int64_t position, int head, int d) const;
  // The same before it is rounded to the dtype; what fills tensors on a GPU rounds as it stores.
  MK_HOST_DEVICE float unrounded(AttentionTensor tensor, int64_t b, int64_t position, int head, int d) const;

  float scale() const;  // as it is given to the library: 1 for integers, 0 (the default) for random inputs
  MK_HOST_DEVICE int heads_of(AttentionTensor tensor) const;
  // The first key that a query sees, and how many it sees from there on.
  MK_HOST_DEVICE int64_t first_visible(int64_t position) const {
    const AttentionSequences sequences = {seq, num_sequences};
    return sequences.begin(sequences.of(position));
  }
  MK_HOST_DEVICE int64_t num_visible(int64_t position) const {
    const AttentionSequences sequences = {seq, num_sequences};
    const int sequence = sequences.of(position);
    return (causal ? position + 1 : sequences.begin(sequence + 1)) - sequences.begin(sequence);
  }
  // kIntegers: the key of a query.
  MK_HOST_DEVICE int64_t picked(int64_t b, int64_t position, int head) const;
};

// The positions that a rank holds: runs of consecutive ones of one sequence, the same number of each sequence,
// any of which may be empty.
struct AttentionPositions {
  static constexpr int kMostRuns = 2 * kMostSequences;
  int num_runs = 0;
  int64_t first[kMostRuns] = {};
  int64_t count[kMostRuns] = {};

  MK_HOST_DEVICE int64_t rows() const {
    int64_t rows = 0;
    for (int run = 0; run < num_runs; ++run) rows += count[run];
    return rows;
  }
  MK_HOST_DEVICE int64_t of_row(int64_t row) const {
    int run = 0;
    for (; row >= count[run]; ++run) row -= count[run];
    return first[run] + row;
  }
};

MK_HOST_DEVICE int AttentionInputs::heads_of(AttentionTensor tensor) const {
  return tensor == AttentionTensor::kQ || tensor == AttentionTensor::kDO ? heads : kv_heads;
}

MK_HOST_DEVICE int64_t AttentionInputs::picked(int64_t b, int64_t position, int head) const {
  const uint64_t hash =
      index_hash(seed + 9, static_cast<uint64_t>(b * heads + head), static_cast<uint64_t>(position));
  return first_visible(position) + static_cast<int64_t>(hash % static_cast<uint64_t>(num_visible(position)));
}

MK_HOST_DEVICE float AttentionInputs::unrounded(AttentionTensor tensor, int64_t b, int64_t position, int head,
                                                int d) const {
  constexpr int kMostBits = 40;  // of a position
  const bool is_q = tensor == AttentionTensor::kQ;
  const bool is_logit = is_q || tensor == AttentionTensor::kK;
  if (is_logit && pattern == Pattern::kIntegers) {
    if (d >= kMostBits) return 0.0f;
    const float magnitude = is_q ? 64.0f : 1.0f;
    return (is_q ? picked(b, position, head) : position) >> d & 1 ? magnitude : -magnitude;
  }
  const uint64_t tensor_seed = seed + 1 + static_cast<uint64_t>(tensor);
  const float value = InputMatrix{pattern, dtype, tensor_seed, 1}.unrounded_value(
      (b * seq + position) * heads_of(tensor) + head, d);
  return is_logit ? 2 * value : value;
}

}  // namespace perf
