// SPDX-License-Identifier: MIT
#include "host_routing.h"

#include <algorithm>
#include <cstring>

#include "data_error.h"

namespace mk::moe {

HostRouting::HostRouting(HostLaunch& launch, const Routing& routing, Decide decide)
    : launch_(launch),
      call_(launch.moe()),
      routing_(routing),
      decide_(std::move(decide)),
      rank_tokens_(static_cast<size_t>(launch.view().nranks)),
      node_tokens_(static_cast<size_t>(launch.view().num_nodes)) {
  routing_.blocks = launch.area(0);
}

bool HostRouting::reads_record() const { return call_.op == MK_OPERATOR_MOE_GEMM_COMBINE || call_.use_routing; }

int64_t HostRouting::expert_at(int64_t token, int k) const {
  const int64_t place = token * call_.topk + k;
  if (recorded_ != nullptr) return recorded_[place].expert;
  return call_.index_type == MK_INDEX_INT64 ? static_cast<const int64_t*>(call_.topk_idx)[place]
                                            : static_cast<const int32_t*>(call_.topk_idx)[place];
}

// One token's experts; false, and why in `head`, when they cannot be. slots: rows so far for each expert.
bool HostRouting::route_token(int64_t token, CountsHead& head, std::vector<int32_t>& slots) {
  const auto wrong = [&](Fault fault, int k, int64_t value) {
    head.fault = static_cast<int32_t>(fault);
    head.token = static_cast<int32_t>(token);
    head.k = k;
    head.value = value;
    return false;
  };
  RouteItem* items = items_.data() + token * call_.topk;
  for (int k = 0; k < call_.topk; ++k) {
    const int64_t expert = expert_at(token, k);
    if (expert < -1 || expert >= call_.experts) return wrong(Fault::bad_index, k, expert);
    items[k].expert = static_cast<int32_t>(expert);
    items[k].factor = call_.factors ? call_.factors[token * call_.topk + k] : 1;
    if (expert < 0) continue;
    for (int before = 0; before < k; ++before) {
      if (items[before].expert == expert) return wrong(Fault::duplicate, k, expert);
    }
    items[k].slot = slots[static_cast<size_t>(expert)]++;
    const int rank = routing_.owner(items[k].expert);
    std::vector<int32_t>& to_rank = rank_tokens_[static_cast<size_t>(rank)];
    std::vector<int32_t>& to_node =
        node_tokens_[static_cast<size_t>(launch_.view().node_of_rank[static_cast<size_t>(rank)])];
    if (to_rank.empty() || to_rank.back() != token) to_rank.push_back(static_cast<int32_t>(token));
    if (to_node.empty() || to_node.back() != token) to_node.push_back(static_cast<int32_t>(token));
    items[k].rank_slot = static_cast<int32_t>(to_rank.size()) - 1;
  }
  return true;
}

// This rank's routing and its block of counts, at its place in this rank's area.
void HostRouting::route() {
  const TopologyView& view = launch_.view();
  std::byte* block = launch_.area(routing_.counts_offset(view.rank));
  std::memset(block, 0, routing_.block_bytes());
  CountsHead head{};
  head.tokens = call_.tokens;
  head.row_capacity = call_.op == MK_OPERATOR_MOE_DISPATCH_GEMM ? call_.capacity_rows : INT64_MAX;
  const RecordLayout layout{routing_.num_experts(view.rank), call_.topk, call_.tokens};
  if (reads_record()) {
    head.has_record = 1;
    if (record_usable(call_.routing, call_.routing_bytes, layout, view.nranks, view.rank, call_.experts)) {
      recorded_ = RecordView{call_.routing}.items();
      if (call_.x == nullptr && !call_.use_routing && call_.routing->num_rows > 0) {
        head.fault = static_cast<int32_t>(Fault::no_rows);
        head.value = call_.routing->num_rows;
      }
    } else {
      head.fault = static_cast<int32_t>(Fault::bad_record);
    }
  } else {  // the record takes no more rows than its memory
    head.row_capacity =
        std::min(head.row_capacity, (static_cast<int64_t>(call_.routing_bytes) - layout.rows_offset()) /
                                        static_cast<int64_t>(sizeof(mk_moe_row_t)));
  }
  items_.assign(static_cast<size_t>(call_.tokens) * call_.topk, RouteItem{-1, 0, 0, 0});
  std::vector<int32_t> slots(static_cast<size_t>(call_.experts));
  bool good = head.fault == 0;
  for (int64_t token = 0; good && token < call_.tokens; ++token) good = route_token(token, head, slots);
  if (good) {
    auto* numbers = reinterpret_cast<int32_t*>(block + sizeof(CountsHead));
    std::copy(slots.begin(), slots.end(), numbers + routing_.expert_rows_at(0));
    count(numbers);
  }
  std::memcpy(block, &head, sizeof head);
}

void HostRouting::count(int32_t* numbers) const {
  const TopologyView& view = launch_.view();
  for (int rank = 0; rank < view.nranks; ++rank) {
    int32_t rows = 0;
    const int first = routing_.first_expert(rank);
    for (int local = 0; local < routing_.num_experts(rank); ++local)
      rows += numbers[routing_.expert_rows_at(first + local)];
    numbers[routing_.rank_rows_at(rank)] = rows;
    numbers[routing_.rank_tokens_at(rank)] = static_cast<int32_t>(tokens_to_rank(rank).size());
    numbers[routing_.node_rows_at(view.node_of_rank[rank])] += rows;
  }
  for (int node = 0; node < view.num_nodes; ++node)
    numbers[routing_.node_tokens_at(node)] = static_cast<int32_t>(tokens_to_node(node).size());
  if (!reads_record()) return;
  const int32_t* recorded = RecordView{call_.routing}.expert_counts();
  std::copy_n(recorded, routing_.num_experts(view.rank), numbers + routing_.received_at(0));
}

// Copies a block that is here to the ranks of this node.
void HostRouting::push_block(int source, bool to_self) const {
  const TopologyView& view = launch_.view();
  const size_t place = routing_.counts_offset(source);
  for (int position = to_self ? 0 : 1; position < view.local_nranks(); ++position) {
    const int local_rank = view.local_rank_of_rank[view.rotated(position)];
    if (position > 0)
      std::memcpy(launch_.peer_area(local_rank, place), launch_.area(place), routing_.block_bytes());
    launch_.raise_flag(local_rank, routing_.counts_flag(source));
  }
}

void HostRouting::publish() {
  route();
  push_block(launch_.view().rank, true);
  // The receive role may have decided already.
  int started = kStarted;
  stage_.compare_exchange_strong(started, kPublished, std::memory_order_acq_rel);
  launch_.rank.ring();
}

bool HostRouting::send_counts(Waiter& waiter) {
  if (!await(waiter, kPublished)) return false;
  const TopologyView& view = launch_.view();
  const uint64_t place = launch_.area_address(routing_.counts_offset(view.rank));
  for (int step = 1; step < view.num_nodes; ++step) {
    const int node = (view.node() + step) % view.num_nodes;
    if (!waiter.put(view.rail_peer(view.rank, node), place, place, routing_.block_bytes(),
                    routing_.counts_signal(view.rank))) {
      return false;
    }
  }
  return true;
}

// The first rank whose counts are not here; -1: none.
int HostRouting::first_missing() const {
  for (int source = 0; source < launch_.view().nranks; ++source) {
    if (!launch_.flag_raised(routing_.counts_flag(source))) return source;
  }
  return -1;
}

bool HostRouting::receive_counts(Waiter& waiter, const std::function<void()>& prepare) {
  std::vector<int> relayed;
  for (int source = 0; source < launch_.view().nranks; ++source) {
    if (routing_.relays(launch_.view().rank, source)) relayed.push_back(source);
  }
  while (true) {
    waiter.look();
    const size_t passed_on = std::erase_if(relayed, [&](int source) {
      if (!launch_.signal_arrived(routing_.counts_signal(source))) return false;
      launch_.take_signal(routing_.counts_signal(source));
      push_block(source, true);
      return true;
    });
    const int missing = first_missing();
    // Entries first: counts of a rank that launched something else are none.
    const bool entered = launch_.all_entered() || (launch_.hooks && launch_.hooks->skip_entry_wait);
    if (missing < 0 && entered) break;
    if (passed_on > 0) {
      waiter.progressed();
      continue;
    }
    const int source = std::max(missing, 0);
    const int flag = routing_.counts_flag(source);
    if (!waiter.sleep(
            {"counts", static_cast<uint64_t>(source), source, launch_.flag_value(flag), launch_.epoch}))
      return false;
  }
  if (launch_.stopped()) return false;
  verdict_ = decide_(routing_);
  const bool go = verdict_.kind == Verdict::go;
  if (!go) report();
  prepare();
  stage_.store(go ? kDecided : kFailed, std::memory_order_release);
  launch_.rank.ring();
  return go;
}

bool HostRouting::await(Waiter& waiter, Stage stage) {
  while (true) {
    waiter.look();
    if (stage_.load(std::memory_order_acquire) >= stage) return true;
    const int source = stage == kPublished ? launch_.view().rank : std::max(first_missing(), 0);
    const int flag = routing_.counts_flag(source);
    if (!waiter.sleep(
            {"counts", static_cast<uint64_t>(source), source, launch_.flag_value(flag), launch_.epoch}))
      return false;
  }
}

bool HostRouting::await_verdict(Waiter& waiter) {
  if (!await(waiter, kDecided) || stage_.load(std::memory_order_acquire) != kDecided) return false;
  waiter.progressed();
  return true;
}

void HostRouting::write_route(int64_t token, std::byte* to) const {
  const RouteHead head{static_cast<int32_t>(token), {}};
  std::memcpy(to, &head, sizeof head);
  std::memcpy(to + sizeof head, items_.data() + token * call_.topk,
              static_cast<size_t>(call_.topk) * sizeof(RouteItem));
}

void HostRouting::write_items(RecordItem* to) const {
  for (const RouteItem& item : items_) {
    *to++ = verdict_.kind == Verdict::go ? RecordItem{item.expert, item.slot} : RecordItem{-1, 0};
  }
}

void HostRouting::report() const {
  const DataError error{verdict_, routing_.head(verdict_.rank), call_.experts, call_.topk};
  launch_.set_data_error(describe(error, launch_.epoch), verdict_.rank);
}

bool route_sound(const Routing& routing, int source, const RouteItem& item) {
  return item.expert < routing.experts && item.slot >= 0 &&
         item.slot < routing.expert_rows(source, item.expert) && item.rank_slot >= 0 &&
         item.rank_slot < routing.rank_tokens(source, routing.owner(item.expert));
}

void report_unsound(HostLaunch& launch, int source) {
  mk_async_error_t error = MK_ASYNC_ERROR_INIT;
  error.status = MK_ERROR_INTERNAL;
  error.op = launch.op();
  error.rank = source;
  error.waiter_rank = -1;
  error.epoch = launch.epoch;
  launch.context.report(
      error, format("mk_%s (launch %llu): a token of rank %d carries a route that its counts do not "
                    "contain",
                    operator_name(launch.op()), static_cast<unsigned long long>(launch.epoch), source));
}

}  // namespace mk::moe
