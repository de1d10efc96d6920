// SPDX-License-Identifier: MIT
// AllGather+GEMM as one persistent kernel: the copy warps of all CTAs push this rank's rows into the peers'
// receive areas, chunk by chunk, while the tensor cores take the rows at hand first and the others as their
// flags rise.
#pragma once

#include "kernels/device/copy_rows.cuh"
#include "kernels/device/ctas_in_step.cuh"
#include "kernels/device/gemm_partials.cuh"
#include "kernels/device/rank_gemm.cuh"
#include "kernels/device/shared_partials.h"
#include "kernels/ops/allgather_gemm/cuda_params.h"
#include "kernels/ops/allgather_gemm/push_units.h"

namespace mk::allgather_gemm {

using CudaTable = RankGemmTable<CudaParams, NUM_GATHER_TILES>;
const CudaTable& cuda_kernels_bf16();
const CudaTable& cuda_kernels_fp16();

// Whose rows a tile holds. Merged tiles hold several ranks' (source -1).
struct SourceTile {
  int source;
  int begin;  // rows of the gathered matrix
  int end;
  int first_row;  // of the source's
};

// Kernels between nodes have parameters of their own, and other orders of ranks and tiles
// (cuda_network_kernel.cuh).
__device__ __forceinline__ const RankTileOrder& tile_order(const CudaParams& params) { return params.order; }
__device__ __forceinline__ const LateTileSchedule& tile_schedule(const CudaParams& params) {
  return params.late_tiles;
}

__device__ __forceinline__ int source_at(const CudaParams& params, int position) {
  const int source = params.comm.rank + position;
  return source < params.comm.nranks ? source : source - params.comm.nranks;
}

// Rows of a source; without the divisions of the schedule's own, which the walk over tiles has no time for.
__device__ __forceinline__ int rows_of(const CudaParams& params, int source) {
  return max(0, min(params.max_rows, params.m - source * params.max_rows));
}

template <class Params>
__device__ __forceinline__ int rows_at(const Params& params, int position) {
  return params.merged ? params.m : rows_of(params, source_at(params, position));
}

template <int BLOCK_M, class Params>
__device__ __forceinline__ SourceTile source_tile(const Params& params, const TileWork& work) {
  const RankTile tile = tile_order(params).place(work);
  const int first_row = tile.index * BLOCK_M;
  if (params.merged) return {-1, first_row, params.m, first_row};
  const int source = source_at(params, tile.position);
  const int begin = source * params.max_rows;
  return {source, begin + first_row, begin + rows_of(params, source), first_row};
}

// The flag of a chunk's panel.
__device__ __forceinline__ int panel_flag(const CudaParams& params, int source, int chunk, int panel) {
  return params.schedule.flag(source, chunk) * params.num_panels + panel;
}

// Of merged tiles: a panel of all ranks' rows has arrived.
struct PanelBarriers {
  uint64_t here[MAX_PANELS];
};

// By one thread, before a fence.mbarrier_init and a CTA-wide barrier.
__device__ __forceinline__ void panels_init(PanelBarriers& panels) {
  for (uint64_t& here : panels.here) ptx::mbarrier_init(&here, 1);
}

// By a copy warp, for its CTA: sees the flags of all ranks' rows at once, which would take one thread 0.7 to
// 1.4 us each, and tells of panel after panel.
__device__ __forceinline__ void watch_panels(const RankLaunch& launch, const CudaParams& params,
                                             PanelBarriers& panels) {
  const Schedule& schedule = params.schedule;
  const int lane = threadIdx.x % 32;
  const int num_flags = params.comm.nranks * schedule.max_chunks;
  bool goes_on = true;
#pragma unroll 1
  for (int panel = 0; panel < params.num_panels; ++panel) {
#pragma unroll 1
    for (int first = 0; first < num_flags && goes_on; first += 32) {
      const int source = (first + lane) / schedule.max_chunks;
      const int chunk = first + lane - source * schedule.max_chunks;
      const bool waits = source < params.comm.nranks && chunk * schedule.chunk_rows < rows_of(params, source);
      const int flag = waits ? panel_flag(params, source, chunk, panel) : 0;
      goes_on = launch.watch_flags(waits, flag, DeviceRole::compute, DeviceObject::chunk, source, chunk);
    }
    if (lane == 0) ptx::mbarrier_arrive(&panels.here[panel]);
  }
}

// Returns when a panel of a source's rows of a tile has arrived. Flags are acquired one by one: a fence waits
// for all that is on its way, which beside pushes took longer than a ring of stages lasts.
template <int BLOCK_M>
__device__ __forceinline__ void wait_panel(const RankLaunch& launch, const CudaParams& params,
                                           const SourceTile& tile, int panel) {
  const int chunk_rows = static_cast<int>(params.schedule.chunk_rows);
  const int last_row = min(tile.first_row + BLOCK_M, rows_of(params, tile.source)) - 1;
  for (int chunk = tile.first_row / chunk_rows; chunk <= last_row / chunk_rows; ++chunk) {
    launch.wait_flag(panel_flag(params, tile.source, chunk, panel), DeviceRole::compute, DeviceObject::chunk,
                     tile.source, chunk);
  }
}

// Which of the maps of gathered rows are this launch's. Waits for the other ranks' entries, where they may
// write to each other's outputs: asked when their rows are wanted, and not before.
class GatheredMap {
 public:
  __device__ __forceinline__ int get(const RankLaunch& launch) {
    if (map_ < 0) map_ = launch.writes_outputs() ? MAP_OF_OUTPUT : launch.bank();
    return map_;
  }

