// SPDX-License-Identifier: MIT
// Ring attention on GPUs: how queries are cut into tiles and keys into blocks, in which order a tile takes
// blocks, which blocks travel to whom and where they land. Pure, host and device.
//
// A rank's rows are runs of consecutive positions: one, or two with zigzag. Neither tiles nor blocks cross a
// run's end. Inside a node each rank pushes its blocks to every other rank that needs them, head by head: a
// tile needs the keys of its own head only, so that the first tiles wait for the first heads, and not for all
// of them.
#pragma once

#include "kernels/protocol.h"

namespace mk::ring_attention {

MK_HOST_DEVICE constexpr int least(int a, int b) { return a < b ? a : b; }
MK_HOST_DEVICE constexpr int most(int a, int b) { return a > b ? a : b; }

// What kernels are built for, of heads up to so wide: queries of a tile, keys of a block, blocks in shared
// memory. A rank chooses its tiles of queries for itself; blocks of keys travel, so heads as wide have them
// alike.
struct CudaTile {
  int head_dim;
  int block_m;
  int block_n;
  int num_stages;
};
constexpr CudaTile CUDA_TILES[] = {{64, 128, 128, 4}, {64, 192, 128, 4}, {128, 128, 128, 2}};
constexpr int NUM_CUDA_TILES = 3;

// Which positions a rank holds of one sequence, 32 bits wide and without divisions: what schedule.h's Slices
// says.
struct CudaSlices {
  int seq;
  int nranks;
  int slice_rows;  // of all slices but the last
  bool causal;
  bool zigzag;

  MK_HOST_DEVICE int num_runs() const { return zigzag ? 2 : 1; }
  MK_HOST_DEVICE int slice(int rank, int run) const { return run == 0 ? rank : 2 * nranks - 1 - rank; }
  MK_HOST_DEVICE int begin(int rank, int run) const {
    const int64_t first = int64_t{slice_rows} * slice(rank, run);
    return first < seq ? static_cast<int>(first) : seq;
  }
  MK_HOST_DEVICE int count(int rank, int run) const { return least(slice_rows, seq - begin(rank, run)); }
  // Of a run among its rank's rows.
  MK_HOST_DEVICE int first_row(int rank, int run) const { return run == 0 ? 0 : count(rank, 0); }
  MK_HOST_DEVICE int rows(int rank) const { return count(rank, 0) + (zigzag ? count(rank, 1) : 0); }

  // A query at `position` sees those before this one.
  MK_HOST_DEVICE int visible_end(int position) const { return causal ? position + 1 : seq; }
};

// Where what the first and the last query of some consecutive ones see ends.
struct VisibleEnds {
  int of_first, of_last;
};
MK_HOST_DEVICE VisibleEnds visible_ends(const CudaSlices& slices, int first_position, int last_position) {
  return {slices.visible_end(first_position), slices.visible_end(last_position)};
}

// In which order a rank takes keys inside a node: its own, then those of the next ranks in turn.
struct RingOrder {
  int rank;
  MK_HOST_DEVICE int source(int step, int nranks) const {
    return rank + step < nranks ? rank + step : rank + step - nranks;
  }
};

// Keys of one head: block_n of a run's positions, or what is left of it.
struct KeyBlock {
  int step;  // whose: the order's source `step`
  int run;
  int index;       // in its run
  int position;    // of its first key
  int run_end;     // position behind its run
  bool is_masked;  // some query of the tile does not see all of it
};

// The blocks of which a tile's queries see something: source after source of the order.
template <class Order>
class KeyBlockWalk {
 public:
  MK_HOST_DEVICE KeyBlockWalk(const CudaSlices& slices, const Order& order, int block_n,
                              const VisibleEnds& visible)
      : slices_(slices), order_(order), block_n_(block_n), visible_(visible) {}

  // How many there are: before the first next().
  MK_HOST_DEVICE int count() const {
    KeyBlockWalk runs(*this);
    int blocks = 0;
    while (runs.next_run()) blocks += most(0, runs.end_ - runs.index_);
    return blocks;
  }
  MK_HOST_DEVICE bool next(KeyBlock* block) {
    while (index_ >= end_) {
      if (!next_run()) return false;
    }
    const int position = begin_ + index_ * block_n_;
    const int end = least(position + block_n_, run_end_);
    // Keys behind the run's end are masked, too.
    const bool is_whole = position + block_n_ <= run_end_;
    *block = {step_, run_, index_, position, run_end_, !is_whole || visible_.of_first < end};
    ++index_;
    return true;
  }
  // Leaves out the next `blocks`.
  MK_HOST_DEVICE void skip(int blocks) {
    while (blocks > 0 && (index_ < end_ || next_run())) {
      const int some = most(0, least(blocks, end_ - index_));
      index_ += some;
      blocks -= some;
    }
  }

 private:
  MK_HOST_DEVICE bool next_run() {
    if (++run_ == slices_.num_runs()) {
      run_ = 0;
      ++step_;
    }
    if (step_ == slices_.nranks) return false;
    const int source = order_.source(step_, slices_.nranks);
    begin_ = slices_.begin(source, run_);
    run_end_ = begin_ + slices_.count(source, run_);
    const int end = least(visible_.of_last, run_end_);
    index_ = 0;
    end_ = begin_ < end ? (end - begin_ + block_n_ - 1) / block_n_ : 0;
    return true;
  }

