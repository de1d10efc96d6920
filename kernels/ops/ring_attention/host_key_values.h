// SPDX-License-Identifier: MIT
// Keys and values of all ranks on the host executor: the roles that move them, and what a query sees of them.
#pragma once

#include <vector>

#include "../../host/host_launch.h"
#include "host_block.h"
#include "schedule.h"

namespace mk::ring_attention {

// Keys and values of some rows of a rank, the unit of transfer.
struct Chunk {
  int source;
  int chunk;
};

class HostKeyValues {
 public:
  // The launch's cu_seqlens are good.
  explicit HostKeyValues(HostLaunch& launch);

  void run_copy(Waiter& waiter);     // own chunks to the node
  void run_send(Waiter& waiter);     // own chunks to the rail peers in the other nodes
  void run_receive(Waiter& waiter);  // chunks of other nodes, forwarded inside this one

  const Schedule& schedule() const { return schedule_; }
  bool here(const Chunk& chunk) const;
  WaitTarget target_of(const Chunk& chunk) const;
  // Keys or values of a chunk that is here, from its first row.
  HeadRows rows_of(bool value, const Chunk& chunk, int64_t batch, int kv_head) const;
  int64_t count_of(const Chunk& chunk) const { return schedule_.chunk_count(chunk.source, chunk.chunk); }
  // The chunks that come to this rank, in the order in which its queries take them.
  const std::vector<Chunk>& needed() const { return needed_; }

  // The rows of `chunk` that this rank's query in `row` sees.
  KeyRange visible(int64_t row, const Chunk& chunk) const;

 private:
  struct Transfer {
    Chunk chunk;
    int to;
  };

  bool held(const Chunk& chunk) const;
  int self() const { return launch_.view().rank; }
  void pack(const Chunk& chunk, std::byte* to) const;
  void push(const Chunk& chunk, int to) const;

  HostLaunch& launch_;
  const Slices slices_;
  const std::vector<int64_t> rows_of_rank_;
  const Schedule schedule_;
  std::vector<std::vector<int64_t>> positions_;  // [rank][row]
  std::vector<KeyRange> visible_;                // [own row], positions
  std::vector<Chunk> needed_;
};

// Rows of one head of a caller's tensor of `heads` heads and `rows` rows.
int64_t first_element(const RingAttentionCall& call, int heads, int64_t rows, int64_t batch, int head);
int64_t row_stride(const RingAttentionCall& call, int heads);

}  // namespace mk::ring_attention
