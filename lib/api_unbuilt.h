// SPDX-License-Identifier: MIT
// What operators that are not built yet answer.
#pragma once

#include "api.h"
#include "struct_size.h"

namespace mk::api {

// Checks handle and struct, then says that the operator is not there.
template <class Struct>
mk_status_t unsupported(mk_comm_t comm, const char* function, const Struct* argument) {
  return with_communicator(comm, function, [&](Communicator& communicator) -> Status {
    MK_RETURN_IF_ERROR(communicator.usable());
    Struct copy;
    MK_RETURN_IF_ERROR(read_struct(argument, sizeof(Struct), format("%s: argument", function).c_str(), copy));
    return Status(MK_ERROR_UNSUPPORTED,
                  format("%s: this operator is not built yet; libmkernel %d.%d has the GEMM operators",
                         function, MK_VERSION_MAJOR, MK_VERSION_MINOR));
  });
}

}  // namespace mk::api

#define MK_UNBUILT_OPERATOR(name, maxima_type)                                                  \
  mk_status_t mk_##name##_prepare(mk_comm_t comm, const maxima_type* maxima) {                  \
    return unsupported(comm, "mk_" #name "_prepare", maxima);                                   \
  }                                                                                             \
  mk_status_t mk_##name##_workspace_bytes(mk_comm_t comm, const maxima_type* maxima, size_t*) { \
    return unsupported(comm, "mk_" #name "_workspace_bytes", maxima);                           \
  }                                                                                             \
  mk_status_t mk_##name##_plan(mk_comm_t comm, const mk_##name##_args_t* args, mk_plan_t*) {    \
    return unsupported(comm, "mk_" #name "_plan", args);                                        \
  }                                                                                             \
  mk_status_t mk_##name(mk_comm_t comm, const mk_##name##_args_t* args, mk_stream_t) {          \
    return unsupported(comm, "mk_" #name, args);                                                \
  }
