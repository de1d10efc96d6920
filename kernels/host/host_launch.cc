// SPDX-License-Identifier: MIT
#include "host_launch.h"

#include <algorithm>
#include <cstring>

#include "../wait_report.h"

namespace mk {
namespace {

// A record is written once a launch: the epoch last, so that a reader of the epoch sees the rest.
void store_entry(EntryRecord* slot, const EntryRecord& record) {
  slot->op = record.op;
  slot->dtypes = record.dtypes;
  std::memcpy(slot->shape, record.shape, sizeof slot->shape);
  slot->tuning_hash = record.tuning_hash;
  std::memcpy(slot->modes, record.modes, sizeof slot->modes);
  slot->output_offset = record.output_offset;
  slot->output_ld = record.output_ld;
  std::atomic_ref<uint64_t>(slot->epoch).store(record.epoch, std::memory_order_release);
}

}  // namespace

HostLaunch::HostLaunch(HostRank& rank_in, const ExecutorContext& context_in, const OperatorCall& call_in,
                       const mk_plan_t& plan_in, const Arena& arena, uint64_t epoch_in)
    : rank(rank_in),
      context(context_in),
      call(call_in),
      plan(plan_in),
      epoch(epoch_in),
      bank(bank_of(epoch_in)),
      hooks(host_hooks.load(std::memory_order_acquire)),
      arena_(arena) {}

bool HostLaunch::flag_raised(int index) const {
  if (hooks && hooks->ignore_flags) return true;
  const auto order = hooks && hooks->relaxed_flags ? std::memory_order_relaxed : std::memory_order_acquire;
  return rank.flag(view().local_rank(), bank, index).load(order) >= epoch;
}

uint64_t HostLaunch::flag_value(int index) const {
  return rank.flag(view().local_rank(), bank, index).load(std::memory_order_relaxed);
}

void HostLaunch::raise_flag(int local_rank, int index) const {
  rank.flag(local_rank, bank, index).store(epoch, std::memory_order_release);
  rank.ring(local_rank);
}

uint64_t HostLaunch::entry_epoch(int in_bank, int source) const {
  EntryRecord* record = rank.entry(view().local_rank(), in_bank, source);
  return std::atomic_ref<uint64_t>(record->epoch).load(std::memory_order_acquire);
}

void HostLaunch::look_for_absent() {
  const std::chrono::milliseconds patience(context.config.wait_timeout_ms);
  if (std::chrono::steady_clock::now() - begun_at_ <= patience || has_looked_for_absent_.exchange(true)) return;
  std::vector<AbsentPeer> absent;
  for (int source = 0; source < view().nranks; ++source) {
    if (source != view().rank && !has_entered(source))
      absent.push_back({source, std::max(entry_epoch(0, source), entry_epoch(1, source))});
  }
  log_absent(context, op(), epoch, absent);
}

bool HostLaunch::direct_output(int a, int b) const {
  const EntryRecord& first = entry(a);
  const EntryRecord& second = entry(b);
  return first.output_offset != kNoOutput && first.output_offset == second.output_offset &&
         first.output_ld == second.output_ld;
}

EntryRecord HostLaunch::make_entry() const {
  EntryRecord record = mk::make_entry(call, epoch);
  const PeerOutput output = peer_output(call);
  if (output.data != nullptr) {
    if (const auto offset = context.symmetric_offset(output.data, output.bytes)) {
      record.output_offset = *offset;
      record.output_ld = output.ld;
    }
  }
  return record;
}

void HostLaunch::publish_entry() const {
  const EntryRecord record = make_entry();
  for (int local_rank = 0; local_rank < view().local_nranks(); ++local_rank) {
    store_entry(rank.entry(local_rank, bank, view().rank), record);
    rank.ring(local_rank);
  }
}

void HostLaunch::set_mismatch(std::string sentence) {
  mismatch_sentence_ = std::move(sentence);
  mismatch_.store(true, std::memory_order_release);
  rank.ring();
}

void HostLaunch::set_all_entered() {
  entered_at_ = std::chrono::steady_clock::now();
  all_entered_.store(true, std::memory_order_release);
}

bool Waiter::sleep(const WaitTarget& target) {
  if (launch_.stopped()) return false;
  // A peer that has not entered yet is waited for as long as its heartbeat lives (the bootstrap raises the
  // abort token when it ends): it may be compiling, or writing a checkpoint.
  const HostHooks* hooks = launch_.hooks;
  const bool has_deadline = !hooks || !hooks->has_deadline || hooks->has_deadline(launch_.view().rank, role_);
  if (!launch_.all_entered()) launch_.look_for_absent();
  if (launch_.all_entered() && has_deadline) {
    const auto start = std::max(since_, launch_.entered_at());
    const std::chrono::milliseconds patience(launch_.context.config.wait_timeout_ms);
    if (std::chrono::steady_clock::now() - start > patience) {
      report_timeout(launch_.context, {launch_.op(), launch_.epoch, launch_.view().rank, role_, target.object,
                                       target.index, target.peer, target.seen, target.expected});
      return false;
    }
  }
  const uint64_t start_ns = track_ ? trace_clock_ns() : 0;
  launch_.rank.sleep(ticket_, 50);
  if (track_) track_->add_wait(start_ns, target.object, static_cast<int64_t>(target.index), target.peer);
  return !launch_.stopped();
}

bool Waiter::put(int peer, uint64_t source, uint64_t target, size_t bytes, int signal) {
  Command command{};
  command.kind = bytes > 0 ? CommandKind::put : CommandKind::signal;
  command.peer = static_cast<uint16_t>(peer);
  command.signal = HostRank::signal_index(launch_.bank, signal);
  command.source = source;
  command.target = target;
  command.bytes = static_cast<uint32_t>(bytes);
  Endpoint& endpoint = *launch_.rank.endpoint();
  for (look(); !endpoint.try_post(command); look()) {
    if (!sleep({"put", endpoint.posted(), peer, endpoint.completed(), endpoint.posted()})) return false;
  }
  launch_.rank.signals_sent(peer).fetch_add(1, std::memory_order_relaxed);
  progressed();
  return true;
}

namespace {

// Copies a record that a put has brought to the slots of this node.
void forward_entry(HostLaunch& launch, int source) {
  const HostRank& rank = launch.rank;
  EntryRecord record;
  std::memcpy(&record, rank.control(launch.view().local_rank(), rank.layout().inbox(launch.bank, source)),
              sizeof record);
  for (int local_rank = 0; local_rank < launch.view().local_nranks(); ++local_rank) {
    store_entry(rank.entry(local_rank, launch.bank, source), record);
    rank.ring(local_rank);
  }
}

bool send_entries(HostLaunch& launch, Waiter& waiter) {
  const TopologyView& view = launch.view();
  const HostRank& rank = launch.rank;
  if (view.num_nodes == 1) return true;
  const size_t outbox = rank.layout().outbox(launch.bank);
  const EntryRecord record = launch.make_entry();
  std::memcpy(rank.control(view.local_rank(), outbox), &record, sizeof record);
  for (int node = 0; node < view.num_nodes; ++node) {
    if (node == view.node()) continue;
    if (!waiter.put(view.rail_peer(view.rank, node), rank.control_address(outbox),
                    rank.control_address(rank.layout().inbox(launch.bank, view.rank)), sizeof(EntryRecord),
                    view.rank)) {
      return false;
    }
  }
  return true;
}

// Is `source` somewhere else for good? In a host-collective step before this launch, or, having seen a
// disagreement that has not reached this rank yet, in recovery from it.
std::string elsewhere(const HostLaunch& launch, int source) {
  const std::optional<Meeting> meeting = launch.context.peek(source);
  if (!meeting) return {};
  if (meeting->kind == MeetingKind::recover && meeting->epoch == launch.epoch) return meeting->description;
  if (meeting->epoch >= launch.epoch) return {};
  return format("rank %d called %s, rank %d is in %s", launch.view().rank,
                describe(launch.entry(launch.view().rank)).c_str(), source, meeting->description.c_str());
}

}  // namespace

void run_entry_role(HostLaunch& launch, Waiter& waiter) {
  if (!send_entries(launch, waiter)) return;
  const TopologyView& view = launch.view();
  std::vector<int> missing;
  for (int source = 0; source < view.nranks; ++source) {
    if (source != view.rank) missing.push_back(source);
  }
  if (launch.hooks && launch.hooks->skip_entry_wait) return;
  while (true) {
    waiter.look();
    const size_t before = missing.size();
    std::erase_if(missing, [&](int source) {
      if (!view.is_local(source) && view.rail_peer(source, view.node()) == view.rank &&
          launch.signal_arrived(source)) {
        launch.take_signal(source);
        forward_entry(launch, source);
      }
      if (!launch.has_entered(source)) return false;
      std::string text = difference(launch.entry(view.rank), view.rank, launch.entry(source), source);
      if (!text.empty() && !launch.mismatched()) launch.set_mismatch(std::move(text));
      return true;
    });
    if (missing.empty()) {
      launch.set_all_entered();
      launch.rank.ring();
      return;
    }
    if (missing.size() < before) {
      waiter.progressed();
      continue;
    }
    for (int source = 0; source < view.nranks && !launch.mismatched(); ++source) {
      if (source == view.rank) continue;
      if (std::string text = elsewhere(launch, source); !text.empty()) launch.set_mismatch(std::move(text));
    }
    const int first = missing.front();
    if (!waiter.sleep({"entry", static_cast<uint64_t>(first), first, 0, launch.epoch})) return;
  }
}

}  // namespace mk
