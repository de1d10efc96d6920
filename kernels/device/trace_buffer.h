// SPDX-License-Identifier: MIT
// What the CTAs of traced launches write, in device memory; the host reads it when the trace ends. Plain
// structs, the same on both sides.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/host_device.h"
#include "kernels/trace_kind.h"

namespace mk {

// A CTA's rows: its TMA producer, its copy warps, its consumer warpgroups; device_trace.cc has their names.
// Each is written by one thread.
constexpr int TRACE_LOAD = 0;
constexpr int TRACE_COPY = 1;
constexpr int NUM_TRACE_COPY_TRACKS = 3;
constexpr int TRACE_COMPUTE = TRACE_COPY + NUM_TRACE_COPY_TRACKS;
constexpr int NUM_TRACE_COMPUTE_TRACKS = 4;
constexpr int NUM_TRACE_TRACKS = TRACE_COMPUTE + NUM_TRACE_COMPUTE_TRACKS;

constexpr uint32_t TRACE_NO_INDEX = ~0u;

// Times are clock64 of the CTA's SM.
struct alignas(16) DeviceSpan {
  uint64_t start;
  uint64_t end;    // 0: did not end
  uint32_t visit;  // during which of the CTA's visits
  uint32_t index;  // chunk or tile
  int32_t peer;    // -1: none
  uint32_t kind;   // TraceKind
};
static_assert(sizeof(DeviceSpan) == 32);

// A row: where its next span goes. Behind its last one lies another, which takes those without room.
struct alignas(16) DeviceTrack {
  DeviceSpan* next;
  DeviceSpan* open;  // that began last
  uint32_t room;
  uint32_t dropped;
  uint32_t visit;
  uint32_t reserved;
};

// A CTA's part in a launch. The SM's clock and the device's, read together at both ends, give the map from one
// to the other: the device's may be as coarse as a microsecond.
struct DeviceVisit {
  uint64_t epoch;
  uint64_t begin_clock;
  uint64_t begin_ns;
  uint64_t end_clock;  // 0: did not end
  uint64_t end_ns;
};

struct DeviceLaunch {
  uint64_t epoch;
  uint64_t op;
  int64_t shape[4];
};

// Where everything lies. There is room for as many visits and launches as for a track's spans. The tracks come
// first, at what launches are given as their TraceBuffer, so that a role finds its own without reading
// anything.
struct TraceLayout {
  uint32_t num_ctas;
  uint32_t max_spans;  // of a track

  MK_HOST_DEVICE static size_t track(int cta, int track) {
    return HEAD_BYTES + (size_t(cta) * NUM_TRACE_TRACKS + track) * sizeof(DeviceTrack);
  }
  MK_HOST_DEVICE size_t num_visits(int cta) const { return track(num_ctas, 0) + cta * sizeof(uint64_t); }
  MK_HOST_DEVICE size_t launch(uint32_t number) const {
    return num_visits(num_ctas) + number * sizeof(DeviceLaunch);
  }
  MK_HOST_DEVICE size_t visit(int cta, uint32_t number) const {
    return launch(max_spans) + (size_t(cta) * max_spans + number) * sizeof(DeviceVisit);
  }
  MK_HOST_DEVICE size_t span(int cta, int track, uint32_t number) const {
    const size_t begin = (visit(num_ctas, 0) + 31) / 32 * 32;
    return begin + ((size_t(cta) * NUM_TRACE_TRACKS + track) * (max_spans + 1) + number) * sizeof(DeviceSpan);
  }
  // All but the spans, of which no more is read than their tracks say, is set at the start: to zero, but the
  // tracks.
  MK_HOST_DEVICE size_t first_bytes() const { return span(0, 0, 0); }
  MK_HOST_DEVICE size_t bytes() const { return span(num_ctas, 0, 0); }

  static constexpr size_t HEAD_BYTES = 32;
};

// What a launch of at most num_ctas CTAs is given while a trace is taken: the beginning of the memory.
struct TraceBuffer {
  TraceLayout layout;
};
static_assert(sizeof(TraceBuffer) <= TraceLayout::HEAD_BYTES);

}  // namespace mk
