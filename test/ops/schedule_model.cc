// SPDX-License-Identifier: MIT
#include "schedule_model.h"

#include <algorithm>

#include "kernels/ops/allgather_gemm/plan.h"
#include "kernels/ops/gemm_allreduce/plan.h"
#include "kernels/ops/gemm_reduce_scatter/plan.h"
#include "lib/status.h"

namespace mk::test {

Views::Views(const std::vector<int32_t>& node_of_rank) {
  const std::vector<std::string> hosts(node_of_rank.size(), "host");
  for (size_t rank = 0; rank < node_of_rank.size(); ++rank) {
    topologies_.push_back(Topology::make(static_cast<int>(rank), hosts, node_of_rank));
  }
  for (const std::vector<int>& ranks : topologies_[0].ranks_of_node) {
    node_begin_.push_back(static_cast<int>(ranks_by_node_.size()));
    ranks_by_node_.insert(ranks_by_node_.end(), ranks.begin(), ranks.end());
  }
  node_begin_.push_back(nranks());
}

TopologyView Views::of(int rank) const {
  const Topology& topology = topologies_[static_cast<size_t>(rank)];
  return {rank,
          topology.nranks,
          topology.num_nodes,
          topology.node_of_rank.data(),
          topology.local_rank_of_rank.data(),
          node_begin_.data(),
          ranks_by_node_.data()};
}

ScheduleModel::ScheduleModel(const Views& views, const GemmCall& call, int launches, bool direct_outputs,
                             Fault fault)
    : views_(views),
      call_(call),
      direct_outputs_(direct_outputs),
      fault_(fault),
      accounts_(static_cast<size_t>(views.nranks())) {
  for (int rank = 0; rank < views.nranks(); ++rank) {
    view_ = views.of(rank);
    follow_network(rank);
    for (launch_ = 0; launch_ < launches; ++launch_) follow_rank(rank);
  }
}

void ScheduleModel::follow_rank(int rank) {
  graph_.wait(end(rank, launch_), begin(rank, launch_));
  if (launch_ > 0) graph_.wait(begin(rank, launch_), end(rank, launch_ - 1));
  follow_entries(rank);
  RankAccount& account = accounts_[static_cast<size_t>(rank)];
  if (call_.op == MK_OPERATOR_ALLGATHER_GEMM) {
    account.plan = allgather_gemm::plan_host(call_, view_, 1).value();
    const auto schedule = allgather_gemm::make_schedule(call_, account.plan, view_);
    account.area_bytes = schedule.area_bytes();
    if (schedule.m > 0 && schedule.k > 0) {
      Gather gather{schedule, 0, 0, 0, false, direct_outputs_};
      gather.wgrad = call_.mode == MK_ALLGATHER_WGRAD;
      follow_gather(gather);
    }
  } else if (call_.op == MK_OPERATOR_GEMM_REDUCE_SCATTER) {
    account.plan = gemm_reduce_scatter::plan_host(call_, view_, 1).value();
    const auto schedule = gemm_reduce_scatter::make_schedule(call_, account.plan, view_);
    account.area_bytes = schedule.area_bytes();
    if (call_.m > 0 && call_.n > 0) follow_reduction(schedule);
  } else {
    account.plan = gemm_allreduce::plan_host(call_, view_, 1).value();
    const auto schedule = gemm_allreduce::make_schedule(call_, account.plan, view_);
    account.area_bytes = schedule.area_bytes();
    if (call_.m == 0 || call_.n == 0) return;
    follow_reduction(schedule.reduce);
    follow_gather({schedule.gather, schedule.gather_begin(), schedule.gather_flag(0, 0),
                   schedule.gather_signal(0, 0) - schedule.gather.signal(0, 0), true, false});
  }
}

Event ScheduleModel::item(int rank, const char* kind, int a, int b, int c) {
  const Event event{kind, rank, launch_, a, b, c};
  graph_.wait(event, begin(rank, launch_));
  graph_.wait(end(rank, launch_), event);
  return event;
}

void ScheduleModel::raise_flag(const Event& by, int at, int index) {
  graph_.wait({"flag", at, launch_, index}, by);
  if (launch_ == 0) ++accounts_[static_cast<size_t>(at)].flags[index].times;
}

void ScheduleModel::wait_flag(const Event& who, int index) {
  graph_.wait(who, {"flag", view_.rank, launch_, index});
  if (launch_ == 0) ++accounts_[static_cast<size_t>(view_.rank)].flags[index].waited;
}

void ScheduleModel::put(const Event& by, int to, int signal, int64_t payload) {
  graph_.wait(by, {"fifo", view_.rank});
  graph_.wait({"signal", to, launch_, signal}, by);
  graph_.wait({"signal", to, launch_, signal}, {"proxy", view_.rank});
  graph_.wait({"signal", to, launch_, signal}, {"receive", to});
  // The launch ends when its puts no longer read their sources.
  graph_.wait(end(view_.rank, launch_), {"proxy", view_.rank});
  if (view_.is_local(to)) complain("a put inside a node, from rank " + std::to_string(view_.rank));
  if (launch_ > 0) return;
  ++accounts_[static_cast<size_t>(to)].signals[signal].times;
  accounts_[static_cast<size_t>(view_.rank)].network_bytes += payload;
}

void ScheduleModel::wait_signal(const Event& who, int index) {
  graph_.wait(who, {"signal", view_.rank, launch_, index});
  if (launch_ == 0) ++accounts_[static_cast<size_t>(view_.rank)].signals[index].waited;
}

void ScheduleModel::write(int at, int writer, size_t begin_byte, size_t bytes) {
  if (launch_ == 0)
    accounts_[static_cast<size_t>(at)].writes.push_back({begin_byte, begin_byte + bytes, writer});
}

void ScheduleModel::follow_network(int rank) {
  graph_.wait({"fifo", rank}, {"proxy", rank});
  for (int peer = 0; peer < view_.nranks; ++peer) {
    if (!view_.is_local(peer)) graph_.wait({"proxy", rank}, {"receive", peer});
  }
  if (fault_ == Fault::receive_waits_to_send) graph_.wait({"receive", rank}, {"proxy", rank});
}

void ScheduleModel::follow_entries(int rank) {
  const Event sent = item(rank, "entries sent");
  for (int node = 0; node < view_.num_nodes; ++node) {
    if (node != view_.node()) put(sent, view_.rail_peer(rank, node), rank, 0);
  }
  for (int source = 0; source < view_.nranks; ++source) {
    if (source == rank) continue;
    const Event entry{"entry", rank, launch_, source};
    if (fault_ != Fault::no_entry_wait) graph_.wait(end(rank, launch_), entry);
    if (view_.is_local(source)) {
      graph_.wait(entry, begin(source, launch_));
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

void ScheduleModel::follow_reduction(const gemm_reduce_scatter::Schedule& schedule) {
  const int rank = view_.rank;
  const int node = view_.node();
  // One compute thread: tile after tile, in the order of the schedule.
  Event before = begin(rank, launch_);
  for (int position = 0; position < view_.nranks; ++position) {
    const int owner = schedule.owner_at(position);
    const int reducer = schedule.reducer(owner, node);
    const int reduction = schedule.reduction(owner, node);
    if (reduction >= schedule.reductions(node)) complain("a reduction beyond the last");
    for (int chunk = 0; chunk < schedule.chunks(owner); ++chunk) {
      const Event computed = item(rank, "partial", owner, chunk);
      graph_.wait(computed, before);
      before = computed;
      raise_flag(computed, reducer, schedule.flag(reduction, view_.local_rank(), chunk));
      const int64_t rows = schedule.chunk_count(owner, chunk);
      write(reducer, rank,
            schedule.partial_offset(node, reduction, view_.local_rank(), chunk * schedule.chunk_rows),
            static_cast<size_t>(rows) * schedule.row_pitch());
      if (reducer != rank && launch_ == 0)
        accounts_[static_cast<size_t>(rank)].link_bytes += rows * static_cast<int64_t>(schedule.row_bytes());
    }
    if (reducer == rank) follow_reducer(schedule, owner);
  }
}

// The reduce role of view_.rank for one owner's rows.
void ScheduleModel::follow_reducer(const gemm_reduce_scatter::Schedule& schedule, int owner) {
  const int rank = view_.rank;
  const int node = view_.node();
  const int reduction = schedule.reduction(owner, node);
  for (int chunk = 0; chunk < schedule.chunks(owner); ++chunk) {
    const int64_t row = chunk * schedule.chunk_rows;
    const size_t bytes = static_cast<size_t>(schedule.chunk_count(owner, chunk)) * schedule.row_pitch();
    const int64_t payload = schedule.chunk_count(owner, chunk) * static_cast<int64_t>(schedule.row_bytes());
    const Event summed = item(rank, "node sum", owner, chunk);
    // The role may be stopped in any of its puts.
    if (view_.num_nodes > 1) graph_.wait(summed, {"fifo", rank});
    for (int source = 0; source < view_.local_nranks(); ++source) {
      wait_flag(summed, schedule.flag(reduction, source, chunk));
    }
    if (owner != rank) {
      put(summed, owner, schedule.signal(node, chunk), payload);
      write(rank, rank, schedule.send_offset(node, reduction, row), bytes);
      write(owner, rank, schedule.sum_offset(node, row), bytes);
      if (launch_ == 0) ++arrivals_[{view_.node_of_rank[owner], owner, node, chunk}];
      if (fault_ == Fault::sum_before_send && schedule.chunks(rank) > 0)
        graph_.wait(summed, {"reduced", rank, launch_, 0});
      continue;
    }
    const Event reduced = item(rank, "reduced", chunk);
    graph_.wait(reduced, summed);
    if (view_.num_nodes > 1) write(rank, rank, schedule.sum_offset(node, row), bytes);
    for (int other = 0; other < view_.num_nodes; ++other) {
      if (other != node) wait_signal(reduced, schedule.signal(other, chunk));
    }
  }
}

// The copy and send roles for this rank's own chunks, then the others.
void ScheduleModel::follow_gather(const Gather& gather) {
  const allgather_gemm::Schedule& schedule = gather.schedule;
  const int rank = view_.rank;
  for (int chunk = 0; chunk < schedule.chunks(rank); ++chunk) {
    const size_t place = gather.area_begin + schedule.area_offset(rank, chunk);
    const int64_t rows = schedule.chunk_count(rank, chunk);
    const size_t bytes = static_cast<size_t>(rows) * schedule.row_pitch();
    const int64_t payload = rows * static_cast<int64_t>(schedule.row_bytes());
    write(rank, rank, place, bytes);  // staged for the network, or the reduced rows
    const auto leaves = [&](const Event& event) {
      if (gather.reduced) graph_.wait(event, {"reduced", rank, launch_, chunk});
      for (int source = 0; fault_ == Fault::gather_before_push && source < view_.nranks; ++source) {
        if (source != rank && schedule.chunks(source) > 0)
          graph_.wait(event, {"flag", rank, launch_, gather.flag_begin + schedule.flag(source, 0)});
      }
    };
    for (int position = 1; position < view_.local_nranks(); ++position) {
      const int to = view_.rotated(position);
      const Event pushed = item(rank, "push", rank, chunk, to);
      leaves(pushed);
      if (gather.direct) graph_.wait(pushed, {"entry", rank, launch_, to});
      raise_flag(pushed, to, gather.flag_begin + schedule.flag(rank, chunk));
      write(to, rank, place, bytes);
      if (launch_ == 0) accounts_[static_cast<size_t>(rank)].link_bytes += payload;
    }
    const Event sent = item(rank, "sent", chunk);
    leaves(sent);
    for (int step = 1; step < view_.num_nodes; ++step) {
      const int node = (view_.node() + step) % view_.num_nodes;
      const int peer = view_.rail_peer(rank, node);
      put(sent, peer, gather.signal_begin + schedule.signal(rank, chunk), payload);
      write(peer, rank, place, bytes);
      if (launch_ == 0) ++arrivals_[{node, rank, -1, chunk}];
    }
  }
  for (int source = 0; source < view_.nranks; ++source) {
    if (schedule.relays(source)) follow_relay(gather, source);
  }
  follow_tiles(gather);
}

// The receive role: chunks of `source` from the network to the ranks of this node.
void ScheduleModel::follow_relay(const Gather& gather, int source) {
  const allgather_gemm::Schedule& schedule = gather.schedule;
  const int rank = view_.rank;
  for (int chunk = 0; chunk < schedule.chunks(source); ++chunk) {
    const int flag = gather.flag_begin + schedule.flag(source, chunk);
    const int64_t rows = schedule.chunk_count(source, chunk);
    const Event arrived = item(rank, "arrived", source, chunk);
    wait_signal(arrived, gather.signal_begin + schedule.signal(source, chunk));
    raise_flag(arrived, rank, flag);
    for (int position = 1; position < view_.local_nranks(); ++position) {
      const int to = view_.rotated(position);
      const Event forwarded = item(rank, "push", source, chunk, to);
      graph_.wait(forwarded, arrived);
      if (gather.direct) graph_.wait(forwarded, {"entry", rank, launch_, to});
      raise_flag(forwarded, to, flag);
      write(to, rank, gather.area_begin + schedule.area_offset(source, chunk),
            static_cast<size_t>(rows) * schedule.row_pitch());
      if (launch_ == 0)
        accounts_[static_cast<size_t>(rank)].link_bytes += rows * static_cast<int64_t>(schedule.row_bytes());
    }
  }
}

// What is done with gathered rows: tiles of C for the all-gather, chunks stored for the all-reduce.
void ScheduleModel::follow_tiles(const Gather& gather) {
  const allgather_gemm::Schedule& schedule = gather.schedule;
  if (gather.wgrad) return follow_wgrad(gather);
  for (int position = 0; position < view_.nranks; ++position) {
    const int source = schedule.source_at(position);
    const auto wait_chunk = [&](const Event& who, int chunk) {
      if (source != view_.rank) wait_flag(who, gather.flag_begin + schedule.flag(source, chunk));
    };
    for (int chunk = 0; gather.reduced && chunk < schedule.chunks(source); ++chunk) {
      wait_chunk(item(view_.rank, "store", source, chunk), chunk);
    }
    for (int64_t tile = 0; !gather.reduced && tile < schedule.tile_rows(source); ++tile) {
      const Event computed = item(view_.rank, "tile", source, static_cast<int>(tile));
      const int first = schedule.tile_first_chunk(tile);
      const int last = schedule.tile_last_chunk(source, tile);
      for (int chunk = first; chunk <= last; ++chunk) wait_chunk(computed, chunk);
      const int64_t end_row = std::min((tile + 1) * schedule.tile_m, schedule.rows(source));
      if (first * schedule.chunk_rows > tile * schedule.tile_m || (last + 1) * schedule.chunk_rows < end_row)
        complain("a tile that does not wait for all its rows, source " + std::to_string(source));
    }
  }
}

// A tile of C in mode WGRAD: a sum a source, chunk after chunk; stored when all are complete.
void ScheduleModel::follow_wgrad(const Gather& gather) {
  const allgather_gemm::Schedule& schedule = gather.schedule;
  const Event stored = item(view_.rank, "tile");
  int64_t rows = 0;
  for (int position = 0; position < view_.nranks; ++position) {
    const int source = schedule.source_at(position);
    for (int chunk = 0; chunk < schedule.chunks(source); ++chunk) {
      const Event added = item(view_.rank, "added", source, chunk);
      graph_.wait(stored, added);
      if (chunk > 0) graph_.wait(added, {"added", view_.rank, launch_, source, chunk - 1});
      if (source != view_.rank) wait_flag(added, gather.flag_begin + schedule.flag(source, chunk));
      rows += schedule.chunk_count(source, chunk);
    }
  }
  if (rows != schedule.m) complain("a tile that does not add every row");
}

std::vector<std::string> ScheduleModel::complaints() const {
  std::vector<std::string> found = complaints_;
  for (const auto& [what, times] : arrivals_) {
    if (times != 1)
      found.push_back(format("chunk %d of rank %d entered node %d %d times", what[3], what[1], what[0], times));
  }
  for (int rank = 0; rank < views_.nranks(); ++rank) {
    const RankAccount& account = accounts_[static_cast<size_t>(rank)];
    account.check_raised(rank, found);
    account.check_bytes(rank, found);
    if (account.plan.workspace_bytes != 2 * account.area_bytes) found.push_back("workspace is not two areas");
    account.check_writes(rank, found);
  }
  return found;
}

}  // namespace mk::test
