// SPDX-License-Identifier: MIT
#include "bootstrap_join.h"

#include <algorithm>
#include <cerrno>

#include "bootstrap_news.h"
#include "env.h"
#include "network_interface.h"
#include "rank_list.h"

namespace mk {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kAttemptTime{5000};
constexpr milliseconds kFirstPause{10};
constexpr milliseconds kLongestPause{500};
// The root decides at the deadline; its answer has this long to come.
constexpr milliseconds kAnswerGrace{700};
// Who leaves because of another rank tells its neighbours, also those that are still on their way to it.
constexpr milliseconds kPassOnTime{1000};
constexpr milliseconds kLatePassOnTime{400};
constexpr size_t kMaxStrangers = 32;

Deadline earlier(Deadline a, Deadline b) { return a.moment() < b.moment() ? a : b; }

void add(std::vector<pollfd>& waits, const Channel& channel) {
  waits.push_back({channel.fd(), channel.events(), 0});
}

}  // namespace

// Returns when something is ready or `limit` has passed; an error only when the abort token is raised.
Status Joiner::wait(std::vector<pollfd>& waits, Deadline limit) {
  waits.push_back({abort_.fd(), POLLIN, 0});
  const int left = limit.left_ms();
  poll(waits.data(), waits.size(), abort_.fd() < 0 ? std::min(left, 100) : left);
  waits.pop_back();
  return abort_.raised() ? abort_.reason() : Status();
}

Status Joiner::pause(milliseconds span) {
  const Deadline limit = earlier(Deadline::after(span), deadline_);
  std::vector<pollfd> nothing;
  while (!limit.passed()) MK_RETURN_IF_ERROR(wait(nothing, limit));
  return Status();
}

Result<Channel> Joiner::reach_root() {
  std::string trouble = "no answer";
  for (milliseconds span = kFirstPause; !deadline_.passed(); span = std::min(span * 2, kLongestPause)) {
    Result<FileDescriptor> socket = start_connect(id_.root);
    if (socket.ok()) {
      Channel root = Channel::client(socket.take(), id_.secret,
                                     Hello{Purpose::root, id_.job, static_cast<uint32_t>(rank_), 0, {}});
      const Deadline limit = earlier(Deadline::after(kAttemptTime), deadline_);
      while (!root.open() && root.end() == Channel::End::none && !limit.passed()) {
        std::vector<pollfd> waits;
        add(waits, root);
        MK_RETURN_IF_ERROR(wait(waits, limit));
        root.pump();
      }
      if (root.open()) return root;
      trouble = root.end() == Channel::End::none ? "no answer" : root.why();
      if (root.end() == Channel::End::wrong_secret) {
        return Status(MK_ERROR_NETWORK, format("the root at %s does not know the secret of this id: the id is "
                                               "stale, or another job uses that port",
                                               id_.root.text().c_str()));
      }
      if (checked_in_ && root.end() == Channel::End::refused) {
        return Status(MK_ERROR_NETWORK, format("the root at %s ended before all %d ranks had joined",
                                               id_.root.text().c_str(), nranks_));
      }
    } else {
      trouble = socket.status().sentence();
    }
    MK_RETURN_IF_ERROR(pause(span));
  }
  return Status(
      MK_ERROR_NETWORK,
      format(
          "rank %d cannot reach the root at %s within %s: %s; is the process that made the id running, and its "
          "address reachable from here (MK_SOCKET_IFNAME, MK_ROOT_PORT)?",
          rank_, id_.root.text().c_str(), seconds(options_.timeout.count()).c_str(), trouble.c_str()));
}

Status Joiner::open_listener(const Channel& root) {
  const std::string selection = env::text("MK_SOCKET_IFNAME");
  // What the routes to the root use is an address that works; a selection by the user overrides it.
  address_ = bound_address(root.fd());
  address_.port = 0;
  if (!selection.empty()) {
    auto interfaces = list_network_interfaces();
    if (!interfaces.ok()) return interfaces.status();
    auto chosen = choose_network_interface(interfaces.value(), selection, id_.root);
    if (!chosen.ok()) return chosen.status();
    address_ = chosen->address;
  }
  auto listener = listen_on(address_);
  if (!listener.ok()) return listener.status();
  listener_ = listener.take();
  return Status();
}

Status Joiner::meet_root() {
  while (true) {
    Result<Channel> root = reach_root();
    if (!root.ok()) return root.status();
    if (!listener_.valid()) MK_RETURN_IF_ERROR(open_listener(root.value()));
    check_in(root.value());
    const Deadline limit = Deadline::at(deadline_.moment() + kAnswerGrace);
    while (root->end() == Channel::End::none) {
      std::vector<pollfd> waits;
      add(waits, root.value());
      MK_RETURN_IF_ERROR(wait(waits, limit));
      root->pump();
      const Result<bool> answered = read_answer(root.value());
      if (!answered.ok()) return answered.status();
      if (answered.value()) return Status();
      if (limit.passed()) {
        return Status(MK_ERROR_NETWORK, format("the root at %s fell silent after rank %d had checked in",
                                               id_.root.text().c_str(), rank_));
      }
    }
    // The root let go of the connection, perhaps among too many strangers: once more.
    MK_RETURN_IF_ERROR(pause(kFirstPause));
  }
}

