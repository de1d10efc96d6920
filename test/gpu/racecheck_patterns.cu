// SPDX-License-Identifier: MIT
// What compute-sanitizer's racecheck says of the ways in which the kernels' warps hand things to each other
// through shared memory, each by itself and known to be right, of one whose order is the hardware's alone
// (queue-unsynced: a warp reads by one instruction) and of one that is wrong (queue-early):
//
//   compute-sanitizer --tool racecheck --racecheck-report analysis racecheck_patterns NAME
//
// so that its reports on the kernels can be told apart (docs/testing.md). Each checks what has arrived.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/tma.cuh"

namespace {

using namespace mk;

constexpr int NUM_SLOTS = 2;
constexpr int NUM_ITEMS = 64;
constexpr int WORDS = 32;

enum Pattern { QUEUE, QUEUE_UNSYNCED, QUEUE_EARLY, BULK_COPY, POLLED_WORD, NUM_PATTERNS };
constexpr const char* NAMES[NUM_PATTERNS] = {"queue", "queue-unsynced", "queue-early", "bulk-copy",
                                             "polled-word"};

struct Smem {
  alignas(128) uint32_t slots[NUM_SLOTS][WORDS];
  uint64_t full[NUM_SLOTS];
  uint64_t empty[NUM_SLOTS];
  uint32_t num_put;
  uint32_t num_taken;
};

__device__ void wait(uint64_t* barrier, uint32_t phase) {
  while (!ptx::mbarrier_try_wait_parity(barrier, phase)) {
  }
}

// Warp 0 takes what one thread of warp 1 puts: `pattern` says how the two know of each other.
template <Pattern PATTERN>
__global__ void hand_over(const uint32_t* from, uint32_t* to) {
  __shared__ Smem smem;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < NUM_SLOTS; ++slot) {
      ptx::mbarrier_init(&smem.full[slot], 1);
      ptx::mbarrier_init(&smem.empty[slot], 1);
    }
    smem.num_put = smem.num_taken = 0;
    ptx::fence_mbarrier_init_release_cluster();
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (uint32_t item = 0; item < NUM_ITEMS; ++item) {
    const uint32_t slot = item % NUM_SLOTS, phase = item / NUM_SLOTS % 2;
    uint32_t* const words = smem.slots[slot];
    if (threadIdx.x == 32) {
      if constexpr (PATTERN == POLLED_WORD) {
        while (item - *static_cast<volatile uint32_t*>(&smem.num_taken) == NUM_SLOTS) {
        }
        __threadfence_block();
        words[0] = from[item * WORDS];
        __threadfence_block();
        *static_cast<volatile uint32_t*>(&smem.num_put) = item + 1;
      } else {
        wait(&smem.empty[slot], phase ^ 1);
        if constexpr (PATTERN == BULK_COPY) {
          ptx::mbarrier_arrive_expect_tx(&smem.full[slot], sizeof smem.slots[slot]);
          ptx::cp_async_bulk_shared_global(words, from + item * WORDS, sizeof smem.slots[slot],
                                           &smem.full[slot]);
        } else {
          words[0] = from[item * WORDS];
          ptx::mbarrier_arrive(&smem.full[slot]);
        }
      }
    } else if (threadIdx.x < 32) {
      if constexpr (PATTERN == POLLED_WORD) {
        while (*static_cast<volatile uint32_t*>(&smem.num_put) <= item) {
        }
        __threadfence_block();
        to[item * WORDS + lane] = words[0];
        __threadfence_block();
        __syncwarp();
        if (lane == 0) *static_cast<volatile uint32_t*>(&smem.num_taken) = item + 1;
      } else {
        wait(&smem.full[slot], phase);
        if (PATTERN == QUEUE_EARLY && lane == 0) ptx::mbarrier_arrive(&smem.empty[slot]);  // the mistake
        to[item * WORDS + lane] = words[PATTERN == BULK_COPY ? lane : 0];
        if constexpr (PATTERN != QUEUE_UNSYNCED) __syncwarp();
        if (PATTERN != QUEUE_EARLY && lane == 0) ptx::mbarrier_arrive(&smem.empty[slot]);
      }
    }
  }
}

template <Pattern PATTERN>
bool run() {
  constexpr size_t BYTES = sizeof(uint32_t) * NUM_ITEMS * WORDS;
  std::vector<uint32_t> sent(NUM_ITEMS * WORDS), come(NUM_ITEMS * WORDS);
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<uint32_t>(7 * i);
  uint32_t *from = nullptr, *to = nullptr;
  if (cudaMalloc(&from, BYTES) != cudaSuccess || cudaMalloc(&to, BYTES) != cudaSuccess) return false;
  if (cudaMemcpy(from, sent.data(), BYTES, cudaMemcpyHostToDevice) != cudaSuccess) return false;
  hand_over<PATTERN><<<1, 64>>>(from, to);
  if (cudaMemcpy(come.data(), to, BYTES, cudaMemcpyDeviceToHost) != cudaSuccess) return false;
  int wrong = 0;
  for (size_t i = 0; i < sent.size(); ++i)
    wrong += come[i] != sent[PATTERN == BULK_COPY ? i : i / WORDS * WORDS];
  std::printf("%s: %d of %d words wrong\n", NAMES[PATTERN], wrong, NUM_ITEMS * WORDS);
  return wrong == 0 || PATTERN == QUEUE_EARLY;
}

}  // namespace

int main(int argc, char** argv) {
  bool (*const patterns[])() = {run<QUEUE>, run<QUEUE_UNSYNCED>, run<QUEUE_EARLY>, run<BULK_COPY>,
                                run<POLLED_WORD>};
  for (int pattern = 0; pattern < NUM_PATTERNS; ++pattern) {
    if (argc == 2 && std::strcmp(argv[1], NAMES[pattern]) == 0) return patterns[pattern]() ? 0 : 1;
  }
  std::printf("usage: %s queue|queue-unsynced|queue-early|bulk-copy|polled-word\n", argv[0]);
  return 2;
}
