// SPDX-License-Identifier: MIT
// A rank's way into the ring: the root, then its two neighbours. Runs in the thread that calls Bootstrap::join.
#pragma once

#include <poll.h>

#include <optional>
#include <vector>

#include "bootstrap.h"
#include "bootstrap_channel.h"
#include "bootstrap_id.h"

namespace mk {

// The two connections of a rank on the ring.
struct RingEnds {
  Channel previous;
  Channel next;
};

class Joiner {
 public:
  Joiner(const UniqueId& id, int nranks, int rank, const BootstrapOptions& options, AbortToken& abort,
         Deadline deadline)
      : id_(id), nranks_(nranks), rank_(rank), options_(options), abort_(abort), deadline_(deadline) {}

  // Checks in at the root and learns who the neighbours are.
  Status meet_root();
  // Connects the successor and accepts the predecessor.
  Result<RingEnds> connect_ring();

 private:
  struct Stranger {
    Channel channel;
    Deadline limit;
  };

  Status wait(std::vector<pollfd>& waits, Deadline limit);
  Status pause(std::chrono::milliseconds span);
  Result<Channel> reach_root();
  void check_in(Channel& root);
  Result<bool> read_answer(Channel& root);
  Status open_listener(const Channel& root);
  Status ring_failure();
  Status turn();
  Status advance_successor();
  void accept_strangers();
  void advance_strangers();
  void blame_successor(std::string why);
  Status look_for_end(Channel& neighbour, int rank);
  Hello hello_to_successor() const;
  bool approach_successor();
  bool tell(Channel* channel, bool& told) const;
  void pass_on(const Status& failure);

  const UniqueId& id_;
  const int nranks_;
  const int rank_;
  const BootstrapOptions& options_;
  AbortToken& abort_;
  const Deadline deadline_;

  FileDescriptor listener_;
  SocketAddress address_;
  bool checked_in_ = false;
  Assignment assignment_;

  std::vector<Stranger> strangers_;
  std::optional<Channel> previous_;
  std::optional<Channel> next_;
  bool welcomed_ = false;
  std::string next_trouble_ = "no answer";
  Deadline connect_limit_ = Deadline::after(std::chrono::milliseconds(0));
  Deadline connect_again_ = connect_limit_;
  std::optional<News>
      news_;  // whose fault it is that the ring does not come together, when it is not this rank's
};

}  // namespace mk
