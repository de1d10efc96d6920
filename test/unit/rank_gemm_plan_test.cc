// SPDX-License-Identifier: MIT
// The plan of the GEMM operators between GPUs: what all ranks must choose alike, and that memory prepared for
// the largest call serves every smaller one.
#include "kernels/cuda/rank_gemm_plan.h"

#include <algorithm>
#include <array>
#include <random>
#include <vector>

#include "kernels/device/tagged_packets.h"
#include "kernels/ops/gemm_reduce_scatter/tagged_params.h"
#include "kernels/protocol.h"
#include "kernels/topology_arrays.h"
#include "test/support/catch.h"

namespace {

using namespace mk;

constexpr int NUM_SMS = 132;

GemmCall make_call(mk_operator_t op, int64_t m, int64_t n, int64_t k) {
  GemmCall call;
  call.op = op;
  call.m = m, call.n = n, call.k = k;
  call.dtype = call.out_dtype = call.comm_dtype = MK_DTYPE_BF16;
  call.b_layout = MK_LAYOUT_KN;
  return call;
}

RankGemmPlan plan_of(const GemmCall& call, int rank, int nranks) {
  const Result<RankGemmPlan> plan = rank_gemm_plan(call, rank, nranks, NUM_SMS);
  REQUIRE(plan.ok());
  return plan.value();
}

int64_t num_cluster_tiles(const GemmCall& call, const GemmPlan& plan) {
  GemmShape shape;
  shape.m = call.m;
  shape.n = call.n;
  return gemm_plan_num_tiles(shape, plan);
}

}  // namespace

TEST_CASE("an area prepared for the largest call serves every smaller one") {
  std::mt19937 random(1);
  const auto below = [&](int64_t limit) { return std::uniform_int_distribution<int64_t>(0, limit)(random); };
  for (const mk_operator_t op :
       {MK_OPERATOR_ALLGATHER_GEMM, MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
    for (int turn = 0; turn < 3000; ++turn) {
      const int nranks = 2 + static_cast<int>(below(6));
      const GemmCall largest = make_call(op, below(9000), below(9000), below(9000));
      GemmCall call = make_call(op, below(largest.m), below(largest.n), below(largest.k));
      if (turn % 3 == 0) call.m = std::min<int64_t>(largest.m, below(300));
      const RankGemmPlan plan = plan_of(call, 0, nranks);
      INFO(operator_name(op) << " of " << nranks << ": m " << call.m << " n " << call.n << " of " << largest.m
                             << ", " << largest.n);
      CHECK(plan.area_bytes <= plan_of(largest, 0, nranks).area_bytes);
      // And what the kernel addresses lies inside.
      if (op != MK_OPERATOR_ALLGATHER_GEMM) {
        const int64_t slots = nranks * plan.slot_bytes;
        CHECK(slots <= plan.area_bytes);
        if (plan.reduction == gemm_reduce_scatter::Reduction::two_shot) {
          CHECK(slots <= plan.gather_begin);
          CHECK(plan.gather_begin + call.m * plan.gather_pitch <= plan.area_bytes);
        }
      }
    }
  }
}

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
    CHECK(plan.plan.chunk_rows == 64);
    CHECK(theirs.plan.num_chunks == plan.plan.num_chunks);
    CHECK(int64_t{plan.plan.num_chunks} * 64 * nranks >= call.m);
    CHECK(plan.num_panels == 1);
    CHECK(int64_t{plan.panel_steps} * 64 >= call.n);
    CHECK(plan.tile_rows == ceil_div(call.k, plan.gemm.block_m));
    if (plan.gemm.num_streamk_tiles > 0) CHECK(plan.gemm.num_workers == plan.plan.compute_ctas);
  }
}

