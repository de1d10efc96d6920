// SPDX-License-Identifier: MIT
// Ranks that die, abort, stay behind or go in order, as their peers see it.
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>

#include "../support/bootstrap_job.h"
#include "../support/catch.h"
#include "../support/process_state.h"

using namespace mk;
using mk::test::Job;
using mk::test::Rank;
using std::chrono::milliseconds;

namespace {

// What on_peer_lost told each rank.
class Losses {
 public:
  explicit Losses(Job& job) : told_(job.ranks.size()) {
    for (auto& rank : job.ranks) {
      const auto index = static_cast<size_t>(rank->rank);
      rank->bootstrap->on_peer_lost([this, index](int lost, Status reason) {
        std::lock_guard lock(mutex_);
        told_[index].push_back({lost, std::move(reason)});
        changed_.notify_all();
      });
    }
  }
  // The rank that `rank` was told, -1 after `limit`.
  int wait(int rank, milliseconds limit = milliseconds(5000)) {
    std::unique_lock lock(mutex_);
    auto& told = told_[static_cast<size_t>(rank)];
    if (!changed_.wait_for(lock, limit, [&] { return !told.empty(); })) return -1;
    return told.front().first;
  }
  std::string sentence(int rank) {
    std::lock_guard lock(mutex_);
    auto& told = told_[static_cast<size_t>(rank)];
    return told.empty() ? "" : told.front().second.sentence();
  }
  size_t count(int rank) {
    std::lock_guard lock(mutex_);
    return told_[static_cast<size_t>(rank)].size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::vector<std::pair<int, Status>>> told_;
};

Deadline soon(int ms = 10000) { return Deadline::after(milliseconds(ms)); }

Bytes bytes(const char* text) {
  const auto all = std::as_bytes(std::span(text, std::strlen(text)));
  return Bytes(all.begin(), all.end());
}

}  // namespace

TEST_CASE("a rank that goes without leaving is named by every other") {
  const int nranks = GENERATE(2, 3, 5, 16);
  CAPTURE(nranks);
  Job job(nranks);
  job.join();
  REQUIRE(job.all_joined());
  Losses losses(job);
  job[1].bootstrap.reset();
  for (int rank = 0; rank < nranks; ++rank) {
    if (rank == 1) continue;
    CAPTURE(rank);
    CHECK(losses.wait(rank) == 1);
    CHECK(losses.sentence(rank).find("rank 1 is lost: connection closed: its process ended (seen by rank ") ==
          0);
  }
  // The survivors go one by one; nobody is told anything more.
  for (int rank = 2; rank < nranks; ++rank) job[static_cast<size_t>(rank)].bootstrap.reset();
  CHECK(losses.count(0) == 1);
}

TEST_CASE("two ranks that go at once leave two pieces of ring, which name the same rank") {
  for (int round = 0; round < 5; ++round) {
    Job job(8);
    job.join();
    REQUIRE(job.all_joined());
    Losses losses(job);
    std::atomic<int> ready{0};
    const auto go = [&](size_t rank) {
      ++ready;
      while (ready < 2) std::this_thread::yield();
      job[rank].bootstrap.reset();
    };
    std::thread other(go, 6);
    go(2);
    other.join();
    const int named = losses.wait(0);
    CHECK((named == 2 || named == 6));
    for (const int rank : {1, 3, 4, 5, 7}) {
      CAPTURE(rank);
      CHECK(losses.wait(rank) == named);
    }
  }
}

TEST_CASE("a loss ends a gather on every rank, and later ones answer the same") {
  Job job(4);
  job.join();
  REQUIRE(job.all_joined());
  std::thread death([&] {
    std::this_thread::sleep_for(milliseconds(100));
    job[3].bootstrap.reset();
  });
  job.each([](Rank& rank) {
    if (rank.rank == 3) return;
    rank.status = rank.bootstrap->all_gather({}, soon(), "the exchange of keys").status();
  });
  death.join();
  for (size_t rank = 0; rank < 3; ++rank) {
    CHECK(job[rank].status.code() == MK_ERROR_REMOTE);
    CHECK(job[rank].status.sentence().find("the exchange of keys: rank 3 is lost") == 0);
    CHECK(job[rank].bootstrap->all_gather({}, soon(), "another one").status().code() == MK_ERROR_REMOTE);
    CHECK(job[rank].bootstrap->leave(soon()).code() == MK_ERROR_REMOTE);
  }
}

TEST_CASE("a loss that has happened already is told to a callback set later") {
  Job job(2);
  job.join();
  REQUIRE(job.all_joined());
  job[1].bootstrap.reset();
  CHECK(job[0].bootstrap->all_gather({}, soon(), "waiting").status().code() == MK_ERROR_REMOTE);
  int named = -1;
  job[0].bootstrap->on_peer_lost([&](int rank, Status) { named = rank; });
  CHECK(named == 1);
}

TEST_CASE("an abort that is announced reaches every other rank with its reason, once") {
  Job job(5);
  job.join();
  REQUIRE(job.all_joined());
  Losses losses(job);
  job[2].bootstrap->announce_abort("mk_comm_abort was called");
  // It goes right away, as a process would that aborts: its words are out before its connections close.
  job[2].bootstrap.reset();
  for (const int rank : {0, 1, 3, 4}) {
    CHECK(losses.wait(rank) == 2);
    CHECK(losses.sentence(rank) == "rank 2 aborted: mk_comm_abort was called");
    CHECK(losses.count(rank) == 1);
  }
}

TEST_CASE("a gather that runs out of time names the missing ranks") {
  Job job(5);
  job.join();
  REQUIRE(job.all_joined());
  const Status status = job[0].bootstrap->all_gather({}, soon(300), "the exchange of keys").status();
  CHECK(status.code() == MK_ERROR_TIMEOUT);
  const std::string begin = "the exchange of keys: rank 0 waited ";
  REQUIRE(status.sentence().find(begin) == 0);
  CHECK(std::atof(status.sentence().c_str() + begin.size()) >= 0.3);
  CHECK(status.sentence().find(" for ranks 1-4 of 5") != std::string::npos);
}

TEST_CASE("a gather that begins after its deadline says that the time went before") {
  Job job(3);
  job.join();
  REQUIRE(job.all_joined());
  const Status status = job[1].bootstrap->all_gather({}, soon(0), "choosing a transport").status();
  CHECK(status.code() == MK_ERROR_TIMEOUT);
  CHECK(status.sentence().find(
            "choosing a transport: the time was up when rank 1 came to this step, without ranks 0, 2 of 3") ==
        0);
}

TEST_CASE("an abort ends a gather within a second, with the token's reason") {
  Job job(3);
  job.join();
  REQUIRE(job.all_joined());
  std::thread aborter([&] {
    std::this_thread::sleep_for(milliseconds(100));
    job[0].abort.raise(Status(MK_ERROR_ABORTED, "the caller gave up"));
  });
  const auto start = std::chrono::steady_clock::now();
  const Status status = job[0].bootstrap->all_gather({}, soon(), "waiting").status();
  CHECK(std::chrono::steady_clock::now() - start < milliseconds(1100));
  aborter.join();
  CHECK(status.code() == MK_ERROR_ABORTED);
  CHECK(status.sentence() == "the caller gave up");
}

TEST_CASE("a block can be looked at before this rank enters the gather") {
  // What a callback uses outlives the ranks.
  std::mutex mutex;
  std::condition_variable changed;
  Job job(3);
  job.join();
  REQUIRE(job.all_joined());
  job[0].bootstrap->on_arrival([&] {
    std::lock_guard lock(mutex);
    changed.notify_all();
  });
  CHECK(!job[0].bootstrap->peek(1));
  std::thread one([&] { (void)job[1].bootstrap->all_gather(bytes("from one"), soon(), "step"); });
  {
    std::unique_lock lock(mutex);
    CHECK(changed.wait_for(lock, milliseconds(5000), [&] { return job[0].bootstrap->peek(1).has_value(); }));
  }
  CHECK(job[0].bootstrap->peek(1) == bytes("from one"));
  CHECK(!job[0].bootstrap->peek(2));
  CHECK(!job[0].bootstrap->peek(0));
  std::thread two([&] { (void)job[2].bootstrap->all_gather(bytes("from two"), soon(), "step"); });
  const auto gathered = job[0].bootstrap->all_gather({}, soon(), "step");
  one.join();
  two.join();
  REQUIRE(gathered.ok());
  CHECK(gathered.value()[2] == bytes("from two"));
  CHECK(!job[0].bootstrap->peek(1));
}

TEST_CASE("a rank that leaves while another gathers is told so") {
  Job job(2);
  job.join();
  REQUIRE(job.all_joined());
  job.each([](Rank& rank) {
    rank.status = rank.rank == 0 ? rank.bootstrap->leave(soon())
                                 : rank.bootstrap->all_gather({}, soon(), "a step").status();
  });
  CHECK(job[0].status.code() == MK_ERROR_NETWORK);
  CHECK(job[1].status.sentence() ==
        "a step: rank 0 is in another step than rank 1: the ranks' calls are not in the same order");
}

TEST_CASE("nothing stays behind, and leaving is no loss to anybody") {
  const int threads = test::running_threads();
  {
    // What the system's libraries keep from their first use does not count.
    Job first(2);
    first.join();
    REQUIRE(first.all_joined());
    CHECK(first.leave() == "");
  }
  CHECK(test::running_threads_settle_at(threads));
  const int descriptors = test::open_descriptors();
  {
    Job job(4);
    job.join();
    REQUIRE(job.all_joined());
    Losses losses(job);
    CHECK(job.leave() == "");
    for (int rank = 0; rank < 4; ++rank) CHECK(losses.count(rank) == 0);
  }
  CHECK(test::running_threads_settle_at(threads));
  CHECK(test::open_descriptors() == descriptors);

  for (int round = 0; round < 3; ++round) {
    Job job(3);
    job.join();
    REQUIRE(job.all_joined());
    const auto start = std::chrono::steady_clock::now();
    for (auto& rank : job.ranks) rank->bootstrap.reset();
    CHECK(std::chrono::steady_clock::now() - start < milliseconds(3 * 1500));
  }
  CHECK(test::running_threads_settle_at(threads));
  CHECK(test::open_descriptors() == descriptors);
}
