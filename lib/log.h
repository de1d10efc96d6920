// SPDX-License-Identifier: MIT
#pragma once

#include "mkernel.h"
#include "status.h"

namespace mk {

// Writes a line to the callback of mk_set_log_callback, or to standard error, when `level` is wanted.
[[gnu::format(printf, 2, 3)]] void log(mk_log_level_t level, const char* pattern, ...);
Status set_log_callback(mk_log_callback_t callback, void* user, mk_log_level_t level);

}  // namespace mk
