// SPDX-License-Identifier: MIT
// Which plan a product gets: every tile has a worker, no more CTAs than there may be, clusters that split the
// inner dimension where few rows leave most SMs without a tile, and pairs where tiles are small.
#include "kernels/gemm/gemm_plan.h"

#include <initializer_list>
#include <utility>

#include "kernels/device/gemm_partials_layout.h"
#include "kernels/device/tile_scheduler.h"
#include "test/support/catch.h"

namespace {

using namespace mk;

constexpr int NUM_SMS = 132;
constexpr GemmClusterLimits H200 = {{0, 0, 66, 39, 30}};

GemmShape shape_of(int64_t m, int64_t n, int64_t k) {
  GemmShape shape;
  shape.m = m;
  shape.n = n;
  shape.k = k;
  return shape;
}

bool walks(const GemmPlan& plan) {
  return plan.is_ping_pong_pair() ||
         (plan.is_swapped && gemm_swapped_tile_walks({plan.block_m, plan.block_n, plan.cluster}));
}

}  // namespace

TEST_CASE("a plan keeps to its SMs, its clusters run at a time, and each has something to multiply") {
  for (const int64_t m : {0, 1, 16, 64, 100, 128, 256, 300, 512, 513, 4096}) {
    for (const int64_t n : {0, 8, 300, 2560, 8192, 14336}) {
      for (const int64_t k : {0, 8, 512, 2048, 8192}) {
        for (const int num_sms : {1, 3, 17, 100, NUM_SMS}) {
          const GemmShape shape = shape_of(m, n, k);
          const GemmPlan plan = gemm_plan(shape, num_sms, H200);
          INFO("m " << m << " n " << n << " k " << k << " on " << num_sms);
          CHECK(plan.num_workers >= 1);
          CHECK(plan.num_ctas() <= num_sms);
          if (plan.num_cluster_ctas() == 1) continue;
          const int64_t tiles = gemm_plan_num_tiles(shape, plan);
          CHECK(plan.num_workers <= H200.at_a_time[plan.num_cluster_ctas()]);
          CHECK(plan.workspace_bytes <= gemm_max_workspace_bytes(num_sms));
          CHECK(plan.num_streamk_tiles <= tiles);
          if (plan.num_streamk_tiles == 0) CHECK(plan.num_workers <= tiles);
          if (!walks(plan)) CHECK((plan.num_workers == tiles && plan.num_streamk_tiles == 0));
          if (plan.num_split_ctas > 1) CHECK(k >= int64_t{plan.num_split_ctas} * 4 * GEMM_BLOCK_K);
          if (plan.cluster.m == 2) CHECK(m > plan.block_m);
        }
      }
    }
  }
}

TEST_CASE("few rows on a narrow weight are split, and the more rows the larger the tile") {
  const GemmPlan decode = gemm_plan(shape_of(16, 2560, 8192), NUM_SMS, H200);
  CHECK((decode.block_n == 64 && decode.num_split_ctas == 2));
  const GemmPlan more = gemm_split_plan(shape_of(128, 2560, 8192), NUM_SMS, H200);
  CHECK((more.block_n == 128 && more.num_split_ctas == 4));
}

TEST_CASE("some hundred rows on a narrow weight are in clusters that share what they load") {
  const GemmPlan few = gemm_plan(shape_of(256, 2560, 8192), NUM_SMS, H200);
  CHECK((few.is_swapped && few.cluster == GemmCluster{4, 1} && few.num_split_ctas == 1));
  const GemmPlan split = gemm_pair_plan(shape_of(256, 2560, 8192), NUM_SMS, H200);
  CHECK((split.cluster == GemmCluster{2, 1} && split.block_n == 96 && split.num_split_ctas == 2));
  const GemmPlan whole = gemm_pair_plan(shape_of(512, 2560, 8192), NUM_SMS, H200);
  CHECK((whole.cluster == GemmCluster{2, 1} && whole.block_n == 96 && whole.num_split_ctas == 1));
  CHECK(gemm_plan(shape_of(512, 2560, 8192), NUM_SMS, H200).in_clusters());
  const GemmPlan wide = gemm_plan(shape_of(1024, 2560, 8192), NUM_SMS, H200);
  CHECK((wide.in_clusters() && wide.block_n == 160));
  // One of each pair would have no rows.
  CHECK(gemm_plan(shape_of(384, 2560, 8192), NUM_SMS, H200).cluster != GemmCluster{2, 1});
  // More than a wave.
  const GemmPlan tall = gemm_plan(shape_of(2048, 2560, 8192), NUM_SMS, H200);
  CHECK((!tall.in_clusters() && tall.block_m == 256));
}

