// SPDX-License-Identifier: MIT
// Ranks of one job as threads of the test, each with its own Bootstrap.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lib/bootstrap.h"

namespace mk::test {

using std::chrono::milliseconds;

struct Rank {
  AbortToken abort;
  BootstrapOptions options;
  int nranks = 0;
  int rank = 0;
  std::unique_ptr<Bootstrap> bootstrap;
  Status status;
  milliseconds took{0};
};

class Job {
 public:
  explicit Job(int nranks, milliseconds timeout = milliseconds(20000),
               milliseconds peer_timeout = milliseconds(8000)) {
    root = Bootstrap::create_root(&id);
    for (int r = 0; r < nranks; ++r) {
      ranks.push_back(std::make_unique<Rank>());
      ranks.back()->nranks = nranks;
      ranks.back()->rank = r;
      ranks.back()->options.timeout = timeout;
      ranks.back()->options.peer_timeout = peer_timeout;
      ranks.back()->options.build_id = "test";
    }
  }
  ~Job() {
    // Together, as processes that end would: a close takes its time until the neighbour closes too.
    each([](Rank& rank) { rank.bootstrap.reset(); });
  }

  void each(const std::function<void(Rank&)>& body) {
    std::vector<std::thread> threads;
    for (auto& rank : ranks) threads.emplace_back([&body, &rank] { body(*rank); });
    for (auto& thread : threads) thread.join();
  }

  void join_one(Rank& rank) {
    const auto start = std::chrono::steady_clock::now();
    auto joined = Bootstrap::join(id, rank.nranks, rank.rank, rank.options, rank.abort);
    rank.status = joined.status();
    if (joined.ok()) rank.bootstrap = joined.take();
    rank.took = std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start);
  }
  void join() {
    each([this](Rank& rank) { join_one(rank); });
  }
  bool all_joined() const {
    for (const auto& rank : ranks) {
      if (!rank->bootstrap) return false;
    }
    return true;
  }
  // Every rank leaves and is destroyed; "" or the first error.
  std::string leave() {
    each([](Rank& rank) {
      rank.status = rank.bootstrap->leave(Deadline::after(milliseconds(20000)));
      rank.bootstrap.reset();
    });
    for (const auto& rank : ranks) {
      if (!rank->status.ok()) return rank->status.sentence();
    }
    return "";
  }
  Rank& operator[](size_t index) { return *ranks[index]; }

  mk_unique_id_t id{};
  Status root;
  std::vector<std::unique_ptr<Rank>> ranks;
};

}  // namespace mk::test
