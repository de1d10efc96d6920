// SPDX-License-Identifier: MIT
// The other process of a test.
#pragma once

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>

#include "../support/catch.h"

namespace softnic_test {

// A child process that runs `body` with one end of a socket and ends with 0 if that returns true.
class Child {
 public:
  explicit Child(const std::function<bool(int)>& body) {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    process_ = fork();
    REQUIRE(process_ >= 0);
    if (process_ == 0) {
      close(ends[0]);
      alarm(60);
      _exit(body(ends[1]) ? 0 : 1);
    }
    close(ends[1]);
    socket_ = ends[0];
  }
  ~Child() {
    close(socket_);
    if (process_ > 0) {
      kill(process_, SIGKILL);
      waitpid(process_, nullptr, 0);
    }
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  int socket() const { return socket_; }
  void kill_now() { REQUIRE(kill(process_, SIGKILL) == 0); }
  // Returns once all its threads have stopped.
  void stop() {
    int status = 0;
    REQUIRE(kill(process_, SIGSTOP) == 0);
    REQUIRE(waitpid(process_, &status, WUNTRACED) == process_);
    REQUIRE(WIFSTOPPED(status));
  }
  int wait() {
    int status = -1;
    waitpid(process_, &status, 0);
    process_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t process_ = -1;
  int socket_ = -1;
};

template <class T>
bool give(int socket, const T& value) {
  return send(socket, &value, sizeof(value), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(value));
}

template <class T>
bool take(int socket, T& value) {
  return recv(socket, &value, sizeof(value), MSG_WAITALL) == static_cast<ssize_t>(sizeof(value));
}

}  // namespace softnic_test
