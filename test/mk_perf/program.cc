// SPDX-License-Identifier: MIT
#include "program.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <thread>

namespace program {
namespace {

constexpr int kDeadlineSeconds = 120;

std::string contents(int fd) {
  std::string text;
  char buffer[4096];
  lseek(fd, 0, SEEK_SET);
  for (ssize_t count; (count = read(fd, buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<size_t>(count));
  return text;
}

[[noreturn]] void execute(const std::string& path, const std::vector<std::string>& arguments,
                          const Variables& variables, int out, int err) {
  for (const char* name : {"MK_RANK", "MK_NRANKS", "MK_UNIQUE_ID", "RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
                           "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"}) {
    unsetenv(name);
  }
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> argv = {const_cast<char*>(path.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  execv(path.c_str(), argv.data());
  _exit(127);
}

}  // namespace

Process::Process(const std::string& path, const std::vector<std::string>& arguments, const Variables& variables)
    : pid_(-1), out_(memfd_create("out", MFD_CLOEXEC)), err_(memfd_create("err", MFD_CLOEXEC)) {
  if (out_ < 0 || err_ < 0) throw std::runtime_error("memfd_create");
  pid_ = fork();
  if (pid_ < 0) throw std::runtime_error("fork");
  if (pid_ == 0) execute(path, arguments, variables, out_, err_);
}

Process::Process(Process&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      out_(std::exchange(other.out_, -1)),
      err_(std::exchange(other.err_, -1)) {}

Process::~Process() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  if (out_ >= 0) close(out_);
  if (err_ >= 0) close(err_);
}

Outcome Process::wait(int seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  int status = 0;
  while (waitpid(pid_, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline) kill(pid_, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  pid_ = -1;
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, contents(out_), contents(err_)};
}

Outcome run(const std::string& path, const std::vector<std::string>& arguments, const Variables& variables) {
  return Process(path, arguments, variables).wait(kDeadlineSeconds);
}

}  // namespace program
