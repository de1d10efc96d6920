// SPDX-License-Identifier: MIT
// The mixture-of-experts operators through the C interface: exact to the last bit on integers, within tolerance
// on random numbers.
#include <array>
#include <cstdlib>
#include <cstring>
#include <random>

#include "element.h"
#include "moe_launch.h"
#include "support/catch.h"
#include "support/sanitizers.h"

using namespace mk::test;

namespace {

const std::vector<std::vector<int32_t>>& layouts() {
  static const std::vector<std::vector<int32_t>> all = {
      {0},
      {0, 0},
      {0, 1},
      {0, 0, 0},
      {0, 1, 0, 1},
      {0, 0, 0, 1},
      {0, 1, 0, 1, 0},
      {0, 0, 0, 1, 1, 2},
      {7, 3, 7, 3, 3, 9},
      {0, 0, 0, 0, 1, 1, 1, 1},
  };
  return all;
}

std::string layout_text(const std::vector<int32_t>& layout) {
  std::string text;
  for (const int32_t node : layout) text += std::to_string(node) + " ";
  return text;
}

void require_none(const std::vector<std::string>& failures) {
  INFO(join_lines(failures));
  REQUIRE(failures.empty());
}

std::vector<MoeCase> corner_cases(int nranks) {
  std::vector<MoeCase> cases;
  const auto add = [&](int64_t tokens, int experts, int topk) -> MoeCase& {
    MoeCase& moe = cases.emplace_back();
    moe.tokens = tokens;
    moe.experts = experts;
    moe.topk = topk;
    moe.seed = cases.size();
    return moe;
  };
  add(8, 2 * nranks, 2).same_tokens = true;
  add(0, nranks, 1);
  add(1, 1, 1);
  add(5, nranks + 1, 2).dispatched_rows = true;  // experts do not divide by ranks
  add(6, 3 * nranks - 1, 16).spare_rows = 3;     // perhaps fewer experts than topk
  add(7, 16, 16).out_dtype = MK_DTYPE_FP32;
  for (const Spread spread : {Spread::one_expert, Spread::few, Spread::half, Spread::nowhere}) {
    MoeCase& moe = add(9, 2 * nranks + 1, 3);
    moe.spread = spread;
    moe.dispatched_rows = spread == Spread::half;
  }
  MoeCase& wide = add(4, nranks, 2);
  wide.hidden = 136;
  wide.inter = 72;
  wide.w_layout = MK_LAYOUT_NK;
  wide.index_type = MK_INDEX_INT64;
  wide.row_scale = true;
  wide.padding = 1;
  MoeCase& small_chunks = add(40, 4, 3);
  small_chunks.tuning.chunk_bytes = 1;
  small_chunks.tuning.tile_m = 3;
  small_chunks.tuning.tile_n = 5;
  small_chunks.tuning.compute_ctas = 2;
  small_chunks.dtype = MK_DTYPE_FP16;
  small_chunks.out_dtype = MK_DTYPE_FP16;
  MoeCase& many_tokens = add(90, 3, 2);  // more tokens than chunks
  many_tokens.tuning.chunk_bytes = 1;
  many_tokens.spread = Spread::few;
  return cases;
}

MoeCase mixed_case(uint64_t seed, int nranks) {
  std::mt19937_64 random(seed * 0x9e3779b97f4a7c15ull);
  const auto below = [&](uint64_t bound) { return static_cast<int64_t>(random() % bound); };
  const auto one_in = [&](uint64_t chances) { return below(chances) == 0; };
  MoeCase moe;
  moe.seed = random() >> 40;
  moe.tokens = below(14);
  moe.same_tokens = one_in(3);
  moe.hidden = 8 * (1 + below(one_in(4) ? 20 : 4));
  moe.inter = 8 * (1 + below(one_in(4) ? 12 : 3));
  moe.experts = static_cast<int>(1 + below(static_cast<uint64_t>(nranks) * 4));
  moe.topk = static_cast<int>(1 + below(one_in(4) ? 16 : 4));
  moe.spread = one_in(2) ? Spread::even : static_cast<Spread>(below(5));
  const mk_dtype_t types[] = {MK_DTYPE_BF16, MK_DTYPE_FP16, MK_DTYPE_FP32};
  moe.dtype = types[below(2)];
  moe.out_dtype = types[below(3)];
  moe.w_layout = one_in(2) ? MK_LAYOUT_NK : MK_LAYOUT_KN;
  moe.index_type = one_in(2) ? MK_INDEX_INT64 : MK_INDEX_INT32;
  moe.row_scale = one_in(3);
  moe.dispatched_rows = one_in(3);
  moe.spare_rows = one_in(2) ? 0 : below(10);
  moe.padding = one_in(2) ? 0 : static_cast<int>(below(3));
  if (one_in(2)) {
    moe.tuning.tile_m = static_cast<int32_t>(1 + below(9));
    moe.tuning.tile_n = static_cast<int32_t>(1 + below(70));
    moe.tuning.chunk_bytes = 1 + below(900);
  }
  if (one_in(4)) moe.tuning.compute_ctas = static_cast<int32_t>(1 + below(3));
  return moe;
}

std::vector<MoeCase> mixed_cases(uint64_t seed, size_t count, int nranks) {
  std::vector<MoeCase> cases;
  for (size_t index = 0; index < count; ++index) cases.push_back(mixed_case(seed * 1000 + index, nranks));
  return cases;
}

void run_layers(const std::vector<int32_t>& layout, const std::vector<MoeCase>& cases) {
  RankJob job;
  job.node_of_rank = layout;
  const auto problems = make_problems(cases, job.nranks());
  INFO("nodes " << layout_text(layout));
  require_none(run_rank_threads(job, [&](RankSession& session) {
    for (size_t number = 0; number < problems.size(); ++number) {
      if (!run_layer(session, problems[number], number % 2 == 0)) return;
    }
  }));
}

}  // namespace

