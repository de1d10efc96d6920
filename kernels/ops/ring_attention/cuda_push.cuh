// SPDX-License-Identifier: MIT
// How keys and values reach the peers that need them, forward and backward: push warps of a few CTAs bring
// pieces through shared memory, as images of the blocks that these are loaded into there, and the producer's
// warp signals what has arrived. Before its other work, in room that is free until then.
#pragma once

#include "kernels/device/push_signals.cuh"
#include "kernels/device/rank_launch.cuh"
#include "kernels/ops/ring_attention/cuda_blocks.h"
#include "kernels/ops/ring_attention/cuda_items.cuh"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/tma.cuh"

namespace mk::ring_attention {

constexpr int NUM_KEY_PUSH_WARPS = 3;  // of a CTA that pushes
constexpr int NUM_KEY_PUSH_STAGES = 2;

struct KeyPushStorage {
  uint64_t full[NUM_KEY_PUSH_WARPS][NUM_KEY_PUSH_STAGES];
  PushSignals<NUM_KEY_PUSH_WARPS> signals;
};

// By one thread of the CTA; a fence.mbarrier_init and a CTA-wide barrier must follow.
__device__ __forceinline__ void key_push_init(KeyPushStorage& smem) {
  for (auto& warp : smem.full) {
    for (uint64_t& full : warp) ptx::mbarrier_init(&full, 1);
  }
  push_signals_init(smem.signals);
}

// What a push warp's pieces pass through.
template <class Config>
constexpr int KEY_PUSH_BYTES = NUM_KEY_PUSH_WARPS* NUM_KEY_PUSH_STAGES* Config::KEY_COLUMN_BYTES;

__device__ __forceinline__ int wrap(int rank, int nranks) { return rank < nranks ? rank : rank - nranks; }

// Columns of 64 of a block's keys or values.
template <class Unit>
struct Piece {
  Unit unit;
  int block;   // of its run
  bool value;  // and not key
  int column_block;
};

// The pieces of one push warp: of every `stride`-th unit.
template <class Config, class Params>
class PieceWalk {
 public:
  __device__ PieceWalk(const Params& params, int first, int stride)
      : params_(params), next_unit_(first), stride_(stride) {}

  using Unit = typename Params::Unit;

  // `ends_unit`: no other piece of the unit follows.
  __device__ __forceinline__ bool next(Piece<Unit>* piece, bool* ends_unit) {
    constexpr int PER_BLOCK = 2 * Config::NUM_COLUMN_BLOCKS;
    while (at_ == unit_.num_blocks * PER_BLOCK) {
      if (next_unit_ >= params_.panels.num_units()) return false;
      unit_ = panel_unit(params_.panels, params_.tiles.slices, params_.comm.rank, Config::BLOCK_N, next_unit_);
      next_unit_ += stride_;
      at_ = 0;
    }
    const int within = at_ % PER_BLOCK;
    *piece = {unit_, unit_.block + at_ / PER_BLOCK, within >= Config::NUM_COLUMN_BLOCKS,
              within % Config::NUM_COLUMN_BLOCKS};
    *ends_unit = ++at_ == unit_.num_blocks * PER_BLOCK;
    return true;
  }

