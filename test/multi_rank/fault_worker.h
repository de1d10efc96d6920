// SPDX-License-Identifier: MIT
// A process that is a rank in one job after another, until a fault ends it; and what the campaign tells it.
#pragma once

#include <cstdint>

#include "mkernel.h"

namespace mk::test {

struct Scene {
  int32_t nranks = 0;
  int32_t num_nodes = 0;
  int32_t rank = 0;
  int32_t op = 0;           // row of fault_operators() that most calls are of
  int32_t collectives = 0;  // host-collective calls among the operators
  uint64_t seed = 0;
  int64_t peer_timeout_ms = 0;
  int64_t init_timeout_ms = 0;
};

struct Order {
  enum Kind : int32_t { kScene, kId, kAbort, kQuit };
  Kind kind = kQuit;
  Scene scene{};
  mk_unique_id_t id{};
};

// The body of the process: obeys orders from `socket` (SOCK_SEQPACKET) and answers with Reports, until kQuit or
// the socket's end.
void be_fault_worker(int socket);

}  // namespace mk::test
