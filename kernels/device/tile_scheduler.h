// SPDX-License-Identifier: MIT
// Which tile, and which part of its inner dimension, a worker computes next. Pure functions of the
// schedule, the same on host and device: producer and consumers walk them separately and agree.
#pragma once

#include <cstdint>
#include <numeric>

#include "kernels/device/divisor.h"
#include "kernels/device/host_device.h"

namespace mk {

// One piece of work.
struct TileWork {
  int m_tile;
  int n_tile;
  int k_begin;  // in k-steps
  int k_end;
  // Workers [first_peer, first_peer + num_peers) hold the earlier k-steps of this tile, in order, and
  // have written their partial sums. Only the owner, who has the last k-step, has peers.
  int first_peer;
  int num_peers;
  bool is_owner;
  int ordinal;           // of the CTA's tiles; RankTileCursor and OwnerTileCursor alone count
  bool is_last = false;  // of the CTA's; OwnerTileCursor alone says so
};

// How many k-steps it takes until workers fall far out of step, where nothing but the product is under way.
constexpr int64_t OUT_OF_STEP_K_STEPS = 7168;

// How consumer_role() shows the compiler that a warp's threads walk alike (gemm_roles.cuh).
enum class TilesAre { plain, alike, settled };

// Raster: groups of group_m rows of tiles, M fastest inside a group. The tiles in flight together then form a
// near-square block, whose panels of A and B are read from L2 and not from HBM.
struct TileRaster {
  int num_m_tiles;
  int num_n_tiles;
  int group_m;

  MK_HOST_DEVICE void place(int tile, int* m_tile, int* n_tile) const {
    const int tiles_of_group = group_m * num_n_tiles;
    const int group = tile / tiles_of_group;
    const int first_m = group * group_m;
    const int rows = num_m_tiles - first_m < group_m ? num_m_tiles - first_m : group_m;
    const int idx = tile - group * tiles_of_group;
    *n_tile = idx / rows;
    *m_tile = first_m + idx - *n_tile * rows;
  }
};

// The first num_streamk_tiles, or the last, are cut into equal ranges of k-steps, one a worker; the rest are
// whole tiles, dealt out round-robin. A worker walks its range from the end, so that it first computes what
// another worker waits for, and waits only for workers of a lower index, which the hardware started no later:
// no cycle, and in a balanced launch no wait. A worker thus writes at most one partial tile a launch.
struct TileSchedule {
  int num_m_tiles = 0;
  int num_n_tiles = 0;
  int num_k_steps = 0;
  int num_workers = 0;
  int num_streamk_tiles = 0;  // 0, or num_workers <= num_streamk_tiles * num_k_steps < 2^31
  int group_m = 1;            // see TileRaster
  // The cut tiles come first, where their exchange is hidden, or last, where what they need comes late.
  bool streamk_is_last = false;
  // For CtasInStep, of tiles as large as a CTA can have; 0: each goes its own way.
  int near_k_steps = 0;

  TileSchedule() = default;
  TileSchedule(int m_tiles, int n_tiles, int k_steps, int workers, int streamk_tiles, int rows_of_group,
               bool cuts_last = false)
      : num_m_tiles(m_tiles),
        num_n_tiles(n_tiles),
        num_k_steps(k_steps),
        num_streamk_tiles(streamk_tiles),
        group_m(rows_of_group),
        streamk_is_last(cuts_last),
        tiles_of_group_(group_m * num_n_tiles),
        rows_of_group_(group_m),
        rows_of_last_group_(group_m > 0 ? num_m_tiles % group_m : 0),
        k_steps_(num_k_steps),
        streamk_tiles_(num_streamk_tiles) {
    set_num_workers(workers);
  }
  void set_num_workers(int workers) {
    num_workers = workers;
    workers_ = Divisor(workers);
    if (num_streamk_tiles == 0 || workers == 0) return;
    const int num_steps = num_streamk_tiles * num_k_steps;
    steps_of_worker_ = num_steps / workers;
    steps_left_ = num_steps % workers;
    steps_beside_ = (workers - 1) / num_k_steps;
  }

