// SPDX-License-Identifier: MIT
#include "warps.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "bulk_copies.h"
#include "orders.h"

// What the warps of a launch share to take turns: ThreadSanitizer must not take it for theirs.
#define MK_UNSEEN __attribute__((noinline, no_sanitize("thread")))

namespace emulation {
namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr unsigned kLanes = 32;
// When all warps have looked in vain so often, one after the other, what they wait for comes from another
// thread.
constexpr unsigned kRoundsBeforeSleep = 32;
constexpr std::chrono::microseconds kSleep{50};
// Who reads one word so often, more than a warp has lanes, leaves the others their turn.
constexpr unsigned kReadsBeforePause = 64;

struct NamedBarrier {
  unsigned num_present = 0;
  uint64_t num_complete = 0;
  char handed_over[2] = {};  // of even meetings and of odd ones, what those knew who came
};

struct Cta {
  explicit Cta(unsigned number) : index(number) {}
  const unsigned index;
  NamedBarrier barriers[16];
};

// What a launch's warps leave to the next launch's of the same thread: new ones cost more than most of what
// runs on them. Not to another thread's, which would put launches in order that nothing else does.
struct WarpMemory {
  WarpMemory() {
    void* const mapped = mmap(nullptr, kLanes * kStackBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
      std::perror("emulation: stacks of a warp");
      std::abort();
    }
    stacks = static_cast<char*>(mapped);
  }
  ~WarpMemory() { munmap(stacks, kLanes * kStackBytes); }
  WarpMemory(const WarpMemory&) = delete;
  WarpMemory& operator=(const WarpMemory&) = delete;

  char* stacks = nullptr;
  orders::Warp orders;
};

struct Launch;

struct Warp {
  Launch* launch = nullptr;
  Cta* cta = nullptr;
  unsigned index = 0, num_warps = 0, num_ctas = 0;
  const std::function<void()>* body = nullptr;
  unsigned lane = 0;       // the one that runs
  unsigned num_ended = 0;  // of its lanes
  // Meetings are numbered; a lane can be one ahead of another, hence two rounds of values.
  std::array<uint64_t, kLanes> meetings{};
  std::array<Values, 2> rounds{};
  uint64_t num_complete = 0;
  unsigned num_present = 0;
  void* stacks[kLanes] = {};  // where each lane goes on
  WarpMemory* memory = nullptr;
  std::array<BulkCopies, kLanes> copies;
  const void* smem = nullptr;
  const void* last_read = nullptr;
  unsigned num_reads = 0;
};

// The warps of a launch and whose turn it is.
struct Launch {
  Warp** warps = nullptr;
  unsigned num_warps = 0, num_running = 0;
  unsigned current = 0;
  unsigned step = 1;  // to the next warp; has no divisor in common with num_warps, so that each has its turn
  unsigned turn = 0;  // of a round
  unsigned num_rounds_in_vain = 0;
  uint64_t random = 0;
  void* caller = nullptr;  // where run_ctas() goes on
  char begun = 0, ended = 0;
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

// The rounds differ in their order.
MK_UNSEEN void begin_round(Launch& launch) {
  if (++launch.num_rounds_in_vain > kRoundsBeforeSleep) {
    std::this_thread::sleep_for(kSleep);
  } else if (launch.num_rounds_in_vain > 1) {
    sched_yield();
  }
  launch.turn = 0;
  const auto have_divisor = [](unsigned a, unsigned b) {
    while (b != 0) {
      const unsigned rest = a % b;
      a = b, b = rest;
    }
    return a != 1;
  };
  do {
    launch.random = launch.random * 6364136223846793005u + 1442695040888963407u;
    launch.step = 1 + static_cast<unsigned>(launch.random >> 33) % launch.num_warps;
  } while (have_divisor(launch.num_warps, launch.step));
}

// Another warp goes on, and this one with its lane `then` when its turn comes.
MK_UNSEEN void switch_warp(Warp& self, unsigned then) {
  Launch& launch = *self.launch;
  Warp* next = nullptr;
  do {
    if (++launch.turn >= launch.num_warps) begin_round(launch);
    launch.current = (launch.current + launch.step) % launch.num_warps;
    next = launch.warps[launch.current];
  } while (next->num_ended == kLanes);
  if (next == &self && then == self.lane) return;
  void** from = &self.stacks[self.lane];
  self.lane = then;
  this_warp = next;
  if (next != &self) next->memory->orders.switch_to();
  emulation_switch_stack(from, next->stacks[next->lane]);
}

MK_UNSEEN void leave_launch(Launch& launch) {
  this_warp = nullptr;
  orders::Warp::switch_to_caller();
  void* ended = nullptr;
  emulation_switch_stack(&ended, launch.caller);
}

MK_UNSEEN void end_warp(Warp& self) {
  self.launch->num_rounds_in_vain = 0;
  if (--self.launch->num_running == 0) leave_launch(*self.launch);
  switch_warp(self, 0);
}

// Lane 0 comes first.
MK_UNSEEN void begin_lane(Warp& self) {
  if (self.lane == 0) orders::acquire(&self.launch->begun);
}

// Lanes end together: their last meeting is here.
void be_lane() {
  Warp& self = warp();
  begin_lane(self);
  (*self.body)();
  exchange(0);
  if (++self.num_ended == kLanes) {
    orders::release(&self.launch->ended);
    end_warp(self);
  }
  switch_to_next();
}

// As if the lane had left be_lane() to return to: six registers below it, and the stack as a call leaves it.
void make_lane(Warp& self, unsigned lane) {
  char* stack = self.memory->stacks + lane * kStackBytes;
  void** end = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + kStackBytes) & ~uintptr_t{15});
  void** top = end - 8;
  std::fill(top, end, nullptr);
  top[6] = reinterpret_cast<void*>(be_lane);
  self.stacks[lane] = top;
}