TEST_CASE("one CTA is enough for a launch") {
  for (const mk_operator_t op :
       {MK_OPERATOR_ALLGATHER_GEMM, MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
    GemmCall call = make_call(op, 4096, 2048, 1024);
    for (const int copy_ctas : {0, 3}) {
      call.tuning.copy_ctas = copy_ctas;
      const Result<RankGemmPlan> plan = rank_gemm_plan(call, 0, 4, 1);
      REQUIRE(plan.ok());
      CHECK(plan.value().plan.compute_ctas == 1);
      CHECK(plan.value().plan.copy_ctas == 0);
    }
  }
}

TEST_CASE("ranks with different k, layouts or row counts agree on how partial sums travel") {
  for (const int64_t m : {1, 16, 200, 1000, 4096, 9001}) {
    for (const int64_t n : {4000, 7168}) {
      for (const mk_operator_t op : {MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
        for (const int nranks : {4, 8}) {
          const RankGemmPlan first = plan_of(make_call(op, m, n, 512), 0, nranks);
          GemmCall call = make_call(op, m, n, 20000);
          call.b_layout = MK_LAYOUT_NK;
          const RankGemmPlan last = plan_of(call, nranks - 1, nranks);
          CHECK(first.gemm.block_m == last.gemm.block_m);
          CHECK(first.gemm.block_n == last.gemm.block_n);
          CHECK(first.reduction == last.reduction);
          CHECK(first.slot_bytes == last.slot_bytes);
          CHECK(first.gather_begin == last.gather_begin);
        }
      }
    }
  }
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

TEST_CASE("tuning sets the numbers of CTAs") {
  GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, 16384, 4096, 4096);
  call.tuning.compute_ctas = 100;
  call.tuning.copy_ctas = 5;
  CHECK(plan_of(call, 0, 4).plan.compute_ctas == 100);
  CHECK(plan_of(call, 0, 4).plan.copy_ctas == 5);
  call.tuning.compute_ctas = 1000;
  CHECK(plan_of(call, 0, 4).plan.compute_ctas == NUM_SMS - 5);
  // Push CTAs that the plan adds do not come out of those asked for.
  call = make_call(MK_OPERATOR_ALLGATHER_GEMM, 16384, 4096, 16384);
  call.tuning.compute_ctas = 100;
  CHECK(plan_of(call, 0, 4).plan.compute_ctas == 100);
  CHECK(plan_of(call, 0, 4).plan.copy_ctas > 0);
  call.op = MK_OPERATOR_GEMM_ALLREDUCE;
  call.tuning.compute_ctas = 7;
  CHECK(plan_of(call, 0, 4).plan.compute_ctas == 7);
  CHECK(plan_of(call, 0, 4).plan.copy_ctas == 0);
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

TEST_CASE("pushes of partial sums are paced where the links have time") {
  const auto is_paced = [](int64_t m, int64_t n, int64_t k) {
    return plan_of(make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, m, n, k), 0, 4).is_paced;
  };
  CHECK(is_paced(16384, 16384, 4096));
  CHECK(is_paced(8192, 8192, 2048));
  CHECK(!is_paced(4096, 4096, 1024));
  CHECK(!is_paced(4096, 4096, 0));
  CHECK(!plan_of(make_call(MK_OPERATOR_GEMM_ALLREDUCE, 8192, 8192, 2048), 0, 4).is_paced);
}

TEST_CASE("own tiles are summed beside the product where there is time") {
  const auto sums_beside = [](mk_operator_t op, int64_t m, int64_t k, int nranks) {
    return plan_of(make_call(op, m, 8192, k), 0, nranks).sums_beside;
  };
  CHECK(sums_beside(MK_OPERATOR_GEMM_REDUCE_SCATTER, 8192, 2048, 2));
  CHECK(!sums_beside(MK_OPERATOR_GEMM_REDUCE_SCATTER, 8192, 1024, 2));
  CHECK(!sums_beside(MK_OPERATOR_GEMM_REDUCE_SCATTER, 8192, 2048, 4));
  CHECK(sums_beside(MK_OPERATOR_GEMM_REDUCE_SCATTER, 16384, 4096, 4));
  CHECK(!sums_beside(MK_OPERATOR_GEMM_REDUCE_SCATTER, 8192, 3072, 4));
  CHECK(!sums_beside(MK_OPERATOR_GEMM_REDUCE_SCATTER, 8192, 65536, 5));
  CHECK(sums_beside(MK_OPERATOR_GEMM_ALLREDUCE, 8192, 3072, 2));
  CHECK(!sums_beside(MK_OPERATOR_GEMM_ALLREDUCE, 8192, 2560, 2));
  CHECK(sums_beside(MK_OPERATOR_GEMM_ALLREDUCE, 16384, 4096, 4));
  CHECK(!sums_beside(MK_OPERATOR_GEMM_ALLREDUCE, 8192, 2048, 4));
  CHECK(!sums_beside(MK_OPERATOR_GEMM_ALLREDUCE, 512, 8192, 2));  // one tile a CTA at most
  CHECK(!sums_beside(MK_OPERATOR_GEMM_REDUCE_SCATTER, 8192, 0, 2));
  GemmCall call = make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, 8192, 8192, 4096);
  call.comm_dtype = MK_DTYPE_FP32;
  CHECK(!plan_of(call, 0, 2).sums_beside);
  call.out_dtype = MK_DTYPE_FP32;
  CHECK(!plan_of(call, 0, 2).sums_beside);
}

TEST_CASE("an all-reduce goes one-shot while its matrix is small") {
  const auto algorithm = [](int64_t m, mk_algorithm_t wanted) {
    GemmCall call = make_call(MK_OPERATOR_GEMM_ALLREDUCE, m, 8192, 2048);
    call.tuning.algorithm = wanted;
    return plan_of(call, 0, 4).plan.algorithm;
  };
  CHECK(algorithm(16, MK_ALGORITHM_AUTO) == MK_ALGORITHM_ONE_SHOT);
  CHECK(algorithm(4096, MK_ALGORITHM_AUTO) == MK_ALGORITHM_TWO_SHOT);
  CHECK(algorithm(16, MK_ALGORITHM_TWO_SHOT) == MK_ALGORITHM_TWO_SHOT);
  CHECK(algorithm(4096, MK_ALGORITHM_ONE_SHOT) == MK_ALGORITHM_ONE_SHOT);
  const auto of_two_ranks = [](int64_t m, int64_t n) {
    return plan_of(make_call(MK_OPERATOR_GEMM_ALLREDUCE, m, n, 4096), 0, 2).plan.algorithm;
  };
  CHECK(of_two_ranks(1024, 4096) == MK_ALGORITHM_ONE_SHOT);
  CHECK(of_two_ranks(768, 8192) == MK_ALGORITHM_ONE_SHOT);
  CHECK(of_two_ranks(512, 28672) == MK_ALGORITHM_ONE_SHOT);
  CHECK(of_two_ranks(1024, 8192) == MK_ALGORITHM_TWO_SHOT);
  CHECK(of_two_ranks(768, 28672) == MK_ALGORITHM_TWO_SHOT);
}

TEST_CASE("with one tile a CTA at most, partial sums go straight from the registers") {
  CHECK(plan_of(make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, 2048, 2048, 512), 0, 4).is_direct);
  CHECK(!plan_of(make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, 1024, 8192, 2048), 0, 4).is_direct);
  CHECK(!plan_of(make_call(MK_OPERATOR_GEMM_ALLREDUCE, 8192, 8192, 2048), 0, 4).is_direct);
}

TEST_CASE("few 16-bit elements travel in tagged packets, by all ranks' plans alike, and have room") {
  CHECK(plan_of(make_call(MK_OPERATOR_GEMM_ALLREDUCE, 32, 8192, 2048), 0, 4).is_tagged);
  CHECK(plan_of(make_call(MK_OPERATOR_GEMM_ALLREDUCE, 128, 8192, 2048), 0, 4).is_tagged);
  CHECK(plan_of(make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, 64, 8192, 2048), 0, 2).is_tagged);
  CHECK(!plan_of(make_call(MK_OPERATOR_GEMM_ALLREDUCE, 512, 8192, 2048), 0, 2).is_tagged);
  GemmCall wide = make_call(MK_OPERATOR_GEMM_ALLREDUCE, 32, 8192, 2048);
  wide.comm_dtype = MK_DTYPE_FP32;
  CHECK(!plan_of(wide, 0, 4).is_tagged);
  std::mt19937 random(3);
  const auto below = [&](int64_t limit) { return std::uniform_int_distribution<int64_t>(1, limit)(random); };
  int num_tagged = 0;
  for (int turn = 0; turn < 3000; ++turn) {
    const bool reduces_all = turn % 2 == 0;
    const mk_operator_t op = reduces_all ? MK_OPERATOR_GEMM_ALLREDUCE : MK_OPERATOR_GEMM_REDUCE_SCATTER;
    const int nranks = 2 + static_cast<int>(below(6));
    const int64_t m = below(300), n = below(9000), k = below(4000);
    const RankGemmPlan plan = plan_of(make_call(op, m, n, k), 0, nranks);
    INFO(operator_name(op) << " of " << nranks << ", m " << m << " n " << n);
    for (int rank = 1; rank < nranks; ++rank) {
      const RankGemmPlan other = plan_of(make_call(op, m, n, below(4000)), rank, nranks);
      CHECK(other.is_tagged == plan.is_tagged);
      CHECK(other.packet_slot_bytes == plan.packet_slot_bytes);
    }
    if (!plan.is_tagged) continue;
    ++num_tagged;
    const int banks = plan.reduction == gemm_reduce_scatter::Reduction::two_shot ? 2 : 1;
    CHECK(banks * nranks * plan.packet_slot_bytes <= static_cast<int64_t>(PACKET_BANK_BYTES));
    // Each tile's accumulators fit, three words a packet; of merged tiles an owner's rows alone.
    const int64_t rows = plan.merged ? ceil_div(m, nranks) : plan.tile_rows * plan.gemm.block_m;
    const int64_t words = rows * ceil_div(n, plan.gemm.block_n) * plan.gemm.block_n / 2;
    if (!plan.splits_columns) CHECK(plan.packet_slot_bytes / 16 * PACKET_WORDS >= words);
  }
  CHECK(num_tagged > 500);
}

