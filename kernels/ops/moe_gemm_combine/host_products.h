// SPDX-License-Identifier: MIT
// The products of this rank's expert rows, pushed to the ranks that collect them.
#pragma once

#include <atomic>
#include <vector>

#include "../../host/host_launch.h"
#include "schedule.h"

namespace mk::moe_gemm_combine {

class HostProducts {
 public:
  // `schedule` has the counts when prepare is called.
  HostProducts(HostLaunch& launch, const Schedule& schedule) : launch_(launch), schedule_(schedule) {}

  void prepare();
  void run_compute(Waiter& waiter);

 private:
  struct Tile {
    int local_expert;
    int64_t begin;  // a row of this rank's
    int rows;
  };
  // The rows of one home at this rank.
  struct List {
    int collector;  // local rank
    int64_t begin;  // in the collector's region
    int64_t count;
  };
  // Some rows of a tile that lie in one chunk of one list.
  struct Part {
    int home;
    int chunk;
    int first;  // row of the tile
    int rows;
    int64_t place;  // of the first, in the list
  };

  std::vector<Part> parts_of(const Tile& tile) const;
  bool held(const std::vector<Part>& parts) const;
  void push_tile(const Tile& tile, const std::vector<Part>& parts, int64_t column_tile);
  size_t pair(int local_expert, int home) const {
    return static_cast<size_t>(local_expert) * launch_.view().nranks + home;
  }

  HostLaunch& launch_;
  const Schedule& schedule_;
  int64_t num_columns_ = 0;  // column tiles
  std::vector<Tile> tiles_;
  std::vector<List> lists_;          // [home]
  std::vector<int64_t> row_begin_;   // [local expert][home], and the end
  std::vector<int64_t> list_place_;  // [local expert][home]: of the expert's first row in the home's list
  std::vector<std::atomic<int64_t>> left_;  // [home][chunk], rows times column tiles
  std::atomic<int64_t> next_{0};
};

}  // namespace mk::moe_gemm_combine
