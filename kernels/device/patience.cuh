// SPDX-License-Identifier: MIT
// How long a role that gets nowhere goes on looking at something else than a flag.
#pragma once

#include "kernels/device/rank_launch.cuh"

namespace mk {

// What a role waits for, so that its deadline can say it.
struct WaitedFor {
  DeviceRole role;
  DeviceObject object;
  int peer;
  uint64_t index;
  uint64_t seen;
  uint64_t expected;
};

// One thread's.
class Patience {
 public:
  __device__ Patience(const RankLaunch& launch, const RankComm& comm, uint32_t pause_ns)
      : launch_(launch), comm_(comm), since_(ptx::globaltimer()), pause_ns_(pause_ns) {}

  __device__ void progressed() { since_ = ptx::globaltimer(); }
  // After a look in vain. False: the launch is to end.
  __device__ bool goes_on(const WaitedFor& wait) {
    __nanosleep(pause_ns_);
    if (++num_looks_ % POLLS_PER_LOOK != 0) return true;
    if (launch_.stopped()) return false;
    const uint64_t now = ptx::globaltimer();
    // A peer that has not entered is waited for as long as its heartbeat lives.
    if (ptx::ld_relaxed_sys(&comm_.state->entered_epoch) < launch_.epoch()) since_ = now;
    if (now <= since_ + comm_.wait_timeout_ns) return true;
    if (launch_.report(DEVICE_TIMEOUT, wait.role, wait.object, wait.peer, wait.index)) {
      comm_.mailbox->error.seen = wait.seen;
      comm_.mailbox->error.expected = wait.expected;
      launch_.publish_error();
    }
    return false;
  }
  // The same by a whole warp, which it does not part (see store_tile_rows()); `wait`: the first lane's.
  __device__ bool warp_goes_on(const WaitedFor& wait) {
    __nanosleep(pause_ns_);
    if (++num_looks_ % POLLS_PER_LOOK != 0) return true;
    const bool leads = threadIdx.x % 32 == 0;
    if (__any_sync(~0u, leads && launch_.stopped())) return false;
    const uint64_t now = ptx::globaltimer();
    if (ptx::ld_relaxed_sys(&comm_.state->entered_epoch) < launch_.epoch()) since_ = now;
    if (!__any_sync(~0u, leads && now > since_ + comm_.wait_timeout_ns)) return true;
    if (leads && launch_.report(DEVICE_TIMEOUT, wait.role, wait.object, wait.peer, wait.index)) {
      comm_.mailbox->error.seen = wait.seen;
      comm_.mailbox->error.expected = wait.expected;
      launch_.publish_error();
    }
    __syncwarp();
    return false;
  }

 private:
  const RankLaunch& launch_;
  const RankComm& comm_;
  uint64_t since_;
  const uint32_t pause_ns_;
  int num_looks_ = 0;
};

}  // namespace mk
