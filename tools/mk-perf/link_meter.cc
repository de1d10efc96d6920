// SPDX-License-Identifier: MIT
#include "link_meter.h"

#include <algorithm>
#include <array>
#include <chrono>

namespace perf {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kPutBytes = 1 << 20;
constexpr int kPuts = 32;
constexpr int kBursts = 4;  // of so many puts; the best counts, since others may use the machine
constexpr int kRounds = 101;
constexpr std::chrono::milliseconds kLook{100};  // at what no event tells of
enum Signal : uint32_t { kPing, kBulk, kNumKinds };

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

LinkMeter::LinkMeter(int rank, std::function<bool()> peer_gave_up)
    : peer_(1 - rank),
      peer_gave_up_(std::move(peer_gave_up)),
      deadline_(mk::Deadline::after(kMostTime)),
      memory_(2 * kPutBytes),
      seen_(kNumKinds) {
  abort_.on_raise([this] { event_.notify_all(); });
}

LinkMeter::~LinkMeter() { endpoint_.reset(); }

mk::Result<std::unique_ptr<LinkMeter>> LinkMeter::create(const mk::Backend& backend, mk::Exchange& exchange,
                                                         std::vector<std::string> nics,
                                                         std::function<bool()> peer_gave_up) {
  const std::array<std::string, 2> nodes{"0", "1"};
  const mk::Topology topology = mk::Topology::make(exchange.rank(), nodes, {});
  std::unique_ptr<LinkMeter> meter(new LinkMeter(exchange.rank(), std::move(peer_gave_up)));
  mk::EndpointOptions options;
  options.backend = backend.name;
  options.nics = std::move(nics);
  options.on_event = [raw = meter.get()] {
    { const std::lock_guard lock(raw->mutex_); }
    raw->event_.notify_all();
  };
  const mk::Deadline deadline = mk::Deadline::after(kPatience);
  auto endpoint = mk::create_endpoint(std::span(&backend, 1), topology, exchange, meter->abort_,
                                      std::move(options), deadline);
  if (!endpoint.ok()) return endpoint.status();
  meter->endpoint_ = endpoint.take();
  auto region = meter->endpoint_->register_region(meter->memory_.data(), meter->memory_.size(), deadline);
  if (!region.ok()) return region.status();
  meter->region_ = region.value();
  return meter;
}

template <class CONDITION>
mk::Status LinkMeter::wait(const CONDITION& condition) {
  const auto silent = Clock::now() + kPatience;
  std::unique_lock lock(mutex_);
  while (!condition()) {
    if (abort_.raised()) return abort_.reason();
    // system_clock: ThreadSanitizer knows no wait of the other one.
    event_.wait_until(lock, std::chrono::system_clock::now() + kLook);
    if (condition()) break;
    if (peer_gave_up_()) return mk::Status(MK_ERROR_ABORTED, mk::format("rank %d has given up", peer_));
    if (deadline_.passed()) {
      return mk::Status(MK_ERROR_TIMEOUT,
                        mk::format("the puts to and from rank %d took longer than %d s: the path is nearly "
                                   "blocked, or loses most of what is sent",
                                   peer_, static_cast<int>(kMostTime.count())));
    }
    if (Clock::now() > silent) {
      return mk::Status(MK_ERROR_TIMEOUT,
                        mk::format("nothing came from rank %d for %d s although the link was made: the path is "
                                   "blocked for data",
                                   peer_, static_cast<int>(kPatience.count())));
    }
  }
  return {};
}

mk::Status LinkMeter::put(uint32_t bytes, uint32_t signal) {
  const mk::Command command{mk::CommandKind::put,
                            0,
                            static_cast<uint16_t>(peer_),
                            signal,
                            mk::region_address(region_, 0),
                            mk::region_address(region_, kPutBytes),
                            bytes,
                            0};
  return wait([&] { return endpoint_->try_post(command); });
}

mk::Status LinkMeter::await(uint32_t signal, uint64_t more) {
  seen_[signal] += more;
  return wait([&] { return endpoint_->signal(signal) >= seen_[signal]; });
}

mk::Result<LinkFigures> LinkMeter::measure() {
  deadline_ = mk::Deadline::after(kMostTime);
  LinkFigures figures;
  std::vector<double> trips;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = Clock::now();
    MK_RETURN_IF_ERROR(put(8, kPing));
    MK_RETURN_IF_ERROR(await(kPing, 1));
    trips.push_back(seconds_since(start));
  }
  std::nth_element(trips.begin(), trips.begin() + kRounds / 2, trips.end());
  const double trip = trips[kRounds / 2];
  figures.latency_us = trip / 2 * 1e6;
  for (int burst = 0; burst < kBursts; ++burst) {
    const auto start = Clock::now();
    for (int n = 0; n < kPuts; ++n) MK_RETURN_IF_ERROR(put(kPutBytes, kBulk));
    MK_RETURN_IF_ERROR(await(kPing, 1));
    const double seconds = std::max(seconds_since(start) - trip / 2, 1e-9);
    figures.gigabytes = std::max(figures.gigabytes, kPuts * 1e-9 * kPutBytes / seconds);
  }
  return figures;
}

mk::Status LinkMeter::answer() {
  deadline_ = mk::Deadline::after(kMostTime);
  for (int round = 0; round < kRounds; ++round) {
    MK_RETURN_IF_ERROR(await(kPing, 1));
    MK_RETURN_IF_ERROR(put(8, kPing));
  }
  for (int burst = 0; burst < kBursts; ++burst) {
    MK_RETURN_IF_ERROR(await(kBulk, kPuts));
    MK_RETURN_IF_ERROR(put(8, kPing));
  }
  return {};
}

}  // namespace perf
