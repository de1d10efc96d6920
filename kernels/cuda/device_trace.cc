// SPDX-License-Identifier: MIT
#include "kernels/cuda/device_trace.h"

#include <algorithm>
#include <cstring>

#include "lib/status.h"

namespace mk {
namespace {

// Of an SM, where no visit says better.
constexpr double kUsualNsPerTick = 1 / 1.755;
// A visit this long gives its own map: the device's clock, at its coarsest, is then a few percent off at most.
constexpr uint64_t kLongVisitNs = 16000;

std::string track_name(int cta, int track) {
  if (track == TRACE_LOAD) return format("cta %d load", cta);
  if (track < TRACE_COMPUTE) return format("cta %d copy %d", cta, track - TRACE_COPY + 1);
  return format("cta %d compute %d", cta, track - TRACE_COMPUTE);
}

class Converter {
 public:
  Converter(const TraceLayout& layout, const std::byte* image, int64_t offset_ns)
      : layout_(layout), image_(image), offset_ns_(offset_ns) {
    uint64_t ns = 0;
    uint64_t ticks = 0;
    for (int cta = 0; cta < num_ctas(); ++cta) {
      for (uint32_t number = 0; number < num_visits(cta); ++number) {
        const DeviceVisit& visit = visit_at(cta, number);
        if (!has_ended(visit)) continue;
        ns += visit.end_ns - visit.begin_ns;
        ticks += visit.end_clock - visit.begin_clock;
      }
    }
    if (ns > 0 && ticks > 0) ns_per_tick_ = static_cast<double>(ns) / static_cast<double>(ticks);
  }

  Trace convert() const {
    Trace trace;
    trace.executor = "cuda";
    add_launches(trace);
    for (int cta = 0; cta < num_ctas(); ++cta) {
      for (int track = 0; track < NUM_TRACE_TRACKS; ++track) {
        TraceTrack converted = convert_track(cta, track);
        if (!converted.spans.empty() || converted.dropped > 0) trace.tracks.push_back(std::move(converted));
      }
    }
    return trace;
  }

 private:
  template <class T>
  const T& at(size_t offset) const {
    return *reinterpret_cast<const T*>(image_ + offset);
  }
  int num_ctas() const { return static_cast<int>(layout_.num_ctas); }
  uint64_t all_visits(int cta) const { return at<uint64_t>(layout_.num_visits(cta)); }
  uint32_t num_visits(int cta) const {
    return static_cast<uint32_t>(std::min<uint64_t>(all_visits(cta), layout_.max_spans));
  }
  const DeviceVisit& visit_at(int cta, uint32_t number) const {
    return at<DeviceVisit>(layout_.visit(cta, number));
  }
  static bool has_ended(const DeviceVisit& visit) {
    return visit.end_clock > visit.begin_clock && visit.end_ns >= visit.begin_ns;
  }

  uint64_t to_ns(const DeviceVisit& visit, uint64_t clock) const {
    double ns_per_tick = ns_per_tick_;
    if (has_ended(visit) && visit.end_ns - visit.begin_ns >= kLongVisitNs) {
      ns_per_tick = static_cast<double>(visit.end_ns - visit.begin_ns) /
                    static_cast<double>(visit.end_clock - visit.begin_clock);
    }
    const double ticks = clock > visit.begin_clock ? static_cast<double>(clock - visit.begin_clock) : 0;
    return visit.begin_ns + static_cast<uint64_t>(offset_ns_) + static_cast<uint64_t>(ticks * ns_per_tick);
  }
  static double clock_of(const DeviceVisit& visit) {  // MHz; 0: the visit is too short to tell
    if (!has_ended(visit) || visit.end_ns - visit.begin_ns < kLongVisitNs) return 0;
    return 1e3 * static_cast<double>(visit.end_clock - visit.begin_clock) /
           static_cast<double>(visit.end_ns - visit.begin_ns);
  }
  uint64_t start_of(const DeviceVisit& visit) const { return to_ns(visit, visit.begin_clock); }
  uint64_t end_of(const DeviceVisit& visit) const {
    return to_ns(visit, has_ended(visit) ? visit.end_clock : visit.begin_clock);
  }

