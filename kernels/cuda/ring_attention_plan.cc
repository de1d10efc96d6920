// SPDX-License-Identifier: MIT
#include "kernels/cuda/ring_attention_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/cuda/link_rates.h"
#include "kernels/cuda/query_items_plan.h"
#include "kernels/device/rank_comm.h"
#include "kernels/operator_names.h"
#include "kernels/ops/ring_attention/schedule.h"
#include "kernels/plan.h"
#include "transport/command.h"

namespace mk {
namespace ring_attention {
namespace {

// CTAs whose pushes fill a link. What they push, they push sooner; the work is the same.
constexpr int MOST_PUSH_CTAS = 10;
// Fewer bytes than this are not worth another CTA.
constexpr int64_t LEAST_BYTES_PER_PUSH_CTA = 1 << 20;
// From here on the network's rate no longer depends on the size of a put.
constexpr int64_t PUT_BYTES = 512 << 10;
// One that computes, one that forwards, one that has the network.
constexpr int LEAST_CTAS_BETWEEN_NODES = 3;
constexpr int MOST_FORWARD_CTAS = 4;
constexpr int64_t LEAST_BYTES_PER_FORWARD_CTA = 1 << 20;

// Panels of twice as many blocks.
void widen_panels(KeyPanels* panels) {
  panels->panel_blocks *= 2;
  panels->run_panels = static_cast<int>(ceil_div(panels->run_blocks, panels->panel_blocks));
}

// Puts of about as many bytes, in heads that lie next to each other if one has not that much; larger ones where
// there would be too few signals.
template <class Panels>
void choose_puts(int64_t put_bytes, int signals_a_put, Panels* panels) {
  const int64_t panel_bytes = int64_t{panels->panel_blocks} * panels->block_bytes();
  panels->put_heads = 1;
  panels->put_panels = static_cast<int>(
      std::clamp<int64_t>(ceil_div(put_bytes, panel_bytes), 1, std::max(1, panels->run_panels)));
  const int64_t run_bytes = int64_t{panels->run_blocks} * panels->block_bytes();
  if (run_bytes < put_bytes) {
    panels->put_panels = std::max(1, panels->run_panels);
    panels->put_heads = static_cast<int>(std::clamp<int64_t>(
        ceil_div(put_bytes, std::max<int64_t>(1, run_bytes)), 1, std::max(1, panels->num_heads)));
  }
  while (signals_a_put * panels->num_signals() > kSignalsPerBank - kEntrySignals) {
    if (panels->put_panels < panels->run_panels) {
      panels->put_panels = std::min(2 * panels->put_panels, panels->run_panels);
    } else if (panels->put_heads < panels->num_heads) {
      panels->put_heads = std::min(2 * panels->put_heads, panels->num_heads);
    } else {
      return;
    }
  }
}

template <class Panels, class Slices>
Panels panels_between_nodes(const RingAttentionCall& call, const Slices& slices, int block_n,
                            const KeyPanels& of_node, const NetworkNeeds& needs) {
  Panels panels{};
  static_cast<KeyPanels&>(panels) = of_node;
  panels.slices = slices;
  panels.block_n = block_n;
  while (int64_t{needs.flags_a_panel} * panels.num_units() > kFlagsPerBank && panels.run_panels > 1)
    widen_panels(&panels);
  choose_puts(call.tuning.chunk_bytes > 0 ? call.tuning.chunk_bytes : PUT_BYTES, needs.signals_a_put, &panels);
  return panels;
}

// What a source's panels come to, for as many ranks or nodes as need each run.
template <class CountOf>
int64_t travelling_bytes(const NetworkPanels& panels, int source, CountOf&& count_of) {
  int64_t blocks = 0;
  for (int run = 0; run < panels.num_runs; ++run)
    blocks += int64_t{panels.num_blocks(source, run)} * count_of(panels.needed_by[run][source]);
  return blocks * panels.num_heads * panels.block_bytes();
}

int forward_ctas(const RingAttentionCall& call, const TopologyView& nodes, int64_t bytes, int num_sms) {
  if (bytes == 0) return 0;
  // A CTA stores about 38 GB/s; the network brings 50, once for each of the others.
  const int64_t by_rate = nodes.local_nranks();
  const int64_t wanted =
      std::clamp<int64_t>(std::min(by_rate, bytes / LEAST_BYTES_PER_FORWARD_CTA), 1, MOST_FORWARD_CTAS);
  const int64_t chosen = call.tuning.receive_ctas > 0 ? call.tuning.receive_ctas : wanted;
  return static_cast<int>(std::clamp<int64_t>(chosen, 1, num_sms - (LEAST_CTAS_BETWEEN_NODES - 1)));
}

// A rank's tiles of queries on so many SMs. Of packed sequences as if all were as long.
double predicted_us(const RingAttentionCall& call, const CudaSlices& slices, int rank, const CudaTile& tile,
                    int num_sms) {
  const double heads = static_cast<double>(call.batch) * call.heads;
  const double sequences = std::max(1, call.num_sequences);
  const bool has_masks = slices.causal || call.num_sequences > 0;
  double sum_us = 0, num_tiles = 0, longest_us = 0;
  for (int run = 0; run < slices.num_runs(); ++run) {
    const double rows = slices.count(rank, run), begin = slices.begin(rank, run);
    if (rows <= 0) continue;
    const double tiles = std::ceil(rows / tile.block_m) * heads;
    // Keys that the queries see, on average and at most, and half a block that they see a part of.
    const double most_keys = (slices.causal ? begin + rows : call.seq) / sequences;
    const double keys = slices.causal ? (begin + (rows + tile.block_m) / 2) / sequences : most_keys;
    sum_us += tiles * tile_us(tile, keys / tile.block_n + 0.5, has_masks);
    num_tiles += tiles;
    longest_us = std::max(longest_us, tile_us(tile, most_keys / tile.block_n + 0.5, has_masks));
  }
  if (num_tiles == 0) return 0;
  // Tiles alike come in waves, or the last are cut, which costs as much again as joining them; others fill up
  // what is left, but for half of the longest.
  if (!slices.causal) {
    const double us = std::ceil(num_tiles / num_sms) * (sum_us / num_tiles);
    return call.num_sequences > 0 ? us : std::min(us, sum_us / num_sms + 2 * JOIN_US);
  }
  return std::max(sum_us / num_sms + longest_us / 2, longest_us);
}

// Which of CUDA_TILES: what the caller wants, or what is estimated to be done first.
Result<int> choose_tile(const RingAttentionCall& call, const CudaSlices& slices, int rank, int num_sms) {
  const int head_dim = call.dim <= 64 ? 64 : 128;
  int best = -1;
  double best_us = 0;
  for (int i = 0; i < NUM_CUDA_TILES; ++i) {
    const CudaTile& tile = CUDA_TILES[i];
    if (tile.head_dim != head_dim) continue;
    if (call.tuning.tile_m > 0 && call.tuning.tile_m != tile.block_m) continue;
    const double us = predicted_us(call, slices, rank, tile, num_sms);
    if (best < 0 || us < best_us) {
      best = i;
      best_us = us;
    }
  }
  if (best >= 0) return best;
  return unsupported(call, format("tuning: there is no tile of tile_m=%d for dim=%d; 0 chooses one",
                                  call.tuning.tile_m, call.dim));
}

// A forward call's panels between nodes, of packed sequences both their own and, `one`, as if they were one.
Status plan_panels(const RingAttentionCall& call, const KeyPanels& one, int block_n, const NetworkNeeds& needs,
                   RingAttentionPlan* to) {
  const auto take = [&](const auto& panels) {
    to->panels = panels;
    MK_RETURN_IF_ERROR(check_flags(call, panels, panels.num_flags()));
    return check_puts(call, panels, needs);
  };
  const CudaSlices& slices = to->tiles.slices;
  to->network = network_panels(call, slices, block_n, one, needs);
  if (call.num_sequences == 0) return take(to->network);
  to->packed_network = packed_network_panels(call, packed_slices(call, slices.nranks, slices.zigzag), block_n,
                                             to->panels, needs);
  return take(to->packed_network);
}

}  // namespace

Status unsupported(const RingAttentionCall& call, const std::string& what) {
  return Status(MK_ERROR_UNSUPPORTED, format("mk_%s: %s", operator_name(call.op), what.c_str()));
}

Status check_cuda_call(const RingAttentionCall& call) {
  if (call.dim > 128)
    return unsupported(call, format("dim: at most 128 on GPUs, saw %d; use MK_DEVICE_HOST", call.dim));
  if (call.seq > INT32_MAX / 2 || call.batch > INT32_MAX / std::max(1, call.heads)) {
    return unsupported(
        call, format("batch, heads, seq: more than 2^31 of them together, saw %lld, %d, %lld",
                     static_cast<long long>(call.batch), call.heads, static_cast<long long>(call.seq)));
  }
  return {};
}

CudaSlices cuda_slices(const RingAttentionCall& call, int nranks, bool zigzag) {
  const int64_t num_slices = zigzag ? 2 * nranks : nranks;
  return {static_cast<int>(call.seq), nranks,
          static_cast<int>(std::max<int64_t>(1, ceil_div(call.seq, num_slices))), call.causal != MK_CAUSAL_NONE,
          zigzag};
}

PackedSlices packed_slices(const RingAttentionCall& call, int nranks, bool zigzag) {
  return {static_cast<int>(call.seq),
          nranks,
          static_cast<int>(std::max<int64_t>(1, ceil_div(call.seq, nranks))),
          call.causal != MK_CAUSAL_NONE,
          zigzag,
          call.num_sequences,
          call.cu_seqlens,
          nullptr};
}

int packed_rows(const RingAttentionCall& call, int nranks, bool zigzag) {
  const int64_t rows = zigzag ? most_rows(call.seq, nranks, call.num_sequences) : ceil_div(call.seq, nranks);
  return static_cast<int>(std::max<int64_t>(1, rows));
}

namespace {

KeyPanels panels_of_runs(const RingAttentionCall& call, int nranks, int num_runs, int run_rows, int head_dim,
                         int block_n, int panel_blocks, int flags_a_panel) {
  KeyPanels panels{};
  panels.nranks = nranks;
  panels.num_heads = static_cast<int>(call.batch) * call.kv_heads;
  panels.num_runs = num_runs;
  panels.run_blocks = static_cast<int>(ceil_div(run_rows, block_n));
  panels.image_bytes = block_n * head_dim * 2;
  panels.panel_blocks = panel_blocks;
  panels.run_panels = static_cast<int>(ceil_div(panels.run_blocks, panel_blocks));
  while ((flags_a_panel * panels.num_flags() > kFlagsPerBank || panels.run_panels > MOST_PANELS) &&
         panels.run_panels > 1) {
    widen_panels(&panels);
  }
  return panels;
}

}  // namespace

KeyPanels key_panels(const RingAttentionCall& call, const CudaSlices& slices, int head_dim, int block_n,
                     int panel_blocks, int flags_a_panel) {
  return panels_of_runs(call, slices.nranks, slices.num_runs(), slices.slice_rows, head_dim, block_n,
                        panel_blocks, flags_a_panel);
}

Result<PackedPlan> plan_packed(const RingAttentionCall& call, int nranks, bool zigzag, int num_sms) {
  const PackedPlan plan = {packed_slices(call, nranks, zigzag), row_table_offset(num_sms)};
  const size_t room = num_sms * STAGING_BYTES;
  if (plan.table_offset + row_table_bytes(nranks, call.num_sequences) <= room) return plan;
  return unsupported(
      call, format("num_sequences: at most %lld with %d ranks and %d CTAs, saw %d",
                   static_cast<long long>((room - plan.table_offset) / row_table_bytes(nranks, 0)) - 1, nranks,
                   num_sms, call.num_sequences));
}

KeyPanels packed_panels(const RingAttentionCall& call, int nranks, bool zigzag, int head_dim, int block_n,
                        int panel_blocks, int flags_a_panel) {
  return panels_of_runs(call, nranks, 1, packed_rows(call, nranks, zigzag), head_dim, block_n, panel_blocks,
                        flags_a_panel);
}

Status check_flags(const RingAttentionCall& call, const KeyPanels& panels, int64_t num_flags) {
  if (num_flags <= kFlagsPerBank) return {};
  return unsupported(call,
                     format("%d key heads of all batches, of %d ranks, are more than there are flags for: "
                            "use several calls",
                            panels.num_heads, panels.nranks));
}

int64_t pushed_bytes(const KeyPanels& panels, const CudaSlices& slices, int rank, int block_n) {
  int64_t blocks = 0;
  for (int peer = 0; peer < slices.nranks; ++peer) {
    if (peer == rank) continue;
    for (int index = 0; index < panels.num_runs * panels.run_panels; ++index) {
      const PanelUnit unit = panel_unit(panels, slices, rank, block_n, index);
      const int run_begin = slices.begin(rank, unit.run);
      const int begin = run_begin + unit.block * block_n;
      const int end = least(begin + unit.num_blocks * block_n, run_begin + slices.count(rank, unit.run));
      if (begin < end && sees_some(slices, peer, begin, end)) blocks += unit.num_blocks;
    }
  }
  return blocks * panels.num_heads * 2 * panels.image_bytes;
}

int push_ctas(const RingAttentionCall& call, const KeyPanels& panels, int64_t bytes, int num_sms) {
  if (panels.nranks == 1 || panels.num_units() == 0) return 0;
  const int64_t wanted = std::clamp<int64_t>(bytes / LEAST_BYTES_PER_PUSH_CTA, 1, MOST_PUSH_CTAS);
  const int chosen = static_cast<int>(call.tuning.copy_ctas > 0 ? call.tuning.copy_ctas : wanted);
  return std::clamp(chosen, 1, std::max(1, num_sms));
}

NetworkPanels network_panels(const RingAttentionCall& call, const CudaSlices& slices, int block_n,
                             const KeyPanels& of_node, const NetworkNeeds& needs) {
  auto panels = panels_between_nodes<NetworkPanels>(call, slices, block_n, of_node, needs);
  set_needs(slices, &panels);
  return panels;
}

PackedNetworkPanels packed_network_panels(const RingAttentionCall& call, const PackedSlices& slices,
                                          int block_n, const KeyPanels& of_node, const NetworkNeeds& needs) {
  return panels_between_nodes<PackedNetworkPanels>(call, slices, block_n, of_node, needs);
}

template <class Slices>
Status check_puts(const RingAttentionCall& call, const NetworkPanelsOf<Slices>& panels,
                  const NetworkNeeds& needs) {
  const int64_t put_blocks = int64_t{panels.put_heads} * panels.put_panels * panels.panel_blocks;
  const int64_t num_signals = needs.signals_a_put * panels.num_signals();
  if (num_signals <= kSignalsPerBank - kEntrySignals &&
      needs.bytes_factor * put_blocks * panels.block_bytes() <= UINT32_MAX &&
      put_blocks * panels.num_puts() * panels.nranks <= INT32_MAX) {
    return {};
  }
  return unsupported(
      call,
      format("%lld positions, %d key heads of all batches, need more than %d puts of a rank, "
             "or puts of more than 4 GiB, between nodes: use several calls",
             static_cast<long long>(call.seq), panels.num_heads,
             (static_cast<int>(kSignalsPerBank) - kEntrySignals) / (needs.signals_a_put * panels.nranks)));
}

template Status check_puts(const RingAttentionCall&, const NetworkPanelsOf<CudaSlices>&, const NetworkNeeds&);
template Status check_puts(const RingAttentionCall&, const NetworkPanelsOf<PackedSlices>&, const NetworkNeeds&);

Result<NetworkShare> plan_network(const RingAttentionCall& call, const TopologyView& nodes,
                                  const NetworkPanels& panels, int* num_sms) {
  if (*num_sms < LEAST_CTAS_BETWEEN_NODES) {
    return unsupported(call, format("between nodes it needs %d CTAs or more, the communicator may use %d "
                                    "(max_ctas, reserved_sms)",
                                    LEAST_CTAS_BETWEEN_NODES, *num_sms));
  }
  NetworkShare share;
  share.nodes = make_node_ranks(nodes);
  const RankOrder order = make_rank_order(nodes);
  const RankSet others = share.nodes.own & ~(RankSet{1} << nodes.rank);
  const auto bytes_to = [&](int source, RankSet ranks) {
    return travelling_bytes(panels, source,
                            [&](RankSet needed_by) { return std::popcount(needed_by & ranks); });
  };
  int64_t forwarded = 0;
  for (int i = 0; i < order.num_relayed; ++i) forwarded += bytes_to(order.relayed[i], others);
  share.link_bytes = bytes_to(nodes.rank, others) + forwarded;
  share.network_bytes = travelling_bytes(panels, nodes.rank, [&](RankSet needed_by) {
    return std::count_if(share.nodes.of_rail, share.nodes.of_rail + order.num_rail_peers,
                         [&](RankSet node) { return (needed_by & node) != 0; });
  });
  share.pushed_bytes =
      bytes_to(nodes.rank, others) + travelling_bytes(panels, nodes.rank, [&](RankSet needed_by) {
        return (needed_by & ~share.nodes.own) != 0 ? 1 : 0;
      });
  // Of packed sequences there may be something to forward where of one there is nothing.
  if (call.num_sequences > 0 && nodes.local_nranks() > 1 && order.num_relayed > 0)
    forwarded = std::max<int64_t>(1, forwarded);
  share.num_forward_ctas = forward_ctas(call, nodes, forwarded, *num_sms);
  *num_sms -= share.num_forward_ctas + 1;
  return share;
}

}  // namespace ring_attention

using namespace ring_attention;

Result<RingAttentionPlan> ring_attention_plan(const RingAttentionCall& call, int rank, int nranks, int num_sms,
                                              const TopologyView* nodes) {
  MK_RETURN_IF_ERROR(check_cuda_call(call));
  const bool is_packed = call.num_sequences > 0, is_zigzag = call.causal == MK_CAUSAL_ZIGZAG;
  const Result<int> chosen = choose_tile(call, cuda_slices(call, nranks, is_zigzag), rank, num_sms);
  if (!chosen.ok()) return chosen.status();
  const CudaTile& tile = CUDA_TILES[chosen.value()];
  const int64_t staging_bytes = static_cast<int64_t>(STAGING_BYTES) * num_sms;
  RingAttentionPlan plan{};
  plan.plan = MK_PLAN_INIT;
  plan.tile = chosen.value();
  // Of packed sequences as if they were one: a plan looks at no pointer.
  plan.tiles = {cuda_slices(call, nranks, is_zigzag), rank,        static_cast<int>(call.batch), call.heads,
                std::max(1, call.kv_heads),           tile.block_m};
  const KeyPanels one = key_panels(call, plan.tiles.slices, tile.head_dim, tile.block_n, 1, 1);
  plan.panels = is_packed ? packed_panels(call, nranks, is_zigzag, tile.head_dim, tile.block_n, 1, 1) : one;
  const NetworkNeeds needs = {nranks};
  if (nodes != nullptr) {
    MK_RETURN_IF_ERROR(plan_panels(call, one, tile.block_n, needs, &plan));
  } else {
    MK_RETURN_IF_ERROR(check_flags(call, plan.panels, plan.panels.num_flags()));
  }
  const int64_t tiles_of_head =
      is_packed ? ceil_div(packed_rows(call, nranks, is_zigzag), tile.block_m) : plan.tiles.tiles_of_head();
  const int64_t num_tiles = int64_t{call.batch} * call.heads * tiles_of_head;
  if (num_tiles > INT32_MAX) return unsupported(call, "more than 2^31 tiles of queries: use several calls");
  if (is_packed) {
    const Result<PackedPlan> packed = plan_packed(call, nranks, is_zigzag, num_sms);
    if (!packed.ok()) return packed.status();
    plan.packed = packed.value();
  }
  for (const bool zigzag : {false, true}) {
    if (is_packed) {
      const KeyPanels panels = packed_panels(call, nranks, zigzag, tile.head_dim, tile.block_n, 1, 1);
      const size_t bytes =
          nodes == nullptr
              ? panels.area_bytes()
              : packed_network_panels(call, plan.packed.slices, tile.block_n, panels, needs).area_bytes();
      plan.area_bytes = std::max(plan.area_bytes, static_cast<int64_t>(bytes));
    }
    const CudaSlices slices = cuda_slices(call, nranks, zigzag);
    const KeyPanels panels = key_panels(call, slices, tile.head_dim, tile.block_n, 1, 1);
    const size_t bytes = nodes == nullptr
                             ? panels.area_bytes()
                             : network_panels(call, slices, tile.block_n, panels, needs).area_bytes();
    plan.area_bytes = std::max(plan.area_bytes, static_cast<int64_t>(bytes));
  }
  int64_t pushed = 0;
  if (nodes != nullptr) {
    Result<NetworkShare> share = plan_network(call, *nodes, plan.network, &num_sms);
    if (!share.ok()) return share.status();
    pushed = share->pushed_bytes;
    plan.nodes = share->nodes;
    plan.packed_network.own = share->nodes.own;
    plan.num_forward_ctas = share->num_forward_ctas;
    plan.plan.link_bytes = share->link_bytes;
    plan.plan.network_bytes = share->network_bytes;
    plan.plan.receive_ctas = share->num_forward_ctas;
    plan.plan.send_ctas = 1;
  } else {
    pushed = plan.plan.link_bytes = pushed_bytes(one, plan.tiles.slices, rank, tile.block_n);
  }
  // With a mask ranks push unequally much.
  int64_t most_pushed = pushed;
  for (int source = 0; source < nranks && !nodes; ++source)
    most_pushed = std::max(most_pushed, pushed_bytes(one, plan.tiles.slices, source, tile.block_n));
  plan.num_push_ctas = push_ctas(call, plan.panels, pushed, num_sms);
  const int most = call.tuning.compute_ctas > 0 ? std::min(num_sms, call.tuning.compute_ctas) : num_sms;
  const double push_us = static_cast<double>(pushed) / LINK_BYTES_PER_US;
  const double network_us = static_cast<double>(plan.plan.network_bytes) / NETWORK_BYTES_PER_US;
  const QueryItemsShape shape = {tile,
                                 most,
                                 std::min(plan.num_push_ctas, most),
                                 push_us,
                                 std::max(static_cast<double>(most_pushed) / LINK_BYTES_PER_US, network_us),
                                 staging_bytes,
                                 STAGING_FLAGS_BYTES / sizeof(uint32_t)};
  int64_t num_items = num_tiles;
  if (is_packed) {
    const bool are_alike = call.num_sequences == 1 && !plan.tiles.slices.causal;
    plan.packed.joint_heads = are_alike ? 1 : choose_joint_heads(shape, plan.tiles);
  } else {
    plan.items = plan_query_items(shape, &plan.tiles);
    num_items = plan.items.num_items;
  }
  // CTAs that push compute afterwards.
  plan.plan.compute_ctas =
      static_cast<int>(std::min<int64_t>(most, std::max<int64_t>(1, num_items) + plan.num_push_ctas));
  plan.num_push_ctas = std::min<int>(plan.num_push_ctas, plan.plan.compute_ctas);
  plan.plan.copy_ctas = plan.num_push_ctas;
  plan.plan.tile_m = tile.block_m;
  plan.plan.tile_n = tile.block_n;
  plan.plan.chunk_rows = plan.panels.panel_blocks * tile.block_n;
  plan.plan.num_chunks = plan.panels.num_runs * plan.panels.run_panels;
  plan.plan.chunk_bytes = int64_t{plan.panels.panel_blocks} * 2 * plan.panels.image_bytes;
  plan.plan.workspace_bytes = 2 * plan.area_bytes;
  return plan;
}

}  // namespace mk
