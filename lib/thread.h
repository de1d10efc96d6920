// SPDX-License-Identifier: MIT
#pragma once

#include <functional>
#include <thread>

#include "status.h"

namespace mk {

// Starts a thread of the library: named for debuggers (at most 15 characters), and with every signal blocked,
// so that the application's handlers run in the application's threads. MK_ERROR_SYSTEM when the system has none
// to give.
Status start_thread(std::thread& thread, const char* name, std::function<void()> body);

}  // namespace mk