 private:
  int map_ = -1;
};

// What a producer does before it loads rows of a tile: waits for each panel when it is due; not again for those
// of a row of tiles, or of merged ones at all, of which it has had a whole tile.
template <int BLOCK_M, class Params>
class PanelWaits {
 public:
  __device__ __forceinline__ PanelWaits(const RankLaunch& launch, const Params& params, PanelBarriers& panels)
      : launch_(launch), params_(params), panels_(panels) {}

  // Before the tile's first k-step.
  __device__ __forceinline__ void begin(const SourceTile& tile, const TileWork& work) {
    tile_ = tile;
    const uint32_t bit = work.m_tile < 32 ? 1u << work.m_tile : 0;
    next_step_ = tile.source == params_.comm.rank || (here_ & bit) != 0 ? work.k_end : 0;
    // When this tile has been.
    if (work.k_end - work.k_begin == params_.tiles.num_k_steps) here_ |= params_.merged ? ~0u : bit;
  }
  __device__ __forceinline__ void operator()(int k_step) {
    if (k_step < next_step_) return;
    const int panel = k_step / params_.panel_steps;
    if (params_.merged) {
      mbarrier_wait(&panels_.here[panel], 0);
    } else {
      wait_panel<BLOCK_M>(launch_, params_, tile_, panel);
    }
    // TMA is another proxy than the loads that saw the flags.
    ptx::fence_proxy_async_global();
    next_step_ = (panel + 1) * params_.panel_steps;
  }

