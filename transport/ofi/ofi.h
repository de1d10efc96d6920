// SPDX-License-Identifier: MIT
// The backend over libfabric: any of its providers that has reliable datagrams with remote writes. The `tcp`
// provider is the default, so that machines with plain Ethernet are connected without further ado.
#pragma once

#include "../transport.h"

namespace mk::ofi {

struct Library;
class DeviceCopies;

// MK_ERROR_UNSUPPORTED: built without libfabric's headers, no libfabric.so.1, or no such provider here.
Status available();
// Provider: MK_OFI_PROVIDER. Interface, of providers with IP addresses: MK_SOCKET_IFNAME, and among what it
// allows the one in rank 0's subnet.
Result<std::unique_ptr<Transport>> create(const TransportContext& context, Deadline deadline);
// create with a library of the caller's, which outlives the transport, and with other copies than CUDA's: tests
// put faults into both.
Result<std::unique_ptr<Transport>> create_with(const Library& library, const TransportContext& context,
                                               Deadline deadline, std::unique_ptr<DeviceCopies> copies);

}  // namespace mk::ofi
