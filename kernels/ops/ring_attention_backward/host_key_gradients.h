// SPDX-License-Identifier: MIT
// dK and dV on the host executor: this rank's parts for every chunk that came to it, and the reduce role.
#pragma once

#include <atomic>
#include <vector>

#include "../ring_attention/host_key_values.h"
#include "host_gradient_block.h"
#include "schedule.h"

namespace mk::ring_attention_backward {

using ring_attention::Chunk;
using ring_attention::HostKeyValues;

// The queries of one head of this rank, and what came of them in the forward call.
QueryTile query_tile(const RingAttentionCall& call, int64_t own_rows, int64_t batch, int head, int64_t row,
                     int rows);

class HostKeyGradients {
 public:
  HostKeyGradients(HostLaunch& launch, const HostKeyValues& key_values, const Schedule& schedule);

  // Computes the part of one chunk that is here, for one head of keys. False: there was none to do.
  bool work(GradientScratch& scratch, HostTrack* track);
  void run_reduce(Waiter& waiter);

 private:
  // A chunk and how many of its (batch, head) are claimed, and not yet pushed.
  struct Unit {
    Chunk chunk{};
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> left{0};
  };

  int64_t heads_of_keys() const { return launch_.attention().batch * launch_.attention().kv_heads; }
  void push_part(const Chunk& chunk, int64_t batch, int kv_head, GradientScratch& scratch);
  void add_queries(const Chunk& chunk, int64_t begin, int64_t batch, int head, GradientScratch& scratch,
                   float* d_keys, float* d_values) const;

  bool parts_here(const Chunk& chunk) const;
  bool sums_here(int chunk) const;
  WaitTarget target_of(const Chunk& chunk) const;
  void add(size_t place, std::vector<float>& sums, bool first) const;
  bool reduce_local(const Chunk& chunk, Waiter& waiter);
  void finish(int chunk);
  void store(int chunk, const std::vector<float>& sums) const;

  HostLaunch& launch_;
  const HostKeyValues& key_values_;
  const Schedule schedule_;
  std::vector<Unit> units_;
};

}  // namespace mk::ring_attention_backward