TEST_CASE("the tallest tile has one wave, or many k-steps, to pay for its last rows") {
  CHECK(gemm_plan(shape_of(8192, 8192, 2048), NUM_SMS, H200).block_m == 128);
  CHECK(gemm_plan(shape_of(4096, 4096, 4096), NUM_SMS, H200).block_m == 128);
  CHECK(gemm_plan(shape_of(8192, 8192, 7168), NUM_SMS, H200).block_m == 128);
}

TEST_CASE("a weight of a tile for every SM, many rows, and A transposed are not split") {
  CHECK(gemm_plan(shape_of(16, 8192, 2048), NUM_SMS, H200).num_split_ctas == 1);
  CHECK(gemm_plan(shape_of(128, 8192, 7168), NUM_SMS, H200).num_split_ctas == 1);
  CHECK(gemm_plan(shape_of(4096, 4096, 4096), NUM_SMS, H200).num_split_ctas == 1);
  CHECK(gemm_plan(shape_of(1024, 2560, 8192), NUM_SMS, H200).num_split_ctas == 1);
  for (const int64_t m : {16, 512}) {
    GemmShape transposed = shape_of(m, 2560, 8192);
    transposed.a_transposed = true;
    CHECK(gemm_plan(transposed, NUM_SMS, H200).num_cluster_ctas() == 1);
  }
}

TEST_CASE("few tiles of many k-steps are cut evenly where A is transposed, pairs too") {
  const auto chosen = [](int64_t m, int64_t n, int64_t k, const GemmClusterLimits& limits) {
    GemmShape shape = shape_of(m, n, k);
    shape.a_transposed = true;
    return gemm_plan(shape, NUM_SMS, limits);
  };
  const auto is_cut_evenly = [](const GemmPlan& plan, int tiles, int pieces) {
    return plan.num_streamk_tiles == tiles && plan.num_workers == tiles * pieces;
  };
  CHECK(is_cut_evenly(chosen(512, 512, 8192, H200), 32, 4));
  CHECK(is_cut_evenly(chosen(64, 4096, 8192, H200), 64, 2));
  // Where rows do not begin with a line, low tiles load too much.
  const GemmPlan pairs = chosen(1000, 1000, 4096, H200);
  CHECK((pairs.is_ping_pong_pair() && is_cut_evenly(pairs, 32, 2)));
  CHECK(chosen(1000, 1000, 4096, {}).num_cluster_ctas() == 1);
  CHECK(chosen(3592, 8200, 4096, H200).block_m == chosen(3584, 8192, 4096, H200).block_m);
  CHECK(chosen(1024, 1024, 4096, H200).num_streamk_tiles == 0);
  CHECK(is_cut_evenly(chosen(512, 512, 2048, H200), 64, 2));
  CHECK(chosen(512, 512, 1024, H200).num_streamk_tiles == 0);
}

TEST_CASE("a wave of tiles of 64 rows, where rows begin with a line and k is not large") {
  const auto is_low = [](int64_t m, int64_t n, int64_t k) {
    const GemmPlan plan = gemm_plan(shape_of(m, n, k), NUM_SMS, H200);
    return plan.block_m == 64 && plan.block_n == 128 && !plan.in_clusters() && plan.num_streamk_tiles == 0;
  };
  CHECK(is_low(1024, 1024, 4096));
  CHECK(is_low(512, 2048, 2048));
  CHECK(is_low(2048, 512, 1024));
  CHECK_FALSE(is_low(1000, 1024, 4096));
  CHECK_FALSE(is_low(1024, 1000, 4096));
  CHECK_FALSE(is_low(1024, 1024, 4104));
  CHECK_FALSE(is_low(1024, 1024, 8192));
  CHECK_FALSE(is_low(1024, 2048, 2048));
}

