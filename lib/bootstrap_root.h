// SPDX-License-Identifier: MIT
// The root: introduces the ranks of one job to their ring neighbours, then ends.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap_channel.h"
#include "bootstrap_id.h"
#include "deadline.h"

namespace mk {

// Who has checked in, and whether the job can still come together. Pure bookkeeping, without sockets.
class RollCall {
 public:
  // Adds a rank, or decides that the job has failed (failure() says why).
  void add(const CheckIn& check_in);
  void fail(Status failure) {
    if (failure_.ok()) failure_ = std::move(failure);
  }
  const Status& failure() const { return failure_; }
  bool complete() const { return failure_.ok() && nranks_ > 0 && static_cast<int>(members_.size()) == nranks_; }
  int nranks() const { return nranks_; }  // 0 before the first rank
  const std::map<int, CheckIn>& members() const { return members_; }
  // "ranks 3, 5-7 of 8 did not join within 60 s"
  Status missing(uint32_t timeout_ms) const;

 private:
  std::map<int, CheckIn> members_;
  int nranks_ = 0;
  int first_ = 0;
  Status failure_;
};

class Root {
 public:
  // Serves until the job is introduced or has failed, until nobody has come for `lifetime`, or until `stop` is
  // readable.
  Root(FileDescriptor listener, const UniqueId& id, std::chrono::milliseconds lifetime, int stop);
  void run();

 private:
  struct Guest {
    Channel channel;
    Deadline limit;  // to check in; once told, to take the answer
    int rank = -1;
    bool told = false;
  };

  void accept_guests();
  void serve(Guest& guest);
  void check_in(Guest& guest, const Frame& frame);
  void drop_ended();
  void tell(Guest& guest);
  void look_at_clock();
  bool done() const;
  int wait_ms() const;

  FileDescriptor listener_;
  UniqueId id_;
  int stop_;
  std::vector<std::unique_ptr<Guest>> guests_;
  RollCall roll_;
  Deadline until_;  // no rank yet: the lifetime; collecting: the first deadline of a rank; failed: the end of
                    // lingering
  uint32_t timeout_ms_ = 0;
  bool decided_ = false;
  int num_told_ = 0;
  int most_ranks_ = 0;  // the largest job that any rank believes in
  Deadline accept_again_ = Deadline::after(std::chrono::milliseconds(0));
};

// Starts a root for `id` in a thread of this process. The thread is joined when the process or the library
// ends.
Status start_root(FileDescriptor listener, const UniqueId& id, std::chrono::milliseconds lifetime);
// Ends the root of job `job` if it is in this process.
void stop_root(uint64_t job);
// Joins the threads of roots that have ended.
void reap_roots();

}  // namespace mk
