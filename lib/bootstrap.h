// SPDX-License-Identifier: MIT
// How ranks find each other over TCP, and the ring of connections that they keep: set-up messages, heartbeats,
// news of dead and aborted ranks.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "abort_token.h"
#include "exchange.h"
#include "mkernel.h"

namespace mk {

struct BootstrapOptions {
  std::chrono::milliseconds timeout{60000};      // of the whole of join()
  std::chrono::milliseconds peer_timeout{8000};  // silence of a ring neighbour that means death
  int abi_version = MK_VERSION;
  std::string build_id;  // compared between ranks, at most 64 bytes
  std::string config;    // "name=value;name=value": compared between ranks, a difference is named
};

// The abort token, and what the callbacks use, outlive the Bootstrap: a callback that is replaced may still be
// running. Destroying it without leave() is how a rank that goes looks to the others; it takes at most a
// second. A collective that fails leaves the ranks out of step: every later one answers the same error.
class Bootstrap : public Exchange {
 public:
  // mk_get_unique_id: makes the id and starts its root thread in this process.
  static Status create_root(mk_unique_id_t* id);

  // Joins the job of `id`: authenticates to the root, learns the ring neighbours, connects them, starts the
  // thread that serves the ring. Blocks until all ranks have joined, options.timeout, or abort.
  static Result<std::unique_ptr<Bootstrap>> join(const mk_unique_id_t& id, int nranks, int rank,
                                                 const BootstrapOptions& options, AbortToken& abort);

  // Called at most once, from the ring thread (or at once, if it has happened already), when another rank died
  // (connection lost or silent), aborted, or broke the protocol: `rank` is that rank, the status says what is
  // known (MK_ERROR_REMOTE; MK_ERROR_NETWORK for the protocol). 300 ms go by between the first news and this
  // call, so that simultaneous losses are known everywhere and every rank names the same one.
  virtual void on_peer_lost(std::function<void(int rank, Status reason)> callback) = 0;

  // The block that `peer` has contributed to the all_gather that this rank has not entered yet; empty optional
  // if it has not.
  virtual std::optional<Bytes> peek(int peer) = 0;
  // Called from the ring thread whenever peek() may have something new.
  virtual void on_arrival(std::function<void()> callback) = 0;

  // Tells the other ranks, through the ring, that this rank aborts. Does not block.
  virtual void announce_abort(const std::string& why) = 0;
  // Orderly end: after this on every rank (it is collective), closed connections are not deaths.
  virtual Status leave(Deadline deadline) = 0;
};

}  // namespace mk
