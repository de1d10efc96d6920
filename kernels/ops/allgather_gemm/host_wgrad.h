// SPDX-License-Identifier: MIT
// The compute role of the all-gather in mode WGRAD on the host executor: C = dY^T * gathered X. The gather runs
// along the inner dimension, so that every tile of C needs every chunk.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "../../host/host_launch.h"
#include "schedule.h"

namespace mk::allgather_gemm {

// A tile keeps one fp32 sum for each source rank, over that rank's rows in their order, and takes what is here
// of any of them: a source that is late holds up its own sum only. When all are complete they are added in the
// order of Schedule::source_at. So the bits depend on the topology alone.
class HostWgrad {
 public:
  struct Rows {
    const std::byte* data;
    int64_t pitch;  // bytes
  };
  // Rows of X from `row` of the gathered matrix on, of `source`, once they are ready.
  using RowsAt = std::function<Rows(int source, int64_t row)>;
  using ChunkReady = std::function<bool(int source, int chunk)>;
  using TargetOf = std::function<WaitTarget(int source, int chunk)>;

  HostWgrad(HostLaunch& launch, const Schedule& schedule, RowsAt rows_at, ChunkReady chunk_ready,
            TargetOf target_of);

  void run(Waiter& waiter);  // several threads

 private:
  // A tile under way. `tile` and `taken` are guarded by the mutex, the rest belongs to the thread that took it.
  struct Slot {
    int64_t tile = -1;
    bool taken = false;
    std::vector<int> chunks;  // by source: how many are in its sum
    float* sums = nullptr;    // [source][TileGemm::kRows][TileGemm::kColumns]
  };
  struct Place {
    int64_t row;  // of C
    int64_t column;
    int rows;
    int columns;
  };

  Place place_of(int64_t tile) const;
  bool take(Slot& slot);
  void give(Slot& slot, bool finished);
  bool complete(const Slot& slot) const;
  bool advance(Slot& slot, HostTrack* track) const;
  void add_chunk(const Place& place, int source, int chunk, float* sums) const;
  void store(const Slot& slot) const;
  WaitTarget first_missing(const Slot& slot) const;

  HostLaunch& launch_;
  const Schedule& schedule_;
  const RowsAt rows_at_;
  const ChunkReady chunk_ready_;
  const TargetOf target_of_;
  const int64_t num_columns_;  // column tiles
  const int64_t num_tiles_;
  std::unique_ptr<float[]> sums_;
  std::vector<Slot> slots_;
  std::mutex mutex_;
  int64_t next_tile_ = 0;
};

}  // namespace mk::allgather_gemm
