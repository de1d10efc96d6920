// SPDX-License-Identifier: MIT
// MoE dispatch + GEMM on the host executor: copy, send, receive and compute roles.
#include <cstring>
#include <memory>

#include "../../host/host_operator.h"
#include "../../host/number_format.h"
#include "../../host/tile_gemm.h"
#include "../moe_routing/host_routing.h"
#include "host_rows.h"
#include "plan.h"

namespace mk::moe_dispatch_gemm {
namespace {

struct State {
  HostLaunch& launch;
  Schedule schedule;
  moe::HostRouting routing;
  HostRows rows;

  explicit State(HostLaunch& in)
      : launch(in),
        schedule(make_schedule(in.moe(), in.plan, in.view())),
        routing(in, schedule.routing,
                [this](const moe::Routing& counted) {
                  schedule.routing = counted;
                  return moe::decide(schedule, launch.area_bytes());
                }),
        rows(in, schedule) {}

  int self() const { return launch.view().rank; }
  bool held(int source, int chunk) const {
    return launch.hooks && launch.hooks->hold && launch.hooks->hold(self(), source, chunk);
  }
  void write_packet(int64_t token, std::byte* to) const {
    const MoeCall& call = launch.moe();
    std::memcpy(to, static_cast<const std::byte*>(call.x) + token * call.ldx * 2, schedule.route_offset());
    routing.write_route(token, to + schedule.route_offset());
  }
  std::byte* receive_place(int rank, int source, int64_t token) const {
    return launch.peer_area(launch.view().local_rank_of_rank[rank],
                            schedule.offset(schedule.receive_begin(rank, source) + token));
  }
};

struct Pending {
  int rank;  // copy: to whom; send: to which node; receive: from whom
  int chunk;
};

// A chunk of this rank's tokens to a rank of this node.
void push_chunk(const State& state, const Pending& item) {
  const moe::Routing& routing = state.schedule.routing;
  const std::vector<int32_t>& tokens = state.routing.tokens_to_rank(item.rank);
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t begin = routing.chunk_begin(count, item.chunk);
  std::byte* to = state.receive_place(item.rank, state.self(), begin);
  for (int64_t i = 0; i < routing.chunk_count(count, item.chunk); ++i) {
    state.write_packet(tokens[static_cast<size_t>(begin + i)],
                       to + static_cast<size_t>(i) * state.schedule.packet_bytes());
  }
  state.launch.raise_flag(state.launch.view().local_rank_of_rank[item.rank],
                          state.schedule.flag(state.self(), item.chunk));
}

void run_copy(State& state, Waiter& waiter) {
  {
    const HostSpan span(waiter.track(), TraceKind::copy, -1);  // the counts
    state.routing.publish();
  }
  if (!state.routing.await_verdict(waiter)) return;
  const TopologyView& view = state.launch.view();
  const moe::Routing& routing = state.schedule.routing;
  std::vector<Pending> pending;
  for (int chunk = 0; chunk < routing.max_chunks; ++chunk) {
    for (int position = 0; position < view.local_nranks(); ++position) {
      const int to = view.rotated(position);
      if (chunk < routing.chunks(routing.rank_tokens(view.rank, to))) pending.push_back({to, chunk});
    }
  }
  perform_all(
      waiter, pending,
      [&](const Pending& item) {
        if (state.held(state.self(), item.chunk)) return false;
        const HostSpan span(waiter.track(), TraceKind::copy, item.chunk, item.rank);
        push_chunk(state, item);
        return true;
      },
      [&](const Pending& item) {
        return WaitTarget{"chunk", static_cast<uint64_t>(item.chunk), state.self()};
      });
}

// Packs the tokens for each other node and puts them to the rail peer there.
void run_send(State& state, Waiter& waiter) {
  if (!state.routing.send_counts(waiter) || !state.routing.await_verdict(waiter)) return;
  const HostLaunch& launch = state.launch;
  const TopologyView& view = launch.view();
  const Schedule& schedule = state.schedule;
  std::vector<Pending> pending;
  for (int chunk = 0; chunk < schedule.routing.max_chunks; ++chunk) {
    for (int step = 1; step < view.num_nodes; ++step) {
      const int node = (view.node() + step) % view.num_nodes;
      if (chunk < schedule.routing.chunks(schedule.routing.node_tokens(view.rank, node)))
        pending.push_back({node, chunk});
    }
  }
  const auto perform = [&](const Pending& item) {
    if (state.held(state.self(), item.chunk)) return false;
    const HostSpan span(waiter.track(), TraceKind::send, item.chunk);
    const std::vector<int32_t>& tokens = state.routing.tokens_to_node(item.rank);
    const auto total = static_cast<int64_t>(tokens.size());
    const int64_t begin = schedule.routing.chunk_begin(total, item.chunk);
    const int64_t count = schedule.routing.chunk_count(total, item.chunk);
    const size_t packed = schedule.offset(schedule.pack_begin(view.rank, item.rank) + begin);
    for (int64_t i = 0; i < count; ++i) {
      state.write_packet(tokens[static_cast<size_t>(begin + i)],
                         launch.area(packed + static_cast<size_t>(i) * schedule.packet_bytes()));
    }
    const int relay = schedule.routing.relay(view.rank, item.rank);
    waiter.put(relay, launch.area_address(packed),
               launch.area_address(schedule.offset(schedule.relay_begin(relay, view.rank) + begin)),
               static_cast<size_t>(count) * schedule.packet_bytes(),
               schedule.signal(view.rank, item.rank, item.chunk));
    return true;
  };
  perform_all(waiter, pending, perform, [&](const Pending& item) {
    return WaitTarget{"chunk", static_cast<uint64_t>(item.chunk), state.self()};
  });
}

// What is left to forward of other nodes' tokens: for each source and rank of this node, packets a chunk.
class Forwarding {
 public:
  explicit Forwarding(State& state) : state_(state) {
    const TopologyView& view = state.launch.view();
    const moe::Routing& routing = state.schedule.routing;
    left_.resize(static_cast<size_t>(view.nranks) * view.local_nranks() * routing.max_chunks);
    for (int source = 0; source < view.nranks; ++source) {
      if (!routing.relays(view.rank, source)) continue;
      for (int chunk = 0; chunk < routing.chunks(routing.node_tokens(source, view.node())); ++chunk)
        pending.push_back({source, chunk});
      for (int local = 0; local < view.local_nranks(); ++local) {
        const int64_t count = routing.rank_tokens(source, view.rank_at(view.node(), local));
        for (int chunk = 0; chunk < routing.chunks(count); ++chunk)
          left(source, local, chunk) = routing.chunk_count(count, chunk);
      }
    }
  }

