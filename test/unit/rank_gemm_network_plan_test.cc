// SPDX-License-Identifier: MIT
// The plan of the GEMM operators between GPUs of several nodes.
#include <algorithm>
#include <vector>

#include "kernels/topology_arrays.h"
#include "rank_gemm_plans.h"

using namespace mk;
using namespace mk::test;

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
  CHECK(first.num_panels == 1);
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
