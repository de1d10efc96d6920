// SPDX-License-Identifier: MIT
// The threads of the roots of this process.
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "bootstrap_root.h"
#include "thread.h"

namespace mk {
namespace {

struct RunningRoot {
  uint64_t job = 0;
  FileDescriptor stop;
  bool ended = false;
  std::thread thread;
};

void ring(const FileDescriptor& event) {
  if (!event.valid()) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(event.get(), &one, sizeof one);
}

class RootRegistry {
 public:
  ~RootRegistry() {
    forget_parents_threads();
    {
      std::lock_guard lock(mutex_);
      for (RunningRoot& root : roots_) ring(root.stop);
    }
    for (RunningRoot& root : roots_) root.thread.join();
  }

  Status start(FileDescriptor listener, const UniqueId& id, std::chrono::milliseconds lifetime) {
    std::lock_guard lock(mutex_);
    forget_parents_threads();
    reap();
    RunningRoot& root = roots_.emplace_back();
    root.job = id.job;
    root.stop = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!root.stop.valid()) {
      roots_.pop_back();
      return Status(MK_ERROR_SYSTEM, format("no descriptor for the root: %s", std::strerror(errno)));
    }
    auto server = std::make_shared<Root>(std::move(listener), id, lifetime, root.stop.get());
    Status started = start_thread(root.thread, "mk-root", [this, server = std::move(server), &root]() mutable {
      server->run();
      // The descriptors go when the job has been served, not when the thread is joined.
      server.reset();
      std::lock_guard retiring(mutex_);
      root.stop.reset();
      root.ended = true;
    });
    if (!started.ok()) roots_.pop_back();
    return started;
  }

  void stop(uint64_t job) {
    std::lock_guard lock(mutex_);
    for (RunningRoot& root : roots_) {
      if (root.job == job) ring(root.stop);
    }
  }

  void reap_ended() {
    std::lock_guard lock(mutex_);
    forget_parents_threads();
    reap();
  }

 private:
  // A child of fork() inherits the list but not the threads: there is nothing to wait for.
  void forget_parents_threads() {
    if (process_ == getpid()) return;
    for (RunningRoot& root : roots_) root.thread.detach();
    roots_.clear();
    process_ = getpid();
  }
  void reap() {
    for (auto root = roots_.begin(); root != roots_.end();) {
      if (root->ended) {
        root->thread.join();
        root = roots_.erase(root);
      } else {
        ++root;
      }
    }
  }

  std::mutex mutex_;  // guards the list, and of each root `stop` and `ended`
  std::list<RunningRoot> roots_;
  pid_t process_ = getpid();
};

RootRegistry& registry() {
  static RootRegistry roots;
  return roots;
}

}  // namespace

Status start_root(FileDescriptor listener, const UniqueId& id, std::chrono::milliseconds lifetime) {
  return registry().start(std::move(listener), id, lifetime);
}

void stop_root(uint64_t job) { registry().stop(job); }

void reap_roots() { registry().reap_ended(); }

}  // namespace mk
