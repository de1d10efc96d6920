// SPDX-License-Identifier: MIT
#include "kernels/cuda/ring_attention_backward_plan.h"

#include <algorithm>

#include "kernels/plan.h"

namespace mk {

using namespace ring_attention;
using namespace ring_attention_backward;

namespace {

constexpr int FLAGS_A_PANEL = 2;  // of its keys and of its parts

// A panel is at least a tile of keys.
GradientPanels make_panels(const RingAttentionCall& call, const CudaSlices& slices) {
  const int head_dim = call.dim <= 64 ? 64 : 128;
  return {key_panels(call, slices, head_dim, BLOCK_ROWS, TILE_BLOCKS, FLAGS_A_PANEL),
          static_cast<int>(call.batch) * call.heads, head_dim};
}

GradientPanels make_packed_panels(const RingAttentionCall& call, int nranks, bool zigzag) {
  const int head_dim = call.dim <= 64 ? 64 : 128;
  return {packed_panels(call, nranks, zigzag, head_dim, BLOCK_ROWS, TILE_BLOCKS, FLAGS_A_PANEL),
          static_cast<int>(call.batch) * call.heads, head_dim};
}

// Tiles of queries and keys that a rank may have of packed sequences.
int64_t most_packed_tiles(const RingAttentionCall& call, int nranks, bool zigzag) {
  const int64_t of_head = tiles_of(packed_rows(call, nranks, zigzag));
  return of_head * (call.heads + int64_t{nranks} * call.kv_heads);
}

}  // namespace

Result<RingAttentionBackwardPlan> ring_attention_backward_plan(const RingAttentionCall& call, int rank,
                                                               int nranks, int num_sms) {
  MK_RETURN_IF_ERROR(check_cuda_call(call));
  RingAttentionBackwardPlan plan{};
  plan.plan = MK_PLAN_INIT;
  const bool is_packed = call.num_sequences > 0, is_zigzag = call.causal == MK_CAUSAL_ZIGZAG;
  // Of packed sequences as if they were one: a plan looks at no pointer.
  const CudaSlices slices = cuda_slices(call, nranks, is_zigzag);
  const GradientPanels one = make_panels(call, slices);
  plan.panels = is_packed ? make_packed_panels(call, nranks, is_zigzag) : one;
  plan.tiles = {slices, rank, static_cast<int>(call.batch), call.heads, std::max(1, call.kv_heads), TILE_ROWS};
  plan.key_tiles = {slices, rank, plan.panels.num_heads};
  MK_RETURN_IF_ERROR(check_flags(call, plan.panels, plan.panels.num_flags()));
  const int64_t num_tiles =
      is_packed ? most_packed_tiles(call, nranks, is_zigzag)
                : int64_t{call.batch} * call.heads * plan.tiles.tiles_of_head() + plan.key_tiles.size();
  if (num_tiles > INT32_MAX) return unsupported(call, "more than 2^31 tiles: use several calls");
  plan.num_key_tiles = static_cast<int>(plan.key_tiles.size());
  if (is_packed) {
    const Result<PackedPlan> packed = plan_packed(call, nranks, is_zigzag, num_sms);
    if (!packed.ok()) return packed.status();
    plan.packed = packed.value();
  }
  for (const bool zigzag : {false, true}) {
    size_t bytes = make_panels(call, cuda_slices(call, nranks, zigzag)).area_bytes();
    if (is_packed) bytes = std::max(bytes, make_packed_panels(call, nranks, zigzag).area_bytes());
    plan.area_bytes = std::max(plan.area_bytes, static_cast<int64_t>(bytes));
  }
  const int64_t pushed = pushed_bytes(one, slices, rank, BLOCK_ROWS);
  plan.plan.link_bytes = pushed;
  for (int step = 1; step < nranks; ++step) {
    plan.plan.link_bytes +=
        int64_t{plan.panels.num_heads} * plan.key_tiles.tiles_of_step(step) * plan.panels.part_bytes();
  }
  plan.num_push_ctas = push_ctas(call, plan.panels, pushed, num_sms);
  const int most = call.tuning.compute_ctas > 0 ? std::min(num_sms, call.tuning.compute_ctas) : num_sms;
  // CTAs that push compute afterwards.
  plan.plan.compute_ctas =
      static_cast<int>(std::min<int64_t>(most, std::max<int64_t>(1, num_tiles) + plan.num_push_ctas));
  plan.num_push_ctas = std::min<int>(plan.num_push_ctas, plan.plan.compute_ctas);
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