TEST_CASE("a lane's packets of its two rows do not overlap and fill a unit") {
  for (const int columns : {32, 64}) {
    std::vector<int> num_uses(static_cast<size_t>(packets_bytes(columns) / 16));
    for (int row = 0; row < 16; ++row) {
      for (int lane = 0; lane < 4; ++lane) {
        for (int i = 0; i < num_row_packets(columns); ++i) {
          const int place = packet_place(row, row % 8 * 4 + lane, columns) + i * PACKET_PITCH;
          REQUIRE((place % 16 == 0 && place < packets_bytes(columns)));
          ++num_uses[static_cast<size_t>(place / 16)];
        }
      }
    }
    CHECK(std::ranges::all_of(num_uses, [](int uses) { return uses == 1; }));
    CHECK(num_row_packets(columns) * PACKET_WORDS * 2 * 4 >= columns);
  }
}

TEST_CASE("few rows of a reduce-scatter are multiplied in tiles of all owners' rows") {
  const auto planned = [](int64_t m, int64_t n, int nranks) {
    return plan_of(make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, m, n, 2048), 0, nranks);
  };
  for (const int nranks : {2, 4, 8}) {
    for (const int64_t m : {1, 16, 17, 33, 48, 64}) {
      INFO(nranks << " ranks, m " << m);
      const RankGemmPlan plan = planned(m, 8192, nranks);
      CHECK((plan.merged && plan.is_tagged && plan.is_direct && !plan.splits_rows));
      CHECK(plan.gemm.block_m == 64);
      CHECK(plan.tiles_per_owner <= NUM_SMS);
      CHECK(plan.tiles_per_owner >= 64);
      // What travels are others' rows, once.
      CHECK(plan.plan.link_bytes == (m - ceil_div(m, nranks)) * 8192 * 2);
    }
  }
  CHECK(planned(100, 8192, 2).merged);
  CHECK(planned(128, 8192, 2).merged);
  CHECK(planned(16, 16384, 2).merged);
  CHECK(planned(192, 8192, 3).merged);
  CHECK(planned(256, 8192, 4).merged);
  // Not where many bytes travel, or there are more tiles than CTAs.
  CHECK(!planned(1024, 8192, 8).merged);
  CHECK(!planned(256, 8192, 2).merged);
  CHECK(!planned(320, 8192, 4).merged);
  CHECK(!planned(16, 32768, 2).merged);
  CHECK(!planned(0, 8192, 2).merged);
  CHECK(!planned(16, 0, 2).merged);
  GemmCall call = make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, 16, 8192, 2048);
  CHECK(!rank_gemm_plan(call, 0, 2, 32).value().merged);
  const TopologyArrays arrays(
      Topology::make(0, std::vector<std::string>(2, "host"), std::vector<int32_t>{0, 1}));
  CHECK(!rank_gemm_plan(call, 0, 2, NUM_SMS, &arrays.view()).value().merged);
  call.comm_dtype = MK_DTYPE_FP32;
  CHECK(!plan_of(call, 0, 2).merged);
  call.comm_dtype = MK_DTYPE_BF16;
  call.op = MK_OPERATOR_GEMM_ALLREDUCE;
  CHECK(!plan_of(call, 0, 2).merged);
}

TEST_CASE("merged tiles: the caller's tile stays, and all ranks have the same, with room for their packets") {
  GemmCall call = make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, 48, 2000, 2048);
  for (const GemmTile& tile : RANK_GEMM_TILES) {
    call.tuning.tile_m = tile.block_m, call.tuning.tile_n = tile.block_n;
    const RankGemmPlan plan = plan_of(call, 1, 4);
    CHECK((plan.gemm.block_m == tile.block_m && plan.gemm.block_n == tile.block_n));
    CHECK(plan.merged == std::ranges::any_of(gemm_reduce_scatter::TAGGED_TILES, [&](const GemmTile& tagged) {
            return tagged.block_m == tile.block_m && tagged.block_n == tile.block_n;
          }));
  }
  std::mt19937 random(5);
  const auto below = [&](int64_t limit) { return std::uniform_int_distribution<int64_t>(1, limit)(random); };
  int num_merged = 0;
  for (int turn = 0; turn < 3000; ++turn) {
    const int nranks = 1 + static_cast<int>(below(turn % 10 == 0 ? 63 : 15));
    const int num_sms = static_cast<int>(turn % 3 == 0 ? below(NUM_SMS) : NUM_SMS);
    call = make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, below(300), below(17000), below(9000));
    INFO(nranks << " ranks, m " << call.m << " n " << call.n << ", " << num_sms << " SMs");
    const RankGemmPlan plan = rank_gemm_plan(call, 0, nranks, num_sms).value();
    for (int rank = 1; rank < nranks; ++rank) {
      call.k = below(9000);
      call.b_layout = rank % 2 == 0 ? MK_LAYOUT_KN : MK_LAYOUT_NK;
      const RankGemmPlan other = rank_gemm_plan(call, rank, nranks, num_sms).value();
      CHECK(other.merged == plan.merged);
      CHECK(other.is_tagged == plan.is_tagged);
      CHECK(other.packet_slot_bytes == plan.packet_slot_bytes);
      CHECK(other.merged_rows.place({1, 1}) == plan.merged_rows.place({1, 1}));
    }
    if (!plan.merged) continue;
    ++num_merged;
    const gemm_reduce_scatter::MergedRows& rows = plan.merged_rows;
    CHECK((plan.is_tagged && plan.is_direct && plan.num_owners == 1 && plan.slot_bytes == 0));
    CHECK(plan.tiles_per_owner <= num_sms);
    CHECK(plan.tiles_per_owner == ceil_div(call.m, plan.gemm.block_m) * ceil_div(call.n, plan.gemm.block_n));
    CHECK(rows.num_column_units * 64 == round_up(call.n, plan.gemm.block_n));
    CHECK(rows.size() * packets_bytes(64) == plan.packet_slot_bytes);
    CHECK(nranks * plan.packet_slot_bytes <= static_cast<int64_t>(PACKET_BANK_BYTES));
  }
  CHECK(num_merged > 300);
}

