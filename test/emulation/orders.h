// SPDX-License-Identifier: MIT
// What relaxed accesses and fences mean, for ThreadSanitizer, which knows atomic accesses only: what comes
// before a fence is seen by whoever reads, with acquire or before a fence of its own, what was stored after it.
// With this a missing order between warps is a data race, though the host's memory would hide it. To
// ThreadSanitizer the lanes of a warp are one thread: what they owe each other is not looked at, nor are scopes
// and proxies.
#pragma once

#ifdef __SANITIZE_THREAD__
#include <array>
#include <unordered_set>
#endif

namespace emulation::orders {

#ifdef __SANITIZE_THREAD__
// A warp's knowledge. What it knew at its last fence, which its relaxed stores pass on, is kept by a fiber
// beside it, a thread of its own to ThreadSanitizer.
class Warp {
 public:
  Warp();
  ~Warp();
  Warp(const Warp&) = delete;
  Warp& operator=(const Warp&) = delete;

  void begin();  // by the thread that is the warp from now on
  void before_store(unsigned lane, void* word);
  void after_load(unsigned lane, const void* word) { lanes_[lane].loaded.insert(const_cast<void*>(word)); }
  void fence(unsigned lane);

 private:
  template <void CALL(void*)>
  void by_fiber(void* word);

  // A fence is its own lane's: others come to theirs in turn, when this one may be far behind it.
  struct Lane {
    bool has_fenced = false;
    std::unordered_set<void*> loaded;  // since the last fence
  };

  void* const fiber_;
  char handed_over_ = 0;
  std::array<Lane, 32> lanes_;
};

// Of the calling lane.
void before_relaxed_store(void* word);  // or read-modify-write
void after_relaxed_load(const void* word);
void fence();
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
};
inline void before_relaxed_store(void*) {}
inline void after_relaxed_load(const void*) {}
inline void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
class UnusedReads {
 public:
  UnusedReads() {}
};
#endif

}  // namespace emulation::orders
