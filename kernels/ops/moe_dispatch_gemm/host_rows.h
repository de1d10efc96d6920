// SPDX-License-Identifier: MIT
// The rows of this rank's experts: which received packet each of them is, and the product.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "../../host/host_launch.h"
#include "schedule.h"

namespace mk::moe_dispatch_gemm {

class HostRows {
 public:
  // `schedule` has the counts when prepare is called.
  HostRows(HostLaunch& launch, const Schedule& schedule) : launch_(launch), schedule_(schedule) {}

  // Lays out rows and tiles, and begins the routing record; with a verdict against the launch there are none.
  void prepare(const moe::Verdict& verdict);
  // A chunk that has come: notes its rows, fills in the record, returns them to the caller if asked.
  void take_chunk(int source, int chunk);
  // Computes tiles whose rows are all here; several threads share the list.
  void run_compute(Waiter& waiter);

 private:
  struct Row {
    const std::byte* data;
    float scale;
  };
  struct Tile {
    int local_expert;
    int64_t begin;
    int rows;
    std::atomic<int> rows_left;
    std::atomic<int64_t> next_column{0};
    std::atomic<int64_t> columns_left;
  };

  void begin_record(const moe::Verdict& verdict) const;
  void take_row(int source, int token, int k, const moe::RouteItem& item, const std::byte* data);
  void compute_tile(const Tile& tile, int64_t column_tile) const;
  WaitTarget missing_chunk() const;

  HostLaunch& launch_;
  const Schedule& schedule_;
  int64_t num_columns_ = 0;            // column tiles
  std::vector<int64_t> expert_begin_;  // [local expert + 1]
  std::vector<int64_t> row_begin_;     // [local expert][source]
  std::vector<size_t> first_tile_;     // [local expert]
  std::vector<Row> rows_;
  size_t num_tiles_ = 0;
  std::unique_ptr<Tile[]> tiles_;
};

}  // namespace mk::moe_dispatch_gemm
