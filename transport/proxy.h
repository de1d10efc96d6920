// SPDX-License-Identifier: MIT
// The thread that empties a command FIFO. What a command does is the handler's business.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "../lib/abort_token.h"
#include "../lib/file_descriptor.h"
#include "command_fifo.h"

namespace mk {

// How a proxy waits. CPU producers ring a doorbell, so it may sleep at once and long; a GPU cannot ring, so for
// kernels the sleep is the latency of the first command after a pause, and `busy` keeps it awake within an
// operator.
struct IdleStrategy {
  std::chrono::microseconds busy{0};        // keeps polling for so long after it last had something to do
  std::chrono::microseconds sleep{100000};  // the longest sleep
};

// All calls come from the proxy thread.
class ProxyHandler {
 public:
  virtual ~ProxyHandler() = default;
  // False: not now (no credit); the proxy offers the same command again after progress().
  virtual bool handle(const Command& command) = 0;
  // Collects completions and arrivals; true if there were any, or if handle() may now take what it refused.
  virtual bool progress() = 0;
  // Adds the descriptors whose readiness means progress, and returns how long the proxy may sleep beside them.
  virtual std::chrono::microseconds prepare_wait(std::vector<pollfd>& descriptors) = 0;
};

class Proxy {
 public:
  // The FIFO, the handler and the token outlive the proxy.
  static Result<std::unique_ptr<Proxy>> start(CommandFifo& fifo, ProxyHandler& handler, const AbortToken& abort,
                                              IdleStrategy idle);
  // Ends the thread after the command in hand; what is left in the FIFO stays there.
  ~Proxy();

  // Wakes the proxy if it sleeps. Producers call it after a push.
  void ring();

 private:
  Proxy(CommandFifo& fifo, ProxyHandler& handler, const AbortToken& abort, IdleStrategy idle,
        FileDescriptor doorbell);
  void run();
  bool handle_commands();
  void sleep();

  CommandFifo& fifo_;
  ProxyHandler& handler_;
  const AbortToken& abort_;
  const IdleStrategy idle_;
  const FileDescriptor doorbell_;  // eventfd
  std::atomic<bool> asleep_{false};
  std::atomic<bool> stop_{false};
  bool blocked_ = false;  // the command at the front waits for a credit
  std::vector<pollfd> descriptors_;
  std::thread thread_;
};

}  // namespace mk
