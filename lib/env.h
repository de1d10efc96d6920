// SPDX-License-Identifier: MIT
// Every environment variable that the library reads, in one table (`mk-perf --env` prints it).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "mkernel.h"
#include "status.h"

namespace mk::env {

struct Variable {
  const char* name;
  const char* default_value;
  const char* description;
};

// Variable number `index` of the table, nullptr past the end.
const Variable* variable(size_t index);

// The value set in the environment, nullptr if unset.
const char* value(const char* name);
// The value set in the environment, else the default. MK_ERROR_INVALID_ARGUMENT names variable, expected and
// seen.
std::string text(const char* name);
Result<int64_t> integer(const char* name, int64_t low, int64_t high);

}  // namespace mk::env
