// SPDX-License-Identifier: MIT
// What relaxed accesses and fences mean, for ThreadSanitizer, which knows atomic accesses only: what comes
// before a fence is seen by whoever reads, with acquire or before a fence of its own, what was stored after it.
// With this a missing order between warps is a data race, though the host's memory would hide it. A fence of a
// CTA counts for volatile accesses alone, with which the warps of a CTA tell each other. To ThreadSanitizer the
// lanes of a warp are one thread: what they owe each other is not looked at, nor are other scopes and proxies.
#pragma once

#ifdef __SANITIZE_THREAD__
#include <array>
#include <cstddef>
#include <unordered_set>
#endif

namespace emulation::orders {

#ifdef __SANITIZE_THREAD__
enum class Scope { cta, any };

// A warp's knowledge. What it knew at its last fence, which its relaxed stores pass on, is kept by fibers
// beside it, threads of their own to ThreadSanitizer.
class Warp {
 public:
  Warp();
  ~Warp();
  Warp(const Warp&) = delete;
  Warp& operator=(const Warp&) = delete;

  void begin() { lanes_ = {}; }
  // From now on the calling thread is the warp, or again what it was before it left. Nothing that is known goes
  // with it. Until stacks are switched, too, nothing may touch memory that ThreadSanitizer sees.
  void switch_to();
  static void leave_caller();
  static void switch_to_caller();
  void before_store(unsigned lane, Scope scope, void* word);
  void after_load(unsigned lane, Scope scope, const void* word) {
    lanes_[lane].loaded[static_cast<size_t>(scope)].insert(const_cast<void*>(word));
  }
  void fence(unsigned lane, Scope scope);

 private:
  static constexpr size_t kScopes = 2;
  template <void CALL(void*)>
  void by_fiber(Scope scope, void* word);

  // A fence is its own lane's: others come to theirs in turn, when this one may be far behind it.
  struct Lane {
    std::array<bool, kScopes> has_fenced{};
    std::array<std::unordered_set<void*>, kScopes> loaded;  // since the last fence
  };

  void* const self_;
  const std::array<void*, kScopes> fibers_;
  char handed_over_ = 0;
  std::array<Lane, 32> lanes_;
};

// What the caller knows goes with the word, to who acquires it.
void release(void* word);
void acquire(void* word);
// Of the calling lane.
void before_relaxed_store(void* word);  // or read-modify-write
void after_relaxed_load(const void* word);
void fence();
void fence_of_cta();
// Plain reads of the thread, while there is one, are not looked at: those of words that nobody uses.
class UnusedReads {
 public:
  UnusedReads();
  ~UnusedReads();
};
#else
class Warp {
 public:
  void begin() {}
  void switch_to() {}
  static void leave_caller() {}
  static void switch_to_caller() {}
};
inline void release(void*) {}
inline void acquire(void*) {}
inline void before_relaxed_store(void*) {}
inline void after_relaxed_load(const void*) {}
inline void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void fence_of_cta() { fence(); }
class UnusedReads {
 public:
  UnusedReads() {}
};
#endif

Warp* this_warp();  // null: not of a launch

}  // namespace emulation::orders
