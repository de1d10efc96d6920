// SPDX-License-Identifier: MIT
// MoE GEMM + combine: the CTAs that do nothing but push computed rows of other ranks' tokens home, or to who
// collects them for a home in another node, block by block as they are complete, in the order in which they are
// computed and of each home in turn, those in other nodes first.
#pragma once

#include "kernels/device/bulk_push.cuh"
#include "kernels/ops/moe_gemm_combine/cuda_routes.cuh"

namespace mk::moe_gemm_combine {

struct PushPiece {
  int rank;
  uint32_t num_bytes;
  int64_t from;
  int64_t to;
  uint64_t note;
  bool ends_unit;
};

// By a whole warp: waits until this rank has computed a unit's rows. False: the launch is to end.
__device__ __forceinline__ bool wait_products(const RankLaunch& launch, const CudaParams& params,
                                              const PushUnit& unit) {
  const uint32_t lane = threadIdx.x % 32;
  bool is_there = true;
  if (lane < unit.num_blocks) {
    is_there = launch.wait_flag(static_cast<int>(HALF_FLAGS + unit.first_block + lane), DeviceRole::copy,
                                DeviceObject::row_block, params.comm.rank, unit.first_block + lane);
  }
  is_there = __all_sync(~0u, is_there);
  // The bulk copy engine is another proxy than the stores of the products, and than the loads that saw the
  // flag.
  ptx::fence_proxy_async_global();
  __syncwarp();
  return is_there;
}

// A push warp. done(note), of the whole warp, is told of each unit that has arrived.
template <class Storage, class Done>
__device__ __forceinline__ void push_rows(const RankLaunch& launch, const CudaParams& params,
                                          const Tables& tables, Storage& storage, int warp, Done&& done) {
  const int lane = threadIdx.x % 32;
  const moe::CudaRouting& routing = params.routing;
  const moe::Counts counts(routing, launch.area(routing.rank, 0));
  const uint32_t num_turns = moe_gemm_combine::num_turns(routing, tables);
  BulkPush<Storage> push(storage, warp);
  const Tracer tracer(params.comm.trace, trace_track());
  const auto take_ticket = [&] {
    return lane == 0 ? static_cast<uint32_t>(atomicAdd(&launch.progress().push_ticket, 1u)) : 0;
  };
  uint32_t ticket = take_ticket();  // ahead of its use, which then need not wait for it
  PushUnit unit{};
  bool has_last = false;  // a unit that is stored, but may not have arrived
  uint64_t last = 0;
  push.template move<PushPiece>(
      [&](PushPiece* piece) {
        while (unit.num_bytes == 0) {
          const uint32_t index = __shfl_sync(~0u, ticket, 0);
          if (index >= num_turns) return false;
          ticket = take_ticket();
          unit = unit_of(routing, params.layout, params.unit_rows, tables, counts, index);
          if (unit.num_bytes > 0 && !wait_products(launch, params, unit)) return false;
        }
        piece->rank = unit.rank;
        piece->num_bytes = min(unit.num_bytes, static_cast<uint32_t>(Storage::PIECE_BYTES));
        piece->from = unit.from;
        piece->to = unit.to;
        piece->note = unit.note;
        unit.from += piece->num_bytes;
        unit.to += piece->num_bytes;
        unit.num_bytes -= piece->num_bytes;
        piece->ends_unit = unit.num_bytes == 0;
        return true;
      },
      [&](const PushPiece& piece, uint8_t* buffer, uint64_t* loaded) {
        if (lane != 0) return;
        ptx::mbarrier_arrive_expect_tx(loaded, piece.num_bytes);
        ptx::cp_async_bulk_shared_global(buffer, launch.area(params.comm.rank, piece.from), piece.num_bytes,
                                         loaded);
      },
      [&](const PushPiece& piece, const uint8_t* buffer) {
        tracer.begin(TraceKind::copy, static_cast<uint32_t>(piece.note >> 24) & 0xffffff, piece.rank);
        if (lane == 0)
          ptx::cp_async_bulk_global_shared(launch.area(piece.rank, piece.to), buffer, piece.num_bytes);
        ptx::cp_async_bulk_commit_group();
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

// A push CTA's warps; the last one signals.
template <class Storage>
__device__ __forceinline__ void push_products(const RankLaunch& launch, const CudaParams& params,
                                              const Tables& tables, Storage& storage) {
  const int warp = threadIdx.x / 32;
  if (warp < Storage::NUM_WARPS) {
    PushNotes notes(storage.signals, warp);
    push_rows(launch, params, tables, storage.push, warp, [&](uint64_t note) { notes.add(note); });
    notes.end();
    return;
  }
  send_signals(
      storage.signals,
      [&](uint64_t note, uint32_t* expected) {
        *expected = static_cast<uint32_t>(note >> 48) & 0xff;
        return &params.comm.state->counts[note & 0xffffff];
      },
      [&](uint64_t note) {
        launch.raise_flag_relaxed(static_cast<int>(note >> 56),
                                  params.first_flag + static_cast<int>(note >> 24 & 0xffffff));
      });
}

}  // namespace mk::moe_gemm_combine
