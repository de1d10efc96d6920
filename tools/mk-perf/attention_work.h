// SPDX-License-Identifier: MIT
// How an attention is spread over the ranks: who holds what, how much each has to compute and to send.
#pragma once

#include "attention_inputs.h"
#include "operators.h"
#include "shape.h"

namespace perf {

// Shapes are those of the attention operators.
AttentionSequences attention_sequences(const Shape& shape);

// The slices are those of mkernel.h: slice r of W, or with zigzag
// slices r and 2W-1-r of 2W (of each packed sequence).
AttentionPositions attention_positions(const Shape& shape, int rank, int nranks);

// Pairs of a query of these positions and a key that it sees, of one head.
double visible_pairs(const Shape& shape, const AttentionPositions& queries);
// Of all ranks together, and of the one that has most.
double all_visible_pairs(const Shape& shape);
double most_visible_pairs(const Shape& shape, int nranks);

// What one rank alone does in place of the busiest one: as nearly as many pairs as a multiple of 128 positions
// allows, and the factor that is left.
AloneShape attention_alone_shape(const Shape& shape, int nranks);

// Bytes that the busiest rank has to send: its keys and values to each rank that sees them, and with gradients
// its parts of dk and dv, in fp32, for every key of others that it sees.
double attention_link_bytes(const Shape& shape, int nranks, bool backward);

}  // namespace perf
