// SPDX-License-Identifier: MIT
// How the roles of a launch record what they do. Without a trace all that is left of it is a comparison of a
// kernel parameter with null a span; nothing is kept in registers between a span's ends.
#pragma once

#include "kernels/device/trace_buffer.h"
#include "kernels/ptx/warp.cuh"

namespace mk {

template <class T>
__device__ __forceinline__ T& trace_at(TraceBuffer* trace, size_t offset) {
  return *reinterpret_cast<T*>(reinterpret_cast<std::byte*>(trace) + offset);
}

// By thread 0 of every CTA, before the barrier after which its roles begin.
__device__ __forceinline__ void trace_enter(TraceBuffer* trace, uint64_t epoch, uint32_t op,
                                            const int64_t (&shape)[4]) {
  if (trace == nullptr) return;
  const TraceLayout layout = trace->layout;
  const int cta = blockIdx.x;
  const auto number = static_cast<uint32_t>(trace_at<uint64_t>(trace, layout.num_visits(cta))++);
  for (int track = 0; track < NUM_TRACE_TRACKS; ++track) {
    trace_at<DeviceTrack>(trace, layout.track(cta, track)).visit = number;
  }
  if (number >= layout.max_spans) return;
  if (cta == 0) {
    trace_at<DeviceLaunch>(trace, layout.launch(number)) = {
        epoch, op, {shape[0], shape[1], shape[2], shape[3]}};
  }
  trace_at<DeviceVisit>(trace, layout.visit(cta, number)) = {epoch, static_cast<uint64_t>(clock64()),
                                                             ptx::globaltimer(), 0, 0};
}

// By thread 0, after the barrier that the CTA's roles end with.
__device__ __forceinline__ void trace_leave(TraceBuffer* trace) {
  if (trace == nullptr) return;
  const TraceLayout layout = trace->layout;
  const int cta = blockIdx.x;
  const auto number = static_cast<uint32_t>(trace_at<uint64_t>(trace, layout.num_visits(cta)) - 1);
  if (number >= layout.max_spans) return;
  DeviceVisit& visit = trace_at<DeviceVisit>(trace, layout.visit(cta, number));
  visit.end_clock = clock64();
  visit.end_ns = ptx::globaltimer();
}

// The row of the calling warp in a CTA whose consumer warpgroups come first and whose producer's warpgroup is
// the last.
__device__ __forceinline__ int trace_track() {
  static_assert(TRACE_LOAD == 0 && TRACE_COPY == 1);
  const int warpgroup = threadIdx.x / 128;
  return warpgroup == static_cast<int>(blockDim.x) / 128 - 1 ? threadIdx.x % 128 / 32
                                                             : TRACE_COMPUTE + warpgroup;
}

// A tile's number in a trace: legible as it is.
template <class Work>
__device__ __forceinline__ uint32_t trace_tile(const Work& work) {
  return static_cast<uint32_t>(work.m_tile) * 1000 + static_cast<uint32_t>(work.n_tile);
}

// A role's hand on its row, made where it is needed from the kernel's parameter. All threads of the role may
// call; the first of the warp, or of the warpgroup, writes.
class Tracer {
 public:
  // `track`: TRACE_LOAD, TRACE_COPY + warp, TRACE_COMPUTE + warpgroup.
  __device__ __forceinline__ Tracer(TraceBuffer* trace, int track) : trace_(trace), track_(track) {}

  // A span begins. One may begin inside another, and ends by record().
  __device__ __forceinline__ void begin(TraceKind kind, uint32_t index = TRACE_NO_INDEX, int peer = -1) const {
    if (is_on()) add(kind, index, peer, clock64(), 0);
  }
  // The span that began last ends.
  __device__ __forceinline__ void end() const {
    if (is_on()) state().open->end = clock64();
  }
  // The span that began last is none; none was recorded since.
  __device__ __forceinline__ void cancel() const {
    if (!is_on()) return;
    DeviceTrack& track = state();
    if (track.open == track.next) {
      --track.dropped;
    } else {
      track.next = track.open;
      ++track.room;
    }
  }

  // For spans inside others: the time now, 0 without a trace; and the span that began then and ends here.
  __device__ __forceinline__ uint64_t now() const { return is_on() ? clock64() : 0; }
  __device__ __forceinline__ void record(TraceKind kind, uint64_t start, uint32_t index = TRACE_NO_INDEX,
                                         int peer = -1) const {
    if (!is_on()) return;
    DeviceSpan* const open = state().open;
    add(kind, index, peer, start, clock64());
    state().open = open;
  }

 private:
  __device__ __forceinline__ bool is_on() const {
    if (trace_ == nullptr) return false;
    const unsigned num_threads = track_ >= TRACE_COMPUTE ? 128 : 32;
    return threadIdx.x % num_threads == 0;
  }
  __device__ __forceinline__ DeviceTrack& state() const {
    return trace_at<DeviceTrack>(trace_, TraceLayout::track(blockIdx.x, track_));
  }
  __device__ __forceinline__ void add(TraceKind kind, uint32_t index, int peer, uint64_t start,
                                      uint64_t end) const {
    DeviceTrack& track = state();
    DeviceSpan* const span = track.next;
    *span = {start, end, track.visit, index, peer, static_cast<uint32_t>(kind)};
    track.open = span;
    if (track.room > 0) {
      --track.room;
      track.next = span + 1;
    } else {
      ++track.dropped;
    }
  }

  TraceBuffer* const trace_;
  const int track_;
};

}  // namespace mk
