// SPDX-License-Identifier: MIT
#pragma once

#include <stdexcept>
#include <string>

#include "mkernel.h"

namespace perf {

enum ExitCode { kExitSuccess = 0, kExitFailure = 1, kExitUsage = 2 };

// The command line asks for what cannot be: exit code 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The run failed; the command line was fine: exit code 1.
struct RunError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A call of the library failed.
struct LibraryError : std::runtime_error {
  LibraryError(const char* what, mk_status_t library_status, mk_comm_t comm)
      : std::runtime_error(std::string(what) + ": " + mk_status_string(library_status) + ": " +
                           mk_get_last_error(comm)),
        status(library_status) {}
  mk_status_t status;
};

inline void require(mk_status_t status, const char* what, mk_comm_t comm) {
  if (status != MK_SUCCESS) throw LibraryError(what, status, comm);
}

// What an exit with this exception means to a shell: asking for what this machine or version does not have is a
// matter of usage.
inline ExitCode exit_code_of(const std::exception& error) {
  if (dynamic_cast<const UsageError*>(&error)) return kExitUsage;
  const auto* library = dynamic_cast<const LibraryError*>(&error);
  return library && library->status == MK_ERROR_UNSUPPORTED ? kExitUsage : kExitFailure;
}

}  // namespace perf
