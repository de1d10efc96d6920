// SPDX-License-Identifier: MIT
#include "trace.h"

#include <algorithm>
#include <cinttypes>

#include "operator_names.h"

namespace mk {
namespace {

constexpr const char* kKinds[] = {"wait", "load", "compute", "store", "copy", "send", "reduce"};
static_assert(sizeof kKinds / sizeof *kKinds == static_cast<size_t>(TraceKind::NUM));

// The launches' own row; the others follow.
constexpr int kLaunchTrack = 0;

// Events of one rank, a line each. No name has a character that JSON would have escaped.
class EventWriter {
 public:
  EventWriter(std::FILE* file, int rank) : file_(file), rank_(rank) {}

  void name(const char* what, int track, const char* name) {
    begin("M", what, track);
    std::fprintf(file_, ",\"args\":{\"name\":\"%s\"}}", name);
  }
  void sort_index(const char* what, int track, int index) {
    begin("M", what, track);
    std::fprintf(file_, ",\"args\":{\"sort_index\":%d}}", index);
  }
  // The arguments are to follow.
  void span(const char* name, int track, uint64_t start_ns, uint64_t end_ns, uint64_t epoch) {
    begin("X", name, track);
    std::fprintf(file_, ",\"ts\":");
    microseconds(start_ns);
    std::fprintf(file_, ",\"dur\":");
    microseconds(end_ns - start_ns);
    std::fprintf(file_, ",\"args\":{\"epoch\":%" PRIu64, epoch);
  }
  // A mark on a row, or (scope 'p') on all rows of the rank; the arguments are to follow.
  void mark(const char* name, int track, char scope, uint64_t at_ns) {
    begin("i", name, track);
    std::fprintf(file_, ",\"s\":\"%c\",\"ts\":", scope);
    microseconds(at_ns);
    std::fprintf(file_, ",\"args\":{");
  }
  void end() { std::fprintf(file_, "}}"); }

 private:
  void begin(const char* phase, const char* name, int track) {
    std::fprintf(file_, "%s{\"ph\":\"%s\",\"name\":\"%s\",\"pid\":%d,\"tid\":%d", is_first_ ? "" : ",\n", phase,
                 name, rank_, track);
    is_first_ = false;
  }
  void microseconds(uint64_t ns) {
    std::fprintf(file_, "%" PRIu64 ".%03u", ns / 1000, static_cast<unsigned>(ns % 1000));
  }

  std::FILE* file_;
  const int rank_;
  bool is_first_ = true;
};

void write_launches(EventWriter& events, const Trace& trace, std::FILE* file) {
  for (const TraceLaunch& launch : trace.launches) {
    events.span(operator_name(launch.op), kLaunchTrack, launch.start_ns,
                std::max(launch.start_ns, launch.end_ns), launch.epoch);
    std::fprintf(file, ",\"shape\":\"%s\"", launch.sizes.c_str());
    if (launch.sm_mhz > 0) std::fprintf(file, ",\"sm_mhz\":%.0f", launch.sm_mhz);
    events.end();
  }
}

void write_track(EventWriter& events, const TraceTrack& track, int number, std::FILE* file) {
  events.name("thread_name", number, track.name.c_str());
  events.sort_index("thread_sort_index", number, number);
  std::vector<TraceSpan> spans = track.spans;
  // What contains others before them.
  std::stable_sort(spans.begin(), spans.end(), [](const TraceSpan& a, const TraceSpan& b) {
    return a.start_ns != b.start_ns ? a.start_ns < b.start_ns : a.end_ns > b.end_ns;
  });
  uint64_t last_ns = 0;
  for (const TraceSpan& span : spans) {
    events.span(trace_kind_name(span.kind), number, span.start_ns, std::max(span.start_ns, span.end_ns),
                span.epoch);
    if (span.index >= 0) std::fprintf(file, ",\"index\":%" PRId64, span.index);
    if (span.peer >= 0) std::fprintf(file, ",\"peer\":%d", span.peer);
    if (span.object != nullptr) std::fprintf(file, ",\"object\":\"%s\"", span.object);
    events.end();
    last_ns = std::max(last_ns, span.end_ns);
  }
  if (track.dropped == 0) return;
  events.mark("dropped", number, 't', last_ns);
  std::fprintf(file, "\"spans\":%" PRIu64, track.dropped);
  events.end();
}

// What the trace holds and lacks, at its end.
void write_summary(EventWriter& events, const Trace& trace, std::FILE* file) {
  uint64_t last_ns = 0;
  uint64_t spans = 0;
  uint64_t dropped = 0;
  for (const TraceLaunch& launch : trace.launches) last_ns = std::max(last_ns, launch.end_ns);
  for (const TraceTrack& track : trace.tracks) {
    spans += track.spans.size();
    dropped += track.dropped;
    for (const TraceSpan& span : track.spans) last_ns = std::max(last_ns, span.end_ns);
  }
  events.mark("trace", kLaunchTrack, 'p', last_ns);
  std::fprintf(file,
               "\"executor\":\"%s\",\"launches\":%zu,\"dropped_launches\":%" PRIu64 ",\"spans\":%" PRIu64
               ",\"dropped_spans\":%" PRIu64,
               trace.executor.c_str(), trace.launches.size(), trace.dropped_launches, spans, dropped);
  events.end();
}

}  // namespace

const char* trace_kind_name(TraceKind kind) {
  return kind < TraceKind::NUM ? kKinds[static_cast<size_t>(kind)] : "unknown";
}

bool write_trace(const Trace& trace, int rank, std::FILE* file) {
  std::fprintf(file, "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n");
  EventWriter events(file, rank);
  const std::string name = "rank " + std::to_string(rank) + " (" + trace.executor + ")";
  events.name("process_name", kLaunchTrack, name.c_str());
  events.sort_index("process_sort_index", kLaunchTrack, rank);
  events.name("thread_name", kLaunchTrack, "launches");
  events.sort_index("thread_sort_index", kLaunchTrack, kLaunchTrack);
  write_launches(events, trace, file);
  for (size_t i = 0; i < trace.tracks.size(); ++i) {
    write_track(events, trace.tracks[i], kLaunchTrack + 1 + static_cast<int>(i), file);
  }
  write_summary(events, trace, file);
  std::fprintf(file, "\n]}\n");
  return std::fflush(file) == 0 && std::ferror(file) == 0;
}

}  // namespace mk
