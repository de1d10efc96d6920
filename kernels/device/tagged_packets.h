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

// Of a warp's 16 rows of `columns` columns of 16-bit elements. A lane has elements of two rows, 8 apart, and
// each row's travel in packets of their own, so that rows can go different ways. Packet i of rows 0 to 7 is
// followed by i + 1, and rows 8 to 15 lie behind.
MK_HOST_DEVICE constexpr int num_row_packets(int columns) {
  return (columns / 8 + PACKET_WORDS - 1) / PACKET_WORDS;
}
MK_HOST_DEVICE constexpr int num_packets(int columns) { return 2 * num_row_packets(columns); }
constexpr int PACKET_PITCH = 32 * 16;  // from a lane's packet to its next of the same row
MK_HOST_DEVICE constexpr int packets_bytes(int columns) { return num_packets(columns) * PACKET_PITCH; }
// Where the first packet of what lane `lane` has of row `row` lies.
MK_HOST_DEVICE constexpr int packet_place(int row, int lane, int columns) {
  return row / 8 * num_row_packets(columns) * PACKET_PITCH + (row % 8 * 4 + lane % 4) * 16;
}

}  // namespace mk
