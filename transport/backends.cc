// SPDX-License-Identifier: MIT
#include "loopback/loopback.h"
#include "transport.h"

namespace mk {
namespace {

constexpr Backend kBackends[] = {
    {"loopback", loopback::available, loopback::create},
};

}  // namespace

std::span<const Backend> backends() { return kBackends; }

}  // namespace mk
