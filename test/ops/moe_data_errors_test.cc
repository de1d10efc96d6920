// SPDX-License-Identifier: MIT
// Errors that only the data show: every rank is told the same, nothing is moved, and the communicator goes on.
#include <cstring>

#include "moe_launch.h"
#include "support/catch.h"

using namespace mk::test;

namespace {

MoeCase plain_case() {
  MoeCase moe;
  moe.same_tokens = true;
  moe.tokens = 6;
  moe.experts = 7;
  moe.topk = 3;
  moe.dispatched_rows = true;
  return moe;
}

// After a launch that must have failed: MK_ERROR_DATA that blames `rank` and says all of `says`, which is then
// cleared.
void expect_data_error(RankSession& session, int rank, const std::vector<std::string>& says) {
  const mk_status_t seen = mk_comm_synchronize(session.comm(), nullptr);
  const std::string sentence = mk_get_last_error(session.comm());
  if (seen != MK_ERROR_DATA)
    session.fail(std::string("synchronize: ") + mk_status_string(seen) + ": " + sentence);
  for (const std::string& text : says) {
    if (sentence.find(text) == std::string::npos) session.fail("\"" + sentence + "\" lacks \"" + text + "\"");
  }
  mk_async_error_t error = MK_ASYNC_ERROR_INIT;
  session.ok(mk_comm_get_async_error(session.comm(), &error), "mk_comm_get_async_error");
  if (error.status != MK_ERROR_DATA || error.rank != rank)
    session.fail("the error is " + std::to_string(error.status) + " of rank " + std::to_string(error.rank));
  session.ok(mk_comm_clear_async_error(session.comm()), "mk_comm_clear_async_error");
}

void expect_empty_record(RankSession& session, MoeLaunch& launch, int64_t needed_rows) {
  const mk_moe_routing_t& record = *launch.record();
  if (record.status != MK_ERROR_DATA || record.num_rows != 0 || record.needed_rows != needed_rows)
    session.fail("record: status " + std::to_string(record.status) + ", rows " +
                 std::to_string(record.num_rows) + ", needed " + std::to_string(record.needed_rows));
  const auto* counts =
      reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(&record) + record.expert_counts_offset);
  for (int local = 0; local < record.num_local_experts; ++local) {
    if (counts[local] != 0) session.fail("an expert has rows");
  }
}

using Body = std::function<void(RankSession&, MoeLaunch&)>;

// Runs `body` and then a good layer on every rank of several layouts.
void check(const MoeProblem& problem, const Body& body, std::vector<std::vector<int32_t>> layouts) {
  for (const auto& layout : layouts) {
    RankJob job;
    job.node_of_rank = layout;
    const auto failures = run_rank_threads(job, [&](RankSession& session) {
      MoeLaunch launch(session, problem);
      body(session, launch);
      run_layer(session, problem, false);
    });
    INFO(join_lines(failures));
    REQUIRE(failures.empty());
  }
}

const std::vector<std::vector<int32_t>> kFourRanks = {{0, 0, 0, 0}, {0, 1, 0, 1}};

}  // namespace

TEST_CASE("Bad indices are told to every rank") {
  struct Bad {
    std::vector<int64_t> row;
    std::string says;
  };
  const MoeProblem problem(plain_case(), 4);
  for (const Bad& bad : {Bad{{1, 7, 2}, "topk_idx[4, 1]: expected -1 to 6, saw 7"},
                         {{-2, 1, 2}, "topk_idx[4, 0]: expected -1 to 6, saw -2"},
                         {{3, 1, 3}, "topk_idx[4, 2]: expected each expert once in a row, saw 3 again"},
                         {{0, 1, 2000000000}, "topk_idx[4, 2]: expected -1 to 6, saw 2000000000"}}) {
    check(
        problem,
        [&](RankSession& session, MoeLaunch& launch) {
          if (session.rank() == 2) std::copy(bad.row.begin(), bad.row.end(), launch.topk_idx.begin() + 4 * 3);
          if (!launch.enqueue_dispatch()) return;
          expect_data_error(session, 2, {"mk_moe_dispatch_gemm", "rank 2", bad.says, "no rows were moved"});
          expect_empty_record(session, launch, 0);
        },
        kFourRanks);
  }
}

