// SPDX-License-Identifier: MIT
// Puts before their signals, 10^6 times: three ranks with two NICs each on a nasty softnic, all driven by one
// thread, so that a schedule takes a millisecond.
//
//   verbs_promise --backend rc|srd [--schedules N] [--seed S] [--signal immediate|completion]
//                 [--fault no_count|no_slots|no_completion|early_free]
//
// Ends with 0 when every schedule kept the promise; with --fault, which breaks the backend on purpose, when the
// checker (of no_slots the receiver) found it out. Prints the seed of what it found.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../support/local_exchange.h"
#include "transport/verbs/verbs_transport.h"

namespace mk::test {
namespace {

constexpr int kRanks = 3;
constexpr size_t kMemoryBytes = 24 << 20;
constexpr size_t kGapBytes = 64;
// One world is connected for so many schedules; the next one has another seed.
constexpr int kSchedulesPerWorld = 500;
// Without any progress: the machine may be busy.
constexpr std::chrono::seconds kLongestPause{30};

struct Settings {
  std::string backend, signal = "immediate", fault;
  uint64_t schedules = 1000, seed = 1;
};

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

void fill(std::byte* memory, size_t bytes, uint64_t key) {
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t word = mix(key + i);
    std::memcpy(memory + i, &word, std::min<size_t>(8, bytes - i));
  }
}

bool holds(const std::byte* memory, size_t bytes, uint64_t key) {
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t word = mix(key + i);
    if (std::memcmp(memory + i, &word, std::min<size_t>(8, bytes - i)) != 0) return false;
  }
  return true;
}

struct Planned {
  int from, to;
  uint32_t bytes, signal;
  uint64_t source, target, key;
  bool seen = false;
};

struct End {
  AbortToken abort;
  RegionTable regions;
  Topology topology;
  std::unique_ptr<Transport> transport;
  std::vector<std::byte> source = std::vector<std::byte>(kMemoryBytes);
  std::vector<std::byte> target = std::vector<std::byte>(kMemoryBytes);
  // Of the schedule that is played.
  std::vector<Planned*> outgoing;
  size_t posted = 0, scribbled = 0;
  uint64_t completed = 0;
  bool draining = false;  // posts nothing until all that is posted has completed
};

class World {
 public:
  // The memory is written to and read until every transport is gone.
  ~World() {
    for (End& end : ends_) end.transport.reset();
  }
  // An error when the ranks cannot be connected.
  std::string connect(const Settings& settings, uint64_t seed);
  // What broke the promise; empty: nothing.
  std::string play(uint64_t seed);

 private:
  void plan(std::mt19937_64& random);
  std::string take(int rank, const TransportEvents& events);
  void post_some(End& end, std::mt19937_64& random);
  void scribble(End& end);
  bool finished() const;
  void wait();

  LocalExchange exchange_{kRanks};
  std::vector<End> ends_{kRanks};
  std::vector<Planned> puts_;
  std::vector<std::vector<Planned*>> by_signal_;  // [to][signal]
  uint32_t bank_ = 0;
  size_t unseen_ = 0;
};

