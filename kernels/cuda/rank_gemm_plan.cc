// SPDX-License-Identifier: MIT
#include "kernels/cuda/rank_gemm_plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "kernels/cuda/gemm_type.h"
#include "kernels/device/rank_gemm_tiles.h"
#include "kernels/device/tagged_packets.h"
#include "kernels/ops/allgather_gemm/plan.h"
#include "kernels/ops/allgather_gemm/wgrad_order.h"
#include "kernels/ops/gemm_reduce_scatter/tagged_params.h"
#include "transport/command.h"

namespace mk {
namespace {

using allgather_gemm::WgradOrder;
using gemm_reduce_scatter::Reduction;
using gemm_reduce_scatter::TAGGED_COLUMNS;

// Chunks of gathered rows are as high as the highest tile, so that they do not depend on a rank's own choice.
constexpr int CHUNK_ROWS = 128;
// Coordinates of TMA, and bytes of a row, are 32 bits.
constexpr int64_t kMaxSize = (INT32_MAX - 65536) / 2;
constexpr int MAX_PANELS = 8;
constexpr int MIN_PANEL_STEPS = 4;
constexpr int64_t MAX_MERGED_ROWS = 256;
// Few rows: what a rank brings to all is there as soon in one panel, and each takes a flag's latency.
constexpr double FEW_ROWS_PANEL_BYTES = 512 << 10;
// Up to so many bytes leave from the CTAs that compute, whatever the product.
constexpr double FEW_BYTES = 2200000;
// What the second exchange costs, in bytes on the link: beyond it, an all-reduce goes by way of owners. One
// without fences and flags costs less.
constexpr int64_t ONE_SHOT_EXTRA_BYTES = 2400000;
constexpr int64_t ONE_SHOT_EXTRA_BYTES_TAGGED = 1000000;
constexpr int64_t MAX_ONE_SHOT_ROWS = 1024;
// Owners of an all-reduce of more rows share out rows: there are tiles enough of any height.
constexpr int64_t MAX_ROWS_BY_COLUMNS = 1024;
// With more tiles a CTA, what is exchanged takes the way that lets the product go on.
constexpr int MAX_DIRECT_TILES = 1;
constexpr int64_t TYPICAL_K = 2048;
constexpr double LINK_BYTES_PER_US = 363e3;
// Of a CTA that does nothing but push, with all others at it.
constexpr double PUSH_BYTES_PER_US_OF_CTA = 38e3;
// What tiles cut along k take of the predicted time where warpgroups take turns.
constexpr double PING_PONG_CUT_FACTOR = 1.15;
// What an owner has computed at a time where owners take turns, in waves.
constexpr double BLOCK_WAVES = 0.5;
// Of a product's time, that the links may need, for pushes to be paced.
constexpr double PACED_SHARE = 0.85;

// What is exchanged travels in tagged packets up to so many bytes on the link: a reduce-scatter's, and those of
// each of an all-reduce's exchanges.
constexpr double MAX_TAGGED_BYTES_OF_REDUCE_SCATTER = 1100000;
constexpr double MAX_TAGGED_BYTES_OF_ALLREDUCE = 2200000;

bool may_take(const GemmCall& call, const GemmTile& tile) {
  return (call.tuning.tile_m <= 0 || call.tuning.tile_m == tile.block_m) &&
         (call.tuning.tile_n <= 0 || call.tuning.tile_n == tile.block_n);
}

// Those that there are kernels for.
std::span<const GemmTile> tiles_for(const GemmCall& call, bool is_between_nodes) {
  if (call.mode == MK_ALLGATHER_WGRAD) return WGRAD_TILES;
  if (call.op == MK_OPERATOR_ALLGATHER_GEMM && !is_between_nodes) return GATHER_TILES;
  return RANK_GEMM_TILES;
}

// The tile, one of `tiles`, for `num_owners` owners' rows, or, `by_columns`, so many owners' columns of the
// same rows, by the model of the plain product; with `cuts`, tiles of the last wave may be cut along k.
GemmPlan choose_tile(const GemmCall& call, std::span<const GemmTile> tiles, int64_t rows, int num_owners,
                     int64_t k, int num_sms, bool cuts, bool by_columns = false) {
  GemmPlan best;
  const bool is_wgrad = call.mode == MK_ALLGATHER_WGRAD;
  for (const GemmTile& tile : tiles) {
    if (!may_take(call, tile)) continue;
    // In more than one wave the highest takes longer than the model says: see choose_shared_tile().
    if (tile.block_m > CHUNK_ROWS && call.tuning.tile_m == 0) continue;
    GemmShape shape;
    shape.m = (by_columns ? 1 : num_owners) * round_up(rows, tile.block_m);
    shape.n = by_columns ? num_owners * round_up(ceil_div(call.n, num_owners), tile.block_n) : call.n;
    shape.k = k;
    shape.in_type = gemm_type(call.dtype);
    shape.out_type = gemm_type(call.out_dtype);
    // Ranks of a reduction choose alike, and b_layout is each rank's own.
    shape.b_transposed = call.op == MK_OPERATOR_ALLGATHER_GEMM && call.b_layout == MK_LAYOUT_NK && !is_wgrad;
    const GemmPlan plan = gemm_plan_with(shape, num_sms, tile, -1);
    if (best.block_m == 0 || plan.predicted_us < best.predicted_us) best = plan;
    const int64_t rest = gemm_plan_num_tiles(shape, plan) % num_sms;
    if (!cuts || rest == 0) continue;
    GemmPlan cut = gemm_plan_with(shape, num_sms, tile, static_cast<int>(rest));
    if (tile.ping_pong) cut.predicted_us *= PING_PONG_CUT_FACTOR;
    if (cut.num_workers == num_sms && cut.predicted_us < best.predicted_us) best = cut;
  }
  return best;
}

// Rows of tiles are walked in groups; a group that divides a rank's rows does not reach into the next rank's.
int group_rows(int wanted, int tile_rows) {
  for (int group = std::min(wanted, tile_rows); 2 * group > wanted && group > 1; --group) {
    if (tile_rows % group == 0) return group;
  }
  return std::max(1, std::min(wanted, tile_rows));
}

Status too_many_flags(const GemmCall& call, int64_t flags) {
  return Status(MK_ERROR_UNSUPPORTED,
                format("mk_%s: m=%lld, n=%lld needs %lld flags of transfer; a launch has %d: use several calls",
                       operator_name(call.op), static_cast<long long>(call.m), static_cast<long long>(call.n),
                       static_cast<long long>(flags), kFlagsPerBank));
}

void fill_public_plan(const GemmCall& call, int nranks, int num_sms, RankGemmPlan& to) {
  const int64_t max_rows = ceil_div(call.m, nranks);
  mk_plan_t& plan = to.plan;
  plan.compute_ctas = num_sms;
  plan.tile_m = to.gemm.block_m;
  plan.tile_n = to.gemm.block_n;
  plan.chunk_rows = CHUNK_ROWS;
  plan.num_chunks = std::max(1, num_chunks(max_rows, CHUNK_ROWS));
  plan.workspace_bytes = 2 * static_cast<uint64_t>(to.area_bytes);
}

// CTAs that compute, of `num_ctas`.
int compute_ctas(const GemmCall& call, int num_ctas) {
  return call.tuning.compute_ctas > 0 ? std::min(call.tuning.compute_ctas, num_ctas) : num_ctas;
}

// CTAs that only push, beside a product of `product_us` in which `bytes` are to go to peers. Between nodes they
// are to be through with own rows in half that time: then they forward what has come from the network.
int choose_push_ctas(const GemmCall& call, int num_sms, double bytes, double product_us,
                     bool is_between_nodes) {
  const double bytes_per_us_of_cta = is_between_nodes ? 20e3 : PUSH_BYTES_PER_US_OF_CTA;
  constexpr double MIN_PUSH_CTAS = 3;
  constexpr double MAX_PUSH_CTAS = 10;  // which fill the links
  if (num_sms < 2) return 0;
  const int most = std::max(1, num_sms / 8);
  if (call.tuning.copy_ctas > 0) return std::clamp(call.tuning.copy_ctas, 1, num_sms - 1);
  if (bytes == 0) return 0;
  const double wanted = std::ceil(bytes / std::max(1.0, product_us) / bytes_per_us_of_cta);
  return std::min(most, static_cast<int>(std::clamp(wanted, MIN_PUSH_CTAS, MAX_PUSH_CTAS)));
}

// The tile beside to.plan.copy_ctas; or beside a few more, where the last wave's tiles are then cut into fewer
// pieces: of many, a tile's owner waits for the last.
void choose_waves(const GemmCall& call, int64_t rows, int64_t k, int num_sms, RankGemmPlan& to) {
  constexpr int MOST_MORE_CTAS = 8;
  constexpr double LEAST_GAIN = 0.98;
  const int wanted = to.plan.copy_ctas;
  const bool is_free = wanted > 0 && call.tuning.copy_ctas == 0 && num_sms >= 8 * MOST_MORE_CTAS;
  to.gemm.block_m = 0;
  for (int more = 0; more <= (is_free ? MOST_MORE_CTAS : 0); more += 2) {
    const GemmPlan plan = choose_tile(call, tiles_for(call, to.is_between_nodes), rows, to.num_owners, k,
                                      compute_ctas(call, num_sms - wanted - more), true);
    if (to.gemm.block_m > 0 && plan.predicted_us >= LEAST_GAIN * to.gemm.predicted_us) continue;
    to.gemm = plan;
    to.plan.copy_ctas = wanted + more;
  }
}

// The tile of a product beside which rows travel, and the CTAs of both; answers how many compute. `rows` rows
// of C an owner.
int plan_product(const GemmCall& call, int64_t rows, int64_t k, int nranks, int num_sms, RankGemmPlan& to) {
  const int all_ctas = compute_ctas(call, num_sms);
  to.gemm = choose_tile(call, tiles_for(call, to.is_between_nodes), rows, to.num_owners, k, all_ctas, true);
  if (to.gemm.block_m == 0) return 0;
  // Pushes from an SM hold up its product by up to a half, so a few SMs do nothing else; but a product of one
  // wave waits for the last rows whoever pushes, and all SMs can. Rows are wanted over the time of the others'
  // tiles.
  const int64_t max_rows = ceil_div(call.m, nranks);
  const double bytes = static_cast<double>(max_rows * travelling_columns(call) * 2) * nranks;
  const int64_t num_tiles = to.num_owners * ceil_div(rows, to.gemm.block_m) * ceil_div(call.n, to.gemm.block_n);
  const bool is_small = call.mode == MK_ALLGATHER_FORWARD && !to.is_between_nodes && max_rows <= CHUNK_ROWS &&
                        (bytes <= FEW_BYTES || num_tiles <= all_ctas);
  const bool has_waves = to.gemm.num_workers == all_ctas;
  // Between two ranks only beside many waves: of few, SMs that do not compute cost more. With more ranks that
  // has not been measured since producers wait for rows without a fence.
  constexpr int64_t MOST_WAVES_WITHOUT = 6;
  const bool is_short = call.mode == MK_ALLGATHER_FORWARD && !to.is_between_nodes && nranks == 2 &&
                        num_tiles <= MOST_WAVES_WITHOUT * all_ctas;
  to.plan.copy_ctas = (has_waves && !is_small && !is_short) || call.tuning.copy_ctas > 0
                          ? choose_push_ctas(call, num_sms, bytes, to.gemm.predicted_us, to.is_between_nodes)
                          : 0;
  choose_waves(call, rows, k, num_sms, to);
  num_sms = compute_ctas(call, num_sms - to.plan.copy_ctas);
  to.tile_rows = static_cast<int>(ceil_div(rows, to.gemm.block_m));
  return num_sms;
}

// CTAs that have pushed compute what is left, from the round of tiles on in which they are expected to be
// through: too late rather than too early, for the tiles of one that comes late are the last. It is, where
// products are so long that clocks fall below the model's.
void choose_late_workers(const GemmCall& call, int64_t rows, double bytes, int num_early, RankGemmPlan& to) {
  constexpr int MOST_MORE_ROUNDS = 16;  // for a better last wave
  // In a product of 32 rounds they cost 4 %: CTAs that are no longer in step read more of the operands from
  // memory.
  constexpr int MOST_ROUNDS = 16;
  constexpr double LEAST_GAIN = 0.995;
  const GemmTile tile = {to.gemm.block_m, to.gemm.block_n, to.gemm.ping_pong};
  GemmShape shape;
  shape.m = to.num_owners * round_up(rows, tile.block_m);
  shape.n = call.n;
  shape.k = call.k;
  shape.in_type = gemm_type(call.dtype);
  shape.out_type = gemm_type(call.out_dtype);
  shape.b_transposed = call.b_layout == MK_LAYOUT_NK;
  const int num_late = to.plan.copy_ctas;
  const int num_workers = num_early + num_late;
  const auto num_tiles = gemm_plan_num_tiles(shape, to.gemm);
  if (num_late == 0 || bytes == 0 || call.tuning.compute_ctas > 0 || num_tiles == 0) return;
  if (num_tiles > int64_t{MOST_ROUNDS} * num_workers) return;
  const GemmPlan whole = gemm_plan_with(shape, num_workers, tile, -1);
  const double round_us = whole.predicted_us / static_cast<double>(ceil_div(num_tiles, num_workers));
  const double push_us = bytes / PUSH_BYTES_PER_US_OF_CTA / num_late;
  const auto first = static_cast<int>(std::ceil(push_us / round_us));
  const bool cuts = to.gemm.num_streamk_tiles > 0;
  double best_us = LEAST_GAIN * to.gemm.predicted_us;
  for (int rounds = first; rounds < first + MOST_MORE_ROUNDS; ++rounds) {
    const int64_t late_tile = int64_t{rounds} * num_early;
    if (late_tile + num_workers > num_tiles) return;
    const auto rest = static_cast<int>((num_tiles - late_tile) % num_workers);
    const double whole_us = round_us * static_cast<double>(rounds + (num_tiles - late_tile) / num_workers);
    const GemmPlan cut = gemm_plan_with(shape, num_workers, tile, cuts && rest > 0 ? rest : -1);
    const double cut_us = cut.predicted_us * (tile.ping_pong ? PING_PONG_CUT_FACTOR : 1.0) -
                          round_us * static_cast<double>(ceil_div(num_tiles - rest, num_workers));
    const bool is_cut = cut.num_streamk_tiles > 0 && cut.num_workers == num_workers && cut_us < round_us;
    const double us = whole_us + (rest == 0 ? 0.0 : is_cut ? std::max(0.0, cut_us) : round_us);
    if (us >= best_us) continue;
    best_us = us;
    to.num_late = num_late;
    to.late_tile = static_cast<int>(late_tile);
    to.gemm.num_streamk_tiles = is_cut ? rest : 0;
  }
}

// Where each CTA would have one tile, those of other ranks' rows wait, and those of this rank's are through
// early. So two CTAs share one of the first half along k, then one of the second. Of the large tiles the one
// whose steps are shortest, beside pushes. Answers how many CTAs then compute, or 0: tiles are not shared.
int choose_shared_tile(const GemmCall& call, int64_t rows, int nranks, int num_sms, RankGemmPlan& to) {
  constexpr int64_t LEAST_STEPS = 32;
  constexpr double LEAST_PART_OF_SMS = 0.7;
  constexpr double LOAD_BYTES_PER_CYCLE = 37;
  if (to.merged || nranks == 1 || ceil_div(call.k, GEMM_BLOCK_K) < LEAST_STEPS) return 0;
  if (call.tuning.copy_ctas > 0 || call.tuning.compute_ctas > 0) return 0;
  double best_cycles = 0;
  int num_workers = 0;
  for (const GemmTile& tile : GATHER_TILES) {
    if (tile.ping_pong || tile.block_m < CHUNK_ROWS || !may_take(call, tile)) continue;
    const int64_t tile_rows = ceil_div(rows, tile.block_m);
    const int64_t num_tiles = nranks * tile_rows * ceil_div(call.n, tile.block_n);
    if (num_tiles % 2 != 0 || num_tiles > num_sms) continue;
    if (static_cast<double>(num_tiles) < LEAST_PART_OF_SMS * num_sms) continue;
    const int64_t columns = call.b_layout == MK_LAYOUT_NK ? tile.block_n : round_up(tile.block_n, 64);
    const double load_bytes = 2.0 * GEMM_BLOCK_K * static_cast<double>(tile.block_m + columns);
    const double cycles = std::max(tile.block_m * tile.block_n / 32.0, load_bytes / LOAD_BYTES_PER_CYCLE);
    if (num_workers > 0 && cycles >= best_cycles) continue;
    best_cycles = cycles;
    num_workers = static_cast<int>(num_tiles);
    GemmShape shape;
    shape.m = nranks * tile_rows * tile.block_m;
    shape.n = call.n;
    shape.k = call.k;
    to.gemm = gemm_plan_with(shape, num_workers, tile, -1);
    to.tile_rows = static_cast<int>(tile_rows);
    to.plan.copy_ctas = 0;
  }
  to.shares_tiles = num_workers > 0;
  return num_workers;
}

// What depends on chunks, of which every rank has at most to.plan.num_chunks.
Status plan_chunks(const GemmCall& call, int rank, int nranks, RankGemmPlan& to) {
  const int64_t row_bytes = travelling_columns(call) * 2;
  const int64_t flags = int64_t{nranks} * to.plan.num_chunks * to.num_panels;
  if (flags > kFlagsPerBank) return too_many_flags(call, flags);
  to.plan.chunk_bytes = std::min<int64_t>(to.plan.chunk_rows, ceil_div(call.m, nranks)) *
                        std::min<int64_t>(row_bytes, to.panel_steps * GEMM_BLOCK_K * 2);
  to.plan.link_bytes = rows_count(call.m, nranks, rank) * row_bytes * (nranks - 1);
  return {};
}

// Few tiles, all at once, of all ranks' rows: clusters share the inner dimension of each, or, in pairs, load B
// together, where that is expected to be better. False: they do not.
bool plan_clusters(const GemmCall& call, int num_sms, const GemmClusterLimits& limits, RankGemmPlan& to) {
  // Of tiles of one rank's rows, in one wave as well, half wait for rows while the others are computed.
  constexpr double WAIT_US = 20;
  if (to.is_between_nodes || call.tuning.copy_ctas > 0 || call.tuning.compute_ctas > 0) return false;
  GemmShape shape;
  shape.m = call.m;
  shape.n = call.n;
  shape.k = call.k;
  shape.in_type = gemm_type(call.dtype);
  shape.out_type = gemm_type(call.out_dtype);
  shape.b_transposed = call.b_layout == MK_LAYOUT_NK;
  const auto may_be = [&](const GemmPlan& plan) {
    return plan.num_cluster_ctas() > 1 && may_take(call, {plan.block_m, plan.block_n, false});
  };
  GemmPlan best = gemm_split_plan(shape, num_sms, limits);
  // Of fewer rows pairs lose to clusters that split k; pairs that split it, too, have not been measured here.
  const GemmPlan pairs = call.m > MAX_MERGED_ROWS ? gemm_pair_plan(shape, num_sms, limits, 1) : GemmPlan();
  if (may_be(pairs) && (!may_be(best) || pairs.predicted_us < best.predicted_us)) best = pairs;
  if (!may_be(best)) return false;
  const GemmPlan other = choose_tile(call, GATHER_TILES, call.m, 1, call.k, num_sms, true);
  const double other_us = other.predicted_us + (best.in_pairs ? WAIT_US : 0);
  if (other.block_m > 0 && other_us < best.predicted_us) return false;
  to.gemm = best;
  to.merged = true;
  to.num_owners = 1;
  to.plan.copy_ctas = 0;
  to.tile_rows = static_cast<int>(ceil_div(call.m, best.block_m * (best.in_pairs ? 2 : 1)));
  return true;
}

Status plan_gather(const GemmCall& call, int rank, int nranks, int num_sms, const GemmClusterLimits& limits,
                   RankGemmPlan& to) {
  const int64_t max_rows = ceil_div(call.m, nranks);
  const int64_t k_steps = ceil_div(call.k, GEMM_BLOCK_K);
  const int64_t flags_per_panel = int64_t{nranks} * std::max(1, num_chunks(max_rows, CHUNK_ROWS));
  const bool has_clusters = plan_clusters(call, num_sms, limits, to);
  const int all_ctas = num_sms;
  if (has_clusters) {
    num_sms = to.gemm.num_ctas();
  } else {
    // Where all ranks' rows are few, the weights of a tile are then read once, and not once a rank.
    to.merged = max_rows < CHUNK_ROWS || (!to.is_between_nodes && call.m <= MAX_MERGED_ROWS);
    to.num_owners = to.merged ? 1 : nranks;
    num_sms = plan_product(call, to.merged ? call.m : max_rows, call.k, nranks, num_sms, to);
  }
  if (num_sms == 0) return {};
  // Tiles in flight at once would wait for their data together: panels.
  const double few = static_cast<double>(max_rows * call.k * 2) / FEW_ROWS_PANEL_BYTES;
  const int64_t most_panels = max_rows <= CHUNK_ROWS && !to.is_between_nodes
                                  ? std::clamp<int64_t>(static_cast<int64_t>(few), 1, MAX_PANELS)
                                  : MAX_PANELS;
  to.num_panels = static_cast<int>(std::clamp<int64_t>(
      std::min(k_steps / MIN_PANEL_STEPS, kFlagsPerBank / flags_per_panel), 1, most_panels));
  to.panel_steps = static_cast<int>(std::max<int64_t>(1, ceil_div(k_steps, to.num_panels)));
  to.num_panels = static_cast<int>(std::max<int64_t>(1, ceil_div(k_steps, to.panel_steps)));
  if (!to.is_between_nodes && !has_clusters) {
    const int num_sharing = choose_shared_tile(call, max_rows, nranks, all_ctas, to);
    if (num_sharing > 0) num_sms = num_sharing;
    const double bytes = static_cast<double>(max_rows * call.k * 2) * (to.merged ? nranks : nranks - 1);
    choose_late_workers(call, to.merged ? call.m : max_rows, bytes, num_sms, to);
  }
  to.area_bytes = call.m * round_up(call.k * 2, 16);
  fill_public_plan(call, nranks, num_sms, to);
  return plan_chunks(call, rank, nranks, to);
}

// Mode WGRAD: a chunk is a k-step, and whole rows travel, for a tile of C wants them all.
Status plan_wgrad(const GemmCall& call, int rank, int nranks, int num_sms, RankGemmPlan& to) {
  const WgradOrder order = WgradOrder::of(call.m, rank, nranks, call.b_layout == MK_LAYOUT_NK);
  num_sms = plan_product(call, call.k, int64_t{order.num_steps()} * GEMM_BLOCK_K, nranks, num_sms, to);
  if (num_sms == 0) return {};
  to.panel_steps = static_cast<int>(std::max<int64_t>(1, ceil_div(call.n, GEMM_BLOCK_K)));
  to.area_bytes = call.m * round_up(call.n * 2, 16);
  fill_public_plan(call, nranks, num_sms, to);
  to.plan.chunk_rows = WgradOrder::STEP_ROWS;
  to.plan.num_chunks = std::max(1, num_chunks(ceil_div(call.m, nranks), WgradOrder::STEP_ROWS));
  return plan_chunks(call, rank, nranks, to);
}

bool goes_one_shot(const GemmCall& call, int nranks) {
  if (call.op != MK_OPERATOR_GEMM_ALLREDUCE) return false;
  if (call.tuning.algorithm != MK_ALGORITHM_AUTO) return call.tuning.algorithm == MK_ALGORITHM_ONE_SHOT;
  // One-shot sends a whole matrix to every peer, two-shot twice the share of one.
  const int64_t bytes = call.m * call.n * element_bytes(call.comm_dtype);
  const int64_t extra = bytes * (nranks - 1) * (nranks - 2) / nranks;
  const bool has_packets = element_bytes(call.comm_dtype) == 2 && element_bytes(call.out_dtype) == 2;
  return call.m <= MAX_ONE_SHOT_ROWS &&
         extra <= (has_packets ? ONE_SHOT_EXTRA_BYTES_TAGGED : ONE_SHOT_EXTRA_BYTES);
}

// Slots hold whole tiles, and the tile is chosen by the size of the call: what any call of up to these sizes
// needs, whichever its tile.
int64_t max_slot_bytes(int64_t rows, int64_t n, mk_dtype_t dtype) {
  return (std::max<int64_t>(rows, 1) + 127) * (n + 255) * element_bytes(dtype);
}
int64_t max_slot_bytes(int64_t rows, const GemmCall& call) {
  return max_slot_bytes(rows, call.n, call.comm_dtype);
}

// Of a reduction by way of owners, of rows or of columns.
int64_t max_slot_bytes_of_owners(const GemmCall& call, int nranks) {
  const int64_t of_rows = max_slot_bytes(ceil_div(call.m, nranks), call);
  if (call.op != MK_OPERATOR_GEMM_ALLREDUCE) return of_rows;
  const int64_t rows = std::min(call.m, MAX_ROWS_BY_COLUMNS);
  return std::max(of_rows, max_slot_bytes(rows, ceil_div(call.n, nranks), call.comm_dtype));
}

// The same of one-shot calls, which are wide or high, but not both.
int64_t max_one_shot_slot_bytes(const GemmCall& call, int nranks) {
  const int bytes = element_bytes(call.comm_dtype);
  const int64_t rows = std::min(call.m, MAX_ONE_SHOT_ROWS);
  int64_t elements = rows * call.n;
  // As in goes_one_shot().
  if (nranks > 2)
    elements = std::min(elements, ONE_SHOT_EXTRA_BYTES * nranks / ((nranks - 1) * (nranks - 2)) / bytes);
  return (elements + 255 * rows + 127 * (call.n + 255)) * bytes;
}

double product_us_of(const GemmCall& call, const RankGemmPlan& plan) {
  return plan.gemm.predicted_us * static_cast<double>(call.k) / TYPICAL_K;
}

bool leaves_links_free(const GemmCall& call, const RankGemmPlan& plan) {
  return static_cast<double>(plan.plan.link_bytes) <
         PACED_SHARE * LINK_BYTES_PER_US * product_us_of(call, plan);
}

// An all-reduce's tiles are finished in many rounds, so that they travel all the time. What a reduce-scatter
// has to send leaves soonest if each owner has but one.
gemm_reduce_scatter::OwnerTiles owner_tiles_of(const GemmCall& call, int num_ctas, const RankGemmPlan& plan) {
  const int tile_rows = std::max(1, plan.tile_rows);
  const int num_n_tiles = static_cast<int>(
      ceil_div(call.n, plan.gemm.block_n * int64_t{plan.splits_columns ? plan.num_owners : 1}));
  const int group = group_rows(plan.gemm.group_m, tile_rows);
  if (plan.reduction == Reduction::scatter)
    return {plan.num_owners, tile_rows, num_n_tiles, tile_rows, num_n_tiles, group};
  const int columns = static_cast<int>(std::ceil(BLOCK_WAVES * num_ctas / group));
  const int rounds = std::max(1, num_n_tiles / std::max(1, columns));
  return {plan.num_owners,
          tile_rows,
          num_n_tiles,
          group,
          std::max(1, static_cast<int>(ceil_div(num_n_tiles, rounds))),
          group};
}

int64_t num_tiles_by_columns(const GemmCall& call, int nranks, const GemmPlan& gemm) {
  return ceil_div(call.m, gemm.block_m) * nranks * ceil_div(call.n, int64_t{nranks} * gemm.block_n);
}

// Of 16-bit elements. Not plan.link_bytes, which is each rank's own: all must choose alike.
double exchanged_bytes(const GemmCall& call, int nranks, Reduction reduction) {
  return 2.0 * static_cast<double>(call.m) * static_cast<double>(call.n) * (nranks - 1) /
         (reduction == Reduction::one_shot ? 1 : nranks);
}

// Tagged packets are half as many bytes again, but need no fence and no flag, and the warps that wait for them
// look at all of them: for few bytes. They go where each row is wanted, once, and so a reduce-scatter's tiles
// can hold all owners' rows: owners' tiles of the same columns would each read all of B's again, and none of
// them sooner.
void choose_merged_tile(const GemmCall& call, int nranks, int num_sms, RankGemmPlan& to) {
  if (call.m == 0 || call.n == 0 || element_bytes(call.comm_dtype) != 2) return;
  if (exchanged_bytes(call, nranks, to.reduction) > MAX_TAGGED_BYTES_OF_REDUCE_SCATTER) return;
  for (const GemmTile& tile : gemm_reduce_scatter::TAGGED_TILES) {
    if (!may_take(call, tile)) continue;
    GemmShape shape;
    shape.m = round_up(call.m, tile.block_m);
    shape.n = call.n;
    shape.k = TYPICAL_K;
    shape.in_type = gemm_type(call.dtype);
    shape.out_type = gemm_type(call.out_dtype);
    const GemmPlan plan = gemm_plan_with(shape, num_sms, tile, -1);
    const gemm_reduce_scatter::MergedRows rows = {
        static_cast<int>(call.m), static_cast<int>(ceil_div(call.m, nranks)),
        static_cast<int>(ceil_div(call.n, tile.block_n) * (tile.block_n / TAGGED_COLUMNS))};
    const int64_t slot_bytes = int64_t{rows.size()} * packets_bytes(TAGGED_COLUMNS);
    if (gemm_plan_num_tiles(shape, plan) > MAX_DIRECT_TILES * num_sms) continue;
    if (nranks * slot_bytes > static_cast<int64_t>(PACKET_BANK_BYTES)) continue;
    if (to.merged && plan.predicted_us >= to.gemm.predicted_us) continue;
    to.merged = true;
    to.gemm = plan;
    to.merged_rows = rows;
    to.packet_slot_bytes = slot_bytes;
  }
  if (!to.merged) return;
  to.is_tagged = true;
  to.num_owners = 1;
  to.splits_rows = false;
}

// Who owns what, and the tile, which all ranks must choose alike, for partial sums travel in it; but k is
// each rank's own.
void choose_owners(const GemmCall& call, int nranks, int num_sms, RankGemmPlan& to) {
  const bool one_shot = goes_one_shot(call, nranks);
  const bool reduces_all = call.op == MK_OPERATOR_GEMM_ALLREDUCE;
  to.reduction = one_shot ? Reduction::one_shot : reduces_all ? Reduction::two_shot : Reduction::scatter;
  to.num_owners = one_shot ? 1 : nranks;
  int64_t rows = one_shot ? call.m : ceil_div(call.m, nranks);
  to.splits_rows = !one_shot;
  to.gemm = choose_tile(call, RANK_GEMM_TILES, rows, to.num_owners, TYPICAL_K, num_sms, false);
  if (to.reduction == Reduction::two_shot && !to.is_between_nodes && call.m <= MAX_ROWS_BY_COLUMNS) {
    // Few rows an owner fill low tiles, of which there are more than SMs.
    const GemmPlan by_columns =
        choose_tile(call, RANK_GEMM_TILES, call.m, nranks, TYPICAL_K, num_sms, false, true);
    if (by_columns.block_m > 0 &&
        num_tiles_by_columns(call, nranks, by_columns) <= MAX_DIRECT_TILES * num_sms &&
        by_columns.predicted_us < to.gemm.predicted_us) {
      to.gemm = by_columns;
      to.splits_rows = false;
      to.splits_columns = true;
      rows = call.m;
    }
  }
  if (to.gemm.block_m == 0) return;
  if (to.reduction == Reduction::scatter && !to.is_between_nodes) choose_merged_tile(call, nranks, num_sms, to);
  if (to.merged) rows = call.m;
  to.tile_rows = static_cast<int>(ceil_div(rows, to.gemm.block_m));
  to.owner_tiles = owner_tiles_of(call, num_sms, to);
  to.tiles_per_owner = to.owner_tiles.tiles_of_owner();
}

// The same of an all-reduce, whose tile is chosen before.
void choose_packets(const GemmCall& call, int nranks, RankGemmPlan& to) {
  const bool two_shot = to.reduction == Reduction::two_shot;
  if (to.reduction == Reduction::scatter || !to.is_direct || to.is_between_nodes) return;
  if (element_bytes(call.comm_dtype) != 2 || (two_shot && element_bytes(call.out_dtype) != 2)) return;
  if (exchanged_bytes(call, nranks, to.reduction) > MAX_TAGGED_BYTES_OF_ALLREDUCE) return;
  const bool has_kernel = std::ranges::any_of(gemm_reduce_scatter::TAGGED_TILES, [&](const GemmTile& tile) {
    return tile.block_m == to.gemm.block_m && tile.block_n == to.gemm.block_n;
  });
  if (!has_kernel) return;
  const int64_t tile_bytes =
      int64_t{to.gemm.block_m} / 16 * (to.gemm.block_n / TAGGED_COLUMNS) * packets_bytes(TAGGED_COLUMNS);
  to.packet_slot_bytes = to.tiles_per_owner * tile_bytes;
  to.is_tagged = (two_shot ? 2 : 1) * nranks * to.packet_slot_bytes <= static_cast<int64_t>(PACKET_BANK_BYTES);
}

Status plan_reduction(const GemmCall& call, int rank, int nranks, int num_sms, RankGemmPlan& to) {
  num_sms = compute_ctas(call, num_sms);
  choose_owners(call, nranks, num_sms, to);
  if (to.gemm.block_m == 0) return {};
  const bool one_shot = to.reduction == Reduction::one_shot;
  const bool reduces_all = call.op == MK_OPERATOR_GEMM_ALLREDUCE;
  // Of merged tiles nothing comes there, and no flags are raised.
  to.slot_bytes =
      to.merged ? 0 : to.tiles_per_owner * to.gemm.block_m * to.gemm.block_n * element_bytes(call.comm_dtype);
  to.gather_begin = round_up(nranks * max_slot_bytes_of_owners(call, nranks), 128);
  to.gather_pitch = round_up(call.n * element_bytes(call.out_dtype), 16);
  to.area_bytes = to.gather_begin + (reduces_all ? call.m * to.gather_pitch : 0);
  if (reduces_all) {
    // An area prepared for large calls must serve every smaller one, which may be one-shot.
    to.area_bytes = std::max(to.area_bytes, nranks * max_one_shot_slot_bytes(call, nranks));
    if (one_shot) to.area_bytes = std::max(to.area_bytes, nranks * max_slot_bytes(call.m, call));
  }
  fill_public_plan(call, nranks, num_sms, to);
  to.plan.algorithm = one_shot      ? MK_ALGORITHM_ONE_SHOT
                      : reduces_all ? MK_ALGORITHM_TWO_SHOT
                                    : MK_ALGORITHM_AUTO;
  const bool two_shot = to.reduction == Reduction::two_shot;
  const int64_t slabs = to.gemm.block_m / 16;
  const int64_t direct_flags = to.merged ? 0 : nranks * to.tiles_per_owner * slabs;
  const int64_t direct_gather_flags = two_shot ? direct_flags * (to.gemm.block_n / 32) : 0;
  to.is_direct =
      one_shot || (!to.is_between_nodes && to.num_owners * to.tiles_per_owner <= MAX_DIRECT_TILES * num_sms &&
                   direct_flags + direct_gather_flags <= kFlagsPerBank);
  to.num_partial_flags = to.is_direct ? direct_flags : nranks * to.tiles_per_owner;
  const int64_t flags = to.num_partial_flags + (to.is_direct ? direct_gather_flags
                                                : two_shot   ? nranks * to.tiles_per_owner
                                                             : 0);
  if (flags > kFlagsPerBank) return too_many_flags(call, flags);
  const int64_t row_bytes = call.n * element_bytes(call.comm_dtype);
  const int64_t own_rows = rows_count(call.m, nranks, rank);
  to.plan.chunk_rows = to.gemm.block_m;
  to.plan.num_chunks = static_cast<int>(std::max<int64_t>(1, to.tiles_per_owner));
  to.plan.chunk_bytes = int64_t{to.gemm.block_m} * to.gemm.block_n * element_bytes(call.comm_dtype);
  const int64_t owner_columns = int64_t{to.owner_tiles.num_n_tiles} * to.gemm.block_n;
  const int64_t own_elements =
      to.splits_columns ? call.m * std::clamp<int64_t>(call.n - rank * owner_columns, 0, owner_columns)
                        : own_rows * call.n;
  to.plan.link_bytes = one_shot ? call.m * row_bytes * (nranks - 1)
                                : call.m * row_bytes - own_elements * element_bytes(call.comm_dtype);
  if (to.reduction == Reduction::two_shot)
    to.plan.link_bytes += own_elements * element_bytes(call.out_dtype) * (nranks - 1);
  choose_packets(call, nranks, to);
  // Partial sums leave while the others' tiles are computed. An all-reduce has no such time to spare.
  to.is_paced = to.reduction == Reduction::scatter && leaves_links_free(call, to);
  return {};
}

// What is left to the operator of `num_sms` CTAs, when one has the network.
constexpr int MIN_CTAS_BETWEEN_NODES = 3;

Status check_between_nodes(const GemmCall& call, int num_sms) {
  if (call.tuning.algorithm == MK_ALGORITHM_ONE_SHOT && call.op == MK_OPERATOR_GEMM_ALLREDUCE) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("mk_%s between nodes: MK_ALGORITHM_ONE_SHOT is not built; use MK_ALGORITHM_AUTO or "
                         "_TWO_SHOT",
                         operator_name(call.op)));
  }
  if (num_sms < MIN_CTAS_BETWEEN_NODES) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("mk_%s between nodes needs %d CTAs or more, the communicator may use %d (max_ctas, "
                         "reserved_sms)",
                         operator_name(call.op), MIN_CTAS_BETWEEN_NODES, num_sms));
  }
  return {};
}

