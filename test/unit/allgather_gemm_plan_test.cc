// SPDX-License-Identifier: MIT
// The plan of all-gathers between GPUs of a node.
#include <algorithm>
#include <random>
#include <vector>

#include "kernels/device/rank_gemm_tiles.h"
#include "kernels/ops/allgather_gemm/push_units.h"
#include "kernels/topology_arrays.h"
#include "rank_gemm_plans.h"

using namespace mk;
using namespace mk::test;

TEST_CASE("mode WGRAD: what the ranks agree on follows from rows and columns of X") {
  std::mt19937 random(2);
  const auto below = [&](int64_t limit) { return std::uniform_int_distribution<int64_t>(0, limit)(random); };
  for (int turn = 0; turn < 2000; ++turn) {
    const int nranks = 2 + static_cast<int>(below(6));
    GemmCall largest = make_call(MK_OPERATOR_ALLGATHER_GEMM, below(70000), below(9000), 0);
    largest.mode = MK_ALLGATHER_WGRAD;
    GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, below(largest.m), below(largest.n), below(9000));
    call.mode = MK_ALLGATHER_WGRAD;
    if (turn % 3 == 0) call.m = std::min<int64_t>(largest.m, below(300));
    GemmCall other = call;  // of another rank, whose columns of dY are its own
    other.k = below(9000);
    other.b_layout = MK_LAYOUT_NK;
    const RankGemmPlan plan = plan_of(call, 0, nranks);
    const RankGemmPlan theirs = plan_of(other, nranks - 1, nranks);
    INFO(nranks << " ranks, m " << call.m << ", n " << call.n << ", k " << call.k << " and " << other.k);
    CHECK(plan.area_bytes == call.m * round_up(2 * call.n, 16));
    CHECK(plan.area_bytes <= plan_of(largest, 0, nranks).area_bytes);
    CHECK(theirs.area_bytes == plan.area_bytes);
    CHECK(theirs.plan.chunk_rows == plan.plan.chunk_rows);
    CHECK(theirs.plan.num_chunks == plan.plan.num_chunks);
    CHECK(int64_t{plan.plan.num_chunks} * plan.plan.chunk_rows * nranks >= call.m);
    CHECK(theirs.num_panels == plan.num_panels);
    CHECK(theirs.panel_steps == plan.panel_steps);
    CHECK(int64_t{plan.num_panels} * plan.panel_steps * 64 >= call.n);
    CHECK(int64_t{plan.num_panels - 1} * plan.panel_steps * 64 < std::max<int64_t>(1, call.n));
    CHECK(plan.panel_steps * 64 % 256 == 0);  // no tile is in two panels
    CHECK(plan.num_panels <= allgather_gemm::MAX_PANELS);
    CHECK(plan.plan.chunk_rows % 64 == 0);
    CHECK(plan.tile_rows == ceil_div(call.k, plan.gemm.block_m));
    if (plan.gemm.num_streamk_tiles > 0) CHECK(plan.gemm.num_workers == plan.plan.compute_ctas);
    CHECK(plan.merged == (call.m > 0 && ceil_div(call.m, nranks) < 64));
    CHECK(theirs.merged == plan.merged);
  }
}

TEST_CASE("mode WGRAD: all CTAs push, and those that are asked to do nothing else compute afterwards") {
  GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, 8192, 8192, 14336);
  call.mode = MK_ALLGATHER_WGRAD;
  CHECK(plan_of(call, 0, 2).plan.copy_ctas == 0);
  CHECK(plan_of(call, 0, 4).plan.copy_ctas == 0);
  call.k = 1200;  // the links of more than two are busy for as long as the product takes
  CHECK(plan_of(call, 0, 2).plan.copy_ctas == 0);
  CHECK(plan_of(call, 0, 4).plan.copy_ctas > 0);
  // The case of operators_wgrad_test; each rank has its own k.
  for (const auto& [nranks, num_sms] : {std::pair{2, 132}, {4, 66}, {4, 33}}) {
    for (int rank = 0; rank < nranks; ++rank) {
      GemmCall late = make_call(MK_OPERATOR_ALLGATHER_GEMM, 520, 6152, 1160 + 24 * rank);
      late.mode = MK_ALLGATHER_WGRAD;
      late.out_dtype = MK_DTYPE_FP32;
      late.tuning.copy_ctas = 10;
      late.tuning.tile_m = late.tuning.tile_n = 128;
      INFO(nranks << " ranks, " << num_sms << " SMs, rank " << rank);
      CHECK(rank_gemm_plan(late, rank, nranks, num_sms).value().num_late == 10);
    }
  }
}

