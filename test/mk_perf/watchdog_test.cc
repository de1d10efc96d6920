// SPDX-License-Identifier: MIT
#include "watchdog.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "errors.h"
#include "test/support/catch.h"

using namespace perf;

TEST_CASE("a call that ends in time is left alone") {
  const auto start = std::chrono::steady_clock::now();
  { const Watchdog watchdog(std::chrono::seconds(60), "a short call"); }
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30));
}

TEST_CASE("a process that is stuck in a call says where and ends") {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    const Watchdog watchdog(std::chrono::seconds(1), "rank 3: a call that hangs");
    std::this_thread::sleep_for(std::chrono::seconds(60));
    _exit(0);
  }
  close(ends[1]);
  char text[256] = {};
  CHECK(read(ends[0], text, sizeof text - 1) > 0);
  close(ends[0]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == kExitFailure);
  CHECK(std::string(text).find("rank 3: a call that hangs has not ended within 1 s") != std::string::npos);
}
