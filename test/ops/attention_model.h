// SPDX-License-Identifier: MIT
// What every role of every rank does in a launch of ring attention, taken from schedule.h and plan.cc without
// running it: the wait-for graph, and an account of flags, signals, writes and bytes. The network is that of
// schedule_model.h.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernels/ops/ring_attention/plan.h"
#include "kernels/ops/ring_attention_backward/plan.h"
#include "rank_account.h"
#include "schedule_model.h"
#include "wait_graph.h"

namespace mk::test {

class AttentionModel {
 public:
  // Fault::sum_before_send (backward) and Fault::gather_before_push have their meaning of schedule_model.h.
  AttentionModel(const Views& views, const RingAttentionCall& call, int launches, Fault fault = Fault::none);

  const WaitGraph& graph() const { return graph_; }
  // What is wrong with the account of one launch; empty: nothing.
  std::vector<std::string> complaints() const;

 private:
  void follow_rank(int rank);
  void follow_network(int rank);
  void follow_entries(int rank);
  void follow_own_chunks(const ring_attention::Schedule& schedule);
  void follow_relays(const ring_attention::Schedule& schedule);
  void follow_compute(const ring_attention::Schedule& schedule);
  void follow_parts(const ring_attention_backward::Schedule& schedule);
  void follow_reducer(const ring_attention_backward::Schedule& schedule, int owner, int chunk);

  Event item(int rank, const char* kind, int a = 0, int b = 0, int c = 0);
  void raise_flag(const Event& by, int at, int index);
  void wait_flag(const Event& who, int index);
  void put(const Event& by, int to, int signal, int64_t payload);
  void wait_signal(const Event& who, int index);
  void write(int at, int writer, size_t begin, size_t bytes);
  RankAccount& account(int rank) { return accounts_[static_cast<size_t>(rank)]; }

  const Views& views_;
  const RingAttentionCall call_;
  const Fault fault_;
  int launch_ = 0;
  TopologyView view_{};  // of the rank being followed
  WaitGraph graph_;
  std::vector<RankAccount> accounts_;
  // How often the network brought (source, chunk) into a node.
  std::map<std::vector<int>, int> arrivals_;
  std::vector<std::string> complaints_;
};

}  // namespace mk::test
