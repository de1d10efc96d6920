// SPDX-License-Identifier: MIT
// Tiles of this rank's queries on the host executor. A tile takes the chunks that it sees one by one: whichever
// is here is computed, and the parts are merged in the order of the schedule. A part that is early is kept
// until its turn, so that neither a late chunk stops the others nor the time of arrival changes a bit.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <vector>

#include "host_key_values.h"

namespace mk::ring_attention {

struct Tile {
  int64_t batch;
  int head;
  int64_t row;  // the first, of this rank's
  int rows;
  int kv_head;
};

class HostTiles {
 public:
  using Merge = std::function<void(Part& into, const Part& from)>;
  using Finish = std::function<void(const Tile& tile, const Part& all)>;
  // What a chunk gives to a tile; visible: of each row of the tile in the chunk. A thread brings its own.
  using Compute = std::function<Part(const Tile& tile, const Chunk& chunk, const KeyRange* visible)>;

  HostTiles(HostLaunch& launch, const HostKeyValues& key_values, Merge merge, Finish finish);

  // Looks for a tile with something to do, from number `next` on, and does it. False: there was none, and what
  // is not done waits for chunks or is in another thread's hands.
  bool work(size_t& next, const Compute& compute);
  bool finished() const { return left_.load(std::memory_order_acquire) == 0; }

 private:
  struct State {
    std::atomic<bool> taken{false};  // by a thread
    std::atomic<bool> done{false};
    std::vector<bool> computed;  // of each step
    size_t merged = 0;           // steps
    Part all;
    std::map<size_t, Part> early;
  };

  bool advance(size_t number, const Compute& compute);
  void take(State& state, size_t step, Part part);

  HostLaunch& launch_;
  const HostKeyValues& key_values_;
  const Merge merge_;
  const Finish finish_;
  std::vector<Tile> tiles_;
  std::vector<State> states_;
  std::map<int64_t, std::vector<Chunk>> steps_;  // of the tiles that begin at a row
  std::atomic<size_t> left_;
};

// The first of the chunks that is not here, as a target to wait for; false: all are here.
bool first_missing(const HostKeyValues& key_values, WaitTarget& target);

}  // namespace mk::ring_attention
