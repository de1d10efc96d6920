// SPDX-License-Identifier: MIT
// The sums: of other nodes' tokens over the experts of this node, sent home; and of this rank's own tokens.
#pragma once

#include <vector>

#include "../../host/host_launch.h"
#include "../moe_routing/host_routing.h"
#include "schedule.h"

namespace mk::moe_gemm_combine {

class HostSums {
 public:
  // `schedule` has the counts when run_reduce is called.
  HostSums(HostLaunch& launch, const Schedule& schedule, const moe::HostRouting& routing)
      : launch_(launch), schedule_(schedule), routing_(routing) {}

  void run_reduce(Waiter& waiter);

 private:
  // A chunk of rows that something waits for: a flag of this rank.
  struct Rows {
    int flag;
    int expert_rank;
    int chunk;
    auto operator<=>(const Rows&) const = default;
  };
  struct NodeChunk {
    int node;
    int chunk;
    auto operator<=>(const NodeChunk&) const = default;
  };
  // Routes of a relayed home whose rows are to be added.
  struct Relayed {
    int home;
    int chunk;
    std::vector<Rows> rows;
  };
  // Some of this rank's tokens.
  struct Block {
    int64_t begin;
    int64_t end;
    std::vector<Rows> rows;
    std::vector<NodeChunk> sums;
    int number;
  };
  // Where the rows of a home are, among those collected here.
  struct Home {
    std::vector<int64_t> list_begin;  // [local rank of the experts]
    std::vector<int64_t> place;       // [expert]: of its first row in that list; experts of this node only
  };

  void prepare();
  Rows rows_of(int home, const moe::RouteItem& item) const;
  bool ready(const std::vector<Rows>& rows) const;
  // Adds factor * row of the items with an expert here, in the order of the experts.
  template <class ItemAt>
  void add_rows(int home, const ItemAt& item_at, float* sums) const;
  bool take_routes(const Relayed& item);
  bool relay_sums(const Relayed& item, Waiter& waiter);
  bool take_sums(const NodeChunk& item);
  bool finish(const Block& block, HostTrack* track);
  void finish_token(int64_t token);
  void plan_block(Block& block) const;
  int64_t place_in_node(int64_t token, int node) const;
  WaitTarget target() const;
  WaitTarget target_of(const std::vector<Rows>& rows) const;

  HostLaunch& launch_;
  const Schedule& schedule_;
  const moe::HostRouting& routing_;
  std::vector<Home> homes_;          // [rank], filled for those collected here
  std::vector<Relayed> routes_;      // routes have not come yet
  std::vector<Relayed> relayed_;     // rows have not all come yet
  std::vector<NodeChunk> incoming_;  // node sums that have not come yet
  std::vector<Block> blocks_;
  std::vector<float> sums_;
  bool ended_ = false;
};

}  // namespace mk::moe_gemm_combine
