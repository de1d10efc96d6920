// SPDX-License-Identifier: MIT
// libfabric's few exported functions, loaded at run time. All others go through tables in its objects.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_rma.h>

#include "../../lib/status.h"

namespace mk::ofi {

struct Library {
  decltype(&::fi_getinfo) getinfo;
  decltype(&::fi_freeinfo) freeinfo;
  decltype(&::fi_dupinfo) dupinfo;
  decltype(&::fi_fabric) fabric;
  decltype(&::fi_strerror) strerror;
  decltype(&::fi_version) version;
};

// Loaded on the first call, for the life of the process. MK_ERROR_UNSUPPORTED says what is missing.
Result<const Library*> load_library();

// libfabric's words for a negative return value or a positive error number.
std::string describe(const Library& library, ssize_t error);

}  // namespace mk::ofi
