// SPDX-License-Identifier: MIT
// The protocol of ring attention as its schedules state it, for many shapes and layouts, without running it.
#include <random>
#include <set>

#include "attention_launch.h"
#include "attention_model.h"
#include "support/catch.h"

using namespace mk;
using namespace mk::test;

namespace {

RingAttentionCall make_call(const AttentionCase& attention, mk_operator_t op) {
  RingAttentionCall call;
  call.op = op;
  call.batch = attention.batch;
  call.seq = attention.seq;
  call.heads = attention.heads;
  call.kv_heads = attention.kv_heads;
  call.dim = attention.dim;
  call.causal = attention.causal;
  call.num_sequences = attention.num_sequences();
  call.cu_seqlens = attention.cu_seqlens.empty() ? nullptr : attention.cu_seqlens.data();
  call.tuning = attention.tuning;
  return call;
}

std::vector<AttentionCase> cases_of(int nranks) {
  std::vector<AttentionCase> cases = attention_corner_cases(nranks);
  for (uint64_t index = 0; index < 20; ++index) cases.push_back(mixed_attention_case(5, index, nranks));
  return cases;
}

std::vector<std::vector<int32_t>> layouts() {
  auto all = attention_layouts();
  all.push_back({0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2});
  all.push_back({2, 2, 2, 2, 2, 5, 5, 5, 1, 1, 1, 1, 1, 1, 1, 8});
  return all;
}

constexpr mk_operator_t kOperators[] = {MK_OPERATOR_RING_ATTENTION, MK_OPERATOR_RING_ATTENTION_BACKWARD};

std::string lines(const std::vector<std::string>& all) {
  std::string text;
  for (size_t at = 0; at < all.size() && at < 20; ++at) text += all[at] + "\n";
  return text;
}

// A schedule with all that it points to.
struct Planned {
  Planned(const AttentionCase& attention, const Views& views, int rank)
      : call(make_call(attention, MK_OPERATOR_RING_ATTENTION)),
        view(views.of(rank)),
        plan(ring_attention::plan_host(call, view, 1).value()),
        slices(ring_attention::make_slices(call, view, true)),
        rows(ring_attention::count_rows(slices)),
        schedule(ring_attention::make_schedule(call, plan, view, slices, rows)) {}
  Planned(const Planned&) = delete;

  RingAttentionCall call;
  TopologyView view;
  mk_plan_t plan;
  ring_attention::Slices slices;
  std::vector<int64_t> rows;
  ring_attention::Schedule schedule;
};

}  // namespace

TEST_CASE("Attention: no role waits in a circle, and every flag, signal and byte is accounted for") {
  for (const auto& layout : layouts()) {
    const Views views(layout);
    for (const mk_operator_t op : kOperators) {
      for (const AttentionCase& attention : cases_of(views.nranks())) {
        const AttentionModel model(views, make_call(attention, op), 2);
        const std::string complaints = lines(model.complaints());
        const std::string cycle = lines(model.graph().cycle());
        INFO(layout.size() << " ranks, operator " << op << ", " << describe(attention) << "\n"
                           << complaints << cycle);
        REQUIRE(complaints.empty());
        REQUIRE(cycle.empty());
      }
    }
  }
}

TEST_CASE("Attention: a bank is written again only when its reader has left the launch before last") {
  for (const auto& layout : attention_layouts()) {
    const Views views(layout);
    for (const mk_operator_t op : kOperators) {
      AttentionCase attention;
      attention.seq = 1;  // one rank has rows
      const AttentionModel model(views, make_call(attention, op), 3);
      for (int writer = 0; writer < views.nranks(); ++writer) {
        for (int reader = 0; reader < views.nranks(); ++reader)
          REQUIRE(model.graph().waits({"begin", writer, 2}, {"end", reader, 0}));
      }
    }
  }
}

TEST_CASE("Attention: planted circles are found") {
  AttentionCase attention;
  attention.seq = 40;
  for (const auto& layout : {std::vector<int32_t>{0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1, 0}}) {
    const Views views(layout);
    const auto cycle = [&](mk_operator_t op, Fault fault) {
      return AttentionModel(views, make_call(attention, op), 1, fault).graph().cycle();
    };
    REQUIRE_FALSE(cycle(MK_OPERATOR_RING_ATTENTION, Fault::gather_before_push).empty());
    REQUIRE_FALSE(cycle(MK_OPERATOR_RING_ATTENTION, Fault::receive_waits_to_send).empty());
    REQUIRE_FALSE(cycle(MK_OPERATOR_RING_ATTENTION_BACKWARD, Fault::sum_before_send).empty());
  }
}

