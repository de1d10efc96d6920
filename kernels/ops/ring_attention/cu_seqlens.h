// SPDX-License-Identifier: MIT
// The prefix sums of packed sequences: what is wrong with them, and the hash by which ranks compare theirs.
// Host and device; entries are looked at one by one, in any order.
#pragma once

#include <cstdint>

#include "../../device/host_device.h"

namespace mk::ring_attention {

// An entry that is wrong, and what the sentence about it needs.
struct CuSeqlensFault {
  int64_t seq;
  int32_t index;
  int32_t num_sequences;
  int32_t before;  // the entry before it
  int32_t seen;
};

// 0 at the start, never falling, seq at the end.
MK_HOST_DEVICE bool is_good_entry(const int32_t* cu_seqlens, int index, int num_sequences, int64_t seq) {
  const int32_t seen = cu_seqlens[index];
  if (index == 0) return seen == 0;
  return seen >= cu_seqlens[index - 1] && (index < num_sequences || seen == seq);
}
MK_HOST_DEVICE CuSeqlensFault fault_of(const int32_t* cu_seqlens, int index, int num_sequences, int64_t seq) {
  return {seq, index, num_sequences, index > 0 ? cu_seqlens[index - 1] : 0, cu_seqlens[index]};
}

// The hash is the sum of these modulo 2^64, so that threads can share it out (the mixing is splitmix64's).
MK_HOST_DEVICE uint64_t hash_of_entry(int index, int32_t value) {
  uint64_t bits = (static_cast<uint64_t>(static_cast<uint32_t>(index)) << 32 | static_cast<uint32_t>(value)) +
                  0x9e3779b97f4a7c15ull;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ull;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebull;
  return bits ^ (bits >> 31);
}

}  // namespace mk::ring_attention
