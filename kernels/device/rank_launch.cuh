// SPDX-License-Identifier: MIT
// One launch as its CTAs see it: epoch and bank, areas and flags, waiting with a deadline, entering and
// leaving.
#pragma once

#include "kernels/device/rank_comm.h"
#include "kernels/device/trace.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/warp.cuh"

namespace mk {

constexpr uint32_t POLL_PAUSE_NS = 32;
constexpr int POLLS_PER_LOOK = 64;
constexpr uint64_t HOST_LOOK_INTERVAL_NS = 100000;

// What a role waits for, so that its deadline can say it.
struct WaitedFor {
  DeviceRole role;
  DeviceObject object;
  int peer;
  uint64_t index;
  uint64_t seen;
  uint64_t expected;
};

class RankLaunch {
 public:
  __device__ explicit RankLaunch(const RankComm& comm)
      : comm_(comm), last_epoch_(ptx::ld_relaxed_sys(&comm.state->ends.ctas[blockIdx.x].epoch)) {}

  // Worked out by who needs it: else all threads would wait for the load, before a launch's first one of a
  // tile.
  __device__ uint64_t epoch() const { return last_epoch_ + 1; }
  __device__ int bank() const { return bank_of(epoch()); }

  __device__ LaunchProgress& progress() const { return comm_.state->progress[bank()]; }

  // The receive area of this epoch's bank at rank `rank`.
  __device__ std::byte* area(int rank, size_t offset) const {
    return comm_.memory[rank] + comm_.arena + bank() * comm_.bank_bytes + offset;
  }
  __device__ uint64_t* flag(int rank, int index) const {
    return reinterpret_cast<uint64_t*>(comm_.memory[rank] + ControlLayout{comm_.nranks}.flag(bank(), index));
  }

  // After the data of a chunk, which this thread has seen complete.
  __device__ void raise_flag(int rank, int index) const { ptx::st_release_sys(flag(rank, index), epoch()); }

  // The same after a fence that covers the data.
  __device__ void raise_flag_relaxed(int rank, int index) const {
    ptx::st_relaxed_sys(flag(rank, index), epoch());
  }

  // False: the launch is to end without it.
  __device__ bool wait_flag(int index, DeviceRole role, DeviceObject object, int peer,
                            uint64_t object_index) const {
    const uint64_t* word = flag(comm_.rank, index);
    if (ptx::ld_relaxed_sys(word) < epoch()) {
      const Tracer tracer(comm_.trace, trace_track());
      const uint64_t start = tracer.now();
      const bool has_come = wait_slowly(word, role, object, peer, object_index);
      tracer.record(TraceKind::wait, start, static_cast<uint32_t>(object_index), peer);
      if (!has_come) return false;
    }
    // Once, and not in every poll: an acquire empties the SM's L1 cache and holds up its other warps.
    ptx::ld_acquire_sys(word);
    return true;
  }
  // The same by a whole warp, of which each lane that `waits` has a flag of its own: false for all alike. A
  // loop for each lane would part the warp, which costs consumers dearly (see store_tile_rows()).
  __device__ bool wait_flags(bool waits, int index, DeviceRole role, DeviceObject object, int peer,
                             uint64_t object_index) const;
  // The same, where the SM's other warps have nothing in its L1 cache, which every poll then empties: without
  // another round trip behind the last one.
  __device__ bool watch_flags(bool waits, int index, DeviceRole role, DeviceObject object, int peer,
                              uint64_t object_index) const;

  // Has something failed here, or has the host called for the end? Whoever finds that nobody has asked the host
  // for a while asks. No more often: reads over PCIe hold up what travels to the peers, and with every waiting
  // warp asking a launch took a hundred times as long.
  __device__ bool stopped() const {
    LaunchState& state = *comm_.state;
    if (ptx::ld_relaxed_gpu(&progress().failed) != 0 || ptx::ld_relaxed_gpu(&state.aborted) != 0) return true;
    unsigned long long last = ptx::ld_relaxed_gpu(&state.host_look_ns);
    const uint64_t now = ptx::globaltimer();
    if (now < last + HOST_LOOK_INTERVAL_NS ||
        atomicCAS(reinterpret_cast<unsigned long long*>(&state.host_look_ns), last, now) != last) {
      return false;
    }
    if (ptx::ld_relaxed_sys(&comm_.mailbox->abort) == 0) return false;
    ptx::st_relaxed_gpu(&state.ends.aborted_epoch, epoch());
    ptx::st_relaxed_gpu(&state.aborted, 1);
    return true;
  }

