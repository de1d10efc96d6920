// SPDX-License-Identifier: MIT
// Packets of 16 bytes, which a reader sees whole or not at all: three words, and the low half of the launch's
// epoch as a tag. So few bytes travel between ranks without the fence and the flag that would cost more time
// than they do. The memory that they come to holds nothing else: no other launch's words pass for this one's.
#pragma once

#include <cstddef>

#include "kernels/device/host_device.h"

namespace mk {

constexpr int PACKET_WORDS = 3;
// Of that memory, two banks of which every rank has.
constexpr size_t PACKET_BANK_BYTES = size_t{16} << 20;

// Of a warp's 16 rows of `columns` columns of 16-bit elements: packet i of all lanes is followed by i + 1.
MK_HOST_DEVICE constexpr int num_packets(int columns) {
  return (columns / 4 + PACKET_WORDS - 1) / PACKET_WORDS;
}
MK_HOST_DEVICE constexpr int packets_bytes(int columns) { return num_packets(columns) * 32 * 16; }

}  // namespace mk