TEST_CASE("where it is not known how many clusters run at a time, there are none") {
  CHECK(gemm_plan(shape_of(16, 2560, 8192), NUM_SMS, {}).num_cluster_ctas() == 1);
  CHECK(gemm_plan(shape_of(512, 2560, 8192), NUM_SMS, {}).num_cluster_ctas() == 1);
  GemmClusterLimits few = H200;
  few.at_a_time[2] = 39;
  CHECK(gemm_plan(shape_of(16, 2560, 8192), NUM_SMS, few).num_split_ctas != 2);
}

TEST_CASE("where a CTA has many thousand k-steps, CTAs are kept in step, and the workspace has their count") {
  const GemmPlan shorter = gemm_plan(shape_of(8192, 28672, 8192), NUM_SMS, H200);
  GemmPlan longer = gemm_plan(shape_of(32768, 16384, 32768), NUM_SMS, H200);
  const auto near_k_steps = [](const GemmShape& shape, const GemmPlan& plan) {
    const auto tiles = [](int64_t size, int block) { return static_cast<int>((size + block - 1) / block); };
    TileSchedule schedule = {tiles(shape.m, plan.block_m), tiles(shape.n, plan.block_n),
                             tiles(shape.k, GEMM_BLOCK_K), plan.num_workers,
                             plan.num_streamk_tiles,       plan.group_m};
    schedule.keep_in_step_from(OUT_OF_STEP_K_STEPS);
    return schedule.near_k_steps;
  };
  CHECK(near_k_steps(shape_of(8192, 28672, 8192), shorter) == 0);
  CHECK(near_k_steps(shape_of(32768, 16384, 32768), longer) > 0);
  const size_t flags_bytes = PartialsLayout(longer.num_ctas(), longer.block_m, longer.block_n).flags_bytes;
  CHECK(longer.workspace_bytes >= flags_bytes);
  longer = gemm_plan_with(shape_of(32768, 16384, 32768), NUM_SMS, {128, 256, false}, -1);
  CHECK(longer.workspace_bytes == flags_bytes);
  CHECK(gemm_plan_with(shape_of(8192, 28672, 8192), NUM_SMS, {128, 256, false}, -1).workspace_bytes == 0);
}

TEST_CASE("no launch leaves partial tiles where another has its flags") {
  char workspace[1] = {};
  for (const int num_ctas : {1, 2, 66, 120, NUM_SMS, PartialsLayout::MAX_CTAS}) {
    const PartialsLayout layout(num_ctas, 64, 64);
    const auto at = [&](const void* address) { return static_cast<const char*>(address) - workspace; };
    CHECK(at(layout.block(workspace, 0, 0)) >= static_cast<ptrdiff_t>(PartialsLayout::FLAGS_BYTES));
    CHECK(at(layout.flag(workspace, num_ctas - 1, PartialsLayout::MAX_BLOCKS - 1) + 1) <=
          at(PartialsLayout::num_near(workspace, num_ctas)));
    CHECK(at(PartialsLayout::num_near(workspace, num_ctas) + 1) <=
          static_cast<ptrdiff_t>(PartialsLayout::FLAGS_BYTES));
    CHECK(layout.num_bytes >= PartialsLayout::FLAGS_BYTES + static_cast<size_t>(num_ctas) * 64 * 64 * 4);
  }
}

