// SPDX-License-Identifier: MIT
#include "bootstrap_ring.h"

#include <unistd.h>

#include <algorithm>
#include <tuple>

#include "bootstrap_news.h"
#include "rank_list.h"

namespace mk {
namespace {

using std::chrono::milliseconds;

// Between the first news of a loss and its announcement: two deaths at the same moment become known everywhere,
// so that every rank names the same one.
constexpr milliseconds kSettle{300};
// A neighbour that told of a loss and closes sooner than this did not do so because of it: its rank has not
// been told yet. The difference to kSettle is what scheduling and the network may take.
constexpr milliseconds kIndependent{150};
constexpr milliseconds kOrderlyFarewell{1000};
constexpr milliseconds kAbruptFarewell{500};

}  // namespace

RingServer::RingServer(int rank, int nranks, milliseconds peer_timeout, RingEnds ends,
                       std::shared_ptr<RingState> state, int wake)
    : rank_(rank),
      nranks_(nranks),
      peer_timeout_(peer_timeout),
      beat_interval_(std::max<milliseconds>(peer_timeout / 8, milliseconds(10))),
      links_{Link{std::move(ends.previous), (rank + nranks - 1) % nranks, Clock::now()},
             Link{std::move(ends.next), (rank + 1) % nranks, Clock::now()}},
      state_(std::move(state)),
      wake_(wake) {}

void RingServer::run() {
  bool stop = false;
  while (!stop && !left_) {
    wait_for_events();
    stop = take_posts();
    for (const Side side : {previous, next}) serve(side);
    look_at_clock();
  }
  farewell(left_);
}

// True when the rank wants the thread to end.
bool RingServer::take_posts() {
  uint64_t count;
  [[maybe_unused]] const ssize_t got = read(wake_, &count, sizeof count);
  std::vector<RingState::Post> posts;
  bool stop = false;
  {
    std::lock_guard lock(state_->mutex);
    posts.swap(state_->posts);
    stop = state_->stop;
    left_ = state_->left;
  }
  const auto self = static_cast<uint32_t>(rank_);
  for (RingState::Post& post : posts) {
    if (post.kind == FrameKind::news) {
      learn(News{Fate::aborted, self, self, std::move(post.why)}, std::nullopt);
      continue;
    }
    // What goes out on one side arrives on the other one at the neighbour.
    if (reach(previous) > 0) links_[next].channel.send(post.kind, post.prefix, post.data);
    if (reach(next) > 0) links_[previous].channel.send(post.kind, post.prefix, post.data);
  }
  return stop;
}

void RingServer::wait_for_events() {
  std::array<pollfd, 3> waits{{{wake_, POLLIN, 0}, {-1, 0, 0}, {-1, 0, 0}}};
  for (const Side side : {previous, next}) {
    const Link& link = links_[side];
    if (!link.closed) waits[side + 1] = {link.channel.fd(), link.channel.events(), 0};
  }
  const int interval = static_cast<int>(beat_interval_.count());
  poll(waits.data(), waits.size(), settled_ ? std::min(interval, settled_->left_ms()) : interval);
}

void RingServer::serve(Side side) {
  Link& link = links_[side];
  if (link.closed) return;
  if (link.channel.pump()) link.heard = Clock::now();
  while (!link.closed) {
    const auto frame = link.channel.next();
    if (!frame) break;
    handle(side, *frame);
  }
  if (!link.closed && link.channel.end() != Channel::End::none) handle_end(side);
}

void RingServer::handle(Side side, const Frame& frame) {
  Link& link = links_[side];
  switch (frame.kind) {
    case FrameKind::heartbeat:
      return;
    case FrameKind::block:
    case FrameKind::leave:
      return handle_block(side, frame);
    case FrameKind::bye:
      link.bye = true;
      return;
    case FrameKind::news:
      if (const auto news = decode_news(frame.payload);
          news && std::max(news->subject, news->reporter) < static_cast<uint32_t>(nranks_)) {
        if (!link.brought_news) link.brought_news = Clock::now();
        return learn(*news, side);
      }
      break;
    default:
      break;
  }
  blame(link.peer, "a malformed frame");
}

int RingServer::distance(Side side, int origin) const {
  return side == previous ? (rank_ - origin + nranks_) % nranks_ : (origin - rank_ + nranks_) % nranks_;
}

void RingServer::handle_block(Side side, const Frame& frame) {
  const auto prefix = decode_block_prefix(frame.payload);
  const int origin = prefix ? static_cast<int>(prefix->origin) : -1;
  if (!prefix || origin >= nranks_ || origin == rank_ || distance(side, origin) > reach(side)) {
    return blame(links_[side].peer, "a block that does not belong on this link");
  }
  const auto split = frame.payload.begin() + kBlockPrefixBytes;
  auto data = std::make_shared<const Bytes>(split, frame.payload.end());
  Status arrived;
  std::function<void()> on_arrival;
  {
    std::lock_guard lock(state_->mutex);
    arrived = state_->board.arrive(origin, prefix->sequence, frame.kind, data);
    on_arrival = state_->on_arrival;
    if (state_->board.complete() || state_->board.odd_one()) state_->changed.notify_all();
  }
  if (!arrived.ok()) return blame(origin, arrived.sentence());
  if (distance(side, origin) < reach(side)) {
    links_[1 - side].channel.send(frame.kind, Bytes(frame.payload.begin(), split), std::move(data));
  }
  if (on_arrival) on_arrival();
}

void RingServer::handle_end(Side side) {
  Link& link = links_[side];
  const Channel::End end = link.channel.end();
  const std::string why = link.channel.why();
  const bool cut_off = link.channel.cut_off();
  link.closed = true;
  link.channel.close();
  // Once a loss has been announced, whoever closes does so because of it.
  const bool consequence = link.brought_news && Clock::now() - *link.brought_news > kIndependent;
  if (link.bye || announced_ || consequence) return;
  if (end == Channel::End::closed) {
    learn(News{Fate::died, static_cast<uint32_t>(link.peer), static_cast<uint32_t>(rank_),
               "connection closed: its process ended"},
          std::nullopt);
  } else if (end == Channel::End::lost && cut_off) {
    lose_silent(link.peer, "the network reports " + why);
  } else if (end == Channel::End::lost) {
    learn(News{Fate::died, static_cast<uint32_t>(link.peer), static_cast<uint32_t>(rank_),
               "connection lost (" + why + "): its process was killed"},
          std::nullopt);
  } else {
    blame(link.peer, why);
  }
}

void RingServer::look_at_clock() {
  const auto now = Clock::now();
  // This process itself was stopped for a while: the neighbours' silence is not theirs.
  const bool was_stopped = now - last_turn_ > peer_timeout_ / 2;
  last_turn_ = now;
  for (Link& link : links_) {
    if (link.closed) continue;
    if (was_stopped) link.heard = now;
    if (now - link.heard > peer_timeout_ && !link.bye) {
      link.closed = true;
      link.channel.close();
      lose_silent(link.peer, "silent for " + seconds(peer_timeout_.count()));
      continue;
    }
    if (now - link.beat >= beat_interval_) {
      link.beat = now;
      if (link.channel.output_empty()) link.channel.send(FrameKind::heartbeat);
      link.channel.flush();
    }
  }
  if (settled_ && settled_->passed()) announce_loss();
}

void RingServer::lose_silent(int rank, const std::string& what) {
  learn(News{Fate::silent, static_cast<uint32_t>(rank), static_cast<uint32_t>(rank_),
             what + ", its connection not closed: stopped, or cut off"},
        std::nullopt);
}

void RingServer::blame(int rank, std::string why) {
  learn(News{Fate::violated, static_cast<uint32_t>(rank), static_cast<uint32_t>(rank_), std::move(why)},
        std::nullopt);
}

// News of a rank is passed on once, away from where it came from; so it goes round both ways, and reaches every
// rank of what is left of the ring.
void RingServer::learn(const News& news, std::optional<Side> from) {
  if (!subjects_.insert(news.subject).second) return;
  for (const Side side : {previous, next}) {
    if (links_[side].closed || from == side) continue;
    links_[side].channel.send(FrameKind::news, encode(news));
    links_[side].channel.flush();
  }
  const bool own_abort = news.fate == Fate::aborted && news.subject == static_cast<uint32_t>(rank_);
  if (announced_ || own_abort) return;
  candidates_.push_back(news);
  if (!settled_) settled_ = Deadline::after(kSettle);
}

void RingServer::announce_loss() {
  settled_.reset();
  if (std::exchange(announced_, true)) return;
  // A death before a silence, and both before an abort, each of which may be the other's consequence; then the
  // lowest rank.
  const auto order = [](const News& news) {
    const int kind = news.fate == Fate::aborted ? 2 : news.fate == Fate::silent ? 1 : 0;
    return std::tuple(kind, news.subject);
  };
  const auto chosen = std::min_element(candidates_.begin(), candidates_.end(),
                                       [&](const News& a, const News& b) { return order(a) < order(b); });
  const auto loss = as_loss(*chosen, rank_);
  // The callback first: it knows the rank, a collective that fails knows the sentence only.
  std::unique_lock lock(state_->mutex);
  if (const auto callback = state_->on_peer_lost) {
    state_->lost_told = true;
    lock.unlock();
    callback(loss.first, loss.second);
    lock.lock();
  }
  state_->lost = loss;
  state_->changed.notify_all();
  // It may have been set meanwhile.
  if (const auto callback = state_->on_peer_lost; callback && !std::exchange(state_->lost_told, true)) {
    lock.unlock();
    callback(loss.first, loss.second);
  }
}

// Writes what is left to write, then closes; waits a little for the other end to have read it, because a reset
// would destroy what it has not.
void RingServer::farewell(bool orderly) {
  const Deadline limit = Deadline::after(orderly ? kOrderlyFarewell : kAbruptFarewell);
  std::array<bool, 2> shut{};
  // Who goes because of a loss that it has announced says so: the neighbour may be slower to announce it.
  for (Link& link : links_) {
    if ((orderly || announced_) && !link.closed) link.channel.send(FrameKind::bye);
  }
  while (true) {
    std::array<pollfd, 2> waits{{{-1, 0, 0}, {-1, 0, 0}}};
    for (const Side side : {previous, next}) {
      Link& link = links_[side];
      if (link.closed) continue;
      link.channel.pump();
      while (link.channel.next()) continue;
      if (!shut[side] && (link.channel.output_empty() || link.channel.write_failed())) {
        link.channel.shut_down_output();
        shut[side] = true;
      }
      link.closed = link.channel.end() != Channel::End::none;
      waits[side] = {link.closed ? -1 : link.channel.fd(), link.channel.events(), 0};
    }
    if ((links_[previous].closed && links_[next].closed) || limit.passed()) break;
    poll(waits.data(), waits.size(), limit.left_ms());
  }
  for (Link& link : links_) link.channel.close();
}

}  // namespace mk
