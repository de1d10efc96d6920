// SPDX-License-Identifier: MIT
// mk_comm_init when something is missing or wrong: it succeeds or ends by its deadline, with a sentence.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>

#include "test/multi_rank/thread_job.h"
#include "test/support/catch.h"
#include "test/support/process_state.h"

using namespace mk::test;

namespace {

using Clock = std::chrono::steady_clock;

struct Tried {
  Outcome outcome;
  double seconds = 0;
};

// The given ranks of a job of `nranks` join with a deadline of timeout_ms.
std::vector<Tried> join(const mk_unique_id_t& id, int nranks, const std::vector<int>& ranks,
                        int64_t timeout_ms) {
  std::vector<Tried> tried(ranks.size());
  std::vector<mk_comm_t> comms(ranks.size(), nullptr);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      mk_comm_config_t config = MK_COMM_CONFIG_INIT;
      config.device = MK_DEVICE_HOST;
      config.host_threads = 1;
      config.init_timeout_ms = timeout_ms;
      const auto start = Clock::now();
      const mk_status_t status = mk_comm_init(&comms[i], &id, nranks, ranks[i], &config);
      tried[i].seconds = std::chrono::duration<double>(Clock::now() - start).count();
      tried[i].outcome = {status, status == MK_SUCCESS ? "" : mk_get_last_error(nullptr)};
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (mk_comm_t comm : comms) {
    if (comm != nullptr) mk_comm_destroy(comm);
  }
  return tried;
}

mk_unique_id_t make_id() {
  mk_unique_id_t id;
  REQUIRE(mk_get_unique_id(&id) == MK_SUCCESS);
  return id;
}

int connect_to(uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return fd;
  close(fd);
  return -1;
}

uint16_t free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t length = sizeof address;
  bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  close(fd);
  return ntohs(address.sin_port);
}

// The root on a known port of the loopback interface.
class KnownRoot {
 public:
  KnownRoot() : port(free_port()) {
    setenv("MK_ROOT_PORT", std::to_string(port).c_str(), 1);
    setenv("MK_SOCKET_IFNAME", "=lo", 1);
  }
  KnownRoot(const KnownRoot&) = delete;
  KnownRoot& operator=(const KnownRoot&) = delete;
  ~KnownRoot() {
    unsetenv("MK_ROOT_PORT");
    unsetenv("MK_SOCKET_IFNAME");
  }
  const uint16_t port;
};

}  // namespace

TEST_CASE("missing ranks are listed by every rank that is there") {
  struct Case {
    int nranks;
    std::vector<int> present;
    const char* says;
  };
  for (const Case& each :
       {Case{2, {0}, "rank 1 of 2"}, Case{4, {0, 2}, "ranks 1, 3 of 4"}, Case{6, {5}, "ranks 0-4 of 6"}}) {
    const auto tried = join(make_id(), each.nranks, each.present, 800);
    for (const Tried& one : tried) {
      INFO("after " << one.seconds << " s: " << text_of(one.outcome));
      CHECK(one.outcome.status == MK_ERROR_TIMEOUT);
      CHECK(one.outcome.says(each.says));
      CHECK(one.seconds >= 0.7);
      CHECK(one.seconds < 1.8);
    }
  }
}

TEST_CASE("a root that is gone is named by its address") {
  const KnownRoot root;
  const mk_unique_id_t id = make_id();
  REQUIRE(join(id, 1, {0}, 5000)[0].outcome.status == MK_SUCCESS);  // the root has served its job
  for (const Tried& one : join(id, 3, {1, 2}, 700)) {
    INFO("after " << one.seconds << " s: " << text_of(one.outcome));
    CHECK(one.outcome.status == MK_ERROR_NETWORK);
    CHECK(one.outcome.says("127.0.0.1:" + std::to_string(root.port)));
    CHECK(one.seconds < 1.7);
  }
}

