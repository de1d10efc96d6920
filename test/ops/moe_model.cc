// SPDX-License-Identifier: MIT
#include "moe_model.h"

#include <algorithm>

#include "kernels/ops/moe_dispatch_gemm/plan.h"
#include "kernels/ops/moe_gemm_combine/plan.h"
#include "lib/status.h"

namespace mk::test {
namespace {

Event begin(int rank, int launch) { return {"begin", rank, launch}; }
Event end(int rank, int launch) { return {"end", rank, launch}; }

int64_t place_of(const std::vector<int64_t>& tokens, int64_t token) {
  return std::lower_bound(tokens.begin(), tokens.end(), token) - tokens.begin();
}

}  // namespace

MoeModel::MoeModel(const Views& views, const MoeProblem& problem, mk_operator_t op, int launches,
                   MoeFault fault)
    : views_(views), problem_(problem), op_(op), fault_(fault), accounts_(static_cast<size_t>(views.nranks())) {
  call_.op = op;
  call_.hidden = problem.moe.hidden;
  call_.inter = problem.moe.inter;
  call_.experts = problem.moe.experts;
  call_.topk = problem.moe.topk;
  call_.out_dtype = problem.moe.out_dtype;
  call_.tuning = problem.moe.tuning;
  call_.capacity_rows = op == MK_OPERATOR_MOE_DISPATCH_GEMM ? problem.capacity() : 0;
  view_ = views.of(0);
  count();
  for (int rank = 0; rank < views.nranks(); ++rank) {
    for (launch_ = 0; launch_ < launches; ++launch_) follow_rank(rank);
  }
}

std::set<int> MoeModel::ranks_of_node(int node) const {
  std::set<int> ranks;
  for (int local = 0; local < view_.node_nranks(node); ++local) ranks.insert(view_.rank_at(node, local));
  return ranks;
}

// The tokens of `source` that have an expert on one of `ranks`, in their order.
MoeModel::Tokens MoeModel::tokens_to(int source, const std::set<int>& ranks) const {
  Tokens tokens;
  for (int64_t token = 0; token < problem_.moe.tokens_of(source); ++token) {
    bool goes = false;
    for (int k = 0; k < problem_.moe.topk; ++k) {
      const int64_t expert = problem_.expert(source, token, k);
      for (const int rank : ranks)
        goes = goes || (expert >= problem_.first_expert(rank) && expert < problem_.first_expert(rank + 1));
    }
    if (goes) tokens.push_back(token);
  }
  return tokens;
}

// The counts of all ranks, worked out from the routing itself.
void MoeModel::count() {
  mk_plan_t plan = MK_PLAN_INIT;
  routing_ = moe_dispatch_gemm::make_schedule(call_, plan, view_).routing;
  blocks_.resize(routing_.counts_bytes());
  for (int source = 0; source < views_.nranks(); ++source) {
    auto* head = reinterpret_cast<moe::CountsHead*>(blocks_.data() + routing_.counts_offset(source));
    auto* numbers = reinterpret_cast<int32_t*>(head + 1);
    head->tokens = problem_.moe.tokens_of(source);
    head->row_capacity = problem_.capacity();
    for (int expert = 0; expert < problem_.moe.experts; ++expert) {
      for (const MoeRow& row : problem_.rows(expert)) {
        if (row.rank != source) continue;
        const int rank = routing_.owner(expert);
        ++numbers[routing_.expert_rows_at(expert)];
        ++numbers[routing_.rank_rows_at(rank)];
        ++numbers[routing_.node_rows_at(view_.node_of_rank[rank])];
      }
    }
    for (int rank = 0; rank < views_.nranks(); ++rank)
      numbers[routing_.rank_tokens_at(rank)] = static_cast<int32_t>(tokens_to(source, {rank}).size());
    for (int node = 0; node < view_.num_nodes; ++node)
      numbers[routing_.node_tokens_at(node)] =
          static_cast<int32_t>(tokens_to(source, ranks_of_node(node)).size());
  }
}

void MoeModel::follow_rank(int rank) {
  view_ = views_.of(rank);
  call_.tokens = problem_.moe.tokens_of(rank);
  const bool dispatches = op_ == MK_OPERATOR_MOE_DISPATCH_GEMM;
  plan_ = (dispatches ? moe_dispatch_gemm::plan_host(call_, view_, 1)
                      : moe_gemm_combine::plan_host(call_, view_, 1))
              .value();
  dispatch_ = moe_dispatch_gemm::make_schedule(call_, plan_, view_);
  combine_ = moe_gemm_combine::make_schedule(call_, plan_, view_);
  dispatch_.routing.blocks = combine_.routing.blocks = blocks_.data();
  routing_ = dispatch_.routing;
  accounts_[static_cast<size_t>(rank)].area_bytes =
      dispatches ? dispatch_.area_bytes(rank) : combine_.area_bytes(rank);

  graph_.wait(end(rank, launch_), begin(rank, launch_));
  if (launch_ > 0) graph_.wait(begin(rank, launch_), end(rank, launch_ - 1));
  graph_.wait({"fifo", rank}, {"proxy", rank});
  for (int peer = 0; peer < view_.nranks; ++peer) {
    if (!view_.is_local(peer)) graph_.wait({"proxy", rank}, {"receive", peer});
  }
  follow_entries();
  follow_counts();
  if (dispatches) {
    follow_own_tokens();
    for (int source = 0; source < view_.nranks; ++source) {
      if (routing_.relays(rank, source)) follow_forwards(source);
    }
    follow_arrivals();
  } else {
    follow_routes();
    follow_products();
    for (int home = 0; home < view_.nranks; ++home) {
      if (routing_.relays(rank, home)) follow_relayed(home);
    }
    follow_tokens();
  }
}

Event MoeModel::item(const char* kind, int a, int b, int c) {
  const Event event{kind, view_.rank, launch_, a, b, c};
  graph_.wait(event, begin(view_.rank, launch_));
  graph_.wait(end(view_.rank, launch_), event);
  return event;
}

Event MoeModel::row_item(const char* kind, int a, int b, int c) {
  const Event event = item(kind, a, b, c);
  if (fault_ != MoeFault::no_entry_wait) graph_.wait(event, {"verdict", view_.rank, launch_});
  return event;
}

void MoeModel::raise_flag(const Event& by, int at, int index) {
  if (!view_.is_local(at)) accounts_[static_cast<size_t>(at)].flags[-1].times = 2;  // a complaint
  graph_.wait({"flag", at, launch_, index}, by);
  if (launch_ == 0) ++accounts_[static_cast<size_t>(at)].flags[index].times;
}

void MoeModel::wait_flag(const Event& who, int index) {
  graph_.wait(who, {"flag", view_.rank, launch_, index});
  if (launch_ == 0) ++accounts_[static_cast<size_t>(view_.rank)].flags[index].waited;
}

void MoeModel::put(const Event& by, int to, int signal, int64_t payload) {
  if (view_.is_local(to)) accounts_[static_cast<size_t>(to)].signals[-1].times = 2;  // a complaint
  graph_.wait(by, {"fifo", view_.rank});
  graph_.wait({"signal", to, launch_, signal}, by);
  graph_.wait({"signal", to, launch_, signal}, {"proxy", view_.rank});
  graph_.wait({"signal", to, launch_, signal}, {"receive", to});
  graph_.wait(end(view_.rank, launch_), {"proxy", view_.rank});
  if (launch_ > 0) return;
  ++accounts_[static_cast<size_t>(to)].signals[signal].times;
  accounts_[static_cast<size_t>(view_.rank)].network_bytes += payload;
}

void MoeModel::wait_signal(const Event& who, int index) {
  graph_.wait(who, {"signal", view_.rank, launch_, index});
  if (launch_ == 0) ++accounts_[static_cast<size_t>(view_.rank)].signals[index].waited;
}

void MoeModel::write(int at, size_t begin_byte, size_t bytes) {
  if (launch_ == 0 && bytes > 0)
    accounts_[static_cast<size_t>(at)].writes.push_back({begin_byte, begin_byte + bytes, view_.rank});
}

void MoeModel::follow_entries() {
  const int rank = view_.rank;
  const Event sent = item("entries sent");
  for (int node = 0; node < view_.num_nodes; ++node) {
    if (node != view_.node()) put(sent, view_.rail_peer(rank, node), rank, 0);
  }
  const Event verdict = item("verdict");
  for (int source = 0; source < view_.nranks; ++source) {
    if (source == rank) continue;
    const Event entry{"entry", rank, launch_, source};
    if (fault_ != MoeFault::no_entry_wait) graph_.wait(verdict, entry);
    if (view_.is_local(source)) {
      graph_.wait(entry, begin(source, launch_));
      continue;
    }
    const int relay = view_.rail_peer(source, view_.node());
    graph_.wait(entry, {"entry passed on", relay, launch_, source});
    if (relay != rank) continue;
    const Event passed = item("entry passed on", source);
    graph_.wait(passed, sent);
    wait_signal(passed, source);
  }
}

void MoeModel::follow_counts() {
  const int rank = view_.rank;
  const size_t bytes = routing_.block_bytes();
  const Event counted = item("counts");
  write(rank, routing_.counts_offset(rank), bytes);
  for (const int to : ranks_of_node(view_.node())) {
    raise_flag(counted, to, routing_.counts_flag(rank));
    if (to != rank) write(to, routing_.counts_offset(rank), bytes);
  }
  const Event sent = item("counts sent");
  graph_.wait(sent, counted);
  for (int node = 0; node < view_.num_nodes; ++node) {
    if (node == view_.node()) continue;
    put(sent, routing_.relay(rank, node), routing_.counts_signal(rank), 0);
    write(routing_.relay(rank, node), routing_.counts_offset(rank), bytes);
  }
  for (int source = 0; source < view_.nranks; ++source) {
    if (fault_ != MoeFault::no_entry_wait) wait_flag({"verdict", rank, launch_}, routing_.counts_flag(source));
    if (!routing_.relays(rank, source)) continue;
    const Event passed = item("counts passed on", source);
    wait_signal(passed, routing_.counts_signal(source));
    for (const int to : ranks_of_node(view_.node())) {
      raise_flag(passed, to, routing_.counts_flag(source));
      if (to != rank) write(to, routing_.counts_offset(source), bytes);
    }
  }
}

// The copy and send roles.
void MoeModel::follow_own_tokens() {
  const int rank = view_.rank;
  const size_t packet = dispatch_.packet_bytes();
  for (const int to : ranks_of_node(view_.node())) {
    const Tokens tokens = tokens_to(rank, {to});
    const auto count = static_cast<int64_t>(tokens.size());
    for (int chunk = 0; chunk < routing_.chunks(count); ++chunk) {
      const int64_t first = routing_.chunk_begin(count, chunk);
      const int64_t size = routing_.chunk_count(count, chunk);
      raise_flag(row_item("push", rank, to, chunk), to, dispatch_.flag(rank, chunk));
      write(to, dispatch_.offset(dispatch_.receive_begin(to, rank) + first),
            static_cast<size_t>(size) * packet);
      for (int64_t at = first; launch_ == 0 && at < first + size; ++at)
        ++delivered_[{to, rank, tokens[static_cast<size_t>(at)]}];
      if (to != rank && launch_ == 0)
        accounts_[static_cast<size_t>(rank)].link_bytes += size * static_cast<int64_t>(packet);
    }
  }
  for (int node = 0; node < view_.num_nodes; ++node) {
    if (node == view_.node()) continue;
    const Tokens tokens = tokens_to(rank, ranks_of_node(node));
    const auto count = static_cast<int64_t>(tokens.size());
    const int relay = routing_.relay(rank, node);
    for (int chunk = 0; chunk < routing_.chunks(count); ++chunk) {
      const int64_t first = routing_.chunk_begin(count, chunk);
      const auto bytes = static_cast<size_t>(routing_.chunk_count(count, chunk)) * packet;
      write(rank, dispatch_.offset(dispatch_.pack_begin(rank, node) + first), bytes);
      write(relay, dispatch_.offset(dispatch_.relay_begin(relay, rank) + first), bytes);
      put(row_item("sent", node, chunk), relay, dispatch_.signal(rank, node, chunk),
          static_cast<int64_t>(bytes));
      for (int64_t at = first; launch_ == 0 && at < first + routing_.chunk_count(count, chunk); ++at)
        ++entered_[{node, rank, tokens[static_cast<size_t>(at)]}];
    }
  }
}

// The receive role: tokens of `source` from the network to the ranks of this node.
void MoeModel::follow_forwards(int source) {
  const Tokens all = tokens_to(source, ranks_of_node(view_.node()));
  const auto total = static_cast<int64_t>(all.size());
  for (int chunk = 0; chunk < routing_.chunks(total); ++chunk) {
    const Event arrived = row_item("arrived", source, chunk);
    wait_signal(arrived, dispatch_.signal(source, view_.node(), chunk));
    for (int other = 0; fault_ == MoeFault::forward_last && other < view_.nranks; ++other) {
      if (routing_.rank_tokens(other, view_.rank) > 0)
        graph_.wait(arrived, {"flag", view_.rank, launch_, dispatch_.flag(other, 0)});
    }
  }
  for (const int to : ranks_of_node(view_.node())) {
    const Tokens tokens = tokens_to(source, {to});
    const auto count = static_cast<int64_t>(tokens.size());
    for (int chunk = 0; chunk < routing_.chunks(count); ++chunk) {
      const int64_t first = routing_.chunk_begin(count, chunk);
      const int64_t size = routing_.chunk_count(count, chunk);
      const Event forwarded = row_item("forward", source, to, chunk);
      for (int64_t at = first; at < first + size; ++at) {
        const int64_t place = place_of(all, tokens[static_cast<size_t>(at)]);
        graph_.wait(forwarded, {"arrived", view_.rank, launch_, source, routing_.chunk_of(total, place)});
        if (launch_ == 0) ++delivered_[{to, source, tokens[static_cast<size_t>(at)]}];
      }
      raise_flag(forwarded, to, dispatch_.flag(source, chunk));
      write(to, dispatch_.offset(dispatch_.receive_begin(to, source) + first),
            static_cast<size_t>(size) * dispatch_.packet_bytes());
    }
  }
}

// The chunks of this rank's own rows, and its tiles.
void MoeModel::follow_arrivals() {
  const int rank = view_.rank;
  for (int source = 0; source < view_.nranks; ++source) {
    const int64_t count = routing_.rank_tokens(source, rank);
    for (int chunk = 0; chunk < routing_.chunks(count); ++chunk)
      wait_flag(row_item("rows", source, chunk), dispatch_.flag(source, chunk));
  }
  for (int expert = problem_.first_expert(rank); expert < problem_.first_expert(rank + 1); ++expert) {
    int tile_rows = 0;
    for (const MoeRow& row : problem_.rows(expert)) {
      const Tokens tokens = tokens_to(row.rank, {rank});
      const int chunk = routing_.chunk_of(static_cast<int64_t>(tokens.size()), place_of(tokens, row.token));
      graph_.wait(row_item("tile", expert, tile_rows++ / plan_.tile_m),
                  {"rows", rank, launch_, row.rank, chunk});
    }
  }
}

int64_t MoeModel::slot(int home, int64_t token, int64_t expert) const {
  int64_t slots = 0;
  for (const MoeRow& row : problem_.rows(static_cast<int>(expert))) {
    if (row.rank != home) continue;
    if (row.token == token) return slots;
    ++slots;
  }
  return -1;
}

// The place of (token, k) in the list of its home at its expert's rank.
int64_t MoeModel::list_place(int home, int64_t token, int k) const {
  const int64_t expert = problem_.expert(home, token, k);
  int64_t place = slot(home, token, expert);
  for (int before = routing_.first_expert(routing_.owner(static_cast<int>(expert))); before < expert; ++before)
    place += routing_.expert_rows(home, before);
  return place;
}

void MoeModel::wait_rows(const Event& who, int home, int64_t token) {
  for (int k = 0; k < problem_.moe.topk; ++k) {
    const int64_t expert = problem_.expert(home, token, k);
    if (expert < 0 || !view_.is_local(routing_.owner(static_cast<int>(expert)))) continue;
    const int owner = routing_.owner(static_cast<int>(expert));
    const int chunk = routing_.chunk_of(routing_.rank_rows(home, owner), list_place(home, token, k));
    wait_flag(who, combine_.flag(home, owner, chunk));
  }
}

// The send role of the combine.
void MoeModel::follow_routes() {
  const int rank = view_.rank;
  for (int node = 0; node < view_.num_nodes; ++node) {
    if (node == view_.node()) continue;
    const int relay = combine_.collector(rank, node);
    const int64_t count = routing_.node_tokens(rank, node);
    for (int chunk = 0; chunk < routing_.chunks(count); ++chunk) {
      const int64_t first = routing_.chunk_begin(count, chunk);
      const auto bytes = static_cast<size_t>(routing_.chunk_count(count, chunk)) * routing_.route_bytes();
      write(rank, combine_.route_send_offset(rank, node, first), bytes);
      write(relay, combine_.route_offset(relay, rank, first), bytes);
      put(row_item("routes", node, chunk), relay, combine_.route_signal(rank, node, chunk),
          static_cast<int64_t>(bytes));
    }
  }
}

// The compute role of the combine, and the flags that its tiles complete.
void MoeModel::follow_products() {
  const int rank = view_.rank;
  std::set<std::pair<int, int>> raised;
  for (int expert = problem_.first_expert(rank); expert < problem_.first_expert(rank + 1); ++expert) {
    int tile_rows = 0;
    for (const MoeRow& row : problem_.rows(expert)) {
      const int tile = tile_rows++ / plan_.tile_m;
      const Event product = row_item("product", expert, tile);
      for (int64_t token = 0; fault_ == MoeFault::product_last && token < call_.tokens; ++token)
        graph_.wait(product, {"token", rank, launch_, static_cast<int>(token)});
      const int64_t count = routing_.rank_rows(row.rank, rank);
      const int chunk = routing_.chunk_of(count, list_place(row.rank, row.token, row.k));
      const Event partial = row_item("partial", row.rank, chunk);
      graph_.wait(partial, product);
      if (!raised.insert({row.rank, chunk}).second) continue;
      const int collector = combine_.collector(row.rank, view_.node());
      raise_flag(partial, collector, combine_.flag(row.rank, rank, chunk));
      const int64_t first = combine_.list_begin(collector, row.rank, rank) + routing_.chunk_begin(count, chunk);
      write(collector, combine_.row_offset(first),
            static_cast<size_t>(routing_.chunk_count(count, chunk)) * combine_.row_bytes());
    }
  }
}

// The reduce role for another node's rank.
void MoeModel::follow_relayed(int home) {
  const Tokens tokens = tokens_to(home, ranks_of_node(view_.node()));
  const auto count = static_cast<int64_t>(tokens.size());
  for (int chunk = 0; chunk < routing_.chunks(count); ++chunk) {
    const int64_t first = routing_.chunk_begin(count, chunk);
    const int64_t size = routing_.chunk_count(count, chunk);
    const Event summed = row_item("node sum", home, chunk);
    wait_signal(summed, combine_.route_signal(home, view_.node(), chunk));
    for (int64_t at = first; at < first + size; ++at) {
      wait_rows(summed, home, tokens[static_cast<size_t>(at)]);
      if (launch_ == 0)
        ++entered_[{view_.node_of_rank[home], view_.node(), home, tokens[static_cast<size_t>(at)]}];
    }
    const auto bytes = static_cast<size_t>(size) * combine_.row_bytes();
    write(view_.rank, combine_.sum_send_offset(view_.rank, home, first), bytes);
    write(home, combine_.sum_offset(home, view_.node(), first), bytes);
    put(summed, home, combine_.sum_signal(view_.node(), chunk), static_cast<int64_t>(bytes));
  }
}

// The reduce role for this rank's own tokens.
void MoeModel::follow_tokens() {
  const int rank = view_.rank;
  for (int64_t token = 0; token < call_.tokens; ++token)
    wait_rows(row_item("token", static_cast<int>(token)), rank, token);
  for (int node = 0; node < view_.num_nodes; ++node) {
    if (node == view_.node()) continue;
    const Tokens tokens = tokens_to(rank, ranks_of_node(node));
    const auto count = static_cast<int64_t>(tokens.size());
    for (const int64_t token : tokens) {
      const int chunk = routing_.chunk_of(count, place_of(tokens, token));
      wait_signal(row_item("token", static_cast<int>(token)), combine_.sum_signal(node, chunk));
    }
  }
}

void MoeModel::check_prepared(int rank, std::vector<std::string>& found) const {
  const size_t area = accounts_[static_cast<size_t>(rank)].area_bytes;
  // What prepare allocates is enough, with a bound of tokens and without.
  MoeCall maxima = maxima_of(call_);
  maxima.out_dtype = call_.out_dtype;
  maxima.capacity_rows = problem_.capacity();
  for (const bool bounded : {false, true}) {
    for (int source = 0; bounded && source < views_.nranks(); ++source)
      maxima.max_tokens = std::max(maxima.max_tokens, problem_.moe.tokens_of(source));
    const uint64_t bank = moe_dispatch_gemm::plan_host(maxima, views_.of(rank), 1).value().workspace_bytes / 2;
    if (bank < area)
      found.push_back(
          format("rank %d: needs %zu bytes, prepared %llu", rank, area, static_cast<unsigned long long>(bank)));
  }
}

std::vector<std::string> MoeModel::complaints() const {
  std::vector<std::string> found;
  for (int rank = 0; rank < views_.nranks(); ++rank) {
    const RankAccount& account = accounts_[static_cast<size_t>(rank)];
    account.check_raised(rank, found);
    account.check_writes(rank, found);
    check_prepared(rank, found);
    for (int source = 0; op_ == MK_OPERATOR_MOE_DISPATCH_GEMM && source < views_.nranks(); ++source) {
      for (const int64_t token : tokens_to(source, {rank})) {
        const auto times = delivered_.find({rank, source, token});
        if (times == delivered_.end() || times->second != 1)
          found.push_back(format("a token of rank %d does not come once to rank %d", source, rank));
      }
    }
    if (op_ != MK_OPERATOR_MOE_DISPATCH_GEMM) continue;
    MoeCall call = call_;
    call.tokens = problem_.moe.tokens_of(rank);
    const mk_plan_t plan = moe_dispatch_gemm::plan_host(call, views_.of(rank), 1).value();
    if (account.link_bytes > plan.link_bytes || account.network_bytes > plan.network_bytes)
      found.push_back(format("rank %d sends more bytes than its plan says at most", rank));
  }
  for (const auto& [what, times] : entered_) {
    if (times != 1) found.push_back("a token enters a node more than once");
  }
  return found;
}

}  // namespace mk::test
