// SPDX-License-Identifier: MIT
#include "put_schedule.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

namespace mk::test {
namespace {

constexpr size_t kGapBytes = 64;

// A put from one rank to another: its place at the target and its signal are the same in every round.
struct PlannedPut {
  int from;
  int to;
  uint32_t bytes;
  uint32_t signal;
  uint64_t target_offset;
  bool seen = false;
};

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

uint32_t draw_bytes(std::mt19937_64& random, uint32_t largest) {
  static constexpr uint32_t kEdges[] = {0, 1, 3, 8, 17, 255, 4096, 4099, 65535, 65536, 65537, 100001};
  if (random() % 16 == 0) return largest - static_cast<uint32_t>(random() % 9);
  if (random() % 8 == 0) return std::min<uint32_t>(largest, 1u << 20);
  if (random() % 2 == 0) return std::min(largest, kEdges[random() % std::size(kEdges)]);
  return static_cast<uint32_t>(random() % 5000);
}

// Every rank computes the same plan.
std::vector<PlannedPut> plan(const Rank& rank, const PutSchedule& schedule) {
  std::mt19937_64 random(schedule.seed);
  std::vector<PlannedPut> puts;
  std::vector<uint64_t> used(static_cast<size_t>(rank.nranks), kGapBytes);
  for (int n = 0; n < schedule.puts_per_pair; ++n) {
    for (int from = 0; from < rank.nranks; ++from) {
      for (int to = 0; to < rank.nranks; ++to) {
        if (rank.topology.same_node(from, to)) continue;
        const uint32_t bytes = draw_bytes(random, schedule.largest_bytes);
        const uint32_t bank = static_cast<uint32_t>(n % 2);
        const uint32_t index = static_cast<uint32_t>(from * schedule.puts_per_pair + n);
        uint64_t& offset = used[static_cast<size_t>(to)];
        puts.push_back({from, to, bytes, bank * kSignalsPerBank + index, offset});
        offset += bytes + kGapBytes;
      }
    }
  }
  return puts;
}

uint64_t put_key(const PutSchedule& schedule, const PlannedPut& put, int round) {
  return mix(schedule.seed ^ mix(static_cast<uint64_t>(round) << 40 ^ put.signal ^
                                 static_cast<uint64_t>(put.from) << 20 ^ static_cast<uint64_t>(put.to) << 30));
}

// Byte i of a put is byte i % 8 of mix(key + i / 8); `invert` gives the poison: a value that is wrong at every
// byte.
void fill(std::byte* memory, size_t bytes, uint64_t key, bool invert) {
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t word = invert ? ~mix(key + i / 8) : mix(key + i / 8);
    std::memcpy(memory + i, &word, std::min<size_t>(8, bytes - i));
  }
}

size_t first_wrong(const std::byte* memory, size_t bytes, uint64_t key) {
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t word = mix(key + i / 8);
    if (std::memcmp(memory + i, &word, std::min<size_t>(8, bytes - i)) != 0) return i;
  }
  return bytes;
}

class Player {
 public:
  Player(Rank& rank, const PutSchedule& schedule)
      : rank_(rank),
        schedule_(schedule),
        random_(schedule.seed + 1),
        source_(rank.make_memory(kBatchBytes + schedule.largest_bytes)),
        target_(rank.make_memory(0)) {
    for (const PlannedPut& put : plan(rank, schedule)) {
      if (put.from == rank.rank) outgoing_.push_back(put);
      if (put.to == rank.rank) incoming_.push_back(put);
    }
    std::shuffle(outgoing_.begin(), outgoing_.end(), random_);
    uint64_t target_bytes = kGapBytes;
    for (const PlannedPut& put : incoming_) {
      target_bytes = std::max<uint64_t>(target_bytes, put.target_offset + put.bytes + kGapBytes);
    }
    target_.resize(target_bytes);
  }

