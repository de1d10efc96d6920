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

thread_local void* caller = nullptr;

unsigned this_lane() { return thread_idx().x % 32; }

}  // namespace

Warp::Warp() : self_(__tsan_create_fiber(0)), fibers_{__tsan_create_fiber(0), __tsan_create_fiber(0)} {}
Warp::~Warp() {
  __tsan_destroy_fiber(self_);
  for (void* fiber : fibers_) __tsan_destroy_fiber(fiber);
}

__attribute__((noinline, no_sanitize("thread"))) void Warp::switch_to() {
  __tsan_switch_to_fiber(self_, __tsan_switch_to_fiber_no_sync);
}
__attribute__((noinline, no_sanitize("thread"))) void Warp::leave_caller() {
  caller = __tsan_get_current_fiber();
}
__attribute__((noinline, no_sanitize("thread"))) void Warp::switch_to_caller() {
  __tsan_switch_to_fiber(caller, __tsan_switch_to_fiber_no_sync);
}

void release(void* word) { __tsan_release(word); }
void acquire(void* word) { __tsan_acquire(word); }

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
  if (Warp* const warp = this_warp()) warp->before_store(this_lane(), Scope::any, word);
}
void after_relaxed_load(const void* word) {
  if (Warp* const warp = this_warp()) warp->after_load(this_lane(), Scope::any, word);
}
UnusedReads::UnusedReads() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
UnusedReads::~UnusedReads() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
void fence() {
  if (Warp* const warp = this_warp()) warp->fence(this_lane(), Scope::any);
}
void fence_of_cta() {
  if (Warp* const warp = this_warp()) warp->fence(this_lane(), Scope::cta);
}

namespace {

template <class Word>
void before_volatile_read(void* word) {
  looks_at(word);
  __atomic_load_n(static_cast<Word*>(word), __ATOMIC_RELAXED);
  if (Warp* const warp = this_warp()) warp->after_load(this_lane(), Scope::cta, word);
}
template <class Word>
void before_volatile_write(void* word) {
  if (Warp* const warp = this_warp()) warp->before_store(this_lane(), Scope::cta, word);
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
