// SPDX-License-Identifier: MIT
// A rank's endpoint, and what it must know of its peers' endpoints to send to them.
#pragma once

#include <memory>
#include <vector>

#include "../../lib/exchange.h"
#include "../../lib/topology.h"
#include "fabric.h"
#include "wire.h"

namespace mk::ofi {

struct PeerAddress {
  fi_addr_t address = FI_ADDR_UNSPEC;
  Token token{};  // that it wants to see
};

struct Opened {
  std::unique_ptr<Fabric> fabric;
  Token token;                     // that this rank wants to see
  std::vector<PeerAddress> peers;  // by rank; unspecified for ranks of this node
};

// Collective: fails on every rank or on none, also when one comes with an error. Nothing has been sent yet.
Result<Opened> open_endpoint(const Library& library, const Topology& topology, Exchange& exchange,
                             const Status& ready, size_t operations, Deadline deadline);

}  // namespace mk::ofi
