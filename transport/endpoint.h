// SPDX-License-Identifier: MIT
// What one rank owns of the network between nodes: a command FIFO, the proxy thread that empties it into a
// backend, and the signal counters that arrivals raise.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../lib/abort_token.h"
#include "../lib/exchange.h"
#include "../lib/topology.h"
#include "command.h"
#include "proxy.h"

namespace mk {

struct EndpointOptions {
  std::string backend;  // "loopback", ...; empty: MK_TRANSPORT, else automatic; the same on every rank
  // Called by the proxy after it published signals or completions, or made room in a FIFO that was found full.
  // Must not block.
  std::function<void()> on_event;
  // Called by the proxy, once a peer, when the link to a peer failed; peer -1: a command of this rank is wrong.
  // Then the proxy raises the abort token with the same status.
  std::function<void(int peer, Status)> on_peer_error;
  uint32_t fifo_capacity = 4096;  // commands, a power of two
  IdleStrategy idle;
  std::string pci_bus_id;  // of this rank's GPU, such as 0000:3b:00.0, for choosing NICs near it; empty: none
  // Ports to use instead of the library's choice, as the backend's survey names them; empty: its choice.
  std::vector<std::string> nics;
  // Regions may be in a GPU's memory: backends that cannot write there are passed over.
  bool gpu_memory = false;
  // Called by the proxy when the network has placed bytes, before it publishes their signals: makes them
  // visible to the GPU where the machine does not see to it by itself. Empty: it does.
  std::function<Status()> flush_writes;
};

// What a GPU's kernels use instead of try_post, completed and signal: pages to be registered with the GPU's
// driver. They live as long as someone holds them.
struct SharedWithGpu {
  std::shared_ptr<SharedPages> fifo;  // FifoLayout
  uint32_t fifo_capacity = 0;
  std::shared_ptr<SharedPages> counters;  // CounterLayout
};

class Endpoint {
 public:
  // Not collective. A peer whose puts are still under way sees a failed link unless the abort token is raised
  // there: ranks agree that all is done (any collective step) before they destroy their endpoints. Ends the
  // proxy; from then on no region is touched.
  virtual ~Endpoint() = default;

  // Connects this rank to the ranks of other nodes. Collective. MK_ERROR_UNSUPPORTED when no backend can (the
  // sentence says what each one lacks).
  static Result<std::unique_ptr<Endpoint>> create(const Topology& topology, Exchange& exchange,
                                                  AbortToken& abort, EndpointOptions options,
                                                  Deadline deadline);

  virtual const char* backend() const = 0;

  // Makes [base, base + bytes) a region that commands may name, at every rank under the same id. Collective;
  // bytes may differ between ranks, also 0. `deregister_region` waits for nothing: the caller has seen its
  // commands complete and, from its signals, those of its peers; a put that arrives later fails the link. Every
  // rank registers and deregisters in the same order (MK_ERROR_MISMATCH otherwise). One thread at a time.
  virtual Result<uint32_t> register_region(void* base, size_t bytes, Deadline deadline) = 0;
  virtual void deregister_region(uint32_t region) = 0;

  // Enqueues a command (any thread). False when the FIFO is full: try again after on_event, looking at the
  // abort token meanwhile. A command that names a peer, region, range or signal that does not exist becomes an
  // error of the endpoint (on_peer_error).
  virtual bool try_post(const Command& command) = 0;
  // Kernels that post count commands in the GPU's memory; then nobody calls try_post. While none runs a thread
  // may post in their place, with the indices that come next. False: the slot is not free yet.
  virtual SharedWithGpu shared_with_gpu() const = 0;
  virtual bool try_publish(uint64_t index, const Command& command) = 0;
  // Commands posted by try_post so far, and of all commands the ones whose source memory the network no longer
  // reads. Equal: all are locally complete. `completed` is read with acquire order. After a failure or an abort
  // they may stay different for ever.
  virtual uint64_t posted() const = 0;
  virtual uint64_t completed() const = 0;
  // Bytes of the puts to a peer that the backend has taken so far.
  virtual uint64_t sent_bytes(int peer) const = 0;
  // Value of a signal counter, with acquire order: the bytes of the puts counted are visible. index <
  // kNumSignals.
  virtual uint64_t signal(uint32_t index) const = 0;
};

}  // namespace mk
