// SPDX-License-Identifier: MIT
#include "kernels/gemm/gemm_plan.h"

#include <algorithm>
#include <climits>
#include <utility>

#include "kernels/device/gemm_partials_layout.h"
#include "kernels/device/tile_scheduler.h"
#include "kernels/gemm/gemm_plan_time.h"

namespace mk {
namespace {

// With a larger B tiles of 64 rows, which read it again and again, took up to half as long again as that.
constexpr double MOST_B_BYTES_OF_64_ROWS = 34e6;
constexpr double MOST_B_BYTES_OF_64_OF_FEW_ROWS = 21e6;  // with up to FEW_ROWS_OF_WHOLE_TILES
constexpr int MOST_EVEN_PIECES = 8;
constexpr int64_t LEAST_K_TO_CUT_EVENLY = 4096;  // with less, other plans are faster
constexpr int64_t LEAST_K_TO_CUT_LOW_TILES_OF_TRANSPOSED = 2048;
constexpr int64_t LEAST_K_TO_CUT_LOW_TILES_OF_MORE_ROWS = 8192;  // than FEW_ROWS_OF_CUT_TILES
// Of a transposed A, with C in fp32 or added to, pairs were up to 4 % faster with more rows of tiles at a time.
constexpr int64_t LEAST_K_OF_HIGH_GROUPS = 2048;
// What clusters with tiles of 256 columns take longer than the model says, where there are few k-steps and more
// rows than FEW_ROWS.
constexpr double SHORT_CLUSTERS_OF_256_US = 2;
constexpr int64_t SHORT_K = 1536;
// Of more rows than SOME_ROWS_OF_CUT_TILES, clusters of four have been measured on few products.
constexpr double CLUSTERS_OF_MANY_ROWS_FACTOR = 1.1;

// Of more rows than one of them has, clusters that split the lowest tiles were faster than the model has them.
// Not in gemm_split_plan(), from which all-gathers choose: theirs have not been measured.
constexpr GemmTile LOWEST_TILE = {64, 64, false};
constexpr double SPLIT_LOWEST_TILES_FACTOR = 0.86;

// Boxes of TMA.
constexpr int SWIZZLED_ROWS = 8;  // the swizzle's period: boxes begin there
constexpr int MIN_BOX_ROWS = 32;  // of a part of a tile

// A CTA has some k-steps, and chunks of columns to add up.
bool can_be_split(const GemmShape& shape, const GemmPlan& plan) {
  return plan.num_split_ctas == 1 || (plan.block_n % SPLIT_CHUNK_COLUMNS == 0 &&
                                      shape.k >= plan.num_split_ctas * MIN_SPLIT_STEPS * GEMM_BLOCK_K);
}

// Whether a product is like those for which a wave of low tiles was the fastest: more rows than
// FEW_ROWS_OF_CUT_TILES, nearly a tile for each SM, whole, whose operands' rows begin with a line.
bool is_low_wave(const GemmShape& shape, const GemmPlan& plan) {
  constexpr int64_t LEAST_TILES = 124;
  constexpr int64_t LEAST_K = 1024, MOST_K = 4096;
  return !shape.a_transposed && plan.block_m == 64 && plan.block_n == 128 && is_one_wave(shape, plan) &&
         plan.num_workers >= LEAST_TILES && shape.m > FEW_ROWS_OF_CUT_TILES && shape.m % 64 == 0 &&
         shape.n % 64 == 0 && shape.k % 64 == 0 && shape.k >= LEAST_K && shape.k <= MOST_K;
}

// Whether a product is so long that its CTAs are to be kept in step, which pairs are not.
bool falls_out_of_step(const GemmShape& shape, const GemmPlan& plan) {
  const int64_t k_steps = ceil_divide(shape.k, GEMM_BLOCK_K);
  return gemm_plan_num_tiles(shape, plan) * k_steps >= OUT_OF_STEP_K_STEPS * plan.num_ctas();
}

// All tiles at once, each a CTA's or, in pairs, two of them a pair's.
GemmPlan one_wave_plan_with(const GemmShape& shape, int block_m, int block_n, int num_split_ctas,
                            GemmCluster cluster) {
  GemmPlan plan;
  plan.block_m = block_m;
  plan.block_n = block_n;
  plan.num_split_ctas = num_split_ctas;
  plan.cluster = cluster;
  plan.num_workers = static_cast<int>(std::max<int64_t>(
      1, ceil_divide(shape.m, plan.cluster_rows()) * ceil_divide(shape.n, plan.cluster_columns())));
  plan.group_m = std::max(1, 2048 / plan.cluster_rows());
  plan.predicted_us = predict_one_wave_us(shape, plan);
  return plan;
}

// Tiles among workers: whole ones in turn, and those that are cut along k in equal parts.
void deal_out(const GemmShape& shape, int most_workers, int num_streamk_tiles, GemmPlan* plan) {
  const int64_t tiles = gemm_plan_num_tiles(shape, *plan);
  const int64_t k_steps = ceil_divide(shape.k, GEMM_BLOCK_K);
  const int64_t max_workers = std::max(1, most_workers);
  // What is cut is counted in 31 bits (TileSchedule).
  const int64_t cut_tiles = std::clamp<int64_t>(num_streamk_tiles, 0, tiles);
  const bool can_cut = k_steps > 0 && cut_tiles * std::max(k_steps, max_workers) <= INT_MAX;
  plan->num_streamk_tiles = can_cut ? static_cast<int>(cut_tiles) : 0;
  plan->num_workers = static_cast<int>(
      std::clamp<int64_t>(plan->num_streamk_tiles > 0 ? tiles * k_steps : tiles, 1, max_workers));
  // About 2,048 rows: with 132 tiles of 128 x 256 in flight the block is then nearly square.
  plan->group_m = std::max(1, 2048 / plan->cluster_rows());
  if (plan->num_streamk_tiles == 0) return;
  // Every worker needs a k-step of the cut tiles, or its peers would wait for a partial sum that never comes.
  plan->num_workers = static_cast<int>(std::min<int64_t>(plan->num_workers, plan->num_streamk_tiles * k_steps));
  plan->workspace_bytes = PartialsLayout(plan->num_ctas(), plan->block_m, plan->block_n).num_bytes;
}

// How many workers each of `tiles` can have, of as many as there are; fewer than 2: it is not cut.
int even_pieces(const GemmShape& shape, const GemmPlan& plan, int64_t tiles, int most_workers) {
  static_assert(LEAST_K_TO_CUT_LOW_TILES_OF_TRANSPOSED >= MOST_EVEN_PIECES * MIN_SPLIT_STEPS * GEMM_BLOCK_K);
  const bool is_low = shape.a_transposed && plan.block_m == 64;
  if (tiles == 0 || shape.k < (is_low ? LEAST_K_TO_CUT_LOW_TILES_OF_TRANSPOSED : LEAST_K_TO_CUT_EVENLY))
    return 0;
  return static_cast<int>(std::min<int64_t>(MOST_EVEN_PIECES, most_workers / tiles));
}

int clusters_at_a_time(const GemmCluster& cluster, int num_sms, const GemmClusterLimits& limits) {
  const int num_ctas = cluster.m * cluster.n;
  return num_ctas == 1 ? num_sms : std::min(limits.at_a_time[num_ctas], num_sms / num_ctas);
}

// The plans that cut all tiles, one for each tile of which there are so few: consider(plan). Of an A that is
// not transposed, rows that were not measured, or for which others were faster, have none.
template <class Consider>
void consider_evenly_cut_plans(const GemmShape& shape, int num_sms, const GemmClusterLimits& limits,
                               Consider&& consider) {
  const bool has_some_rows = shape.m > FEW_ROWS_OF_SWAPPED && shape.m <= SOME_ROWS_OF_CUT_TILES;
  if (!shape.a_transposed && !has_some_rows) return;
  const double most_b_bytes =
      shape.m <= FEW_ROWS_OF_WHOLE_TILES ? MOST_B_BYTES_OF_64_OF_FEW_ROWS : MOST_B_BYTES_OF_64_ROWS;
  const bool has_many_k_steps =
      shape.m <= FEW_ROWS && shape.m % 64 == 0 && shape.k >= LEAST_K_TO_CUT_LOW_TILES_OF_MORE_ROWS;
  const bool has_low_tiles =
      (shape.m <= FEW_ROWS_OF_CUT_TILES || has_many_k_steps) && 2.0 * shape.k * shape.n <= most_b_bytes;
  // plan_with(workers, cut tiles); `tiled`: the shape as its tiles have it.
  const auto cut = [&](const GemmShape& tiled, int most_workers, const auto& plan_with) {
    const GemmPlan whole = plan_with(most_workers, -1);
    const auto num_tiles = static_cast<int>(gemm_plan_num_tiles(shape, whole));
    const int pieces = even_pieces(shape, whole, num_tiles, most_workers);
    if (pieces < 2) return;
    GemmPlan plan = plan_with(pieces * num_tiles, num_tiles);
    if (plan.num_streamk_tiles == 0) return;  // deal_out() could not
    plan.predicted_us = predict_evenly_cut_us(tiled, plan);
    consider(plan);
  };
  for (const GemmTile& tile : GEMM_TILES) {
    const int num_ctas = tile.cluster.m * tile.cluster.n;
    const bool is_low = tile.block_m == 64;
    if (!is_low && shape.m <= FEW_ROWS_OF_WHOLE_TILES) continue;
    if (!shape.a_transposed && (num_ctas > 1 || (is_low && !has_low_tiles))) continue;
    cut(shape, clusters_at_a_time(tile.cluster, num_sms, limits),
        [&](int workers, int num_cut) { return gemm_plan_with(shape, workers * num_ctas, tile, num_cut); });
  }
  if (shape.a_transposed) return;
  for (const GemmSwappedTile& tile : GEMM_SWAPPED_TILES) {
    if (tile.cluster.m * tile.cluster.n == 1 || !gemm_swapped_tile_walks(tile)) continue;
    cut(swapped(shape), clusters_at_a_time(tile.cluster, num_sms, limits),
        [&](int workers, int num_cut) { return gemm_swapped_plan_with(shape, workers, tile, num_cut); });
  }
}

}  // namespace

int64_t gemm_plan_num_tiles(const GemmShape& shape, const GemmPlan& plan) {
  const GemmShape tiled = plan.is_swapped ? swapped(shape) : shape;
  return ceil_divide(tiled.m, plan.cluster_rows()) * ceil_divide(tiled.n, plan.cluster_columns());
}

int gemm_plan_tile_columns(const GemmShape& shape, const GemmPlan& plan) {
  if (!plan.is_swapped) return plan.block_n;
  return even_columns(static_cast<int>(shape.m),
                      static_cast<int>(ceil_divide(shape.m, plan.cluster_columns())) * plan.cluster.n);
}

std::string gemm_plan_kind(const GemmPlan& plan) {
  const std::string kind = plan.is_swapped ? "s" : plan.ping_pong ? "p" : "";
  if (!plan.in_clusters()) return kind;
  return kind + "c" + std::to_string(plan.cluster.m) + "x" + std::to_string(plan.cluster.n);
}

GemmShape swapped(const GemmShape& shape) {
  GemmShape other = shape;
  std::swap(other.m, other.n);
  other.a_transposed = !shape.b_transposed;
  other.b_transposed = true;
  return other;
}

int stage_box_rows(int64_t rows, int block_rows) {
  if (rows <= block_rows)
    return static_cast<int>(std::max<int64_t>(1, (rows + SWIZZLED_ROWS - 1) / SWIZZLED_ROWS) * SWIZZLED_ROWS);
  int best = 0;
  int64_t fewest_outside = 0;
  for (int num = 1; num == 1 || block_rows / num >= MIN_BOX_ROWS; ++num) {
    const int box = block_rows / num;
    if (block_rows % (num * SWIZZLED_ROWS) != 0) continue;
    const int64_t outside = (box - rows % box) % box;
    if (best != 0 && outside + SWIZZLED_ROWS > fewest_outside) continue;
    best = box;
    fewest_outside = outside;
  }
  return best;
}

size_t gemm_max_workspace_bytes(int num_sms) {
  size_t most = 0;
  for (const GemmTile& tile : GEMM_TILES)
    most = std::max(most, PartialsLayout(num_sms, tile.block_m, tile.block_n).num_bytes);
  for (const GemmSwappedTile& tile : GEMM_SWAPPED_TILES)
    most = std::max(most, PartialsLayout(num_sms, tile.block_m, tile.block_n).num_bytes);
  return most;
}

GemmPlan gemm_plan_with(const GemmShape& shape, int num_sms, GemmTile tile, int num_streamk_tiles) {
  GemmPlan plan;
  plan.block_m = tile.block_m;
  plan.block_n = tile.block_n;
  plan.ping_pong = tile.ping_pong;
  plan.cluster = tile.cluster;
  deal_out(shape, num_sms / plan.num_cluster_ctas(), num_streamk_tiles, &plan);
  const bool stores_long = shape.out_type == GemmType::fp32 || shape.accumulate;
  if (plan.is_ping_pong_pair() && shape.a_transposed && stores_long && shape.k >= LEAST_K_OF_HIGH_GROUPS)
    plan.group_m *= 2;
  TileSchedule schedule = {static_cast<int>(ceil_divide(shape.m, plan.cluster_rows())),
                           static_cast<int>(ceil_divide(shape.n, plan.cluster_columns())),
                           static_cast<int>(ceil_divide(shape.k, GEMM_BLOCK_K)),
                           plan.num_workers,
                           plan.num_streamk_tiles,
                           1};
  schedule.keep_in_step_from(OUT_OF_STEP_K_STEPS);
  if (schedule.near_k_steps > 0 && !plan.ping_pong && plan.block_m > 64) {
    const PartialsLayout layout(plan.num_ctas(), plan.block_m, plan.block_n);
    plan.workspace_bytes = std::max(plan.workspace_bytes, layout.flags_bytes);
  }
  plan.predicted_us = predict_us(shape, plan, 0);
  return plan;
}

GemmPlan gemm_swapped_plan_with(const GemmShape& shape, int most_workers, GemmSwappedTile tile,
                                int num_streamk_tiles) {
  const GemmShape tiled = swapped(shape);
  GemmPlan plan;
  plan.block_m = tile.block_m;
  plan.block_n = tile.block_n;
  plan.cluster = tile.cluster;
  deal_out(tiled, most_workers, num_streamk_tiles, &plan);
  plan.predicted_us = predict_us(tiled, plan, 0);
  plan.is_swapped = true;
  return plan;
}

GemmPlan gemm_split_plan_with(const GemmShape& shape, GemmTile tile, int num_split_ctas) {
  return one_wave_plan_with(shape, tile.block_m, tile.block_n, num_split_ctas, {1, 1});
}

GemmPlan gemm_pair_plan_with(const GemmShape& shape, GemmTile tile, int num_split_ctas) {
  return one_wave_plan_with(shape, tile.block_m, tile.block_n, num_split_ctas, {2, 1});
}

bool gemm_swapped_tile_can_have(GemmSwappedTile tile, int num_split_ctas) {
  const int num_ctas = num_split_ctas * tile.cluster.m * tile.cluster.n;
  return num_ctas > 1 && num_ctas <= MAX_CLUSTER_CTAS &&
         (num_split_ctas == 1 || gemm_swapped_tile_splits(tile));
}

GemmPlan gemm_swapped_cluster_plan_with(const GemmShape& shape, GemmSwappedTile tile, int num_split_ctas) {
  GemmPlan plan = one_wave_plan_with(swapped(shape), tile.block_m, tile.block_n, num_split_ctas, tile.cluster);
  plan.is_swapped = true;
  return plan;
}

bool gemm_plan_fits_at_once(const GemmPlan& plan, int num_sms, const GemmClusterLimits& limits) {
  return plan.num_workers <= limits.at_a_time[plan.num_cluster_ctas()] && plan.num_ctas() <= num_sms;
}

GemmPlan gemm_swapped_cluster_plan(const GemmShape& shape, std::span<const GemmSwappedTile> tiles,
                                   int most_split_ctas, int num_sms, const GemmClusterLimits& limits) {
  GemmPlan best;
  if (shape.a_transposed || shape.m == 0 || shape.n == 0) return best;
  for (const GemmSwappedTile& tile : tiles) {
    for (const int num_split_ctas : {1, 2, 4}) {
      if (num_split_ctas > most_split_ctas || !gemm_swapped_tile_can_have(tile, num_split_ctas)) continue;
      const GemmPlan plan = gemm_swapped_cluster_plan_with(shape, tile, num_split_ctas);
      if (!gemm_plan_fits_at_once(plan, num_sms, limits) || !can_be_split(shape, plan)) continue;
      if (!best.is_swapped || plan.predicted_us < best.predicted_us) best = plan;
    }
  }
  return best;
}

GemmPlan gemm_swapped_waves_plan(const GemmShape& shape, std::span<const GemmSwappedTile> tiles, bool cuts,
                                 int num_sms, const GemmClusterLimits& limits) {
  GemmPlan best;
  if (shape.a_transposed || shape.m == 0 || shape.n == 0) return best;
  const auto consider = [&](const GemmPlan& plan) {
    if (!best.is_swapped || plan.predicted_us < best.predicted_us) best = plan;
  };
  for (const GemmSwappedTile& tile : tiles) {
    if (tile.cluster.m * tile.cluster.n == 1 || !gemm_swapped_tile_walks(tile)) continue;
    const int most_clusters = clusters_at_a_time(tile.cluster, num_sms, limits);
    if (most_clusters == 0) continue;
    const GemmPlan whole = gemm_swapped_plan_with(shape, most_clusters, tile, -1);
    const int64_t num_tiles = gemm_plan_num_tiles(shape, whole);
    if (num_tiles <= most_clusters) continue;
    consider(whole);
    const int64_t rest = num_tiles % most_clusters;
    if (rest == 0 || !cuts) continue;
    for (const int64_t streamk : {rest, rest + most_clusters})
      consider(gemm_swapped_plan_with(shape, most_clusters, tile, static_cast<int>(streamk)));
  }
  return best;
}

GemmPlan gemm_split_plan(const GemmShape& shape, int num_sms, const GemmClusterLimits& limits) {
  GemmPlan best;
  if (shape.a_transposed || shape.m > FEW_ROWS || shape.m == 0 || shape.n == 0) return best;
  for (const GemmTile& tile : GEMM_SPLIT_TILES) {
    for (const int num_split_ctas : {2, 4}) {
      const GemmPlan split = gemm_split_plan_with(shape, tile, num_split_ctas);
      if (!gemm_plan_fits_at_once(split, num_sms, limits) || !can_be_split(shape, split)) continue;
      if (best.num_split_ctas == 1 || split.predicted_us < best.predicted_us) best = split;
    }
  }
  return best;
}

GemmPlan gemm_pair_plan(const GemmShape& shape, int num_sms, const GemmClusterLimits& limits,
                        int most_split_ctas) {
  GemmPlan best;
  if (shape.a_transposed || shape.m <= GEMM_PAIR_TILES[0].block_m || shape.n == 0) return best;
  for (const GemmTile& tile : GEMM_PAIR_TILES) {
    for (int num_split_ctas = 1; num_split_ctas <= most_split_ctas; ++num_split_ctas) {
      const GemmPlan pairs = gemm_pair_plan_with(shape, tile, num_split_ctas);
      if (!gemm_plan_fits_at_once(pairs, num_sms, limits) || !can_be_split(shape, pairs)) continue;
      if (!best.in_clusters() || pairs.predicted_us < best.predicted_us) best = pairs;
    }
  }
  return best;
}

GemmPlan gemm_plan(const GemmShape& shape, int num_sms, const GemmClusterLimits& limits) {
  GemmPlan best;
  const auto consider = [&](GemmPlan plan) {
    plan.predicted_us += gemm_plan_exposed_us(shape, plan);
    if (best.num_workers == 0 || plan.predicted_us < best.predicted_us) best = plan;
  };
  for (const GemmTile& tile : GEMM_TILES) {
    const bool is_pair = tile.cluster != GemmCluster{};
    const int most_workers = clusters_at_a_time(tile.cluster, num_sms, limits);
    if (is_pair && (most_workers == 0 || shape.m <= FEW_ROWS || shape.n == 0)) continue;
    const int most_ctas = most_workers * tile.cluster.m * tile.cluster.n;
    GemmPlan whole = gemm_plan_with(shape, most_ctas, tile, -1);
    if (is_pair && falls_out_of_step(shape, whole)) continue;
    const int64_t tiles = gemm_plan_num_tiles(shape, whole);
    if (is_low_wave(shape, whole)) {
      whole.predicted_us = predict_low_wave_us(shape, whole);
    } else if (shape.a_transposed && tile.block_m == 64 && is_one_wave(shape, whole) &&
               shape.k >= LEAST_K_TO_CUT_LOW_TILES_OF_TRANSPOSED) {
      whole.predicted_us = predict_evenly_cut_us(shape, whole);
    } else if (shape.m <= FEW_ROWS && is_one_wave(shape, whole)) {
      whole.predicted_us = predict_one_wave_us(shape, whole);
    }
    // Not in gemm_plan_with(), by which operators between ranks compare tiles: all-gathers of few rows have a
    // rule of their own.
    if (shape.m <= FEW_ROWS_OF_SWAPPED && tiles > whole.num_workers)
      whole.predicted_us = predict_waves_of_few_rows_us(shape, whole);
    consider(whole);
    const int64_t rest = tiles % std::max(1, most_workers);
    if (rest == 0) continue;
    // The last wave alone, or together with the wave before, which makes for fewer pieces a tile.
    for (const int64_t streamk : {rest, rest + most_workers}) {
      if (streamk > tiles) continue;
      GemmPlan cut = gemm_plan_with(shape, most_ctas, tile, static_cast<int>(streamk));
      // Not in gemm_plan_with(), by which operators between ranks compare tiles: theirs are in another order.
      if (shape.m > FEW_ROWS_OF_CUT_TILES && shape.m <= SOME_ROWS_OF_CUT_TILES && cut.num_streamk_tiles > 0) {
        cut.predicted_us =
            predict_us(shape, cut, bytes_read_by_cut_tiles(shape, cut) * missed_part_of_cut_tiles(shape, cut));
      }
      consider(cut);
    }
  }
  consider_evenly_cut_plans(shape, num_sms, limits, consider);
  // Cut ones were slower than the model has them.
  if (shape.m > FEW_ROWS_OF_SWAPPED && shape.m <= SOME_ROWS_OF_CUT_TILES && !shape.a_transposed) {
    consider(gemm_swapped_plan_with(shape, num_sms, {256, 160, {1, 1}}, -1));
    GemmPlan clusters = gemm_swapped_cluster_plan(shape, GEMM_SWAPPED_TILES, MAX_SPLIT_CTAS, num_sms, limits);
    if (clusters.block_m == 256 && shape.m > FEW_ROWS && shape.k <= SHORT_K)
      clusters.predicted_us += SHORT_CLUSTERS_OF_256_US;
    if (clusters.is_swapped) consider(clusters);
    const GemmPlan waves = gemm_swapped_waves_plan(shape, GEMM_SWAPPED_TILES, true, num_sms, limits);
    if (waves.is_swapped) consider(waves);
  }
  if (shape.m > SOME_ROWS_OF_CUT_TILES) {
    for (const GemmSwappedTile& tile : GEMM_SWAPPED_TILES) {
      if (tile.cluster.m != MAX_CLUSTER_CTAS) continue;
      GemmPlan clusters = gemm_swapped_cluster_plan(shape, {&tile, 1}, 1, num_sms, limits);
      clusters.predicted_us *= CLUSTERS_OF_MANY_ROWS_FACTOR;
      if (clusters.is_swapped) consider(clusters);
    }
  }
  const GemmPlan split = gemm_split_plan(shape, num_sms, limits);
  if (split.num_split_ctas > 1) consider(split);
  if (shape.m > LOWEST_TILE.block_m && shape.m <= FEW_ROWS && shape.n > 0 && !shape.a_transposed) {
    for (const int num_split_ctas : {2, 4}) {
      GemmPlan lowest = gemm_split_plan_with(shape, LOWEST_TILE, num_split_ctas);
      lowest.predicted_us *= SPLIT_LOWEST_TILES_FACTOR;
      if (gemm_plan_fits_at_once(lowest, num_sms, limits) && can_be_split(shape, lowest)) consider(lowest);
    }
  }
  const GemmPlan pairs = gemm_pair_plan(shape, num_sms, limits);
  if (pairs.in_clusters()) consider(pairs);
  return best;
}

}  // namespace mk