  // The first error of a launch is put into the mailbox, unless the host has not taken the last one yet: true,
  // and the caller fills the rest of mailbox->error in, then publishes it.
  __device__ bool report(DeviceErrorKind kind, DeviceRole role, DeviceObject object, int peer,
                         uint64_t object_index) const {
    if (atomicCAS(&progress().failed, 0u, 1u) != 0) return false;
    ptx::st_relaxed_gpu(&comm_.state->ends.failed_epochs[epoch() % NUM_FLIGHTS], epoch());
    if (ptx::ld_relaxed_sys(&comm_.mailbox->failed) != 0) return false;
    DeviceError& error = comm_.mailbox->error;
    error.kind = kind;
    error.role = role;
    error.object = object;
    error.peer = peer;
    error.cta = static_cast<int>(blockIdx.x);
    error.epoch = epoch();
    error.index = object_index;
    error.expected = epoch();
    return true;
  }
  __device__ void publish_error() const { ptx::st_release_sys(&comm_.mailbox->failed, 1); }

  // Every wait's deadline: has it gone on for `patience_ns`, from `since` on? A peer that has not entered is
  // waited for as long as its heartbeat lives (the host raises the abort when it ends), so `since` moves on
  // until all have; one that has must go on within the deadline.
  __device__ bool is_overdue(uint64_t& since, uint64_t patience_ns) const {
    const uint64_t now = ptx::globaltimer();
    if (ptx::ld_relaxed_sys(&comm_.state->entered_epoch) < epoch()) since = now;
    return now > since + patience_ns;
  }
  __device__ bool is_overdue(uint64_t& since) const { return is_overdue(since, comm_.wait_timeout_ns); }
  __device__ void report_overdue(const WaitedFor& wait) const {
    if (!report(DEVICE_TIMEOUT, wait.role, wait.object, wait.peer, wait.index)) return;
    comm_.mailbox->error.seen = wait.seen;
    comm_.mailbox->error.expected = wait.expected;
    publish_error();
  }

  // Ranks write to each other's outputs in a launch if all offer theirs, in the same place; so all come to the
  // same answer. A rank that offers one waits for all entries first, after which nobody's earlier work uses the
  // outputs any more.
  __device__ void wait_for_outputs() const {
    if (comm_.entry.output_offset == kNoOutput) return;
    for (int polls = 1; ptx::ld_relaxed_sys(&comm_.state->entered_epoch) < epoch(); ++polls) {
      __nanosleep(POLL_PAUSE_NS);
      if (polls % POLLS_PER_LOOK == 0 && stopped()) return;
    }
    ptx::ld_acquire_sys(&comm_.state->entered_epoch);
    ptx::fence_proxy_async_global();  // what is written then goes by the bulk copy engine
  }
  // After wait_for_outputs().
  __device__ bool has_open_outputs() const {
    return comm_.entry.output_offset != kNoOutput && ptx::ld_relaxed_sys(&comm_.state->direct_epoch) == epoch();
  }
  __device__ bool writes_outputs() const {
    wait_for_outputs();
    return has_open_outputs();
  }

  // By one warp of the launch that owes the others nothing: tells the peers, waits until all ranks have
  // entered, and compares what they say.
  __device__ void greet() const {
    enter();
    wait_entries();
  }
  // Its parts: the own entry to the ranks of the node; then everyone's, compared with it. before_report(): what
  // a lane that has found a difference does before it says so, since that ends the launch.
  __device__ void enter() const;
  template <class BeforeReport>
  __device__ void wait_entries(BeforeReport&& before_report) const;
  __device__ void wait_entries() const {
    wait_entries([] {});
  }
  // By a warp that has not called wait_entries(): waits until this launch's other warp has. False: the launch
  // is to end.
  __device__ bool wait_all_entered() const;
  __device__ EntryRecord* entry(int rank, int source) const {
    return reinterpret_cast<EntryRecord*>(comm_.memory[rank] +
                                          ControlLayout{comm_.nranks}.entry(bank(), source));
  }

  // By every CTA, all threads: at its start and at its end.
  __device__ void begin_cta() const;
  __device__ void end_cta() const;

 private:
  __device__ bool wait_slowly(const uint64_t* word, DeviceRole role, DeviceObject object, int peer,
                              uint64_t object_index) const;
  // Polls until is_here() of all lanes.
  template <class IsHere>
  __device__ bool see_flags(IsHere&& is_here, int index, DeviceRole role, DeviceObject object, int peer,
                            uint64_t object_index) const;