Status check_signals(const GemmCall& call, int64_t signals) {
  if (signals <= kSignalsPerBank - kEntrySignals) return {};
  return Status(
      MK_ERROR_UNSUPPORTED,
      format("mk_%s: m=%lld, n=%lld needs %lld signals between nodes; a launch has %d: use several calls",
             operator_name(call.op), static_cast<long long>(call.m), static_cast<long long>(call.n),
             static_cast<long long>(signals), static_cast<int>(kSignalsPerBank) - kEntrySignals));
}

// Chunks travel between nodes whole, each with a signal of its own.
Status plan_network_gather(const GemmCall& call, const TopologyView& nodes, RankGemmPlan& to) {
  mk_plan_t& plan = to.plan;
  MK_RETURN_IF_ERROR(check_signals(call, int64_t{nodes.nranks} * plan.num_chunks));
  const int64_t columns = travelling_columns(call);
  const int64_t chunk_bytes = plan.chunk_rows * round_up(columns * 2, 16);
  if (chunk_bytes > UINT32_MAX) {
    return Status(
        MK_ERROR_UNSUPPORTED,
        format("mk_%s: %s=%lld: between nodes %d rows may have 4 GiB at most", operator_name(call.op),
               call.mode == MK_ALLGATHER_WGRAD ? "n" : "k", static_cast<long long>(columns), plan.chunk_rows));
  }
  plan.send_ctas = 1;
  plan.link_bytes = plan.network_bytes = 0;
  allgather_gemm::count_bytes(allgather_gemm::make_schedule(call, plan, nodes), plan);
  return {};
}

