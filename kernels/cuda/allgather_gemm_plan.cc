// SPDX-License-Identifier: MIT
// AllGather+GEMM's part of rank_gemm_plan().
#include <algorithm>
#include <cmath>
#include <span>

#include "kernels/cuda/gemm_type.h"
#include "kernels/cuda/rank_gemm_plan_parts.h"
#include "kernels/device/rank_comm.h"
#include "kernels/device/rank_gemm_tiles.h"
#include "kernels/ops/allgather_gemm/plan.h"
#include "kernels/ops/allgather_gemm/push_units.h"
#include "kernels/ops/allgather_gemm/wgrad_order.h"

namespace mk {
namespace {

using allgather_gemm::WgradOrder;

constexpr int MIN_PANEL_STEPS = 4;
static_assert(MIN_PANEL_STEPS >= MAX_SPLIT_CTAS);  // a part of a panel for each (PanelPart)
// Tiles of so few rows are those of all ranks, whatever the model says; of up to MOST_ROWS_OF_MERGED, where it
// does. Of tiles of one rank's rows, in one wave as well, half wait for rows while the others are computed.
constexpr int64_t MAX_MERGED_ROWS = 256;
constexpr int64_t MOST_ROWS_OF_MERGED = 1024;
constexpr double WAIT_OF_MERGED_US = 20;
// Few rows: each panel takes a flag's latency, which two do not repay.
constexpr int64_t FEW_ROWS_PANEL_BYTES = 256 << 10;
constexpr int64_t LEAST_FEW_ROWS_PANELS = 3;
// Whatever else the L2 holds.
constexpr int64_t MOST_B_BYTES_IN_L2 = 64 << 20;
// Up to so many bytes leave from the CTAs that compute, whatever the product.
constexpr double FEW_BYTES = 2200000;
// Mode WGRAD: a flag for so many rows, and of a row for so many columns or more, a multiple of any tile's.
constexpr int WGRAD_CHUNK_ROWS = 4 * WgradOrder::STEP_ROWS;
constexpr int64_t WGRAD_PANEL_COLUMNS = 2048;
// Of a CTA that does nothing but push, with all others at it.
constexpr double PUSH_BYTES_PER_US_OF_CTA = 38e3;

// Inside a node. The last one, 128 x 224, gained where tiles hold all ranks' few rows, and mostly lost
// elsewhere.
std::span<const GemmTile> gather_tiles(const GemmCall& call, bool merged) {
  const std::span<const GemmTile> all = GATHER_TILES;
  return merged || call.tuning.tile_n > 0 ? all : all.first(all.size() - 1);
}

// The product of so many rows.
GemmShape shape_of(const GemmCall& call, int64_t rows, int64_t k) {
  GemmShape shape;
  shape.m = rows;
  shape.n = call.n;
  shape.k = k;
  shape.in_type = gemm_type(call.dtype);
  shape.out_type = gemm_type(call.out_dtype);
  shape.accumulate = call.accumulate;
  shape.b_transposed = call.mode == MK_ALLGATHER_FORWARD && call.b_layout == MK_LAYOUT_NK;
  return shape;
}

// Those that there are kernels for.
std::span<const GemmTile> tiles_for(const GemmCall& call, const RankGemmPlan& plan) {
  if (call.mode == MK_ALLGATHER_WGRAD) return WGRAD_TILES;
  if (plan.is_between_nodes) return RANK_GEMM_TILES;
  return gather_tiles(call, plan.merged);
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
    const GemmPlan plan = choose_tile(call, tiles_for(call, to), rows, to.num_owners, k,
                                      compute_ctas(call, num_sms - wanted - more), true);
    if (to.gemm.block_m > 0 && plan.predicted_us >= LEAST_GAIN * to.gemm.predicted_us) continue;
    to.gemm = plan;
    to.plan.copy_ctas = wanted + more;
  }
}

// How long a rank's rows are on their way to all others.
double link_us_of(const GemmCall& call, int nranks) {
  return static_cast<double>(ceil_div(call.m, nranks) * travelling_columns(call) * 2 * (nranks - 1)) /
         LINK_BYTES_PER_US;
}

// The tile of a product beside which rows travel, and the CTAs of both; answers how many compute. `rows` rows
// of C an owner.
int plan_product(const GemmCall& call, int64_t rows, int64_t k, int nranks, int num_sms, RankGemmPlan& to) {
  const int all_ctas = compute_ctas(call, num_sms);
  to.gemm = choose_tile(call, tiles_for(call, to), rows, to.num_owners, k, all_ctas, true);
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
  // Beside few waves SMs that do not compute cost more: with more than two ranks, where the links are busy for
  // most of the product, beside fewer still. Mode WGRAD wants all rows in its first waves, however many follow.
  constexpr int64_t MOST_WAVES_WITHOUT = 6;
  constexpr int64_t FEW_WAVES = 2;
  constexpr double BUSY_SHARE = 0.65;
  const bool are_links_busy = nranks > 2 && link_us_of(call, nranks) > BUSY_SHARE * to.gemm.predicted_us;
  const int64_t most_waves = are_links_busy                      ? FEW_WAVES
                             : call.mode == MK_ALLGATHER_FORWARD ? MOST_WAVES_WITHOUT
                                                                 : INT32_MAX;
  const bool is_short = !to.is_between_nodes && num_tiles <= most_waves * all_ctas;
  to.plan.copy_ctas = (has_waves && !is_small && !is_short) || call.tuning.copy_ctas > 0
                          ? choose_push_ctas(call, num_sms, bytes, to.gemm.predicted_us, to.is_between_nodes)
                          : 0;
  choose_waves(call, rows, k, num_sms, to);
  num_sms = compute_ctas(call, num_sms - to.plan.copy_ctas);
  to.tile_rows = static_cast<int>(ceil_div(rows, to.gemm.block_m));
  return num_sms;
}

// Whose predicted_us is comparable with choose_tile()'s.
GemmPlan plan_of_stored_tiles(const GemmShape& shape, int num_workers, const GemmTile& tile,
                              int num_streamk_tiles) {
  GemmPlan plan = gemm_plan_with(shape, num_workers, tile, num_streamk_tiles);
  plan.predicted_us += gemm_plan_exposed_us(shape, plan);
  return plan;
}

// CTAs that have pushed compute what is left, from the round of tiles on in which they are expected to be
// through: too late rather than too early, for the tiles of one that comes late are the last. It is, where
// products are so long that clocks fall below the model's.
void choose_late_workers(const GemmCall& call, int64_t rows, int64_t k, double bytes, int num_early,
                         RankGemmPlan& to) {
  constexpr int MOST_MORE_ROUNDS = 16;  // for a better last wave
  // In a product of 32 rounds they cost 4 %: CTAs that are no longer in step read more of the operands from
  // memory.
  constexpr int MOST_ROUNDS = 16;
  constexpr double LEAST_GAIN = 0.995;
  const GemmTile tile = {to.gemm.block_m, to.gemm.block_n, to.gemm.ping_pong};
  const GemmShape shape = shape_of(call, to.num_owners * round_up(rows, tile.block_m), k);
  const int num_late = to.plan.copy_ctas;
  const int num_workers = num_early + num_late;
  const auto num_tiles = gemm_plan_num_tiles(shape, to.gemm);
  if (num_late == 0 || bytes == 0 || call.tuning.compute_ctas > 0 || num_tiles == 0) return;
  if (num_tiles > int64_t{MOST_ROUNDS} * num_workers) return;
  const GemmPlan whole = plan_of_stored_tiles(shape, num_workers, tile, -1);
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
    const GemmPlan cut = plan_of_stored_tiles(shape, num_workers, tile, cuts && rest > 0 ? rest : -1);
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

// Where each CTA has one tile: of the large ones that whose steps are shortest, beside pushes. Tiles of other
// ranks' rows wait, and those of this rank's are through early; so between two ranks two CTAs share a tile of
// the first half along k, then one of the second. With more ranks the second half would have to wait until the
// rows of the last are there, where whole tiles go on panel by panel with the rows of all. Answers how many
// CTAs then compute, or 0: it is not so.
int choose_one_wave(const GemmCall& call, int64_t rows, int nranks, int num_sms, RankGemmPlan& to) {
  constexpr int64_t LEAST_STEPS = 32;
  constexpr double LEAST_PART_OF_SMS = 0.7;
  constexpr double LOAD_BYTES_PER_CYCLE = 37;
  const bool shares = nranks == 2;
  if (to.merged || nranks == 1 || ceil_div(call.k, GEMM_BLOCK_K) < LEAST_STEPS) return 0;
  if (call.tuning.copy_ctas > 0 || call.tuning.compute_ctas > 0) return 0;
  double best_cycles = 0;
  int num_workers = 0;
  for (const GemmTile& tile : gather_tiles(call, to.merged)) {
    if (tile.ping_pong || tile.block_m < CHUNK_ROWS || !may_take(call, tile)) continue;
    const int64_t tile_rows = ceil_div(rows, tile.block_m);
    const int64_t num_tiles = nranks * tile_rows * ceil_div(call.n, tile.block_n);
    if ((shares && num_tiles % 2 != 0) || num_tiles > num_sms) continue;
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
  to.shares_tiles = shares && num_workers > 0;
  return num_workers;
}

// Are tiles of the same columns, of all ranks' rows, computed at the same time? Otherwise one rank's rows
// follow another's, each reads all weights again, and where a rank has few rows of tiles memory is what all
// wait for. Rows then have to come within the first wave, which has to be one of several: not where few CTAs
// push them. Between two ranks it is no gain.
bool sweeps_columns(const GemmCall& call, int nranks, int num_sms, const RankGemmPlan& plan) {
  constexpr int MOST_TILE_ROWS = 2;
  constexpr int64_t FEW_WAVES = 2;
  if (plan.is_between_nodes || plan.merged || nranks < 3 || plan.plan.copy_ctas > 0) return false;
  const int64_t num_tiles = int64_t{nranks} * plan.tile_rows * ceil_div(call.n, plan.gemm.block_n);
  return plan.tile_rows <= MOST_TILE_ROWS && num_tiles > FEW_WAVES * num_sms &&
         call.n * call.k * 2 > MOST_B_BYTES_IN_L2;
}

// Do tiles hold all ranks' rows? Where these are few, the weights of a tile are then read once, and not once a
// rank; where a rank's rows do not fill tiles of their own, there are fewer tiles.
bool merges_rows(const GemmCall& call, int nranks, int num_sms, const RankGemmPlan& plan) {
  const int64_t max_rows = ceil_div(call.m, nranks);
  if (max_rows < CHUNK_ROWS) return true;
  if (plan.is_between_nodes || call.m > MOST_ROWS_OF_MERGED) return false;
  if (call.m <= MAX_MERGED_ROWS) return true;
  num_sms = compute_ctas(call, num_sms);
  const GemmPlan merged = choose_tile(call, gather_tiles(call, true), call.m, 1, call.k, num_sms, true);
  const GemmPlan apart = choose_tile(call, gather_tiles(call, false), max_rows, nranks, call.k, num_sms, true);
  return merged.block_m > 0 && merged.predicted_us + WAIT_OF_MERGED_US < apart.predicted_us;
}

// Few rows in common tiles of 64 rows take as long as the weights are read, which few CTAs do more slowly. So,
// with many k-steps, tiles are narrow rather than few. A last wave's tiles are cut among all CTAs where they
// are few, and else dealt out all over the chip, for what a part of it loads, weights and for each tile all
// rows, is limited, too.
void choose_last_wave(const GemmCall& call, int num_workers, RankGemmPlan& to) {
  constexpr double MOST_CUT_PART = 0.42;
  constexpr double FEW_CTAS_PART = 0.67;
  constexpr int64_t MANY_STEPS = 128;
  constexpr int NARROW = 64;
  static_assert(2 * FEW_CTAS_PART - 1 < MOST_CUT_PART);  // a last wave of tiles half as wide is cut
  if (!to.merged || to.is_between_nodes || to.gemm.block_m != 64 || to.tile_rows != 1) return;
  if (to.gemm.num_streamk_tiles > 0 || to.num_late > 0) return;
  const bool are_few = static_cast<double>(ceil_div(call.n, to.gemm.block_n)) <= FEW_CTAS_PART * num_workers;
  const bool becomes_narrow =
      are_few && call.tuning.tile_n == 0 && ceil_div(call.k, GEMM_BLOCK_K) >= MANY_STEPS;
  const GemmTile tile = {to.gemm.block_m, becomes_narrow ? NARROW : to.gemm.block_n, false};
  const int64_t num_tiles = ceil_div(call.n, tile.block_n);
  const auto rest = static_cast<int>(num_tiles % num_workers);
  if (num_tiles <= num_workers || rest == 0) return;
  if (rest > MOST_CUT_PART * num_workers) {
    to.spreads_tiles = true;
    return;
  }
  const GemmPlan cut = gemm_plan_with(shape_of(call, tile.block_m, call.k), num_workers, tile, rest);
  if (cut.num_workers == num_workers) to.gemm = cut;
}

// Push warps of each CTA that computes. One that feeds several peers keeps the links busy as long as most SMs
// have one; with two the first panels come later, which only a product does not mind that is not much longer
// than its rows are on their way. A unit for one peer takes as long to get away.
int choose_push_warps(const GemmCall& call, int nranks, const RankGemmPlan& to) {
  constexpr double LEAST_LINK_SHARE = 0.75;
  if (nranks == 2) return NUM_PUSH_WARPS;
  const bool in_pairs = to.merged && to.gemm.in_clusters() && !to.gemm.is_swapped;
  return in_pairs && link_us_of(call, nranks) > LEAST_LINK_SHARE * to.gemm.predicted_us ? NUM_PUSH_WARPS : 1;
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

// Few tiles, all at once, of all ranks' rows: clusters share the inner dimension of each, or what they load,
// where that is expected to be better. False: they do not.
bool plan_clusters(const GemmCall& call, int num_sms, const GemmClusterLimits& limits, RankGemmPlan& to) {
  constexpr int64_t FEW_ROWS_OF_SWAPPED = 128;
  constexpr double LEAST_PART_OF_SMS = 0.45;  // whose warps push rows, too
  if (to.is_between_nodes || call.tuning.copy_ctas > 0 || call.tuning.compute_ctas > 0) return false;
  const GemmShape shape = shape_of(call, call.m, call.k);
  const auto may_be = [&](const GemmPlan& plan) {
    const bool may_take_it = plan.is_swapped ? call.tuning.tile_m <= 0 && call.tuning.tile_n <= 0
                                             : may_take(call, {plan.block_m, plan.block_n, false});
    return plan.num_cluster_ctas() > 1 && may_take_it;
  };
  GemmPlan best = gemm_split_plan(shape, num_sms, limits);
  const auto consider = [&](const GemmPlan& plan) {
    if (may_be(plan) && (!may_be(best) || plan.predicted_us < best.predicted_us)) best = plan;
  };
  // Where clusters can split k those that do not lose by waiting for rows with all of it still to come: swapped
  // ones by 6 us of 52 and 59 (300x2560x8192, 200x5120x8192), pairs of up to 256 rows by 9 of 63. Pairs that
  // split it, too, have not been measured here.
  const bool splits = may_be(best);
  if (call.m > MAX_MERGED_ROWS) consider(gemm_pair_plan(shape, num_sms, limits, 1));
  if (!splits && call.m > FEW_ROWS_OF_SWAPPED && call.m <= MOST_ROWS_OF_MERGED) {
    for (const GemmSwappedTile& tile : RANK_SWAPPED_TILES) {
      const GemmPlan plan = gemm_swapped_cluster_plan_with(shape, tile, 1);
      if (gemm_plan_fits_at_once(plan, num_sms, limits) && plan.num_ctas() >= LEAST_PART_OF_SMS * num_sms)
        consider(plan);
    }
    consider(gemm_swapped_waves_plan(shape, RANK_SWAPPED_TILES, true, num_sms, limits));
  }
  if (!may_be(best)) return false;
  const GemmPlan other =
      choose_tile(call, gather_tiles(call, call.m <= MAX_MERGED_ROWS), call.m, 1, call.k, num_sms, true);
  // Measured with swapped tiles the model's times are right as they are.
  const bool waits = call.m > MAX_MERGED_ROWS && best.in_clusters() && !best.is_swapped;
  const double other_us = other.predicted_us + (waits ? WAIT_OF_MERGED_US : 0);
  if (other.block_m > 0 && other_us < best.predicted_us + gemm_plan_exposed_us(shape, best)) return false;
  to.gemm = best;
  to.merged = true;
  to.num_owners = 1;
  to.plan.copy_ctas = 0;
  to.tile_rows = best.is_swapped ? 1 : static_cast<int>(ceil_div(call.m, best.cluster_rows()));
  return true;
}

}  // namespace

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
    to.merged = merges_rows(call, nranks, num_sms, to);
    to.num_owners = to.merged ? 1 : nranks;
    num_sms = plan_product(call, to.merged ? call.m : max_rows, call.k, nranks, num_sms, to);
  }
  if (num_sms == 0) return {};
  // Tiles in flight at once would wait for their data together: panels.
  int64_t most_panels = allgather_gemm::MAX_PANELS;
  if (max_rows <= CHUNK_ROWS && !to.is_between_nodes) {
    const int64_t few = max_rows * call.k * 2 / FEW_ROWS_PANEL_BYTES;
    most_panels = few < LEAST_FEW_ROWS_PANELS ? 1 : std::min(few, most_panels);
  }
  to.num_panels = static_cast<int>(std::clamp<int64_t>(
      std::min(k_steps / MIN_PANEL_STEPS, kFlagsPerBank / flags_per_panel), 1, most_panels));
  to.panel_steps = static_cast<int>(std::max<int64_t>(1, ceil_div(k_steps, to.num_panels)));
  to.num_panels = static_cast<int>(std::max<int64_t>(1, ceil_div(k_steps, to.panel_steps)));
  if (!to.is_between_nodes && !has_clusters) {
    const int num_at_once = choose_one_wave(call, max_rows, nranks, all_ctas, to);
    if (num_at_once > 0) num_sms = num_at_once;
    const double bytes = static_cast<double>(max_rows * call.k * 2) * (to.merged ? nranks : nranks - 1);
    choose_late_workers(call, to.merged ? call.m : max_rows, call.k, bytes, num_sms, to);
  }
  if (!has_clusters) choose_last_wave(call, num_sms, to);
  to.sweeps_columns = sweeps_columns(call, nranks, num_sms, to);
  to.num_push_warps = choose_push_warps(call, nranks, to);
  to.area_bytes = call.m * round_up(call.k * 2, 16);
  fill_public_plan(call, nranks, num_sms, to);
  return plan_chunks(call, rank, nranks, to);
}

Status plan_wgrad(const GemmCall& call, int rank, int nranks, int num_sms, RankGemmPlan& to) {
  to.merged = !to.is_between_nodes && WgradOrder::merges(call.m, nranks);
  const WgradOrder order = to.merged ? WgradOrder::of_merged(call.m)
                                     : WgradOrder::of(call.m, nranks - 1, 0, call.b_layout == MK_LAYOUT_NK);
  const int64_t rows = int64_t{order.num_steps()} * GEMM_BLOCK_K;
  num_sms = plan_product(call, call.k, rows, nranks, num_sms, to);
  if (num_sms == 0) return {};
  to.area_bytes = call.m * round_up(call.n * 2, 16);
  fill_public_plan(call, nranks, num_sms, to);
  const int64_t max_rows = ceil_div(call.m, nranks);
  to.plan.chunk_rows = to.is_between_nodes ? WgradOrder::STEP_ROWS : WGRAD_CHUNK_ROWS;
  to.plan.num_chunks = std::max(1, num_chunks(max_rows, to.plan.chunk_rows));
  // By what ranks have alike. The network takes rows whole.
  const int64_t steps = std::max<int64_t>(1, ceil_div(call.n, GEMM_BLOCK_K));
  const int64_t most_panels = to.is_between_nodes
                                  ? 1
                                  : std::clamp<int64_t>(kFlagsPerBank / (int64_t{nranks} * to.plan.num_chunks),
                                                        1, allgather_gemm::MAX_PANELS);
  const int64_t panel_steps = round_up(ceil_div(steps, most_panels), WGRAD_PANEL_COLUMNS / GEMM_BLOCK_K);
  to.panel_steps = static_cast<int>(to.is_between_nodes ? steps : panel_steps);
  to.num_panels = static_cast<int>(ceil_div(steps, to.panel_steps));
  to.num_push_warps = choose_push_warps(call, nranks, to);
  if (!to.is_between_nodes) {
    const double bytes = static_cast<double>(max_rows * call.n * 2) * (to.merged ? nranks : nranks - 1);
    choose_late_workers(call, call.k, rows, bytes, num_sms, to);
  }
  return plan_chunks(call, rank, nranks, to);
}

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

}  // namespace mk