  const RankComm& comm_;
  const uint64_t last_epoch_;
};

__device__ inline bool RankLaunch::wait_slowly(const uint64_t* word, DeviceRole role, DeviceObject object,
                                               int peer, uint64_t object_index) const {
  uint64_t since = ptx::globaltimer();
  for (int polls = 1; ptx::ld_relaxed_sys(word) < epoch(); ++polls) {
    __nanosleep(POLL_PAUSE_NS);
    if (polls % POLLS_PER_LOOK != 0) continue;
    if (stopped()) return false;
    if (!is_overdue(since)) continue;
    report_overdue({role, object, peer, object_index, ptx::ld_relaxed_sys(word), epoch()});
    return false;
  }
  return true;
}

template <class IsHere>
__device__ inline bool RankLaunch::see_flags(IsHere&& is_here, int index, DeviceRole role, DeviceObject object,
                                             int peer, uint64_t object_index) const {
  bool has_come = true;
  if (!__all_sync(~0u, is_here())) {
    const Tracer tracer(comm_.trace, trace_track());
    const uint64_t start = tracer.now();
    uint64_t since = ptx::globaltimer();
    uint32_t missing = 0;
    int last_peer = peer;
    for (int polls = 1; (missing = __ballot_sync(~0u, !is_here())) != 0; ++polls) {
      last_peer = __shfl_sync(~0u, peer, __ffs(static_cast<int>(missing)) - 1);
      __nanosleep(POLL_PAUSE_NS);
      if (polls % POLLS_PER_LOOK != 0) continue;
      if (__any_sync(~0u, threadIdx.x % 32 == 0 && stopped())) {
        has_come = false;
        break;
      }
      const bool is_late = is_overdue(since) && !is_here();
      if (!__any_sync(~0u, is_late)) continue;
      if (is_late) {
        report_overdue(
            {role, object, peer, object_index, ptx::ld_relaxed_sys(flag(comm_.rank, index)), epoch()});
      }
      has_come = false;
      break;
    }
    tracer.record(TraceKind::wait, start, static_cast<uint32_t>(object_index), last_peer);
  }
  return has_come;
}

__device__ inline bool RankLaunch::wait_flags(bool waits, int index, DeviceRole role, DeviceObject object,
                                              int peer, uint64_t object_index) const {
  const uint64_t* word = flag(comm_.rank, index);
  const bool has_come = see_flags([&] { return !waits || ptx::ld_relaxed_sys(word) >= epoch(); }, index, role,
                                  object, peer, object_index);
  if (waits && has_come) ptx::ld_acquire_sys(word);
  __syncwarp();  // what each lane has acquired holds for all
  return has_come;
}

__device__ inline bool RankLaunch::watch_flags(bool waits, int index, DeviceRole role, DeviceObject object,
                                               int peer, uint64_t object_index) const {
  const uint64_t* word = flag(comm_.rank, index);
  bool is_here = !waits;
  const bool has_come = see_flags([&] { return is_here = is_here || ptx::ld_acquire_sys(word) >= epoch(); },
                                  index, role, object, peer, object_index);
  __syncwarp();
  return has_come;
}

__device__ inline void RankLaunch::enter() const {
  constexpr int NUM_WORDS = sizeof(EntryRecord) / 8;
  const int lane = threadIdx.x % 32;
  const uint32_t others = lane == 0 ? atomicAdd(&comm_.state->num_inside, gridDim.x) : 0;
  const uint64_t* words = reinterpret_cast<const uint64_t*>(&comm_.entry);
  for (int rank = 0; rank < comm_.nranks; ++rank) {
    if (comm_.memory[rank] == nullptr) continue;
    uint64_t* slot = reinterpret_cast<uint64_t*>(entry(rank, comm_.rank));
    if (lane > 0 && lane < NUM_WORDS) ptx::st_relaxed_sys(slot + lane, words[lane]);
  }
  __syncwarp();
  for (int rank = lane; rank < comm_.nranks; rank += 32) {
    if (comm_.memory[rank] == nullptr) continue;
    ptx::st_release_sys(&entry(rank, comm_.rank)->epoch, epoch());
  }
  if (lane == 0) {
    DeviceFlight& flight = comm_.mailbox->flights[epoch() % NUM_FLIGHTS];
    flight.op = comm_.entry.op;
    for (int i = 0; i < 4; ++i) flight.shape[i] = comm_.flight_shape[i];
    flight.start_ns = ptx::globaltimer();
    flight.epoch = epoch();
    ptx::st_release_sys(&comm_.mailbox->started, epoch());
  }
  // A predecessor that is still inside holds counts and areas of its own epoch.
  if (static_cast<int32_t>(others) > 0 &&
      report(DEVICE_OVERLAP, DeviceRole::entry, DeviceObject::entry, comm_.rank, 0))
    publish_error();
  __syncwarp();
}

template <class BeforeReport>
__device__ inline void RankLaunch::wait_entries(BeforeReport&& before_report) const {
  constexpr int NUM_WORDS = sizeof(EntryRecord) / 8;
  constexpr int FIRST_OUTPUT_WORD = offsetof(EntryRecord, output_offset) / 8;  // two words that may differ
  const uint64_t* own = reinterpret_cast<const uint64_t*>(&comm_.entry);
  bool is_alike = comm_.entry.output_offset != kNoOutput;
  for (int source = threadIdx.x % 32; source < comm_.nranks; source += 32) {
    const EntryRecord* record = entry(comm_.rank, source);
    for (int polls = 1; ptx::ld_relaxed_sys(&record->epoch) < epoch(); ++polls) {
      __nanosleep(POLL_PAUSE_NS);
      if (polls % POLLS_PER_LOOK == 0 && stopped()) break;
    }
    if (ptx::ld_acquire_sys(&record->epoch) < epoch()) {
      is_alike = false;
      continue;
    }
    const uint64_t* words = reinterpret_cast<const uint64_t*>(record);
    bool same = true;
    for (int word = 1; word < NUM_WORDS; ++word) {
      const bool is_equal = ptx::ld_relaxed_sys(words + word) == own[word];
      is_alike = is_alike && is_equal;
      if (word != FIRST_OUTPUT_WORD && word != FIRST_OUTPUT_WORD + 1) same = same && is_equal;
    }
    if (same) continue;
    before_report();
    if (!report(DEVICE_MISMATCH, DeviceRole::entry, DeviceObject::entry, source, source)) continue;
    for (int word = 0; word < NUM_WORDS; ++word) {
      reinterpret_cast<uint64_t*>(&comm_.mailbox->error.own)[word] = own[word];
      reinterpret_cast<uint64_t*>(&comm_.mailbox->error.entry)[word] = ptx::ld_relaxed_sys(words + word);
    }
    publish_error();
  }
  is_alike = __all_sync(~0u, is_alike);
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    if (is_alike) ptx::st_relaxed_sys(&comm_.state->direct_epoch, epoch());
    ptx::st_release_sys(&comm_.state->entered_epoch, epoch());
  }
  __syncwarp();
}