// CTAs that sum what others of the node compute for owners elsewhere, of `num_sms`. The tile is chosen
// without regard to them: not all ranks have as much to sum, and a rank's k is its own.
int choose_reduce_ctas(const GemmCall& call, const TopologyView& nodes, int num_sms, const RankGemmPlan& to) {
  constexpr double BYTES_PER_US_OF_CTA = 60e3;   // read and written; three suffice for 400 Gb/s
  constexpr double NETWORK_BYTES_PER_US = 50e3;  // beyond which nothing is gained: 400 Gb/s
  constexpr int MAX_REDUCE_CTAS = 32;
  const int num_local = nodes.local_nranks();
  const int num_relayed = make_rank_order(nodes).num_relayed;
  if (num_local == 1 || num_relayed == 0) return 0;
  if (call.tuning.reduce_ctas > 0) return std::min(call.tuning.reduce_ctas, num_sms - 1);
  const double sum_bytes = static_cast<double>(num_relayed) *
                           static_cast<double>(ceil_div(call.m, nodes.nranks) * call.n) *
                           element_bytes(call.comm_dtype);
  // They come while the product works for owners elsewhere.
  const double far_share = 1.0 - static_cast<double>(num_local) / nodes.nranks;
  const double us = std::max({1.0, product_us_of(call, to) * far_share, sum_bytes / NETWORK_BYTES_PER_US});
  double bytes = sum_bytes * (num_local + 1);
  if (call.op == MK_OPERATOR_GEMM_ALLREDUCE) {  // whose finished rows they forward
    bytes += sum_bytes / element_bytes(call.comm_dtype) * element_bytes(call.out_dtype) * num_local;
  }
  const double wanted = std::ceil(bytes / us / BYTES_PER_US_OF_CTA);
  const int most = std::clamp(num_sms / 4, 1, MAX_REDUCE_CTAS);
  return std::clamp(static_cast<int>(wanted), 1, most);
}

