// SPDX-License-Identifier: MIT
// The host executor's trace: the spans of its roles' threads.
#pragma once

#include <chrono>
#include <deque>

#include "../trace.h"

namespace mk {

inline uint64_t trace_clock_ns() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

// The row of one role's thread. Used by one thread at a time: from launch to launch another may have it.
class HostTrack {
 public:
  HostTrack(std::string role, int number, size_t max_spans)
      : role_(std::move(role)), number_(number), max_spans_(max_spans) {}

  const std::string& role() const { return role_; }
  int number() const { return number_; }
  void set_epoch(uint64_t epoch) { epoch_ = epoch; }
  void add(TraceKind kind, uint64_t start_ns, int64_t index, int peer);
  // A wait that is taken up again where it ended, for the same thing, stays one.
  void add_wait(uint64_t start_ns, const char* object, int64_t index, int peer);
  // `alone`: the only thread of this role.
  TraceTrack track(bool alone) const;

 private:
  void append(const TraceSpan& span);

  const std::string role_;
  const int number_;
  const size_t max_spans_;
  uint64_t epoch_ = 0;
  std::vector<TraceSpan> spans_;
  uint64_t dropped_ = 0;
};

class HostTrace {
 public:
  explicit HostTrace(size_t max_spans) : max_spans_(max_spans) {}

  // The row of a role's thread in a launch; by the executor's thread, which has no role running.
  HostTrack* track(const std::string& role, int number, uint64_t epoch);
  void add_launch(const TraceLaunch& launch);
  // What there is so far; while nothing runs.
  Trace trace() const;

 private:
  const size_t max_spans_;
  std::deque<HostTrack> tracks_;  // stable addresses
  std::vector<TraceLaunch> launches_;
  uint64_t dropped_launches_ = 0;
};

// What the thread does from here to the end of the scope. Nothing without a track: then no trace is taken.
class HostSpan {
 public:
  HostSpan(HostTrack* track, TraceKind kind, int64_t index, int peer = -1)
      : track_(track), start_ns_(track ? trace_clock_ns() : 0), index_(index), peer_(peer), kind_(kind) {}
  ~HostSpan() {
    if (track_) track_->add(kind_, start_ns_, index_, peer_);
  }
  HostSpan(const HostSpan&) = delete;
  HostSpan& operator=(const HostSpan&) = delete;

 private:
  HostTrack* const track_;
  const uint64_t start_ns_;
  const int64_t index_;
  const int peer_;
  const TraceKind kind_;
};

}  // namespace mk
