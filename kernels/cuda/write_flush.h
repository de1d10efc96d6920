// SPDX-License-Identifier: MIT
// Whether a GPU may trust what a NIC has written to its memory, once the host knows that it is written. Pure.
#pragma once

namespace mk {

enum class WriteFlush {
  none,        // the GPU sees such writes in order
  by_driver,   // the host has the driver flush them first
  impossible,  // neither
};

// `ordering` and `options` are the device's attributes CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING (0:
// none, 100: for the owner of the memory, 200: for all devices) and ..._FLUSH_WRITES_OPTIONS (bit 0: the host
// can flush, bit 1: so can work in a stream).
constexpr WriteFlush write_flush(int ordering, int options) {
  if (ordering >= 100) return WriteFlush::none;
  return (options & 1) != 0 ? WriteFlush::by_driver : WriteFlush::impossible;
}

}  // namespace mk
