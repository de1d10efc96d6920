// SPDX-License-Identifier: MIT
#include "host_sums.h"

#include <algorithm>

#include "../../host/number_format.h"

namespace mk::moe_gemm_combine {
namespace {

template <class T>
void make_set(std::vector<T>& values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
}

}  // namespace

void HostSums::prepare() {
  const moe::Routing& routing = schedule_.routing;
  const TopologyView& view = launch_.view();
  sums_.resize(static_cast<size_t>(launch_.moe().hidden));
  homes_.resize(static_cast<size_t>(view.nranks));
  for (int home = 0; home < view.nranks; ++home) {
    if (!schedule_.collects(view.rank, home)) continue;
    Home& place = homes_[static_cast<size_t>(home)];
    place.place.resize(static_cast<size_t>(routing.experts));
    for (int local = 0; local < view.local_nranks(); ++local) {
      const int expert_rank = view.rank_at(view.node(), local);
      place.list_begin.push_back(schedule_.list_begin(view.rank, home, expert_rank));
      const int first = routing.first_expert(expert_rank);
      int64_t row = 0;
      for (int expert = first; expert < first + routing.num_experts(expert_rank); ++expert) {
        place.place[static_cast<size_t>(expert)] = row;
        row += routing.expert_rows(home, expert);
      }
    }
    const int64_t tokens = home == view.rank ? 0 : routing.node_tokens(home, view.node());
    for (int chunk = 0; chunk < routing.chunks(tokens); ++chunk) routes_.push_back({home, chunk, {}});
  }
  for (int step = 1; step < view.num_nodes; ++step) {
    const int node = (view.node() + step) % view.num_nodes;
    for (int chunk = 0; chunk < routing.chunks(routing.node_tokens(view.rank, node)); ++chunk)
      incoming_.push_back({node, chunk});
  }
  const int64_t tokens = launch_.moe().tokens;
  for (int64_t begin = 0; begin < tokens; begin += launch_.plan.tile_m) {
    Block& block = blocks_.emplace_back();
    block.begin = begin;
    block.end = min_of(begin + launch_.plan.tile_m, tokens);
    block.number = static_cast<int>(blocks_.size()) - 1;
    plan_block(block);
  }
}

HostSums::Rows HostSums::rows_of(int home, const moe::RouteItem& item) const {
  const moe::Routing& routing = schedule_.routing;
  const int expert_rank = routing.owner(item.expert);
  const int64_t place = homes_[static_cast<size_t>(home)].place[static_cast<size_t>(item.expert)] + item.slot;
  const int chunk = routing.chunk_of(routing.rank_rows(home, expert_rank), place);
  return {schedule_.flag(home, expert_rank, chunk), expert_rank, chunk};
}

int64_t HostSums::place_in_node(int64_t token, int node) const {
  const std::vector<int32_t>& tokens = routing_.tokens_to_node(node);
  return std::lower_bound(tokens.begin(), tokens.end(), static_cast<int32_t>(token)) - tokens.begin();
}

void HostSums::plan_block(Block& block) const {
  const moe::Routing& routing = schedule_.routing;
  const TopologyView& view = launch_.view();
  for (int64_t token = block.begin; token < block.end; ++token) {
    for (int k = 0; k < routing.topk; ++k) {
      const moe::RouteItem& item = routing_.item(token, k);
      if (item.expert < 0) continue;
      const int node = view.node_of_rank[routing.owner(item.expert)];
      if (node == view.node()) {
        block.rows.push_back(rows_of(view.rank, item));
      } else {
        const int64_t total = routing.node_tokens(view.rank, node);
        block.sums.push_back({node, routing.chunk_of(total, place_in_node(token, node))});
      }
    }
  }
  make_set(block.rows);
  make_set(block.sums);
}

bool HostSums::ready(const std::vector<Rows>& rows) const {
  return std::all_of(rows.begin(), rows.end(),
                     [this](const Rows& some) { return launch_.flag_raised(some.flag); });
}

template <class ItemAt>
void HostSums::add_rows(int home, const ItemAt& item_at, float* sums) const {
  const moe::Routing& routing = schedule_.routing;
  const TopologyView& view = launch_.view();
  const Home& places = homes_[static_cast<size_t>(home)];
  for (int last = -1;;) {
    const moe::RouteItem* next = nullptr;  // the smallest expert after `last`; topk is small
    for (int k = 0; k < routing.topk; ++k) {
      const moe::RouteItem& item = item_at(k);
      if (item.expert > last && (next == nullptr || item.expert < next->expert) &&
          view.is_local(routing.owner(item.expert))) {
        next = &item;
      }
    }
    if (next == nullptr) return;
    last = next->expert;
    const int local_rank = view.local_rank_of_rank[routing.owner(last)];
    const int64_t row = places.list_begin[static_cast<size_t>(local_rank)] +
                        places.place[static_cast<size_t>(last)] + next->slot;
    const std::byte* from = launch_.area(schedule_.row_offset(row));
    for (int64_t column = 0; column < schedule_.hidden; ++column)
      sums[column] += next->factor * load_element(from, launch_.moe().out_dtype, column);
  }
}

// Routes from the network: from them follows which rows their sums wait for.
bool HostSums::take_routes(const Relayed& item) {
  const moe::Routing& routing = schedule_.routing;
  const TopologyView& view = launch_.view();
  const int signal = schedule_.route_signal(item.home, view.node(), item.chunk);
  if (ended_ || !launch_.signal_arrived(signal)) return false;
  launch_.take_signal(signal);
  Relayed& taken = relayed_.emplace_back(item);
  const int64_t total = routing.node_tokens(item.home, view.node());
  const int64_t begin = routing.chunk_begin(total, item.chunk);
  for (int64_t i = 0; i < routing.chunk_count(total, item.chunk); ++i) {
    const std::byte* route = launch_.area(schedule_.route_offset(view.rank, item.home, begin + i));
    for (int k = 0; k < routing.topk; ++k) {
      const moe::RouteItem& some = moe::route_item(route, k);
      if (some.expert < 0) continue;
      if (!moe::route_sound(routing, item.home, some)) {
        moe::report_unsound(launch_, item.home);
        ended_ = true;
        return true;
      }
      if (view.is_local(routing.owner(some.expert))) taken.rows.push_back(rows_of(item.home, some));
    }
  }
  make_set(taken.rows);
  return true;
}

bool HostSums::relay_sums(const Relayed& item, Waiter& waiter) {
  if (ended_ || !ready(item.rows)) return false;
  const HostSpan span(waiter.track(), TraceKind::reduce, item.chunk, item.home);
  const moe::Routing& routing = schedule_.routing;
  const TopologyView& view = launch_.view();
  const int64_t total = routing.node_tokens(item.home, view.node());
  const int64_t begin = routing.chunk_begin(total, item.chunk);
  const int64_t count = routing.chunk_count(total, item.chunk);
  const size_t place = schedule_.sum_send_offset(view.rank, item.home, begin);
  for (int64_t i = 0; i < count; ++i) {
    const std::byte* route = launch_.area(schedule_.route_offset(view.rank, item.home, begin + i));
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    add_rows(
        item.home, [route](int k) -> const moe::RouteItem& { return moe::route_item(route, k); }, sums_.data());
    std::byte* to = launch_.area(place + static_cast<size_t>(i) * schedule_.row_bytes());
    for (int64_t column = 0; column < schedule_.hidden; ++column)
      store_element(to, launch_.moe().out_dtype, column, sums_[static_cast<size_t>(column)]);
  }
  ended_ = !waiter.put(item.home, launch_.area_address(place),
                       launch_.area_address(schedule_.sum_offset(item.home, view.node(), begin)),
                       static_cast<size_t>(count) * schedule_.row_bytes(),
                       schedule_.sum_signal(view.node(), item.chunk));
  return true;
}

bool HostSums::take_sums(const NodeChunk& item) {
  const int signal = schedule_.sum_signal(item.node, item.chunk);
  if (!launch_.signal_arrived(signal)) return false;
  launch_.take_signal(signal);
  return true;
}

void HostSums::finish_token(int64_t token) {
  const MoeCall& call = launch_.moe();
  const moe::Routing& routing = schedule_.routing;
  const TopologyView& view = launch_.view();
  std::fill(sums_.begin(), sums_.end(), 0.0f);
  for (int node = 0; node < view.num_nodes; ++node) {
    if (node == view.node()) {
      add_rows(
          view.rank, [&](int k) -> const moe::RouteItem& { return routing_.item(token, k); }, sums_.data());
      continue;
    }
    bool goes_there = false;
    for (int k = 0; k < routing.topk; ++k) {
      const int expert = routing_.item(token, k).expert;
      goes_there = goes_there || (expert >= 0 && view.node_of_rank[routing.owner(expert)] == node);
    }
    if (!goes_there) continue;
    const std::byte* from = launch_.area(schedule_.sum_offset(view.rank, node, place_in_node(token, node)));
    for (int64_t column = 0; column < call.hidden; ++column)
      sums_[static_cast<size_t>(column)] += load_element(from, call.out_dtype, column);
  }
  for (int64_t column = 0; column < call.hidden; ++column)
    store_element(call.y, call.out_dtype, token * call.ldy + column, sums_[static_cast<size_t>(column)]);
}

bool HostSums::finish(const Block& block, HostTrack* track) {
  if (!ready(block.rows)) return false;
  for (const NodeChunk& sum : block.sums) {
    if (std::find(incoming_.begin(), incoming_.end(), sum) != incoming_.end()) return false;
  }
  const HostSpan span(track, TraceKind::reduce, block.number);
  for (int64_t token = block.begin; token < block.end; ++token) finish_token(token);
  launch_.tile_done(block.number);
  return true;
}

WaitTarget HostSums::target_of(const std::vector<Rows>& rows) const {
  for (const Rows& some : rows) {
    if (!launch_.flag_raised(some.flag)) {
      return {"partial", static_cast<uint64_t>(some.chunk), some.expert_rank, launch_.flag_value(some.flag),
              launch_.epoch};
    }
  }
  return {"partial"};
}

// What the first thing left lacks.
WaitTarget HostSums::target() const {
  const TopologyView& view = launch_.view();
  if (!relayed_.empty()) return target_of(relayed_.front().rows);
  if (!routes_.empty())
    return {"routes", static_cast<uint64_t>(routes_.front().chunk), routes_.front().home, 0, 1};
  if (!blocks_.empty() && !ready(blocks_.front().rows)) return target_of(blocks_.front().rows);
  if (!incoming_.empty()) {
    const NodeChunk& first = incoming_.front();
    return {"node sum", static_cast<uint64_t>(first.chunk), schedule_.collector(view.rank, first.node), 0, 1};
  }
  return {"partial"};
}

void HostSums::run_reduce(Waiter& waiter) {
  prepare();
  while (!routes_.empty() || !relayed_.empty() || !incoming_.empty() || !blocks_.empty()) {
    waiter.look();
    size_t done = std::erase_if(routes_, [this](const Relayed& item) { return take_routes(item); });
    done += std::erase_if(relayed_, [&](const Relayed& item) { return relay_sums(item, waiter); });
    done += std::erase_if(incoming_, [this](const NodeChunk& item) { return take_sums(item); });
    if (ended_) return;
    done += std::erase_if(blocks_, [&](const Block& block) { return finish(block, waiter.track()); });
    if (done > 0) {
      waiter.progressed();
    } else if (!waiter.sleep(target())) {
      return;
    }
  }
}

}  // namespace mk::moe_gemm_combine