TEST_CASE("merged tiles: each row goes to its owner, who sums it once, and nothing else") {
  constexpr int COLUMN_UNITS = 3;
  for (int nranks = 1; nranks <= 16; ++nranks) {
    for (int m = 1; m <= 300; ++m) {
      INFO(nranks << " ranks, m " << m);
      const gemm_reduce_scatter::MergedRows rows = {m, static_cast<int>(ceil_div(m, nranks)), COLUMN_UNITS};
      // What the senders store, by rows of units of a source's slot at each owner.
      std::vector<std::vector<int>> sent(static_cast<size_t>(nranks));
      for (auto& of_owner : sent) of_owner.assign(static_cast<size_t>(rows.size() * 16), 0);
      bool is_right = true;
      for (int row = 0; row < m; ++row) {
        const gemm_reduce_scatter::OwnedRow owned = rows.owned(row);
        is_right = is_right && owned.owner < nranks && owned.row < rows_count(m, nranks, owned.owner) &&
                   rows_begin(m, nranks, owned.owner) + owned.row == row;
        for (int column = 0; column < COLUMN_UNITS; ++column) {
          const int unit = rows.place({owned.row / 16, column});
          is_right = is_right && unit < rows.size();
          if (is_right)
            ++sent[static_cast<size_t>(owned.owner)][static_cast<size_t>(unit * 16 + owned.row % 16)];
        }
      }
      for (int owner = 0; owner < nranks; ++owner) {
        is_right = is_right && rows.first_row(owner) == rows_begin(m, nranks, owner) &&
                   rows.rows(owner) == rows_count(m, nranks, owner);
        // The owner takes what has come once, and waits for nothing that has not.
        for (int number = 0; number < rows.num_units(owner); ++number) {
          const gemm_reduce_scatter::MergedUnit unit = rows.unit(owner, number);
          for (int row = unit.row_unit * 16; row < std::min(rows.rows(owner), unit.row_unit * 16 + 16); ++row)
            --sent[static_cast<size_t>(owner)][static_cast<size_t>(rows.place(unit) * 16 + row % 16)];
        }
        is_right =
            is_right && std::ranges::all_of(sent[static_cast<size_t>(owner)], [](int n) { return n == 0; });
      }
      CHECK(is_right);
    }
  }
}

TEST_CASE("owners of few rows share out columns, where there is then one tile a CTA at most") {
  const RankGemmPlan few = plan_of(make_call(MK_OPERATOR_GEMM_ALLREDUCE, 256, 8192, 7168), 0, 4);
  CHECK((few.splits_columns && !few.splits_rows && few.gemm.block_m == 128));
  CHECK(!plan_of(make_call(MK_OPERATOR_GEMM_ALLREDUCE, 640, 8192, 2048), 0, 4).splits_columns);
  std::mt19937 random(2);
  const auto below = [&](int64_t limit) { return std::uniform_int_distribution<int64_t>(1, limit)(random); };
  int num_by_columns = 0;
  for (int turn = 0; turn < 2000; ++turn) {
    const int nranks = 2 + static_cast<int>(below(6));
    const GemmCall call = make_call(MK_OPERATOR_GEMM_ALLREDUCE, below(1500), below(9000), 2048);
    const RankGemmPlan plan = plan_of(call, 0, nranks);
    if (plan.reduction != gemm_reduce_scatter::Reduction::two_shot) continue;
    INFO(nranks << " ranks, m " << call.m << " n " << call.n);
    CHECK(plan.splits_rows == !plan.splits_columns);
    CHECK(plan.tiles_per_owner == plan.owner_tiles.tiles_of_owner());
    if (!plan.splits_columns) continue;
    ++num_by_columns;
    CHECK(plan.is_direct);
    CHECK(nranks * plan.tiles_per_owner <= NUM_SMS);
    CHECK(int64_t{nranks} * plan.owner_tiles.num_n_tiles * plan.gemm.block_n >= call.n);
    CHECK(int64_t{plan.tile_rows} * plan.gemm.block_m >= call.m);
    // What all ranks send is what owners do not compute themselves, and what they finish, to each other.
    int64_t bytes = 0;
    for (int rank = 0; rank < nranks; ++rank) bytes += plan_of(call, rank, nranks).plan.link_bytes;
    CHECK(bytes == 2 * (nranks - 1) * call.m * call.n * 2);
  }
  CHECK(num_by_columns > 20);
}

TEST_CASE("an all-reduce's owners take turns in blocks of about half a wave, a reduce-scatter's have one") {
  const RankGemmPlan all = plan_of(make_call(MK_OPERATOR_GEMM_ALLREDUCE, 16384, 16384, 4096), 0, 4);
  const int64_t block = int64_t{all.owner_tiles.block_rows} * all.owner_tiles.block_columns;
  CHECK((block >= NUM_SMS / 3 && block <= NUM_SMS));
  const RankGemmPlan scatter = plan_of(make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, 16384, 16384, 4096), 0, 4);
  CHECK(scatter.owner_tiles.block_rows * scatter.owner_tiles.block_columns == scatter.tiles_per_owner);
  CHECK(scatter.owner_tiles.group_rows < scatter.owner_tiles.block_rows);
}

TEST_CASE("what a launch has no flags for is refused") {
  const Result<RankGemmPlan> plan = rank_gemm_plan(
      make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, int64_t{1} << 20, int64_t{1} << 16, 64), 0, 4, NUM_SMS);
  REQUIRE(!plan.ok());
  CHECK(plan.status().code() == MK_ERROR_UNSUPPORTED);
}

TEST_CASE("a tile that no kernel has is refused") {
  GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, 512, 512, 512);
  call.tuning.tile_m = 96;
  const Result<RankGemmPlan> plan = rank_gemm_plan(call, 0, 4, NUM_SMS);
  REQUIRE(!plan.ok());
  CHECK(plan.status().code() == MK_ERROR_UNSUPPORTED);
}

