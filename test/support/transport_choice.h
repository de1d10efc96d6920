// SPDX-License-Identifier: MIT
#pragma once

#include <cstdlib>

namespace mk::test {

// The backend that a job runs over: MK_TRANSPORT, for runs of a test over another one than the loopback.
inline const char* test_transport() {
  const char* chosen = std::getenv("MK_TRANSPORT");
  return chosen != nullptr && *chosen != '\0' ? chosen : "loopback";
}

}  // namespace mk::test
