// SPDX-License-Identifier: MIT
#include "host_trace.h"

#include <cstring>
#include <new>

namespace mk {

void HostTrack::append(const TraceSpan& span) {
  if (spans_.size() >= max_spans_) {
    ++dropped_;
    return;
  }
  try {
    spans_.push_back(span);
  } catch (const std::bad_alloc&) {  // a trace is not worth a launch
    ++dropped_;
  }
}

void HostTrack::add(TraceKind kind, uint64_t start_ns, int64_t index, int peer) {
  append({start_ns, trace_clock_ns(), epoch_, index, peer, kind});
}

void HostTrack::add_wait(uint64_t start_ns, const char* object, int64_t index, int peer) {
  const uint64_t end_ns = trace_clock_ns();
  if (!spans_.empty() && dropped_ == 0) {
    TraceSpan& last = spans_.back();
    if (last.kind == TraceKind::wait && last.epoch == epoch_ && last.index == index && last.peer == peer &&
        std::strcmp(last.object, object) == 0) {
      last.end_ns = end_ns;
      return;
    }
  }
  append({start_ns, end_ns, epoch_, index, peer, TraceKind::wait, object});
}

TraceTrack HostTrack::track(bool alone) const {
  return {alone ? role_ : role_ + " " + std::to_string(number_), spans_, dropped_};
}

HostTrack* HostTrace::track(const std::string& role, int number, uint64_t epoch) {
  for (HostTrack& track : tracks_) {
    if (track.number() != number || track.role() != role) continue;
    track.set_epoch(epoch);
    return &track;
  }
  HostTrack& added = tracks_.emplace_back(role, number, max_spans_);
  added.set_epoch(epoch);
  return &added;
}

void HostTrace::add_launch(const TraceLaunch& launch) {
  if (launches_.size() < max_spans_) {
    launches_.push_back(launch);
  } else {
    ++dropped_launches_;
  }
}

Trace HostTrace::trace() const {
  Trace trace;
  trace.executor = "host";
  trace.launches = launches_;
  trace.dropped_launches = dropped_launches_;
  for (const HostTrack& track : tracks_) {
    bool alone = true;
    for (const HostTrack& other : tracks_) alone = alone && (other.role() != track.role() || &other == &track);
    trace.tracks.push_back(track.track(alone));
  }
  return trace;
}

}  // namespace mk