std::string World::connect(const Settings& settings, uint64_t seed) {
  setenv("MK_SOFTNIC_SEED", std::to_string(seed % 1000000007 + 1).c_str(), 1);
  const auto all = backends();
  const auto backend =
      std::find_if(all.begin(), all.end(), [&](const Backend& b) { return settings.backend == b.name; });
  if (backend == all.end()) return "there is no backend \"" + settings.backend + "\"";
  std::vector<std::string> errors(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      End& end = ends_[static_cast<size_t>(rank)];
      const std::vector<std::string> hosts(kRanks, "host");
      const std::vector<int32_t> nodes{0, 1, 2};
      end.topology = Topology::make(rank, hosts, nodes);
      const TransportContext context{end.topology, exchange_.of(rank), end.abort, end.regions, ""};
      auto made = backend->create(context, Deadline::after(std::chrono::seconds(60)));
      if (made.ok()) {
        end.transport = made.take();
      } else {
        errors[static_cast<size_t>(rank)] = made.status().sentence();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) {
    if (!error.empty()) return error;
  }
  for (uint32_t region = 0; region < 2; ++region) {
    std::vector<Bytes> keys;
    for (End& end : ends_) {
      auto key =
          end.transport->add_region(region, (region == 0 ? end.source : end.target).data(), kMemoryBytes);
      if (!key.ok()) return key.status().sentence();
      keys.push_back(key.take());
    }
    for (End& end : ends_) {
      if (const Status status = end.transport->set_peer_keys(region, keys); !status.ok())
        return status.sentence();
    }
  }
  return "";
}

void World::plan(std::mt19937_64& random) {
  puts_.clear();
  bank_ ^= 1;
  by_signal_.assign(kRanks, std::vector<Planned*>(kRanks * 64));
  std::vector<uint64_t> used(kRanks, kGapBytes);
  for (int from = 0; from < kRanks; ++from) {
    uint64_t source = 0;
    const uint32_t count = 8 + static_cast<uint32_t>(random() % 57);
    for (uint32_t n = 0; n < count; ++n) {
      const int to = (from + 1 + static_cast<int>(random() % 2)) % kRanks;
      uint32_t bytes = static_cast<uint32_t>(random() % 300);
      if (random() % 8 == 0) bytes = static_cast<uint32_t>(random() % 6000);
      if (random() % 32 == 0) bytes = (64 << 10) + static_cast<uint32_t>(random() % 20000);
      uint64_t& target = used[static_cast<size_t>(to)];
      target += random() % 24;
      puts_.push_back({from, to, bytes, static_cast<uint32_t>(from) * 64 + n, source, target, random()});
      target += bytes + kGapBytes;
      source += bytes;
    }
  }
  unseen_ = puts_.size();
  for (Planned& put : puts_) {
    End& from = ends_[static_cast<size_t>(put.from)];
    from.outgoing.push_back(&put);
    by_signal_[static_cast<size_t>(put.to)][put.signal] = &put;
    fill(from.source.data() + put.source, put.bytes, put.key);
    // Wrong at every byte, all but surely: other words.
    fill(ends_[static_cast<size_t>(put.to)].target.data() + put.target, put.bytes, ~put.key);
  }
}

void World::scribble(End& end) {
  for (; end.scribbled < end.posted; ++end.scribbled) {
    const Planned& put = *end.outgoing[end.scribbled];
    std::memset(end.source.data() + put.source, 0x5a, put.bytes);
  }
}

std::string World::take(int rank, const TransportEvents& events) {
  End& end = ends_[static_cast<size_t>(rank)];
  if (!events.failures.empty()) return "a link failed: " + events.failures.front().status.sentence();
  for (const uint32_t signal : events.signals) {
    const uint32_t index = signal % kSignalsPerBank;
    Planned* put = index < by_signal_[0].size() ? by_signal_[static_cast<size_t>(rank)][index] : nullptr;
    if (put == nullptr || signal / kSignalsPerBank != bank_ || put->seen)
      return format("signal %u came although nothing, or more than once", signal);
    put->seen = true;
    --unseen_;
    if (!holds(end.target.data() + put->target, put->bytes, put->key)) {
      return format("the signal of a put of %u bytes from rank %d to rank %d is there, its bytes are not",
                    put->bytes, put->from, put->to);
    }
  }
  end.completed += events.completions;
  if (end.completed > end.posted) return "more puts completed than were posted";
  // Complete sources may be overwritten at once.
  if (end.completed == end.posted) {
    scribble(end);
    end.draining = false;
  }
  return "";
}

void World::post_some(End& end, std::mt19937_64& random) {
  for (uint64_t most = random() % 12; most > 0 && end.posted < end.outgoing.size() && !end.draining; --most) {
    const Planned& planned = *end.outgoing[end.posted];
    Put put;
    put.peer = planned.to;
    put.signal = bank_ * kSignalsPerBank + planned.signal;
    put.source_region = 0;
    put.source = end.source.data() + planned.source;
    put.target_region = 1;
    put.target_offset = planned.target;
    put.bytes = planned.bytes;
    if (!end.transport->post(put)) return;
    ++end.posted;
    end.draining = random() % 16 == 0;
  }
}

bool World::finished() const {
  return unseen_ == 0 && std::all_of(ends_.begin(), ends_.end(), [](const End& end) {
           return end.posted == end.outgoing.size() && end.completed == end.posted;
         });
}

void World::wait() {
  std::vector<pollfd> descriptors;
  auto limit = std::chrono::microseconds(1000);
  for (End& end : ends_) limit = std::min(limit, end.transport->prepare_wait(descriptors));
  const timespec timeout{0, static_cast<long>(limit.count() * 1000)};
  if (limit.count() > 0) ppoll(descriptors.data(), descriptors.size(), &timeout, nullptr);
}

std::string World::play(uint64_t seed) {
  std::mt19937_64 random(seed);
  for (End& end : ends_) {
    end.outgoing.clear();
    end.posted = end.scribbled = end.completed = 0;
    end.draining = false;
  }
  plan(random);
  Deadline deadline = Deadline::after(kLongestPause);
  TransportEvents events;
  while (!finished()) {
    bool any = false;
    for (int rank = 0; rank < kRanks; ++rank) {
      End& end = ends_[static_cast<size_t>(rank)];
      const size_t before = end.posted;
      post_some(end, random);
      any = any || end.posted > before;
      // A rank that is now and then late.
      if (random() % 4 == 0) continue;
      events = {};
      end.transport->poll(events);
      any = any || events.completions > 0 || !events.signals.empty();
      if (const std::string wrong = take(rank, events); !wrong.empty()) return wrong;
    }
    if (any) deadline = Deadline::after(kLongestPause);
    if (!any) wait();
    if (deadline.passed()) return format("nothing moves any more: %zu signals are missing", unseen_);
  }
  return "";
}

bool parse(int argc, char** argv, Settings* settings) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--backend")
      settings->backend = value;
    else if (name == "--signal")
      settings->signal = value;
    else if (name == "--fault")
      settings->fault = value;
    else if (name == "--schedules")
      settings->schedules = std::strtoull(value.c_str(), nullptr, 10);
    else if (name == "--seed")
      settings->seed = std::strtoull(value.c_str(), nullptr, 10);
    else
      return false;
  }
  verbs::Sabotage& sabotage = verbs::sabotage();
  const std::string& fault = settings->fault;
  sabotage.no_count = fault == "no_count";
  sabotage.no_slots = fault == "no_slots";
  sabotage.no_completion = fault == "no_completion";
  sabotage.early_free = fault == "early_free";
  const bool known =
      fault.empty() || sabotage.no_count || sabotage.no_slots || sabotage.no_completion || sabotage.early_free;
  return argc % 2 == 1 && known && !settings->backend.empty();
}

