// SPDX-License-Identifier: MIT
#include "kernels/gemm/gemm_plan_time.h"

#include <algorithm>
#include <cmath>

namespace mk {
namespace {

// The model's constants are fitted to one H200 (docs/experiments/gemm.md); only ratios between plans matter.
constexpr double CLOCK_MHZ = 1700;
constexpr double HBM_BYTES_PER_US = 4.3e6;
constexpr double CTAS_TO_FILL_HBM = 64;                // with 192 KB in flight each
constexpr double CTAS_TO_FILL_HBM_OF_TRANSPOSED = 96;  // where A is
constexpr double SPLIT_LINES_FACTOR = 1.015;           // rows of B that begin in the middle of 128 bytes
constexpr double SM_LOAD_BYTES_PER_CYCLE = 52;         // L2 to one SM with all SMs loading
// Of a transposed A, where rows of either operand do not all begin with a line. Measured with a C of so many
// elements, a tile of 64x128 for each SM.
constexpr double SPLIT_LINES_LOAD_FACTOR = 1.5;
constexpr int64_t MOST_ELEMENTS_OF_SPLIT_LINES = 132 * 64 * 128;
constexpr double EPILOGUE_CYCLES = 3300;  // exposed after every tile; in ping-pong after the last
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
constexpr double LAUNCH_US = 3;
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
constexpr double KEPT_L2_BYTES = 20e6;

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

// As it comes: of operands in each other's place B is transposed, too.
bool has_transposed_a(const GemmShape& shape) { return shape.a_transposed && !shape.b_transposed; }

// Boxes of a transposed A, and of its B, have 64 columns, a line.
bool splits_lines(const GemmShape& shape) {
  return has_transposed_a(shape) && (shape.m % 64 != 0 || shape.n % 64 != 0) &&
         shape.m * shape.n <= MOST_ELEMENTS_OF_SPLIT_LINES;
}

// Cycles that one k-step of a tile takes on its SM.
double step_cycles(const GemmShape& shape, const GemmPlan& plan, double efficiency_of_64, int64_t a_rows) {
  const bool is_wave_of_four = plan.cluster.m == 4 && plan.block_m == 128 && is_one_wave(shape, plan);
  const bool has_most_sms = plan.num_ctas() > CTAS_WITHOUT_POWER_LIMIT;
  const bool has_some_rows = shape.m <= SOME_ROWS_OF_CUT_TILES;
  const double of_256_rows = has_some_rows ? EFFICIENCY_OF_256_AND_SOME_ROWS : 0.98;
  const double sharing_a =
      plan.block_m == 256 && has_most_sms ? CLUSTER_EFFICIENCY_OF_256_ROWS : CLUSTER_EFFICIENCY_SHARING_A;
  const double efficiency = plan.is_ping_pong_pair() ? PING_PONG_PAIR_EFFICIENCY
                            : plan.cluster.n == 2    ? sharing_a
                            : is_wave_of_four        ? CLUSTER_EFFICIENCY_OF_FOUR
                            : plan.in_clusters()     ? CLUSTER_EFFICIENCY
                            : plan.block_m == 64     ? efficiency_of_64
                            : plan.ping_pong         ? 0.94
                            : plan.block_m == 256    ? of_256_rows
                            : plan.block_n == 256    ? 0.98
                            : plan.block_n == 224    ? 0.96
                                                     : 0.9;
  const double multiply = plan.block_m * plan.block_n * GEMM_BLOCK_K / 2048.0 / efficiency;
  const int64_t columns =
      (shape.b_transposed ? plan.block_n : ceil_divide(plan.block_n, 64) * 64) / plan.cluster.m;
  a_rows /= plan.cluster.n;
  const double bytes = 2.0 * GEMM_BLOCK_K * (a_rows + columns);
  double load = bytes / SM_LOAD_BYTES_PER_CYCLE * (splits_lines(shape) ? SPLIT_LINES_LOAD_FACTOR : 1.0);
  if (plan.cluster.m == 2) load = std::max(load, load_cycles_of_last_pair(shape, plan));
  if (plan.in_clusters() && plan.cluster.m != 2 && !plan.is_ping_pong_pair()) {
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

double memory_us(const GemmShape& shape, const GemmPlan& plan, double more_bytes) {
  double bytes = 2.0 * (double(shape.m) * shape.k + double(shape.k) * shape.n) +
                 (shape.out_type == GemmType::fp32 ? 4.0 : 2.0) * shape.m * shape.n + more_bytes;
  if (shape.m <= FEW_ROWS_OF_CUT_TILES) bytes += bytes_read_by_cut_tiles(shape, plan);
  const double ctas_to_fill_hbm = has_transposed_a(shape) ? CTAS_TO_FILL_HBM_OF_TRANSPOSED : CTAS_TO_FILL_HBM;
  const bool tiles_split_lines = !shape.b_transposed && plan.block_n % 64 != 0;
  return bytes * (tiles_split_lines ? SPLIT_LINES_FACTOR : 1.0) / HBM_BYTES_PER_US /
         std::min(1.0, plan.num_ctas() / ctas_to_fill_hbm);
}

// The slower of the two, and a little of the other, so that of two plans bound by memory the lighter one wins.
double overlapped_us(double one_us, double other_us) {
  return std::max(one_us, other_us) + 0.1 * std::min(one_us, other_us);
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

}  // namespace

bool is_one_wave(const GemmShape& shape, const GemmPlan& plan) {
  return plan.num_streamk_tiles == 0 && plan.num_workers == gemm_plan_num_tiles(shape, plan);
}

double bytes_read_by_cut_tiles(const GemmShape& shape, const GemmPlan& plan) {
  const double rows_of_tiles = ceil_divide(shape.m, plan.block_m);
  return 2.0 * shape.k * plan.block_n * plan.num_streamk_tiles * (1 - 1 / rows_of_tiles);
}

double missed_part_of_cut_tiles(const GemmShape& shape, const GemmPlan& plan) {
  const double rows_of_tiles = std::min<double>(ceil_divide(shape.m, plan.block_m), plan.group_m);
  const double k_steps = ceil_divide(shape.k, GEMM_BLOCK_K);
  const double steps_of_cta = plan.num_streamk_tiles * k_steps / plan.num_workers;
  const double behind = std::fmod(k_steps, steps_of_cta);
  const double apart = std::min(behind, steps_of_cta - behind);
  const double bytes_between = apart * GEMM_BLOCK_K * plan.block_n * 2 * plan.num_workers / rows_of_tiles;
  return std::min(1.0, bytes_between / KEPT_L2_BYTES);
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

double predict_waves_of_few_rows_us(const GemmShape& shape, const GemmPlan& plan) {
  const auto last = static_cast<double>(gemm_plan_num_tiles(shape, plan) % plan.num_workers);
  // As if so many tiles more were read, but in a full last wave none.
  const double missing_tiles = last > 0 ? std::max(0.0, CTAS_TO_FILL_LAST_WAVE - last) : 0;
  const double us = predict_us(shape, plan, 2.0 * shape.k * plan.block_n * missing_tiles);
  return plan.block_m > 64 ? WAVES_OF_HIGH_TILES_FACTOR * us : us;
}

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

double predict_evenly_cut_us(const GemmShape& shape, const GemmPlan& plan) {
  const int pieces = plan.num_streamk_tiles > 0 ? plan.num_workers / plan.num_streamk_tiles : 1;
  const int64_t steps = ceil_divide(ceil_divide(shape.k, GEMM_BLOCK_K), pieces);
  const double mhz_of_64_rows = splits_lines(shape) ? CLOCK_MHZ : EVENLY_CUT_MHZ_OF_64_ROWS;
  const double mhz = plan.in_clusters()    ? EVENLY_CUT_MHZ_OF_CLUSTERS
                     : plan.block_m == 64  ? mhz_of_64_rows
                     : plan.ping_pong      ? EVENLY_CUT_MHZ_OF_PING_PONG
                     : plan.block_n == 192 ? EVENLY_CUT_MHZ_OF_192_COLUMNS
                                           : EVENLY_CUT_MHZ;
  const double compute_us = steps * step_cycles(shape, plan, 0.85, loaded_a_rows(shape, plan)) / mhz;
  const double bytes = pieces * 4.0 * std::min<double>(plan.block_m, shape.m) * plan.block_n;
  const double start_us = plan.in_clusters()   ? EVENLY_CUT_US_OF_CLUSTERS
                          : plan.block_m == 64 ? EVENLY_CUT_US_OF_64_ROWS
                                               : 0;
  const double bytes_per_us = plan.ping_pong ? EVENLY_CUT_BYTES_PER_US_IN_PING_PONG : EVENLY_CUT_BYTES_PER_US;
  const double exchange_us = start_us + (pieces > 1 ? bytes / bytes_per_us : 0);
  GemmPlan uncut = plan;  // no operand is read again
  uncut.num_streamk_tiles = 0;
  return FEW_ROWS_LAUNCH_US + overlapped_us(compute_us, memory_us(shape, uncut, 0)) + exchange_us;
}

double predict_low_wave_us(const GemmShape& shape, const GemmPlan& plan) {
  return predict_evenly_cut_us(shape, plan) - EVENLY_CUT_US_OF_64_ROWS;
}

double gemm_plan_exposed_us(const GemmShape& shape, const GemmPlan& plan) {
  const double k_steps = ceil_divide(shape.k, GEMM_BLOCK_K);
  const int64_t whole_tiles = gemm_plan_num_tiles(shape, plan) - plan.num_streamk_tiles;
  const int64_t tiles = ceil_divide(whole_tiles, plan.num_workers) + (plan.num_streamk_tiles > 0 ? 1 : 0);
  if (plan.is_ping_pong_pair())
    return static_cast<double>(tiles) * pair_exposed_cycles(shape, k_steps) / CLOCK_MHZ;
  const int64_t tiles_but_last = std::max<int64_t>(0, tiles - 1);
  const double longer = longer_store_cycles(shape, plan, k_steps);
  if (!plan.ping_pong) return static_cast<double>(tiles) * longer / CLOCK_MHZ;
  const double stores = PING_PONG_EPILOGUE_CYCLES - HIDDEN_CYCLES_OF_K_STEP * k_steps;
  const double left = std::max(0.0, stores) + longer * std::max(0.0, 1 - k_steps / HIDING_K_STEPS);
  return (static_cast<double>(tiles_but_last) * left + longer) / CLOCK_MHZ;
}

}  // namespace mk
