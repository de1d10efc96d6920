// SPDX-License-Identifier: MIT
#include "broken_backend.h"

#include <algorithm>
#include <deque>

#include "transport/loopback/loopback.h"

namespace mk::test {
namespace {

class BrokenTransport : public Transport {
 public:
  BrokenTransport(std::unique_ptr<Transport> inner, Fault fault) : inner_(std::move(inner)), fault_(fault) {}

  Result<Bytes> add_region(uint32_t region, std::byte* base, size_t bytes) override {
    return inner_->add_region(region, base, bytes);
  }
  Status set_peer_keys(uint32_t region, std::span<const Bytes> keys) override {
    return inner_->set_peer_keys(region, keys);
  }
  void remove_region(uint32_t region) override { inner_->remove_region(region); }
  void leave() override { inner_->leave(); }

  bool post(const Put& put) override {
    if (fault_ == Fault::signal_twice) return inner_->post(put);
    if (held_.size() >= kMostHeld) return false;
    Held held{put, kPollsHeld};
    if (fault_ == Fault::signal_before_data && put.signal != kNoSignal) {
      Put signal;
      signal.peer = put.peer;
      signal.signal = put.signal;
      if (!inner_->post(signal)) return false;
      ++surplus_;
      held.put.signal = kNoSignal;
    }
    if (fault_ == Fault::completion_before_read) {
      ++early_;
      ++surplus_;
    }
    held_.push_back(held);
    return true;
  }

  void poll(TransportEvents& events) override {
    for (Held& held : held_) --held.polls;
    while (!held_.empty() && held_.front().polls <= 0 && inner_->post(held_.front().put)) held_.pop_front();
    inner_->poll(events);
    const uint64_t swallowed = std::min(surplus_, events.completions);
    events.completions -= swallowed;
    surplus_ -= swallowed;
    events.completions += std::exchange(early_, 0);
    if (fault_ == Fault::signal_twice && !events.signals.empty() && ++arrivals_ % 8 == 0) {
      events.signals.push_back(events.signals.front());
    }
  }

  std::chrono::microseconds prepare_wait(std::vector<pollfd>& descriptors) override {
    const auto limit = inner_->prepare_wait(descriptors);
    return held_.empty() ? limit : std::chrono::microseconds(100);
  }

 private:
  static constexpr int kPollsHeld = 20;
  static constexpr size_t kMostHeld = 32;
  struct Held {
    Put put;
    int polls;
  };

  std::unique_ptr<Transport> inner_;
  const Fault fault_;
  std::deque<Held> held_;
  uint64_t surplus_ = 0;  // completions of the inner transport that must not be reported
  uint64_t early_ = 0;    // completions to report although nothing has been read
  uint64_t arrivals_ = 0;
};

template <Fault fault>
Result<std::unique_ptr<Transport>> create_broken(const TransportContext& context, Deadline deadline) {
  auto inner = loopback::create(context, deadline);
  if (!inner.ok()) return inner.status();
  return std::unique_ptr<Transport>(std::make_unique<BrokenTransport>(inner.take(), fault));
}

template <Fault fault>
constexpr Backend kBroken[] = {{"loopback", loopback::available, create_broken<fault>}};

}  // namespace

std::span<const Backend> broken_backend(Fault fault) {
  switch (fault) {
    case Fault::signal_before_data:
      return kBroken<Fault::signal_before_data>;
    case Fault::completion_before_read:
      return kBroken<Fault::completion_before_read>;
    case Fault::signal_twice:
      break;
  }
  return kBroken<Fault::signal_twice>;
}

}  // namespace mk::test