// What a rank sends: partial tiles to the reducers in its node, node sums to owners elsewhere; of an
// all-reduce its finished rows to its node and, once, to each other node, and to its node those that it
// relays.
void count_bytes(const GemmCall& call, const TopologyView& nodes, RankGemmPlan& to) {
  mk_plan_t& plan = to.plan;
  plan.link_bytes = plan.network_bytes = 0;
  const int64_t row_bytes = call.n * element_bytes(call.comm_dtype);
  const int64_t finished_row_bytes =
      call.op == MK_OPERATOR_GEMM_ALLREDUCE ? call.n * element_bytes(call.out_dtype) : 0;
  for (int owner = 0; owner < nodes.nranks; ++owner) {
    const int64_t rows = rows_count(call.m, nodes.nranks, owner);
    const bool is_reducer = to.reducers.reducer[owner] == nodes.rank;
    if (!is_reducer) plan.link_bytes += rows * row_bytes;
    if (is_reducer) plan.link_bytes += rows * finished_row_bytes * (nodes.local_nranks() - 1);
    if (is_reducer && owner != nodes.rank) plan.network_bytes += rows * row_bytes;
    if (owner == nodes.rank) plan.network_bytes += rows * finished_row_bytes * (nodes.num_nodes - 1);
  }
}

