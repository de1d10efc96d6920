// SPDX-License-Identifier: MIT
#include "harness.h"

#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>
#include <thread>

#include "../support/local_exchange.h"
#include "../support/process_exchange.h"

// The library with emulated NICs, in the build folder of this test. A short retry time, for the tests of dead
// peers.
#ifndef MK_SOFTNIC_LIBRARY
#define MK_SOFTNIC_LIBRARY "libsoftnic.so"
#endif
#define MK_SOFTNIC(kind) "MK_VERBS_LIBRARY=" MK_SOFTNIC_LIBRARY " MK_SOFTNIC_KIND=" kind " MK_IB_TIMEOUT=18 "

namespace mk::test {
namespace {

Topology make_topology(int rank, const std::vector<int>& node_of_rank) {
  Topology topology;
  topology.rank = rank;
  topology.nranks = static_cast<int>(node_of_rank.size());
  topology.num_nodes = *std::max_element(node_of_rank.begin(), node_of_rank.end()) + 1;
  topology.node_of_rank = node_of_rank;
  topology.ranks_of_node.resize(static_cast<size_t>(topology.num_nodes));
  for (int r = 0; r < topology.nranks; ++r) {
    auto& ranks = topology.ranks_of_node[static_cast<size_t>(node_of_rank[static_cast<size_t>(r)])];
    topology.local_rank_of_rank.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(r);
  }
  return topology;
}

// Of a test whose ranks are processes.
constexpr std::chrono::seconds kLongest{100};

// With what the link had to say, which is often the reason.
std::string report(Rank& rank, const std::string& text) {
  if (text.empty()) return "";
  const std::string failure = rank.failure();
  const bool said = failure.empty() || text.find(failure) != std::string::npos;
  return "rank " + std::to_string(rank.rank) + ": " + text + (said ? "" : "(" + failure + ") ");
}

// The ranks that run now. One that has something to report ends the waits of the others, for it will not do
// what they wait for.
class RunningRanks {
 public:
  void add(Rank* rank) {
    std::lock_guard lock(mutex_);
    ranks_.insert(rank);
  }
  void remove(Rank* rank, const std::string& text) {
    std::lock_guard lock(mutex_);
    ranks_.erase(rank);
    if (text.empty()) return;
    for (Rank* other : ranks_)
      other->abort.raise(Status(MK_ERROR_ABORTED, format("rank %d has ended", rank->rank)));
  }

 private:
  std::mutex mutex_;
  std::set<Rank*> ranks_;
};

std::string run_threads(const std::vector<int>& node_of_rank, const RankBody& body) {
  const int nranks = static_cast<int>(node_of_rank.size());
  LocalExchange exchange(nranks);
  RunningRanks running;
  std::vector<std::string> texts(node_of_rank.size());
  std::vector<std::thread> threads;
  for (int r = 0; r < nranks; ++r) {
    threads.emplace_back([&, r] {
      Rank rank(r, node_of_rank, exchange.of(r));
      running.add(&rank);
      std::string& text = texts[static_cast<size_t>(r)];
      text = report(rank, body(rank));
      running.remove(&rank, text);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string all;
  for (const std::string& text : texts) all += text;
  return all;
}

// What a forked rank does: its report is its last message to the test.
[[noreturn]] void be_rank(int r, const std::vector<int>& node_of_rank, int exchange_fd, int report_fd,
                          const RankBody& body) {
  std::string text;
  {
    ProcessExchange exchange(exchange_fd, r, static_cast<int>(node_of_rank.size()));
    Rank rank(r, node_of_rank, exchange);
    text = report(rank, body(rank));
  }
  send_all(report_fd, text.data(), text.size());
  _exit(text.empty() ? 0 : 1);
}

std::string run_processes(const std::vector<int>& node_of_rank, const RankBody& body) {
  const int nranks = static_cast<int>(node_of_rank.size());
  std::vector<int> hub_fds, report_fds;
  std::vector<pid_t> children;
  for (int r = 0; r < nranks; ++r) {
    int hub[2], reporting[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, hub) != 0) return "no socketpair";
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, reporting) != 0) return "no socketpair";
    const pid_t child = fork();
    if (child < 0) return "no process";
    if (child == 0) {
      for (const int fd : hub_fds) close(fd);
      for (const int fd : report_fds) close(fd);
      close(hub[0]), close(reporting[0]);
      be_rank(r, node_of_rank, hub[1], reporting[1], body);
    }
    close(hub[1]), close(reporting[1]);
    hub_fds.push_back(hub[0]), report_fds.push_back(reporting[0]);
    children.push_back(child);
  }
  ProcessExchangeHub(hub_fds).serve(Deadline::after(kLongest));
  std::string all;
  for (int r = 0; r < nranks; ++r) {
    const size_t i = static_cast<size_t>(r);
    shutdown(hub_fds[i], SHUT_RDWR);
  }
  for (int r = 0; r < nranks; ++r) {
    const size_t i = static_cast<size_t>(r);
    char buffer[4096];
    for (ssize_t got; (got = recv(report_fds[i], buffer, sizeof buffer, 0)) > 0;) {
      all.append(buffer, static_cast<size_t>(got));
    }
    int status = 0;
    waitpid(children[i], &status, 0);
    const bool fine = WIFEXITED(status) && WEXITSTATUS(status) <= 1;
    // A test may kill a rank on purpose; anything else that a process died of is the test's failure.
    const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (!fine && !killed)
      all += format("rank %d ended with wait status 0x%x; ", r, static_cast<unsigned>(status));
    close(hub_fds[i]), close(report_fds[i]);
  }
  return all;
}

}  // namespace

std::vector<BackendCase> backend_cases() {
  static constexpr BackendCase kCases[] = {
      {"loopback", "0"},
      {"loopback", "1"},
      {"loopback", "20240607"},
      {"ofi", "0", false},
      {"rc", "0", true, MK_SOFTNIC("ib") "MK_SOFTNIC_NICS=1"},
      {"rc", "0", true, MK_SOFTNIC("roce") "MK_SOFTNIC_NICS=4 MK_SOFTNIC_SEED=5"},
      {"rc", "0", true, MK_SOFTNIC("roce") "MK_SOFTNIC_NICS=2 MK_SOFTNIC_SEED=6 MK_IB_SIGNAL=completion"},
      {"srd", "0", true, MK_SOFTNIC("efa") "MK_SOFTNIC_NICS=1"},
      {"srd", "0", true, MK_SOFTNIC("efa") "MK_SOFTNIC_NICS=4 MK_SOFTNIC_SEED=7"},
  };
  const char* chosen = std::getenv("MK_TEST_BACKENDS");
  std::vector<BackendCase> cases;
  for (const BackendCase& candidate : kCases) {
    const bool emulated = candidate.environment[0] != '\0';
    if (chosen != nullptr ? std::strcmp(chosen, candidate.backend) != 0 : emulated) continue;
    set_environment(candidate);
    for (const Backend& backend : backends()) {
      if (std::strcmp(backend.name, candidate.backend) == 0 && backend.available().ok())
        cases.push_back(candidate);
    }
  }
  // Asked for by name it must not be left out in silence.
  if (chosen != nullptr && cases.empty()) cases.push_back({chosen, "0"});
  return cases;
}

void set_environment(const BackendCase& backend) {
  static std::set<std::string> set_before;
  for (const std::string& name : set_before) unsetenv(name.c_str());
  std::istringstream words(backend.environment);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    setenv(name.c_str(), word.substr(equals + 1).c_str(), 1);
    set_before.insert(name);
  }
  setenv("MK_LOOPBACK_SEED", backend.seed, 1);
  setenv("MK_TEST_BACKEND", backend.backend, 1);
}

