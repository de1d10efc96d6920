// SPDX-License-Identifier: MIT
// What the 128 bytes of mk_unique_id_t say.
#pragma once

#include "authentication.h"
#include "mkernel.h"
#include "socket.h"

namespace mk {

struct UniqueId {
  SocketAddress root;
  uint64_t job = 0;  // tells jobs apart in this process' bookkeeping; no secret
  Secret secret{};
};

mk_unique_id_t encode_unique_id(const UniqueId& id);
// MK_ERROR_INVALID_ARGUMENT when the bytes were not made by encode_unique_id of this version.
Result<UniqueId> decode_unique_id(const mk_unique_id_t& bytes);

}  // namespace mk