__device__ inline bool RankLaunch::wait_all_entered() const {
  const uint64_t* word = &comm_.state->entered_epoch;
  for (int polls = 1; ptx::ld_relaxed_sys(word) < epoch(); ++polls) {
    __nanosleep(POLL_PAUSE_NS);
    if (polls % POLLS_PER_LOOK == 0 && stopped()) return false;
  }
  ptx::ld_acquire_sys(word);
  return !stopped();
}

__device__ inline void RankLaunch::begin_cta() const {
  if (threadIdx.x != 0) return;
  trace_enter(comm_.trace, epoch(), comm_.entry.op, comm_.flight_shape);
}

// Nobody waits for anybody, or for what has been stored: that is complete when the kernel is, and so is the
// next launch's first look at it.
__device__ inline void RankLaunch::end_cta() const {
  __syncthreads();
  LaunchState& state = *comm_.state;
  const int num_ctas = static_cast<int>(gridDim.x);
  for (int cta = static_cast<int>(blockIdx.x + threadIdx.x * gridDim.x); cta < PartialsLayout::MAX_CTAS;
       cta += static_cast<int>(blockDim.x) * num_ctas) {
    CtaEnd& end = state.ends.ctas[cta];
    ptx::st_relaxed_gpu(&end.epoch, epoch());
    if (comm_.ticket > 0) ptx::st_relaxed_gpu(&end.ticket, comm_.ticket);
  }
  if (threadIdx.x != 0) return;
  trace_leave(comm_.trace);
  ptx::red_relaxed_gpu_max(&state.ends.end_ns[epoch() % NUM_FLIGHTS], ptx::globaltimer());
  ptx::red_relaxed_gpu_add(&state.num_inside, ~0u);
  if (blockIdx.x == 0) state.progress[bank_of(epoch() + 1)] = {};
}

}  // namespace mk
