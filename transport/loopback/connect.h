// SPDX-License-Identifier: MIT
// Connected, mutually authenticated sockets to every rank of another node, as long as all are on one host.
#pragma once

#include <vector>

#include "../../lib/abort_token.h"
#include "../../lib/exchange.h"
#include "../../lib/file_descriptor.h"
#include "../../lib/topology.h"

namespace mk::loopback {

// By rank; closed for ranks of this node. Collective: fails on every rank or on none, also when one comes with
// an error.
Result<std::vector<FileDescriptor>> connect_peers(const Topology& topology, Exchange& exchange,
                                                  const AbortToken& abort, Status ready, Deadline deadline);

}  // namespace mk::loopback
