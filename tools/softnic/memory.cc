// SPDX-License-Identifier: MIT
#include "memory.h"

#include <sys/prctl.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace softnic {

int fetch_segment(const Link& link, uint64_t address, std::byte* target, size_t bytes) {
  void* const source = reinterpret_cast<void*>(address);
  if (link.inbox != nullptr) {
    std::memcpy(target, source, bytes);
    return 0;
  }
  iovec local{target, bytes};
  iovec remote{source, bytes};
  while (local.iov_len > 0) {
    const ssize_t got = process_vm_readv(link.pid, &local, 1, &remote, 1, 0);
    if (got <= 0) return got == 0 ? EFAULT : errno;
    const size_t done = static_cast<size_t>(got);
    local = {static_cast<std::byte*>(local.iov_base) + done, local.iov_len - done};
    remote = {static_cast<std::byte*>(remote.iov_base) + done, remote.iov_len - done};
  }
  return 0;
}

int fetch(const Link& link, const Packet& request, uint64_t offset, std::byte* target, size_t bytes) {
  if (request.is_inline != 0) {
    std::memcpy(target, request.payload.inline_data + offset, bytes);
    return 0;
  }
  for (uint32_t index = 0; index < request.num_segments && bytes > 0; ++index) {
    const Segment& segment = request.payload.segments[index];
    if (offset >= segment.bytes) {
      offset -= segment.bytes;
      continue;
    }
    const size_t part = std::min<size_t>(bytes, segment.bytes - offset);
    if (const int error = fetch_segment(link, segment.address + offset, target, part); error != 0) return error;
    target += part;
    bytes -= part;
    offset = 0;
  }
  return bytes == 0 ? 0 : EINVAL;
}

void permit_fetching() { prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); }

}  // namespace softnic
