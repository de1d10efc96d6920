// SPDX-License-Identifier: MIT
#include "flight_recorder.h"

#include <algorithm>

namespace mk {

int64_t FlightRecorder::now_us() const {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - birth_)
      .count();
}

void FlightRecorder::record(uint64_t epoch, const OperatorCall& call, State state) {
  std::lock_guard lock(mutex_);
  mk_flight_entry_t& entry = entries_[epoch % kEntries];
  if (entry.epoch != epoch) {
    const std::array<int64_t, 4> shape = flight_shape(call);
    entry = {epoch, operator_of(call), state, {shape[0], shape[1], shape[2], shape[3]}, now_us(), 0};
  }
  if (state == running) entry.start_us = now_us();
  if (state == completed || state == failed) entry.duration_us = now_us() - entry.start_us;
  entry.state = state;
  last_ = std::max(last_, epoch);
}

void FlightRecorder::complete() {
  std::lock_guard lock(mutex_);
  for (mk_flight_entry_t& entry : entries_) {
    if (entry.state != running) continue;
    entry.state = completed;
    entry.duration_us = now_us() - entry.start_us;
  }
}

size_t FlightRecorder::copy(mk_flight_entry_t* entries, size_t capacity) const {
  std::lock_guard lock(mutex_);
  const uint64_t kept = std::min<uint64_t>({last_, kEntries, capacity});
  size_t count = 0;
  for (uint64_t epoch = last_ - kept + 1; epoch <= last_; ++epoch) {
    const mk_flight_entry_t& entry = entries_[epoch % kEntries];
    if (entry.epoch != epoch) continue;  // epochs that a disagreement skipped
    entries[count] = entry;
    if (entry.state == running) entries[count].duration_us = now_us() - entry.start_us;
    ++count;
  }
  return count;
}

}  // namespace mk
