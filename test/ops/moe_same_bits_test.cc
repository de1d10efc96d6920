// SPDX-License-Identifier: MIT
// The bits of an expert layer depend on topology, shape and inputs, and on nothing else.
#include "moe_launch.h"
#include "support/catch.h"

using namespace mk::test;

namespace {

MoeCase random_numbers() {
  MoeCase moe;
  moe.tokens = 12;
  moe.hidden = 40;
  moe.inter = 24;
  moe.experts = 7;
  moe.topk = 4;
  moe.out_dtype = MK_DTYPE_FP16;
  moe.row_scale = true;
  moe.integers = false;
  return moe;
}

struct Bits {
  std::string dispatched;
  std::string combined;
  bool operator==(const Bits&) const = default;
};

// The bits of every problem's results, `rounds` times, four layers in flight together.
void check(const RankJob& job, const std::vector<MoeCase>& cases, int rounds) {
  const auto problems = make_problems(cases, job.nranks());
  const auto failures = run_rank_threads(job, [&](RankSession& session) {
    std::deque<MoeLaunch> launches;
    for (const MoeProblem& problem : problems) launches.emplace_back(session, problem);
    std::vector<Bits> all;
    for (int round = 0; round < rounds; ++round) {
      for (size_t at = 0; at < launches.size(); ++at) {
        launches[at].poison_outputs();
        if (!launches[at].enqueue_dispatch() || !launches[at].enqueue_combine()) return;
        if ((at % 4 == 3 || at + 1 == launches.size()) && !launches[at].synchronize()) return;
      }
      for (MoeLaunch& launch : launches) {
        if (round == 0) launch.verify_dispatch(), launch.verify_combine();
        all.push_back({launch.dispatch_bits(), launch.combine_bits()});
        if (!(all.back() == all.front()))
          return session.fail("run " + std::to_string(all.size()) + " has other bits");
      }
    }
  });
  INFO(join_lines(failures));
  REQUIRE(failures.empty());
}

}  // namespace

TEST_CASE("200 runs of an expert layer give the same bits") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 1, 0, 1, 0}}) {
    RankJob job;
    job.node_of_rank = layout;
    job.host_threads = 2;
    MoeCase moe = random_numbers();
    moe.tuning.tile_m = 4;
    moe.tuning.tile_n = 16;
    moe.tuning.chunk_bytes = 300;
    check(job, std::vector<MoeCase>(4, moe), 50);
  }
}

TEST_CASE("Threads, tiles and chunks do not change the bits of an expert layer") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 1, 0, 2}}) {
    RankJob job;
    job.node_of_rank = layout;
    std::vector<MoeCase> variants;
    for (const int threads : {1, 2, 3}) {
      for (const int64_t chunk_bytes : {1, 200, 1000, 0}) {
        MoeCase& moe = variants.emplace_back(random_numbers());
        moe.tuning.compute_ctas = threads;
        moe.tuning.chunk_bytes = chunk_bytes;
        moe.tuning.tile_m = chunk_bytes == 0 ? 0 : threads;
        moe.tuning.tile_n = chunk_bytes == 0 ? 0 : 7 * threads;
      }
    }
    check(job, variants, 1);
  }
}