TEST_CASE("Corner cases of an expert layer are exact on every node layout") {
  for (const auto& layout : fewer_if_slow(layouts()))
    run_layers(layout, corner_cases(static_cast<int>(layout.size())));
}

TEST_CASE("Mixed expert layers are exact on every node layout") {
  uint64_t seed = 100;
  for (const auto& layout : fewer_if_slow(layouts()))
    run_layers(layout, mixed_cases(++seed, 24, static_cast<int>(layout.size())));
}

TEST_CASE("A combine's only row may end where its output begins") {
  MoeCase moe;
  moe.tokens = 1;
  moe.same_tokens = true;
  moe.experts = moe.topk = 1;
  moe.hidden = moe.inter = 8;
  const MoeProblem problem(moe, 1);
  require_none(run_rank_threads({.node_of_rank = {0}}, [&](RankSession& session) {
    MoeLaunch launch(session, problem);
    if (!launch.enqueue_dispatch()) return;
    alignas(16) std::array<uint16_t, 16> row_and_y{};
    mk_moe_gemm_combine_args_t args = launch.combine_args();
    std::memcpy(row_and_y.data(), args.rows, 16);
    args.rows = row_and_y.data();
    args.y = row_and_y.data() + 8;
    if (!session.ok(mk_moe_gemm_combine(session.comm(), &args, nullptr), "combine") || !launch.synchronize())
      return;
    for (int64_t h = 0; h < moe.hidden; ++h) {
      if (decode(row_and_y[static_cast<size_t>(8 + h)], moe.out_dtype) !=
          problem.combined(0, 0)[static_cast<size_t>(h)])
        session.fail("column " + std::to_string(h) + " is wrong");
    }
  }));
}

TEST_CASE("Random numbers of an expert layer are within tolerance") {
  for (const auto& layout : {std::vector<int32_t>{0, 0}, {0, 0, 1, 1, 2}}) {
    std::vector<MoeCase> cases;
    for (const mk_dtype_t dtype : {MK_DTYPE_BF16, MK_DTYPE_FP16}) {
      for (const mk_dtype_t out_dtype : {MK_DTYPE_BF16, MK_DTYPE_FP16, MK_DTYPE_FP32}) {
        MoeCase moe;
        moe.tokens = 20;
        moe.hidden = 48;
        moe.inter = 40;
        moe.experts = 7;
        moe.topk = 3;
        moe.dtype = dtype;
        moe.out_dtype = out_dtype;
        moe.row_scale = true;
        moe.integers = false;
        moe.seed = cases.size();
        cases.push_back(moe);
      }
    }
    run_layers(layout, cases);
  }
}

TEST_CASE("A record serves a second dispatch, from other memory") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 1, 0, 1, 0}}) {
    RankJob job;
    job.node_of_rank = layout;
    std::vector<MoeCase> cases = mixed_cases(55, 6, job.nranks());
    const auto problems = make_problems(cases, job.nranks());
    require_none(run_rank_threads(job, [&](RankSession& session) {
      for (const MoeProblem& problem : problems) {
        MoeLaunch launch(session, problem);
        if (!launch.prepare() || !launch.enqueue_dispatch() || !launch.synchronize()) return;
        launch.poison_outputs();
        launch.relocate_record();
        if (!launch.enqueue_dispatch(true) || !launch.enqueue_combine() || !launch.synchronize()) return;
        launch.verify_dispatch();
        launch.verify_combine();
      }
    }));
  }
}

TEST_CASE("Expert layers enqueued without waiting are exact") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 1, 0, 1}, {0, 0, 0, 1, 1}}) {
    RankJob job;
    job.node_of_rank = layout;
    const auto problems = make_problems(mixed_cases(77, 24, job.nranks()), job.nranks());
    require_none(run_rank_threads(job, [&](RankSession& session) {
      for (size_t first = 0; first < problems.size(); first += 4) {
        std::deque<MoeLaunch> launches;
        for (size_t at = first; at < first + 4; ++at) launches.emplace_back(session, problems[at]);
        for (MoeLaunch& launch : launches) {
          if (!launch.prepare()) return;
        }
        for (MoeLaunch& launch : launches) {
          if (!launch.enqueue_dispatch() || !launch.enqueue_combine()) return;
        }
        if (!launches[0].synchronize()) return;
        for (MoeLaunch& launch : launches) launch.verify_dispatch(), launch.verify_combine();
      }
    }));
  }
}

TEST_CASE("Tokens, counts and sums that arrive in the worst order are exact") {
  for (const char* seed : {"1", "2", "3"}) {
    setenv("MK_LOOPBACK_SEED", seed, 1);
    for (const auto& layout : {std::vector<int32_t>{0, 1}, {0, 1, 0, 1, 0}, {0, 0, 1, 1, 2, 2}})
      run_layers(layout, mixed_cases(std::stoul(seed) + 7, 12, static_cast<int>(layout.size())));
  }
  unsetenv("MK_LOOPBACK_SEED");
}
