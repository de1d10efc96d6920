// SPDX-License-Identifier: MIT
#include "loopback/loopback.h"
#include "ofi/ofi.h"
#include "transport.h"

namespace mk {
namespace {

constexpr Backend kBackends[] = {
    {"loopback", loopback::available, loopback::create},
    {"ofi", ofi::available, ofi::create},
};

}  // namespace

std::span<const Backend> backends() { return kBackends; }

}  // namespace mk
