// SPDX-License-Identifier: MIT
#include "kernels/cuda/moe_plan.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda/link_rates.h"
#include "kernels/cuda/rank_gemm_plan.h"
#include "kernels/gemm/gemm_plan.h"
#include "kernels/ops/moe_routing/plan.h"
#include "kernels/ops/moe_routing/row_segments.h"
#include "kernels/protocol.h"

namespace mk {
namespace {

// A rank's tiles are counted with 32 bits.
constexpr int64_t MAX_WIDTH = 1 << 18;
constexpr int64_t MAX_AREA_BYTES = int64_t{1} << 46;
// Rows of an expert up to which the low tile is the better one: it is bound by the weights either way. A
// dispatch hands low tiles out singly, and those of an expert that has more than one would read its weights
// more than once.
constexpr int64_t FEW_ROWS_OF_EXPERT = 64;
constexpr int64_t FEW_DISPATCHED_ROWS = 48;
constexpr double FLOPS_PER_US = 660e6;
constexpr double BYTES_PER_US_OF_CTA = 38e3;
constexpr double WEIGHT_BYTES_PER_US = 4.1e6;

moe::Routing routing_of(const MoeCall& call, int nranks, int num_nodes) {
  moe::Routing routing{};
  routing.topology.nranks = nranks;
  routing.topology.num_nodes = num_nodes;
  routing.experts = call.experts;
  routing.topk = call.topk;
  return routing;
}

// The most rows that one rank can receive, and that one rank's tokens can become.
struct RowBounds {
  int64_t received;
  int64_t sent;
};

RowBounds bounds_of(const MoeCall& call, int nranks) {
  const int64_t routed = call.max_tokens * call.topk;
  const bool is_counted = call.is_maxima && call.max_tokens > 0;
  const int64_t capacity = is_counted && call.capacity_rows == 0 ? nranks * routed : call.capacity_rows;
  return {capacity, is_counted ? std::min(nranks * capacity, routed) : nranks * capacity};
}

// Bytes as doubles are as good as exact here, and do not overflow.
Status check_area(const MoeCall& call, double bytes) {
  if (bytes <= static_cast<double>(MAX_AREA_BYTES)) return {};
  return Status(MK_ERROR_UNSUPPORTED,
                format("mk_%s: %.3g bytes on one rank are more than a launch can move; lower capacity_rows or "
                       "tokens",
                       operator_name(call.op), bytes));
}

moe_dispatch_gemm::CudaLayout layout_of(const MoeCall& call, int nranks, int num_nodes, int64_t capacity) {
  return {static_cast<int64_t>(routing_of(call, nranks, num_nodes).counts_bytes()), capacity, call.hidden * 2,
          nranks * capacity};
}

Status too_many_flags(const MoeCall& call, int64_t rows, int64_t flags) {
  return Status(MK_ERROR_UNSUPPORTED,
                format("mk_%s: %lld rows on one rank need %lld flags of transfer; a launch has %d: lower "
                       "capacity_rows or tokens",
                       operator_name(call.op), static_cast<long long>(rows), static_cast<long long>(flags),
                       kFlagsPerBank));
}

constexpr int64_t DEFAULT_CHUNK_BYTES = 512 << 10;

int64_t chunk_bytes_of(const MoeCall& call) {
  return call.tuning.chunk_bytes > 0 ? call.tuning.chunk_bytes : DEFAULT_CHUNK_BYTES;
}

Status check_signals(const MoeCall& call, int nranks, int64_t signals) {
  if (signals <= static_cast<int64_t>(kSignalsPerBank)) return {};
  return Status(MK_ERROR_UNSUPPORTED, format("mk_%s: %d ranks need %lld signals between nodes; a launch has %d",
                                             operator_name(call.op), nranks, static_cast<long long>(signals),
                                             static_cast<int>(kSignalsPerBank)));
}

// Lists of things of `bytes_each`, dealt out by `unit`.
moe::PacketChunks chunks_of(const MoeCall& call, int64_t bytes_each, int64_t unit, int max_chunks) {
  return {static_cast<int>(unit), static_cast<int>(round_up(ceil_div(chunk_bytes_of(call), bytes_each), unit)),
          max_chunks};
}

// Packets of tokens travel between nodes in chunks, each with a signal of its own: longer ones where there
// would be more than MAX_CHUNKS from one rank to one node.
Status plan_packets(const MoeCall& call, const TopologyView& nodes, MoePlan& to) {
  constexpr int MAX_CHUNKS = 512;
  constexpr int64_t UNIT_BYTES = 64 << 10;
  MoeNetworkPlan& network = to.network;
  network.layout = moe_dispatch_gemm::make_network_layout(to.layout, call.topk);
  network.numbers = {nodes.nranks, nodes.num_nodes, to.blocks_per_source, MAX_CHUNKS,
                     moe_dispatch_gemm::max_forward_lists(nodes)};
  // A lane has a row of a unit.
  const int64_t packet_bytes = network.layout.packet_bytes;
  const int64_t unit = std::clamp<int64_t>(UNIT_BYTES / packet_bytes, 1, 32 / call.topk);
  network.chunks = chunks_of(call, packet_bytes, unit, MAX_CHUNKS);
  const int64_t flags = std::max(network.numbers.num_flags(), network.numbers.num_counts());
  if (flags > kFlagsPerBank) return too_many_flags(call, to.layout.capacity_rows, flags);
  return check_signals(call, nodes.nranks, network.numbers.num_signals());
}

// Routes, which are short and early, go in few chunks; sums, as they are made.
Status plan_sums(const MoeCall& call, const TopologyView& nodes, MoePlan& to) {
  constexpr int MAX_ROUTE_CHUNKS = 64;
  constexpr int MAX_SUM_CHUNKS = 512;
  constexpr int ROUTE_UNIT = 32;  // a lane has a token
  constexpr int64_t SUM_UNIT_BYTES = 16 << 10;
  MoeNetworkPlan& network = to.network;
  const int64_t row_bytes = call.hidden * element_bytes(call.out_dtype);
  const auto route_bytes = static_cast<int64_t>(sizeof(moe_gemm_combine::SumRoute)) * call.topk;
  network.sum_layout = {to.layout.counts_bytes, row_bytes, route_bytes};
  network.sum_numbers = {nodes.nranks, nodes.num_nodes, MAX_ROUTE_CHUNKS, MAX_SUM_CHUNKS};
  network.route_chunks = chunks_of(call, route_bytes, ROUTE_UNIT, MAX_ROUTE_CHUNKS);
  network.sum_chunks =
      chunks_of(call, row_bytes, std::clamp<int64_t>(SUM_UNIT_BYTES / row_bytes, 1, 8), MAX_SUM_CHUNKS);
  return check_signals(call, nodes.nranks, network.sum_numbers.num_signals());
}

Status plan_network(const MoeCall& call, const TopologyView& nodes, MoePlan& to) {
  MoeNetworkPlan& network = to.network;
  network.nodes = moe::make_node_map(nodes);
  const bool dispatches = call.op == MK_OPERATOR_MOE_DISPATCH_GEMM;
  if (dispatches || call.is_maxima) MK_RETURN_IF_ERROR(plan_packets(call, nodes, to));
  if (!dispatches || call.is_maxima) MK_RETURN_IF_ERROR(plan_sums(call, nodes, to));
  // What travels in a launch only its counts say.
  if (!call.is_maxima) {
    if (dispatches) to.area_bytes = std::max(to.area_bytes, network.layout.begin);
    return {};
  }
  const moe::Bounds bounds = moe::bounds_of(call, nodes);
  const moe_gemm_combine::NetworkLayout& sums = network.sum_layout;
  const double tokens = static_cast<double>(bounds.relayed_tokens) + static_cast<double>(bounds.remote_tokens);
  const double packet_bytes = static_cast<double>(network.layout.packet_bytes + 4);
  const int64_t sent = bounds_of(call, nodes.nranks).sent;
  const double rows = static_cast<double>(bounds.collected_rows) + static_cast<double>(bounds.received_rows);
  const double home = (rows + tokens) * static_cast<double>(sums.row_bytes) +
                      tokens * static_cast<double>(sums.route_bytes + 4) + static_cast<double>(sent) * 4;
  MK_RETURN_IF_ERROR(
      check_area(call, std::max(static_cast<double>(network.layout.begin) + tokens * packet_bytes, home)));
  const moe_gemm_combine::Regions most = {
      bounds.collected_rows, bounds.received_rows, bounds.relayed_tokens, bounds.remote_tokens, sent, 0};
  to.area_bytes = std::max(
      {to.area_bytes, network.layout.bytes(bounds.relayed_tokens, bounds.remote_tokens), sums.bytes(most)});
  return {};
}

Status plan_areas(const MoeCall& call, int nranks, const TopologyView* nodes, MoePlan& to) {
  const RowBounds rows = bounds_of(call, nranks);
  const int num_nodes = nodes != nullptr ? nodes->num_nodes : 1;
  const int experts_per_rank = routing_of(call, nranks, num_nodes).experts_per_rank();
  // Of several nodes: plan_network().
  const double home_bytes = nodes != nullptr
                                ? 0
                                : static_cast<double>(rows.received + rows.sent) *
                                      static_cast<double>(call.hidden) * element_bytes(call.out_dtype);
  const double dispatch_bytes =
      static_cast<double>(rows.received) * (static_cast<double>(call.hidden) * 2 + 16 + 4.0 * nranks);
  MK_RETURN_IF_ERROR(check_area(call, std::max(home_bytes, dispatch_bytes)));
  const int64_t blocks = ceil_div(rows.received, moe::BLOCK_ROWS) + experts_per_rank;
  if (nranks + nranks * blocks > kFlagsPerBank)
    return too_many_flags(call, rows.received, nranks + nranks * blocks);
  to.blocks_per_source = static_cast<int>(blocks);
  to.layout = layout_of(call, nranks, num_nodes, rows.received);
  to.area_bytes = to.layout.counts_bytes;
  if (call.is_maxima || call.op == MK_OPERATOR_MOE_DISPATCH_GEMM) to.area_bytes = to.layout.bytes();
  if (call.is_maxima && nodes == nullptr) {
    const int64_t home =
        to.layout.counts_bytes + (rows.received + rows.sent) * call.hidden * element_bytes(call.out_dtype);
    to.area_bytes = std::max(to.area_bytes, home);
  }
  return nodes != nullptr ? plan_network(call, *nodes, to) : Status();
}

// This rank's guess of the rows of an expert: its own tokens are as many as the others'.
int64_t guessed_rows(const MoeCall& call, int nranks) {
  if (call.tokens == 0) return ceil_div(call.capacity_rows * nranks, call.experts);
  return ceil_div(call.tokens * call.topk * nranks, call.experts);
}

Status choose_tile(const MoeCall& call, int nranks, MoePlan& to) {
  const bool dispatches = call.op == MK_OPERATOR_MOE_DISPATCH_GEMM;
  const bool is_low = guessed_rows(call, nranks) <= (dispatches ? FEW_DISPATCHED_ROWS : FEW_ROWS_OF_EXPERT);
  bool is_found = false;
  for (int i = 0; i < moe::NUM_CUDA_TILES; ++i) {
    const GemmTile& tile = moe::CUDA_TILES[i];
    if (call.tuning.tile_m > 0 && call.tuning.tile_m != tile.block_m) continue;
    if (call.tuning.tile_n > 0 && call.tuning.tile_n != tile.block_n) continue;
    if (is_found && !is_low) continue;
    is_found = true;
    to.tile = i;
  }
  if (is_found) return {};
  return Status(MK_ERROR_UNSUPPORTED, format("mk_%s: tuning: there is no tile of tile_m=%d, tile_n=%d",
                                             operator_name(call.op), call.tuning.tile_m, call.tuning.tile_n));
}

// The part of tokens that goes to another given node.
double part_that_goes_there(const MoeCall& call, int num_nodes) {
  return 1 - std::pow(1 - 1.0 / num_nodes, call.topk);
}

// CTAs that do nothing but push: as many as bring rows as fast as the others compute them, and no more than
// fill the links. A dispatch's also push rows that stay at home; between nodes they pack what goes to others,
// and in turn with that bring rows for tiles that need nothing else; with low tiles they compute when they are
// through, so more of them cost nothing. A combine's push only what leaves the rank. Where an expert has few
// rows its weights take longer than its product. `local_ranks`: of a node.
int choose_push_ctas(const MoeCall& call, int nranks, int num_nodes, int local_ranks, int num_sms,
                     bool is_low) {
  constexpr int PUSH_CTAS_THAT_COMPUTE = 12;
  constexpr double MIN_PUSH_CTAS = 4;
  constexpr double MIN_PUSH_CTAS_OF_FEW_ROWS = 2;
  constexpr double MAX_PUSH_CTAS = 14;
  if (call.tuning.copy_ctas > 0) return std::clamp(call.tuning.copy_ctas, 1, num_sms - 1);
  const bool dispatches = call.op == MK_OPERATOR_MOE_DISPATCH_GEMM;
  const double spare = dispatches && num_nodes > 1 ? 1.45 : 1.15;
  if (!dispatches && local_ranks == 1) return 0;
  if (dispatches && is_low) return std::clamp(num_sms / 4, 1, PUSH_CTAS_THAT_COMPUTE);
  const int64_t rows = guessed_rows(call, nranks);
  const double pushes = dispatches ? 1 + (num_nodes - 1) * part_that_goes_there(call, num_nodes) / call.topk
                                   : 1 - 1.0 / local_ranks;
  const double element = dispatches ? 2 : element_bytes(call.out_dtype);
  // For each column of an expert's rows.
  const double product_us = 2 * static_cast<double>(rows * call.inter) / FLOPS_PER_US;
  const double weights_us = 2 * static_cast<double>(call.inter) / WEIGHT_BYTES_PER_US;
  const double bytes_per_us = static_cast<double>(rows) * element * pushes / std::max(product_us, weights_us);
  const double wanted = std::ceil(spare * bytes_per_us / BYTES_PER_US_OF_CTA);
  const double least = rows <= FEW_ROWS_OF_EXPERT ? MIN_PUSH_CTAS_OF_FEW_ROWS : MIN_PUSH_CTAS;
  return std::clamp(static_cast<int>(std::clamp(wanted, least, MAX_PUSH_CTAS)), 1, std::max(1, num_sms / 4));
}

// Experts of a rank whose tiles of its own node's tokens alone are computed apart from the others: as many as
// fill the time by which what travels is behind (a dispatch) or would be behind (a combine) otherwise. Tokens
// travel in the order in which their first expert is computed, or their last, so that when a part y of the
// experts is through, 1 - (1 - y)^k of the tokens with k rows in a node have had to travel.
int choose_split(const MoeCall& call, int nranks, int num_nodes, int experts_per_rank, int64_t token_bytes,
                 double memory_bytes_per_us) {
  constexpr double PART_FOR_WEIGHTS = 0.75;  // of the memory's rate, beside rows that travel
  const double expert_bytes = 2 * static_cast<double>(call.hidden * call.inter);
  const double weights_us = expert_bytes / (PART_FOR_WEIGHTS * memory_bytes_per_us);
  const auto expert_us = [&](double rows) { return std::max(rows * expert_bytes / FLOPS_PER_US, weights_us); };
  const auto rows = static_cast<double>(guessed_rows(call, nranks));
  const double near_rows = rows / num_nodes - moe::BLOCK_ROWS / 2;  // in whole blocks
  if (near_rows <= 0) return 0;

  const double all_us = experts_per_rank * expert_us(rows);
  const double tokens = rows * experts_per_rank / call.topk;
  const double goes_there = part_that_goes_there(call, num_nodes);
  const double rows_there = std::max(1.0, call.topk / (num_nodes * goes_there));
  const double network_us =
      tokens * (num_nodes - 1) * goes_there * static_cast<double>(token_bytes) / NETWORK_BYTES_PER_US;
  // Where that is most: y where what has to travel grows as slowly as the product.
  const double rest = std::pow(std::min(1.0, all_us / (rows_there * network_us)), 1 / (rows_there - 1));
  const double behind_us = network_us * (1 - std::pow(rest, rows_there)) - (1 - rest) * all_us;
  return static_cast<int>(std::min<double>(behind_us / expert_us(near_rows), experts_per_rank));
}

// CTAs that do nothing but sum for other nodes. With a token's rows half in this node, what a NIC carries away
// takes reading four times as much, and beside a product's shared memory an SM's loads bring some 22 GB/s.
int choose_relay_ctas(const MoeCall& call, int num_sms) {
  constexpr int MAX_RELAY_CTAS = 12;
  if (call.tuning.reduce_ctas > 0) return std::clamp(call.tuning.reduce_ctas, 1, num_sms - 3);
  return std::clamp(num_sms / 11, 1, MAX_RELAY_CTAS);
}

}  // namespace

Result<MoePlan> moe_plan(const MoeCall& call, int nranks, int num_sms, const TopologyView* nodes,
                         double memory_bytes_per_us) {
  const bool dispatches = call.op == MK_OPERATOR_MOE_DISPATCH_GEMM;
  if (call.experts > moe::CUDA_MAX_EXPERTS) {
    return Status(MK_ERROR_UNSUPPORTED, format("mk_%s: experts=%d: on GPUs at most %d over all ranks",
                                               operator_name(call.op), call.experts, moe::CUDA_MAX_EXPERTS));
  }
  if (std::max(call.hidden, call.inter) > MAX_WIDTH) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("mk_%s: hidden=%lld, inter=%lld: on GPUs each is at most %lld", operator_name(call.op),
                         static_cast<long long>(call.hidden), static_cast<long long>(call.inter),
                         static_cast<long long>(MAX_WIDTH)));
  }
  const char* const between_nodes = nodes == nullptr ? ""
                                    : dispatches     ? ", one for the network"
                                                     : ", one for the network, one for its sums";
  const int least_sms = nodes == nullptr ? 2 : dispatches ? 3 : 4;
  if (num_sms < least_sms) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("mk_%s: needs %d SMs on every rank, one to move rows%s and one to compute, saw %d; "
                         "raise max_ctas or lower reserved_sms",
                         operator_name(call.op), least_sms, between_nodes, num_sms));
  }
  const int relay_ctas = nodes == nullptr || dispatches ? 0 : choose_relay_ctas(call, num_sms);
  if (nodes != nullptr) num_sms -= 1 + relay_ctas;
  MoePlan to;
  to.plan = MK_PLAN_INIT;
  to.is_between_nodes = nodes != nullptr;
  MK_RETURN_IF_ERROR(plan_areas(call, nranks, nodes, to));
  MK_RETURN_IF_ERROR(choose_tile(call, nranks, to));
  mk_plan_t& plan = to.plan;
  const int64_t row_bytes = call.hidden * (dispatches ? 2 : element_bytes(call.out_dtype));
  const int num_nodes = nodes == nullptr ? 1 : nodes->num_nodes;
  int local_ranks = nodes == nullptr ? nranks : 1;
  for (int node = 0; nodes != nullptr && node < nodes->num_nodes; ++node)
    local_ranks = std::max(local_ranks, static_cast<int>(nodes->node_nranks(node)));
  const bool is_low = moe::CUDA_TILES[to.tile].block_m < moe::BLOCK_ROWS;
  plan.copy_ctas = choose_push_ctas(call, nranks, num_nodes, local_ranks, num_sms, is_low);
  plan.compute_ctas = num_sms - plan.copy_ctas;
  if (call.tuning.compute_ctas > 0) plan.compute_ctas = std::min(plan.compute_ctas, call.tuning.compute_ctas);
  plan.tile_m = moe::CUDA_TILES[to.tile].block_m;
  plan.tile_n = moe::CUDA_TILES[to.tile].block_n;
  plan.chunk_rows = moe::BLOCK_ROWS;
  plan.chunk_bytes = moe::BLOCK_ROWS * row_bytes;
  plan.num_chunks = to.blocks_per_source;
  if (nranks > 1) plan.link_bytes = call.tokens * call.topk * row_bytes;
  if (nodes != nullptr) {
    const MoeNetworkPlan& network = to.network;
    const int64_t bytes_of_token = dispatches ? network.layout.packet_bytes
                                              : network.sum_layout.row_bytes + network.sum_layout.route_bytes;
    to.network.num_split =
        choose_split(call, nranks, num_nodes, routing_of(call, nranks, num_nodes).experts_per_rank(),
                     bytes_of_token, memory_bytes_per_us);
    plan.send_ctas = 1;
    plan.reduce_ctas = relay_ctas;
    plan.network_bytes = call.tokens * std::min(call.topk, nodes->num_nodes - 1) * bytes_of_token;
  }
  // Of a call which prepares itself.
  const MoeCall maxima = call.is_maxima ? call : maxima_of(call);
  MoePlan whole;
  MK_RETURN_IF_ERROR(plan_areas(maxima, nranks, nodes, whole));
  plan.workspace_bytes = 2 * static_cast<uint64_t>(whole.area_bytes);
  return to;
}

