// SPDX-License-Identifier: MIT
#include "loopback/loopback.h"
#include "ofi/ofi.h"
#include "rc/rc.h"
#include "srd/srd.h"
#include "transport.h"

namespace mk {
namespace {

constexpr Backend kBackends[] = {
    {"rc", rc::available, rc::create, true, rc::survey},
    {"srd", srd::available, srd::create, true, srd::survey},
    {"loopback", loopback::available, loopback::create},
    {"ofi", ofi::available, ofi::create, true},
};

}  // namespace

std::span<const Backend> backends() { return kBackends; }

std::string backend_names(std::span<const Backend> backends) {
  std::string names;
  for (const Backend& backend : backends) names += (names.empty() ? "" : ", ") + std::string(backend.name);
  return names;
}

}  // namespace mk
