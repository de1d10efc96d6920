// SPDX-License-Identifier: MIT
// The plan of reduce-scatters and all-reduces between GPUs of a node.
#include <algorithm>
#include <array>
#include <random>
#include <vector>

#include "kernels/device/tagged_packets.h"
#include "kernels/ops/gemm_reduce_scatter/tagged_params.h"
#include "kernels/protocol.h"
#include "kernels/topology_arrays.h"
#include "rank_gemm_plans.h"

using namespace mk;
using namespace mk::test;

namespace {

constexpr GemmClusterLimits H200 = {{0, 0, 66, 39, 30}};

}  // namespace

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

TEST_CASE("a reduction of some hundred rows has its operands swapped, and ranks agree on all of it") {
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

TEST_CASE("much that is exchanged among many is sent beside the product, if owners' rows fill their tiles") {
  const auto is_swapped = [](int64_t m, int64_t n, int nranks) {
    const GemmCall call = make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, m, n, 2048);
    return rank_gemm_plan(call, 0, nranks, NUM_SMS, nullptr, H200).value().gemm.is_swapped;
  };
  CHECK(!is_swapped(768, 28672, 4));
  CHECK(is_swapped(600, 28672, 4));  // owners have 150 rows
  CHECK(is_swapped(420, 28672, 4));  // one row of tiles
  CHECK(is_swapped(700, 16384, 4));
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

TEST_CASE("ranks begin with different owners of a tile's rows, and come to themselves last") {
  using gemm_reduce_scatter::first_in_turn;
  for (const int nranks : {1, 2, 3, 4, 8}) {
    for (int first = 0; first < nranks; ++first) {
      for (int end = first + 1; end <= nranks; ++end) {
        CAPTURE(nranks, first, end);
        std::vector<int> begin_with(nranks, 0);
        for (int rank = 0; rank < nranks; ++rank) {
          const int owner = first_in_turn(rank, first, end);
          REQUIRE((owner >= first && owner < end));
          ++begin_with[owner];
          if (rank < first || rank >= end) continue;
          CHECK(owner == (rank + 1 < end ? rank + 1 : first));
        }
        const int num_owners = end - first;
        for (int owner = first; owner < end; ++owner)
          CHECK(begin_with[owner] <= (nranks + num_owners - 1) / num_owners);
      }
    }
  }
}