TEST_CASE("between nodes one CTA has the network, and rows travel once to each other node") {
  const std::vector<int32_t> nodes = {0, 0, 1, 1};
  for (int rank = 0; rank < 4; ++rank) {
    const TopologyArrays arrays(Topology::make(rank, std::vector<std::string>(4, "host"), nodes));
    const GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, 16384, 4096, 8192);
    const Result<RankGemmPlan> chosen = rank_gemm_plan(call, rank, 4, NUM_SMS, &arrays.view());
    REQUIRE(chosen.ok());
    const RankGemmPlan& plan = chosen.value();
    CHECK(plan.plan.compute_ctas + plan.plan.copy_ctas == NUM_SMS - 1);
    CHECK(plan.gemm.num_workers <= plan.plan.compute_ctas);
    CHECK(plan.plan.send_ctas == 1);
    CHECK(plan.plan.network_bytes == int64_t{4096} * 8192 * 2);
    CHECK(plan.plan.link_bytes == 2 * int64_t{4096} * 8192 * 2);  // its own and those it relays
    CHECK(plan.area_bytes == plan_of(call, rank, 4).area_bytes);
  }
}

TEST_CASE("between nodes more CTAs push, for they forward, too") {
  const std::vector<int32_t> nodes = {0, 0, 1, 1};
  const TopologyArrays arrays(Topology::make(0, std::vector<std::string>(4, "host"), nodes));
  const GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, 16384, 4096, 16384);
  const Result<RankGemmPlan> chosen = rank_gemm_plan(call, 0, 4, NUM_SMS, &arrays.view());
  REQUIRE(chosen.ok());
  const mk_plan_t& between = chosen.value().plan;
  CHECK(between.copy_ctas > plan_of(call, 0, 4).plan.copy_ctas);
  CHECK(between.compute_ctas + between.copy_ctas == NUM_SMS - 1);
}

TEST_CASE("mode WGRAD between nodes: the rows of X cross the network once, whoever's columns of dY are wide") {
  const std::vector<int32_t> nodes = {0, 0, 1, 1};
  const auto planned = [&](int rank, int64_t m, int64_t n, int64_t k) {
    const TopologyArrays arrays(Topology::make(rank, std::vector<std::string>(4, "host"), nodes));
    GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, m, n, k);
    call.mode = MK_ALLGATHER_WGRAD;
    const Result<RankGemmPlan> plan = rank_gemm_plan(call, rank, 4, NUM_SMS, &arrays.view());
    REQUIRE(plan.ok());
    return plan.value();
  };
  const RankGemmPlan first = planned(0, 16384, 4096, 8192);
  CHECK(first.plan.network_bytes == int64_t{4096} * 4096 * 2);
  CHECK(first.plan.link_bytes == 2 * int64_t{4096} * 4096 * 2);  // its own and those it relays
  CHECK(first.plan.compute_ctas + first.plan.copy_ctas == NUM_SMS - 1);
  CHECK(first.plan.send_ctas == 1);
  CHECK(first.plan.chunk_rows == 64);
  for (const int64_t k : {0, 8, 1000, 30000}) {
    for (const int64_t m : {0, 3, 1000, 16384}) {
      const RankGemmPlan plan = planned(3, m, 4096, k);
      CHECK(plan.area_bytes <= first.area_bytes);
      CHECK(plan.plan.chunk_rows == first.plan.chunk_rows);
      CHECK(plan.num_panels == 1);
      CHECK(plan.plan.num_chunks == planned(0, m, 4096, 8192).plan.num_chunks);
      CHECK(plan.gemm.num_workers <= plan.plan.compute_ctas);
      CHECK(plan.plan.compute_ctas + plan.plan.copy_ctas + 1 <= NUM_SMS);
    }
  }
}

TEST_CASE("reductions between nodes: CTAs that sum, areas that serve smaller calls") {
  const TopologyArrays arrays(
      Topology::make(1, std::vector<std::string>(4, "host"), std::vector<int32_t>{0, 0, 1, 1}));
  const auto planned = [&](int64_t m, int64_t n, int64_t k) {
    const GemmCall call = make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, m, n, k);
    const Result<RankGemmPlan> plan = rank_gemm_plan(call, 1, 4, NUM_SMS, &arrays.view());
    REQUIRE(plan.ok());
    return plan.value();
  };
  const RankGemmPlan large = planned(16384, 16384, 4096);
  CHECK(large.plan.reduce_ctas > 0);
  CHECK(large.plan.compute_ctas + large.plan.reduce_ctas + large.plan.send_ctas == NUM_SMS);
  CHECK(large.plan.network_bytes == int64_t{4096} * 16384 * 2);
  CHECK(large.plan.link_bytes == 2 * int64_t{4096} * 16384 * 2);
  CHECK(large.plan.chunk_bytes >= 256 << 10);
  CHECK(large.plan.chunk_bytes <= 1 << 20);
  for (const int64_t m : {0, 1, 130, 1000, 4096, 16384}) {
    for (const int64_t n : {0, 8, 1000, 16384}) {
      const RankGemmPlan plan = planned(m, n, 512);
      CHECK(plan.network.num_slots() * plan.network.slot_bytes() <= std::max<int64_t>(plan.area_bytes, 0));
      CHECK(plan.area_bytes <= large.area_bytes);
      CHECK(plan.network.sums.group_rows >= 1);
      CHECK(plan.network.tiles() == std::max(1, plan.tile_rows) * plan.network.num_n_tiles());
      // Each owner has one block.
      CHECK(plan.network_tiles.size() == 4 * plan.network.tiles());
      CHECK(plan.network_tiles.near.block_rows >= plan.tile_rows);
      CHECK(plan.network_tiles.near.block_columns >= plan.network.num_n_tiles());
      CHECK(plan.network_tiles.lead == plan.network.tiles());
    }
  }
}