void Joiner::check_in(Channel& root) {
  root.set_max_payload(kMaxRootPayload);
  CheckIn message;
  message.rank = static_cast<uint32_t>(rank_);
  message.nranks = static_cast<uint32_t>(nranks_);
  message.abi_version = static_cast<uint32_t>(options_.abi_version);
  message.timeout_ms = static_cast<uint32_t>(options_.timeout.count());
  message.left_ms = static_cast<uint32_t>(deadline_.left_ms());
  message.address = address_;
  message.build_id = options_.build_id;
  message.config = options_.config;
  root.send(FrameKind::check_in, encode(message));
  root.flush();
  checked_in_ = true;
}

// True: the neighbours are known. An error: the root's verdict.
Result<bool> Joiner::read_answer(Channel& root) {
  while (const auto frame = root.next()) {
    if (frame->kind == FrameKind::verdict) {
      const auto verdict = decode_verdict(frame->payload);
      if (verdict) return Status(static_cast<mk_status_t>(verdict->status), verdict->sentence);
    } else if (frame->kind == FrameKind::assignment) {
      const auto assignment = decode_assignment(frame->payload);
      if (assignment) {
        assignment_ = *assignment;
        return true;
      }
    }
    return Status(MK_ERROR_NETWORK, format("the root at %s sent a malformed answer", id_.root.text().c_str()));
  }
  return false;
}

Result<RingEnds> Joiner::connect_ring() {
  Status failure;
  while (failure.ok() && !(previous_ && welcomed_)) failure = turn();
  if (!failure.ok()) {
    pass_on(failure);
    return failure;
  }
  listener_ = FileDescriptor();
  strangers_.clear();
  for (Channel* channel : {&*previous_, &*next_}) {
    channel->set_max_payload(kMaxRingPayload);
    set_user_timeout(channel->fd(), options_.peer_timeout);
  }
  return RingEnds{std::move(*previous_), std::move(*next_)};
}

Status Joiner::turn() {
  MK_RETURN_IF_ERROR(advance_successor());
  if (previous_) {
    MK_RETURN_IF_ERROR(look_for_end(*previous_, static_cast<int>(assignment_.predecessor)));
  } else {
    accept_strangers();
    advance_strangers();
  }
  if (previous_ && welcomed_) return Status();
  if (deadline_.passed()) return ring_failure();
  Deadline limit = deadline_;
  std::vector<pollfd> waits;
  if (!previous_) waits.push_back({listener_.get(), POLLIN, 0});
  if (!welcomed_) limit = earlier(limit, next_ ? connect_limit_ : connect_again_);
  if (next_) add(waits, *next_);
  if (previous_) add(waits, *previous_);
  for (const Stranger& stranger : strangers_) {
    add(waits, stranger.channel);
    limit = earlier(limit, stranger.limit);
  }
  return wait(waits, limit);
}

Status Joiner::ring_failure() {
  if (!welcomed_) {
    blame_successor(next_trouble_);
    return Status(
        MK_ERROR_TIMEOUT,
        format("rank %d could not connect to rank %d at %s within %s: %s; does the network let it through "
               "(MK_SOCKET_IFNAME chooses the interface)?",
               rank_, (rank_ + 1) % nranks_, assignment_.successor.text().c_str(),
               seconds(options_.timeout.count()).c_str(), next_trouble_.c_str()));
  }
  return Status(MK_ERROR_TIMEOUT,
                format("rank %u did not connect to rank %d at %s within %s", assignment_.predecessor, rank_,
                       address_.text().c_str(), seconds(options_.timeout.count()).c_str()));
}

void Joiner::blame_successor(std::string why) {
  news_ = News{Fate::died, static_cast<uint32_t>((rank_ + 1) % nranks_), static_cast<uint32_t>(rank_),
               std::move(why)};
}

// A neighbour that is connected already and goes away again usually says why, among the frames that came
// before.
Status Joiner::look_for_end(Channel& neighbour, int rank) {
  neighbour.pump();
  if (neighbour.end() == Channel::End::none) return Status();
  while (const auto frame = neighbour.next()) {
    if (frame->kind == FrameKind::news) news_ = decode_news(frame->payload);
  }
  if (!news_) {
    news_ = News{Fate::died, static_cast<uint32_t>(rank), static_cast<uint32_t>(rank_),
                 neighbour.why() + " while the ring was being connected"};
  }
  return as_loss(*news_, rank_).second;
}

Hello Joiner::hello_to_successor() const {
  return {
      Purpose::ring, id_.job, static_cast<uint32_t>(rank_), static_cast<uint32_t>((rank_ + 1) % nranks_), {}};
}