TEST_CASE("what a tile's stores take longer of an output that is fp32 or added to is counted") {
  GemmShape shape = shape_of(3584, 8192, 1024);
  const GemmPlan large = gemm_plan_with(shape, NUM_SMS, {128, 256, false}, -1);
  const GemmPlan pair = gemm_plan_with(shape, NUM_SMS, {128, 128, true, {1, 2}}, -1);
  CHECK(gemm_plan_exposed_us(shape, large) == 0);
  double least_large = 0, least_pair = 0;
  for (const auto& [out, accumulate] :
       {std::pair{GemmType::fp32, false}, {GemmType::bf16, true}, {GemmType::fp32, true}}) {
    shape.out_type = out;
    shape.accumulate = accumulate;
    CHECK(gemm_plan_exposed_us(shape, large) > least_large);
    least_large = gemm_plan_exposed_us(shape, large);
    // The other warpgroup multiplies meanwhile.
    CHECK(gemm_plan_exposed_us(shape, pair) < gemm_plan_exposed_us(shape, large));
    if (out == GemmType::fp32) {
      CHECK(gemm_plan_exposed_us(shape, pair) > least_pair);
      least_pair = gemm_plan_exposed_us(shape, pair);
    }
  }
}

TEST_CASE("many rows go to pairs in ping-pong, but where these would fall out of step") {
  for (const bool a_transposed : {false, true}) {
    GemmShape shape = shape_of(3584, 8192, 1024);
    shape.a_transposed = a_transposed;
    const GemmPlan plan = gemm_plan(shape, NUM_SMS, H200);
    CHECK((plan.is_ping_pong_pair() && plan.num_workers == H200.at_a_time[2]));
    CHECK_FALSE(gemm_plan(shape, NUM_SMS, {}).in_clusters());
    shape.k = 256;
    CHECK(gemm_plan(shape, NUM_SMS, H200).is_ping_pong_pair());
  }
  CHECK_FALSE(gemm_plan(shape_of(32768, 16384, 32768), NUM_SMS, H200).is_ping_pong_pair());
  CHECK_FALSE(gemm_plan(shape_of(512, 8192, 2048), NUM_SMS, H200).is_ping_pong_pair());
  // Of fewer SMs a pair has two, and the last of an odd number stays idle.
  CHECK(gemm_plan_with(shape_of(3584, 8192, 1024), 131, {128, 128, true, {1, 2}}, -1).num_ctas() == 130);
}

TEST_CASE("where a row or a few of tiles leave others half empty, operands are in each other's place") {
  const GemmShape few = shape_of(150, 28672, 8192);
  const GemmPlan plan = gemm_plan(few, NUM_SMS, H200);
  CHECK(plan.is_swapped);
  CHECK(plan.block_n >= few.m);
  CHECK(gemm_plan_num_tiles(few, plan) == 112);  // 256 columns each, and all rows
  CHECK(plan.num_workers == 112);
  CHECK(gemm_plan(shape_of(640, 8192, 14336), NUM_SMS, H200).is_swapped);
  CHECK_FALSE(gemm_plan(shape_of(128, 28672, 8192), NUM_SMS, H200).is_swapped);
  CHECK_FALSE(gemm_plan(shape_of(4096, 4096, 4096), NUM_SMS, H200).is_swapped);
  GemmShape transposed = few;
  transposed.a_transposed = true;
  CHECK_FALSE(gemm_plan(transposed, NUM_SMS, H200).is_swapped);
}

