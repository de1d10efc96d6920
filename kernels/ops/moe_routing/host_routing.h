// SPDX-License-Identifier: MIT
// The part that both mixture-of-experts operators have in common on the host executor: a rank's own routing,
// the exchange of counts, and what is decided from it.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "../../host/host_launch.h"
#include "record.h"
#include "schedule.h"

namespace mk::moe {

class HostRouting {
 public:
  using Decide = std::function<Verdict(const Routing& routing)>;

  HostRouting(HostLaunch& launch, const Routing& routing, Decide decide);

  // --- copy role: works out this rank's routing and announces its counts inside the node.
  void publish();
  // --- send role: the counts to the other nodes. False: the role has to end.
  bool send_counts(Waiter& waiter);
  // --- receive role: passes on the counts of other nodes and waits for all; then decides, and calls `prepare`
  // before other roles learn of it. False: the launch does not go on.
  bool receive_counts(Waiter& waiter, const std::function<void()>& prepare);
  // --- other roles: waits for the decision. False: the launch does not go on.
  bool await_verdict(Waiter& waiter);

  // The schedule's functions, with the counts of all ranks once they are decided upon.
  const Routing& routing() const { return routing_; }
  const Verdict& verdict() const { return verdict_; }

  // This rank's tokens: where each (token, k) goes, and which tokens go to a rank or node, in their order.
  const RouteItem& item(int64_t token, int k) const {
    return items_[static_cast<size_t>(token * call_.topk + k)];
  }
  const std::vector<int32_t>& tokens_to_rank(int rank) const { return rank_tokens_[static_cast<size_t>(rank)]; }
  const std::vector<int32_t>& tokens_to_node(int node) const { return node_tokens_[static_cast<size_t>(node)]; }
  // The route of a token as it travels: RouteHead, RouteItem[topk].
  void write_route(int64_t token, std::byte* to) const;
  // What the record keeps of it; nothing went anywhere when the launch does not go on.
  void write_items(RecordItem* to) const;

 private:
  enum Stage { kStarted, kPublished, kDecided, kFailed };

  bool reads_record() const;
  int64_t expert_at(int64_t token, int k) const;
  void route();
  bool route_token(int64_t token, CountsHead& head, std::vector<int32_t>& slots);
  void count(int32_t* numbers) const;
  void push_block(int source, bool to_self) const;
  int first_missing() const;
  bool await(Waiter& waiter, Stage stage);
  void report() const;

  HostLaunch& launch_;
  const MoeCall& call_;
  Routing routing_;
  const Decide decide_;
  Verdict verdict_;
  std::atomic<int> stage_{kStarted};
  const RecordItem* recorded_ = nullptr;  // in place of topk_idx
  std::vector<RouteItem> items_;
  std::vector<std::vector<int32_t>> rank_tokens_;
  std::vector<std::vector<int32_t>> node_tokens_;
};

// Is a route that another rank wrote one of its counts, so that places computed from it lie in this launch's
// areas?
bool route_sound(const Routing& routing, int source, const RouteItem& item);
// Reports one that is not: the launch ends with MK_ERROR_INTERNAL.
void report_unsound(HostLaunch& launch, int source);

inline const RouteHead& route_head(const std::byte* route) {
  return *reinterpret_cast<const RouteHead*>(route);
}
inline const RouteItem& route_item(const std::byte* route, int k) {
  return reinterpret_cast<const RouteItem*>(route + sizeof(RouteHead))[k];
}

}  // namespace mk::moe