TEST_CASE("reductions between nodes: CTAs that sum are as many as there is to sum, or as asked for") {
  const auto planned = [&](const GemmCall& call, int rank, const std::vector<int32_t>& nodes) {
    const TopologyArrays arrays(Topology::make(rank, std::vector<std::string>(nodes.size(), "host"), nodes));
    const int nranks = static_cast<int>(nodes.size());
    const Result<RankGemmPlan> plan = rank_gemm_plan(call, rank, nranks, NUM_SMS, &arrays.view());
    REQUIRE(plan.ok());
    CHECK(plan.value().plan.compute_ctas + plan.value().plan.reduce_ctas < NUM_SMS);
    return plan.value();
  };
  const std::vector<int32_t> pairs = {0, 0, 1, 1};
  GemmCall call = make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, 16384, 16384, 4096);
  CHECK(planned(make_call(call.op, 16384, 16384, 16384), 1, pairs).plan.reduce_ctas <
        planned(call, 1, pairs).plan.reduce_ctas);
  CHECK(planned(make_call(call.op, 16384, 16384, 64), 1, pairs).plan.reduce_ctas <= 32);
  CHECK(planned(make_call(call.op, 0, 16384, 64), 1, pairs).plan.reduce_ctas == 1);
  // A rank that is alone in its node has nothing to sum, nor has one that relays for nobody.
  CHECK(planned(call, 1, {0, 1}).plan.reduce_ctas == 0);
  CHECK(planned(call, 1, {0, 1}).plan.compute_ctas == NUM_SMS - 1);
  CHECK(planned(call, 3, {0, 0, 0, 1}).plan.reduce_ctas == 0);
  CHECK(planned(call, 2, {0, 0, 0, 1}).plan.reduce_ctas == 0);
  CHECK(planned(call, 0, {0, 0, 0, 1}).plan.reduce_ctas > 0);
  // But all have the same tile.
  CHECK(planned(call, 0, {0, 0, 0, 1}).network.tile_bytes == planned(call, 3, {0, 0, 0, 1}).network.tile_bytes);
  for (const int wanted : {1, 13, 1000}) {
    call.tuning.reduce_ctas = wanted;
    CHECK(planned(call, 1, pairs).plan.reduce_ctas == std::min(wanted, NUM_SMS - 2));
  }
  call.tuning.reduce_ctas = 5;
  call.tuning.compute_ctas = 50;
  CHECK(planned(call, 1, pairs).plan.reduce_ctas == 5);
  CHECK(planned(call, 1, pairs).plan.compute_ctas == 50);
}

TEST_CASE("all-reduces between nodes: what is finished travels, too, and lies behind what is summed") {
  const auto planned = [&](int64_t m, int64_t n, mk_algorithm_t algorithm = MK_ALGORITHM_AUTO) {
    const TopologyArrays arrays(
        Topology::make(1, std::vector<std::string>(4, "host"), std::vector<int32_t>{0, 0, 1, 1}));
    GemmCall call = make_call(MK_OPERATOR_GEMM_ALLREDUCE, m, n, 4096);
    call.out_dtype = MK_DTYPE_FP32;
    call.tuning.algorithm = algorithm;
    const Result<RankGemmPlan> plan = rank_gemm_plan(call, 1, 4, NUM_SMS, &arrays.view());
    REQUIRE(plan.ok());
    CHECK(plan.value().reduction == gemm_reduce_scatter::Reduction::two_shot);
    CHECK(plan.value().plan.algorithm == MK_ALGORITHM_TWO_SHOT);
    CHECK(!plan.value().is_paced);
    return plan.value();
  };
  const RankGemmPlan large = planned(16384, 8192, MK_ALGORITHM_TWO_SHOT);
  const int64_t partial_bytes = int64_t{4096} * 8192 * 2, finished_bytes = int64_t{4096} * 8192 * 4;
  CHECK(large.plan.network_bytes == partial_bytes + finished_bytes);
  CHECK(large.plan.link_bytes == 2 * partial_bytes + 2 * finished_bytes);
  CHECK(large.plan.compute_ctas + large.plan.reduce_ctas + large.plan.send_ctas == NUM_SMS);
  for (const int64_t m : {0, 1, 16, 130, 1000, 4096, 16384}) {
    for (const int64_t n : {0, 8, 1000, 8192}) {
      const RankGemmPlan plan = planned(m, n);
      CHECK(plan.network.finished_offset(4, 0, 0) <= plan.area_bytes);
      CHECK(plan.area_bytes <= large.area_bytes);
      CHECK(plan.network.finished_tile_bytes == 2 * plan.network.tile_bytes);
    }
  }
}

TEST_CASE("between nodes an all-reduce's owners take turns, block by block of whole chunks") {
  const auto planned = [&](int64_t m, int64_t n, int rank, const std::vector<int32_t>& nodes) {
    const int nranks = static_cast<int>(nodes.size());
    const TopologyArrays arrays(Topology::make(rank, std::vector<std::string>(nodes.size(), "host"), nodes));
    const Result<RankGemmPlan> plan = rank_gemm_plan(make_call(MK_OPERATOR_GEMM_ALLREDUCE, m, n, m / nranks),
                                                     rank, nranks, NUM_SMS, &arrays.view());
    REQUIRE(plan.ok());
    return plan.value();
  };
  for (const std::vector<int32_t>& nodes :
       {std::vector<int32_t>{0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 1, 2, 3}}) {
    const RankGemmPlan first = planned(16384, 16384, 0, nodes);
    for (int rank = 0; rank < static_cast<int>(nodes.size()); ++rank) {
      for (const int64_t m : {0, 1, 3, 130, 4096, 16384, 32768, 65536}) {
        for (const int64_t n : {0, 8, 1000, 16384, 32768}) {
          const RankGemmPlan plan = planned(m, n, rank, nodes);
          const gemm_reduce_scatter::TileChunks& chunks = plan.network.finished;
          const gemm_reduce_scatter::OwnerTiles& near = plan.network_tiles.near;
          CHECK(plan.network_tiles.size() == static_cast<int>(nodes.size()) * plan.network.tiles());
          CHECK(chunks.tiles() == plan.network.tiles());
          CHECK(near.block_rows == chunks.group_rows);
          CHECK(near.group_rows == chunks.group_rows);
          CHECK((near.block_columns % chunks.chunk_tiles == 0 || near.block_columns >= near.num_n_tiles));
          // Those of the node are ahead by two blocks, or all.
          CHECK(plan.network_tiles.lead ==
                std::min(near.size(), 2 * near.num_owners * near.block_rows * near.block_columns));
        }
      }
      // The ranks agree on chunks, whoever is in their node.
      const RankGemmPlan large = planned(16384, 16384, rank, nodes);
      CHECK(large.network.finished.group_rows == first.network.finished.group_rows);
      CHECK(large.network.finished.chunk_tiles == first.network.finished.chunk_tiles);
      const int block = large.network_tiles.near.block_rows * large.network_tiles.near.block_columns;
      if (large.network.max_local > 1) CHECK((block >= NUM_SMS / 4 && block <= NUM_SMS));
      const int64_t put_bytes = large.network.finished.chunk_tiles * large.network.finished_tile_bytes;
      CHECK((put_bytes >= 256 << 10 && put_bytes <= 1 << 20));
    }
  }
}

