// SPDX-License-Identifier: MIT
#include "warps.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "orders.h"

namespace emulation {
namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr unsigned kLanes = 32;
// So often a lane looks before its warp sleeps: there are far more warps than cores.
constexpr unsigned kLooksBeforeSleep = 4;
constexpr std::chrono::microseconds kSleep{50};

// Not std::barrier: those that wait meet at words which all barriers of the process share, and ThreadSanitizer
// takes that for an order.
struct NamedBarrier {
  std::mutex mutex;
  std::condition_variable changed;
  unsigned num_present = 0;
  uint64_t num_complete = 0;
};

struct Cta {
  explicit Cta(unsigned number) : index(number) {}
  const unsigned index;
  std::array<NamedBarrier, 16> barriers;
};

struct WarpMemory;

struct Warp {
  Cta* cta = nullptr;
  unsigned index = 0, num_warps = 0, num_ctas = 0;
  const std::function<void()>* body = nullptr;
  unsigned lane = 0;  // the one that runs
  unsigned num_ended = 0;
  // Meetings are numbered; a lane can be one ahead of another, hence two rounds of values.
  std::array<uint64_t, kLanes> meetings{};
  std::array<Values, 2> rounds{};
  uint64_t num_complete = 0;
  unsigned num_present = 0;
  unsigned looks = 0;                  // since a lane last met the others
  void* scheduler = nullptr;           // where run_lanes() goes on
  std::array<void*, kLanes> stacks{};  // where each lane does
  WarpMemory* memory = nullptr;
};

// What a launch's warps leave to the next launch's of the same thread: new ones cost more than most of what
// runs on them. Not to another thread's, which would put launches in order that nothing else does.
struct WarpMemory {
  std::unique_ptr<char[]> stacks = std::make_unique_for_overwrite<char[]>(kLanes * kStackBytes);
  orders::Warp orders;
};

thread_local Warp* this_warp = nullptr;

// Not inlined: a coroutine stays on its thread, but compilers may keep the address of a thread's variable over
// a switch, and this one must be looked up all the same.
__attribute__((noinline)) Warp& warp() { return *this_warp; }

// Leaves on the stack what a call must not change, keeps the stack's end in *from and goes on at `to`. Without
// the operating system, which swapcontext() has change the signal mask each time, and unseen by
// ThreadSanitizer, to which a warp is one thread with one stack.
extern "C" void emulation_switch_stack(void** from, void* to);
asm(R"(
  .text
  .type emulation_switch_stack, @function
emulation_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size emulation_switch_stack, . - emulation_switch_stack
)");

__attribute__((noinline)) void switch_to_next() {
  Warp& self = warp();
  void** from = &self.stacks[self.lane];
  self.lane = (self.lane + 1) % kLanes;
  emulation_switch_stack(from, self.stacks[self.lane]);
}
void run_lanes(Warp& self) { emulation_switch_stack(&self.scheduler, self.stacks[0]); }
void end_lanes(Warp& self) {
  void* ended = nullptr;
  emulation_switch_stack(&ended, self.scheduler);
}

// Lanes end together: their last meeting is here.
void be_lane() {
  (*warp().body)();
  exchange(0);
  Warp& self = warp();
  if (++self.num_ended == kLanes) end_lanes(self);
  switch_to_next();
}

// As if the lane had left be_lane() to return to: six registers below it, and the stack as a call leaves it.
void make_lane(Warp& self, unsigned lane) {
  char* stack = self.memory->stacks.get() + lane * kStackBytes;
  void** end = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + kStackBytes) & ~uintptr_t{15});
  void** top = end - 8;
  std::fill(top, end, nullptr);
  top[6] = reinterpret_cast<void*>(be_lane);
  self.stacks[lane] = top;
}

void be_warp(Warp& self) {
  this_warp = &self;
  self.memory->orders.begin();
  for (unsigned lane = 0; lane < kLanes; ++lane) make_lane(self, lane);
  run_lanes(self);
  this_warp = nullptr;
}

}  // namespace

Place thread_idx() { return {warp().index * kLanes + warp().lane}; }
Place block_idx() { return {warp().cta->index}; }
Place block_dim() { return {warp().num_warps * kLanes}; }
Place grid_dim() { return {warp().num_ctas}; }

Values exchange(uint64_t mine) {
  Warp& self = warp();
  const unsigned lane = self.lane;
  const uint64_t meeting = self.meetings[lane]++;
  self.rounds[meeting % 2].of[lane] = mine;
  if (++self.num_present == kLanes) {
    self.num_present = 0;
    self.looks = 0;
    ++self.num_complete;
  }
  while (self.num_complete <= meeting) switch_to_next();
  return self.rounds[meeting % 2];
}

void sync_warps(unsigned barrier, unsigned num_warps) {
  exchange(0);
  if (warp().lane == 0) {
    NamedBarrier& named = warp().cta->barriers[barrier];
    std::unique_lock lock(named.mutex);
    const uint64_t meeting = named.num_complete;
    if (++named.num_present == num_warps) {
      named.num_present = 0;
      ++named.num_complete;
      named.changed.notify_all();
    }
    named.changed.wait(lock, [&] { return named.num_complete > meeting; });
  }
  exchange(0);
}

void sync_cta() { sync_warps(0, warp().num_warps); }

void pause() {
  if (++warp().looks % kLooksBeforeSleep == 0) {
    switch_to_next();  // another lane may have to write what this one waits for
    std::this_thread::sleep_for(kSleep);
  } else {
    sched_yield();
  }
}

void run_ctas(unsigned num_ctas, unsigned num_warps, const std::function<void()>& body) {
  thread_local std::vector<std::unique_ptr<WarpMemory>> memories;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::unique_ptr<Warp>> warps;
  while (memories.size() < size_t{num_ctas} * num_warps) memories.push_back(std::make_unique<WarpMemory>());
  for (unsigned cta = 0; cta < num_ctas; ++cta) {
    ctas.push_back(std::make_unique<Cta>(cta));
    for (unsigned index = 0; index < num_warps; ++index) {
      warps.push_back(std::make_unique<Warp>());
      Warp& made = *warps.back();
      made.cta = ctas.back().get();
      made.memory = memories[warps.size() - 1].get();
      made.index = index, made.num_warps = num_warps, made.num_ctas = num_ctas;
      made.body = &body;
    }
  }
  std::vector<std::thread> threads;
  for (auto& made : warps) threads.emplace_back([&made] { be_warp(*made); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace emulation