constexpr int64_t MIN_PUT_BYTES = 256 << 10;
constexpr int64_t MAX_PUT_BYTES = 1 << 20;

// Of an owner's tiles, `group_rows` rows of which are walked together.
gemm_reduce_scatter::TileChunks chunks_of(const RankGemmPlan& plan, int num_n_tiles, int64_t tile_bytes,
                                          int group_rows) {
  constexpr int PUTS_OF_AN_OWNER = 128;  // the last one is late by one in so many
  const int tile_rows = std::max(1, plan.tile_rows);
  const int64_t put_bytes = std::clamp(int64_t{plan.tile_rows} * num_n_tiles * tile_bytes / PUTS_OF_AN_OWNER,
                                       MIN_PUT_BYTES, MAX_PUT_BYTES);
  const auto chunk_tiles = std::clamp<int64_t>(ceil_div(put_bytes, tile_bytes), 1, std::max(1, num_n_tiles));
  return {tile_rows, num_n_tiles, group_rows, static_cast<int>(chunk_tiles)};
}

// Where a node's owners take turns, a block is half a wave of tiles or, where chunks are wider, as wide as one:
// shorter puts do not fill a NIC. What ranks must agree on does not follow from how many of them a node has.
void choose_rounds(const GemmCall& call, const TopologyView& nodes, int num_ctas, RankGemmPlan& to) {
  gemm_reduce_scatter::NetworkSchedule& network = to.network;
  gemm_reduce_scatter::TileChunks& chunks = network.finished;
  gemm_reduce_scatter::OwnerTiles& near = to.network_tiles.near;
  const auto columns =
      std::max(1, static_cast<int>(BLOCK_WAVES * compute_ctas(call, num_ctas) / chunks.group_rows));
  if (!check_signals(call, network.num_signals(nodes.nranks)).ok())
    chunks.chunk_tiles = std::max(chunks.chunk_tiles, network.sums.chunk_tiles);
  const int rounds = std::max(1, chunks.per_row() / std::max(1, columns / chunks.chunk_tiles));
  near.group_rows = near.block_rows = chunks.group_rows;
  near.block_columns = std::max(1, static_cast<int>(ceil_div(chunks.per_row(), rounds)) * chunks.chunk_tiles);
  // Two blocks of each, so that what an owner waits for is there.
  to.network_tiles.lead = std::min(near.size(), 2 * near.num_owners * near.block_rows * near.block_columns);
}

