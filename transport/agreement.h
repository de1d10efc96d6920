// SPDX-License-Identifier: MIT
// One step of connecting a backend: every rank's card, or the same failure on every rank.
#pragma once

#include <vector>

#include "../lib/exchange.h"

namespace mk {

// Collective. Gathers `card`, or this rank's failure when `mine` is not ok. If any rank failed, all return a
// failure of its code: this rank its own, the others one that names the rank.
Result<std::vector<Bytes>> agree(const Status& mine, std::span<const std::byte> card, Exchange& exchange,
                                 Deadline deadline, const char* what);

}  // namespace mk