 private:
  const RankLaunch& launch_;
  const Params& params_;
  PanelBarriers& panels_;
  SourceTile tile_{};
  int next_step_ = 0;  // the first of a panel not waited for
  uint32_t here_ = 0;  // the first rows of tiles, a bit each: all of the row's panels are there
};

// Those that compute from the beginning.
template <class Config, class Params>
__device__ __forceinline__ CtasInStep ctas_in_step(const Params& params) {
  const int num_ctas = params.tiles.num_workers;
  return {&params.comm.state->num_near, num_ctas,
          Config::IS_LARGE && static_cast<int>(blockIdx.x) < num_ctas ? params.tiles.near_k_steps : 0};
}

// By a producer before it fills its stages, where what is in them waits for rows of all ranks: the copy engine
// does one thing after the other, and this CTA's first rows are not to wait for 5 to 8 us of loads. (Not their
// stores as well: that was no better.)
template <class Storage>
__device__ __forceinline__ void await_pushes(const CudaParams& params, Storage& push) {
  if (static_cast<int>(blockIdx.x) < params.tiles.num_workers) mbarrier_wait(&push.begun, 0);
}

template <class Config>
struct GatherStorage : RankGemmStorage<Config> {
  PanelBarriers panels;
};

// By one thread of the CTA, before a CTA-wide barrier.
template <class Config>
__device__ __forceinline__ void gather_init(GatherStorage<Config>& smem) {
  panels_init(smem.panels);
  storage_init<Config>(smem);
}

template <class Config, class Params>
__device__ __forceinline__ void produce(const RankLaunch& launch, GatherStorage<Config>& smem,
                                        const Params& params) {
  GatheredMap map_gathered;
  ptx::prefetch_tensormap(&params.load.map_a);
  ptx::prefetch_tensormap(&params.load.map_b);
  for (int bank = 0; bank < MAP_OF_OUTPUT; ++bank) ptx::prefetch_tensormap(&params.map_gathered[bank]);
  RankTileCursor tiles(tile_schedule(params), blockIdx.x, tile_order(params));
  StageCursor<Config::NUM_STAGES> stages;
  const CtasInStep in_step = ctas_in_step<Config>(params);
  in_step.begin();
  PanelWaits<Config::BLOCK_M, Params> panels(launch, params, smem.panels);
  TileWork work;
  while (tiles.next(&work, Config::BLOCK_M, [&](int position) { return rows_at(params, position); })) {
    const SourceTile tile = source_tile<Config::BLOCK_M>(params, work);
    const bool is_own = tile.source == params.comm.rank;
    const Tracer tracer(params.comm.trace, TRACE_LOAD);
    tracer.begin(TraceKind::load, trace_tile(work));
    panels.begin(tile, work);
    const auto waits = [&](int k_step) {
      in_step.at_k_step(k_step, work.k_begin, work.k_end);
      panels(k_step);
    };
    if (work.ordinal > 0) in_step.await_others(work.ordinal);
    const int num_rows = tile.end - tile.begin;
    if (work.ordinal == 0 && params.merged) await_pushes(params, smem.push);
    if (work.ordinal == 0 && !is_own) {
      const CUtensorMap* map_a = &params.map_gathered[map_gathered.get(launch)];
      load_first_tile<Config>(smem.mainloop, stages, params.load, {map_a, tile.begin, num_rows}, work, waits);
    } else {
      const CUtensorMap* map_a = is_own ? &params.load.map_a : &params.map_gathered[map_gathered.get(launch)];
      load_tile<Config>(smem.mainloop, stages, params.load,
                        {map_a, is_own ? tile.first_row : tile.begin, num_rows}, work, waits);
    }
    tracer.end();
  }
  in_step.leave();
}

// A unit that has arrived at all peers, as noted.
__device__ __forceinline__ uint64_t note_of(const PushUnit& unit) {
  return static_cast<uint64_t>(unit.chunk) << 32 | static_cast<uint32_t>(unit.panel);
}

// Where units of a chunk's panel are counted, and how many there are.
__device__ __forceinline__ uint32_t* count_of(const CudaParams& params, const PushUnits& units, uint64_t note,
                                              uint32_t* expected) {
  const int chunk = static_cast<int>(note >> 32), panel = static_cast<int>(note);
  *expected = units.expected(chunk, panel);
  return &params.comm.state->counts[chunk * params.num_panels + panel];
}

// Tells the peers that all of a chunk's panel is there.
__device__ __forceinline__ void signal_panel(const RankLaunch& launch, const CudaParams& params,
                                             uint64_t note) {
  const int chunk = static_cast<int>(note >> 32), panel = static_cast<int>(note);
  const int flag = panel_flag(params, params.comm.rank, chunk, panel);
  for (int peer = 0; peer < params.comm.nranks; ++peer) {
    if (peer != params.comm.rank || params.merged) launch.raise_flag_relaxed(peer, flag);
  }
}

// Units are taken one by one; the first ones may have been dealt out, for a ticket takes a microsecond.
struct PushTickets {
  int first;      // the calling warp's
  int num_dealt;  // to all warps; 0: none
};

// A push warp: takes units of this rank's rows one by one and pushes them to all targets at once, so that every
// link carries its share all the time.
// target_at(step) for each step from `first_step` on, below `end_step`: a rank to push to. done(note), of the
// whole warp, is told of each unit that has arrived, while the next one is on its way; but of the first
// `num_prompt` at once.
template <class Storage, class TargetAt, class Done>
__device__ __forceinline__ void push_rows(const RankLaunch& launch, const CudaParams& params,
                                          BulkPush<Storage>& push, const PushTickets& tickets, int first_step,
                                          int end_step, int num_prompt, TargetAt&& target_at, Done&& done) {
  const int rank = params.comm.rank;
  const int lane = threadIdx.x % 32;
  const bool writes_outputs = launch.writes_outputs();
  const auto pitch =
      writes_outputs ? params.a_gathered_pitch : static_cast<int64_t>(params.schedule.row_pitch());
  PushUnits units = params.push_units;
  const Tracer tracer(params.comm.trace, trace_track());
  const auto take_ticket = [&] {
    return lane == 0 ? tickets.num_dealt + static_cast<int>(atomicAdd(&launch.progress().push_ticket, 1u)) : 0;
  };
  // Ahead of its use, which then need not wait for it.
  int ticket = tickets.num_dealt > 0 ? tickets.first : take_ticket();
  bool has_last = false;  // a unit that is stored, but may not have arrived
  uint64_t last = 0;
  push.template move<PushUnit>(
      [&](PushUnit* unit) {
        do {
          const int index = __shfl_sync(~0u, ticket, 0);
          if (index >= units.size()) return false;
          ticket = take_ticket();
          *unit = units.at(index);
        } while (unit->num_rows == 0);
        // Rows are padded to 16 bytes where they land.
        unit->num_bytes = (unit->num_bytes + 15) / 16 * 16;
        return true;
      },
      [&](const PushUnit& unit, uint8_t* buffer, uint64_t* loaded) {
        if (lane == 0) ptx::mbarrier_arrive_expect_tx(loaded, unit.num_rows * unit.num_bytes);
        __syncwarp();
        if (lane < unit.num_rows) {
          ptx::cp_async_bulk_shared_global(buffer + lane * unit.num_bytes,
                                           params.a + (unit.row + lane) * params.a_pitch + unit.column,
                                           unit.num_bytes, loaded);
        }
        __syncwarp();
        push.tell_begun();
      },
      [&](const PushUnit& unit, const uint8_t* buffer) {
        tracer.begin(TraceKind::copy, unit.chunk);
        if (lane < unit.num_rows) {
          const int64_t offset = (int64_t{rank} * params.max_rows + unit.row + lane) * pitch + unit.column;
#pragma unroll 1
          for (int step = first_step; step < end_step; ++step) {
            const int target = target_at(step);
            std::byte* const to =
                writes_outputs ? params.comm.outputs[target] + offset : launch.area(target, offset);
            ptx::cp_async_bulk_global_shared(to, buffer + lane * unit.num_bytes, unit.num_bytes);
          }
        }
        ptx::cp_async_bulk_commit_group();
        if (has_last) {
          push.template complete<1>();
          done(last);
        }
        has_last = num_prompt-- <= 0;
        last = note_of(unit);
        if (!has_last) {
          push.template complete<0>();
          done(last);
        }
        tracer.end();
      });
  push.tell_begun();
  if (has_last) {
    push.template complete<0>();
    done(last);
  }
}

// The same to all ranks of a job of one node; where tiles are merged with others', to this one, too.
template <class Storage, class Done>
__device__ __forceinline__ void push_rows(const RankLaunch& launch, const CudaParams& params, Storage& storage,
                                          int warp, const PushTickets& tickets, int num_prompt, Done&& done) {
  const int rank = params.comm.rank;
  const int nranks = params.comm.nranks;
  BulkPush<Storage> push(storage, warp);
  push_rows(
      launch, params, push, tickets, params.merged ? 0 : 1, nranks, num_prompt,
      [&](int step) { return rank >= step ? rank - step : rank - step + nranks; }, done);
}

// Which copy warp of a CTA watches panels: the one that never pushes. That of CTA 0 meets the other ranks
// first, which takes longer than few rows are on their way; then it is the one before it.
__device__ __forceinline__ int watching_warp(const CudaParams& params, int cta) {
  return cta == 0 && params.num_panels == 1 ? NUM_PUSH_WARPS - 1 : NUM_PUSH_WARPS;
}

// The push warps beside a product, which signal themselves. All CTAs' first units are the first panels, for
// which peers have tiles waiting; CTA 0, whose fences also wait for what it tells the host, has its last.
template <class Storage>
__device__ __forceinline__ void push_beside_product(const RankLaunch& launch, const CudaParams& params,
                                                    Storage& storage, int warp, int num_warps,
                                                    bool watches_panels) {
  const PushUnits& units = params.push_units;
  const int num_ctas = static_cast<int>(gridDim.x);
  const int cta = blockIdx.x == 0 ? num_ctas - 1 : static_cast<int>(blockIdx.x) - 1;
  const bool one_watches = watches_panels && watching_warp(params, 0) < num_warps;
  const PushTickets tickets = {warp * num_ctas + cta, num_warps * num_ctas - (one_watches ? 1 : 0)};
  push_rows(launch, params, storage, warp, tickets, 1, [&](uint64_t note) {
    if (threadIdx.x % 32 == 0) {
      uint32_t expected = 0;
      uint32_t* count = count_of(params, units, note, &expected);
      // What others have pushed the last one's fence acquires: an acquire with every unit would empty the SM's
      // L1 cache.
      if (ptx::atom_release_gpu_add(count, 1) + 1 == expected) {
        ptx::st_relaxed_gpu(count, 0);
        ptx::fence_acq_rel_sys();
        signal_panel(launch, params, note);
      }
    }
    __syncwarp();
  });
}

// A CTA that pushes, before it computes or for good: all its warps but the last, which signals.
template <class Config>
__device__ __forceinline__ void run_push_cta(const RankLaunch& launch, const CudaParams& params,
                                             uint8_t* smem_bytes) {
  using Storage = PushCtaStorage<Config::NUM_THREADS>;
  static_assert(sizeof(Storage) <= sizeof(RankGemmStorage<Config>));
  Storage& storage = *reinterpret_cast<Storage*>(smem_bytes);
  push_cta_init(storage);
  const int warp = threadIdx.x / 32;
  if (warp < Storage::NUM_WARPS) {
    PushNotes notes(storage.signals, warp);
    const int num_ctas = static_cast<int>(gridDim.x) - params.tiles.num_workers;
    const PushTickets tickets = {warp * num_ctas + static_cast<int>(blockIdx.x) - params.tiles.num_workers,
                                 Storage::NUM_WARPS * num_ctas};
    push_rows(launch, params, storage.push, warp, tickets, 0, [&](uint64_t note) { notes.add(note); });
    notes.end();
  } else {
    const PushUnits& units = params.push_units;
    send_signals(
        storage.signals,
        [&](uint64_t note, uint32_t* expected) { return count_of(params, units, note, expected); },
        [&](uint64_t note) { signal_panel(launch, params, note); });
  }
}

// Brings all rows to the caller's gathered A, or waits until their owners have.
template <class Params>
__device__ __forceinline__ void gather_rows(const RankLaunch& launch, const Params& params,
                                            PanelBarriers* panels, const CopyWarp& warp) {
  const Schedule& schedule = params.schedule;
  const bool writes_outputs = launch.writes_outputs();
  const int pieces_per_chunk = static_cast<int>(ceil_div(schedule.chunk_rows, params.piece_rows));
  const int64_t pieces_per_source = int64_t{schedule.max_chunks} * pieces_per_chunk;
#pragma unroll 1
  for (int64_t idx = warp.index(); idx < pieces_per_source * params.comm.nranks;
       idx += NUM_COPY_WARPS * warp.num_ctas) {
    const int position = static_cast<int>(idx / pieces_per_source);
    const int source = source_at(params, position);
    const int64_t piece_idx = idx - position * pieces_per_source;
    const int chunk = static_cast<int>(piece_idx / pieces_per_chunk);
    const int64_t first_row = (piece_idx - int64_t{chunk} * pieces_per_chunk) * params.piece_rows;
    const int64_t row = chunk * schedule.chunk_rows + first_row;  // of the source's
    if (chunk >= schedule.chunks(source) || first_row >= schedule.chunk_count(source, chunk)) continue;
    const int64_t pitch = static_cast<int64_t>(schedule.row_pitch());
    const std::byte* from = params.a + row * params.a_pitch;
    const bool is_pushed = source != params.comm.rank || (writes_outputs && params.merged);
    if (is_pushed) {
      for (int panel = 0; panel < params.num_panels; ++panel) {
        if (panels != nullptr && params.merged) {
          mbarrier_wait(&panels->here[panel], 0);
          continue;
        }
        launch.wait_flag(panel_flag(params, source, chunk, panel), DeviceRole::gather, DeviceObject::chunk,
                         source, chunk);
      }
      if (writes_outputs) continue;
      from = launch.area(params.comm.rank, schedule.area_offset(source, chunk) + first_row * pitch);
    }
    const Tracer tracer(params.comm.trace, TRACE_COPY + warp.warp);
    tracer.begin(TraceKind::copy, chunk, source);
    copy_rows({params.a_gathered + (schedule.chunk_begin(source, chunk) + first_row) * params.a_gathered_pitch,
               from, params.a_gathered_pitch, source == params.comm.rank ? params.a_pitch : pitch,
               min_of(params.piece_rows, schedule.chunk_count(source, chunk) - first_row),
               static_cast<int64_t>(schedule.row_bytes())});
    tracer.end();
  }
}

template <class Config>
__device__ __forceinline__ PartialsLayout partials_layout() {
  return {PartialsLayout::MAX_CTAS, Config::BLOCK_M, Config::BLOCK_N};
}

// What becomes of a piece's accumulators: a partial tile for its owner, or, with the other pieces' partial
// tiles, rows of C, of which the tile has those from `begin` on, as far as they lie before `end`.
template <class Config>
__device__ __forceinline__ void finish_rows(const CudaParams& params, RankGemmStorage<Config>& smem,
                                            const TileWork& work, int begin, int end, int block,
                                            float (&accumulators)[Config::BLOCK_N / 2]) {
  const int warp = threadIdx.x / 32;
  const int row = begin + block * 64 + warp % 4 * 16;
  const PartialsLayout partials = partials_layout<Config>();
  if (!work.is_owner) {
    partials_store(accumulators, partials, params.comm.partials, blockIdx.x, block, row < end);
    return;
  }
  if (work.num_peers > 0) {
    partials_add(
        accumulators, partials, params.comm.partials, [&](int peer) { return work.first_peer + peer; },
        work.num_peers, block, row < end);
  }
  store_tile_rows(accumulators, params.epilogue, smem.epilogue[warp], row, end, work.n_tile * Config::BLOCK_N);
}

// The same, or, of tiles that two CTAs share, which are large, what becomes of a half: each first gives the
// other what that one finishes.
template <class Config>
class FinishTile {
  using Accumulators = float (&)[Config::BLOCK_N / 2];

