// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "deadline.h"
#include "status.h"

namespace mk {

using Bytes = std::vector<std::byte>;

// What the set-up steps of the other layers (symmetric memory, transports) need of the bootstrap.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual int rank() const = 0;
  virtual int nranks() const = 0;
  // Every rank's block, by rank. Collective: same order on every rank. `what` names the step in errors.
  // At most kMaxBlockBytes a rank. MK_ERROR_TIMEOUT names the ranks that are missing; the reason of the abort
  // token when that is raised.
  virtual Result<std::vector<Bytes>> all_gather(std::span<const std::byte> mine, Deadline deadline,
                                                const char* what) = 0;
  static constexpr size_t kMaxBlockBytes = 1 << 20;
};

}  // namespace mk
