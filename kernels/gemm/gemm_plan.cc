// SPDX-License-Identifier: MIT
#include "kernels/gemm/gemm_plan.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <utility>

#include "kernels/device/gemm_partials_layout.h"
#include "kernels/device/tile_scheduler.h"

namespace mk {
namespace {

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The model's constants are fitted to one H200 (docs/experiments/gemm.md); only ratios between plans matter.
constexpr double CLOCK_MHZ = 1700;
constexpr double HBM_BYTES_PER_US = 4.3e6;
constexpr double CTAS_TO_FILL_HBM = 64;         // with 192 KB in flight each
constexpr double SPLIT_LINES_FACTOR = 1.015;    // rows of B that begin in the middle of 128 bytes
constexpr double SM_LOAD_BYTES_PER_CYCLE = 52;  // L2 to one SM with all SMs loading
constexpr double EPILOGUE_CYCLES = 3300;        // exposed after every tile; in ping-pong after the last
constexpr double EPILOGUE_CYCLES_OF_256_ROWS = 9000;
// In ping-pong, what is left of the epilogue of every tile but the last: less with each k-step that the other
// warpgroup multiplies meanwhile.
constexpr double PING_PONG_EPILOGUE_CYCLES = 2800;
constexpr double HIDDEN_CYCLES_OF_K_STEP = 110;
// What the stores of a tile of 128x256 take longer than those of 16-bit results: fp32 ones, and where C is
// added to, 16-bit and fp32 ones. Other CTAs' products hide a part of the last.
constexpr double FP32_CYCLES = 5000;
constexpr double ADDED_CYCLES = 7400;
constexpr double ADDED_FP32_CYCLES = 18500;
constexpr double LEAST_ADDED_FP32_CYCLES = 8000;
constexpr double HIDDEN_ADDED_FP32_CYCLES_OF_K_STEP = 150;
// In ping-pong so many k-steps hide all of it.
constexpr double HIDING_K_STEPS = 30;
// Where pairs in ping-pong store a tile by boxes, what is left of it all, whatever the number of k-steps; and
// where a 16-bit C is added to, with few of them.
constexpr double PAIR_EPILOGUE_CYCLES = 600;
constexpr double PAIR_FP32_CYCLES = 900;
constexpr double PAIR_ADDED_FP32_CYCLES = 2200;
constexpr double PAIR_ADDED_CYCLES = 2000;
constexpr double PAIR_HIDING_K_STEPS = 20;
// Of a transposed A, with C in fp32 or added to, pairs were up to 5 % faster with more rows of tiles at a time.
constexpr int64_t LEAST_K_OF_HIGH_GROUPS = 2048;
constexpr double START_CYCLES = 3500;
constexpr double STREAMK_STEP_FACTOR = 1.04;
// Partial tile out, flag, partial tile in: latencies, and, with large tiles, operands that were no longer in L2
// because neighbours are at different k.
constexpr double EXCHANGE_CYCLES = 8000;
constexpr double EXCHANGE_CYCLES_LARGE = 14000;
constexpr double EXCHANGE_CYCLES_OF_CLUSTERS = 10000;
constexpr double EXCHANGE_BYTES_PER_CYCLE = 30;
// Where all tiles are cut, and all alike: what the cycles of a k-step are divided by there, and the exchange.
constexpr double EVENLY_CUT_MHZ = 1450;
constexpr double EVENLY_CUT_MHZ_OF_CLUSTERS = 1350;
constexpr double EVENLY_CUT_MHZ_OF_PING_PONG = 1550;
constexpr double EVENLY_CUT_MHZ_OF_192_COLUMNS = 1575;
constexpr double EVENLY_CUT_MHZ_OF_64_ROWS = 2550;
constexpr double EVENLY_CUT_US_OF_CLUSTERS = 1;
constexpr double EVENLY_CUT_US_OF_64_ROWS = 2.5;
constexpr double EVENLY_CUT_BYTES_PER_US = 98e3;
constexpr double EVENLY_CUT_BYTES_PER_US_IN_PING_PONG = 53e3;
// With a larger B tiles of 64 rows, which read it again and again, took up to half as long again as that.
constexpr double MOST_B_BYTES_OF_64_ROWS = 34e6;
constexpr double MOST_B_BYTES_OF_64_OF_FEW_ROWS = 21e6;  // with up to FEW_ROWS_OF_WHOLE_TILES
constexpr int MOST_EVEN_PIECES = 8;
constexpr int64_t LEAST_K_TO_CUT_EVENLY = 4096;  // with less, other plans are faster
constexpr double LAUNCH_US = 3;
// Of few rows, in one wave.
constexpr int FEW_ROWS = 512;
constexpr int FEW_ROWS_OF_WHOLE_TILES = 128;  // power limits no clock: up to FEW_ROWS, where tiles are smaller
constexpr double FULL_CLOCK_MHZ = 1900;
// In several waves, of up to FEW_ROWS_OF_SWAPPED rows. With fewer CTAs in the last one the memory is no longer
// what limits them, but the part of the chip that they lie in.
constexpr double CTAS_TO_FILL_LAST_WAVE = 115;
constexpr double WAVES_OF_HIGH_TILES_FACTOR = 1.06;
constexpr double FEW_ROWS_LAUNCH_US = 3.4;
constexpr double CTAS_WITHOUT_CONTENTION = 80;
constexpr double SPLIT_CONTENTION_OF_132_CTAS = 0.3;
constexpr double SPLIT_EXCHANGE_US = 0.6;
constexpr double SPLIT_EXCHANGE_US_A_CTA = 0.35;
constexpr double SPLIT_EXCHANGE_BYTES_PER_US = 68e3;
constexpr int64_t MIN_SPLIT_STEPS = 4;  // of a CTA
constexpr double CLUSTER_EFFICIENCY = 0.88;
constexpr double CLUSTER_EFFICIENCY_SHARING_A = 0.92;
constexpr double CLUSTER_EFFICIENCY_OF_256_ROWS = 0.9;  // with nearly all SMs, which then power limits
constexpr double CLUSTER_EFFICIENCY_OF_FOUR = 1;
constexpr double PING_PONG_PAIR_EFFICIENCY = 0.95;
// What an SM asks for, and what arrives there, with as many CTAs under way.
constexpr double CLUSTER_LOAD_BYTES_PER_CYCLE = 48;
constexpr double CLUSTER_ARRIVING_BYTES_PER_CYCLE = 80;
constexpr double CLUSTER_CTAS = 120;
constexpr double FEW_CLUSTER_CTAS = 90;  // that have not much more each
constexpr int CTAS_WITHOUT_POWER_LIMIT = 100;
constexpr double EFFICIENCY_OF_256_AND_SOME_ROWS = 0.9;
constexpr double IDLE_WARPGROUP_PART = 0.025;  // in ping-pong, of a CTA with one tile
constexpr double PAIR_START_US = 0.8;
constexpr double PAIR_SPLIT_US = 2.4;
constexpr double SWAPPED_START_US = 0.3;
constexpr double SWAPPED_START_OF_A_ROW_OF_TILES_US = 0.9;  // of up to 128 rows
constexpr int64_t A_ROW_OF_TILES = 128;
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

// Rows outside the matrix take the longest to load, and a CTA of a pair waits for the other.
double load_cycles_of_last_pair(const GemmShape& shape, const GemmPlan& plan) {
  constexpr double CYCLES_OF_ROW = 2;
  constexpr double CYCLES_OF_ROW_OUTSIDE = 6;
  const int64_t rows = (shape.m - 1) % (2 * plan.block_m) + 1;
  const int64_t of_second = std::max<int64_t>(0, rows - plan.block_m);
  const int64_t box_rows = stage_box_rows(shape.m, plan.block_m);
  const int64_t outside = ceil_divide(of_second, box_rows) * box_rows - of_second;
  return CYCLES_OF_ROW * static_cast<double>(of_second) + CYCLES_OF_ROW_OUTSIDE * static_cast<double>(outside);
}

bool is_one_wave(const GemmShape& shape, const GemmPlan& plan) {
  return plan.num_streamk_tiles == 0 && plan.num_workers == gemm_plan_num_tiles(shape, plan);
}

// With more rows yet, no plan was measured against the others.
constexpr int SOME_ROWS_OF_CUT_TILES = 1024;

// Cycles that one k-step of a tile takes on its SM.
double step_cycles(const GemmShape& shape, const GemmPlan& plan, double efficiency_of_64, int64_t a_rows) {
  const bool is_wave_of_four = plan.cluster.m == 4 && plan.block_m == 128 && is_one_wave(shape, plan);
  const bool has_most_sms = plan.num_ctas() > CTAS_WITHOUT_POWER_LIMIT;
  const bool has_some_rows = shape.m <= SOME_ROWS_OF_CUT_TILES;
  const double of_256_rows = has_some_rows ? EFFICIENCY_OF_256_AND_SOME_ROWS : 0.98;
  const double sharing_a =
      plan.block_m == 256 && has_most_sms ? CLUSTER_EFFICIENCY_OF_256_ROWS : CLUSTER_EFFICIENCY_SHARING_A;
  const bool is_pair = plan.ping_pong && plan.in_clusters();
  const double efficiency = is_pair               ? PING_PONG_PAIR_EFFICIENCY
                            : plan.cluster.n == 2 ? sharing_a
                            : is_wave_of_four     ? CLUSTER_EFFICIENCY_OF_FOUR
                            : plan.in_clusters()  ? CLUSTER_EFFICIENCY
                            : plan.block_m == 64  ? efficiency_of_64
                            : plan.ping_pong      ? 0.94
                            : plan.block_m == 256 ? of_256_rows
                            : plan.block_n == 256 ? 0.98
                            : plan.block_n == 224 ? 0.96
                                                  : 0.9;
  const double multiply = plan.block_m * plan.block_n * GEMM_BLOCK_K / 2048.0 / efficiency;
  const int64_t columns =
      (shape.b_transposed ? plan.block_n : ceil_divide(plan.block_n, 64) * 64) / plan.cluster.m;
  a_rows /= plan.cluster.n;
  const double bytes = 2.0 * GEMM_BLOCK_K * (a_rows + columns);
  double load = bytes / SM_LOAD_BYTES_PER_CYCLE;
  if (plan.cluster.m == 2) load = std::max(load, load_cycles_of_last_pair(shape, plan));
  if (plan.in_clusters() && plan.cluster.m != 2 && !is_pair) {
    const double arriving = 2.0 * GEMM_BLOCK_K * (plan.block_m + plan.block_n);
    const double busy = std::max<double>(plan.num_ctas(), FEW_CLUSTER_CTAS) / CLUSTER_CTAS;
    load = std::max({load, busy * bytes / CLUSTER_LOAD_BYTES_PER_CYCLE,
                     busy * arriving / CLUSTER_ARRIVING_BYTES_PER_CYCLE});
  }
  return std::max(multiply, load);
}

// Rows of A that a tile loads: its box has no more than the matrix.
int64_t loaded_a_rows(const GemmShape& shape, const GemmPlan& plan) {
  return std::min<int64_t>(plan.block_m, ceil_divide(shape.m, 8) * 8);
}

// With more rows, products are not bound by the weights.
constexpr int FEW_ROWS_OF_CUT_TILES = 256;
// Up to as many a row of tiles of 64 rows is enough.
constexpr int FEW_ROWS_OF_SWAPPED = 64;
constexpr double KEPT_L2_BYTES = 20e6;

// Tiles of the same columns of B that are cut are not at the same k at the same time, and each reads its own.
double bytes_read_by_cut_tiles(const GemmShape& shape, const GemmPlan& plan) {
  const double rows_of_tiles = ceil_divide(shape.m, plan.block_m);
  return 2.0 * shape.k * plan.block_n * plan.num_streamk_tiles * (1 - 1 / rows_of_tiles);
}

// Of these, what the L2 has no longer. CTAs share out the steps of the cut tiles evenly: the next tile of the
// same columns is so many steps behind, or ahead, and meanwhile all CTAs load.
double missed_part_of_cut_tiles(const GemmShape& shape, const GemmPlan& plan) {
  const double rows_of_tiles = std::min<double>(ceil_divide(shape.m, plan.block_m), plan.group_m);
  const double k_steps = ceil_divide(shape.k, GEMM_BLOCK_K);
  const double steps_of_cta = plan.num_streamk_tiles * k_steps / plan.num_workers;
  const double behind = std::fmod(k_steps, steps_of_cta);
  const double apart = std::min(behind, steps_of_cta - behind);
  const double bytes_between = apart * GEMM_BLOCK_K * plan.block_n * 2 * plan.num_workers / rows_of_tiles;
  return std::min(1.0, bytes_between / KEPT_L2_BYTES);
}

double memory_us(const GemmShape& shape, const GemmPlan& plan, double more_bytes) {
  double bytes = 2.0 * (double(shape.m) * shape.k + double(shape.k) * shape.n) +
                 (shape.out_type == GemmType::fp32 ? 4.0 : 2.0) * shape.m * shape.n + more_bytes;
  if (shape.m <= FEW_ROWS_OF_CUT_TILES) bytes += bytes_read_by_cut_tiles(shape, plan);
  const bool splits_lines = !shape.b_transposed && plan.block_n % 64 != 0;
  return bytes * (splits_lines ? SPLIT_LINES_FACTOR : 1.0) / HBM_BYTES_PER_US /
         std::min(1.0, plan.num_ctas() / CTAS_TO_FILL_HBM);
}

// The slower of the two, and a little of the other, so that of two plans bound by memory the lighter one wins.
double overlapped_us(double one_us, double other_us) {
  return std::max(one_us, other_us) + 0.1 * std::min(one_us, other_us);
}

double predict_us(const GemmShape& shape, const GemmPlan& plan, double more_bytes) {
  const int64_t k_steps = ceil_divide(shape.k, GEMM_BLOCK_K);
  const int64_t whole_tiles = gemm_plan_num_tiles(shape, plan) - plan.num_streamk_tiles;
  const int64_t waves = ceil_divide(whole_tiles, plan.num_workers);
  const double step = step_cycles(shape, plan, 0.6, loaded_a_rows(shape, plan));
  const double epilogue = plan.block_m == 256 ? EPILOGUE_CYCLES_OF_256_ROWS : EPILOGUE_CYCLES;
  double cycles = START_CYCLES + waves * k_steps * step + (plan.ping_pong ? 1 : waves) * epilogue;
  double exchange_cycles = 0;
  if (plan.num_streamk_tiles > 0) {
    const double steps = std::ceil(double(plan.num_streamk_tiles) * k_steps / plan.num_workers);
    const double pieces = std::max(1.0, double(plan.num_workers) / plan.num_streamk_tiles);
    const double rows = std::min<double>(plan.block_m, shape.m);
    cycles += steps * step * STREAMK_STEP_FACTOR + epilogue;
    exchange_cycles = (plan.in_clusters()   ? EXCHANGE_CYCLES_OF_CLUSTERS
                       : plan.block_m == 64 ? EXCHANGE_CYCLES
                                            : EXCHANGE_CYCLES_LARGE) +
                      (1 + pieces) * rows * plan.block_n * 4.0 / EXCHANGE_BYTES_PER_CYCLE;
  }
  return LAUNCH_US + overlapped_us(cycles / CLOCK_MHZ, memory_us(shape, plan, more_bytes)) +
         exchange_cycles / CLOCK_MHZ;
}

// A product of few rows in several waves of whole tiles.
double predict_waves_of_few_rows_us(const GemmShape& shape, const GemmPlan& plan) {
  const auto last = static_cast<double>(gemm_plan_num_tiles(shape, plan) % plan.num_workers);
  // As if so many tiles more were read, but in a full last wave none.
  const double missing_tiles = last > 0 ? std::max(0.0, CTAS_TO_FILL_LAST_WAVE - last) : 0;
  const double us = predict_us(shape, plan, 2.0 * shape.k * plan.block_n * missing_tiles);
  return plan.block_m > 64 ? WAVES_OF_HIGH_TILES_FACTOR * us : us;
}

// A CTA has some k-steps, and chunks of columns to add up.
bool can_be_split(const GemmShape& shape, const GemmPlan& plan) {
  return plan.num_split_ctas == 1 || (plan.block_n % SPLIT_CHUNK_COLUMNS == 0 &&
                                      shape.k >= plan.num_split_ctas * MIN_SPLIT_STEPS * GEMM_BLOCK_K);
}

// A product of a tile a CTA or a cluster, with few rows or in pairs.
double predict_one_wave_us(const GemmShape& shape, const GemmPlan& plan) {
  const int64_t steps = ceil_divide(ceil_divide(shape.k, GEMM_BLOCK_K), plan.num_split_ctas);
  const int few_rows = plan.num_cluster_ctas() == 1 ? FEW_ROWS_OF_WHOLE_TILES : FEW_ROWS;
  double compute_us = steps * step_cycles(shape, plan, 0.85, loaded_a_rows(shape, plan)) /
                      (shape.m > few_rows ? CLOCK_MHZ : FULL_CLOCK_MHZ);
  const double swapped_start_us =
      shape.n <= A_ROW_OF_TILES ? SWAPPED_START_OF_A_ROW_OF_TILES_US : SWAPPED_START_US;
  double exchange_us = plan.cluster.m == 2 ? PAIR_START_US : plan.in_clusters() ? swapped_start_us : 0;
  if (plan.num_split_ctas > 1) {
    if (plan.cluster.m == 2) exchange_us += PAIR_SPLIT_US;
    if (!plan.in_clusters())
      compute_us *=
          1 + SPLIT_CONTENTION_OF_132_CTAS *
                  std::max(0.0, (plan.num_ctas() - CTAS_WITHOUT_CONTENTION) / (132 - CTAS_WITHOUT_CONTENTION));
    const double bytes = 2.0 * std::min<double>(plan.block_m, shape.m) * plan.block_n * 4;
    exchange_us +=
        SPLIT_EXCHANGE_US + SPLIT_EXCHANGE_US_A_CTA * plan.num_split_ctas + bytes / SPLIT_EXCHANGE_BYTES_PER_US;
  }
  if (plan.ping_pong) exchange_us += IDLE_WARPGROUP_PART * compute_us;
  return FEW_ROWS_LAUNCH_US + overlapped_us(compute_us, memory_us(shape, plan, 0)) + exchange_us;
}

// A product of fewer tiles than workers, each of which is cut in as many pieces: tiles of the same columns are
// at the same k at the same time, as whole ones are.
double predict_evenly_cut_us(const GemmShape& shape, const GemmPlan& plan) {
  const int pieces = plan.num_workers / plan.num_streamk_tiles;
  const int64_t steps = ceil_divide(ceil_divide(shape.k, GEMM_BLOCK_K), pieces);
  const double mhz = plan.in_clusters()    ? EVENLY_CUT_MHZ_OF_CLUSTERS
                     : plan.block_m == 64  ? EVENLY_CUT_MHZ_OF_64_ROWS
                     : plan.ping_pong      ? EVENLY_CUT_MHZ_OF_PING_PONG
                     : plan.block_n == 192 ? EVENLY_CUT_MHZ_OF_192_COLUMNS
                                           : EVENLY_CUT_MHZ;
  const double compute_us = steps * step_cycles(shape, plan, 0.85, loaded_a_rows(shape, plan)) / mhz;
  const double bytes = pieces * 4.0 * std::min<double>(plan.block_m, shape.m) * plan.block_n;
  const double start_us = plan.in_clusters()   ? EVENLY_CUT_US_OF_CLUSTERS
                          : plan.block_m == 64 ? EVENLY_CUT_US_OF_64_ROWS
                                               : 0;
  const double exchange_us =
      start_us + bytes / (plan.ping_pong ? EVENLY_CUT_BYTES_PER_US_IN_PING_PONG : EVENLY_CUT_BYTES_PER_US);
  GemmPlan uncut = plan;  // no operand is read again
  uncut.num_streamk_tiles = 0;
  return FEW_ROWS_LAUNCH_US + overlapped_us(compute_us, memory_us(shape, uncut, 0)) + exchange_us;
}

// Whether a product is so long that its CTAs are to be kept in step, which pairs are not.
bool falls_out_of_step(const GemmShape& shape, const GemmPlan& plan) {
  const int64_t k_steps = ceil_divide(shape.k, GEMM_BLOCK_K);
  return gemm_plan_num_tiles(shape, plan) * k_steps >= OUT_OF_STEP_K_STEPS * plan.num_ctas();
}

// Cycles, see FP32_CYCLES.
double longer_store_cycles(const GemmShape& shape, const GemmPlan& plan, double k_steps) {
  const bool is_fp32 = shape.out_type == GemmType::fp32;
  const double added_fp32 =
      std::max(LEAST_ADDED_FP32_CYCLES, ADDED_FP32_CYCLES - HIDDEN_ADDED_FP32_CYCLES_OF_K_STEP * k_steps);
  const double of_largest = !shape.accumulate ? (is_fp32 ? FP32_CYCLES : 0)
                            : is_fp32         ? added_fp32
                                              : ADDED_CYCLES;
  return of_largest * plan.block_m * plan.block_n / (128.0 * 256);
}

// The same of a tile of a pair in ping-pong, and what else is exposed of it.
double pair_exposed_cycles(const GemmShape& shape, double k_steps) {
  if (shape.out_type == GemmType::fp32) return shape.accumulate ? PAIR_ADDED_FP32_CYCLES : PAIR_FP32_CYCLES;
  const double added =
      shape.accumulate ? PAIR_ADDED_CYCLES * std::max(0.0, 1 - k_steps / PAIR_HIDING_K_STEPS) : 0;
  return PAIR_EPILOGUE_CYCLES + added;
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
int even_pieces(const GemmShape& shape, int64_t tiles, int most_workers) {
  static_assert(LEAST_K_TO_CUT_EVENLY >= MOST_EVEN_PIECES * MIN_SPLIT_STEPS * GEMM_BLOCK_K);
  if (tiles == 0 || shape.k < LEAST_K_TO_CUT_EVENLY) return 0;
  return static_cast<int>(std::min<int64_t>(MOST_EVEN_PIECES, most_workers / tiles));
}

int clusters_at_a_time(const GemmSwappedTile& tile, int num_sms, const GemmClusterLimits& limits) {
  const int num_ctas = tile.cluster.m * tile.cluster.n;
  return std::min(limits.at_a_time[num_ctas], num_sms / num_ctas);
}

// The plans that cut all tiles, one for each tile of which there are so few: consider(plan). Rows that were not
// measured, or for which others were faster, have none.
template <class Consider>
void consider_evenly_cut_plans(const GemmShape& shape, int num_sms, const GemmClusterLimits& limits,
                               Consider&& consider) {
  if (shape.a_transposed || shape.m <= FEW_ROWS_OF_SWAPPED || shape.m > SOME_ROWS_OF_CUT_TILES) return;
  const double most_b_bytes =
      shape.m <= FEW_ROWS_OF_WHOLE_TILES ? MOST_B_BYTES_OF_64_OF_FEW_ROWS : MOST_B_BYTES_OF_64_ROWS;
  const bool has_low_tiles = shape.m <= FEW_ROWS_OF_CUT_TILES && 2.0 * shape.k * shape.n <= most_b_bytes;
  // plan_with(workers, cut tiles); `tiled`: the shape as its tiles have it.
  const auto cut = [&](const GemmShape& tiled, int most_workers, const auto& plan_with) {
    const auto num_tiles = static_cast<int>(gemm_plan_num_tiles(shape, plan_with(most_workers, -1)));
    const int pieces = even_pieces(shape, num_tiles, most_workers);
    if (pieces < 2) return;
    GemmPlan plan = plan_with(pieces * num_tiles, num_tiles);
    if (plan.num_streamk_tiles == 0) return;  // deal_out() could not
    plan.predicted_us = predict_evenly_cut_us(tiled, plan);
    consider(plan);
  };
  for (const GemmTile& tile : GEMM_TILES) {
    if (tile.cluster != GemmCluster{}) continue;
    if (tile.block_m == 64 ? !has_low_tiles : shape.m <= FEW_ROWS_OF_WHOLE_TILES) continue;
    cut(shape, num_sms,
        [&](int workers, int num_cut) { return gemm_plan_with(shape, workers, tile, num_cut); });
  }
  for (const GemmSwappedTile& tile : GEMM_SWAPPED_TILES) {
    if (tile.cluster.m * tile.cluster.n == 1 || !gemm_swapped_tile_walks(tile)) continue;
    cut(swapped(shape), clusters_at_a_time(tile, num_sms, limits),
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
  if (plan.in_clusters() && shape.a_transposed && stores_long && shape.k >= LEAST_K_OF_HIGH_GROUPS)
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

double gemm_plan_exposed_us(const GemmShape& shape, const GemmPlan& plan) {
  const double k_steps = ceil_divide(shape.k, GEMM_BLOCK_K);
  const int64_t whole_tiles = gemm_plan_num_tiles(shape, plan) - plan.num_streamk_tiles;
  const int64_t tiles = ceil_divide(whole_tiles, plan.num_workers) + (plan.num_streamk_tiles > 0 ? 1 : 0);
  if (plan.ping_pong && plan.in_clusters())
    return static_cast<double>(tiles) * pair_exposed_cycles(shape, k_steps) / CLOCK_MHZ;
  const int64_t tiles_but_last = std::max<int64_t>(0, tiles - 1);
  const double longer = longer_store_cycles(shape, plan, k_steps);
  if (!plan.ping_pong) return static_cast<double>(tiles) * longer / CLOCK_MHZ;
  const double stores = PING_PONG_EPILOGUE_CYCLES - HIDDEN_CYCLES_OF_K_STEP * k_steps;
  const double left = std::max(0.0, stores) + longer * std::max(0.0, 1 - k_steps / HIDING_K_STEPS);
  return (static_cast<double>(tiles_but_last) * left + longer) / CLOCK_MHZ;
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
    const int most_clusters = clusters_at_a_time(tile, num_sms, limits);
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
    const int num_ctas = tile.cluster.m * tile.cluster.n;
    const int most_ctas = num_ctas > 1 ? std::min(num_sms, limits.at_a_time[num_ctas] * num_ctas) : num_sms;
    const int most_workers = most_ctas / num_ctas;
    if (num_ctas > 1 && most_workers == 0) continue;
    GemmPlan whole = gemm_plan_with(shape, most_ctas, tile, -1);
    if (num_ctas > 1 && (shape.m <= FEW_ROWS || shape.n == 0 || falls_out_of_step(shape, whole))) continue;
    const int64_t tiles = gemm_plan_num_tiles(shape, whole);
    if (shape.m <= FEW_ROWS && is_one_wave(shape, whole))
      whole.predicted_us = predict_one_wave_us(shape, whole);
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
