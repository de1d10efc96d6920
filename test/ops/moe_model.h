// SPDX-License-Identifier: MIT
// Follows the mixture-of-experts protocol as its schedules state it, for a given routing, without running it:
// what waits for what, and an account of flags, signals, tokens and bytes.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "kernels/ops/moe_dispatch_gemm/schedule.h"
#include "kernels/ops/moe_gemm_combine/schedule.h"
#include "moe_problem.h"
#include "rank_account.h"
#include "schedule_model.h"
#include "wait_graph.h"

namespace mk::test {

// Deviations from the protocol: a checker that does not see them proves nothing.
enum class MoeFault {
  none,
  forward_last,   // a relay forwards only when its own rows are here
  product_last,   // a rank pushes expert rows only when its own tokens are summed
  no_entry_wait,  // a launch ends, and rows move, without all entries and counts
};

class MoeModel {
 public:
  MoeModel(const Views& views, const MoeProblem& problem, mk_operator_t op, int launches,
           MoeFault fault = MoeFault::none);

  const WaitGraph& graph() const { return graph_; }
  // What is wrong with the account of one launch; empty: nothing.
  std::vector<std::string> complaints() const;

 private:
  using Tokens = std::vector<int64_t>;

  void count();
  Tokens tokens_to(int source, const std::set<int>& ranks) const;
  std::set<int> ranks_of_node(int node) const;
  void follow_rank(int rank);
  void follow_entries();
  void follow_counts();
  void follow_own_tokens();
  void follow_forwards(int source);
  void follow_arrivals();
  void follow_routes();
  void follow_products();
  void follow_relayed(int home);
  void follow_tokens();
  // Waits for the rows of `home`'s token whose experts are here.
  void wait_rows(const Event& who, int home, int64_t token);
  int64_t list_place(int home, int64_t token, int k) const;
  int64_t slot(int home, int64_t token, int64_t expert) const;

  Event item(const char* kind, int a = 0, int b = 0,
             int c = 0);  // of this rank and launch; its end waits for it
  Event row_item(const char* kind, int a = 0, int b = 0, int c = 0);  // and it for the verdict
  void raise_flag(const Event& by, int at, int index);
  void wait_flag(const Event& who, int index);
  void put(const Event& by, int to, int signal, int64_t payload);
  void wait_signal(const Event& who, int index);
  void write(int at, size_t begin, size_t bytes);
  void check_prepared(int rank, std::vector<std::string>& found) const;

  const Views& views_;
  const MoeProblem& problem_;
  const mk_operator_t op_;
  const MoeFault fault_;
  std::vector<std::byte> blocks_;
  MoeCall call_;
  mk_plan_t plan_ = MK_PLAN_INIT;
  int launch_ = 0;
  TopologyView view_{};  // of the rank being followed
  moe_dispatch_gemm::Schedule dispatch_{};
  moe_gemm_combine::Schedule combine_{};
  moe::Routing routing_{};
  WaitGraph graph_;
  std::vector<RankAccount> accounts_;
  std::map<std::vector<int64_t>, int> delivered_;  // (rank, source, token): packets at the rank
  std::map<std::vector<int64_t>, int> entered_;    // (node, source, token): times that the network brought it
};

}  // namespace mk::test