TEST_CASE("few rows: a short last wave is cut, a longer one spread, and tiles are narrow rather than few") {
  const auto of = [](int64_t m, int64_t n, int64_t k, int nranks) {
    return plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, m, n, k), 0, nranks);
  };
  for (const int64_t m : {16, 32, 64}) {
    for (const int nranks : {2, 4}) {
      INFO(m << " rows, " << nranks << " ranks");
      const RankGemmPlan spread = of(m, 28672, 8192, nranks);  // 224 tiles of 64 x 128, 92 in the last wave
      CHECK(spread.gemm.block_m == 64);
      CHECK(spread.gemm.num_streamk_tiles == 0);
      CHECK(spread.spreads_tiles);
      const RankGemmPlan cut = of(m, 20480, 8192, nranks);  // 160, 28
      CHECK(cut.gemm.num_streamk_tiles == 28);
      CHECK(cut.gemm.num_workers == NUM_SMS);
      CHECK(!cut.spreads_tiles);
      CHECK(!of(m, 14336, 8192, nranks).spreads_tiles);        // one wave
      const RankGemmPlan narrow = of(m, 10240, 8192, nranks);  // 160 tiles of 64 x 64, and not 80 of 64 x 128
      CHECK(narrow.gemm.block_n == 64);
      CHECK(narrow.gemm.num_streamk_tiles == 28);
      CHECK(of(m, 10240, 2048, nranks).gemm.num_streamk_tiles == 0);
    }
  }
  CHECK(!of(256, 28672, 8192, 2).spreads_tiles);
}

TEST_CASE("tiles of few k-steps are large, and take no turns in storing") {
  for (const int64_t m : {64, 512}) {
    GemmCall gradient = make_call(MK_OPERATOR_ALLGATHER_GEMM, m, 8192, 3584);
    gradient.mode = MK_ALLGATHER_WGRAD;
    CHECK(!plan_of(gradient, 0, 2).gemm.ping_pong);
    CHECK(plan_of(gradient, 0, 2).plan.tile_n == 256);
  }
  CHECK(!plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, 8192, 14336, 256), 0, 2).gemm.ping_pong);
}

TEST_CASE("CTAs that only push are few, and only beside more than a wave of tiles") {
  const auto push_ctas = [](int64_t m, int64_t n, int64_t k) {
    return plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, m, n, k), 0, 4).plan.copy_ctas;
  };
  CHECK(push_ctas(16384, 4096, 16384) > 0);
  CHECK(push_ctas(8192, 2048, 8192) > push_ctas(16384, 4096, 16384));
  CHECK(push_ctas(8192, 2048, 8192) <= 10);
  CHECK(push_ctas(2048, 512, 2048) == 0);  // one wave
  CHECK(push_ctas(0, 512, 2048) == 0);
  CHECK(push_ctas(16384, 4096, 0) == 0);
  GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, 8192, 2048, 8192);
  call.tuning.copy_ctas = 500;
  CHECK(plan_of(call, 0, 4).plan.copy_ctas == NUM_SMS - 1);
}

