// SPDX-License-Identifier: MIT
#include "expert_exchange.h"

#include <numeric>

#include "test/support/catch.h"

using namespace perf;

namespace {

// What the stages of all ranks hold after a dispatch that copies (token, k) numbers instead of rows.
class Stages {
 public:
  Stages(const ExpertRouting& routing, int nranks) : nranks_(nranks) {
    for (int rank = 0; rank < nranks; ++rank) {
      exchanges_.push_back(make_expert_exchange(routing, rank, nranks));
      const ExpertExchange& exchange = exchanges_.back();
      stages_.emplace_back(static_cast<size_t>(exchange.stage_rows()), -1);
      const int64_t first = slice_of(routing.num_tokens(), rank, nranks).begin * routing.topk();
      for (size_t choice = 0; choice < exchange.places.size(); ++choice)
        stages_.back()[static_cast<size_t>(exchange.places[choice])] = first + static_cast<int64_t>(choice);
    }
  }

  // The i-th message of one rank to another belongs to the i-th that the other expects of it.
  void send_away(RowsMessages ExpertExchange::*way) {
    for (int source = 0; source < nranks_; ++source) {
      for (int peer = 0; peer < nranks_; ++peer) {
        const std::vector<RowsMessage> sent = between((exchange(source).*way).away, peer);
        const std::vector<RowsMessage> received = between((exchange(peer).*way).guests, source);
        REQUIRE(sent.size() == received.size());
        for (size_t i = 0; i < sent.size(); ++i) {
          REQUIRE(sent[i].rows == received[i].rows);
          for (int64_t row = 0; row < sent[i].rows; ++row)
            at(peer, received[i].first + row) = at(source, sent[i].first + row);
        }
      }
    }
  }

  void place_guests() {
    for (int rank = 0; rank < nranks_; ++rank) {
      for (int64_t guest = 0; guest < exchange(rank).guest_rows; ++guest) {
        at(rank, exchange(rank).guest_places[static_cast<size_t>(guest)]) =
            at(rank, exchange(rank).first_guest() + guest);
      }
    }
  }

  std::vector<int64_t> expert_rows(int rank) const {
    const std::vector<int64_t>& stage = stages_[static_cast<size_t>(rank)];
    return {stage.begin(), stage.begin() + exchange(rank).expert_rows};
  }
  const ExpertExchange& exchange(int rank) const { return exchanges_[static_cast<size_t>(rank)]; }

 private:
  static std::vector<RowsMessage> between(const std::vector<RowsMessage>& messages, int peer) {
    std::vector<RowsMessage> some;
    for (const RowsMessage& message : messages) {
      if (message.peer == peer) some.push_back(message);
    }
    return some;
  }
  int64_t& at(int rank, int64_t row) { return stages_[static_cast<size_t>(rank)].at(static_cast<size_t>(row)); }

  int nranks_;
  std::vector<ExpertExchange> exchanges_;
  std::vector<std::vector<int64_t>> stages_;
};

Shape shape_of(int64_t tokens, int64_t experts, int64_t topk, int64_t zipf) {
  return {{"tokens", tokens},   {"hidden", 8},  {"inter", 8},
          {"experts", experts}, {"topk", topk}, {"zipf", zipf}};
}

}  // namespace

TEST_CASE("the rows of two ranks by four experts") {
  // Tokens 0 and 1 are rank 0's, 2 and 3 rank 1's; so are the experts.
  const ExpertRouting routing({0, 2, 3, 1, 2, 0, 3, 2}, 2, 4, 2);
  const ExpertExchange first = make_expert_exchange(routing, 0, 2);
  CHECK(first.tokens == 2);
  CHECK(first.expert_counts == std::vector<int64_t>{2, 1});
  CHECK(first.expert_rows == 3);
  CHECK(first.away_rows == 2);
  CHECK(first.guest_rows == 1);
  // Expert rows: token 0, guest token 2, token 1. Away: token 0 for expert 2, token 1 for expert 3.
  CHECK(first.places == std::vector<int64_t>{0, 3, 4, 2});
  CHECK(first.guest_places == std::vector<int64_t>{1});
  CHECK(first.by_rank.away == std::vector<RowsMessage>{{1, 3, 2}});
  CHECK(first.by_rank.guests == std::vector<RowsMessage>{{1, 5, 1}});
  CHECK(first.by_expert.away == std::vector<RowsMessage>{{1, 3, 1}, {1, 4, 1}});
  CHECK(first.by_expert.guests == std::vector<RowsMessage>{{1, 1, 1}});
  // Rank 0 sends two rows, and two come to rank 1, each of another token.
  CHECK(busiest_link_rows(routing, 2, false) == 2);
  CHECK(busiest_link_rows(routing, 2, true) == 2);
}

TEST_CASE("messages bring every row to its expert, by rank and by expert") {
  const auto [nranks, shape] = GENERATE(table<int, Shape>({{1, shape_of(16, 4, 2, 0)},
                                                           {2, shape_of(37, 6, 3, 0)},
                                                           {4, shape_of(101, 10, 4, 1)},
                                                           // ranks without tokens and without experts
                                                           {4, shape_of(3, 5, 2, 0)}}));
  const ExpertRouting routing(shape, nranks);
  for (const auto way : {&ExpertExchange::by_rank, &ExpertExchange::by_expert}) {
    Stages stages(routing, nranks);
    stages.send_away(way);
    if (way == &ExpertExchange::by_rank) stages.place_guests();
    for (int rank = 0; rank < nranks; ++rank) {
      std::vector<int64_t> expected;
      for (const ExpertRow& row : routing.rows_of(slice_of(routing.num_experts(), rank, nranks)))
        expected.push_back(row.token * routing.topk() + row.k);
      CHECK(stages.expert_rows(rank) == expected);
      const std::vector<int64_t>& counts = stages.exchange(rank).expert_counts;
      CHECK(std::accumulate(counts.begin(), counts.end(), int64_t{0}) == static_cast<int64_t>(expected.size()));
    }
  }
}

TEST_CASE("rows of the busiest rank on the link") {
  // Both tokens of rank 0 have both of their experts on rank 1.
  const ExpertRouting routing({2, 3, 2, 3, 3, 2, 0, 2}, 2, 4, 2);
  CHECK(busiest_link_rows(routing, 2, false) == 4);
  CHECK(busiest_link_rows(routing, 2, true) == 2);
  CHECK(busiest_link_rows(routing, 1, false) == 0);
  // Four ranks of one expert and token each: what comes to rank 0 outweighs what any sends.
  const ExpertRouting hot({0, 1, 0, 1, 0, 2, 0, 3}, 2, 4, 4);
  CHECK(busiest_link_rows(hot, 4, true) == 3);
}

TEST_CASE("a rank's experts by themselves have the rows that they have among all ranks") {
  const ExpertRouting alone({0, 0, 1, 3}, 1, 4, 1);
  CHECK(alone.capacity() == 4);
  const ExpertExchange exchange = make_expert_exchange(alone, 0, 1);
  CHECK(exchange.expert_counts == std::vector<int64_t>{2, 1, 0, 1});
  CHECK(exchange.places == std::vector<int64_t>{0, 1, 2, 3});
  CHECK(exchange.by_rank.away.empty());
  CHECK(exchange.by_rank.guests.empty());
}