TEST_CASE("between nodes every CTA has about as many of its rank's own tiles") {
  for (const std::vector<int32_t>& nodes : {std::vector<int32_t>{0, 0, 1, 1}, {0, 0, 0, 0, 1, 1, 1, 1}}) {
    const int nranks = static_cast<int>(nodes.size());
    const TopologyArrays arrays(Topology::make(0, std::vector<std::string>(nodes.size(), "host"), nodes));
    for (const int64_t m : {8192, 16384, 32768}) {
      for (const int reduce_ctas : {0, 4, 5, 6, 7}) {
        GemmCall call = make_call(MK_OPERATOR_GEMM_ALLREDUCE, m, m, m / nranks);
        call.tuning.reduce_ctas = reduce_ctas;
        const Result<RankGemmPlan> chosen = rank_gemm_plan(call, 0, nranks, NUM_SMS, &arrays.view());
        REQUIRE(chosen.ok());
        const RankGemmPlan& plan = chosen.value();
        const gemm_reduce_scatter::NetworkTiles& order = plan.network_tiles;
        const int own_tiles = order.near.tiles_of_owner();
        const int num_workers = plan.plan.compute_ctas;
        int most = 0;
        for (int worker = 0; worker < num_workers; ++worker) {
          int had = 0;
          for (int number = worker; number < order.size(); number = order.after(number, num_workers))
            had += order.at(number).position == nranks - 1;
          most = std::max(most, had);
        }
        INFO(nranks << " ranks, m " << m << ", " << num_workers << " CTAs: " << most << " of " << own_tiles);
        CHECK(most <= 2 + static_cast<int>(1.35 * own_tiles / num_workers));
      }
    }
  }
}