MK_UNSEEN void run_warps(Launch& launch) {
  Warp* const first = launch.warps[0];
  this_warp = first;
  orders::Warp::leave_caller();
  first->memory->orders.switch_to();
  emulation_switch_stack(&launch.caller, first->stacks[0]);
}

// Comes to a barrier, and is told which meeting there it is.
MK_UNSEEN uint64_t come_to(NamedBarrier& named, unsigned num_warps, Launch& launch) {
  const uint64_t meeting = named.num_complete;
  orders::release(&named.handed_over[meeting % 2]);
  if (++named.num_present == num_warps) {
    named.num_present = 0;
    ++named.num_complete;
    launch.num_rounds_in_vain = 0;
  }
  return meeting;
}
MK_UNSEEN bool is_complete(const NamedBarrier& named, uint64_t meeting) { return named.num_complete > meeting; }

}  // namespace

Place thread_idx() { return {warp().index * kLanes + warp().lane}; }
Place block_idx() { return {warp().cta->index}; }
Place block_dim() { return {warp().num_warps * kLanes}; }
Place grid_dim() { return {warp().num_ctas}; }

const Values& exchange(uint64_t mine) {
  Warp& self = warp();
  const unsigned lane = self.lane;
  const uint64_t meeting = self.meetings[lane]++;
  self.rounds[meeting % 2].of[lane] = mine;
  if (++self.num_present == kLanes) {
    self.num_present = 0;
    ++self.num_complete;
  }
  while (self.num_complete <= meeting) switch_to_next();
  return self.rounds[meeting % 2];
}

void sync_warps(unsigned barrier, unsigned num_warps) {
  exchange(0);
  Warp& self = warp();
  if (self.lane == 0) {
    NamedBarrier& named = self.cta->barriers[barrier];
    const uint64_t meeting = come_to(named, num_warps, *self.launch);
    while (!is_complete(named, meeting)) switch_warp(self, 0);
    orders::acquire(&named.handed_over[meeting % 2]);
  }
  exchange(0);
}

void sync_cta() { sync_warps(0, warp().num_warps); }

// Another lane of the warp may have to write what this one waits for. Threads that are no warps wait for
// threads.
void pause() {
  if (this_warp == nullptr) {
    sched_yield();
    return;
  }
  Warp& self = warp();
  switch_warp(self, (self.lane + 1) % kLanes);
}

void looks_at(const void* word) {
  if (this_warp == nullptr) return;
  Warp& self = warp();
  self.num_reads = word == self.last_read ? self.num_reads + 1 : 0;
  self.last_read = word;
  if (self.num_reads > kReadsBeforePause) pause();
}

MK_UNSEEN void has_stored() {
  if (this_warp != nullptr) this_warp->launch->num_rounds_in_vain = 0;
}

orders::Warp* orders::this_warp() { return emulation::this_warp != nullptr ? &warp().memory->orders : nullptr; }
BulkCopies& bulk_copies() { return warp().copies[warp().lane]; }
const void*& last_smem() { return warp().smem; }

void run_ctas(unsigned num_ctas, unsigned num_warps, const std::function<void()>& body) {
  thread_local std::vector<std::unique_ptr<WarpMemory>> memories;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<Warp*> in_turn;
  Launch launch;
  static std::atomic<uint64_t> num_launches = 0;
  launch.random = num_launches.fetch_add(1, std::memory_order_relaxed);
  while (memories.size() < size_t{num_ctas} * num_warps) memories.push_back(std::make_unique<WarpMemory>());
  for (unsigned cta = 0; cta < num_ctas; ++cta) {
    ctas.push_back(std::make_unique<Cta>(cta));
    for (unsigned index = 0; index < num_warps; ++index) {
      Warp& made = *warps.emplace_back(std::make_unique<Warp>());
      made.launch = &launch;
      made.cta = ctas.back().get();
      made.memory = memories[warps.size() - 1].get();
      made.index = index, made.num_warps = num_warps, made.num_ctas = num_ctas;
      made.body = &body;
      made.memory->orders.begin();
      for (unsigned lane = 0; lane < kLanes; ++lane) make_lane(made, lane);
      in_turn.push_back(&made);
    }
  }
  launch.warps = in_turn.data();
  launch.num_warps = launch.num_running = static_cast<unsigned>(in_turn.size());
  orders::release(&launch.begun);
  run_warps(launch);
  orders::acquire(&launch.ended);
}

}  // namespace emulation
