// SPDX-License-Identifier: MIT
// What stands in for the products of ring attention's gradients on an emulated GPU: parts of known numbers,
// stored and looked at as a consumer's warps do it.
#pragma once

#include "shim/device_words.h"

#include <string>

#include "emulated_gpu.h"
#include "kernels/ops/ring_attention_backward/cuda_network.cuh"

namespace mk::test {

struct GradientConfig {
  static constexpr int NUM_CONSUMER_WARPS = 2;
  // Before them a producer's four warps; the network has five roles.
  static constexpr int NUM_THREADS = 32 * (4 + NUM_CONSUMER_WARPS);
  static constexpr int HEAD_DIM = 64;
  static constexpr int BLOCK_M = ring_attention_backward::TILE_ROWS;
  static constexpr int BLOCK_N = ring_attention_backward::BLOCK_ROWS;
  static constexpr int NUM_COLUMN_BLOCKS = 1;
  static constexpr int KEY_COLUMN_BYTES = BLOCK_N * 128;
  static constexpr int KEY_BYTES = KEY_COLUMN_BYTES;
};

// What a CTA that computes has in shared memory.
struct GradientComputeSmem {
  ring_attention::KeyPushStorage push;
  PushSignals<GradientConfig::NUM_CONSUMER_WARPS> stored;
  alignas(128) uint8_t room[ring_attention::KEY_PUSH_BYTES<GradientConfig>];
};

// As run_compute_cta(): stand_in(warp) is a consumer's warp.
template <class Params, class StandIn>
void run_gradient_roles(const RankLaunch& launch, const Params& params, GradientComputeSmem& smem, int push_cta,
                        StandIn&& stand_in) {
  if (threadIdx.x == 0) {
    ring_attention::key_push_init(smem.push);
    push_signals_init(smem.stored);
  }
  __syncthreads();
  const auto warp = static_cast<int>(threadIdx.x / 32);
  if (warp == 0) {
    if (push_cta >= 0) ring_attention::signal_keys<GradientConfig>(launch, params, smem.push);
  } else if (warp < 4) {
    if (push_cta >= 0)
      ring_attention::push_keys<GradientConfig>(launch, params, smem.push, smem.room, warp - 1, push_cta);
    if (warp == 1) signal_parts(launch, params, smem.stored);
  } else {
    stand_in(warp - 4);
  }
}

// Word `at` of a warp's share of a part.
inline float part_word(uint64_t epoch, int source, int owner, const ring_attention_backward::KeyTile& tile,
                       int warp, int at) {
  const uint64_t of_tile = static_cast<uint64_t>((tile.head * 2 + tile.run) * 64 + tile.index);
  const uint64_t mixed = (epoch * 131 + static_cast<uint64_t>(source * 37 + owner)) * 4099 + of_tile * 257 +
                         static_cast<uint64_t>(warp) * 8191 + static_cast<uint64_t>(at);
  return static_cast<float>(mixed % 16777213);
}

constexpr int kShareWords =
    2 * ring_attention_backward::TILE_ROWS * GradientConfig::HEAD_DIM / GradientConfig::NUM_CONSUMER_WARPS;

template <class Params>
float* share_of(const RankLaunch& launch, const Params& params, int rank, int slot,
                const ring_attention_backward::KeyTile& tile, int warp) {
  return reinterpret_cast<float*>(launch.area(rank, part_offset(params, slot, tile))) +
         static_cast<size_t>(warp) * kShareWords;
}

// This rank's part of another one's keys.
template <class Params>
void store_share(const RankLaunch& launch, const Params& params, const ring_attention_backward::KeyTile& tile,
                 int warp) {
  const int owner = source_of(params, tile.step);
  float* const part =
      share_of(launch, params, part_receiver(params, tile), part_slot(params, tile), tile, warp);
  for (int at = static_cast<int>(threadIdx.x % 32); at < kShareWords; at += 32)
    part[at] = part_word(launch.epoch(), params.comm.rank, owner, tile, warp, at);
  __syncwarp();
}

// Parts of own keys, as the producer waits for them, and as a consumer warp finds them.
template <class Params, class Say>
void look_at_shares(const RankLaunch& launch, const Params& params,
                    const ring_attention_backward::KeyTile& tile, int warp, Say&& say) {
  const int rank = params.comm.rank, nranks = params.comm.nranks;
  for (int step = 1; step < nranks; ++step) {
    const int source = (rank + step) % nranks;
    if (!has_part(params, source, tile)) continue;
    bool has_come = true;
    if (threadIdx.x % 32 == 0) {
      const int flag = params.panels.part_flag(step, tile.head, tile.run, tile.index);
      has_come = launch.wait_flag(flag, DeviceRole::reduce, DeviceObject::partial, source, flag);
    }
    if (__shfl_sync(~0u, static_cast<int>(has_come), 0) == 0) continue;
    // Slots of a rank's own keys lie one behind the other.
    const float* const part = share_of(launch, params, rank, 1, tile, warp) +
                              static_cast<size_t>(step - 1) * params.panels.slot_bytes() / sizeof(float);
    for (int at = static_cast<int>(threadIdx.x % 32); at < kShareWords; at += 32) {
      if (part[at] == part_word(launch.epoch(), source, rank, tile, warp, at)) continue;
      say(format("rank %d's part of head %d, run %d, tile %d is wrong at %d; ", source, tile.head, tile.run,
                 tile.index, at));
      break;
    }
    __syncwarp();
  }
}

}  // namespace mk::test
