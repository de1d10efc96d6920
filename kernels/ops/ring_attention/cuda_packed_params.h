// SPDX-License-Identifier: MIT
// Ring attention over packed sequences on GPUs: what its kernels are given, and what of it is only known once
// they run.
#pragma once

#include <cuda.h>

#include "kernels/device/rank_comm.h"
#include "kernels/ops/ring_attention/packed_blocks.h"
#include "kernels/ops/ring_attention/packed_network_panels.h"

namespace mk::ring_attention {

// What both directions' roles know of a launch; each CTA has its own in shared memory, where begin_packed()
// fills in what cu_seqlens say: the entry's hash, the table of rows, the maps' rows.
template <int NUM_MAPS_>
struct PackedCommon {
  using Unit = PackedPanelUnit;
  static constexpr int NUM_MAPS = NUM_MAPS_;
  RankComm comm;
  PackedQueryTiles tiles;
  const CUtensorMap* maps[NUM_MAPS];  // of this rank's rows
  int num_push_ctas;                  // the last ones, until they have pushed everything
  int dim;
};

template <class Params>
concept IsPacked = requires {
  Params::NUM_MAPS;
};

enum PackedMap { PACKED_Q, PACKED_K, PACKED_V, NUM_PACKED_MAPS };

template <class Panels>
struct PackedParamsOf : PackedCommon<NUM_PACKED_MAPS> {
  Panels panels;
  float scale_log2;  // |scale| log2(e)
  bool negate;       // scale < 0
  std::byte* o;
  int64_t o_row_bytes;
  int64_t o_head_bytes;
  int64_t o_batch_bytes;
  float* lse;        // or null
  int64_t lse_rows;  // of a head
};

// Inside a node.
using PackedParams = PackedParamsOf<KeyPanels>;

// Between nodes.
struct PackedNetworkParams : PackedParamsOf<PackedNetworkPanels>, BetweenNodes {};

// The kernel's parameter. With zigzag the call does not know how many rows a rank has: then its maps are for 1,
// and heads that lie apart by all rows are apart by none.
template <class Params>
struct PackedArguments {
  Params params;
  CUtensorMap maps[Params::NUM_MAPS];
  size_t table_offset;  // in the staging memory
  bool is_empty;        // the call asks for nothing
  bool rows_are_known;  // maps and strides are right
  bool heads_first;     // [head][row][dim] in memory, and not [row][head][dim]
};

}  // namespace mk::ring_attention
