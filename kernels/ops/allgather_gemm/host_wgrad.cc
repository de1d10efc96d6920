// SPDX-License-Identifier: MIT
#include "host_wgrad.h"

#include <algorithm>
#include <cstring>

#include "../../host/number_format.h"
#include "../../host/tile_gemm.h"

namespace mk::allgather_gemm {
namespace {

constexpr int kRows = TileGemm::kRows;
constexpr int kColumns = TileGemm::kColumns;
constexpr size_t kTileFloats = size_t{kRows} * kColumns;
// Sums of the tiles under way. A C whose sums fit makes progress in all of its tiles while a source is late, a
// larger one in as many as fit.
constexpr size_t kMaxSumBytes = size_t{64} << 20;
constexpr int kDepth = 128;  // rows converted to fp32 at a time

size_t num_slots(const HostLaunch& launch, int64_t num_tiles) {
  const size_t slot_bytes = static_cast<size_t>(launch.view().nranks) * kTileFloats * sizeof(float);
  const size_t wanted = std::max<size_t>(kMaxSumBytes / slot_bytes, launch.plan.compute_ctas);
  return std::min<size_t>(wanted, static_cast<size_t>(num_tiles));
}

// Rows [0, depth) of dY from `row` on, columns from `first` on, as [kRows][kDepth] floats.
template <float (*Convert)(uint16_t)>
void load_dy(const GemmCall& call, int64_t row, int depth, int64_t first, int count, float* to) {
  const auto* b = static_cast<const uint16_t*>(call.b);
  for (int kk = 0; kk < depth; ++kk) {
    for (int i = 0; i < count; ++i) {
      const int64_t at =
          call.b_layout == MK_LAYOUT_KN ? (row + kk) * call.ldb + first + i : (first + i) * call.ldb + row + kk;
      to[i * kDepth + kk] = Convert(b[at]);
    }
  }
}

template <float (*Convert)(uint16_t)>
void load_x(const HostWgrad::Rows& rows, int depth, int64_t first, int count, float* to) {
  for (int kk = 0; kk < depth; ++kk) {
    const auto* row = reinterpret_cast<const uint16_t*>(rows.data + kk * rows.pitch) + first;
    for (int j = 0; j < count; ++j) to[kk * kColumns + j] = Convert(row[j]);
  }
}

}  // namespace

HostWgrad::HostWgrad(HostLaunch& launch, const Schedule& schedule, RowsAt rows_at, ChunkReady chunk_ready,
                     TargetOf target_of)
    : launch_(launch),
      schedule_(schedule),
      rows_at_(std::move(rows_at)),
      chunk_ready_(std::move(chunk_ready)),
      target_of_(std::move(target_of)),
      num_columns_(ceil_div(launch.gemm().n, launch.plan.tile_n)),
      num_tiles_(ceil_div(launch.gemm().k, launch.plan.tile_m) * num_columns_),
      slots_(num_slots(launch, num_tiles_)) {
  const auto nranks = static_cast<size_t>(launch.view().nranks);
  sums_ = std::make_unique_for_overwrite<float[]>(slots_.size() * nranks * kTileFloats);
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    slots_[slot].chunks.resize(nranks);
    slots_[slot].sums = sums_.get() + slot * nranks * kTileFloats;
  }
}

HostWgrad::Place HostWgrad::place_of(int64_t tile) const {
  const GemmCall& call = launch_.gemm();
  const int64_t row = tile / num_columns_ * launch_.plan.tile_m;
  const int64_t column = tile % num_columns_ * launch_.plan.tile_n;
  return {row, column, static_cast<int>(min_of(launch_.plan.tile_m, call.k - row)),
          static_cast<int>(min_of(launch_.plan.tile_n, call.n - column))};
}

// False: another thread has it, or there is no tile left for it.
bool HostWgrad::take(Slot& slot) {
  std::lock_guard lock(mutex_);
  if (slot.taken) return false;
  if (slot.tile < 0) {
    if (next_tile_ == num_tiles_) return false;
    slot.tile = next_tile_++;
    std::fill(slot.chunks.begin(), slot.chunks.end(), 0);
  }
  slot.taken = true;
  return true;
}

void HostWgrad::give(Slot& slot, bool finished) {
  std::lock_guard lock(mutex_);
  slot.taken = false;
  if (finished) slot.tile = -1;
}

bool HostWgrad::complete(const Slot& slot) const {
  for (int source = 0; source < launch_.view().nranks; ++source) {
    if (slot.chunks[source] < schedule_.chunks(source)) return false;
  }
  return true;
}