TEST_CASE("tiles cut along k occupy every CTA that computes") {
  for (const int64_t m : {300, 1000, 2048, 4096, 8192, 16384}) {
    const RankGemmPlan plan = plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, m, 2560, 8192), 0, 4);
    INFO("m " << m << ": " << plan.gemm.num_streamk_tiles << " tiles cut");
    if (plan.gemm.num_streamk_tiles > 0) CHECK(plan.gemm.num_workers == plan.plan.compute_ctas);
    CHECK(plan.gemm.num_streamk_tiles < plan.plan.compute_ctas);
    CHECK(plan_of(make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, m, 2560, 8192), 0, 4).gemm.num_streamk_tiles == 0);
  }
}

TEST_CASE("CTAs that have pushed compute, where the product goes on for long after") {
  for (const int nranks : {2, 4}) {
    for (const int64_t m : {2048, 4096, 8192, 16384, 32768}) {
      const RankGemmPlan plan = plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, m, m / nranks, m), 0, nranks);
      INFO(nranks << " ranks, m " << m << ": " << plan.late_tile);
      if (plan.num_late == 0) {
        CHECK(plan.late_tile == 0);
        continue;
      }
      const int num_workers = plan.plan.compute_ctas + plan.num_late;
      const int num_tiles =
          plan.num_owners * plan.tile_rows * static_cast<int>(ceil_div(m / nranks, plan.gemm.block_n));
      CHECK(plan.num_late == plan.plan.copy_ctas);
      CHECK(num_workers == NUM_SMS);
      CHECK((plan.late_tile > 0 && plan.late_tile % plan.plan.compute_ctas == 0));
      CHECK(plan.late_tile + num_workers <= num_tiles);
      CHECK(plan.gemm.num_streamk_tiles < num_workers);
      // What is not cut is dealt out evenly, or the last wave is whole.
      if (plan.gemm.num_streamk_tiles > 0)
        CHECK((num_tiles - plan.late_tile - plan.gemm.num_streamk_tiles) % num_workers == 0);
    }
  }
  const GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, 16384, 4096, 16384);
  CHECK(plan_of(call, 0, 2).num_late > 0);
  // Between nodes they forward, and what the caller asks for stays.
  const TopologyArrays arrays(
      Topology::make(0, std::vector<std::string>(2, "host"), std::vector<int32_t>{0, 1}));
  for (const int64_t n : {4096, 8192, 16384, 32768}) {
    const GemmCall wide = make_call(MK_OPERATOR_ALLGATHER_GEMM, 16384, n, 16384);
    CHECK(rank_gemm_plan(wide, 0, 2, NUM_SMS, &arrays.view()).value().num_late == 0);
  }
  GemmCall tuned = call;
  tuned.tuning.compute_ctas = 100;
  CHECK(plan_of(tuned, 0, 2).num_late == 0);
}

TEST_CASE("that stores take longer is no reason for CTAs that have pushed to compute") {
  GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, 4096, 8192, 3584);
  const RankGemmPlan bf16 = plan_of(call, 0, 2);
  CHECK(bf16.plan.copy_ctas > 0);
  CHECK(bf16.num_late == 0);
  for (const bool accumulate : {false, true}) {
    call.out_dtype = MK_DTYPE_FP32;
    call.accumulate = accumulate;
    CHECK(plan_of(call, 0, 2).num_late == 0);
  }
}

TEST_CASE("more CTAs push where the last wave's tiles are then cut into fewer pieces") {
  const GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, 12288, 2304, 4096);
  const RankGemmPlan plan = plan_of(call, 0, 4);
  CHECK(plan.plan.copy_ctas + plan.plan.compute_ctas == NUM_SMS);
  CHECK(plan.plan.copy_ctas > 10);
  GemmCall fewer = call;
  fewer.tuning.copy_ctas = 10;  // which keep up with the product
  CHECK(plan_of(fewer, 0, 4).gemm.predicted_us > plan.gemm.predicted_us);
  // What the caller asks for stays.
  CHECK(plan_of(fewer, 0, 4).plan.copy_ctas == fewer.tuning.copy_ctas);
}