TEST_CASE("Slices are those of mkernel.h, and a query sees what it should") {
  for (const int nranks : {1, 2, 3, 5, 8}) {
    const Views views(std::vector<int32_t>(static_cast<size_t>(nranks), 0));
    for (const AttentionCase& attention : cases_of(nranks)) {
      INFO(nranks << " ranks, " << describe(attention));
      std::multiset<int64_t> all;
      for (int rank = 0; rank < nranks; ++rank) {
        const Planned planned(attention, views, rank);
        const std::vector<int64_t> expected = attention.positions(nranks, rank);
        REQUIRE(planned.rows[static_cast<size_t>(rank)] == static_cast<int64_t>(expected.size()));
        REQUIRE(planned.schedule.slot_rows >= static_cast<int64_t>(expected.size()));
        for (size_t row = 0; row < expected.size(); ++row) {
          REQUIRE(planned.slices.position(rank, static_cast<int64_t>(row)) == expected[row]);
          const auto [begin, end] = attention.visible(expected[row]);
          REQUIRE(planned.slices.visible_begin(expected[row]) == begin);
          REQUIRE(planned.slices.visible_end(expected[row]) == end);
        }
        all.insert(expected.begin(), expected.end());
      }
      REQUIRE(all.size() == static_cast<size_t>(attention.seq));
      REQUIRE(std::set<int64_t>(all.begin(), all.end()).size() == all.size());
    }
  }
}

TEST_CASE("A chunk travels to the ranks that see one of its keys") {
  for (const int nranks : {2, 3, 5, 8}) {
    const Views views(std::vector<int32_t>(static_cast<size_t>(nranks), 0));
    for (const AttentionCase& attention : cases_of(nranks)) {
      const Planned planned(attention, views, 0);
      const bool exact = attention.cu_seqlens.empty() || attention.causal != MK_CAUSAL_ZIGZAG;
      for (int receiver = 0; receiver < nranks; ++receiver) {
        const auto queries = attention.positions(nranks, receiver);
        for (int source = 0; source < nranks; ++source) {
          const auto keys = attention.positions(nranks, source);
          for (int chunk = 0; chunk < planned.schedule.chunks(source); ++chunk) {
            bool sees = false;
            const int64_t first = planned.schedule.chunk_begin(chunk);
            for (int64_t row = first; row < first + planned.schedule.chunk_count(source, chunk); ++row) {
              for (const int64_t query : queries) {
                const auto [begin, end] = attention.visible(query);
                const int64_t key = keys[static_cast<size_t>(row)];
                sees = sees || (begin <= key && key < end);
              }
            }
            INFO(describe(attention) << ": chunk " << chunk << " of " << source << " for " << receiver);
            const bool travels = planned.schedule.needs(receiver, source, chunk);
            REQUIRE((exact ? travels == sees : travels >= sees));
          }
        }
      }
    }
  }
}

TEST_CASE("The workspace of attention grows with every size, and no mode needs more") {
  std::mt19937_64 random(1);
  const auto below = [&](uint64_t bound) { return static_cast<int64_t>(random() % bound); };
  for (const auto& layout : attention_layouts()) {
    const Views views(layout);
    for (int turn = 0; turn < 200; ++turn) {
      AttentionCase small;
      small.batch = 1 + below(3);
      small.seq = below(400);
      small.heads = small.kv_heads = static_cast<int>(1 + below(3));
      small.dim = static_cast<int>(8 * (1 + below(9)));
      RingAttentionCall larger = make_call(small, MK_OPERATOR_RING_ATTENTION_BACKWARD);
      RingAttentionCall call = larger;
      call.causal = static_cast<mk_causal_t>(below(3));
      call.num_sequences = static_cast<int>(below(9));
      larger.batch += below(2);
      larger.seq += below(50);
      larger.kv_heads += static_cast<int>(below(2));
      larger.dim += static_cast<int>(8 * below(2));
      larger.num_sequences = call.num_sequences + static_cast<int>(below(3));
      larger.tuning.chunk_bytes = 1 + below(4000);
      REQUIRE(covers(larger, call));
      const TopologyView view = views.of(0);
      REQUIRE(ring_attention_backward::plan_host(call, view, 1).value().workspace_bytes <=
              ring_attention_backward::plan_host(larger, view, 1).value().workspace_bytes);
      call.op = larger.op = MK_OPERATOR_RING_ATTENTION;
      REQUIRE(ring_attention::plan_host(call, view, 1).value().workspace_bytes <=
              ring_attention::plan_host(larger, view, 1).value().workspace_bytes);
    }
  }
}

TEST_CASE("Causal slices in order travel one way only, and local sequences not at all") {
  const Views views({0, 0, 0, 0});
  AttentionCase attention;
  attention.seq = 64;
  attention.causal = MK_CAUSAL_CONTIGUOUS;
  REQUIRE(Planned(attention, views, 3).plan.link_bytes == 0);
  REQUIRE(Planned(attention, views, 0).plan.link_bytes == 3 * 16 * 64 * 2 * 2);
  attention.causal = MK_CAUSAL_NONE;
  attention.cu_seqlens = {0, 16, 32, 48, 64};
  const Planned local(attention, views, 0);
  for (int receiver = 0; receiver < 4; ++receiver) {
    for (int source = 0; source < 4; ++source)
      REQUIRE(local.schedule.needs(receiver, source, 0) == (receiver == source));
  }
}
