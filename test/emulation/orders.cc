// SPDX-License-Identifier: MIT
#include "orders.h"

#ifdef __SANITIZE_THREAD__

#include <sanitizer/tsan_interface.h>

#include <cstdint>

#include "warps.h"

// Of ThreadSanitizer's runtime, in no header.
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
}

namespace emulation::orders {
namespace {

thread_local Warp* this_warp = nullptr;

unsigned this_lane() { return thread_idx().x % 32; }

}  // namespace

Warp::Warp() : fiber_(__tsan_create_fiber(0)) {}
Warp::~Warp() { __tsan_destroy_fiber(fiber_); }

void Warp::begin() {
  lanes_ = {};
  this_warp = this;
}

// Between the switches nothing may touch memory that ThreadSanitizer sees.
template <void CALL(void*)>
__attribute__((noinline, no_sanitize("thread"))) void Warp::by_fiber(void* word) {
  void* const fiber = fiber_;
  void* const self = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync);
  CALL(word);
  __tsan_switch_to_fiber(self, __tsan_switch_to_fiber_no_sync);
}

void Warp::before_store(unsigned lane, void* word) {
  if (lanes_[lane].has_fenced) by_fiber<__tsan_release>(word);
}

void Warp::fence(unsigned lane) {
  for (void* word : lanes_[lane].loaded) __tsan_acquire(word);
  lanes_[lane].loaded.clear();
  lanes_[lane].has_fenced = true;
  __tsan_release(&handed_over_);
  by_fiber<__tsan_acquire>(&handed_over_);
}

void before_relaxed_store(void* word) {
  if (this_warp != nullptr) this_warp->before_store(this_lane(), word);
}
void after_relaxed_load(const void* word) {
  if (this_warp != nullptr) this_warp->after_load(this_lane(), word);
}
UnusedReads::UnusedReads() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
UnusedReads::~UnusedReads() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
void fence() {
  if (this_warp != nullptr) this_warp->fence(this_lane());
}

namespace {

// Who reads one word again and again, as kernels do without a pause where each cycle counts, leaves the core to
// whom he waits for.
void pause_if_waiting(const void* word) {
  constexpr int kReadsBeforePause = 64;  // more than the lanes of a warp
  thread_local const void* last = nullptr;
  thread_local int num_reads = 0;
  num_reads = word == last ? num_reads + 1 : 0;
  last = word;
  if (num_reads > kReadsBeforePause && this_warp != nullptr) pause();
}

template <class Word>
void before_volatile_read(void* word) {
  pause_if_waiting(word);
  __atomic_load_n(static_cast<Word*>(word), __ATOMIC_RELAXED);
  after_relaxed_load(word);
}
template <class Word>
void before_volatile_write(void* word) {
  before_relaxed_store(word);
  __atomic_fetch_or(static_cast<Word*>(word), Word{0}, __ATOMIC_RELAXED);
}

}  // namespace
}  // namespace emulation::orders

// Volatile accesses, of which g++ tells before each when it is asked to: on GPUs they are relaxed.
extern "C" {
void __tsan_volatile_read4(void* word) { emulation::orders::before_volatile_read<uint32_t>(word); }
void __tsan_volatile_read8(void* word) { emulation::orders::before_volatile_read<uint64_t>(word); }
void __tsan_volatile_write4(void* word) { emulation::orders::before_volatile_write<uint32_t>(word); }
void __tsan_volatile_write8(void* word) { emulation::orders::before_volatile_write<uint64_t>(word); }
}

#endif
