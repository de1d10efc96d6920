// SPDX-License-Identifier: MIT
// A trace of launches, whichever executor took it, and the file that it becomes.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "mkernel.h"
#include "trace_kind.h"

namespace mk {

const char* trace_kind_name(TraceKind kind);

// Times are nanoseconds of a clock that the ranks of a host share.
struct TraceSpan {
  uint64_t start_ns;
  uint64_t end_ns;
  uint64_t epoch;
  int64_t index;  // chunk or tile; -1: none
  int32_t peer;   // the rank that it concerns; -1: none
  TraceKind kind;
  const char* object = nullptr;  // of a wait: what was waited for, where it is known
};

// A row: a thread, or a role of a CTA.
struct TraceTrack {
  std::string name;
  std::vector<TraceSpan> spans;
  uint64_t dropped = 0;  // spans for which there was no room
};

struct TraceLaunch {
  uint64_t epoch;
  mk_operator_t op;
  std::string sizes;
  uint64_t start_ns;
  uint64_t end_ns;
  double sm_mhz = 0;  // the SMs' mean clock in it; 0: not known
};

struct Trace {
  std::string executor;  // "host" or "cuda"
  std::vector<TraceLaunch> launches;
  uint64_t dropped_launches = 0;
  std::vector<TraceTrack> tracks;
};

// Writes the trace of `rank` as JSON of the Trace Event Format, which Perfetto and chrome://tracing read; an
// event a line, so that the files of several ranks can be joined. False: errno says why.
bool write_trace(const Trace& trace, int rank, std::FILE* file);

}  // namespace mk
