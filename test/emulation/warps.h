// SPDX-License-Identifier: MIT
// CTAs on the host, so that what kernels do beside their products can be tested without a GPU. The lanes of a
// launch are coroutines of the thread that calls run_ctas(): those of a warp switch where they meet (shuffles,
// votes, __syncwarp), warps take turns where one waits for others (barriers), looks in vain (pause) or looks at
// the same word again and again. The memory model is the host's: orders that are missing in a kernel show under
// ThreadSanitizer alone, to which each warp is a thread (orders.h).
#pragma once

#include <cstdint>
#include <functional>

namespace emulation {

struct Place {
  unsigned x;
};

// Of the calling lane.
Place thread_idx();
Place block_idx();
Place block_dim();
Place grid_dim();
// Every lane of the warp brings a value and gets all of them, until it next comes here.
struct Values {
  uint64_t of[32];
};
const Values& exchange(uint64_t mine);
// All threads of the CTA come here before one goes on.
void sync_cta();
// The same of `num_warps` of its warps, who say the same `barrier`; that of all is number 0.
void sync_warps(unsigned barrier, unsigned num_warps);
void pause();  // in a loop that looks at memory; other lanes and warps go on meanwhile
// Loads say what they look at, for loops without a pause: who looks at one word again and again leaves the
// others their turn. Stores say that there is something new: while there is, no launch sleeps.
void looks_at(const void* word);
void has_stored();
// What the warp has last taken the address of in shared memory.
const void*& last_smem();

// Runs `body` as num_ctas CTAs of num_warps warps, all at once; returns when all have ended.
void run_ctas(unsigned num_ctas, unsigned num_warps, const std::function<void()>& body);

}  // namespace emulation