  MK_HOST_DEVICE int num_tiles() const { return num_m_tiles * num_n_tiles; }

  // Workers that have `least_k_steps` or more keep in step: with fewer they do not fall far out of it, and
  // would lose more by waiting.
  void keep_in_step_from(int64_t least_k_steps) {
    constexpr int NEAR_K_STEPS = 24;
    const bool is_long = int64_t{num_tiles()} * num_k_steps >= least_k_steps * num_workers;
    near_k_steps = is_long && num_k_steps >= NEAR_K_STEPS ? NEAR_K_STEPS : 0;
  }

  // A worker's first whole tile, and the one after another.
  MK_HOST_DEVICE int first_tile(int worker) const { return worker; }
  MK_HOST_DEVICE int tile_after(int tile) const { return tile + num_workers; }
  MK_HOST_DEVICE int first_streamk_tile() const {
    return streamk_is_last ? num_tiles() - num_streamk_tiles : 0;
  }
  MK_HOST_DEVICE int first_whole_tile() const { return streamk_is_last ? 0 : num_streamk_tiles; }
  MK_HOST_DEVICE int num_whole_tiles() const { return num_tiles() - num_streamk_tiles; }

  // Of all k-steps of the cut tiles: worker * their number / num_workers.
  MK_HOST_DEVICE int streamk_begin(int worker) const {
    return worker * steps_of_worker_ + worker * steps_left_ / workers_;
  }
  MK_HOST_DEVICE int streamk_tile(int step) const { return step / k_steps_; }

  // The worker whose range holds the first step of the `tile`-th cut tile: the largest w with streamk_begin(w)
  // <= tile * num_k_steps, or w * num_streamk_tiles * num_k_steps < (tile * num_k_steps + 1) * num_workers.
  MK_HOST_DEVICE int streamk_worker(int tile) const {
    return (tile * num_workers + steps_beside_) / streamk_tiles_;
  }

  // As TileRaster does.
  MK_HOST_DEVICE void place(int tile, int* m_tile, int* n_tile) const {
    const int group = tile / tiles_of_group_;
    const int first_m = group * group_m;
    const int rows_left = num_m_tiles - first_m;
    const bool is_whole = rows_left >= group_m;
    const int rows = is_whole ? group_m : rows_left;
    const int idx = tile - group * group_m * num_n_tiles;
    *n_tile = is_whole ? idx / rows_of_group_ : idx / rows_of_last_group_;
    *m_tile = first_m + idx - *n_tile * rows;
  }

 private:
  Divisor tiles_of_group_;
  Divisor rows_of_group_;
  Divisor rows_of_last_group_;
  Divisor k_steps_;
  Divisor streamk_tiles_;
  Divisor workers_;
  // The steps of the cut tiles, shared out.
  int steps_of_worker_ = 0;
  int steps_left_ = 0;    // beyond num_workers times that many
  int steps_beside_ = 0;  // (num_workers - 1) / num_k_steps
};

// The same with workers of whom the last come late: all are counted in num_workers, but the first `late_tile`
// whole tiles, a multiple of `num_early`, are dealt out among the first `num_early` workers.
struct LateTileSchedule : TileSchedule {
  int num_early = 0;
  int late_tile = 0;
  // Or, of as many tiles as workers, two workers share one of the first half along k, then one of the second
  // half: all have work from the beginning, where the tiles of the second half come late.
  bool shares_tiles = false;
  // Of workers that follow one another, how far apart their tiles are; see spread().
  int stride = 1;

  // CTAs that follow one another lie together on the chip, and parts of it load no more than so much: the tiles
  // of a last, short wave go to workers all over it, and not to the first. Without late workers.
  void spread() {
    constexpr double GOLDEN_RATIO = 0.618;
    stride = num_early > 2 ? static_cast<int>(GOLDEN_RATIO * num_early) : 1;
    while (std::gcd(stride, num_early) > 1) ++stride;
  }

