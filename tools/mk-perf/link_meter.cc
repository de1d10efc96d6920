// SPDX-License-Identifier: MIT
#include "link_meter.h"

#include <algorithm>
#include <chrono>

namespace perf {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kPutBytes = 1 << 20;
constexpr int kPuts = 32;
constexpr int kBursts = 4;  // of so many puts; the best counts, since others may use the machine
constexpr int kRounds = 101;
constexpr std::chrono::seconds kPatience{10};
enum Signal : uint32_t { kPing, kBulk, kNumKinds };

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

LinkMeter::LinkMeter(mk::AbortToken& abort) : abort_(abort), memory_(2 * kPutBytes), seen_(kNumKinds) {
  abort_.on_raise([this] { event_.notify_all(); });
}

LinkMeter::~LinkMeter() { endpoint_.reset(); }

mk::Result<std::unique_ptr<LinkMeter>> LinkMeter::create(const mk::Topology& topology, mk::Exchange& exchange,
                                                         mk::AbortToken& abort, mk::Deadline deadline) {
  std::unique_ptr<LinkMeter> meter(new LinkMeter(abort));
  mk::EndpointOptions options;
  options.on_event = [raw = meter.get()] {
    { const std::lock_guard lock(raw->mutex_); }
    raw->event_.notify_all();
  };
  auto endpoint = mk::Endpoint::create(topology, exchange, abort, std::move(options), deadline);
  if (!endpoint.ok()) return endpoint.status();
  meter->endpoint_ = endpoint.take();
  auto region = meter->endpoint_->register_region(meter->memory_.data(), meter->memory_.size(), deadline);
  if (!region.ok()) return region.status();
  meter->region_ = region.value();
  return meter;
}

template <class CONDITION>
mk::Status LinkMeter::wait(int peer, const CONDITION& condition) {
  const auto limit = std::chrono::system_clock::now() + kPatience;
  std::unique_lock lock(mutex_);
  while (!condition()) {
    if (abort_.raised()) return abort_.reason();
    if (event_.wait_until(lock, limit) == std::cv_status::timeout && !condition()) {
      return mk::Status(MK_ERROR_TIMEOUT,
                        mk::format("nothing came from rank %d for 10 s although the link was made: the path is "
                                   "blocked for data (firewall, MTU, routing)",
                                   peer));
    }
  }
  return {};
}

mk::Status LinkMeter::put(int peer, uint32_t bytes, uint32_t signal) {
  const mk::Command command{mk::CommandKind::put,
                            0,
                            static_cast<uint16_t>(peer),
                            signal,
                            mk::region_address(region_, 0),
                            mk::region_address(region_, kPutBytes),
                            bytes,
                            0};
  return wait(peer, [&] { return endpoint_->try_post(command); });
}

mk::Status LinkMeter::await(int peer, uint32_t signal, uint64_t more) {
  seen_[signal] += more;
  return wait(peer, [&] { return endpoint_->signal(signal) >= seen_[signal]; });
}

mk::Result<LinkFigures> LinkMeter::measure(int peer) {
  LinkFigures figures;
  std::vector<double> trips;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = Clock::now();
    MK_RETURN_IF_ERROR(put(peer, 8, kPing));
    MK_RETURN_IF_ERROR(await(peer, kPing, 1));
    trips.push_back(seconds_since(start));
  }
  std::nth_element(trips.begin(), trips.begin() + kRounds / 2, trips.end());
  const double trip = trips[kRounds / 2];
  figures.latency_us = trip / 2 * 1e6;
  for (int burst = 0; burst < kBursts; ++burst) {
    const auto start = Clock::now();
    for (int n = 0; n < kPuts; ++n) MK_RETURN_IF_ERROR(put(peer, kPutBytes, kBulk));
    MK_RETURN_IF_ERROR(await(peer, kPing, 1));
    const double seconds = std::max(seconds_since(start) - trip / 2, 1e-9);
    figures.gigabytes = std::max(figures.gigabytes, kPuts * 1e-9 * kPutBytes / seconds);
  }
  return figures;
}

mk::Status LinkMeter::answer(int peer) {
  for (int round = 0; round < kRounds; ++round) {
    MK_RETURN_IF_ERROR(await(peer, kPing, 1));
    MK_RETURN_IF_ERROR(put(peer, 8, kPing));
  }
  for (int burst = 0; burst < kBursts; ++burst) {
    MK_RETURN_IF_ERROR(await(peer, kBulk, kPuts));
    MK_RETURN_IF_ERROR(put(peer, 8, kPing));
  }
  return {};
}

}  // namespace perf