 private:
  const Params& params_;
  int next_unit_;
  const int stride_;
  Unit unit_{};
  int at_ = 0;
};

// Whose keys are the source `step` of a tile's order, and the number under which they lie in receive areas.
template <class Params>
__device__ __forceinline__ int source_of(const Params& params, int step) {
  return wrap(params.comm.rank + step, params.comm.nranks);
}
template <class Params>
__device__ __forceinline__ int slot_of(const Params&, int step) {
  return step;
}

// Does `peer` need one of the unit's keys?
template <class Config, class Params>
__device__ __forceinline__ bool peer_needs(const Params& params, const PanelUnit& unit, int peer) {
  const CudaSlices& slices = params.tiles.slices;
  const int run_begin = slices.begin(params.comm.rank, unit.run);
  const int run_end = run_begin + slices.count(params.comm.rank, unit.run);
  const int begin = run_begin + unit.block * Config::BLOCK_N;
  return sees_some(slices, peer, begin, least(begin + unit.num_blocks * Config::BLOCK_N, run_end));
}

// The ranks that this one pushes to, of which each needs some units, and the number under which its keys lie
// there: to the nearest one before this rank first, for it takes this rank's keys next to its own.
template <class Params>
__device__ __forceinline__ int first_receiver(const Params&) {
  return 1;
}
template <class Params>
__device__ __forceinline__ int end_of_receivers(const Params& params) {
  return params.comm.nranks;
}
template <class Params>
__device__ __forceinline__ int receiver_at(const Params& params, int step) {
  return params.comm.rank >= step ? params.comm.rank - step : params.comm.rank - step + params.comm.nranks;
}
template <class Config, class Params>
__device__ __forceinline__ bool receiver_needs(const Params& params, const PanelUnit& unit, int peer) {
  return peer_needs<Config>(params, unit, peer);
}
template <class Params>
__device__ __forceinline__ int slot_at_receiver(const Params&, int step) {
  return step;
}

// This rank's keys or values.
template <class Params>
__device__ __forceinline__ const CUtensorMap* key_map(const Params& params, bool value) {
  return value ? &params.map_v : &params.map_k;
}

// The number under which arrivals of a unit of this rank are counted.
template <class Params>
__device__ __forceinline__ int count_of_unit(const Params&, int unit) {
  return unit;
}

template <class Config, class Params>
__device__ __forceinline__ void load_piece(const Params& params, const Piece<typename Params::Unit>& piece,
                                           uint8_t* buffer, uint64_t* full) {
  const auto& slices = params.tiles.slices;
  const int row = slices.first_row(params.comm.rank, piece.unit.run) + piece.block * Config::BLOCK_N;
  const int batch = piece.unit.head / params.tiles.kv_heads;
  ptx::mbarrier_arrive_expect_tx(full, Config::KEY_COLUMN_BYTES);
  ptx::cp_async_bulk_tensor_4d_shared_global(buffer, key_map(params, piece.value), full,
                                             piece.column_block * 64, row,
                                             piece.unit.head - batch * params.tiles.kv_heads, batch);
}

template <class Config, class Params>
__device__ __forceinline__ void store_piece(const RankLaunch& launch, const Params& params,
                                            const Piece<typename Params::Unit>& piece, const uint8_t* buffer) {
  const size_t within = (piece.value ? Config::KEY_BYTES : 0) + piece.column_block * Config::KEY_COLUMN_BYTES;
#pragma unroll 1
  for (int step = first_receiver(params); step < end_of_receivers(params); ++step) {
    const int peer = receiver_at(params, step);
    if (!receiver_needs<Config>(params, piece.unit, peer)) continue;
    const int slot = slot_at_receiver(params, step);
    const size_t offset = params.panels.offset(slot, piece.unit.head, piece.unit.run, piece.block) + within;
    ptx::cp_async_bulk_global_shared(launch.area(peer, offset), buffer, Config::KEY_COLUMN_BYTES);
  }
  ptx::cp_async_bulk_commit_group();
}

// A push warp, whose first lane does it all; `room`: KEY_PUSH_BYTES, 1024-byte aligned. Notes units that have
// arrived at all peers.
template <class Config, class Params>
__device__ __forceinline__ void push_keys(const RankLaunch& launch, const Params& params, KeyPushStorage& smem,
                                          uint8_t* room, int warp, int push_cta) {
  uint8_t* const buffers = room + warp * NUM_KEY_PUSH_STAGES * Config::KEY_COLUMN_BYTES;
  uint64_t* const full = smem.full[warp];
  const bool leads = threadIdx.x % 32 == 0;
  PushNotes notes(smem.signals, warp);
  PieceWalk<Config, Params> walk(params, push_cta + warp * params.num_push_ctas,
                                 NUM_KEY_PUSH_WARPS * params.num_push_ctas);
  const Tracer tracer(params.comm.trace, trace_track());
  const auto note_of = [&](const PanelUnit& unit) {
    return static_cast<uint64_t>(unit.head) << 32 | static_cast<uint32_t>(unit.run) << 31 | unit.panel;
  };
  Piece<typename Params::Unit> piece, following;
  bool ends = false, following_ends = false;
  bool has_piece = walk.next(&piece, &ends);
  if (has_piece && leads) load_piece<Config>(params, piece, buffers, &full[0]);
  bool has_note = false;  // a unit all of which is stored, but may not have arrived
  uint64_t note = 0;
  for (uint32_t count = 0; has_piece; ++count) {
    const int stage = count % NUM_KEY_PUSH_STAGES;
    const bool has_following = walk.next(&following, &following_ends);
    if (has_following) {
      ptx::cp_async_bulk_wait_group_read<0>();  // the piece before has been read from where this one goes
      if (leads) {
        load_piece<Config>(params, following, buffers + (stage ^ 1) * Config::KEY_COLUMN_BYTES,
                           &full[stage ^ 1]);
      }
    }
    wait_barrier(&full[stage], count / NUM_KEY_PUSH_STAGES & 1);
    tracer.begin(TraceKind::copy, piece.unit.panel);
    if (leads) store_piece<Config>(launch, params, piece, buffers + stage * Config::KEY_COLUMN_BYTES);
    // What came before has had the time of a piece to arrive.
    if (has_note) {
      ptx::cp_async_bulk_wait_group<1>();
      __syncwarp();
      notes.add(note);
    }
    tracer.end();
    has_note = ends;
    note = note_of(piece.unit);
    piece = following;
    ends = following_ends;
    has_piece = has_following;
  }
  ptx::cp_async_bulk_wait_group<0>();
  __syncwarp();
  if (has_note) notes.add(note);
  notes.end();
}

// The producer's warp of a CTA that pushes: tells the peers what has arrived, until all is.
template <class Config, class Params>
__device__ __forceinline__ void signal_keys(const RankLaunch& launch, const Params& params,
                                            KeyPushStorage& smem) {
  const auto& panels = params.panels;
  const auto unit_of = [&](uint64_t note) {
    const int head = static_cast<int>(note >> 32);
    const int run = static_cast<int>(note >> 31 & 1);
    const int panel = static_cast<int>(note & 0x7FFFFFFF);
    return (head * panels.num_runs + run) * panels.run_panels + panel;
  };
  send_signals(
      smem.signals,
      [&](uint64_t note, uint32_t* expected) {
        *expected = 1;
        return &params.comm.state->counts[count_of_unit(params, unit_of(note))];
      },
      [&](uint64_t note) {
        const auto unit =
            panel_unit(panels, params.tiles.slices, params.comm.rank, Config::BLOCK_N, unit_of(note));
        for (int step = first_receiver(params); step < end_of_receivers(params); ++step) {
          const int peer = receiver_at(params, step);
          if (!receiver_needs<Config>(params, unit, peer)) continue;
          const int slot = slot_at_receiver(params, step);
          launch.raise_flag_relaxed(peer, panels.flag(slot, unit.head, unit.run, unit.panel));
        }
      });
}

}  // namespace mk::ring_attention