  // From the first CTA that came to the last that left.
  void add_launches(Trace& trace) const {
    for (uint32_t number = 0; num_ctas() > 0 && number < num_visits(0); ++number) {
      const DeviceLaunch& launch = at<DeviceLaunch>(layout_.launch(number));
      const DeviceVisit& visit = visit_at(0, number);
      trace.launches.push_back(
          {launch.epoch, static_cast<mk_operator_t>(launch.op),
           format("m=%lld, n=%lld, k=%lld", static_cast<long long>(launch.shape[0]),
                  static_cast<long long>(launch.shape[1]), static_cast<long long>(launch.shape[2])),
           start_of(visit), end_of(visit), clock_of(visit)});
    }
    if (num_ctas() > 0) trace.dropped_launches = all_visits(0) - num_visits(0);
    for (int cta = 1; cta < num_ctas(); ++cta) {
      size_t launch = 0;  // launches of a communicator do not overlap, and CTAs may be fewer in some
      for (uint32_t number = 0; number < num_visits(cta); ++number) {
        const DeviceVisit& visit = visit_at(cta, number);
        while (launch < trace.launches.size() && (trace.launches[launch].epoch != visit.epoch ||
                                                  trace.launches[launch].end_ns < start_of(visit))) {
          ++launch;
        }
        if (launch == trace.launches.size()) break;
        TraceLaunch& whole = trace.launches[launch];
        whole.start_ns = std::min(whole.start_ns, start_of(visit));
        whole.end_ns = std::max(whole.end_ns, end_of(visit));
      }
    }
  }

  TraceTrack convert_track(int cta, int track) const {
    TraceTrack converted;
    converted.name = track_name(cta, track);
    const DeviceTrack& state = at<DeviceTrack>(layout_.track(cta, track));
    const uint32_t kept = layout_.max_spans - std::min(state.room, layout_.max_spans);
    converted.dropped = state.dropped;
    for (uint32_t number = 0; number < kept; ++number) {
      const DeviceSpan& span = at<DeviceSpan>(layout_.span(cta, track, number));
      if (span.visit >= num_visits(cta) || span.kind >= static_cast<uint32_t>(TraceKind::NUM)) {
        ++converted.dropped;  // of a launch that was not recorded
        continue;
      }
      const DeviceVisit& visit = visit_at(cta, span.visit);
      const uint64_t start_ns = to_ns(visit, span.start);
      const uint64_t end_ns = span.end > 0 ? to_ns(visit, span.end) : end_of(visit);
      converted.spans.push_back({start_ns, std::max(start_ns, end_ns), visit.epoch,
                                 span.index == TRACE_NO_INDEX ? -1 : static_cast<int64_t>(span.index),
                                 span.peer, static_cast<TraceKind>(span.kind)});
    }
    return converted;
  }

  const TraceLayout layout_;
  const std::byte* const image_;
  const int64_t offset_ns_;
  double ns_per_tick_ = kUsualNsPerTick;
};

}  // namespace

void empty_tracks(const TraceLayout& layout, std::byte* image, std::byte* device_memory) {
  for (int cta = 0; cta < static_cast<int>(layout.num_ctas); ++cta) {
    for (int track = 0; track < NUM_TRACE_TRACKS; ++track) {
      auto* first = reinterpret_cast<DeviceSpan*>(device_memory + layout.span(cta, track, 0));
      const DeviceTrack empty = {first, first, layout.max_spans, 0, 0, 0};
      std::memcpy(image + layout.track(cta, track), &empty, sizeof empty);
    }
  }
}

Trace convert_device_trace(const TraceLayout& layout, const std::byte* image, int64_t offset_ns) {
  return Converter(layout, image, offset_ns).convert();
}

}  // namespace mk