TEST_CASE("Of several bad ranks the lowest is named, and a wide index is read whole") {
  MoeCase moe = plain_case();
  moe.index_type = MK_INDEX_INT64;
  const MoeProblem problem(moe, 4);
  check(
      problem,
      [&](RankSession& session, MoeLaunch& launch) {
        if (session.rank() > 0) launch.topk_idx[0] = int64_t{1} << 32;
        if (!launch.enqueue_dispatch()) return;
        expect_data_error(session, 1, {"rank 1", "topk_idx[0, 0]", "saw 4294967296"});
      },
      kFourRanks);
}

TEST_CASE("More rows than capacity: the record says how many would do, and a combine of it gives zeros") {
  const MoeProblem problem(plain_case(), 4);
  int fullest = 0;
  for (int rank = 1; rank < 4; ++rank) {
    if (problem.rows_of_rank(rank) > problem.rows_of_rank(fullest)) fullest = rank;
  }
  const int64_t needed = problem.capacity();
  check(
      problem,
      [&](RankSession& session, MoeLaunch& launch) {
        mk_moe_dispatch_gemm_args_t args = launch.dispatch_args();
        args.capacity_rows = needed - 1;
        if (!session.ok(mk_moe_dispatch_gemm(session.comm(), &args, nullptr), "dispatch")) return;
        expect_data_error(session, fullest,
                          {"capacity_rows: expected at least " + std::to_string(needed),
                           "saw room for " + std::to_string(needed - 1)});
        expect_empty_record(session, launch, needed);
        if (!launch.enqueue_combine() || !launch.synchronize()) return;
        for (const char bit : launch.combine_bits()) {
          if (bit != 0) return session.fail("the combine of no rows is not zero");
        }
      },
      kFourRanks);
}

TEST_CASE("Records that are none, or do not belong together, are told to every rank") {
  MoeCase other_case = plain_case();
  other_case.seed = 9;
  const MoeProblem problem(plain_case(), 4);
  const MoeProblem other(other_case, 4);
  check(
      problem,
      [&](RankSession& session, MoeLaunch& launch) {
        if (!launch.enqueue_dispatch() || !launch.synchronize()) return;
        MoeLaunch second(session, other);
        if (!second.enqueue_dispatch() || !second.synchronize()) return;
        // One rank's record is of another dispatch.
        mk_moe_gemm_combine_args_t args = launch.combine_args();
        if (session.rank() == 3) args.routing = second.record();
        if (!session.ok(mk_moe_gemm_combine(session.comm(), &args, nullptr), "combine")) return;
        mk_async_error_t error = MK_ASYNC_ERROR_INIT;
        if (mk_comm_synchronize(session.comm(), nullptr) != MK_ERROR_DATA) session.fail("no data error");
        session.ok(mk_comm_get_async_error(session.comm(), &error), "mk_comm_get_async_error");
        expect_data_error(session, error.rank, {"mk_moe_gemm_combine", "pass the records of one dispatch"});
        // One rank's record is rubbish.
        if (session.rank() == 1) std::memset(launch.record(), 0x5a, launch.record_bytes());
        if (!launch.enqueue_dispatch(true)) return;
        expect_data_error(session, 1, {"rank 1", "routing: expected the record of a dispatch", "tokens=6"});
        if (!launch.enqueue_combine()) return;
        expect_data_error(session, 1, {"mk_moe_gemm_combine", "rank 1", "routing: expected the record"});
      },
      kFourRanks);
}

TEST_CASE("More tokens than were prepared are told to every rank") {
  MoeCase moe = plain_case();
  moe.tokens = 40;
  moe.hidden = 512;
  const MoeProblem problem(moe, 4);
  RankJob job;
  job.node_of_rank = {0, 0, 1, 1};
  const auto failures = run_rank_threads(job, [&](RankSession& session) {
    MoeLaunch launch(session, problem);
    mk_moe_maxima_t maxima = launch.maxima();
    maxima.tokens = 2;
    maxima.capacity_rows = 0;
    if (!session.ok(mk_moe_dispatch_gemm_prepare(session.comm(), &maxima), "prepare")) return;
    if (!launch.enqueue_dispatch()) return;
    expect_data_error(session, 0, {"workspace", "prepare with larger tokens"});
    run_layer(session, problem, true);
  });
  INFO(join_lines(failures));
  REQUIRE(failures.empty());
}