TEST_CASE("some hundred rows that are no multiple of 64 are swapped, in clusters that share what they load") {
  struct Expected {
    GemmShape shape;
    int block_m, block_n;
    GemmCluster cluster;
  };
  for (const Expected& expected : {Expected{shape_of(130, 8192, 7168), 128, 72, {1, 2}},
                                   Expected{shape_of(300, 8192, 7168), 128, 152, {1, 2}},
                                   Expected{shape_of(420, 8192, 8192), 128, 216, {1, 2}},
                                   Expected{shape_of(600, 8192, 8192), 256, 152, {1, 2}},
                                   Expected{shape_of(160, 14336, 8192), 128, 160, {4, 1}},
                                   Expected{shape_of(350, 2560, 8192), 64, 120, {4, 1}}}) {
    const GemmPlan plan = gemm_plan(expected.shape, NUM_SMS, H200);
    CAPTURE(expected.shape.m, expected.shape.n, gemm_plan_kind(plan));
    CHECK((plan.is_swapped && plan.num_split_ctas == 1 && plan.cluster == expected.cluster));
    CHECK((plan.block_m == expected.block_m && plan.block_n == expected.block_n));
  }
  const GemmPlan split =
      gemm_swapped_cluster_plan(shape_of(160, 2560, 8192), GEMM_SWAPPED_TILES, MAX_SPLIT_CTAS, NUM_SMS, H200);
  CHECK((split.is_swapped && split.num_split_ctas == 4 && !split.in_clusters()));
  // Whose tiles are full, or of which another has the clusters' SMs.
  CHECK_FALSE(gemm_plan(shape_of(512, 8192, 8192), NUM_SMS, H200).is_swapped);
  CHECK(gemm_plan(shape_of(300, 8192, 7168), 100, H200).num_ctas() <= 100);
  CHECK_FALSE(gemm_plan(shape_of(300, 8192, 7168), NUM_SMS, {}).in_clusters());
}

TEST_CASE("clusters have swapped tiles one after the other, and cut along k what is less than a wave of them") {
  const GemmShape whole = shape_of(300, 57344, 4096), cut = shape_of(420, 14336, 8192);
  const GemmPlan of_whole = gemm_plan(whole, NUM_SMS, H200), of_cut = gemm_plan(cut, NUM_SMS, H200);
  for (const GemmPlan& plan : {of_whole, of_cut}) {
    CHECK((walks(plan) && plan.cluster == GemmCluster{1, 2}));
    CHECK((plan.num_workers == 66 && plan.num_ctas() == NUM_SMS));
  }
  CHECK(gemm_plan_num_tiles(whole, of_whole) == 448);  // of 128 columns, and all rows in two
  CHECK((of_whole.num_streamk_tiles == 0 && of_whole.workspace_bytes == 0));
  CHECK(gemm_plan_num_tiles(cut, of_cut) == 112);
  CHECK(of_cut.num_streamk_tiles > 0);
  CHECK(of_cut.workspace_bytes == PartialsLayout(NUM_SMS, of_cut.block_m, of_cut.block_n).num_bytes);
  CHECK(gemm_plan(whole, 100, H200).num_ctas() <= 100);
  CHECK_FALSE(gemm_plan(whole, NUM_SMS, {}).in_clusters());
  // With a wave or less of them there is another plan for it.
  CHECK_FALSE(gemm_swapped_waves_plan(shape_of(300, 8192, 7168), {{{128, 152, {1, 2}}}}, true, NUM_SMS, H200)
                  .is_swapped);
}

TEST_CASE("a few tiles of many k-steps are cut, each among as many CTAs or clusters") {
  const GemmPlan alone = gemm_plan(shape_of(512, 2048, 14336), NUM_SMS, H200);
  CHECK((alone.block_m == 128 && alone.block_n == 192 && !alone.in_clusters()));
  CHECK((alone.num_streamk_tiles == 44 && alone.num_workers == 3 * 44));
  const GemmPlan clusters = gemm_plan(shape_of(136, 4096, 14336), NUM_SMS, H200);
  CHECK((walks(clusters) && clusters.cluster == GemmCluster{1, 2}));
  CHECK((clusters.num_streamk_tiles == 32 && clusters.num_workers == 2 * 32));
  CHECK(clusters.workspace_bytes ==
        PartialsLayout(clusters.num_ctas(), clusters.block_m, clusters.block_n).num_bytes);
  // Of few k-steps there is too little to share.
  CHECK(gemm_plan(shape_of(136, 2048, 2048), NUM_SMS, H200).num_streamk_tiles == 0);
  // Whatever the number of SMs or clusters.
  int num_cut = 0;
  for (const int64_t m : {65, 129, 200, 256, 300, 512, 1024}) {
    for (const int64_t n : {8, 300, 1024, 2048, 4096}) {
      for (const int64_t k : {500, 2048, 8192, 28672}) {
        for (const int num_sms : {1, 5, 17, 100, NUM_SMS}) {
          const GemmShape shape = shape_of(m, n, k);
          const GemmPlan plan = gemm_plan(shape, num_sms, H200);
          const bool is_all_cut =
              plan.num_streamk_tiles > 0 && plan.num_streamk_tiles == gemm_plan_num_tiles(shape, plan);
          if (!is_all_cut || plan.num_workers % plan.num_streamk_tiles != 0) continue;
          INFO("m " << m << " n " << n << " k " << k << " on " << num_sms);
          ++num_cut;
          CHECK(plan.num_ctas() <= num_sms);
          CHECK(k / GEMM_BLOCK_K >= 4 * (plan.num_workers / plan.num_streamk_tiles));
          CHECK(plan.workspace_bytes <= gemm_max_workspace_bytes(num_sms));
        }
      }
    }
  }
  CHECK(num_cut > 100);
}

