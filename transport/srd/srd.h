// SPDX-License-Identifier: MIT
// Scalable reliable datagrams of AWS EFA: one queue pair a NIC, an address handle for each link, no order.
#pragma once

#include "../transport.h"

namespace mk::srd {

Status available();
Result<std::unique_ptr<Transport>> create(const TransportContext& context, Deadline deadline);
NicSurvey survey(const Topology& topology, const std::string& pci_bus_id);

}  // namespace mk::srd
