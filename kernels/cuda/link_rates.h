// SPDX-License-Identifier: MIT
// What plans take links for.
#pragma once

namespace mk {

// All 18 NVLinks of a GPU, to one peer.
constexpr double LINK_BYTES_PER_US = 363e3;
// A NIC of 400 Gb/s a GPU.
constexpr double NETWORK_BYTES_PER_US = 50e3;

}  // namespace mk
