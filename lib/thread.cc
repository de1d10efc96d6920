// SPDX-License-Identifier: MIT
#include "thread.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>

namespace mk {

Status start_thread(std::thread& thread, const char* name, std::function<void()> body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Status status;
  try {
    thread = std::thread(std::move(body));
    pthread_setname_np(thread.native_handle(), name);
  } catch (const std::system_error& error) {
    status = Status(MK_ERROR_SYSTEM, format("cannot start the thread %s: %s", name, error.what()));
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return status;
}

}  // namespace mk