  // Forwards a chunk from the network if it is here.
  bool perform(const Pending& item, HostTrack* track) {
    const HostLaunch& launch = state_.launch;
    const Schedule& schedule = state_.schedule;
    const TopologyView& view = launch.view();
    const int signal = schedule.signal(item.rank, view.node(), item.chunk);
    if (!launch.signal_arrived(signal) || state_.held(item.rank, item.chunk)) return false;
    launch.take_signal(signal);
    const HostSpan span(track, TraceKind::copy, item.chunk, item.rank);
    const int64_t total = schedule.routing.node_tokens(item.rank, view.node());
    const int64_t begin =
        schedule.relay_begin(view.rank, item.rank) + schedule.routing.chunk_begin(total, item.chunk);
    for (int64_t i = 0; i < schedule.routing.chunk_count(total, item.chunk); ++i) {
      forward(item.rank, launch.area(schedule.offset(begin + i)));
    }
    return true;
  }

  std::vector<Pending> pending;

 private:
  int64_t& left(int source, int local_rank, int chunk) {
    const auto pair = static_cast<size_t>(source * state_.launch.view().local_nranks() + local_rank);
    return left_[pair * state_.schedule.routing.max_chunks + chunk];
  }

  // Pushes one packet to each rank of this node that has one of its experts.
  void forward(int source, const std::byte* packet) {
    const HostLaunch& launch = state_.launch;
    const moe::Routing& routing = state_.schedule.routing;
    const TopologyView& view = launch.view();
    const std::byte* route = packet + state_.schedule.route_offset();
    for (int k = 0; k < routing.topk; ++k) {
      const moe::RouteItem& item = moe::route_item(route, k);
      if (item.expert < 0) continue;
      if (!moe::route_sound(routing, source, item)) return moe::report_unsound(state_.launch, source);
      const int rank = routing.owner(item.expert);
      if (!view.is_local(rank) || pushed_before(route, k, rank)) continue;
      std::memcpy(state_.receive_place(rank, source, item.rank_slot), packet, state_.schedule.packet_bytes());
      const int local_rank = view.local_rank_of_rank[rank];
      const int chunk = routing.chunk_of(routing.rank_tokens(source, rank), item.rank_slot);
      if (--left(source, local_rank, chunk) == 0)
        launch.raise_flag(local_rank, state_.schedule.flag(source, chunk));
    }
  }
  bool pushed_before(const std::byte* route, int k, int rank) const {
    for (int before = 0; before < k; ++before) {
      const int expert = moe::route_item(route, before).expert;
      if (expert >= 0 && state_.schedule.routing.owner(expert) == rank) return true;
    }
    return false;
  }

