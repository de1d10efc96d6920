// SPDX-License-Identifier: MIT
// Reliable connections over InfiniBand and RoCE: a queue pair for each link to each peer.
#pragma once

#include "../transport.h"

namespace mk::rc {

Status available();
Result<std::unique_ptr<Transport>> create(const TransportContext& context, Deadline deadline);
NicSurvey survey(const Topology& topology, const std::string& pci_bus_id);

}  // namespace mk::rc
