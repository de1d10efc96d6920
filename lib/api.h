// SPDX-License-Identifier: MIT
// What the files of the C interface share: from handle to communicator, from Status to mk_status_t.
#pragma once

#include <functional>
#include <memory>

#include "communicator.h"
#include "handle_table.h"

namespace mk::api {

HandleTable<Communicator>& communicators();

// Records the sentence for mk_get_last_error and returns the code.
mk_status_t finish(const Status& status, Communicator* communicator = nullptr);

// Runs `body` with the communicator, alone: checks handle and concurrent use, records the error.
mk_status_t with_communicator(mk_comm_t comm, const char* function,
                              const std::function<Status(Communicator&)>& body);
// The same for host-collective calls: inside a group `body` runs at mk_group_end; it must then own what it
// uses.
mk_status_t host_collective(mk_comm_t comm, const char* function, std::function<Status(Communicator&)> body);

}  // namespace mk::api