 public:
  __device__ FinishTile(const CudaParams& params, RankGemmStorage<Config>& smem)
      : params_(params), smem_(smem) {}

  __device__ __forceinline__ void give(const TileWork& work, int block, Accumulators accumulators) const {
    if constexpr (Config::IS_LARGE) {
      if (!params_.late_tiles.shares_tiles) return;
      const auto shared = shared_of(work);
      if (shared.finishes(blockIdx.x, block)) return;
      const SourceTile tile = source_tile<Config::BLOCK_M>(params_, work);
      partials_store(accumulators, shared, params_.comm.partials, blockIdx.x, block,
                     row_of(tile, block) < tile.end);
    }
  }

  __device__ __forceinline__ void operator()(const TileWork& work, int block, Accumulators accumulators) const {
    const SourceTile tile = source_tile<Config::BLOCK_M>(params_, work);
    if constexpr (Config::IS_LARGE) {
      if (params_.late_tiles.shares_tiles) {
        finish_shared(shared_of(work), work, tile, block, accumulators);
        return;
      }
    }
    finish_rows<Config>(params_, smem_, work, tile.begin, tile.end, block, accumulators);
  }

 private:
  __device__ __forceinline__ auto shared_of(const TileWork& work) const {
    return SharedPartials<Config::BLOCK_M, Config::BLOCK_N>{params_.late_tiles.num_workers / 2, work.ordinal};
  }
  __device__ __forceinline__ static int row_of(const SourceTile& tile, int block) {
    return tile.begin + block * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  }

