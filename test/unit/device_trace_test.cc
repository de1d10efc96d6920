// SPDX-License-Identifier: MIT
// From what CTAs write to nanoseconds, without a GPU: the memory is filled in as kernels would fill it.
#include "kernels/cuda/device_trace.h"

#include <cstring>
#include <vector>

#include "test/support/catch.h"

using namespace mk;

namespace {

// A GPU whose clocks are known: SM c counts from its own beginning, at ns_per_tick; the device's clock is
// coarse.
class FakeDevice {
 public:
  FakeDevice(uint32_t num_ctas, uint32_t max_spans) : layout_{num_ctas, max_spans}, image_(layout_.bytes()) {
    empty_tracks(layout_, image_.data(), image_.data());
  }

  static constexpr double kNsPerTick = 0.6;
  static constexpr uint64_t kResolutionNs = 1024;
  static constexpr uint64_t kBeginNs = uint64_t{1} << 60;

  uint64_t clock(int cta, uint64_t ns) const {
    return 1000000 * static_cast<uint64_t>(cta + 1) +
           static_cast<uint64_t>(static_cast<double>(ns) / kNsPerTick);
  }
  uint64_t timer(uint64_t ns) const { return (kBeginNs + ns) / kResolutionNs * kResolutionNs; }

  void enter(int cta, uint64_t epoch, uint64_t ns) {
    const auto number = static_cast<uint32_t>(at<uint64_t>(layout_.num_visits(cta))++);
    for (int track = 0; track < NUM_TRACE_TRACKS; ++track)
      at<DeviceTrack>(layout_.track(cta, track)).visit = number;
    if (number >= layout_.max_spans) return;
    if (cta == 0) at<DeviceLaunch>(layout_.launch(number)) = {epoch, 2, {11, 12, 13, 0}};
    at<DeviceVisit>(layout_.visit(cta, number)) = {epoch, clock(cta, ns), timer(ns), 0, 0};
  }
  void leave(int cta, uint64_t ns) {
    const auto number = static_cast<uint32_t>(at<uint64_t>(layout_.num_visits(cta)) - 1);
    if (number >= layout_.max_spans) return;
    DeviceVisit& visit = at<DeviceVisit>(layout_.visit(cta, number));
    visit.end_clock = clock(cta, ns);
    visit.end_ns = timer(ns);
  }
  void span(int cta, int track, TraceKind kind, uint64_t start_ns, uint64_t end_ns, uint32_t index, int peer) {
    DeviceTrack& state = at<DeviceTrack>(layout_.track(cta, track));
    *state.next = {clock(cta, start_ns),       end_ns ? clock(cta, end_ns) : 0, state.visit, index, peer,
                   static_cast<uint32_t>(kind)};
    if (state.room == 0) {
      ++state.dropped;
    } else {
      --state.room;
      ++state.next;
    }
  }
  Trace convert(int64_t offset_ns = 0) const { return convert_device_trace(layout_, image_.data(), offset_ns); }

 private:
  template <class T>
  T& at(size_t offset) {
    return *reinterpret_cast<T*>(image_.data() + offset);
  }

  TraceLayout layout_;
  std::vector<std::byte> image_;
};

bool near(uint64_t seen, uint64_t ns, uint64_t tolerance = FakeDevice::kResolutionNs + 1) {
  const uint64_t expected = FakeDevice::kBeginNs + ns;
  return seen + tolerance >= expected && seen <= expected + tolerance;
}

}  // namespace

