// SPDX-License-Identifier: MIT
#include "kernels/gemm/gemm_plan.h"

#include <algorithm>
#include <cmath>

#include "kernels/device/gemm_partials_layout.h"

namespace mk {
namespace {

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The model's constants are fitted to one H200 (docs/performance.md); only ratios between plans matter.
constexpr double CLOCK_MHZ = 1700;
constexpr double HBM_BYTES_PER_US = 4.3e6;
constexpr double CTAS_TO_FILL_HBM = 64;         // with 192 KB in flight each
constexpr double SM_LOAD_BYTES_PER_CYCLE = 52;  // L2 to one SM with all SMs loading
constexpr double EPILOGUE_CYCLES = 3300;        // exposed after every tile; in ping-pong after the last
constexpr double START_CYCLES = 3500;
constexpr double STREAMK_STEP_FACTOR = 1.04;
// Partial tile out, flag, partial tile in: latencies, and, with large tiles, operands that were no longer in L2
// because neighbours are at different k.
constexpr double EXCHANGE_CYCLES = 8000;
constexpr double EXCHANGE_CYCLES_LARGE = 14000;
constexpr double EXCHANGE_BYTES_PER_CYCLE = 30;
constexpr double LAUNCH_US = 3;

// Cycles that one k-step of a tile takes on its SM.
double step_cycles(const GemmShape& shape, const GemmPlan& plan) {
  const double efficiency = plan.block_m == 64    ? 0.6
                            : plan.ping_pong      ? 0.94
                            : plan.block_n == 256 ? 0.98
                            : plan.block_n == 224 ? 0.96
                                                  : 0.9;
  const double multiply = plan.block_m * plan.block_n * GEMM_BLOCK_K / 2048.0 / efficiency;
  const int64_t columns = shape.b_transposed ? plan.block_n : ceil_divide(plan.block_n, 64) * 64;
  const double bytes = 2.0 * GEMM_BLOCK_K * (plan.block_m + double(columns) / plan.num_cluster_ctas);
  // Pairs wait for each other.
  const double pair_factor = plan.num_cluster_ctas == 1 ? 1.0 : plan.ping_pong ? 1.25 : 1.08;
  return std::max(multiply, bytes / SM_LOAD_BYTES_PER_CYCLE) * pair_factor;
}

double predict_us(const GemmShape& shape, const GemmPlan& plan) {
  const int64_t k_steps = ceil_divide(shape.k, GEMM_BLOCK_K);
  const int64_t whole_tiles = gemm_plan_num_tiles(shape, plan) - plan.num_streamk_tiles;
  const int64_t waves = ceil_divide(whole_tiles, plan.num_workers);
  const double step = step_cycles(shape, plan);
  double cycles = START_CYCLES + waves * k_steps * step + (plan.ping_pong ? 1 : waves) * EPILOGUE_CYCLES;
  double exchange_cycles = 0;
  if (plan.num_streamk_tiles > 0) {
    const double steps = std::ceil(double(plan.num_streamk_tiles) * k_steps / plan.num_workers);
    const double pieces = std::max(1.0, double(plan.num_workers) / plan.num_streamk_tiles);
    const double rows = std::min<double>(plan.block_m, shape.m);
    cycles += steps * step * STREAMK_STEP_FACTOR + EPILOGUE_CYCLES;
    exchange_cycles = (plan.block_m == 64 ? EXCHANGE_CYCLES : EXCHANGE_CYCLES_LARGE) +
                      (1 + pieces) * rows * plan.block_n * 4.0 / EXCHANGE_BYTES_PER_CYCLE;
  }
  const double bytes = 2.0 * (double(shape.m) * shape.k + double(shape.k) * shape.n) +
                       (shape.out_type == GemmType::fp32 ? 4.0 : 2.0) * shape.m * shape.n;
  const double busy = std::min(1.0, plan.num_ctas() / CTAS_TO_FILL_HBM);
  // The slower of the two, and a little of the other, so that of two plans bound by memory the lighter one
  // wins.
  const double compute_us = cycles / CLOCK_MHZ, memory_us = bytes / HBM_BYTES_PER_US / busy;
  return LAUNCH_US + std::max(compute_us, memory_us) + 0.1 * std::min(compute_us, memory_us) +
         exchange_cycles / CLOCK_MHZ;
}

}  // namespace

int64_t gemm_plan_num_tiles(const GemmShape& shape, const GemmPlan& plan) {
  return ceil_divide(ceil_divide(shape.m, plan.block_m), plan.num_cluster_ctas) *
         ceil_divide(shape.n, plan.block_n);
}

GemmPlan gemm_plan_with(const GemmShape& shape, int num_sms, GemmTile tile, int num_cluster_ctas,
                        int num_streamk_tiles) {
  GemmPlan plan;
  plan.block_m = tile.block_m;
  plan.block_n = tile.block_n;
  plan.ping_pong = tile.ping_pong;
  plan.num_cluster_ctas = num_cluster_ctas;
  const int64_t tiles = gemm_plan_num_tiles(shape, plan);
  const int64_t k_steps = ceil_divide(shape.k, GEMM_BLOCK_K);
  const int64_t max_workers = std::max(1, num_sms / num_cluster_ctas);
  plan.num_streamk_tiles =
      k_steps == 0 ? 0 : static_cast<int>(std::clamp<int64_t>(num_streamk_tiles, 0, tiles));
  plan.num_workers = static_cast<int>(
      std::clamp<int64_t>(plan.num_streamk_tiles > 0 ? tiles * k_steps : tiles, 1, max_workers));
  if (plan.num_streamk_tiles > 0) {
    // Every worker needs a k-step of the cut tiles, or its peers would wait for a partial sum that never comes.
    plan.num_workers = static_cast<int>(std::min<int64_t>(plan.num_workers, plan.num_streamk_tiles * k_steps));
    plan.workspace_bytes = PartialsLayout(plan.num_ctas(), plan.block_m, plan.block_n).num_bytes;
  }
  // About 2,048 rows: with 132 tiles of 128 x 256 in flight the block is then nearly square.
  plan.group_m = std::max(1, 2048 / (plan.block_m * plan.num_cluster_ctas));
  plan.predicted_us = predict_us(shape, plan);
  return plan;
}

GemmPlan gemm_plan(const GemmShape& shape, int num_sms) {
  GemmPlan best;
  for (const GemmTile& tile : GEMM_TILES) {
    for (int num_cluster_ctas = 1; num_cluster_ctas <= 2; ++num_cluster_ctas) {
      // A pair of CTAs splits B's tile into blocks of 64, and a pair with one row of tiles idles by half.
      if (num_cluster_ctas == 2 && (tile.block_n < 128 || shape.m <= tile.block_m || num_sms < 2)) continue;
      const GemmPlan whole = gemm_plan_with(shape, num_sms, tile, num_cluster_ctas, -1);
      const int64_t tiles = gemm_plan_num_tiles(shape, whole);
      const int64_t workers = std::max(1, num_sms / num_cluster_ctas);
      const int64_t rest = tiles % workers;
      if (best.num_workers == 0 || whole.predicted_us < best.predicted_us) best = whole;
      if (rest == 0) continue;
      // The last wave alone, or together with the wave before, which makes for fewer pieces a tile.
      for (const int64_t streamk : {rest, rest + workers}) {
        if (streamk > tiles) continue;
        const GemmPlan cut = gemm_plan_with(shape, num_sms, tile, num_cluster_ctas, static_cast<int>(streamk));
        if (cut.predicted_us < best.predicted_us) best = cut;
      }
    }
  }
  return best;
}

}  // namespace mk
