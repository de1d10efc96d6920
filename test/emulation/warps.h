// SPDX-License-Identifier: MIT
// CTAs on the host, so that what kernels do beside their products can be tested without a GPU: a warp is a
// thread, its lanes are coroutines that switch where lanes meet (shuffles, votes, __syncwarp). Lanes that wait
// for each other in any other way would wait for ever. The memory model is the host's: orders that are missing
// in a kernel show under ThreadSanitizer alone (orders.h).
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
void pause();  // in a loop that looks at memory

// Runs `body` as num_ctas CTAs of num_warps warps, all at once; returns when all have ended.
void run_ctas(unsigned num_ctas, unsigned num_warps, const std::function<void()>& body);

}  // namespace emulation