TEST_CASE("what cannot run between nodes on GPUs is refused") {
  const TopologyArrays arrays(
      Topology::make(0, std::vector<std::string>(2, "host"), std::vector<int32_t>{0, 1}));
  const auto refusal = [&](const GemmCall& call, int num_sms) {
    const Result<RankGemmPlan> plan = rank_gemm_plan(call, 0, 2, num_sms, &arrays.view());
    REQUIRE(!plan.ok());
    CHECK(plan.status().code() == MK_ERROR_UNSUPPORTED);
    return plan.status().sentence();
  };
  const auto contains = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  GemmCall one_shot = make_call(MK_OPERATOR_GEMM_ALLREDUCE, 512, 512, 512);
  one_shot.tuning.algorithm = MK_ALGORITHM_ONE_SHOT;
  CHECK(contains(refusal(one_shot, NUM_SMS), "ONE_SHOT is not built"));
  GemmCall wgrad = make_call(MK_OPERATOR_ALLGATHER_GEMM, 512, 512, 512);
  wgrad.mode = MK_ALLGATHER_WGRAD;
  CHECK(contains(refusal(wgrad, 2), "needs 3 CTAs"));
  CHECK(rank_gemm_plan(wgrad, 0, 2, 3, &arrays.view()).ok());
  wgrad.n = int64_t{1} << 26;
  CHECK(contains(refusal(wgrad, NUM_SMS), "n=67108864: between nodes 64 rows may have 4 GiB"));
  wgrad.n = 64, wgrad.m = int64_t{64} * 40000;
  CHECK(contains(refusal(wgrad, NUM_SMS), "signals"));
  CHECK(contains(refusal(make_call(MK_OPERATOR_ALLGATHER_GEMM, 512, 512, 512), 2), "needs 3 CTAs"));
  CHECK(contains(refusal(make_call(MK_OPERATOR_ALLGATHER_GEMM, int64_t{128} * 40000, 64, 8), NUM_SMS),
                 "signals"));
  CHECK(contains(refusal(make_call(MK_OPERATOR_ALLGATHER_GEMM, 512, 64, int64_t{1} << 25), NUM_SMS), "4 GiB"));
  CHECK(rank_gemm_plan(make_call(MK_OPERATOR_ALLGATHER_GEMM, 512, 512, 512), 0, 2, 3, &arrays.view()).ok());
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
      CHECK((plan.merged && plan.plan.copy_ctas == 0 && !plan.awaits_all_rows && !plan.shares_tiles));
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

TEST_CASE("a reduction of some hundred rows has its operands swapped, and ranks agree on all of it") {
  constexpr GemmClusterLimits H200 = {{0, 0, 66, 39, 30}};
  for (const mk_operator_t op : {MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
    for (const mk_algorithm_t algorithm : {MK_ALGORITHM_AUTO, MK_ALGORITHM_ONE_SHOT, MK_ALGORITHM_TWO_SHOT}) {
      for (const int nranks : {2, 3, 4, 8}) {
        for (const auto& [m, n] : {std::pair{200, 8192},
                                   {300, 8192},
                                   {420, 8190},
                                   {300, 5120},
                                   {999, 2048},
                                   {300, 14336},
                                   {420, 16384}}) {
          GemmCall call = make_call(op, m, n, 4096);
          call.tuning.algorithm = algorithm;
          CAPTURE(op, algorithm, nranks, m, n);
          const RankGemmPlan plan = rank_gemm_plan(call, 0, nranks, NUM_SMS, nullptr, H200).value();
          REQUIRE((plan.gemm.is_swapped && plan.gemm.in_clusters() && plan.gemm.num_split_ctas == 1));
          CHECK((plan.merged && plan.is_direct && !plan.is_tagged && !plan.splits_columns));
          CHECK(plan.plan.compute_ctas == plan.gemm.num_ctas());
          CHECK(plan.gemm.num_workers <= H200.at_a_time[plan.gemm.num_cluster_ctas()]);
          CHECK((plan.gemm.num_streamk_tiles == 0 && plan.gemm.workspace_bytes == 0));
          CHECK(plan.plan.tile_m == plan.gemm.block_n);
          const gemm_reduce_scatter::SwappedTiles& tiles = plan.swapped_tiles;
          CHECK(int64_t{tiles.num_m_tiles} * tiles.tile_columns >= n);
          CHECK(tiles.num_n_tiles * tiles.tile_rows >= m);
          CHECK(tiles.size() == num_cluster_tiles(call, plan.gemm) * plan.gemm.num_cluster_ctas());
          CHECK(plan.num_partial_flags == nranks * tiles.size());
          // What comes to a rank fits in front of finished rows, or, one-shot, in the area.
          const int64_t end = nranks * plan.slot_bytes;
          const bool one_shot = plan.plan.algorithm == MK_ALGORITHM_ONE_SHOT;
          CHECK(end <= (one_shot ? plan.area_bytes : plan.gather_begin));
          CHECK(plan.slot_bytes >= (one_shot ? m : ceil_div(m, nranks)) * n * 2);
          // k and the order of B are each rank's own.
          call.k = 72;
          call.b_layout = MK_LAYOUT_NK;
          const RankGemmPlan other = rank_gemm_plan(call, nranks - 1, nranks, NUM_SMS, nullptr, H200).value();
          CHECK((other.gemm.block_n == plan.gemm.block_n && other.gemm.cluster == plan.gemm.cluster));
          CHECK(other.slot_bytes == plan.slot_bytes);
          CHECK(other.num_partial_flags == plan.num_partial_flags);
        }
      }
    }
  }
  // Not a sum in fp32, a tile that the caller has chosen, few rows, many, nor where no clusters run.
  const auto is_swapped = [](const GemmCall& call, const GemmClusterLimits& limits) {
    return rank_gemm_plan(call, 0, 2, NUM_SMS, nullptr, limits).value().gemm.is_swapped;
  };
  const GemmCall call = make_call(MK_OPERATOR_GEMM_ALLREDUCE, 300, 8192, 4096);
  CHECK(is_swapped(call, H200));
  CHECK(!is_swapped(call, GemmClusterLimits{}));
  GemmCall exact = call, tuned = call, few = call, many = call;
  exact.comm_dtype = MK_DTYPE_FP32;
  tuned.tuning.tile_m = 128;
  few.m = 128;
  many.m = 1100;
  for (const GemmCall& other : {exact, tuned, few, many}) CHECK(!is_swapped(other, H200));
}

TEST_CASE("where clusters have several swapped tiles, an all-gather cuts some along k, and a reduction none") {
  constexpr GemmClusterLimits H200 = {{0, 0, 66, 39, 30}};
  for (const mk_operator_t op : {MK_OPERATOR_ALLGATHER_GEMM, MK_OPERATOR_GEMM_REDUCE_SCATTER}) {
    for (const auto& [m, n] : {std::pair{420, 14336}, {300, 28672}}) {
      const GemmCall call = make_call(op, m, n, 8192);
      const GemmPlan plan = rank_gemm_plan(call, 0, 2, NUM_SMS, nullptr, H200).value().gemm;
      CAPTURE(op, m, n);
      CHECK((plan.is_swapped && plan.num_ctas() <= NUM_SMS));
      CHECK(plan.num_workers < num_cluster_tiles(call, plan));
      CHECK((plan.num_streamk_tiles > 0) == (op == MK_OPERATOR_ALLGATHER_GEMM));
    }
  }
}

TEST_CASE("each row of swapped tiles has a place of its own, and a unit waits for the tiles that it is in") {
  using namespace gemm_reduce_scatter;
  for (const auto& [m, nranks, n, num_n_tiles] :
       {std::array<int, 4>{300, 2, 200, 2}, {137, 3, 64, 2}, {999, 4, 130, 7}, {420, 8, 16, 2}}) {
    const int tile_rows = even_columns(m, num_n_tiles);
    const MergedRows rows = {m, static_cast<int>(ceil_div(m, nranks)),
                             static_cast<int>(ceil_div(n, UNIT_COLUMNS))};
    const PartialPanels panels = {rows.max_rows};
    const SwappedTiles tiles = {static_cast<int>(ceil_div(n, 128)), num_n_tiles, tile_rows, 128};
    CAPTURE(m, nranks, n);
    std::vector<std::vector<bool>> taken(nranks);
    for (auto& of_owner : taken) of_owner.resize(panels.bytes(rows.num_column_units) / 2);
    for (int row = 0; row < m; ++row) {
      const OwnedRow owned = rows.owned(row);
      REQUIRE(rows.first_row(owned.owner) + owned.row == row);
      for (int column = 0; column < n; ++column) {
        const auto place = static_cast<size_t>(panels.offset(owned.row, column) / 2);
        REQUIRE(place < taken[owned.owner].size());
        REQUIRE(!taken[owned.owner][place]);
        taken[owned.owner][place] = true;
      }
    }
    for (int owner = 0; owner < nranks; ++owner) {
      for (int number = 0; number < rows.num_units(owner); ++number) {
        const MergedUnit unit = rows.unit(owner, number);
        const int first = unit.row_unit * MergedRows::UNIT_ROWS;
        const int num = std::min(MergedRows::UNIT_ROWS, rows.rows(owner) - first);
        const int row = rows.first_row(owner) + first, column = unit.column_unit * UNIT_COLUMNS;
        const int begin = tiles.first(row, column), end = begin + tiles.count(row, num);
        for (int i = row; i < row + num; ++i) {
          const int tile = tiles.number(column / 128, i / tile_rows);
          REQUIRE((tile >= begin && tile < end));
        }
        REQUIRE(end <= tiles.number(column / 128, num_n_tiles - 1) + 1);
        REQUIRE(end <= tiles.size());
      }
    }
  }
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
  CHECK(large.awaits_all_rows);
  CHECK(planned(256, 14336, 8192).awaits_all_rows);
  CHECK(!planned(64, 28672, 8192).awaits_all_rows);    // one row of tiles
  CHECK(!planned(256, 8192, 2048).awaits_all_rows);    // weights that stay
  CHECK(!planned(1024, 28672, 8192).awaits_all_rows);  // tiles of one source
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

TEST_CASE("where memory is slow, CTAs of long reductions keep in step") {
  const auto k_steps = [](mk_operator_t op, double memory_bytes_per_us) {
    const GemmCall call = make_call(op, 16384, 16384, 4096);
    return rank_gemm_plan(call, 0, 4, NUM_SMS, nullptr, {}, memory_bytes_per_us).value().out_of_step_k_steps;
  };
  for (const mk_operator_t op : {MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
    CHECK(k_steps(op, H100_MEMORY_BYTES_PER_US) < OUT_OF_STEP_K_STEPS);
    CHECK(k_steps(op, 4.8e6) == OUT_OF_STEP_K_STEPS);
  }
  CHECK(k_steps(MK_OPERATOR_ALLGATHER_GEMM, H100_MEMORY_BYTES_PER_US) == OUT_OF_STEP_K_STEPS);
}
