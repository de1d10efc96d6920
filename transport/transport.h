// SPDX-License-Identifier: MIT
// What a backend implements to carry puts between ranks of different nodes: a class and a line in kBackends
// (backends.cc). docs/adding-a-transport.md goes through it step by step.
//
// The promise to the receiver, and the only one: weak put-with-signal. A put may carry one signal. Whoever sees
// the counter of that signal include the put sees all bytes of the put. Nothing is promised between puts: they,
// and their signals, may arrive in any order, also between the same two ranks, and the bytes of one put in any
// order too. Each signal is delivered exactly once; a put that cannot be is a failure, reported, never silence.
//
// The promise to the sender: local completion. A put counts as complete when the network no longer reads its
// source memory; the peer need not have it yet. Completions are only counted, since puts may complete in any
// order.
//
// Credits. A backend accepts at most kCreditsPerPeer incomplete puts to a peer; post() answers false beyond
// that. The proxy then offers the same command again, polling completions and arrivals and looking at the abort
// token in between, so that a slow or dead peer costs no spinning and two ranks that send to each other cannot
// block each other: a backend never stops receiving because it cannot send. It buffers no more than a bounded
// amount in either direction.
//
// Threads. add_region, set_peer_keys and remove_region are called by the thread that registers, while the proxy
// runs. Everything else is called by the proxy thread alone (leave: after that thread has ended). No call
// blocks.
//
// Failure. What a peer sends is checked before it is believed: kind, sizes, region, generation, range, signal.
// A link that fails, or a peer that breaks the rules, is reported once through TransportEvents::failures; puts
// to that peer are then accepted and dropped. The endpoint raises the abort token.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "../lib/abort_token.h"
#include "../lib/exchange.h"
#include "../lib/topology.h"
#include "command.h"
#include "endpoint.h"
#include "region_table.h"

namespace mk {

inline constexpr uint32_t kCreditsPerPeer = 64;

// A command that the endpoint has checked: the peer exists on another node, both ranges lie in their regions,
// the signal is below kNumSignals or kNoSignal. `bytes` may be 0.
struct Put {
  int peer = 0;
  uint32_t signal = kNoSignal;
  uint32_t source_region = 0;
  const std::byte* source = nullptr;
  uint32_t target_region = 0;
  uint32_t target_generation = 0;
  uint64_t target_offset = 0;
  uint32_t bytes = 0;
};

// What poll() found. The caller clears it before.
struct TransportEvents {
  struct Failure {
    int peer;
    Status status;  // MK_ERROR_REMOTE or MK_ERROR_NETWORK; names the peer and the link
  };
  uint64_t completions = 0;       // puts that became locally complete
  bool credits = false;           // some came back, perhaps later than completions: post() may accept more
  std::vector<uint32_t> signals;  // counters to add one to; a signal may occur more than once
  std::vector<Failure> failures;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Makes a region usable by the network. Returns what the peers must know to write to it (a remote key), which
  // the endpoint hands to each of them through set_peer_keys: one entry a rank. The region is in the
  // RegionTable before; a put may arrive as soon as this has returned.
  virtual Result<Bytes> add_region(uint32_t region, std::byte* base, size_t bytes) = 0;
  virtual Status set_peer_keys(uint32_t region, std::span<const Bytes> keys) = 0;
  // After this the network does not touch the memory.
  virtual void remove_region(uint32_t region) = 0;

  // Accepts a put; false when the peer's credits are used up.
  virtual bool post(const Put& put) = 0;
  // Moves things on and reports what happened, a bounded amount at a time.
  virtual void poll(TransportEvents& events) = 0;
  // Before the proxy sleeps: adds the descriptors that become ready when poll() or post() can do something, and
  // returns how long it may sleep although none does (zero: not at all; std::chrono::microseconds::max(): as
  // long as it likes).
  virtual std::chrono::microseconds prepare_wait(std::vector<pollfd>& descriptors) = 0;
  // Orderly end: tells the peers that the link closing is not a failure. Not called after an abort.
  virtual void leave() = 0;
};

struct TransportContext {
  const Topology& topology;
  Exchange& exchange;                  // only during create
  AbortToken& abort;                   // outlives the transport
  RegionTable& regions;                // this rank's regions; outlives the transport
  std::string pci_bus_id;              // of this rank's GPU, for choosing NICs near it; empty: none
  std::vector<std::string> nics = {};  // EndpointOptions::nics
};

// A port of a NIC that a rank uses.
struct NicPort {
  std::string name;        // "mlx5_0:1"
  std::string address;     // its GID
  std::string kind;        // "RoCE v2"
  uint32_t mtu_bytes = 0;  // 0: not known
};

// Link i between two ranks joins port i of the one and port i of the other, each modulo their number.
struct NicSurvey {
  std::vector<NicPort> used;
  std::vector<std::string> unusable;  // a sentence each: "mlx5_1 port 1 is down"
  std::shared_ptr<void> opened;       // keeps the ports open: so long an emulated one has its address
};

struct Backend {
  const char* name;
  // Whether this process could use it at all (library and device present); the sentence says what is missing.
  Status (*available)();
  // Connects this rank to every rank of other nodes. Collective: it succeeds on every rank or fails on every
  // rank, with MK_ERROR_UNSUPPORTED on all when this backend cannot connect these nodes.
  Result<std::unique_ptr<Transport>> (*create)(const TransportContext& context, Deadline deadline);
  // Regions may be in a GPU's memory.
  bool reaches_gpu_memory = false;
  // The ports that this rank would use; nullptr: the backend does not choose NICs.
  NicSurvey (*survey)(const Topology& topology, const std::string& pci_bus_id) = nullptr;
};

// The backends of this build, the preferred first.
std::span<const Backend> backends();
// "rc, srd, ..."
std::string backend_names(std::span<const Backend> backends);

// Endpoint::create with a choice of backends.
Result<std::unique_ptr<Endpoint>> create_endpoint(std::span<const Backend> choice, const Topology& topology,
                                                  Exchange& exchange, AbortToken& abort,
                                                  EndpointOptions options, Deadline deadline);

}  // namespace mk
