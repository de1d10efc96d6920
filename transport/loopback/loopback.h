// SPDX-License-Identifier: MIT
// The backend for emulated nodes on one host, between processes and between threads. Other ranks' memory is not
// mapped: bytes travel through a socket, and the receiving rank's proxy puts them in place.
#pragma once

#include "../transport.h"

namespace mk::loopback {

Status available();
// MK_ERROR_UNSUPPORTED when two ranks are on different hosts, naming both. MK_LOOPBACK_SEED other than 0 makes
// this rank deliver as an Adversary does.
Result<std::unique_ptr<Transport>> create(const TransportContext& context, Deadline deadline);

}  // namespace mk::loopback