TEST_CASE("clusters share the tiles of an all-gather of few rows, and ranks agree on panels whoever has them") {
  constexpr GemmClusterLimits H200 = {{0, 0, 66, 39, 30}};
  for (const int64_t m : {16, 128, 256, 512}) {
    for (const int64_t n : {2560, 5120}) {
      for (const int nranks : {2, 4, 8}) {
        const GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, m, n, 8192);
        const Result<RankGemmPlan> with = rank_gemm_plan(call, 0, nranks, NUM_SMS, nullptr, H200);
        REQUIRE(with.ok());
        const RankGemmPlan plan = with.value(), without = plan_of(call, 0, nranks);
        INFO("m " << m << " n " << n << " ranks " << nranks);
        CHECK(without.gemm.num_split_ctas == 1);
        CHECK(plan.num_panels == without.num_panels);
        CHECK(plan.panel_steps == without.panel_steps);
        CHECK(plan.area_bytes == without.area_bytes);
        if (m <= 256) CHECK(plan.gemm.num_split_ctas > 1);
        if (plan.gemm.num_cluster_ctas() == 1) continue;
        CHECK(plan.merged);
        CHECK(!plan.shares_tiles);
        CHECK(plan.plan.copy_ctas == 0);
        CHECK(plan.plan.compute_ctas == plan.gemm.num_ctas());
        CHECK(plan.plan.compute_ctas <= NUM_SMS);
        CHECK(plan.gemm.num_workers <= H200.at_a_time[plan.gemm.num_cluster_ctas()]);
        CHECK(plan.gemm.num_workers == ceil_div(m, plan.gemm.block_m * (plan.gemm.in_clusters() ? 2 : 1)) *
                                           ceil_div(n, plan.gemm.block_n));
      }
    }
  }
  GemmCall tuned = make_call(MK_OPERATOR_ALLGATHER_GEMM, 16, 2560, 8192);
  tuned.tuning.copy_ctas = 4;
  const Result<RankGemmPlan> plan = rank_gemm_plan(tuned, 0, 2, NUM_SMS, nullptr, H200);
  REQUIRE(plan.ok());
  CHECK(plan.value().gemm.num_split_ctas == 1);
}

TEST_CASE("few rows travel in panels, each worth its flags") {
  const auto panels = [](int64_t m, int64_t k, int nranks) {
    return plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, m, 2560, k), 0, nranks).num_panels;
  };
  CHECK(panels(512, 8192, 4) == allgather_gemm::MAX_PANELS);
  CHECK(panels(256, 8192, 4) == 4);
  CHECK(panels(200, 8192, 4) == 3);
  CHECK(panels(128, 8192, 4) == 1);
  CHECK(panels(256, 4096, 4) == 1);
  CHECK(panels(16, 8192, 2) == 1);
}

TEST_CASE("two warps of a CTA push between two ranks, and where rows are long on their way") {
  constexpr GemmClusterLimits H200 = {{0, 0, 66, 39, 30}};
  const auto push_warps = [&](int64_t m, int64_t n, int64_t k, int nranks) {
    const GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, m, n, k);
    const Result<RankGemmPlan> plan = rank_gemm_plan(call, 0, nranks, NUM_SMS, nullptr, H200);
    REQUIRE(plan.ok());
    return plan.value().num_push_warps;
  };
  CHECK(push_warps(2048, 512, 2048, 4) == 2);
  CHECK(push_warps(4096, 256, 8192, 4) == 2);
  CHECK(push_warps(1024, 512, 4096, 4) == 2);
  CHECK(push_warps(1024, 2560, 8192, 4) == 1);
  CHECK(push_warps(4096, 1024, 4096, 4) == 1);  // tiles of each rank's rows, which wait for them in their order
  CHECK(push_warps(16, 2560, 8192, 4) == 1);
  CHECK(push_warps(1024, 2560, 8192, 2) == 2);
}