Rank::Rank(int r, const std::vector<int>& node_of_rank, Exchange& rank_exchange)
    : rank(r),
      nranks(static_cast<int>(node_of_rank.size())),
      topology(make_topology(r, node_of_rank)),
      exchange(rank_exchange) {
  abort.on_raise([this] { wake(); });
}

Status Rank::connect(EndpointOptions options, std::span<const Backend> choice) {
  options.on_event = [this] {
    if (on_event_hook) on_event_hook();
    wake();
  };
  options.on_peer_error = [this](int peer, Status status) {
    std::lock_guard lock(mutex_);
    failed_peers_.push_back(peer);
    failure_ = status.sentence();
  };
  if (options.backend.empty()) options.backend = std::getenv("MK_TEST_BACKEND");
  auto made = create_endpoint(choice.empty() ? backends() : choice, topology, exchange, abort,
                              std::move(options), Deadline::after(timeout));
  if (!made.ok()) return made.status();
  endpoint = made.take();
  return {};
}

Result<uint32_t> Rank::add_region(std::vector<std::byte>& memory) {
  return endpoint->register_region(memory.data(), memory.size(), Deadline::after(timeout));
}

bool Rank::wait(const std::function<bool()>& condition) { return wait(condition, timeout); }

bool Rank::wait(const std::function<bool()>& condition, std::chrono::milliseconds span) {
  // The system clock's wait is the one that ThreadSanitizer of the supported compilers understands.
  const auto limit = std::chrono::system_clock::now() + span;
  std::unique_lock lock(mutex_);
  while (!condition()) {
    if (abort.raised()) return false;
    if (event_.wait_until(lock, limit) == std::cv_status::timeout) return condition();
  }
  return true;
}

bool Rank::post(const Command& command) {
  return wait([&] { return endpoint->try_post(command); });
}

bool Rank::wait_complete() {
  const auto complete = [this] { return endpoint->completed() == endpoint->posted(); };
  for (int n = 0; n < 200; ++n) {
    if (complete()) return true;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return wait(complete);
}

bool Rank::barrier() { return exchange.all_gather({}, Deadline::after(timeout), "barrier").ok(); }

void Rank::wake() {
  { std::lock_guard lock(mutex_); }
  event_.notify_all();
}

std::vector<int> Rank::failed_peers() {
  std::lock_guard lock(mutex_);
  return failed_peers_;
}

std::string Rank::failure() {
  std::lock_guard lock(mutex_);
  return failure_;
}

std::string run_ranks(RankKind kind, const BackendCase& backend, const std::vector<int>& node_of_rank,
                      const RankBody& body) {
  set_environment(backend);
  return kind == RankKind::threads ? run_threads(node_of_rank, body) : run_processes(node_of_rank, body);
}

Command make_put(int peer, uint64_t source, uint64_t target, uint32_t bytes, uint32_t signal) {
  return Command{CommandKind::put, 0, static_cast<uint16_t>(peer), signal, source, target, bytes, 0};
}

Command make_signal(int peer, uint32_t signal) {
  return Command{CommandKind::signal, 0, static_cast<uint16_t>(peer), signal, 0, 0, 0, 0};
}

}  // namespace mk::test
