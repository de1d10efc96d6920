// SPDX-License-Identifier: MIT
// What one rank owns of the network between nodes: a command FIFO, the proxy thread that empties it into a backend,
// and the signal counters that arrivals raise.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "../lib/abort_token.h"
#include "../lib/exchange.h"
#include "../lib/topology.h"
#include "command.h"

namespace mk {

struct EndpointOptions {
  std::string backend;             // "loopback", ...; empty: automatic
  std::function<void()> on_event;  // called by the proxy after it published signals or completions; must not block
  std::function<void(int peer, Status)> on_peer_error;  // called by the proxy when a peer's link failed
};

class Endpoint {
 public:
  virtual ~Endpoint() = default;

  // Connects this rank to the ranks of other nodes. Collective. MK_ERROR_UNSUPPORTED when no backend can (the
  // sentence says what each one lacks).
  static Result<std::unique_ptr<Endpoint>> create(const Topology& topology, Exchange& exchange, AbortToken& abort,
                                                  EndpointOptions options, Deadline deadline);

  virtual const char* backend() const = 0;

  // Makes [base, base + bytes) a region that commands may name, at every rank under the same id. Collective; bytes
  // may differ between ranks, also 0. `deregister_region` waits for nothing: the caller has seen its commands complete.
  virtual Result<uint32_t> register_region(void* base, size_t bytes, Deadline deadline) = 0;
  virtual void deregister_region(uint32_t region) = 0;

  // Enqueues a command (any thread). False when the FIFO is full: try again after on_event, looking at the abort token meanwhile.
  virtual bool try_post(const Command& command) = 0;
  // Commands posted so far, and of these the ones whose source memory the network no longer reads. Equal: all are
  // locally complete. `completed` is read with acquire order.
  virtual uint64_t posted() const = 0;
  virtual uint64_t completed() const = 0;
  // Value of a signal counter, with acquire order: the bytes of the puts counted are visible.
  virtual uint64_t signal(uint32_t index) const = 0;
};

}  // namespace mk
