// SPDX-License-Identifier: MIT
#include "proxy.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace mk {
namespace {

// Commands taken before completions are looked at again.
constexpr int kBatch = 64;

}  // namespace

Result<std::unique_ptr<Proxy>> Proxy::start(CommandFifo& fifo, ProxyHandler& handler, const AbortToken& abort,
                                            IdleStrategy idle) {
  FileDescriptor doorbell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!doorbell.valid()) {
    return Status(MK_ERROR_SYSTEM, format("proxy: cannot make an eventfd: %s", std::strerror(errno)));
  }
  std::unique_ptr<Proxy> proxy(new Proxy(fifo, handler, abort, idle, std::move(doorbell)));
  // The application's signals are not for this thread: it inherits a mask that blocks them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Status status;
  try {
    proxy->thread_ = std::thread([p = proxy.get()] { p->run(); });
    pthread_setname_np(proxy->thread_.native_handle(), "mk-proxy");
  } catch (const std::system_error& error) {
    status = Status(MK_ERROR_SYSTEM, format("proxy: cannot start a thread: %s", error.what()));
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!status.ok()) return status;
  return proxy;
}

Proxy::Proxy(CommandFifo& fifo, ProxyHandler& handler, const AbortToken& abort, IdleStrategy idle,
             FileDescriptor doorbell)
    : fifo_(fifo), handler_(handler), abort_(abort), idle_(idle), doorbell_(std::move(doorbell)) {}

Proxy::~Proxy() {
  stop_.store(true);
  ring();
  if (thread_.joinable()) thread_.join();
}

void Proxy::ring() {
  if (!asleep_.load() || !asleep_.exchange(false)) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(doorbell_.get(), &one, sizeof one);
}

void Proxy::run() {
  auto last_work = std::chrono::steady_clock::now();
  while (!stop_.load()) {
    // After an abort nothing is posted, read or placed any more: the thread only waits for its end.
    const bool aborted = abort_.raised();
    bool worked = false;
    if (!aborted) {
      worked = handle_commands();
      worked |= handler_.progress();
    }
    if (worked) {
      if (idle_.busy.count() > 0) last_work = std::chrono::steady_clock::now();
      continue;
    }
    if (idle_.busy.count() > 0 && std::chrono::steady_clock::now() - last_work < idle_.busy) continue;
    sleep();
  }
}

bool Proxy::handle_commands() {
  blocked_ = false;
  bool worked = false;
  for (int n = 0; n < kBatch; ++n) {
    const std::optional<Command> command = fifo_.front();
    if (!command) break;
    if (!handler_.handle(*command)) {
      blocked_ = true;
      break;
    }
    fifo_.pop();
    worked = true;
  }
  return worked;
}

void Proxy::sleep() {
  descriptors_.assign(1, pollfd{doorbell_.get(), POLLIN, 0});
  std::chrono::microseconds limit = idle_.sleep;
  const bool aborted = abort_.raised();
  if (!aborted) {
    if (abort_.fd() >= 0) descriptors_.push_back({abort_.fd(), POLLIN, 0});
    limit = std::min(limit, handler_.prepare_wait(descriptors_));
  }
  asleep_.store(true);
  // A command published before the line above rings no bell; one published after it does.
  const bool ready = !aborted && !blocked_ && fifo_.front().has_value();
  if (!ready && !stop_.load() && limit.count() > 0) {
    const timespec timeout{limit.count() / 1000000, static_cast<long>(limit.count() % 1000000 * 1000)};
    ppoll(descriptors_.data(), descriptors_.size(), &timeout, nullptr);
  }
  asleep_.store(false);
  uint64_t rings;
  if (descriptors_[0].revents != 0) [[maybe_unused]]
    const ssize_t taken = read(doorbell_.get(), &rings, sizeof rings);
}

}  // namespace mk