  State& state_;
  std::vector<int64_t> left_;  // [source][local rank][chunk]
};

// Takes tokens of other nodes from the network and forwards them inside this one; finds out which rows the
// tokens are that have come to this rank.
void run_receive(State& state, Waiter& waiter) {
  HostLaunch& launch = state.launch;
  const auto prepare = [&state] {
    const MoeCall& call = state.launch.moe();
    state.rows.prepare(state.routing.verdict());
    if (!call.use_routing) state.routing.write_items(moe::RecordView{call.routing}.items());
  };
  if (!state.routing.receive_counts(waiter, prepare)) return;
  const TopologyView& view = launch.view();
  const moe::Routing& routing = state.schedule.routing;
  Forwarding forwarding(state);
  std::vector<Pending> arrivals;
  for (int position = 0; position < view.nranks; ++position) {
    const int source = view.rotated(position);
    for (int chunk = 0; chunk < routing.chunks(routing.rank_tokens(source, view.rank)); ++chunk)
      arrivals.push_back({source, chunk});
  }
  const auto take = [&](const Pending& item) {
    if (!launch.flag_raised(state.schedule.flag(item.rank, item.chunk))) return false;
    const HostSpan span(waiter.track(), TraceKind::copy, item.chunk, item.rank);
    state.rows.take_chunk(item.rank, item.chunk);
    return true;
  };
  while (!forwarding.pending.empty() || !arrivals.empty()) {
    waiter.look();
    const size_t done =
        std::erase_if(forwarding.pending,
                      [&](const Pending& item) { return forwarding.perform(item, waiter.track()); }) +
        std::erase_if(arrivals, take);
    if (done > 0) {
      waiter.progressed();
      continue;
    }
    const Pending& first = forwarding.pending.empty() ? arrivals.front() : forwarding.pending.front();
    if (!waiter.sleep({"chunk", static_cast<uint64_t>(first.chunk), first.rank, 0, 1})) return;
  }
}

std::vector<Role> make_roles(HostLaunch& launch) {
  auto state = std::make_shared<State>(launch);
  std::vector<Role> roles;
  roles.emplace_back("copy", [state](Waiter& waiter) { run_copy(*state, waiter); });
  roles.emplace_back("receive", [state](Waiter& waiter) { run_receive(*state, waiter); });
  if (launch.view().num_nodes > 1) {
    roles.emplace_back("send", [state](Waiter& waiter) { run_send(*state, waiter); });
  }
  for (int thread = 0; thread < launch.plan.compute_ctas; ++thread) {
    roles.emplace_back("compute", [state](Waiter& waiter) {
      if (state->routing.await_verdict(waiter)) state->rows.run_compute(waiter);
    });
  }
  return roles;
}

}  // namespace
}  // namespace mk::moe_dispatch_gemm

const mk::HostOperator mk::kHostMoeDispatchGemm = {MK_OPERATOR_MOE_DISPATCH_GEMM,
                                                   mk::plan_call<mk::MoeCall, mk::moe_dispatch_gemm::plan_host>,
                                                   mk::moe_dispatch_gemm::make_roles};
