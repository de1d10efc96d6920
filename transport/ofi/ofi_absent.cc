// SPDX-License-Identifier: MIT
#include "ofi.h"

namespace mk::ofi {

Status available() {
  return Status(MK_ERROR_UNSUPPORTED,
                "this library was built without libfabric's headers; install libfabric-dev and build again");
}

Result<std::unique_ptr<Transport>> create(const TransportContext&, Deadline) { return available(); }

}  // namespace mk::ofi
