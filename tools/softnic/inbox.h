// SPDX-License-Identifier: MIT
// Where packets and doorbells for one NIC's worker arrive from other threads of this process, and how that
// worker sleeps.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "packet.h"

namespace softnic {

class Inbox {
 public:
  Inbox();
  ~Inbox();
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;

  // False when the NIC is closed.
  bool push(const Packet& packet);
  void take(std::vector<Packet>& packets);
  void close();
  bool closed() const { return closed_.load(); }
  void wake();

  // The worker: waits until there was a wake since the last call, `other` is readable, or the time is over.
  void sleep(int other, uint64_t nanoseconds);

  // The NICs of this process, by fabric and endpoint number.
  static void announce(const std::string& fabric, uint16_t endpoint, const std::shared_ptr<Inbox>& inbox);
  static void withdraw(const std::string& fabric, uint16_t endpoint);
  static std::shared_ptr<Inbox> find(const std::string& fabric, uint16_t endpoint);

 private:
  int event_;
  std::atomic<bool> pending_{false};
  std::atomic<bool> asleep_{false};
  std::mutex mutex_;
  std::vector<Packet> packets_;
  std::atomic<bool> closed_{false};
};

}  // namespace softnic
