// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter's and GEMM+AllReduce's part of rank_gemm_plan().
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/cuda/gemm_type.h"
#include "kernels/cuda/rank_gemm_plan_parts.h"
#include "kernels/device/rank_gemm_tiles.h"
#include "kernels/device/tagged_packets.h"
#include "kernels/ops/gemm_reduce_scatter/cuda_params.h"
#include "kernels/ops/gemm_reduce_scatter/tagged_params.h"

namespace mk {
namespace {

using gemm_reduce_scatter::Reduction;
using gemm_reduce_scatter::TAGGED_COLUMNS;

// What the second exchange costs, in bytes on the link: beyond it, an all-reduce goes by way of owners. One
// without fences and flags costs less.
constexpr int64_t ONE_SHOT_EXTRA_BYTES = 2400000;
constexpr int64_t ONE_SHOT_EXTRA_BYTES_TAGGED = 1000000;
constexpr int64_t MAX_ONE_SHOT_ROWS = 1024;
// Between two ranks there are no more bytes; but with two tiles a CTA and more the product of one can hide what
// becomes of the other only by way of owners, who have to have enough rows for tiles of 128.
constexpr int64_t FEW_ONE_SHOT_ROWS = 512;
constexpr int64_t MAX_ONE_SHOT_ELEMENTS = 7500000;
// Owners of an all-reduce of more rows share out rows: there are tiles enough of any height.
constexpr int64_t MAX_ROWS_BY_COLUMNS = 1024;
// With more tiles a CTA, what is exchanged takes the way that lets the product go on.
constexpr int MAX_DIRECT_TILES = 1;
constexpr int64_t TYPICAL_K = 2048;
// What an owner has computed at a time where owners take turns, in waves.
constexpr double BLOCK_WAVES = 0.5;
// Of a product's time, that the links may need, for pushes to be paced.
constexpr double PACED_SHARE = 0.85;

// What is exchanged travels in tagged packets up to so many bytes: a reduce-scatter's of one owner, for as many
// as there are owners would each read all of B; and on the link those of each of an all-reduce's exchanges.
constexpr double MAX_TAGGED_BYTES_OF_OWNER = 1100000;
constexpr double MAX_TAGGED_BYTES_OF_ALLREDUCE = 2200000;

bool goes_one_shot(const GemmCall& call, int nranks) {
  if (call.op != MK_OPERATOR_GEMM_ALLREDUCE) return false;
  if (call.tuning.algorithm != MK_ALGORITHM_AUTO) return call.tuning.algorithm == MK_ALGORITHM_ONE_SHOT;
  // One-shot sends a whole matrix to every peer, two-shot twice the share of one.
  const int64_t bytes = call.m * call.n * element_bytes(call.comm_dtype);
  const int64_t extra = bytes * (nranks - 1) * (nranks - 2) / nranks;
  const bool has_packets = element_bytes(call.comm_dtype) == 2 && element_bytes(call.out_dtype) == 2;
  return call.m <= MAX_ONE_SHOT_ROWS &&
         (call.m <= FEW_ONE_SHOT_ROWS || call.m * call.n <= MAX_ONE_SHOT_ELEMENTS) &&
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

// Have a CTA's push warps the time to sum its own tiles while the consumers go on? Measured with two and
// with four ranks.
bool has_time_to_sum(const GemmCall& call, int nranks, const RankGemmPlan& plan) {
  constexpr double US_OF_K_STEP = 0.72;
  constexpr double SUM_US_OF_RANK = 13;
  constexpr double PUSH_US = 10;
  if (plan.is_direct || plan.gemm.block_m != 128 || plan.gemm.block_n != 256) return false;
  if (nranks > gemm_reduce_scatter::MOST_SOURCES_BESIDE) return false;
  if (element_bytes(call.comm_dtype) != 2 || call.comm_dtype != call.out_dtype) return false;
  const double tile_us = US_OF_K_STEP * static_cast<double>(ceil_div(call.k, GEMM_BLOCK_K));
  const double sum_us = SUM_US_OF_RANK * nranks;
  // A reduce-scatter's own tiles come one after the other; an all-reduce's among those of others.
  if (plan.reduction == Reduction::scatter) return sum_us < 1.15 * tile_us;
  return sum_us + 2 * (nranks - 1) * PUSH_US < 0.7 * nranks * tile_us;
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

// What is the same on all ranks: not k, nor the order of B.
GemmShape common_shape(const GemmCall& call) {
  GemmShape shape;
  shape.m = call.m;
  shape.n = call.n;
  shape.k = TYPICAL_K;
  shape.in_type = gemm_type(call.dtype);
  shape.out_type = gemm_type(call.out_dtype);
  return shape;
}

// Tagged packets are half as many bytes again, but need no fence and no flag, and the warps that wait for them
// look at all of them: for few bytes. They go where each row is wanted, once, and so a reduce-scatter's tiles
// can hold all owners' rows: owners' tiles of the same columns would each read all of B's again, and none of
// them sooner.
void choose_merged_tile(const GemmCall& call, int nranks, int num_sms, RankGemmPlan& to) {
  if (call.m == 0 || call.n == 0 || element_bytes(call.comm_dtype) != 2) return;
  if (exchanged_bytes(call, nranks, to.reduction) > (nranks - 1) * MAX_TAGGED_BYTES_OF_OWNER) return;
  for (const GemmTile& tile : gemm_reduce_scatter::TAGGED_TILES) {
    if (!may_take(call, tile)) continue;
    GemmShape shape = common_shape(call);
    shape.m = round_up(call.m, tile.block_m);
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

// Swapped tiles are exchanged behind the product, tiles of owners' rows beside it. That pays where there is
// much to exchange, if owners have more than a row of tiles, which reads all of B, and leave little of them
// empty: between four ranks 768x28672 took 0.82 to 0.94 of the time, 1000x16384 as long. Up to 700x16384
// swapped tiles were faster, between two; where the limits lie in between is not measured.
bool is_exchanged_beside(const GemmCall& call, int nranks, Reduction reduction) {
  constexpr int64_t MANY_ELEMENTS = 12'000'000;
  constexpr int64_t TILE_ROWS = 128;
  if (nranks <= 2 || reduction == Reduction::one_shot || call.m * call.n <= MANY_ELEMENTS) return false;
  const int64_t rows = ceil_div(call.m, nranks);
  return rows > TILE_ROWS && 4 * rows >= 3 * round_up(rows, TILE_ROWS);
}

// Products of some hundred rows in tiles of any multiple of eight of them, whoever owns these, in clusters. Not
// of so few bytes that packets save more than the better tile.
void choose_swapped_tile(const GemmCall& call, int nranks, int num_sms, const GemmClusterLimits& limits,
                         RankGemmPlan& to) {
  constexpr int64_t FEW_ROWS = 128, MOST_ROWS = 1024;
  constexpr double PACKETS_US = 4;
  if (call.m <= FEW_ROWS || call.m > MOST_ROWS || call.n == 0 || element_bytes(call.comm_dtype) != 2) return;
  if (call.tuning.tile_m > 0 || call.tuning.tile_n > 0 || call.tuning.compute_ctas > 0) return;
  if (is_exchanged_beside(call, nranks, to.reduction)) return;
  const GemmShape shape = common_shape(call);
  GemmPlan best = gemm_swapped_cluster_plan(shape, RANK_SWAPPED_TILES, 1, num_sms, limits);
  const GemmPlan waves = gemm_swapped_waves_plan(shape, RANK_SWAPPED_TILES, false, num_sms, limits);
  if (waves.is_swapped && (!best.is_swapped || waves.predicted_us < best.predicted_us)) best = waves;
  const bool has_packets =
      to.is_tagged || (to.reduction != Reduction::scatter &&
                       exchanged_bytes(call, nranks, to.reduction) <= MAX_TAGGED_BYTES_OF_ALLREDUCE);
  if (!best.is_swapped || best.predicted_us + (has_packets ? PACKETS_US : 0) >= to.gemm.predicted_us) return;
  const bool one_shot = to.reduction == Reduction::one_shot;
  to.gemm = best;
  to.merged = true;
  to.is_tagged = false;
  to.packet_slot_bytes = 0;
  to.num_owners = 1;
  to.splits_rows = !one_shot;
  to.splits_columns = false;
  to.merged_rows = {static_cast<int>(call.m), static_cast<int>(one_shot ? call.m : ceil_div(call.m, nranks)),
                    static_cast<int>(ceil_div(call.n, gemm_reduce_scatter::UNIT_COLUMNS))};
  to.swapped_tiles = {static_cast<int>(ceil_div(call.n, best.cluster_rows())) * best.cluster.m,
                      static_cast<int>(ceil_div(call.m, best.cluster_columns())) * best.cluster.n,
                      gemm_plan_tile_columns(shape, best), best.block_m};
}

// Who owns what, and the tile, which all ranks must choose alike, for partial sums travel in it; but k is
// each rank's own.
void choose_owners(const GemmCall& call, int nranks, int num_sms, const GemmClusterLimits& limits,
                   RankGemmPlan& to) {
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
  if (!to.is_between_nodes) choose_swapped_tile(call, nranks, num_sms, limits, to);
  if (to.gemm.is_swapped) {
    to.tile_rows = 1;
    return;
  }
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

// Flags of tiles, where the partial sums of one lie one after another, and how they travel.
Status plan_slots(const GemmCall& call, int nranks, int num_sms, RankGemmPlan& to) {
  // Of merged tiles nothing comes there, and no flags are raised.
  to.slot_bytes =
      to.merged ? 0 : to.tiles_per_owner * to.gemm.block_m * to.gemm.block_n * element_bytes(call.comm_dtype);
  const bool two_shot = to.reduction == Reduction::two_shot;
  const int64_t slabs = to.gemm.block_m / 16;
  const int64_t direct_flags = to.merged ? 0 : nranks * to.tiles_per_owner * slabs;
  const int64_t direct_gather_flags = two_shot ? direct_flags * (to.gemm.block_n / 32) : 0;
  to.is_direct = to.reduction == Reduction::one_shot ||
                 (!to.is_between_nodes && to.num_owners * to.tiles_per_owner <= MAX_DIRECT_TILES * num_sms &&
                  direct_flags + direct_gather_flags <= kFlagsPerBank);
  to.num_partial_flags = to.is_direct ? direct_flags : nranks * to.tiles_per_owner;
  const int64_t flags = to.num_partial_flags + (to.is_direct ? direct_gather_flags
                                                : two_shot   ? nranks * to.tiles_per_owner
                                                             : 0);
  if (flags > kFlagsPerBank) return too_many_flags(call, flags);
  to.plan.chunk_rows = to.gemm.block_m;
  to.plan.num_chunks = static_cast<int>(std::max<int64_t>(1, to.tiles_per_owner));
  to.plan.chunk_bytes = int64_t{to.gemm.block_m} * to.gemm.block_n * element_bytes(call.comm_dtype);
  return {};
}

// The same of swapped tiles, which have a flag each, as each warp has for what it has finished.
Status plan_panels(const GemmCall& call, int nranks, RankGemmPlan& to) {
  constexpr int64_t MOST_WARPS = 8;  // of a CTA, that finish sums
  const gemm_reduce_scatter::PartialPanels panels = {to.merged_rows.max_rows};
  to.slot_bytes = panels.bytes(to.merged_rows.num_column_units);
  to.is_direct = true;
  to.num_partial_flags = int64_t{nranks} * to.swapped_tiles.size();
  const int64_t flags = to.num_partial_flags + nranks * to.gemm.num_ctas() * MOST_WARPS;
  if (flags > kFlagsPerBank) return too_many_flags(call, flags);
  to.plan.chunk_rows = to.swapped_tiles.tile_rows;
  to.plan.num_chunks = to.swapped_tiles.size();
  to.plan.chunk_bytes = int64_t{to.swapped_tiles.tile_rows} * to.gemm.block_m * element_bytes(call.comm_dtype);
  return {};
}

}  // namespace

Status plan_reduction(const GemmCall& call, int rank, int nranks, int num_sms, const GemmClusterLimits& limits,
                      RankGemmPlan& to) {
  num_sms = compute_ctas(call, num_sms);
  choose_owners(call, nranks, num_sms, limits, to);
  if (to.gemm.block_m == 0) return {};
  const bool is_swapped = to.gemm.is_swapped;
  const bool one_shot = to.reduction == Reduction::one_shot;
  const bool reduces_all = call.op == MK_OPERATOR_GEMM_ALLREDUCE;
  to.gather_begin = round_up(nranks * max_slot_bytes_of_owners(call, nranks), 128);
  to.gather_pitch = round_up(call.n * element_bytes(call.out_dtype), 16);
  to.area_bytes = to.gather_begin + (reduces_all ? call.m * to.gather_pitch : 0);
  if (reduces_all) {
    // An area prepared for large calls must serve every smaller one, which may be one-shot.
    to.area_bytes = std::max(to.area_bytes, nranks * max_one_shot_slot_bytes(call, nranks));
    if (one_shot) to.area_bytes = std::max(to.area_bytes, nranks * max_slot_bytes(call.m, call));
  }
  fill_public_plan(call, nranks, is_swapped ? to.gemm.num_ctas() : num_sms, to);
  to.plan.algorithm = one_shot      ? MK_ALGORITHM_ONE_SHOT
                      : reduces_all ? MK_ALGORITHM_TWO_SHOT
                                    : MK_ALGORITHM_AUTO;
  MK_RETURN_IF_ERROR(is_swapped ? plan_panels(call, nranks, to) : plan_slots(call, nranks, num_sms, to));
  const int64_t row_bytes = call.n * element_bytes(call.comm_dtype);
  const int64_t own_rows = rows_count(call.m, nranks, rank);
  const int64_t owner_columns = int64_t{to.owner_tiles.num_n_tiles} * to.gemm.block_n;
  const int64_t own_elements =
      to.splits_columns ? call.m * std::clamp<int64_t>(call.n - rank * owner_columns, 0, owner_columns)
                        : own_rows * call.n;
  to.plan.link_bytes = one_shot ? call.m * row_bytes * (nranks - 1)
                                : call.m * row_bytes - own_elements * element_bytes(call.comm_dtype);
  if (to.reduction == Reduction::two_shot)
    to.plan.link_bytes += own_elements * element_bytes(call.out_dtype) * (nranks - 1);
  if (is_swapped) return {};
  choose_packets(call, nranks, to);
  // Partial sums leave while the others' tiles are computed. An all-reduce has no such time to spare.
  to.is_paced = to.reduction == Reduction::scatter && leaves_links_free(call, to);
  to.sums_beside = !to.is_between_nodes && has_time_to_sum(call, nranks, to);
  return {};
}

namespace {

// CTAs that sum what others of the node compute for owners elsewhere, of `num_sms`. The tile is chosen
// without regard to them: not all ranks have as much to sum, and a rank's k is its own.
int choose_reduce_ctas(const GemmCall& call, const TopologyView& nodes, int num_sms, const RankGemmPlan& to) {
  constexpr double BYTES_PER_US_OF_CTA = 60e3;  // read and written; three suffice for 400 Gb/s
  constexpr int MAX_REDUCE_CTAS = 32;
  const int num_local = nodes.local_nranks();
  const int num_relayed = make_rank_order(nodes).num_relayed;
  if (num_local == 1 || num_relayed == 0) return 0;
  if (call.tuning.reduce_ctas > 0) return std::min(call.tuning.reduce_ctas, num_sms - 1);
  const double sum_bytes = static_cast<double>(num_relayed) *
                           static_cast<double>(ceil_div(call.m, nodes.nranks) * call.n) *
                           element_bytes(call.comm_dtype);
  // They come while the product works for owners elsewhere; faster than the network nothing is gained.
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
  const int block_columns =
      std::max(1, static_cast<int>(ceil_div(chunks.per_row(), rounds)) * chunks.chunk_tiles);
  near = {near.num_owners,   near.tile_rows, near.num_n_tiles,
          chunks.group_rows, block_columns,  chunks.group_rows};
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

}  // namespace

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

}  // namespace mk
