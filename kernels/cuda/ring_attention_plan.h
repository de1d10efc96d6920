// SPDX-License-Identifier: MIT
// How ring attention is run on GPUs: pure host code, globally equal fields in, configuration out.
#pragma once

#include "kernels/ops/ring_attention/cuda_blocks.h"
#include "kernels/ops/ring_attention/cuda_query_items.h"
#include "kernels/ops/ring_attention/network_panels.h"
#include "kernels/ops/ring_attention/packed_blocks.h"
#include "kernels/ops/ring_attention/packed_network_panels.h"
#include "kernels/ring_attention_call.h"
#include "lib/status.h"

namespace mk {

namespace ring_attention {

// Of packed sequences: the slices that the kernel completes, and where it writes the table of rows.
struct PackedPlan {
  PackedSlices slices;
  size_t table_offset = 0;  // in the staging memory
  int joint_heads = 1;      // of PackedQueryTiles
};

}  // namespace ring_attention

struct RingAttentionPlan {
  mk_plan_t plan;
  int tile = 0;  // of ring_attention::CUDA_TILES
  ring_attention::QueryTiles tiles;
  ring_attention::QueryItems items;  // not of packed sequences
  ring_attention::KeyPanels panels;
  int num_push_ctas = 0;
  int64_t area_bytes = 0;  // of a receive bank, for any causal mode
  ring_attention::PackedPlan packed;
  // Between nodes; `network` of packed sequences as if they were one.
  ring_attention::NetworkPanels network;
  ring_attention::PackedNetworkPanels packed_network;
  ring_attention::NodeRanks nodes;
  int num_forward_ctas = 0;
};

// MK_ERROR_UNSUPPORTED says in words what is not built. `nodes`: who is where, if there are several.
Result<RingAttentionPlan> ring_attention_plan(const RingAttentionCall& call, int rank, int nranks, int num_sms,
                                              const TopologyView* nodes = nullptr);

// What the plans of both directions are made of.
namespace ring_attention {

Status unsupported(const RingAttentionCall& call, const std::string& what);
// Is it built for GPUs?
Status check_cuda_call(const RingAttentionCall& call);
CudaSlices cuda_slices(const RingAttentionCall& call, int nranks, bool zigzag);
// Without what cu_seqlens say.
PackedSlices packed_slices(const RingAttentionCall& call, int nranks, bool zigzag);
// Rows that a rank may have of packed sequences.
int packed_rows(const RingAttentionCall& call, int nranks, bool zigzag);
// Panels of `panel_blocks` blocks of keys, or 2, 4 ... times as many where there would be more flags than a
// bank has, with flags_a_panel for each.
KeyPanels key_panels(const RingAttentionCall& call, const CudaSlices& slices, int head_dim, int block_n,
                     int panel_blocks, int flags_a_panel);
// Fails where there is no room for the table.
Result<PackedPlan> plan_packed(const RingAttentionCall& call, int nranks, bool zigzag, int num_sms);
// As key_panels().
KeyPanels packed_panels(const RingAttentionCall& call, int nranks, bool zigzag, int head_dim, int block_n,
                        int panel_blocks, int flags_a_panel);
// Are there flags for all of them?
Status check_flags(const RingAttentionCall& call, const KeyPanels& panels, int64_t num_flags);
// Bytes of keys and values that a rank pushes.
int64_t pushed_bytes(const KeyPanels& panels, const CudaSlices& slices, int rank, int block_n);
int push_ctas(const RingAttentionCall& call, const KeyPanels& panels, int64_t bytes, int num_sms);

// Between nodes.
// What a direction has for each panel, and for each put of keys.
struct NetworkNeeds {
  int flags_a_panel;  // for all sources together
  int signals_a_put = 1;
  int bytes_factor = 1;  // how many times as large the largest puts of that size are
};
NetworkPanels network_panels(const RingAttentionCall& call, const CudaSlices& slices, int block_n,
                             const KeyPanels& of_node, const NetworkNeeds& needs);
// But for who needs what, which the kernel finds out.
PackedNetworkPanels packed_network_panels(const RingAttentionCall& call, const PackedSlices& slices,
                                          int block_n, const KeyPanels& of_node, const NetworkNeeds& needs);
// Are there signals for all puts, and is none too large?
template <class Slices>
Status check_puts(const RingAttentionCall& call, const NetworkPanelsOf<Slices>& panels,
                  const NetworkNeeds& needs);
// What a rank has to do with keys and values, and the CTAs for it.
struct NetworkShare {
  NodeRanks nodes;
  int64_t pushed_bytes = 0;  // some of them to itself, for the network
  int64_t link_bytes = 0;
  int64_t network_bytes = 0;
  int num_forward_ctas = 0;
};
// Takes the CTAs that do not compute from *num_sms. Fails where there are too few. `panels`: of packed
// sequences as if they were one.
Result<NetworkShare> plan_network(const RingAttentionCall& call, const TopologyView& nodes,
                                  const NetworkPanels& panels, int* num_sms);

}  // namespace ring_attention

}  // namespace mk
