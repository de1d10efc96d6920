// SPDX-License-Identifier: MIT
// CTAs on the host, so that what kernels do beside their products can be tested without a GPU: a warp is a
// thread, its lanes are coroutines that switch where lanes meet (shuffles, votes, __syncwarp) and where one
// looks in vain (pause). The memory model is the host's: orders that are missing in a kernel show under
// ThreadSanitizer alone (orders.h).
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
// Every lane of the warp brings a value and gets all of them.
struct Values {
  uint64_t of[32];
};
Values exchange(uint64_t mine);
// All threads of the CTA come here before one goes on.
void sync_cta();
// The same of `num_warps` of its warps, who say the same `barrier`; that of all is number 0.
void sync_warps(unsigned barrier, unsigned num_warps);
void pause();  // in a loop that looks at memory; other lanes go on meanwhile

// Runs `body` as num_ctas CTAs of num_warps warps, all at once; returns when all have ended.
void run_ctas(unsigned num_ctas, unsigned num_warps, const std::function<void()>& body);

}  // namespace emulation