int run(const Settings& settings) {
  setenv("MK_VERBS_LIBRARY", MK_SOFTNIC_LIBRARY, 0);
  setenv("MK_SOFTNIC_KIND", settings.backend == "srd" ? "efa" : "roce", 1);
  setenv("MK_SOFTNIC_NICS", "2", 1);
  setenv("MK_SOFTNIC_FABRIC", ("promise" + std::to_string(getpid())).c_str(), 1);
  setenv("MK_IB_SIGNAL", settings.signal.c_str(), 1);
  const auto begin = std::chrono::steady_clock::now();
  std::unique_ptr<World> world;
  for (uint64_t n = 0; n < settings.schedules; ++n) {
    // Runs with neighbouring seeds have no schedule in common.
    const uint64_t seed = mix(mix(settings.seed) + n);
    const uint64_t world_seed = mix(mix(settings.seed) + n / kSchedulesPerWorld) % 1000000007;
    std::string wrong;
    if (n % kSchedulesPerWorld == 0) {
      world = std::make_unique<World>();
      wrong = world->connect(settings, world_seed);
    }
    if (wrong.empty()) wrong = world->play(seed);
    if (wrong.empty()) {
      if ((n + 1) % 100000 == 0) std::printf("%llu schedules\n", static_cast<unsigned long long>(n + 1));
      std::fflush(stdout);
      continue;
    }
    std::printf("%s, signal %s, seed %llu, schedule %llu, softnic seed %llu: %s\n", settings.backend.c_str(),
                settings.signal.c_str(), static_cast<unsigned long long>(settings.seed),
                static_cast<unsigned long long>(n), static_cast<unsigned long long>(world_seed + 1),
                wrong.c_str());
    // A link that cannot be made, or stands still, says nothing of the checker.
    const char* const expected = settings.fault == "no_slots" ? "it sent something wrong" : "its bytes are not";
    return !settings.fault.empty() && wrong.find(expected) != std::string::npos ? 0 : 1;
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::printf("%s, signal %s, seed %llu: %llu schedules in %.1f s, the promise was kept\n",
              settings.backend.c_str(), settings.signal.c_str(), static_cast<unsigned long long>(settings.seed),
              static_cast<unsigned long long>(settings.schedules), took.count());
  return settings.fault.empty() ? 0 : 1;
}

}  // namespace
}  // namespace mk::test

int main(int argc, char** argv) {
  mk::test::Settings settings;
  if (!mk::test::parse(argc, argv, &settings)) {
    std::fprintf(
        stderr,
        "usage: verbs_promise --backend rc|srd [--schedules N] [--seed S] [--signal immediate|completion] "
        "[--fault no_count|no_slots|no_completion|early_free]\n");
    return 2;
  }
  return mk::test::run(settings);
}
