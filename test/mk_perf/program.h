// SPDX-License-Identifier: MIT
// Runs a program the way a shell does and keeps what it says.
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

namespace program {

using Variables = std::vector<std::pair<std::string, std::string>>;

struct Outcome {
  int exit_code = -1;  // -1: killed by a signal, or by the deadline
  std::string out;
  std::string err;
};

// Started with variables added to the environment, in which no launcher shows; both outputs go to files.
class Process {
 public:
  Process(const std::string& path, const std::vector<std::string>& arguments, const Variables& variables);
  ~Process();
  Process(Process&& other) noexcept;
  Process& operator=(Process&&) = delete;

  pid_t pid() const { return pid_; }
  // Kills the process after `seconds`.
  Outcome wait(int seconds);

 private:
  pid_t pid_;
  int out_;
  int err_;
};

Outcome run(const std::string& path, const std::vector<std::string>& arguments,
            const Variables& variables = {});

}  // namespace program
