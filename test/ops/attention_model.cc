// SPDX-License-Identifier: MIT
#include "attention_model.h"

#include "lib/status.h"

namespace mk::test {

AttentionModel::AttentionModel(const Views& views, const RingAttentionCall& call, int launches, Fault fault)
    : views_(views), call_(call), fault_(fault), accounts_(static_cast<size_t>(views.nranks())) {
  for (int rank = 0; rank < views.nranks(); ++rank) {
    view_ = views.of(rank);
    follow_network(rank);
    for (launch_ = 0; launch_ < launches; ++launch_) follow_rank(rank);
  }
}

void AttentionModel::follow_rank(int rank) {
  const Event begin{"begin", rank, launch_};
  const Event end{"end", rank, launch_};
  graph_.wait(end, begin);
  if (launch_ > 0) graph_.wait(begin, {"end", rank, launch_ - 1});
  follow_entries(rank);
  const bool backward = call_.op == MK_OPERATOR_RING_ATTENTION_BACKWARD;
  RankAccount& own = account(rank);
  own.plan = (backward ? ring_attention_backward::plan_host(call_, view_, 1)
                       : ring_attention::plan_host(call_, view_, 1))
                 .value();
  const ring_attention::Slices slices = ring_attention::make_slices(call_, view_, true);
  const std::vector<int64_t> rows = ring_attention::count_rows(slices);
  const auto gather = ring_attention::make_schedule(call_, own.plan, view_, slices, rows);
  const auto schedule = ring_attention_backward::make_schedule(call_, own.plan, gather);
  own.area_bytes = backward ? schedule.area_bytes() : gather.area_bytes();
  if (call_.batch == 0 || call_.seq == 0) return;
  follow_own_chunks(gather);
  follow_relays(gather);
  follow_compute(gather);
  if (!backward) return;
  follow_parts(schedule);
  for (int owner = 0; owner < view_.nranks; ++owner) {
    if (schedule.reduce.reducer(owner, view_.node()) != rank) continue;
    for (int chunk = 0; chunk < gather.chunks(owner); ++chunk) {
      if (gather.node_needs(view_.node(), owner, chunk)) follow_reducer(schedule, owner, chunk);
    }
  }
}

Event AttentionModel::item(int rank, const char* kind, int a, int b, int c) {
  const Event event{kind, rank, launch_, a, b, c};
  graph_.wait(event, {"begin", rank, launch_});
  graph_.wait({"end", rank, launch_}, event);
  return event;
}

void AttentionModel::raise_flag(const Event& by, int at, int index) {
  graph_.wait({"flag", at, launch_, index}, by);
  if (launch_ == 0) ++account(at).flags[index].times;
}

void AttentionModel::wait_flag(const Event& who, int index) {
  graph_.wait(who, {"flag", view_.rank, launch_, index});
  if (launch_ == 0) ++account(view_.rank).flags[index].waited;
}

void AttentionModel::put(const Event& by, int to, int signal, int64_t payload) {
  graph_.wait(by, {"fifo", view_.rank});
  graph_.wait({"signal", to, launch_, signal}, by);
  graph_.wait({"signal", to, launch_, signal}, {"proxy", view_.rank});
  graph_.wait({"signal", to, launch_, signal}, {"receive", to});
  graph_.wait({"end", view_.rank, launch_}, {"proxy", view_.rank});
  if (view_.is_local(to)) complaints_.push_back("a put inside a node, from rank " + std::to_string(view_.rank));
  if (launch_ > 0) return;
  ++account(to).signals[signal].times;
  account(view_.rank).network_bytes += payload;
}

void AttentionModel::wait_signal(const Event& who, int index) {
  graph_.wait(who, {"signal", view_.rank, launch_, index});
  if (launch_ == 0) ++account(view_.rank).signals[index].waited;
}

void AttentionModel::write(int at, int writer, size_t begin, size_t bytes) {
  if (launch_ == 0) account(at).writes.push_back({begin, begin + bytes, writer});
}

void AttentionModel::follow_network(int rank) {
  graph_.wait({"fifo", rank}, {"proxy", rank});
  for (int peer = 0; peer < view_.nranks; ++peer) {
    if (!view_.is_local(peer)) graph_.wait({"proxy", rank}, {"receive", peer});
  }
  if (fault_ == Fault::receive_waits_to_send) graph_.wait({"receive", rank}, {"proxy", rank});
}

void AttentionModel::follow_entries(int rank) {
  const Event sent = item(rank, "entries sent");
  for (int node = 0; node < view_.num_nodes; ++node) {
    if (node != view_.node()) put(sent, view_.rail_peer(rank, node), rank, 0);
  }
  for (int source = 0; source < view_.nranks; ++source) {
    if (source == rank) continue;
    const Event entry{"entry", rank, launch_, source};
    graph_.wait({"end", rank, launch_}, entry);
    if (view_.is_local(source)) {
      graph_.wait(entry, {"begin", source, launch_});
      continue;
    }
    const int relay = view_.rail_peer(source, view_.node());
    graph_.wait(entry, {"entry passed on", relay, launch_, source});
    if (relay != rank) continue;
    const Event passed = item(rank, "entry passed on", source);
    graph_.wait(passed, sent);
    wait_signal(passed, source);
  }
}

// The copy and send roles.
void AttentionModel::follow_own_chunks(const ring_attention::Schedule& schedule) {
  const int rank = view_.rank;
  for (int chunk = 0; chunk < schedule.chunks(rank); ++chunk) {
    const size_t place = schedule.chunk_offset(rank, chunk);
    const size_t bytes = static_cast<size_t>(schedule.chunk_count(rank, chunk)) * schedule.row_bytes();
    const auto leaves = [&](const Event& event) {
      for (int source = 0; fault_ == Fault::gather_before_push && source < view_.nranks; ++source) {
        if (source != rank && schedule.needs(rank, source, 0))
          graph_.wait(event, {"flag", rank, launch_, schedule.flag(source, 0)});
      }
    };
    for (int position = 1; position < view_.local_nranks(); ++position) {
      const int to = view_.rotated(position);
      if (!schedule.needs(to, rank, chunk)) continue;
      const Event pushed = item(rank, "push", rank, chunk, to);
      leaves(pushed);
      raise_flag(pushed, to, schedule.flag(rank, chunk));
      write(to, rank, place, bytes);
      if (launch_ == 0) account(rank).link_bytes += static_cast<int64_t>(bytes);
    }
    bool staged = false;
    for (int node = 0; node < view_.num_nodes; ++node) {
      if (node == view_.node() || !schedule.node_needs(node, rank, chunk)) continue;
      const int peer = view_.rail_peer(rank, node);
      const Event sent = item(rank, "send", chunk, node);
      leaves(sent);
      put(sent, peer, schedule.signal(rank, chunk), static_cast<int64_t>(bytes));
      write(peer, rank, place, bytes);
      if (!staged) write(rank, rank, place, bytes);
      staged = true;
      if (launch_ == 0) ++arrivals_[{node, rank, chunk}];
    }
  }
}

// The receive role.
void AttentionModel::follow_relays(const ring_attention::Schedule& schedule) {
  const int rank = view_.rank;
  for (int source = 0; source < view_.nranks; ++source) {
    for (int chunk = 0; schedule.relays(source) && chunk < schedule.chunks(source); ++chunk) {
      if (!schedule.node_needs(view_.node(), source, chunk)) continue;
      const Event arrived = item(rank, "arrived", source, chunk);
      wait_signal(arrived, schedule.signal(source, chunk));
      if (schedule.needs(rank, source, chunk)) raise_flag(arrived, rank, schedule.flag(source, chunk));
      for (int position = 1; position < view_.local_nranks(); ++position) {
        const int to = view_.rotated(position);
        if (!schedule.needs(to, source, chunk)) continue;
        const Event forwarded = item(rank, "push", source, chunk, to);
        graph_.wait(forwarded, arrived);
        raise_flag(forwarded, to, schedule.flag(source, chunk));
        const size_t bytes = static_cast<size_t>(schedule.chunk_count(source, chunk)) * schedule.row_bytes();
        write(to, rank, schedule.chunk_offset(source, chunk), bytes);
        if (launch_ == 0) account(rank).link_bytes += static_cast<int64_t>(bytes);
      }
    }
  }
}

// Tiles take whatever is here and merge it in order: the last of a tile waits for every chunk.
void AttentionModel::follow_compute(const ring_attention::Schedule& schedule) {
  const Event tiles = item(view_.rank, "tiles");
  for (int source = 0; source < view_.nranks; ++source) {
    for (int chunk = 0; chunk < schedule.chunks(source); ++chunk) {
      if (source != view_.rank && schedule.needs(view_.rank, source, chunk))
        wait_flag(tiles, schedule.flag(source, chunk));
    }
  }
}

// This rank's parts of dK and dV, one compute thread: in any order, each when its chunk is here.
void AttentionModel::follow_parts(const ring_attention_backward::Schedule& schedule) {
  const int node = view_.node();
  for (int owner = 0; owner < view_.nranks; ++owner) {
    for (int chunk = 0; chunk < schedule.gather.chunks(owner); ++chunk) {
      if (!schedule.gather.needs(view_.rank, owner, chunk)) continue;
      const Event part = item(view_.rank, "part", owner, chunk);
      if (owner != view_.rank) wait_flag(part, schedule.gather.flag(owner, chunk));
      const int reducer = schedule.reduce.reducer(owner, node);
      raise_flag(part, reducer, schedule.flag(owner, node, view_.local_rank(), chunk));
      write(reducer, view_.rank, schedule.partial_offset(owner, node, view_.local_rank(), chunk),
            schedule.chunk_bytes(owner, chunk));
      if (reducer != view_.rank && launch_ == 0)
        account(view_.rank).link_bytes += static_cast<int64_t>(schedule.chunk_bytes(owner, chunk));
    }
  }
}

void AttentionModel::follow_reducer(const ring_attention_backward::Schedule& schedule, int owner, int chunk) {
  const int rank = view_.rank;
  const int node = view_.node();
  const size_t bytes = schedule.chunk_bytes(owner, chunk);
  const Event summed = item(rank, "node sum", owner, chunk);
  if (view_.num_nodes > 1) graph_.wait(summed, {"fifo", rank});  // the role may be stopped in any of its puts
  for (int source = 0; source < view_.local_nranks(); ++source) {
    if (schedule.gather.needs(view_.rank_at(node, source), owner, chunk))
      wait_flag(summed, schedule.flag(owner, node, source, chunk));
  }
  if (owner != rank) {
    put(summed, owner, schedule.signal(node, chunk), static_cast<int64_t>(bytes));
    write(rank, rank, schedule.send_offset(owner, node, chunk), bytes);
    write(owner, rank, schedule.sum_offset(node, chunk), bytes);
    if (fault_ == Fault::sum_before_send && schedule.gather.chunks(rank) > 0)
      graph_.wait(summed, {"reduced", rank, launch_, 0});
    return;
  }
  const Event reduced = item(rank, "reduced", chunk);
  graph_.wait(reduced, summed);
  if (view_.num_nodes > 1) write(rank, rank, schedule.sum_offset(node, chunk), bytes);
  for (int other = 0; other < view_.num_nodes; ++other) {
    if (other != node && schedule.gather.node_needs(other, rank, chunk))
      wait_signal(reduced, schedule.signal(other, chunk));
  }
}

std::vector<std::string> AttentionModel::complaints() const {
  std::vector<std::string> found = complaints_;
  for (const auto& [what, times] : arrivals_) {
    if (times != 1)
      found.push_back(format("chunk %d of %d entered node %d %d times", what[2], what[1], what[0], times));
  }
  for (int rank = 0; rank < views_.nranks(); ++rank) {
    const RankAccount& own = accounts_[static_cast<size_t>(rank)];
    own.check_raised(rank, found);
    // A plan does not look at cu_seqlens.
    if (call_.num_sequences == 0) own.check_bytes(rank, found);
    if (own.plan.workspace_bytes != 2 * own.area_bytes) found.push_back("workspace is not two areas");
    own.check_writes(rank, found);
  }
  return found;
}

}  // namespace mk::test
