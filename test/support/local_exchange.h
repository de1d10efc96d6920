// SPDX-License-Identifier: MIT
// The bootstrap's all_gather for ranks that are threads of one test.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "lib/exchange.h"

namespace mk::test {

class LocalExchange {
 public:
  explicit LocalExchange(int nranks) {
    for (int rank = 0; rank < nranks; ++rank) {
      ends_.push_back(std::make_unique<End>(*this, rank));
    }
  }

  // What rank `rank` passes as its Exchange; lives as long as this object. One thread at a time.
  Exchange& of(int rank) { return *ends_[static_cast<size_t>(rank)]; }
  int nranks() const { return static_cast<int>(ends_.size()); }

 private:
  struct Round {
    std::vector<Bytes> blocks;
    std::vector<bool> present;
    int arrived = 0;
    int left = 0;
  };

  class End : public Exchange {
   public:
    End(LocalExchange& job, int rank) : job_(job), rank_(rank) {}
    int rank() const override { return rank_; }
    int nranks() const override { return job_.nranks(); }
    Result<std::vector<Bytes>> all_gather(std::span<const std::byte> mine, Deadline deadline,
                                          const char* what) override {
      return job_.all_gather(rank_, round_++, mine, deadline, what);
    }

   private:
    LocalExchange& job_;
    const int rank_;
    uint64_t round_ = 0;
  };

  Result<std::vector<Bytes>> all_gather(int rank, uint64_t number, std::span<const std::byte> mine,
                                        Deadline deadline, const char* what) {
    if (mine.size() > Exchange::kMaxBlockBytes) {
      return Status(MK_ERROR_INTERNAL, format("%s: a block of %zu bytes is too large", what, mine.size()));
    }
    std::unique_lock lock(mutex_);
    Round& round = rounds_[number];
    round.blocks.resize(ends_.size());
    round.present.resize(ends_.size());
    round.blocks[static_cast<size_t>(rank)].assign(mine.begin(), mine.end());
    round.present[static_cast<size_t>(rank)] = true;
    if (++round.arrived == nranks()) arrival_.notify_all();
    while (round.arrived < nranks()) {
      // The system clock's wait is the one that ThreadSanitizer of the supported compilers understands.
      const auto limit = std::chrono::system_clock::now() + std::chrono::milliseconds(deadline.left_ms());
      if (arrival_.wait_until(lock, limit) == std::cv_status::timeout && round.arrived < nranks()) {
        return Status(MK_ERROR_TIMEOUT,
                      format("%s: deadline passed; missing: %s", what, missing(round).c_str()));
      }
    }
    std::vector<Bytes> blocks = round.blocks;
    if (++round.left == nranks()) rounds_.erase(number);
    return blocks;
  }

  std::string missing(const Round& round) const {
    std::string names;
    for (size_t rank = 0; rank < round.present.size(); ++rank) {
      if (!round.present[rank]) names += format("%srank %zu", names.empty() ? "" : ", ", rank);
    }
    return names;
  }

  std::mutex mutex_;
  std::condition_variable arrival_;
  std::map<uint64_t, Round> rounds_;
  std::vector<std::unique_ptr<End>> ends_;
};

}  // namespace mk::test
