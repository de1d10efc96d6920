// SPDX-License-Identifier: MIT
#include "kernels/cuda/ring_attention_backward_plan.h"

#include <algorithm>
#include <cmath>

#include "kernels/plan.h"

namespace mk {

using namespace ring_attention;
using namespace ring_attention_backward;

namespace {

constexpr int FLAGS_A_PANEL = 2;  // of its keys and of its parts

// A panel is at least a tile of keys.
GradientPanels make_panels(const RingAttentionCall& call, const CudaSlices& slices) {
  const int head_dim = call.dim <= 64 ? 64 : 128;
  return {{key_panels(call, slices, head_dim, BLOCK_ROWS, TILE_BLOCKS, FLAGS_A_PANEL),
           static_cast<int>(call.batch) * call.heads, head_dim}};
}

GradientPanels make_packed_panels(const RingAttentionCall& call, int nranks, bool zigzag) {
  const int head_dim = call.dim <= 64 ? 64 : 128;
  return {{packed_panels(call, nranks, zigzag, head_dim, BLOCK_ROWS, TILE_BLOCKS, FLAGS_A_PANEL),
           static_cast<int>(call.batch) * call.heads, head_dim}};
}

// A put of keys is one of parts, too, whose rows are twice as large.
NetworkNeeds network_needs(const TopologyView& nodes) { return {nodes.nranks + most_part_slots(nodes), 2, 2}; }

NetworkGradientPanels make_network_panels(const RingAttentionCall& call, const CudaSlices& slices,
                                          const TopologyView& nodes) {
  const GradientPanels of_node = make_panels(call, slices);
  return {{network_panels(call, slices, BLOCK_ROWS, of_node, network_needs(nodes)), of_node.num_query_heads,
           of_node.head_dim},
          most_part_slots(nodes)};
}

PackedNetworkGradientPanels make_packed_network_panels(const RingAttentionCall& call, bool zigzag,
                                                       const TopologyView& nodes) {
  const GradientPanels of_node = make_packed_panels(call, nodes.nranks, zigzag);
  return {{packed_network_panels(call, packed_slices(call, nodes.nranks, zigzag), BLOCK_ROWS, of_node,
                                 network_needs(nodes)),
           of_node.num_query_heads, of_node.head_dim},
          most_part_slots(nodes)};
}

// Bytes of a rank's parts of an owner's keys.
int64_t part_bytes_of(const NetworkGradientPanels& panels, int owner, int source) {
  int64_t tiles = 0;
  for (int run = 0; run < panels.num_runs; ++run) {
    if (is_in(panels.needed_by[run][owner], source)) tiles += panels.num_tiles(owner, run);
  }
  return tiles * panels.num_heads * panels.part_bytes();
}

// What is different between nodes; the pushes' bytes go to *pushed, and *num_sms are left to compute.
Status plan_between_nodes(const RingAttentionCall& call, const TopologyView& nodes, int* num_sms,
                          int64_t* pushed, RingAttentionBackwardPlan* to) {
  const auto take = [&](const auto& panels) {
    static_cast<KeyPanels&>(to->panels) = panels;
    MK_RETURN_IF_ERROR(check_flags(call, panels, panels.num_flags()));
    return check_puts(call, panels, network_needs(nodes));
  };
  NetworkGradientPanels& panels = to->network;
  panels = make_network_panels(call, to->tiles.slices, nodes);
  if (call.num_sequences > 0) {
    to->packed_network = make_packed_network_panels(call, to->tiles.slices.zigzag, nodes);
    MK_RETURN_IF_ERROR(take(to->packed_network));
  } else {
    MK_RETURN_IF_ERROR(take(panels));
  }
  Result<NetworkShare> share = plan_network(call, nodes, panels, num_sms);
  if (!share.ok()) return share.status();
  *pushed = share->pushed_bytes;
  to->nodes = share->nodes;
  to->packed_network.own = share->nodes.own;
  to->routes = make_part_routes(nodes);
  to->num_forward_ctas = share->num_forward_ctas;
  mk_plan_t& plan = to->plan;
  plan.link_bytes = share->link_bytes;
  plan.network_bytes = share->network_bytes;
  for (int owner = 0; owner < nodes.nranks; ++owner) {
    if (to->routes.receiver[owner] != nodes.rank) plan.link_bytes += part_bytes_of(panels, owner, nodes.rank);
  }
  const RankOrder order = make_rank_order(nodes);
  for (int index = 0; index < num_relayed_parts(order); ++index) {
    const RelayedParts parts = relayed_parts(order, to->routes, nodes.nranks, index);
    plan.network_bytes += part_bytes_of(panels, parts.owner, parts.source);
  }
  plan.receive_ctas = share->num_forward_ctas;
  plan.send_ctas = 1;
  return {};
}

// Tiles of keys that a rank may have of packed sequences.
int64_t most_packed_tiles(const RingAttentionCall& call, int nranks, bool zigzag) {
  return int64_t{nranks} * call.kv_heads * tiles_of(packed_rows(call, nranks, zigzag));
}

// A block of queries passes a tile in about so long; the next tile of its head may add to its dQ so much later.
constexpr double BLOCK_US = 2.0, TURN_US = 3.0;
// Where all tiles of a head wait for the slowest of them, each round of the CTAs takes so much longer.
constexpr double ROUND_US = 3.0;
// What the tiles of heads share that are computed at the same time, queries, dO and dQ, is to stay in the L2.
constexpr int64_t MOST_SHARED_BYTES = 48 << 20;

// One rank without a mask: is it better that all tiles of a head are computed at the same time, so that none
// waits for its turn, but CTAs that are too few for another head do?
bool is_better_circular(const KeyTiles& tiles, const GradientPanels& panels, int num_ctas) {
  const int of_head = tiles.tiles_of_step(0), num_heads = tiles.num_heads;
  if (num_heads == 0 || of_head < 2 || of_head > num_ctas) return false;
  const int query_heads = panels.num_query_heads / num_heads, heads = num_ctas / of_head;
  const int64_t head_bytes = int64_t{query_heads} * of_head * TILE_BLOCKS * 2 * panels.query_sums().block_bytes;
  if (std::min(heads, num_heads) * head_bytes > MOST_SHARED_BYTES) return false;
  const double tile_us = query_heads * of_head * TILE_BLOCKS * BLOCK_US;
  const auto circular_rounds = static_cast<double>(ceil_div(num_heads, heads));
  // Of many rounds the last need not be full.
  const double rounds = static_cast<double>(tiles.size()) / num_ctas;
  const int at_a_time = num_ctas / std::min(tiles.heads_at_once, num_heads);
  const double waits_us = (std::min(of_head, std::max(1, at_a_time)) - 1) * TURN_US;
  return circular_rounds * (tile_us + ROUND_US) <
         (rounds < 3 ? std::ceil(rounds) : rounds) * tile_us + waits_us;
}

}  // namespace

Result<RingAttentionBackwardPlan> ring_attention_backward_plan(const RingAttentionCall& call, int rank,
                                                               int nranks, int num_sms,
                                                               const TopologyView* nodes) {
  MK_RETURN_IF_ERROR(check_cuda_call(call));
  RingAttentionBackwardPlan plan{};
  plan.plan = MK_PLAN_INIT;
  const bool is_packed = call.num_sequences > 0, is_zigzag = call.causal == MK_CAUSAL_ZIGZAG;
  // Of packed sequences as if they were one: a plan looks at no pointer.
  const CudaSlices slices = cuda_slices(call, nranks, is_zigzag);
  const GradientPanels one = make_panels(call, slices);
  plan.panels = is_packed ? make_packed_panels(call, nranks, is_zigzag) : one;
  plan.tiles = {slices, rank, static_cast<int>(call.batch), call.heads, std::max(1, call.kv_heads), TILE_ROWS};
  plan.key_tiles = {slices, {{rank}}, plan.panels.num_heads, plan.panels.heads_at_once(slices.causal)};
  if (nodes == nullptr) MK_RETURN_IF_ERROR(check_flags(call, plan.panels, plan.panels.num_flags()));
  const int64_t num_tiles = is_packed ? most_packed_tiles(call, nranks, is_zigzag) : plan.key_tiles.size();
  if (num_tiles > INT32_MAX) return unsupported(call, "more than 2^31 tiles: use several calls");
  plan.num_key_tiles = static_cast<int>(plan.key_tiles.size());
  if (is_packed) {
    const Result<PackedPlan> packed = plan_packed(call, nranks, is_zigzag, num_sms);
    if (!packed.ok()) return packed.status();
    plan.packed = packed.value();
  }
  for (const bool zigzag : {false, true}) {
    const CudaSlices cut = cuda_slices(call, nranks, zigzag);
    size_t bytes = nodes == nullptr ? make_panels(call, cut).area_bytes()
                                    : make_network_panels(call, cut, *nodes).area_bytes();
    if (is_packed) {
      bytes = std::max(bytes, nodes == nullptr ? make_packed_panels(call, nranks, zigzag).area_bytes()
                                               : make_packed_network_panels(call, zigzag, *nodes).area_bytes());
    }
    plan.area_bytes = std::max(plan.area_bytes, static_cast<int64_t>(bytes));
  }
  int64_t pushed = 0;
  if (nodes != nullptr) {
    MK_RETURN_IF_ERROR(plan_between_nodes(call, *nodes, &num_sms, &pushed, &plan));
  } else {
    pushed = plan.plan.link_bytes = pushed_bytes(one, slices, rank, BLOCK_ROWS);
    for (int step = 1; step < nranks; ++step) {
      plan.plan.link_bytes +=
          int64_t{plan.panels.num_heads} * plan.key_tiles.tiles_of_step(step) * plan.panels.part_bytes();
    }
  }
  plan.num_push_ctas = push_ctas(call, plan.panels, pushed, num_sms);
  const int most = call.tuning.compute_ctas > 0 ? std::min(num_sms, call.tuning.compute_ctas) : num_sms;
  // CTAs that push compute afterwards; and where there are few tiles, others round dQ.
  const int64_t num_blocks = plan.row_places().num_blocks();
  plan.plan.compute_ctas = static_cast<int>(
      std::min<int64_t>(most, std::max({int64_t{1}, num_tiles + plan.num_push_ctas, num_blocks})));
  plan.num_push_ctas = std::min<int>(plan.num_push_ctas, plan.plan.compute_ctas);
  if (nranks == 1 && !slices.causal && !is_packed &&
      is_better_circular(plan.key_tiles, plan.panels, plan.plan.compute_ctas)) {
    plan.circular = {static_cast<int>(call.seq), plan.panels.num_heads};
  }
  plan.plan.copy_ctas = plan.num_push_ctas;
  plan.plan.tile_m = TILE_ROWS;
  plan.plan.tile_n = BLOCK_ROWS;
  plan.plan.chunk_rows = plan.panels.panel_blocks * BLOCK_ROWS;
  plan.plan.num_chunks = plan.panels.num_runs * plan.panels.run_panels;
  plan.plan.chunk_bytes = int64_t{plan.panels.panel_blocks} * 2 * plan.panels.image_bytes;
  plan.plan.workspace_bytes = 2 * plan.area_bytes;
  return plan;
}

}  // namespace mk