  MK_HOST_DEVICE int first_tile(int worker) const {
    if (worker >= num_early) return late_tile + worker;
    return stride == 1 ? worker : worker * stride % num_early;
  }
  MK_HOST_DEVICE int tile_after(int tile) const { return tile + (tile < late_tile ? num_early : num_workers); }
};

// Products in tiles of 64 rows take some microseconds. Their consumers may have a tile without columns first,
// of which nothing is multiplied or stored: they go through its epilogue while the first operands are on their
// way, so that the instructions have come from the L2 when there is something to store.
template <class Config>
constexpr bool CAN_REHEARSE = Config::BLOCK_M == 64;

MK_HOST_DEVICE TileWork work_of_no_columns(const TileSchedule& schedule) {
  TileWork work{};
  work.n_tile = schedule.num_n_tiles;
  work.is_owner = true;
  return work;
}

template <class Schedule = TileSchedule>
class TileCursor {
 public:
  MK_HOST_DEVICE TileCursor(const Schedule& schedule, int worker)
      : schedule_(schedule), worker_(worker), next_tile_(schedule.first_tile(worker)) {
    if (schedule.num_streamk_tiles > 0) {
      step_begin_ = schedule.streamk_begin(worker);
      step_end_ = schedule.streamk_begin(worker + 1);
    }
  }

  MK_HOST_DEVICE bool next(TileWork* work) {
    if constexpr (requires { schedule_.shares_tiles; }) {
      if (schedule_.shares_tiles) return take_shared(work);
    }
    const bool has_whole_tiles = next_tile_ < schedule_.num_whole_tiles();
    if (step_end_ > step_begin_ && !(schedule_.streamk_is_last && has_whole_tiles)) {
      take_streamk(work);
      return true;
    }
    if (!has_whole_tiles) return false;
    schedule_.place(schedule_.first_whole_tile() + next_tile_, &work->m_tile, &work->n_tile);
    next_tile_ = schedule_.tile_after(next_tile_);
    work->k_begin = 0;
    work->k_end = schedule_.num_k_steps;
    work->first_peer = 0;
    work->num_peers = 0;
    work->is_owner = true;
    return true;
  }

 private:
  // Half of a tile. Here next_tile_ counts the worker's tiles, from its own number on.
  MK_HOST_DEVICE bool take_shared(TileWork* work) {
    const int turn = next_tile_ - worker_;
    if (turn == 2) return false;
    ++next_tile_;
    const int half = schedule_.num_workers / 2;
    const bool is_second = worker_ >= half;
    const int middle = schedule_.num_k_steps / 2;
    schedule_.place(turn * half + (is_second ? worker_ - half : worker_), &work->m_tile, &work->n_tile);
    work->k_begin = is_second ? middle : 0;
    work->k_end = is_second ? schedule_.num_k_steps : middle;
    work->first_peer = 0;
    work->num_peers = 0;
    work->is_owner = true;
    return true;
  }

  MK_HOST_DEVICE void take_streamk(TileWork* work) {
    const int num_k_steps = schedule_.num_k_steps;
    const int tile = schedule_.streamk_tile(step_end_ - 1);
    const int tile_begin = tile * num_k_steps;
    const int begin = step_begin_ > tile_begin ? step_begin_ : tile_begin;
    schedule_.place(schedule_.first_streamk_tile() + tile, &work->m_tile, &work->n_tile);
    work->k_begin = begin - tile_begin;
    work->k_end = step_end_ - tile_begin;
    work->is_owner = work->k_end == num_k_steps;
    work->first_peer = 0;
    work->num_peers = 0;
    if (work->is_owner && work->k_begin > 0) {
      work->first_peer = schedule_.streamk_worker(tile);
      work->num_peers = worker_ - work->first_peer;
    }
    step_end_ = begin;
  }

  const Schedule& schedule_;
  int worker_;
  int next_tile_;  // of the whole ones
  int step_begin_ = 0;
  int step_end_ = 0;
};

}  // namespace mk