TEST_CASE("CTAs of an all-gather of one wave load B in pairs, where their tiles are narrow enough") {
  constexpr GemmClusterLimits H200 = {{0, 0, 66, 39, 30}};
  const auto plan_with = [&](const GemmCall& call, int nranks) {
    const Result<RankGemmPlan> plan = rank_gemm_plan(call, 0, nranks, NUM_SMS, nullptr, H200);
    REQUIRE(plan.ok());
    return plan.value();
  };
  for (const int nranks : {2, 4}) {
    for (const auto& [m, n] : {std::pair{512, 5120}, {1024, 2560}}) {
      const RankGemmPlan plan = plan_with(make_call(MK_OPERATOR_ALLGATHER_GEMM, m, n, 8192), nranks);
      CHECK(plan.gemm.in_clusters());
      CHECK(plan.gemm.num_split_ctas == 1);
      CHECK(plan.tile_rows == ceil_div(m, 2 * plan.gemm.block_m));
    }
  }
  CHECK(!plan_with(make_call(MK_OPERATOR_ALLGATHER_GEMM, 8192, 2560, 8192), 2).gemm.in_clusters());
}

TEST_CASE("an all-gather of some hundred rows has its operands swapped") {
  constexpr GemmClusterLimits H200 = {{0, 0, 66, 39, 30}};
  for (const int nranks : {2, 3, 4}) {
    for (const auto& [m, n] : {std::pair{130, 8192},
                               {256, 8192},
                               {384, 8192},
                               {420, 8192},
                               {700, 8192},
                               {300, 5120},
                               {160, 14336},
                               {300, 14336},
                               {420, 14336},
                               {300, 28672}}) {
      const GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, m, n, 7168);
      const Result<RankGemmPlan> planned = rank_gemm_plan(call, 0, nranks, NUM_SMS, nullptr, H200);
      REQUIRE(planned.ok());
      const RankGemmPlan& plan = planned.value();
      CAPTURE(nranks, m, n);
      CHECK((plan.gemm.is_swapped && plan.gemm.in_clusters() && plan.gemm.num_split_ctas == 1));
      CHECK((plan.merged && plan.plan.copy_ctas == 0 && !plan.shares_tiles));
      CHECK(plan.plan.compute_ctas == plan.gemm.num_ctas());
      bool has_kernel = false;
      for (const GemmSwappedTile& tile : RANK_SWAPPED_TILES) {
        has_kernel = has_kernel || (tile.block_m == plan.gemm.block_m && tile.block_n == plan.gemm.block_n &&
                                    tile.cluster == plan.gemm.cluster);
      }
      CHECK(has_kernel);
      // A tile that the caller has chosen is of rows of A and columns of B.
      GemmCall tuned = call;
      tuned.tuning.tile_m = 128;
      tuned.tuning.tile_n = 128;
      const Result<RankGemmPlan> as_asked = rank_gemm_plan(tuned, 0, nranks, NUM_SMS, nullptr, H200);
      REQUIRE(as_asked.ok());
      CHECK((!as_asked.value().gemm.is_swapped && as_asked.value().gemm.block_n == 128));
    }
    // Not where clusters can split the inner dimension, nor where rows fill one wave of tiles.
    for (const auto& [m, n] : {std::pair{300, 2560}, {200, 5120}, {512, 5120}, {512, 8192}}) {
      const Result<RankGemmPlan> plan =
          rank_gemm_plan(make_call(MK_OPERATOR_ALLGATHER_GEMM, m, n, 8192), 0, nranks, NUM_SMS, nullptr, H200);
      REQUIRE(plan.ok());
      CHECK(!plan.value().gemm.is_swapped);
    }
  }
}

TEST_CASE(
    "tiles of an all-gather hold all ranks' rows where these are few, or would not fill tiles of their own") {
  const auto is_merged = [](int64_t m, int64_t n, int nranks) {
    return plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, m, n, 8192), 0, nranks).merged;
  };
  CHECK(is_merged(256, 14336, 2));
  CHECK(is_merged(384, 14336, 2));  // 3 rows of tiles, not 4
  CHECK(!is_merged(512, 14336, 2));
  CHECK(!is_merged(512, 8192, 2));
  CHECK(!is_merged(1100, 8192, 2));
  CHECK(is_merged(500, 8192, 4));  // of less than 128 rows each
}