  const CudaSlices& slices_;
  const Order order_;
  const int block_n_;
  const VisibleEnds visible_;
  int step_ = 0, run_ = -1;
  int index_ = 0, end_ = 0;  // of the run's blocks: the next, and behind the last
  int begin_ = 0, run_end_ = 0;
};

// A tile of queries of one head.
struct QueryTile {
  int batch;
  int head;
  int kv_head;
  int row;       // its first among the rank's rows
  int position;  // of that row
  int num_rows;  // at most block_m
};

// Where tile `index` stands in the order in which a rank's are handed out: all of a key head before the next
// one's; of those the last positions first, which see most when causal; the query heads of a key head next to
// each other. The last `joint_heads` key heads together as if they were one.
struct QueryTilePlace {
  int kv_head;        // of all batches
  int head_of_group;  // of the query heads of a key head
  int from_end;       // of the head's tiles
};
MK_HOST_DEVICE QueryTilePlace query_tile_place(int index, int tiles_of_head, int group, int kv_heads,
                                               int joint_heads) {
  const int first_joint = kv_heads - joint_heads;
  const int first = least(index / (tiles_of_head * group), first_joint);
  const int together = first < first_joint ? 1 : joint_heads;
  const int within = index - first * tiles_of_head * group;
  const int from_end = within / (together * group);
  const int head = within - from_end * together * group;
  return {first + head / group, head - head / group * group, from_end};
}

// A rank's tiles.
struct QueryTiles {
  CudaSlices slices;
  int rank;
  int batch;
  int heads;
  int kv_heads;
  int block_m;
  int joint_heads = 1;  // of the key heads of all batches, the last so many together

  MK_HOST_DEVICE int tiles_of_run(int run) const { return (slices.count(rank, run) + block_m - 1) / block_m; }
  MK_HOST_DEVICE int tiles_of_head() const { return tiles_of_run(0) + (slices.zigzag ? tiles_of_run(1) : 0); }
  MK_HOST_DEVICE int size() const { return batch * heads * tiles_of_head(); }
  MK_HOST_DEVICE QueryTile at(int index) const {
    const int tiles = tiles_of_head(), group = heads / kv_heads;
    const QueryTilePlace place = query_tile_place(index, tiles, group, batch * kv_heads, joint_heads);
    QueryTile tile;
    tile.batch = place.kv_head / kv_heads;
    tile.kv_head = place.kv_head - tile.batch * kv_heads;
    tile.head = tile.kv_head * group + place.head_of_group;
    int in_run = tiles - 1 - place.from_end;
    const int run = in_run >= tiles_of_run(0) ? 1 : 0;
    if (run == 1) in_run -= tiles_of_run(0);
    const int offset = in_run * block_m;
    tile.row = slices.first_row(rank, run) + offset;
    tile.position = slices.begin(rank, run) + offset;
    tile.num_rows = least(block_m, slices.count(rank, run) - offset);
    return tile;
  }
};

// A producer looks at a panel's flag twice, which takes about as long as a block's products: once for every
// block, it cost 5 % of the time. Few panels arrive late for the first tiles.
constexpr int MOST_PANELS = 12;  // of a run

// How keys and values travel: a panel is up to panel_blocks blocks of one run and one key head, keys and
// values, with one flag. In the receive area of a bank lies, for each step (of a peer's rank to this one's) but
// 0, key head, and block of each run, the image that the block's keys have in shared memory, then its values'.
struct KeyPanels {
  int nranks;
  int num_heads;  // key heads of all batches
  int num_runs;
  int run_blocks;  // most blocks of a run
  int panel_blocks;
  int run_panels;   // most panels of a run
  int image_bytes;  // of a block's keys, or values

  MK_HOST_DEVICE size_t offset(int step, int head, int run, int block) const {
    return (((static_cast<size_t>(step - 1) * num_heads + head) * num_runs + run) * run_blocks + block) * 2 *
           image_bytes;
  }
  MK_HOST_DEVICE size_t area_bytes() const { return nranks > 1 ? offset(nranks, 0, 0, 0) : 0; }
  // Flags are those of the receiver: `step` is from it to the source.
  MK_HOST_DEVICE int flag(int step, int head, int run, int panel) const {
    return (((step - 1) * num_heads + head) * num_runs + run) * run_panels + panel;
  }
  MK_HOST_DEVICE int64_t num_flags() const { return int64_t{nranks - 1} * num_heads * num_runs * run_panels; }
  MK_HOST_DEVICE int num_units() const { return num_heads * num_runs * run_panels; }
};

// What a rank has to push: panels in the order of the heads.
struct PanelUnit {
  int head;  // of all batches
  int run;
  int panel;
  int block;       // the first
  int num_blocks;  // perhaps none
};
MK_HOST_DEVICE PanelUnit panel_unit(const KeyPanels& panels, const CudaSlices& slices, int rank, int block_n,
                                    int index) {
  PanelUnit unit;
  const int of_head = panels.num_runs * panels.run_panels;
  unit.head = index / of_head;
  const int within = index - unit.head * of_head;
  unit.run = within / panels.run_panels;
  unit.panel = within - unit.run * panels.run_panels;
  unit.block = unit.panel * panels.panel_blocks;
  const int blocks = (slices.count(rank, unit.run) + block_n - 1) / block_n;
  unit.num_blocks = most(0, least(panels.panel_blocks, blocks - unit.block));
  return unit;
}

// Does a query of `receiver` see one of the positions [begin, end)?
MK_HOST_DEVICE bool sees_some(const CudaSlices& slices, int receiver, int begin, int end) {
  for (int run = 0; run < slices.num_runs(); ++run) {
    const int count = slices.count(receiver, run);
    if (count == 0) continue;
    if (end > 0 && slices.visible_end(slices.begin(receiver, run) + count - 1) > begin) return true;
  }
  return false;
}

}  // namespace mk::ring_attention
