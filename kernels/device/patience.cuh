// SPDX-License-Identifier: MIT
// How long a role that gets nowhere goes on looking at something else than a flag.
#pragma once

#include "kernels/device/rank_launch.cuh"

namespace mk {

// One thread's.
class Patience {
 public:
  __device__ Patience(const RankLaunch& launch, uint32_t pause_ns)
      : launch_(launch), since_(ptx::globaltimer()), pause_ns_(pause_ns) {}

  __device__ void progressed() { since_ = ptx::globaltimer(); }
  // After a look in vain. False: the launch is to end.
  __device__ bool goes_on(const WaitedFor& wait) {
    __nanosleep(pause_ns_);
    if (++num_looks_ % POLLS_PER_LOOK != 0) return true;
    if (launch_.stopped()) return false;
    if (!launch_.is_overdue(since_)) return true;
    launch_.report_overdue(wait);
    return false;
  }
  // The same by a whole warp, which it does not part (see store_tile_rows()); `wait`: the first lane's.
  __device__ bool warp_goes_on(const WaitedFor& wait) {
    __nanosleep(pause_ns_);
    if (++num_looks_ % POLLS_PER_LOOK != 0) return true;
    const bool leads = threadIdx.x % 32 == 0;
    if (__any_sync(~0u, leads && launch_.stopped())) return false;
    const bool is_overdue = launch_.is_overdue(since_);
    if (!__any_sync(~0u, leads && is_overdue)) return true;
    if (leads) launch_.report_overdue(wait);
    __syncwarp();
    return false;
  }

 private:
  const RankLaunch& launch_;
  uint64_t since_;
  const uint32_t pause_ns_;
  int num_looks_ = 0;
};

}  // namespace mk