TEST_CASE("swapped tiles of a cluster share the rows out evenly") {
  const GemmSwappedTile pair = {128, 152, {1, 2}};
  const auto columns_of = [&](int64_t m, GemmSwappedTile tile) {
    const GemmShape shape = shape_of(m, 8192, 7168);
    return gemm_plan_tile_columns(shape, gemm_swapped_cluster_plan_with(shape, tile, 1));
  };
  CHECK(columns_of(300, pair) == 152);
  CHECK(columns_of(200, pair) == 104);  // 100 each, in eights
  CHECK(columns_of(1, pair) == 8);
  CHECK(columns_of(305, pair) == 80);  // two pairs
  CHECK(columns_of(230, {64, 104, {4, 1}}) == 80);
  for (int64_t m = 1; m < 700; ++m) {
    const int columns = columns_of(m, pair);
    const int64_t tiles = (m + 303) / 304 * 2;
    CHECK((columns <= 152 && columns % 8 == 0 && columns * tiles >= m && columns * tiles < m + 8 * tiles));
  }
  const GemmShape whole = shape_of(300, 8192, 7168);
  CHECK(gemm_plan_tile_columns(whole, gemm_plan_with(whole, NUM_SMS, {128, 192, false}, -1)) == 192);
}

TEST_CASE("the parts of a shared operand cover it") {
  for (const int num_ctas : {2, 4}) {
    for (int length = 8; length <= 256; length += 8) {
      const int box = shared_box_rows(length, num_ctas);
      CAPTURE(num_ctas, length, box);
      CHECK((box % 8 == 0 && box <= length && box * num_ctas >= length));
      CHECK(box * num_ctas < length + 8 * num_ctas);
    }
  }
}

TEST_CASE("boxes of TMA make up a tile, and have hardly more of what is outside than there need be") {
  for (const int block : {8, 16, 24, 40, 64, 80, 96, 128, 160, 192, 224, 256}) {
    for (int64_t rows = 0; rows <= 3 * block + 1; ++rows) {
      const int box = stage_box_rows(rows, block);
      CAPTURE(block, rows, box);
      REQUIRE(box >= 8);
      REQUIRE(box <= 256);
      REQUIRE(box % 8 == 0);
      if (rows <= block) {
        // One box, of the rows that there are.
        REQUIRE(box >= rows);
        REQUIRE(box < rows + 8 + 8 * (rows == 0));
        continue;
      }
      REQUIRE(block % box == 0);
      const int64_t outside = (box - rows % box) % box;
      REQUIRE(outside < 64);
      if (rows % block == 0) REQUIRE(box == block);
    }
  }
  CHECK(stage_box_rows(300, 128) == 64);   // the last tile's 44 rows in one of two
  CHECK(stage_box_rows(1026, 128) == 32);  // its 2 rows in one of four
  CHECK(stage_box_rows(500, 128) == 128);  // 116 of 128
  CHECK(stage_box_rows(4000, 128) == 32);
}
