// SPDX-License-Identifier: MIT
#include "expert_exchange.h"

#include <algorithm>

namespace perf {
namespace {

int owner_of(int64_t index, int64_t count, int nranks) {
  return static_cast<int>(index / ((count + nranks - 1) / nranks));
}

// Rows that follow each other in the stage, of one peer and, where it matters, of one expert.
class MessageList {
 public:
  explicit MessageList(std::vector<RowsMessage>& messages) : messages_(messages) {}
  void add(int peer, int expert, int64_t row) {
    if (messages_.empty() || messages_.back().peer != peer || expert != expert_)
      messages_.push_back({peer, row, 0});
    ++messages_.back().rows;
    expert_ = expert;
  }

 private:
  std::vector<RowsMessage>& messages_;
  int expert_ = -1;
};

}  // namespace

ExpertExchange make_expert_exchange(const ExpertRouting& routing, int rank, int nranks) {
  const Slice own_tokens = slice_of(routing.num_tokens(), rank, nranks);
  const Slice own_experts = slice_of(routing.num_experts(), rank, nranks);
  const auto place_of = [&](const ExpertRow& row) {
    return static_cast<size_t>((row.token - own_tokens.begin) * routing.topk() + row.k);
  };
  ExpertExchange exchange;
  exchange.tokens = own_tokens.end - own_tokens.begin;
  exchange.places.resize(static_cast<size_t>(exchange.tokens * routing.topk()));
  exchange.expert_counts.resize(static_cast<size_t>(own_experts.end - own_experts.begin));

  const std::vector<ExpertRow> expert_rows = routing.rows_of(own_experts);
  exchange.expert_rows = static_cast<int64_t>(expert_rows.size());
  std::vector<std::vector<int64_t>> of_source(static_cast<size_t>(nranks));
  for (int64_t i = 0; i < exchange.expert_rows; ++i) {
    const ExpertRow& row = expert_rows[static_cast<size_t>(i)];
    ++exchange.expert_counts[static_cast<size_t>(row.expert - own_experts.begin)];
    const int source = owner_of(row.token, routing.num_tokens(), nranks);
    if (source == rank) {
      exchange.places[place_of(row)] = i;
    } else {
      of_source[static_cast<size_t>(source)].push_back(i);
    }
  }

  MessageList away_by_rank(exchange.by_rank.away);
  MessageList away_by_expert(exchange.by_expert.away);
  for (int peer = 0; peer < nranks; ++peer) {
    if (peer == rank) continue;
    for (const ExpertRow& row : routing.rows_of(slice_of(routing.num_experts(), peer, nranks))) {
      if (row.token < own_tokens.begin || row.token >= own_tokens.end) continue;
      const int64_t place = exchange.expert_rows + exchange.away_rows++;
      exchange.places[place_of(row)] = place;
      away_by_rank.add(peer, 0, place);
      away_by_expert.add(peer, row.expert, place);
    }
  }

  MessageList guests_by_rank(exchange.by_rank.guests);
  MessageList guests_by_expert(exchange.by_expert.guests);
  for (int peer = 0; peer < nranks; ++peer) {
    for (const int64_t place : of_source[static_cast<size_t>(peer)]) {
      guests_by_rank.add(peer, 0, exchange.first_guest() + exchange.guest_rows++);
      guests_by_expert.add(peer, expert_rows[static_cast<size_t>(place)].expert, place);
      exchange.guest_places.push_back(place);
    }
  }
  return exchange;
}

int64_t busiest_link_rows(const ExpertRouting& routing, int nranks, bool once_a_rank) {
  std::vector<int64_t> to_others(static_cast<size_t>(nranks));
  std::vector<int64_t> from_others(static_cast<size_t>(nranks));
  std::vector<int64_t> rows(static_cast<size_t>(nranks));  // of one token
  for (int64_t token = 0; token < routing.num_tokens(); ++token) {
    std::fill(rows.begin(), rows.end(), 0);
    for (int k = 0; k < routing.topk(); ++k) {
      int64_t& count =
          rows[static_cast<size_t>(owner_of(routing.expert(token, k), routing.num_experts(), nranks))];
      count = once_a_rank ? 1 : count + 1;
    }
    const int source = owner_of(token, routing.num_tokens(), nranks);
    for (int peer = 0; peer < nranks; ++peer) {
      if (peer == source) continue;
      to_others[static_cast<size_t>(source)] += rows[static_cast<size_t>(peer)];
      from_others[static_cast<size_t>(peer)] += rows[static_cast<size_t>(peer)];
    }
  }
  return std::max(*std::max_element(to_others.begin(), to_others.end()),
                  *std::max_element(from_others.begin(), from_others.end()));
}

}  // namespace perf