moe::CudaRouting cuda_routing(const MoeCall& call, int rank, int nranks, int num_nodes) {
  const moe::Routing layout = routing_of(call, nranks, num_nodes);
  const bool combines = call.op == MK_OPERATOR_MOE_GEMM_COMBINE;
  moe::CudaRouting routing{};
  routing.rank = rank;
  routing.nranks = nranks;
  routing.experts = call.experts;
  routing.topk = call.topk;
  routing.experts_per_rank = layout.experts_per_rank();
  routing.block_bytes = static_cast<int>(layout.block_bytes());
  routing.rank_rows_at = static_cast<int>(layout.rank_rows_at(0));
  routing.node_tokens_at = static_cast<int>(layout.node_tokens_at(0));
  routing.received_at = static_cast<int>(layout.received_at(0));
  routing.tokens = call.tokens;
  routing.topk_idx = call.topk_idx;
  routing.has_wide_indices = call.index_type == MK_INDEX_INT64;
  routing.reads_record = combines || call.use_routing;
  routing.writes_record = !routing.reads_record;
  routing.has_rows = call.x != nullptr;
  routing.combines = combines;
  routing.record = call.routing;
  routing.record_bytes = call.routing_bytes;
  const moe::RecordLayout record = routing.record_layout();
  routing.items = moe::RecordView{call.routing}.at<moe::RecordItem>(record.items_offset());
  routing.row_capacity = combines ? INT64_MAX : call.capacity_rows;
  if (routing.writes_record) {  // the record takes no more rows than its memory
    const int64_t room = (static_cast<int64_t>(call.routing_bytes) - record.rows_offset()) /
                         static_cast<int64_t>(sizeof(mk_moe_row_t));
    routing.row_capacity = std::min(routing.row_capacity, room);
  }
  return routing;
}

}  // namespace mk
