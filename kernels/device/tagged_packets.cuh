// SPDX-License-Identifier: MIT
// Sending, awaiting and summing what travels in tagged packets. All functions are called by whole warps.
#pragma once

#include "kernels/device/partial_sums.cuh"
#include "kernels/device/patience.cuh"
#include "kernels/device/tagged_packets.h"
#include "kernels/ptx/memory_b128.cuh"

namespace mk {

constexpr uint32_t PACKET_POLL_PAUSE_NS = 20;

// Where a lane's packets of its two rows go; null: a row that nobody wants.
struct PacketRows {
  std::byte* first;
  std::byte* second;
};

// What a lane has of one row of COLUMNS columns, rounded to T: every other pair of its accumulators.
template <class T, int COLUMNS>
__device__ __forceinline__ void store_row_packets(const float* values, std::byte* to, uint32_t tag) {
#pragma unroll
  for (int i = 0; i < num_row_packets(COLUMNS); ++i) {
    uint32_t words[PACKET_WORDS] = {};
#pragma unroll
    for (int j = 0; j < PACKET_WORDS; ++j) {
      const int word = i * PACKET_WORDS + j;
      if (word < COLUMNS / 8) words[j] = pack_pair<T>(values[4 * word], values[4 * word + 1]);
    }
    ptx::st_relaxed_sys_b128(to + i * PACKET_PITCH, make_uint4(words[0], words[1], words[2], tag));
  }
}

template <class T, int COLUMNS>
__device__ __forceinline__ void store_packets_as(const float* values, const PacketRows& to, int offset,
                                                 uint32_t tag) {
  if (to.first != nullptr) store_row_packets<T, COLUMNS>(values, to.first + offset, tag);
  if (to.second != nullptr) store_row_packets<T, COLUMNS>(values + 2, to.second + offset, tag);
}

// A lane's COLUMNS / 2 accumulators, `offset` bytes behind `to`.
template <int COLUMNS>
__device__ __forceinline__ void store_packets(const float* values, GemmType type, const PacketRows& to,
                                              int offset, uint32_t tag) {
  if (type == GemmType::fp16) {
    store_packets_as<__half, COLUMNS>(values, to, offset, tag);
  } else {
    store_packets_as<__nv_bfloat16, COLUMNS>(values, to, offset, tag);
  }
}

// One look at them: have all of this lane's come? `from`: the first row's; the second's are `second` bytes on.
template <int NUM>
__device__ __forceinline__ bool load_packets(uint4 (&packets)[NUM], const std::byte* from, int second,
                                             uint32_t tag) {
#pragma unroll
  for (int i = 0; i < NUM / 2; ++i) {
    packets[i] = ptx::ld_relaxed_sys_b128(from + i * PACKET_PITCH);
    packets[NUM / 2 + i] = ptx::ld_relaxed_sys_b128(from + second + i * PACKET_PITCH);
  }
  bool have_come = true;
#pragma unroll
  for (int i = 0; i < NUM; ++i) have_come = have_come && packets[i].w == tag;
  return have_come;
}

template <class T, int NUM, int N>
__device__ __forceinline__ void add_packets(float (&sums)[N], const uint4 (&packets)[NUM]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const int word = i / 2;  // of the first row and the second in turn
    const uint4& packet = packets[i % 2 * (NUM / 2) + word / PACKET_WORDS];
    const int place = word % PACKET_WORDS;
    add_pair<T>(sums + 2 * i, place == 0 ? packet.x : place == 1 ? packet.y : packet.z);
  }
}

// Adds what `num_sources` sources have sent to `sums`, in their order. A unit begins at `first`, and from
// source to source it is `source_bytes`; only its first `num_rows` rows come, and what is summed of the others
// is of no use. waits(source): after a look in vain; false, and then here, too: the launch is to end.
template <class T, int N, class Waits>
__device__ __forceinline__ bool sum_packets_as(float (&sums)[N], const std::byte* first, int64_t source_bytes,
                                               int num_sources, int num_rows, uint32_t tag, Waits&& waits) {
  constexpr int SOURCES = 4;  // read together
  // Lanes without rows read along with others.
  const int lane = threadIdx.x % 32;
  const int first_row = packet_place(min(lane / 4, num_rows - 1), lane, 2 * N);
  const int second = packet_place(min(lane / 4 + 8, num_rows - 1), lane, 2 * N) - first_row;
  first += first_row;
#pragma unroll 1
  for (int group = 0; group < num_sources; group += SOURCES) {
    uint4 packets[SOURCES][num_packets(2 * N)];
    bool have_come[SOURCES];
#pragma unroll
    for (int s = 0; s < SOURCES; ++s) have_come[s] = group + s >= num_sources;
    while (true) {
      int missing = -1;
#pragma unroll
      for (int s = SOURCES - 1; s >= 0; --s) {
        if (!have_come[s])
          have_come[s] = load_packets(packets[s], first + (group + s) * source_bytes, second, tag);
      }
#pragma unroll
      for (int s = SOURCES - 1; s >= 0; --s) {
        if (!__all_sync(~0u, have_come[s])) missing = group + s;
      }
      if (missing < 0) break;
      if (!waits(missing)) return false;
    }
#pragma unroll
    for (int s = 0; s < SOURCES; ++s) {
      if (group + s < num_sources) add_packets<T>(sums, packets[s]);
    }
  }
  return true;
}

template <int N, class Waits>
__device__ __forceinline__ bool sum_packets(float (&sums)[N], GemmType type, const std::byte* first,
                                            int64_t source_bytes, int num_sources, int num_rows, uint32_t tag,
                                            Waits&& waits) {
  return type == GemmType::fp16
             ? sum_packets_as<__half>(sums, first, source_bytes, num_sources, num_rows, tag, waits)
             : sum_packets_as<__nv_bfloat16>(sums, first, source_bytes, num_sources, num_rows, tag, waits);
}

}  // namespace mk