// Of `num_workers`, for each to come to every place, and soon to places all over.
int rotation_of(int num_workers) {
  constexpr double GOLDEN_RATIO = 0.618;
  int rotation = static_cast<int>(GOLDEN_RATIO * num_workers);
  while (std::gcd(rotation, num_workers) > 1) ++rotation;
  return rotation;
}

// Sums and finished tiles travel in chunks of tiles.
Status plan_network_reduction(const GemmCall& call, const TopologyView& nodes, int num_sms, RankGemmPlan& to) {
  const bool reduces_all = call.op == MK_OPERATOR_GEMM_ALLREDUCE;
  const int64_t block_elements = int64_t{to.gemm.block_m} * to.gemm.block_n;
  const int64_t tile_bytes = block_elements * element_bytes(call.comm_dtype);
  const int64_t finished_tile_bytes = reduces_all ? block_elements * element_bytes(call.out_dtype) : 0;
  const int tile_rows = std::max(1, to.tile_rows);
  const int num_n_tiles = static_cast<int>(ceil_div(call.n, to.gemm.block_n));
  const int max_local = gemm_reduce_scatter::max_local_nranks(nodes);
  const int num_far = nodes.nranks - nodes.local_nranks();
  // Owners elsewhere take turns in the groups of rows of tiles that are walked together.
  const int far_rows = std::max(1, to.gemm.group_m / std::max(1, nodes.nranks - max_local));
  to.network = {nodes.num_nodes,
                max_local,
                gemm_reduce_scatter::max_reductions(nodes),
                chunks_of(to, num_n_tiles, tile_bytes, far_rows),
                chunks_of(to, num_n_tiles, tile_bytes, far_rows),
                tile_bytes,
                finished_tile_bytes};
  to.network_tiles = {
      num_far,
      to.gemm.group_m,
      {nodes.local_nranks() - 1, tile_rows, num_n_tiles, tile_rows, std::max(1, num_n_tiles), to.gemm.group_m},
      0,
      0};
  to.network_tiles.lead = to.network_tiles.near.size();
  if (reduces_all) {
    // Blocks of two owners are in flight together, where there are two.
    const int rows =
        max_local > 1 ? group_rows(static_cast<int>(ceil_div(to.gemm.group_m, 2)), tile_rows) : to.gemm.group_m;
    to.network.finished = chunks_of(to, num_n_tiles, finished_tile_bytes, rows);
    choose_rounds(call, nodes, num_sms, to);
  }
  to.reducers = gemm_reduce_scatter::make_reducers(nodes);
  const int64_t flags = to.network.num_flags(nodes.nranks);
  if (flags > kFlagsPerBank) return too_many_flags(call, flags);
  MK_RETURN_IF_ERROR(check_signals(call, to.network.num_signals(nodes.nranks)));
  const int64_t max_rows = ceil_div(call.m, nodes.nranks);
  to.area_bytes = to.network.num_slots() * max_slot_bytes(max_rows, call);
  if (reduces_all) to.area_bytes += nodes.nranks * max_slot_bytes(max_rows, call.n, call.out_dtype);
  mk_plan_t& plan = to.plan;
  plan.workspace_bytes = 2 * static_cast<uint64_t>(to.area_bytes);
  plan.num_chunks = std::max(1, to.network.sums.size());
  plan.chunk_bytes = to.network.sums.chunk_tiles * tile_bytes;
  plan.reduce_ctas = choose_reduce_ctas(call, nodes, num_sms, to);
  plan.compute_ctas = std::min(plan.compute_ctas, num_sms - plan.reduce_ctas);
  if (reduces_all) to.network_tiles.rotation = rotation_of(plan.compute_ctas);
  plan.send_ctas = 1;
  count_bytes(call, nodes, to);
  if (!reduces_all) to.is_paced = leaves_links_free(call, to);
  return {};
}

}  // namespace