TEST_CASE("where each CTA has one tile of an all-gather it is a large one, which between two ranks two share") {
  for (const int nranks : {2, 4}) {
    const GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, 2048, 2560, 8192);
    const RankGemmPlan plan = plan_of(call, 0, nranks);
    CHECK(plan.shares_tiles == (nranks == 2));
    CHECK((plan.gemm.block_m == 256 && plan.gemm.block_n == 160));
    CHECK(plan.plan.compute_ctas == 128);
    CHECK(plan.plan.copy_ctas == 0);
    CHECK(plan.num_late == 0);
    CHECK(plan.gemm.num_streamk_tiles == 0);
    GemmCall tuned = call;
    tuned.tuning.copy_ctas = 4;
    CHECK(!plan_of(tuned, 0, nranks).shares_tiles);
  }
  // More than a wave, few k-steps, few rows, one rank.
  CHECK(!plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, 4096, 2560, 8192), 0, 2).shares_tiles);
  CHECK(!plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, 2048, 2560, 1024), 0, 2).shares_tiles);
  CHECK(!plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, 256, 2560, 8192), 0, 2).shares_tiles);
  CHECK(!plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, 2048, 2560, 8192), 0, 1).shares_tiles);
  std::mt19937 random(7);
  const auto below = [&](int64_t limit) { return std::uniform_int_distribution<int64_t>(1, limit)(random); };
  int num_sharing = 0, num_whole = 0;
  for (int turn = 0; turn < 6000; ++turn) {
    const int nranks = turn % 2 == 0 ? 1 + static_cast<int>(below(7)) : 2;
    const int num_sms = static_cast<int>(turn % 3 == 0 ? below(NUM_SMS) : NUM_SMS);
    const GemmCall call =
        make_call(MK_OPERATOR_ALLGATHER_GEMM, 128 * nranks + below(4000), below(9000), below(9000));
    const RankGemmPlan plan = rank_gemm_plan(call, 0, nranks, num_sms).value();
    // The highest tile is chosen for one wave alone.
    if (!plan.shares_tiles && plan.gemm.block_m <= 128) continue;
    ++(plan.shares_tiles ? num_sharing : num_whole);
    INFO(nranks << " ranks, m " << call.m << " n " << call.n << ", " << num_sms << " SMs");
    const int64_t rows = ceil_div(call.m, nranks);
    CHECK(plan.tile_rows == ceil_div(rows, plan.gemm.block_m));
    CHECK(plan.plan.compute_ctas == nranks * plan.tile_rows * ceil_div(call.n, plan.gemm.block_n));
    CHECK(plan.plan.compute_ctas <= num_sms);
    CHECK(plan.shares_tiles == (nranks == 2));
    CHECK((!plan.shares_tiles || plan.plan.compute_ctas % 2 == 0));
    CHECK((plan.gemm.block_m >= 128 && !plan.gemm.ping_pong));
  }
  CHECK(num_sharing > 100);
  CHECK(num_whole > 20);
}