TEST_CASE("a root that does not know the secret") {
  const KnownRoot root;
  const mk_unique_id_t old = make_id();
  REQUIRE(join(old, 1, {0}, 5000)[0].outcome.status == MK_SUCCESS);
  // Another job has the same port by now.
  mk_unique_id_t id;
  mk_status_t made = MK_ERROR_NETWORK;
  for (int turn = 0; turn < 100 && made != MK_SUCCESS; ++turn) {
    made = mk_get_unique_id(&id);
    if (made != MK_SUCCESS) usleep(20000);
  }
  INFO(mk_get_last_error(nullptr));
  REQUIRE(made == MK_SUCCESS);
  const auto tried = join(old, 2, {0, 1}, 3000);
  for (const Tried& one : tried) {
    INFO("after " << one.seconds << " s: " << text_of(one.outcome));
    CHECK(one.outcome.status == MK_ERROR_NETWORK);
    CHECK(one.outcome.says("127.0.0.1:" + std::to_string(root.port)));
    CHECK(one.outcome.says("secret"));
    CHECK(one.seconds < 4);
  }
  // The other job is not disturbed.
  for (const Tried& one : join(id, 3, {0, 1, 2}, 20000)) {
    INFO(text_of(one.outcome));
    CHECK(one.outcome.status == MK_SUCCESS);
  }
}

TEST_CASE("strangers at the root while a job joins") {
  const int descriptors = open_descriptors();
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    const KnownRoot root;
    const mk_unique_id_t id = make_id();
    std::atomic<bool> stop{false};
    std::thread strangers([&] {
      std::mt19937_64 random(seed);
      std::vector<int> silent;
      while (!stop) {
        const int fd = connect_to(root.port);
        if (fd < 0) {
          usleep(1000);
          continue;
        }
        std::string garbage(random() % 3000, '\0');
        for (char& byte : garbage) byte = static_cast<char>(random());
        send(fd, garbage.data(), garbage.size(), MSG_NOSIGNAL);
        if (random() % 3 == 0 && silent.size() < 50) {
          silent.push_back(fd);
        } else {
          close(fd);
        }
        usleep(200);
      }
      for (const int fd : silent) close(fd);
    });
    // The last rank comes late, so that the strangers have their time.
    std::vector<Tried> late;
    std::thread last([&] {
      usleep(100000);
      late = join(id, 4, {3}, 20000);
    });
    const auto tried = join(id, 4, {0, 1, 2}, 20000);
    last.join();
    stop = true;
    strangers.join();
    for (const auto& list : {tried, late}) {
      for (const Tried& one : list) {
        INFO("seed " << seed << ", after " << one.seconds << " s: " << text_of(one.outcome));
        CHECK(one.outcome.status == MK_SUCCESS);
      }
    }
  }
  for (int turn = 0; turn < 100 && open_descriptors() > descriptors; ++turn) usleep(10000);
  CHECK(open_descriptors() <= descriptors);  // roots of the tests before may have ended since
}

TEST_CASE("environment variables that are malformed") {
  mk_unique_id_t id;
  for (const char* value : {"abc", "70000", "-1", "12x", ""}) {
    setenv("MK_ROOT_PORT", value, 1);
    INFO("MK_ROOT_PORT " << value);
    CHECK(mk_get_unique_id(&id) == MK_ERROR_INVALID_ARGUMENT);
    CHECK(std::strstr(mk_get_last_error(nullptr), "MK_ROOT_PORT") != nullptr);
  }
  unsetenv("MK_ROOT_PORT");
  setenv("MK_SOCKET_IFNAME", "=nosuchinterface0", 1);
  CHECK(mk_get_unique_id(&id) == MK_ERROR_NETWORK);
  CHECK(std::strstr(mk_get_last_error(nullptr), "nosuchinterface0") != nullptr);
  unsetenv("MK_SOCKET_IFNAME");
  CHECK(mk_get_unique_id(&id) == MK_SUCCESS);
}