  template <class Shared>
  __device__ __forceinline__ void finish_shared(const Shared& shared, const TileWork& work,
                                                const SourceTile& tile, int block,
                                                Accumulators accumulators) const {
    if (!shared.finishes(blockIdx.x, block)) return;
    const int row = row_of(tile, block);
    partials_add(
        accumulators, shared, params_.comm.partials, [&](int) { return shared.partner(blockIdx.x); }, 1, block,
        row < tile.end);
    store_tile_rows(accumulators, params_.epilogue, smem_.epilogue[threadIdx.x / 32], row, tile.end,
                    work.n_tile * Config::BLOCK_N);
  }

  const CudaParams& params_;
  RankGemmStorage<Config>& smem_;
};

struct WatchesNothing {
  __device__ void operator()() const {}
};

// What a copy warp of a CTA that computes does. `panels`: null where no tiles are merged. watch(): what the
// warp that never pushes sees, before anything else, for the CTA's producer.
template <class Storage, class Watch = WatchesNothing>
__device__ __forceinline__ void run_copy_warp(const RankLaunch& launch, const CudaParams& params, Storage& push,
                                              PanelBarriers* panels, const CopyWarp& warp, Watch&& watch = {}) {
  if (warp.greets()) launch.greet();
  if (!warp.pushes()) watch();
  const bool watches_panels = panels != nullptr && params.merged;
  const bool watches = watches_panels && params.schedule.k > 0 &&
                       warp.warp == watching_warp(params, static_cast<int>(blockIdx.x));
  if (warp.pushes() && watches) push_nothing(push);
  if (watches) watch_panels(launch, params, *panels);
  // A CTA that has pushed before it computes.
  if (static_cast<int>(blockIdx.x) >= warp.num_ctas) return;
  const int num_warps = params.num_push_warps;
  if (warp.warp < num_warps && !watches && params.schedule.k > 0 &&
      static_cast<int>(gridDim.x) == params.tiles.num_workers) {
    push_beside_product(launch, params, push, warp.warp, num_warps, watches_panels);
  } else if (warp.pushes() && !watches) {
    push_nothing(push);
  }
  if (params.a_gathered != nullptr) gather_rows(launch, params, panels, warp);
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    allgather_gemm_kernel(const __grid_constant__ CudaParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  GatherStorage<Config>& smem = *reinterpret_cast<GatherStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  launch.begin_cta();
  const int num_early = params.tiles.num_workers;
  if (static_cast<int>(blockIdx.x) >= num_early) {
    if (params.schedule.k > 0) run_push_cta<Config>(launch, params, smem_bytes);
    if (params.late_tiles.num_workers == num_early) {
      launch.end_cta();
      return;
    }
    push_cta_end(*reinterpret_cast<PushCtaStorage<Config::NUM_THREADS>*>(smem_bytes));
  }
  if (threadIdx.x == 0) gather_init(smem);
  __syncthreads();
  run_roles<Config>(
      num_early, [&] { produce<Config>(launch, smem, params); },
      [&](const CopyWarp& warp) { run_copy_warp(launch, params, smem.push, &smem.panels, warp); },
      [&](int warpgroup) __attribute__((always_inline)) {
        RankTileCursor tiles(tile_schedule(params), blockIdx.x, tile_order(params));
        bool rehearses = CAN_REHEARSE<Config> && params.comm.trace == nullptr;
        consumer_role<Config, TileWork, Config::IS_LARGE ? TilesAre::alike : TilesAre::settled>(
            smem.mainloop, warpgroup, params.comm.trace,
            [&](TileWork* work) {
              if constexpr (CAN_REHEARSE<Config>) {
                if (rehearses) {
                  rehearses = false;
                  *work = work_of_no_columns(params.late_tiles);
                  return true;
                }
              }
              return tiles.next(work, Config::BLOCK_M, [&](int position) { return rows_at(params, position); });
            },
            FinishTile<Config>(params, smem));
      });
  launch.end_cta();
}

template <GemmTile TILE, class Element, bool B_TRANSPOSED>
constexpr RankGemmKernel<CudaParams> cuda_kernel_entry() {
  using Config = RankGemmConfig<TILE, Element, B_TRANSPOSED>;
  static_assert(sizeof(GatherStorage<Config>) <= 227 * 1024);
  return {allgather_gemm_kernel<Config>, Config::NUM_THREADS, sizeof(GatherStorage<Config>)};
}

template <class Element>
const CudaTable& cuda_kernel_table() {
  static const CudaTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return CudaTable{{{cuda_kernel_entry<GATHER_TILES[TILES], Element, false>(),
                       cuda_kernel_entry<GATHER_TILES[TILES], Element, true>()}...}};
  }
  (std::make_index_sequence<NUM_GATHER_TILES>());
  return table;
}

}  // namespace mk::allgather_gemm
