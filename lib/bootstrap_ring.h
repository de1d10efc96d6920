// SPDX-License-Identifier: MIT
// The ring of connections that ranks keep, and the thread that serves it: it forwards blocks both ways, each
// half-way round, sends heartbeats, and spreads the news of dead and aborted ranks.
#pragma once

#include <poll.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "bootstrap_board.h"
#include "bootstrap_join.h"
#include "deadline.h"

namespace mk {

// What the ring thread and the rank's own threads share.
struct RingState {
  RingState(int rank, int nranks) : board(rank, nranks) {}

  struct Post {
    FrameKind kind;
    Bytes prefix;                       // of a block or leave
    std::shared_ptr<const Bytes> data;  // likewise
    std::string why;                    // of news
  };

  std::mutex mutex;
  std::condition_variable changed;
  // The rest is guarded by `mutex`.
  BlockBoard board;
  std::vector<Post> posts;  // from the rank to the ring thread
  bool left = false;        // every rank has entered leave(): closes are not deaths
  bool stop = false;
  std::optional<std::pair<int, Status>> lost;
  bool lost_told = false;
  std::function<void(int, Status)> on_peer_lost;
  std::function<void()> on_arrival;
};

class RingServer {
 public:
  // `wake` is an eventfd that is written after a change of posts, left or stop.
  RingServer(int rank, int nranks, std::chrono::milliseconds peer_timeout, RingEnds ends,
             std::shared_ptr<RingState> state, int wake);
  // The body of the ring thread.
  void run();

 private:
  using Clock = Deadline::Clock;
  enum Side : size_t { previous = 0, next = 1 };
  struct Link {
    Channel channel;
    int peer;
    Clock::time_point heard;
    Clock::time_point beat{};
    bool bye = false;                                 // the neighbour has left in order
    std::optional<Clock::time_point> brought_news{};  // when the neighbour first told of a loss
    bool closed = false;
  };

  // Blocks travel this many links from their origin in the direction that arrives on `side`; together all W-1
  // others.
  int reach(Side side) const { return side == previous ? nranks_ / 2 : (nranks_ - 1) / 2; }
  int distance(Side side, int origin) const;

  bool take_posts();
  void wait_for_events();
  void serve(Side side);
  void handle(Side side, const Frame& frame);
  void handle_block(Side side, const Frame& frame);
  void handle_end(Side side);
  void look_at_clock();
  void learn(const News& news, std::optional<Side> from);
  void announce_loss();
  void lose_silent(int rank, const std::string& what);
  void blame(int rank, std::string why);
  void farewell(bool orderly);

  const int rank_;
  const int nranks_;
  const std::chrono::milliseconds peer_timeout_;
  const std::chrono::milliseconds beat_interval_;
  std::array<Link, 2> links_;
  std::shared_ptr<RingState> state_;
  const int wake_;
  bool left_ = false;
  Clock::time_point last_turn_ = Clock::now();

  std::set<uint32_t> subjects_;   // whose fate is known
  std::vector<News> candidates_;  // until the loss is announced
  std::optional<Deadline> settled_;
  bool announced_ = false;
};

}  // namespace mk