TEST_CASE("parts of the trace's memory lie apart and are aligned") {
  for (const uint32_t num_ctas : {1u, 3u, 132u}) {
    for (const uint32_t max_spans : {1u, 5u, 2048u}) {
      const TraceLayout layout{num_ctas, max_spans};
      const int last = static_cast<int>(num_ctas) - 1;
      CHECK(sizeof(TraceBuffer) <= layout.track(0, 0));
      CHECK(layout.track(last, NUM_TRACE_TRACKS - 1) + sizeof(DeviceTrack) <= layout.num_visits(0));
      CHECK(layout.num_visits(last) + sizeof(uint64_t) <= layout.launch(0));
      CHECK(layout.launch(max_spans - 1) + sizeof(DeviceLaunch) <= layout.visit(0, 0));
      CHECK(layout.visit(last, max_spans - 1) + sizeof(DeviceVisit) <= layout.span(0, 0, 0));
      CHECK(layout.span(last, NUM_TRACE_TRACKS - 1, max_spans) + sizeof(DeviceSpan) == layout.bytes());
      CHECK(layout.track(0, 0) % alignof(DeviceTrack) == 0);
      CHECK(layout.num_visits(0) % alignof(uint64_t) == 0);
      CHECK(layout.launch(0) % alignof(DeviceLaunch) == 0);
      CHECK(layout.visit(0, 0) % alignof(DeviceVisit) == 0);
      CHECK(layout.span(0, 0, 0) % alignof(DeviceSpan) == 0);
    }
  }
}

TEST_CASE("SM clocks come onto the device's, and CTAs onto one") {
  FakeDevice device(3, 16);
  for (uint64_t turn = 0; turn < 2; ++turn) {
    const uint64_t begin = 5000 + turn * 300000;
    for (int cta = 0; cta < 3; ++cta) {
      const auto late = static_cast<uint64_t>(cta) * 2000;
      device.enter(cta, 40 + turn, begin + late);
      device.span(cta, TRACE_LOAD, TraceKind::load, begin + late + 1000, begin + 90000, 7, -1);
      device.span(cta, TRACE_LOAD, TraceKind::wait, begin + late + 2000, begin + 50000, 8, 2);
      device.span(cta, TRACE_COMPUTE + 1, TraceKind::compute, begin + 60000, begin + 190000, TRACE_NO_INDEX,
                  -1);
      device.leave(cta, begin + 200000 - late);
    }
  }
  const Trace trace = device.convert();
  CHECK(trace.executor == "cuda");
  REQUIRE(trace.launches.size() == 2);
  for (uint64_t turn = 0; turn < 2; ++turn) {
    const TraceLaunch& launch = trace.launches[turn];
    CHECK(launch.epoch == 40 + turn);
    CHECK(launch.op == MK_OPERATOR_GEMM_REDUCE_SCATTER);
    CHECK(launch.sizes == "m=11, n=12, k=13");
    CHECK(near(launch.start_ns, 5000 + turn * 300000));
    CHECK(near(launch.end_ns, 205000 + turn * 300000));
    CHECK(launch.sm_mhz * FakeDevice::kNsPerTick > 990);
    CHECK(launch.sm_mhz * FakeDevice::kNsPerTick < 1010);
  }
  REQUIRE(trace.tracks.size() == 6);
  CHECK(trace.tracks[0].name == "cta 0 load");
  CHECK(trace.tracks[3].name == "cta 1 compute 1");
  for (const TraceTrack& track : trace.tracks) {
    INFO(track.name);
    CHECK(track.dropped == 0);
    for (const TraceSpan& span : track.spans) CHECK((span.epoch == 40 || span.epoch == 41));
  }
  const TraceTrack& load = trace.tracks[4];
  REQUIRE(load.spans.size() == 4);
  CHECK(near(load.spans[3].start_ns, 5000 + 300000 + 4000 + 2000));
  CHECK(near(load.spans[3].end_ns, 5000 + 300000 + 50000));
  CHECK(load.spans[3].kind == TraceKind::wait);
  CHECK(load.spans[3].index == 8);
  CHECK(load.spans[3].peer == 2);
  CHECK(load.spans[2].start_ns < load.spans[3].start_ns);
  CHECK(load.spans[2].end_ns > load.spans[3].end_ns);
  CHECK(trace.tracks[5].spans[0].index == -1);
  // The offset moves everything.
  const Trace moved = device.convert(-123456789);
  CHECK(moved.launches[1].end_ns == trace.launches[1].end_ns - 123456789);
  CHECK(moved.tracks[4].spans[3].start_ns == load.spans[3].start_ns - 123456789);
}