TEST_CASE("A combine does not prepare itself") {
  MoeCase moe = plain_case();
  const MoeProblem problem(moe, 2);
  RankJob job;
  job.node_of_rank = {0, 1};
  const auto failures = run_rank_threads(job, [&](RankSession& session) {
    MoeLaunch launch(session, problem);
    const mk_moe_gemm_combine_args_t args = launch.combine_args();
    const mk_status_t seen = mk_moe_gemm_combine(session.comm(), &args, nullptr);
    if (seen != MK_ERROR_NOT_PREPARED) session.fail(mk_status_string(seen));
    if (std::string(mk_get_last_error(session.comm())).find("mk_moe_gemm_combine_prepare") == std::string::npos)
      session.fail(mk_get_last_error(session.comm()));
    run_layer(session, problem, false);  // its dispatch prepares both
  });
  INFO(join_lines(failures));
  REQUIRE(failures.empty());
}

namespace {

// Launches on which ranks disagree, and then a good layer.
void check_disagreement(const std::function<mk_status_t(RankSession&, MoeLaunch&)>& launch_differently,
                        const std::vector<std::string>& says) {
  const MoeProblem problem(plain_case(), 4);
  check(
      problem,
      [&](RankSession& session, MoeLaunch& launch) {
        mk_moe_maxima_t maxima = launch.maxima();
        maxima.hidden = 64;
        maxima.topk = 4;
        maxima.capacity_rows += 10;
        maxima.out_dtype = MK_DTYPE_FP32;
        if (!session.ok(mk_moe_gemm_combine_prepare(session.comm(), &maxima), "prepare")) return;
        if (!launch.enqueue_dispatch() || !launch.synchronize()) return;
        launch.poison_outputs();
        const std::string before = launch.dispatch_bits() + launch.combine_bits();
        if (!session.ok(launch_differently(session, launch), "launch")) return;
        const mk_status_t seen = mk_comm_synchronize(session.comm(), nullptr);
        const std::string sentence = mk_get_last_error(session.comm());
        if (seen != MK_ERROR_MISMATCH) session.fail(std::string(mk_status_string(seen)) + ": " + sentence);
        for (const std::string& text : says) {
          if (sentence.find(text) == std::string::npos) session.fail("\"" + sentence + "\" lacks " + text);
        }
        session.ok(mk_comm_clear_async_error(session.comm()), "mk_comm_clear_async_error");
        if (launch.dispatch_bits() + launch.combine_bits() != before) session.fail("an output was written");
      },
      kFourRanks);
}

}  // namespace

TEST_CASE("Ranks that disagree on an expert layer are told before any row moves") {
  check_disagreement(
      [](RankSession& session, MoeLaunch& launch) {
        mk_moe_dispatch_gemm_args_t args = launch.dispatch_args();
        if (session.rank() == 1) args.capacity_rows -= 2;
        return mk_moe_dispatch_gemm(session.comm(), &args, nullptr);
      },
      {"rank 1", "moe_dispatch_gemm", "capacity_rows"});
  check_disagreement(
      [](RankSession& session, MoeLaunch& launch) {
        mk_moe_dispatch_gemm_args_t args = launch.dispatch_args();
        if (session.rank() == 3) args.hidden = 8;
        return mk_moe_dispatch_gemm(session.comm(), &args, nullptr);
      },
      {"rank 3", "hidden=8", "hidden=16"});
  check_disagreement(
      [](RankSession& session, MoeLaunch& launch) {
        const mk_moe_dispatch_gemm_args_t dispatch = launch.dispatch_args();
        const mk_moe_gemm_combine_args_t combine = launch.combine_args();
        return session.rank() == 2 ? mk_moe_gemm_combine(session.comm(), &combine, nullptr)
                                   : mk_moe_dispatch_gemm(session.comm(), &dispatch, nullptr);
      },
      {"rank 2", "moe_gemm_combine", "moe_dispatch_gemm"});
}
