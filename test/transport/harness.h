// SPDX-License-Identifier: MIT
// Ranks for tests of transports, as threads or as processes, and what the suite is run over.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lib/abort_token.h"
#include "lib/exchange.h"
#include "test/support/sanitizers.h"
#include "transport/endpoint.h"
#include "transport/transport.h"

namespace mk::test {

// A backend and the environment that it is tried under.
struct BackendCase {
  const char* backend;
  const char* seed;  // MK_LOOPBACK_SEED
  // The receiving rank checks and copies; otherwise the network writes, and a wrong put is an error of the
  // sender's alone.
  bool receiver_places = true;
  const char* environment = "";  // more of it: NAME=value, separated by blanks
};

// The backends that must pass the suite. A new one adds its lines here; one that is not available is left out.
// MK_TEST_BACKENDS names one backend to run over; without it, those that need no emulated device.
std::vector<BackendCase> backend_cases();
// Sets what the case says, and nothing of another one.
void set_environment(const BackendCase& backend);

enum class RankKind { threads, processes };

// ThreadSanitizer cannot follow an order of events that goes through another process, so it sees ranks as
// threads only.
inline std::vector<RankKind> rank_kinds() {
  if (kThreadSanitizer) return {RankKind::threads};
  return {RankKind::threads, RankKind::processes};
}

// One rank of a test. What a body reports as text fails the test.
class Rank {
 public:
  Rank(int rank, const std::vector<int>& node_of_rank, Exchange& rank_exchange);
  // The proxy uses what else this object has until the endpoint is gone.
  ~Rank() { endpoint.reset(); }

  // Of every step and wait, where none is given.
  std::chrono::milliseconds timeout{60000};

  const int rank;
  const int nranks;
  const Topology topology;
  Exchange& exchange;
  AbortToken abort;
  std::unique_ptr<Endpoint> endpoint;

  // Makes the endpoint with hooks of this object; `choice` stands in for the library's table when it is not
  // empty.
  Status connect(EndpointOptions options, std::span<const Backend> choice = {});
  // Memory that outlives the endpoint.
  std::vector<std::byte>& make_memory(size_t bytes, int value = 0) {
    return memories_.emplace_back(bytes, static_cast<std::byte>(value));
  }
  Result<uint32_t> add_region(std::vector<std::byte>& memory);
  bool is_peer(int other) const { return !topology.same_node(rank, other); }

  // Sleeps until the condition holds: true; false at the abort or after the timeout. Woken by the endpoint
  // alone.
  bool wait(const std::function<bool()>& condition);
  bool wait(const std::function<bool()>& condition, std::chrono::milliseconds limit);
  // Posts, waiting while the FIFO is full.
  bool post(const Command& command);
  // Until all posted commands are locally complete. Looks without the lock for a while, so that the order of
  // the counter's own operations is all that ThreadSanitizer has to go by.
  bool wait_complete();
  // Every rank comes here before one goes on.
  bool barrier();
  void wake();

  // Peers that on_peer_error has named, and what it said last.
  std::vector<int> failed_peers();
  std::string failure();
  // Runs in the proxy's thread, before wake(): a test that makes a rank slow.
  std::function<void()> on_event_hook;

 private:
  std::mutex mutex_;
  std::condition_variable event_;
  std::deque<std::vector<std::byte>> memories_;
  std::vector<int> failed_peers_;
  std::string failure_;
};

using RankBody = std::function<std::string(Rank&)>;

// Runs the body as every rank; returns what the ranks had to report, "" when all went well. Ranks with the same
// number in `node_of_rank` share a node.
std::string run_ranks(RankKind kind, const BackendCase& backend, const std::vector<int>& node_of_rank,
                      const RankBody& body);

Command make_put(int peer, uint64_t source, uint64_t target, uint32_t bytes, uint32_t signal = kNoSignal);
Command make_signal(int peer, uint32_t signal);

}  // namespace mk::test

// Leaves a body with the text when the condition does not hold.
#define MK_EXPECT(condition)                                                            \
  do {                                                                                  \
    if (!(condition)) return mk::format("%s:%d: %s; ", __FILE__, __LINE__, #condition); \
  } while (0)
#define MK_EXPECT_OK(expression)                                                             \
  do {                                                                                       \
    if (const mk::Status mk_expected_ = (expression); !mk_expected_.ok())                    \
      return mk::format("%s:%d: %s; ", __FILE__, __LINE__, mk_expected_.sentence().c_str()); \
  } while (0)
