// SPDX-License-Identifier: MIT
#include "warps.h"

#include <sched.h>
#include <ucontext.h>

#include <array>
#include <barrier>
#include <memory>
#include <thread>
#include <vector>

namespace emulation {
namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr unsigned kLanes = 32;

struct Cta {
  Cta(unsigned number, unsigned warps) : index(number), meeting(static_cast<std::ptrdiff_t>(warps)) {}
  const unsigned index;
  std::barrier<> meeting;
};

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
  ucontext_t scheduler{};
  std::array<ucontext_t, kLanes> contexts{};
  std::vector<std::unique_ptr<char[]>> stacks;
};

thread_local Warp* this_warp = nullptr;

// Not inlined: a coroutine stays on its thread, but compilers may keep the address of a thread's variable over
// a switch, and this one must be looked up all the same.
__attribute__((noinline)) Warp& warp() { return *this_warp; }

void switch_to_next() {
  Warp& self = warp();
  const unsigned from = self.lane;
  self.lane = (from + 1) % kLanes;
  swapcontext(&self.contexts[from], &self.contexts[self.lane]);
}

// Lanes end together: their last meeting is here.
void be_lane() {
  (*warp().body)();
  exchange(0);
  Warp& self = warp();
  if (++self.num_ended == kLanes) setcontext(&self.scheduler);
  switch_to_next();
}

void make_lane(Warp& self, unsigned lane) {
  ucontext_t& context = self.contexts[lane];
  self.stacks.push_back(std::make_unique<char[]>(kStackBytes));
  getcontext(&context);
  context.uc_stack.ss_sp = self.stacks.back().get();
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, be_lane, 0);
}

void be_warp(Warp& self) {
  this_warp = &self;
  for (unsigned lane = 0; lane < kLanes; ++lane) make_lane(self, lane);
  swapcontext(&self.scheduler, &self.contexts[0]);
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
    ++self.num_complete;
  }
  while (self.num_complete <= meeting) switch_to_next();
  return self.rounds[meeting % 2];
}

void sync_cta() {
  exchange(0);
  if (warp().lane == 0) warp().cta->meeting.arrive_and_wait();
  exchange(0);
}

void pause() { sched_yield(); }

void run_ctas(unsigned num_ctas, unsigned num_warps, const std::function<void()>& body) {
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::unique_ptr<Warp>> warps;
  for (unsigned cta = 0; cta < num_ctas; ++cta) {
    ctas.push_back(std::make_unique<Cta>(cta, num_warps));
    for (unsigned index = 0; index < num_warps; ++index) {
      warps.push_back(std::make_unique<Warp>());
      Warp& made = *warps.back();
      made.cta = ctas.back().get();
      made.index = index, made.num_warps = num_warps, made.num_ctas = num_ctas;
      made.body = &body;
    }
  }
  std::vector<std::thread> threads;
  for (auto& made : warps) threads.emplace_back([&made] { be_warp(*made); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace emulation
