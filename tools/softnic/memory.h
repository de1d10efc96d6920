// SPDX-License-Identifier: MIT
// Where the bytes of a request are, and who copies them: the receiving NIC, straight from the sender's memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "packet.h"
#include "wire.h"

namespace softnic {

// Copies payload bytes [offset, offset + bytes) of a request to `target`. Returns 0 or an errno: ESRCH when the
// sender's process is gone, EPERM when the kernel forbids to read its memory.
int fetch(const Link& link, const Packet& request, uint64_t offset, std::byte* target, size_t bytes);

// The same for a piece of the sender's memory.
int fetch_segment(const Link& link, uint64_t address, std::byte* target, size_t bytes);

// Lets processes of the same user read this one's memory, where the kernel asks for that (Yama).
void permit_fetching();

}  // namespace softnic
