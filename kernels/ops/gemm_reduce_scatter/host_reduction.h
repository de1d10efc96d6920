// SPDX-License-Identifier: MIT
// The half of GEMM+ReduceScatter and GEMM+AllReduce that ends with an owner's sums: compute and reduce roles.
#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "../../host/host_launch.h"
#include "schedule.h"

namespace mk::gemm_reduce_scatter {

class HostReduction {
 public:
  // A row of this rank's sums, fp32, all columns; `row` counts from the rank's first.
  using FinishRow = std::function<void(int64_t row, const float* sums)>;
  using FinishChunk = std::function<void(int chunk)>;

  HostReduction(HostLaunch& launch, const Schedule& schedule, FinishRow finish_row, FinishChunk finish_chunk);

  void run_compute(Waiter& waiter);
  void run_reduce(Waiter& waiter);

 private:
  struct TileRow {
    int owner;
    int64_t index;
  };
  struct Item {
    int owner;
    int chunk;
  };

  void push_tile(const TileRow& tile, int64_t column_tile);
  void count_tile(int owner, int chunk);
  bool partials_ready(const Item& item) const;
  bool sums_ready(int chunk) const;
  WaitTarget target_of(const Item& item) const;
  // Sums of the node's partials for a row, in local-rank order.
  void sum_partials(int owner, int64_t row, float* sums) const;
  bool reduce_local(const Item& item, Waiter& waiter);
  void finish(int chunk);

  HostLaunch& launch_;
  const Schedule schedule_;
  const FinishRow finish_row_;
  const FinishChunk finish_chunk_;
  const int64_t num_columns_;  // column tiles
  std::vector<TileRow> tile_rows_;
  std::atomic<int64_t> next_tile_{0};
  std::vector<std::atomic<int64_t>> tiles_left_;  // [owner][chunk]
};

}  // namespace mk::gemm_reduce_scatter