Status Joiner::advance_successor() {
  if (welcomed_) return look_for_end(*next_, (rank_ + 1) % nranks_);
  if (!next_) {
    if (!connect_again_.passed()) return Status();
    Result<FileDescriptor> socket = start_connect(assignment_.successor);
    connect_again_ = Deadline::after(kLongestPause);
    if (!socket.ok()) {
      next_trouble_ = socket.status().sentence();
      return Status();
    }
    next_ = Channel::client(socket.take(), id_.secret, hello_to_successor());
    connect_limit_ = Deadline::after(kAttemptTime);
  }
  next_->pump();
  if (const auto frame = next_->next(); frame && frame->kind == FrameKind::welcome) {
    welcomed_ = true;
    return Status();
  }
  if (next_->end() == Channel::End::none && !connect_limit_.passed()) return Status();
  next_trouble_ = next_->end() == Channel::End::none ? "no answer" : next_->why();
  if (next_->end() == Channel::End::refused) {
    blame_successor("its process ended, or a firewall rejects connections to it");
    return Status(MK_ERROR_REMOTE, format("rank %d at %s ended while the ring was being connected, or a "
                                          "firewall rejects rank %d's connection",
                                          (rank_ + 1) % nranks_, assignment_.successor.text().c_str(), rank_));
  }
  next_.reset();
  return Status();
}

void Joiner::accept_strangers() {
  while (true) {
    bool exhausted = false;
    FileDescriptor accepted = accept_connection(listener_.get(), &exhausted);
    if (!strangers_.empty() && (exhausted || (accepted.valid() && strangers_.size() >= kMaxStrangers))) {
      strangers_.erase(strangers_.begin());
    }
    if (!accepted.valid()) return;
    strangers_.push_back(Stranger{Channel::server(std::move(accepted), id_.secret, Purpose::ring,
                                                  static_cast<uint32_t>(rank_), assignment_.predecessor),
                                  Deadline::after(kAttemptTime)});
  }
}

void Joiner::advance_strangers() {
  for (size_t i = 0; i < strangers_.size();) {
    Channel& channel = strangers_[i].channel;
    channel.pump();
    if (channel.open() && !previous_) {
      channel.send(FrameKind::welcome);
      channel.flush();
      previous_ = std::move(channel);
      strangers_.clear();
      return;
    }
    if (channel.end() != Channel::End::none || strangers_[i].limit.passed()) {
      strangers_.erase(strangers_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

// The neighbours hear why this rank leaves, so that nobody blames this rank for another's death: those that are
// connected already at once, the others as soon as they are. Who is the cause itself is not waited for.
void Joiner::pass_on(const Status& failure) {
  const auto self = static_cast<uint32_t>(rank_);
  news_ = news_.value_or(News{Fate::aborted, self, self, failure.sentence()});
  const int successor = (rank_ + 1) % nranks_;
  bool previous_done = news_->subject == assignment_.predecessor;
  bool next_done = news_->subject == static_cast<uint32_t>(successor);
  bool previous_told = false;
  bool next_told = false;
  const Deadline late = Deadline::at(deadline_.moment() + kLatePassOnTime);
  const Deadline limit = earlier(Deadline::after(kPassOnTime), late);
  while (true) {
    if (!previous_ && !previous_done) {
      accept_strangers();
      advance_strangers();
    }
    if (!next_done && !welcomed_) next_done = !approach_successor();
    const bool next_open = next_ && next_->open();
    previous_done = tell(previous_ ? &*previous_ : nullptr, previous_told) || previous_done;
    next_done = tell(next_open ? &*next_ : nullptr, next_told) || next_done;
    if ((previous_done && next_done) || limit.passed()) return;
    std::vector<pollfd> waits;
    if (!previous_) waits.push_back({listener_.get(), POLLIN, 0});
    if (previous_) add(waits, *previous_);
    if (next_) add(waits, *next_);
    for (const Stranger& stranger : strangers_) add(waits, stranger.channel);
    poll(waits.data(), waits.size(), std::min(limit.left_ms(), 20));
  }
}

// Sends the news once; true when it is written, or nobody is there to read it.
bool Joiner::tell(Channel* channel, bool& told) const {
  if (!channel) return false;
  if (!told) {
    channel->send(FrameKind::news, encode(*news_));
    // The close that follows means nothing more than this.
    channel->send(FrameKind::bye);
    told = true;
  }
  channel->pump();
  return channel->output_empty() || channel->write_failed() || channel->end() != Channel::End::none;
}

// A step towards the successor, for news alone; false when there is no way to it.
bool Joiner::approach_successor() {
  if (!next_) {
    Result<FileDescriptor> socket = start_connect(assignment_.successor);
    if (!socket.ok()) return false;
    next_ = Channel::client(socket.take(), id_.secret, hello_to_successor());
  }
  next_->pump();
  return next_->end() == Channel::End::none;
}

}  // namespace mk