  std::string play() {
    auto source = rank_.add_region(source_);
    MK_EXPECT_OK(source.status());
    auto target = rank_.add_region(target_);
    MK_EXPECT_OK(target.status());
    for (int round = 0; round < schedule_.rounds; ++round) {
      poison(round);
      MK_EXPECT(rank_.barrier());
      bool posted = false;
      std::thread poster([&] { posted = post_all(round, source.value(), target.value()); });
      const std::string wrong = check_all(round);
      if (!wrong.empty()) rank_.abort.raise(Status(MK_ERROR_INTERNAL, wrong));
      poster.join();
      if (!wrong.empty()) return wrong;
      MK_EXPECT(posted);
      // Nobody poisons for the next round before all have checked this one.
      MK_EXPECT(rank_.barrier());
    }
    MK_EXPECT(rank_.endpoint->posted() == rank_.endpoint->completed());
    MK_EXPECT(rank_.endpoint->posted() == outgoing_.size() * static_cast<size_t>(schedule_.rounds));
    MK_EXPECT(rank_.failed_peers().empty());
    return check_counts();
  }

 private:
  static constexpr size_t kBatchBytes = 1 << 20;

  void poison(int round) {
    std::fill(target_.begin(), target_.end(), std::byte{0xa5});
    for (PlannedPut& put : incoming_) {
      put.seen = false;
      fill(target_.data() + put.target_offset, put.bytes, put_key(schedule_, put, round), true);
    }
  }

  bool post_all(int round, uint32_t source, uint32_t target) {
    size_t next = 0;
    while (next < outgoing_.size()) {
      size_t used = 0;
      const size_t last = std::min(outgoing_.size(), next + 1 + random_() % 16);
      for (; next < last && used < kBatchBytes; ++next) {
        const PlannedPut& put = outgoing_[next];
        fill(source_.data() + used, put.bytes, put_key(schedule_, put, round), false);
        if (!rank_.post(make_put(put.to, region_address(source, used),
                                 region_address(target, put.target_offset), put.bytes, put.signal))) {
          return false;
        }
        used += put.bytes;
      }
      if (!rank_.wait_complete()) return false;
      std::fill_n(source_.begin(), used, std::byte{0x5a});
    }
    return true;
  }

  std::string check_all(int round) {
    size_t left = incoming_.size();
    while (left > 0) {
      const auto arrived = [&](const PlannedPut& put) {
        return !put.seen && rank_.endpoint->signal(put.signal) > static_cast<uint64_t>(round);
      };
      MK_EXPECT(rank_.wait([&] { return std::any_of(incoming_.begin(), incoming_.end(), arrived); }));
      for (PlannedPut& put : incoming_) {
        if (!arrived(put)) continue;
        put.seen = true;
        --left;
        const size_t wrong =
            first_wrong(target_.data() + put.target_offset, put.bytes, put_key(schedule_, put, round));
        if (wrong < put.bytes) {
          return format("round %d: signal %u of the put of %u bytes from rank %d is there, byte %zu is not; ",
                        round, put.signal, put.bytes, put.from, wrong);
        }
      }
    }
    for (const PlannedPut& put : incoming_) {
      const auto gap = target_.begin() + static_cast<std::ptrdiff_t>(put.target_offset + put.bytes);
      const bool clean = std::all_of(gap, gap + kGapBytes, [](std::byte b) { return b == std::byte{0xa5}; });
      if (!clean)
        return format("round %d: bytes after the put from rank %d were overwritten; ", round, put.from);
    }
    return "";
  }

  std::string check_counts() {
    uint64_t sum = 0;
    for (uint32_t signal = 0; signal < kNumSignals; ++signal) sum += rank_.endpoint->signal(signal);
    const uint64_t expected = incoming_.size() * static_cast<uint64_t>(schedule_.rounds);
    if (sum == expected) return "";
    return format("expected %llu signals in all, saw %llu; ", static_cast<unsigned long long>(expected),
                  static_cast<unsigned long long>(sum));
  }

  Rank& rank_;
  const PutSchedule schedule_;
  std::mt19937_64 random_;
  std::vector<PlannedPut> outgoing_, incoming_;
  std::vector<std::byte>& source_;
  std::vector<std::byte>& target_;
};

}  // namespace

std::string play(Rank& rank, const PutSchedule& schedule) { return Player(rank, schedule).play(); }

}  // namespace mk::test
