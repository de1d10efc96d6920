// SPDX-License-Identifier: MIT
// What every role of every rank does in a launch of a GEMM operator, taken from schedule.h and plan.cc without
// running it: the wait-for graph, and an account of flags, signals, writes and bytes.
//
// The network in the graph. A role that puts stops until the command FIFO has room, whatever its capacity; the
// FIFO has room when the proxy takes a command; the proxy, which takes them in order, stops until the peer of
// the first has a credit; a credit comes back when the peer's proxy receives. That a proxy receives waits for
// nothing: transport.h requires it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/operator_call.h"
#include "kernels/ops/allgather_gemm/schedule.h"
#include "kernels/ops/gemm_allreduce/schedule.h"
#include "kernels/ops/gemm_reduce_scatter/schedule.h"
#include "lib/topology.h"
#include "mkernel.h"
#include "rank_account.h"
#include "wait_graph.h"

namespace mk::test {

// Deviations from the protocol: a checker that does not see them proves nothing.
enum class Fault {
  none,
  sum_before_send,        // a reducer sends node sums only when its own rows are complete
  gather_before_push,     // a rank pushes its rows only when it has all others'
  receive_waits_to_send,  // a proxy that cannot send does not receive
  no_entry_wait           // a launch ends without having seen all entries
};

// A topology as each of its ranks sees it.
class Views {
 public:
  explicit Views(const std::vector<int32_t>& node_of_rank);
  int nranks() const { return static_cast<int>(topologies_.size()); }
  TopologyView of(int rank) const;

 private:
  std::vector<Topology> topologies_;
  std::vector<int> node_begin_;
  std::vector<int> ranks_by_node_;
};

class ScheduleModel {
 public:
  // Plans `call` for every rank of `views` and follows `launches` launches of it. direct_outputs: an all-gather
  // pushes to callers' memory, which waits for more than pushing to receive areas.
  ScheduleModel(const Views& views, const GemmCall& call, int launches, bool direct_outputs,
                Fault fault = Fault::none);

  const WaitGraph& graph() const { return graph_; }
  // What is wrong with the account of one launch; empty: nothing.
  std::vector<std::string> complaints() const;

  static Event begin(int rank, int launch) { return {"begin", rank, launch}; }
  static Event end(int rank, int launch) { return {"end", rank, launch}; }

 private:
  // The all-gather's half: alone, or behind the reduction.
  struct Gather {
    allgather_gemm::Schedule schedule;
    size_t area_begin = 0;
    int flag_begin = 0;
    int signal_begin = 0;
    bool reduced = false;  // a chunk leaves when this rank has reduced it
    bool direct = false;   // chunks go to callers' memory: behind the receiver's entry
    bool wgrad = false;    // every tile needs every chunk
  };

  void follow_rank(int rank);
  void follow_network(int rank);
  void follow_entries(int rank);
  void follow_reduction(const gemm_reduce_scatter::Schedule& schedule);
  void follow_reducer(const gemm_reduce_scatter::Schedule& schedule, int owner);
  void follow_gather(const Gather& gather);
  void follow_relay(const Gather& gather, int source);
  void follow_tiles(const Gather& gather);
  void follow_wgrad(const Gather& gather);

  // An event of this launch and rank that the rank's end waits for.
  Event item(int rank, const char* kind, int a = 0, int b = 0, int c = 0);
  void raise_flag(const Event& by, int at, int index);
  void wait_flag(const Event& who, int index);
  void put(const Event& by, int to, int signal, int64_t payload);
  void wait_signal(const Event& who, int index);
  void write(int at, int writer, size_t begin, size_t bytes);
  void complain(const std::string& text) { complaints_.push_back(text); }

  const Views& views_;
  const GemmCall call_;
  const bool direct_outputs_;
  const Fault fault_;
  int launch_ = 0;
  TopologyView view_{};  // of the rank being followed
  WaitGraph graph_;
  std::vector<RankAccount> accounts_;
  // How often the network brought (chunk of whose rows, from which node, chunk) into a node.
  std::map<std::vector<int>, int> arrivals_;
  std::vector<std::string> complaints_;
};

}  // namespace mk::test