TEST_CASE("the highest tile is an all-gather's alone, inside a node, of one wave or where it is asked for") {
  const TopologyArrays arrays(
      Topology::make(0, std::vector<std::string>(2, "host"), std::vector<int32_t>{0, 1}));
  for (const mk_operator_t op :
       {MK_OPERATOR_ALLGATHER_GEMM, MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
    const bool gathers = op == MK_OPERATOR_ALLGATHER_GEMM;
    CHECK((plan_of(make_call(op, 2048, 2560, 8192), 0, 2).gemm.block_m == 256) == gathers);
    GemmCall call = make_call(op, 4096, 2048, 4096);
    CHECK(plan_of(call, 0, 2).gemm.block_m <= 128);
    CHECK(rank_gemm_plan(call, 0, 2, NUM_SMS, &arrays.view()).value().gemm.block_m <= 128);
    call.tuning.tile_m = 256;
    CHECK(rank_gemm_plan(call, 0, 2, NUM_SMS).ok() == gathers);
    CHECK(!rank_gemm_plan(call, 0, 2, NUM_SMS, &arrays.view()).ok());
  }
  GemmCall wgrad = make_call(MK_OPERATOR_ALLGATHER_GEMM, 2048, 2560, 8192);
  wgrad.mode = MK_ALLGATHER_WGRAD;
  CHECK(plan_of(wgrad, 0, 2).gemm.block_m <= 128);
}

TEST_CASE("all CTAs push beside a product of few waves, with many ranks only where the links have time") {
  CHECK(plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, 4096, 5120, 8192), 0, 2).plan.copy_ctas == 0);
  CHECK(plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, 8192, 4096, 8192), 0, 2).plan.copy_ctas > 0);
  CHECK(plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, 4096, 5120, 8192), 0, 4).plan.copy_ctas == 0);
  CHECK(plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, 4096, 2048, 4096), 0, 4).plan.copy_ctas == 0);
  CHECK(plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, 8192, 2048, 8192), 0, 4).plan.copy_ctas > 0);
  CHECK(plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, 8192, 4096, 8192), 0, 4).plan.copy_ctas > 0);
}

TEST_CASE("few rows and weights that the L2 does not hold: whole tiles, which begin together") {
  const auto planned = [](int64_t m, int64_t n, int64_t k) {
    return plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, m, n, k), 0, 2);
  };
  const RankGemmPlan large = planned(256, 28672, 8192);
  CHECK(large.merged);
  CHECK(large.tile_rows == 2);
  CHECK(large.gemm.num_streamk_tiles == 0);
  CHECK(planned(256, 14336, 8192).merged);
  CHECK(!planned(1024, 28672, 8192).merged);  // tiles of one source
  CHECK(large.gemm.block_n == 224);
}

TEST_CASE("few rows of each of many ranks: weights are read once for all of them") {
  const auto planned = [](int64_t m, int64_t n, int64_t k, int nranks) {
    return plan_of(make_call(MK_OPERATOR_ALLGATHER_GEMM, m, n, k), 0, nranks);
  };
  const RankGemmPlan swept = planned(1024, 14336, 8192, 4);
  CHECK(swept.sweeps_columns);
  CHECK(swept.gemm.group_m == 8);  // all rows of tiles
  CHECK(swept.out_of_step_k_steps == 0);
  CHECK(planned(512, 28672, 8192, 4).sweeps_columns);
  CHECK(planned(384, 28672, 8192, 3).sweeps_columns);
  const RankGemmPlan one_by_one = planned(1024, 14336, 8192, 2);
  CHECK(!one_by_one.sweeps_columns);
  CHECK(one_by_one.gemm.group_m <= one_by_one.tile_rows);
  CHECK(!planned(2048, 14336, 8192, 4).sweeps_columns);  // four rows of tiles a rank
  CHECK(planned(1024, 28672, 8192, 4).plan.copy_ctas > 0);
  CHECK(!planned(1024, 28672, 8192, 4).sweeps_columns);  // few CTAs push: rows would come too late
  CHECK(!planned(1024, 5120, 8192, 4).sweeps_columns);   // all tiles at once
  CHECK(!planned(512, 14336, 8192, 4).sweeps_columns);   // or nearly
  CHECK(!planned(1024, 8192, 2048, 4).sweeps_columns);   // weights that stay in the L2
  CHECK(!planned(256, 28672, 8192, 4).sweeps_columns);   // merged
  const TopologyArrays arrays(
      Topology::make(0, std::vector<std::string>(4, "host"), std::vector<int32_t>{0, 0, 1, 1}));
  const GemmCall between = make_call(MK_OPERATOR_ALLGATHER_GEMM, 1024, 14336, 8192);
  CHECK(!rank_gemm_plan(between, 0, 4, NUM_SMS, &arrays.view()).value().sweeps_columns);
}
