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

Warp::Warp() : fibers_{__tsan_create_fiber(0), __tsan_create_fiber(0)} {}
Warp::~Warp() {
  for (void* fiber : fibers_) __tsan_destroy_fiber(fiber);
}

void Warp::begin() {
  lanes_ = {};
  this_warp = this;
}

// Between the switches nothing may touch memory that ThreadSanitizer sees.
template <void CALL(void*)>
__attribute__((noinline, no_sanitize("thread"))) void Warp::by_fiber(Scope scope, void* word) {
  void* const fiber = fibers_[static_cast<size_t>(scope)];
  void* const self = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync);
  CALL(word);
  __tsan_switch_to_fiber(self, __tsan_switch_to_fiber_no_sync);
}

void Warp::before_store(unsigned lane, Scope scope, void* word) {
  if (lanes_[lane].has_fenced[static_cast<size_t>(scope)]) by_fiber<__tsan_release>(scope, word);
}

void Warp::fence(unsigned lane, Scope scope) {
  for (const Scope each : {Scope::cta, Scope::any}) {
    if (each > scope) break;
    auto& loaded = lanes_[lane].loaded[static_cast<size_t>(each)];
    for (void* word : loaded) __tsan_acquire(word);
    loaded.clear();
  }
  __tsan_release(&handed_over_);
  for (const Scope each : {Scope::cta, Scope::any}) {
    if (each > scope) break;
    lanes_[lane].has_fenced[static_cast<size_t>(each)] = true;
    by_fiber<__tsan_acquire>(each, &handed_over_);
  }
}

void before_relaxed_store(void* word) {
  if (this_warp != nullptr) this_warp->before_store(this_lane(), Scope::any, word);
}
void after_relaxed_load(const void* word) {
  if (this_warp != nullptr) this_warp->after_load(this_lane(), Scope::any, word);
}
UnusedReads::UnusedReads() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
UnusedReads::~UnusedReads() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
void fence() {
  if (this_warp != nullptr) this_warp->fence(this_lane(), Scope::any);
}
void fence_of_cta() {
  if (this_warp != nullptr) this_warp->fence(this_lane(), Scope::cta);
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
  if (this_warp != nullptr) this_warp->after_load(this_lane(), Scope::cta, word);
}
template <class Word>
void before_volatile_write(void* word) {
  if (this_warp != nullptr) this_warp->before_store(this_lane(), Scope::cta, word);
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
