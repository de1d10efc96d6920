// SPDX-License-Identifier: MIT
#include "inbox.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <map>
#include <utility>

namespace softnic {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::pair<std::string, uint16_t>, std::shared_ptr<Inbox>> inboxes;
};

// Never destroyed: workers may outlive static objects.
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

}  // namespace

Inbox::Inbox() : event_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

Inbox::~Inbox() { ::close(event_); }

bool Inbox::push(const Packet& packet) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return false;
    packets_.push_back(packet);
  }
  wake();
  return true;
}

void Inbox::take(std::vector<Packet>& packets) {
  packets.clear();
  const std::lock_guard lock(mutex_);
  packets_.swap(packets);
}

void Inbox::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  packets_.clear();
}

void Inbox::wake() {
  // Either this sees the sleeper, or the sleeper sees `pending_`: both orders are sequentially consistent.
  pending_.store(true);
  if (!asleep_.load()) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(event_, &one, sizeof(one));
}

void Inbox::sleep(int other, uint64_t nanoseconds) {
  asleep_.store(true);
  if (!pending_.exchange(false)) {
    std::array<pollfd, 2> descriptors = {pollfd{event_, POLLIN, 0}, pollfd{other, POLLIN, 0}};
    const timespec limit{static_cast<time_t>(nanoseconds / 1000000000),
                         static_cast<long>(nanoseconds % 1000000000)};
    ppoll(descriptors.data(), descriptors.size(), &limit, nullptr);
    if (descriptors[0].revents != 0) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t taken = ::read(event_, &count, sizeof(count));
    }
    pending_.store(false);
  }
  asleep_.store(false);
}

void Inbox::announce(const std::string& fabric, uint16_t endpoint, const std::shared_ptr<Inbox>& inbox) {
  const std::lock_guard lock(registry().mutex);
  registry().inboxes[{fabric, endpoint}] = inbox;
}

void Inbox::withdraw(const std::string& fabric, uint16_t endpoint) {
  const std::lock_guard lock(registry().mutex);
  registry().inboxes.erase({fabric, endpoint});
}

std::shared_ptr<Inbox> Inbox::find(const std::string& fabric, uint16_t endpoint) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().inboxes.find({fabric, endpoint});
  return found == registry().inboxes.end() ? nullptr : found->second;
}

}  // namespace softnic