TEST_CASE("launches shorter than the device's clock can tell") {
  FakeDevice device(1, 8);
  device.enter(0, 1, 0);
  device.leave(0, 500000);
  // Begins and ends on the same tick of the coarse clock.
  device.enter(0, 2, 600100);
  device.span(0, TRACE_COPY, TraceKind::copy, 600200, 600700, 0, -1);
  device.leave(0, 600800);
  const Trace trace = device.convert();
  REQUIRE(trace.launches.size() == 2);
  REQUIRE(trace.tracks.size() == 1);
  const TraceSpan& span = trace.tracks[0].spans.at(0);
  const uint64_t ns = span.end_ns - span.start_ns;
  CHECK(ns >= 490);
  CHECK(ns <= 510);
  CHECK(trace.launches[1].end_ns >= span.end_ns);
  CHECK(trace.launches[0].sm_mhz > 0);
  CHECK(trace.launches[1].sm_mhz == 0);
}

TEST_CASE("a replayed launch may come again with its number") {
  FakeDevice device(2, 8);
  for (uint64_t turn = 0; turn < 3; ++turn) {
    for (int cta = 0; cta < 2; ++cta) {
      device.enter(cta, 9, turn * 100000 + static_cast<uint64_t>(cta) * 1000);
      device.leave(cta, turn * 100000 + 40000 + static_cast<uint64_t>(cta) * 9000);
    }
  }
  const Trace trace = device.convert();
  REQUIRE(trace.launches.size() == 3);
  for (uint64_t turn = 0; turn < 3; ++turn) {
    CHECK(near(trace.launches[turn].start_ns, turn * 100000));
    CHECK(near(trace.launches[turn].end_ns, turn * 100000 + 49000));
  }
}

TEST_CASE("what has no room is counted") {
  FakeDevice device(2, 2);
  for (uint64_t epoch = 1; epoch <= 5; ++epoch) {
    for (int cta = 0; cta < 2; ++cta) {
      device.enter(cta, epoch, epoch * 100000);
      if (cta == 0)
        device.span(cta, TRACE_COMPUTE, TraceKind::compute, epoch * 100000 + 10, epoch * 100000 + 20, 0, -1);
      if (cta == 1 && epoch == 4) device.span(cta, TRACE_COPY, TraceKind::copy, 400010, 400020, 0, -1);
      device.leave(cta, epoch * 100000 + 50000);
    }
  }
  const Trace trace = device.convert();
  CHECK(trace.launches.size() == 2);
  CHECK(trace.dropped_launches == 3);
  REQUIRE(trace.tracks.size() == 2);
  CHECK(trace.tracks[0].spans.size() == 2);
  CHECK(trace.tracks[0].dropped == 3);
  // There was room for this one, but not for its launch, without which it has no time.
  CHECK(trace.tracks[1].spans.empty());
  CHECK(trace.tracks[1].dropped == 1);
}

TEST_CASE("a launch that did not end") {
  FakeDevice device(2, 8);
  device.enter(0, 1, 0);
  device.leave(0, 400000);
  device.enter(0, 2, 500000);
  device.span(0, TRACE_LOAD, TraceKind::load, 510000, 520000, 3, -1);
  device.span(0, TRACE_LOAD, TraceKind::wait, 530000, 0, 4, 1);
  const Trace trace = device.convert();
  REQUIRE(trace.launches.size() == 2);
  REQUIRE(trace.tracks.size() == 1);
  REQUIRE(trace.tracks[0].spans.size() == 2);
  CHECK(near(trace.tracks[0].spans[0].end_ns, 520000, 2100));
  CHECK(near(trace.tracks[0].spans[1].start_ns, 530000, 2100));
  CHECK(trace.tracks[0].spans[1].end_ns >= trace.tracks[0].spans[1].start_ns);
}

TEST_CASE("a trace of nothing") {
  const Trace trace = FakeDevice(132, 16).convert();
  CHECK(trace.launches.empty());
  CHECK(trace.tracks.empty());
  CHECK(trace.dropped_launches == 0);
}