Result<RankGemmPlan> rank_gemm_plan(const GemmCall& call, int rank, int nranks, int num_sms,
                                    const TopologyView* nodes, const GemmClusterLimits& limits) {
  if (std::max({call.m, call.n, call.k}) > kMaxSize) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("mk_%s: m=%lld, n=%lld, k=%lld: on GPUs each is at most %lld", operator_name(call.op),
                         static_cast<long long>(call.m), static_cast<long long>(call.n),
                         static_cast<long long>(call.k), static_cast<long long>(kMaxSize)));
  }
  RankGemmPlan plan;
  plan.plan = MK_PLAN_INIT;
  if (nodes != nullptr) {
    MK_RETURN_IF_ERROR(check_between_nodes(call, num_sms));
    num_sms -= 1;
  }
  plan.is_between_nodes = nodes != nullptr;
  GemmCall planned = call;
  if (nodes != nullptr && call.op == MK_OPERATOR_GEMM_ALLREDUCE)
    planned.tuning.algorithm = MK_ALGORITHM_TWO_SHOT;
  const bool gathers = call.op == MK_OPERATOR_ALLGATHER_GEMM;
  if (gathers && call.mode != MK_ALLGATHER_WGRAD) {
    MK_RETURN_IF_ERROR(plan_gather(planned, rank, nranks, num_sms, limits, plan));
  } else {
    const auto plan_operator = gathers ? plan_wgrad : plan_reduction;
    MK_RETURN_IF_ERROR(plan_operator(planned, rank, nranks, num_sms, plan));
  }
  if (plan.gemm.block_m == 0) {
    return Status(MK_ERROR_UNSUPPORTED, format("mk_%s: tuning: there is no tile of tile_m=%d, tile_n=%d",
                                               operator_name(call.op), call.tuning.tile_m, call.tuning.tile_n));
  }
  plan.gemm.group_m = group_rows(plan.gemm.group_m, std::max(1, plan.tile_rows));
  if (nodes != nullptr) {
    MK_RETURN_IF_ERROR(gathers ? plan_network_gather(call, *nodes, plan)
                               : plan_network_reduction(call, *nodes, num_sms, plan));
  }
  return plan;
}

}  // namespace mk
