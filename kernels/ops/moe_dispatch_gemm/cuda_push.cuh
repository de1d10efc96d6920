// SPDX-License-Identifier: MIT
// MoE dispatch + GEMM: the CTAs that do nothing but push this rank's rows to the ranks of their experts, where
// each lands at its place among the expert's rows. All ranks push in the order in which rows are computed:
// expert by expert, to each rank in turn.
#pragma once

#include "kernels/device/bulk_push.cuh"
#include "kernels/ops/moe_dispatch_gemm/cuda_routes.cuh"

namespace mk::moe_dispatch_gemm {

struct PushPiece {
  int rank;
  uint32_t row;
  int num_rows;
  int column;  // in bytes
  int num_bytes;
  uint32_t item;  // a lane's
  uint64_t note;
  bool ends_unit;
};

// What travels beside row `row` of a rank; a lane's.
__device__ __forceinline__ void write_origin(const RankLaunch& launch, const CudaParams& params, int rank,
                                             uint32_t row, uint32_t item) {
  const uint32_t topk = params.routing.topk;
  const RowOrigin origin{static_cast<int32_t>(item / topk), static_cast<int16_t>(params.comm.rank),
                         static_cast<int16_t>(item % topk),
                         params.row_scale != nullptr ? params.row_scale[item] : 1.0f, 0};
  *reinterpret_cast<int4*>(launch.area(rank, params.layout.origin(row))) =
      *reinterpret_cast<const int4*>(&origin);
}

// A push warp, which has the turns that take_turn() gives its first lane. done(note), of the whole warp, is
// told of each unit that has arrived.
template <class Storage, class TakeTurn, class Done>
__device__ __forceinline__ void push_rows(const RankLaunch& launch, const CudaParams& params,
                                          const Tables& tables, const moe::Turns& turns, Storage& storage,
                                          int warp, TakeTurn&& take_turn, Done&& done) {
  const int lane = threadIdx.x % 32;
  const int row_bytes = static_cast<int>(params.layout.row_bytes);
  const uint32_t last_item = static_cast<uint32_t>(params.routing.num_items() - 1);
  const auto* order = reinterpret_cast<const uint32_t*>(launch.area(params.comm.rank, params.layout.order()));
  BulkPush<Storage> push(storage, warp);
  const Tracer tracer(params.comm.trace, trace_track());
  uint32_t turn = take_turn();  // ahead of its use, which then need not wait for it
  PushUnit unit{};
  int column = 0;
  bool has_last = false;  // a unit that is stored, but may not have arrived
  uint64_t last = 0;
  push.template move<PushPiece>(
      [&](PushPiece* piece) {
        if (unit.num_rows == 0) {
          int rank = 0;
          uint32_t index = 0;
          if (!turns.at(__shfl_sync(~0u, turn, 0), &rank, &index)) return false;
          turn = take_turn();
          unit = unit_of(params.routing, params.unit_rows, tables, rank, index);
        }
        piece->rank = unit.rank;
        piece->row = unit.row;
        piece->num_rows = static_cast<int>(min(unit.num_rows, static_cast<uint32_t>(params.piece_rows)));
        piece->column = column;
        piece->num_bytes = min(params.piece_bytes, row_bytes - column);
        piece->item = lane < piece->num_rows ? min(__ldcg(order + unit.position + lane), last_item) : 0;
        piece->note = unit.note;
        column += params.piece_bytes;
        if (column >= row_bytes) {
          column = 0;
          unit.row += piece->num_rows;
          unit.position += piece->num_rows;
          unit.num_rows -= piece->num_rows;
        }
        piece->ends_unit = unit.num_rows == 0;
        return true;
      },
      [&](const PushPiece& piece, uint8_t* buffer, uint64_t* loaded) {
        if (lane == 0) ptx::mbarrier_arrive_expect_tx(loaded, piece.num_rows * piece.num_bytes);
        __syncwarp();
        if (lane >= piece.num_rows) return;
        const int64_t token = piece.item / static_cast<uint32_t>(params.routing.topk);
        ptx::cp_async_bulk_shared_global(buffer + lane * piece.num_bytes,
                                         params.x + token * params.x_pitch + piece.column, piece.num_bytes,
                                         loaded);
      },
      [&](const PushPiece& piece, const uint8_t* buffer) {
        tracer.begin(TraceKind::copy, static_cast<uint32_t>(piece.note), piece.rank);
        if (lane == 0) {
          ptx::cp_async_bulk_global_shared(launch.area(piece.rank, params.layout.row(piece.row) + piece.column),
                                           buffer, piece.num_rows * piece.num_bytes);
        }
        ptx::cp_async_bulk_commit_group();
        if (piece.column == 0 && lane < piece.num_rows)
          write_origin(launch, params, piece.rank, piece.row + lane, piece.item);
        // It has time to arrive while the next one is on its way.
        if (has_last) {
          push.template complete<1>();
          done(last);
        }
        has_last = piece.ends_unit;
        last = piece.note;
        tracer.end();
      });
  if (has_last) {
    push.template complete<0>();
    done(last);
  }
}

// All threads of a CTA, each warp but the last with the turns of take_turn(warp).
template <class Config, class Storage, class TakeTurn>
__device__ __forceinline__ void push_turns(const RankLaunch& launch, const CudaParams& params, Storage& smem,
                                           TakeTurn&& take_turn) {
  auto& storage = smem.push();
  constexpr int NUM_WARPS = PushCtaStorage<Config::NUM_THREADS>::NUM_WARPS;
  if (threadIdx.x == 0) {
    fill_turns(params.routing, smem.tables, smem.turns);
    moe::wait_routed(launch);
  }
  push_cta_init(storage);
  const int warp = threadIdx.x / 32;
  if (warp < NUM_WARPS) {
    PushNotes notes(storage.signals, warp);
    push_rows(
        launch, params, smem.tables, smem.turns, storage.push, warp, [&] { return take_turn(warp); },
        [&](uint64_t note) { notes.add(note); });
    notes.end();
    return;
  }
  const auto rank_of = [](uint64_t note) { return static_cast<int>(note >> 48); };
  const auto block_of = [](uint64_t note) { return static_cast<uint32_t>(note); };
  send_signals(
      storage.signals,
      [&](uint64_t note, uint32_t* expected) {
        *expected = static_cast<uint32_t>(note >> 32) & 0xffff;
        return &params.comm.state->counts[rank_of(note) * params.blocks_per_source + block_of(note)];
      },
      [&](uint64_t note) {
        const int block = static_cast<int>(block_of(note));
        launch.raise_flag_relaxed(rank_of(note),
                                  params.first_flag + params.comm.rank * params.blocks_per_source + block);
      });
}

// Where rows are many, CTAs that compute have no rows to begin with: each of their warps pushes a unit first,
// and together about what their first tiles want. These turns come first.
template <class Config>
__device__ __forceinline__ uint32_t num_first_turns(const CudaParams& params) {
  constexpr int NUM_WARPS = PushCtaStorage<Config::NUM_THREADS>::NUM_WARPS;
  return Config::NUM_CONSUMER_WARPGROUPS == 2 ? params.num_compute_ctas * NUM_WARPS : 0;
}

// By a CTA that will compute. Not inlined: the compiler would take warps that have pushed for parted
// (gemm_roles.cuh).
template <class Config, class Storage>
__device__ __noinline__ void push_first_turn(const CudaParams& params, Storage& smem) {
  if constexpr (Config::NUM_CONSUMER_WARPGROUPS == 2) {
    bool has_pushed = false;
    push_turns<Config>(RankLaunch(params.comm), params, smem, [&](int warp) {
      if (has_pushed) return UINT32_MAX;
      has_pushed = true;
      return static_cast<uint32_t>(warp * params.num_compute_ctas + blockIdx.x);
    });
    push_cta_end(smem.push());
  }
}

// By a CTA that pushes until nothing is left, and may have another role then.
template <class Config, class Storage>
__device__ __noinline__ void run_push_cta(const CudaParams& params, Storage& smem) {
  const RankLaunch launch(params.comm);
  push_turns<Config>(launch, params, smem, [&](int) {
    return threadIdx.x % 32 != 0
               ? 0
               : num_first_turns<Config>(params) + atomicAdd(&launch.progress().push_ticket, 1u);
  });
  push_cta_end(smem.push());
}

}  // namespace mk::moe_dispatch_gemm