// Adds every chunk that is here to its source's sum. False: there was none.
bool HostWgrad::advance(Slot& slot, HostTrack* track) const {
  const Place place = place_of(slot.tile);
  bool worked = false;
  for (int position = 0; position < launch_.view().nranks && !launch_.stopped(); ++position) {
    const int source = schedule_.source_at(position);
    const int chunks = schedule_.chunks(source);
    int& done = slot.chunks[source];
    if (done == chunks) continue;
    float* sums = slot.sums + static_cast<size_t>(source) * kTileFloats;
    if (done == 0) std::memset(sums, 0, kTileFloats * sizeof(float));
    while (done < chunks && chunk_ready_(source, done)) {
      const HostSpan span(track, TraceKind::compute, slot.tile, source);
      add_chunk(place, source, done++, sums);
      worked = true;
    }
    if (done == chunks) launch_.tile_done(source);
  }
  return worked;
}

void HostWgrad::add_chunk(const Place& place, int source, int chunk, float* sums) const {
  const GemmCall& call = launch_.gemm();
  alignas(64) float dy[kRows * kDepth];
  alignas(64) float x[kDepth * kColumns] = {};  // whole rows: a loop of known length is a vector loop
  const int64_t begin = schedule_.chunk_begin(source, chunk);
  const int64_t end = begin + schedule_.chunk_count(source, chunk);
  for (int64_t row = begin; row < end; row += kDepth) {
    const int depth = static_cast<int>(min_of(kDepth, end - row));
    if (call.dtype == MK_DTYPE_FP16) {
      load_dy<fp16_to_float>(call, row, depth, place.row, place.rows, dy);
      load_x<fp16_to_float>(rows_at_(source, row), depth, place.column, place.columns, x);
    } else {
      load_dy<bf16_to_float>(call, row, depth, place.row, place.rows, dy);
      load_x<bf16_to_float>(rows_at_(source, row), depth, place.column, place.columns, x);
    }
    for (int i = 0; i < place.rows; ++i) {
      float* out = sums + i * kColumns;
      for (int kk = 0; kk < depth; ++kk) {
        const float factor = dy[i * kDepth + kk];
        for (int j = 0; j < kColumns; ++j) out[j] += factor * x[kk * kColumns + j];
      }
    }
  }
}

void HostWgrad::store(const Slot& slot) const {
  const GemmCall& call = launch_.gemm();
  const Place place = place_of(slot.tile);
  std::vector<const float*> parts;
  for (int position = 0; position < launch_.view().nranks; ++position) {
    const int source = schedule_.source_at(position);
    if (schedule_.chunks(source) > 0) parts.push_back(slot.sums + static_cast<size_t>(source) * kTileFloats);
  }
  for (int i = 0; i < place.rows; ++i) {
    for (int j = 0; j < place.columns; ++j) {
      float value = 0;  // no rows at all
      for (size_t part = 0; part < parts.size(); ++part) {
        const float sum = parts[part][i * kColumns + j];
        value = part == 0 ? sum : value + sum;
      }
      const int64_t at = (place.row + i) * call.ldc + place.column + j;
      if (call.accumulate) value += load_element(call.c, call.out_dtype, at);
      store_element(call.c, call.out_dtype, at, value);
    }
  }
}

WaitTarget HostWgrad::first_missing(const Slot& slot) const {
  for (int position = 0; position < launch_.view().nranks; ++position) {
    const int source = schedule_.source_at(position);
    if (slot.chunks[source] < schedule_.chunks(source)) return target_of_(source, slot.chunks[source]);
  }
  return {"chunk"};
}

void HostWgrad::run(Waiter& waiter) {
  while (!launch_.stopped()) {
    waiter.look();
    bool worked = false;
    bool left = false;
    WaitTarget missing{"chunk"};
    for (Slot& slot : slots_) {
      while (!launch_.stopped() && take(slot)) {
        if (advance(slot, waiter.track())) worked = true;
        const bool finished = !launch_.stopped() && complete(slot);
        if (finished) {
          const HostSpan span(waiter.track(), TraceKind::store, slot.tile);
          store(slot);
        }
        if (!finished && !left) missing = first_missing(slot);
        left = left || !finished;
        worked = worked || finished;
        give(slot, finished);
        if (!finished) break;
      }
    }
    if (worked) {
      waiter.progressed();
    } else if (!left || !waiter.sleep(missing)) {
      return;
    }
  }
}

}  // namespace mk::allgather_gemm
