// SPDX-License-Identifier: MIT
// How the roles of a launch record what they do. Without a trace all that is left of it is a comparison of a
// kernel parameter with null a span; nothing is kept in registers between a span's ends.
#pragma once

#include "kernels/device/trace_buffer.h"
#include "kernels/ptx/warp.cuh"

namespace mk {

// By thread 0 of every CTA, before the barrier after which its roles begin.
__device__ __forceinline__ void trace_enter(const TraceBuffer* trace, uint64_t epoch, uint32_t op,
                                            const int64_t (&shape)[4]) {
  if (trace == nullptr || trace->enabled == 0 || blockIdx.x >= trace->layout.num_ctas) return;
  const TraceLayout layout = trace->layout;
  const int cta = blockIdx.x;
  uint32_t* count = reinterpret_cast<uint32_t*>(trace->base + layout.num_visits(cta));
  const uint32_t number = (*count)++;
  if (number >= layout.max_spans) return;
  if (cta == 0) {
    *reinterpret_cast<DeviceLaunch*>(trace->base + layout.launch(number)) = {
        epoch, op, {shape[0], shape[1], shape[2], shape[3]}};
  }
  DeviceVisit& visit = *reinterpret_cast<DeviceVisit*>(trace->base + layout.visit(cta, number));
  visit.epoch = epoch;
  visit.begin_ns = ptx::globaltimer();
  visit.begin_clock = clock64();
}

// By thread 0, after the barrier that the CTA's roles end with.
__device__ __forceinline__ void trace_leave(const TraceBuffer* trace) {
  if (trace == nullptr || trace->enabled == 0 || blockIdx.x >= trace->layout.num_ctas) return;
  const TraceLayout layout = trace->layout;
  const int cta = blockIdx.x;
  const uint32_t number = *reinterpret_cast<uint32_t*>(trace->base + layout.num_visits(cta)) - 1;
  if (number >= layout.max_spans) return;
  DeviceVisit& visit = *reinterpret_cast<DeviceVisit*>(trace->base + layout.visit(cta, number));
  visit.end_ns = ptx::globaltimer();
  visit.end_clock = clock64();
}

// A role's hand on its row, made where it is needed from the kernel's parameter. All threads of the role may
// call; the first of the warp, or of the warpgroup, writes.
class Tracer {
 public:
  // `track`: TRACE_LOAD, TRACE_COPY + warp, TRACE_COMPUTE + warpgroup.
  __device__ __forceinline__ Tracer(const TraceBuffer* trace, int track) : trace_(trace), track_(track) {}

  // A span begins. One may begin inside another, and ends by record().
  __device__ __forceinline__ void begin(TraceKind kind, uint32_t index = TRACE_NO_INDEX, int peer = -1) const {
    if (is_on()) write(kind, index, peer, clock64(), 0);
  }
  // The span that began last ends.
  __device__ __forceinline__ void end() const {
    if (!is_on()) return;
    const uint32_t number = state()->open;
    if (number < trace_->layout.max_spans) span(number)->end = clock64();
  }
  // The span that began last is none, if none was recorded since.
  __device__ __forceinline__ void cancel() const {
    if (is_on() && state()->open + 1 == state()->num_spans) state()->num_spans = state()->open;
  }

  // For spans inside others: the time now, 0 without a trace; and the span that began then and ends here.
  __device__ __forceinline__ uint64_t now() const { return is_on() ? clock64() : 0; }
  __device__ __forceinline__ void record(TraceKind kind, uint64_t start, uint32_t index = TRACE_NO_INDEX,
                                         int peer = -1) const {
    if (!is_on()) return;
    const uint32_t open = state()->open;
    write(kind, index, peer, start, clock64());
    state()->open = open;
  }

 private:
  __device__ __forceinline__ bool is_on() const {
    if (trace_ == nullptr) return false;
    const unsigned num_threads = track_ >= TRACE_COMPUTE ? 128 : 32;
    return threadIdx.x % num_threads == 0 && trace_->enabled != 0 && blockIdx.x < trace_->layout.num_ctas;
  }
  __device__ __forceinline__ DeviceTrack* state() const {
    return reinterpret_cast<DeviceTrack*>(trace_->base + trace_->layout.track(blockIdx.x, track_));
  }
  __device__ __forceinline__ DeviceSpan* span(uint32_t number) const {
    return reinterpret_cast<DeviceSpan*>(trace_->base + trace_->layout.span(blockIdx.x, track_, number));
  }
  __device__ __forceinline__ void write(TraceKind kind, uint32_t index, int peer, uint64_t start,
                                        uint64_t end) const {
    DeviceTrack* track = state();
    const uint32_t number = track->num_spans;
    track->num_spans = number + 1;
    track->open = number;
    if (number >= trace_->layout.max_spans) return;
    const uint32_t visits = *reinterpret_cast<uint32_t*>(trace_->base + trace_->layout.num_visits(blockIdx.x));
    *span(number) = {start, end, visits - 1, index, peer, static_cast<uint32_t>(kind)};
  }

  const TraceBuffer* const trace_;
  const int track_;
};

}  // namespace mk
