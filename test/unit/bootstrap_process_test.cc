// SPDX-License-Identifier: MIT
// Ranks that are processes: one is killed, or stopped, and the others name it.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <thread>

#include "../support/catch.h"
#include "lib/bootstrap.h"

using namespace mk;
using std::chrono::milliseconds;

namespace {

constexpr int kMaxRanks = 8;

// Shared between the test and its ranks.
struct Blackboard {
  std::atomic<int> id_ready;
  mk_unique_id_t id;
  std::atomic<int> joined;
  std::atomic<int> told;
  int lost[kMaxRanks];
  char sentence[kMaxRanks][256];
};

template <class Condition>
bool eventually(Condition condition, milliseconds limit = milliseconds(10000)) {
  const Deadline deadline = Deadline::after(limit);
  while (!condition()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(milliseconds(2));
  }
  return true;
}

int run_rank(Blackboard& board, int rank, int nranks, milliseconds peer_timeout) {
  if (rank == 0) {
    if (!Bootstrap::create_root(&board.id).ok()) return 2;
    board.id_ready = 1;
  }
  if (!eventually([&] { return board.id_ready == 1; })) return 3;
  AbortToken abort;
  BootstrapOptions options;
  options.peer_timeout = peer_timeout;
  auto joined = Bootstrap::join(board.id, nranks, rank, options, abort);
  if (!joined.ok()) return 4;
  joined.value()->on_peer_lost([&](int lost, Status reason) {
    board.lost[rank] = lost;
    std::snprintf(board.sentence[rank], sizeof board.sentence[rank], "%s", reason.sentence().c_str());
    ++board.told;
  });
  ++board.joined;
  // Until the test ends this rank, or, for a survivor, until all survivors have been told.
  return eventually([&] { return board.told == nranks - 1; }, milliseconds(20000)) ? 0 : 5;
}

class Ranks {
 public:
  Ranks(int nranks, milliseconds peer_timeout) {
    board_ = new (mmap(nullptr, sizeof(Blackboard), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
        Blackboard{};
    for (int rank = 0; rank < nranks; ++rank) {
      const pid_t child = fork();
      if (child == 0) {
        alarm(60);
        _exit(run_rank(*board_, rank, nranks, peer_timeout));
      }
      children_.push_back(child);
    }
  }
  ~Ranks() {
    for (const pid_t child : children_) {
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    }
    munmap(board_, sizeof *board_);
  }
  Blackboard& board() { return *board_; }
  void signal(int rank, int number) { kill(children_[static_cast<size_t>(rank)], number); }
  bool all_joined() {
    return eventually([&] { return board_->joined == static_cast<int>(children_.size()); });
  }

 private:
  Blackboard* board_;
  std::vector<pid_t> children_;
};

}  // namespace

TEST_CASE("a rank killed with SIGKILL is named on the others at once") {
  const int nranks = GENERATE(2, 4);
  Ranks ranks(nranks, milliseconds(8000));
  REQUIRE(ranks.all_joined());
  ranks.signal(1, SIGKILL);
  REQUIRE(eventually([&] { return ranks.board().told == nranks - 1; }, milliseconds(3000)));
  for (int rank = 0; rank < nranks; ++rank) {
    if (rank == 1) continue;
    CHECK(ranks.board().lost[rank] == 1);
    CHECK(std::string(ranks.board().sentence[rank]).find("rank 1 is lost: connection ") == 0);
  }
}

TEST_CASE("a stopped rank is named on the others after the silence allowed") {
  Ranks ranks(4, milliseconds(1000));
  REQUIRE(ranks.all_joined());
  const auto start = Deadline::Clock::now();
  ranks.signal(2, SIGSTOP);
  REQUIRE(eventually([&] { return ranks.board().told == 3; }, milliseconds(5000)));
  CHECK(Deadline::Clock::now() - start > milliseconds(700));
  for (const int rank : {0, 1, 3}) {
    CHECK(ranks.board().lost[rank] == 2);
    CHECK(std::string(ranks.board().sentence[rank])
              .find("rank 2 does not answer: silent for 1 s, its connection not closed: stopped, or cut off") ==
          0);
  }
  // Once it runs again it hears that the others gave it up, and blames nobody.
  ranks.signal(2, SIGCONT);
}
