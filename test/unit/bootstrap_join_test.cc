// SPDX-License-Identifier: MIT
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "../support/bootstrap_job.h"
#include "../support/catch.h"
#include "lib/bootstrap_id.h"
#include "lib/bootstrap_root.h"

using namespace mk;
using mk::test::Job;
using mk::test::Rank;
using std::chrono::milliseconds;

namespace {

// A variable of the environment for the length of a test.
class Setting {
 public:
  Setting(const char* name, const std::string& value) : name_(name) { setenv(name, value.c_str(), 1); }
  ~Setting() { unsetenv(name_); }
  Setting(const Setting&) = delete;

 private:
  const char* name_;
};

SocketAddress loopback(uint8_t family = 4) {
  SocketAddress address;
  address.family = family;
  if (family == 4) {
    address.bytes = {127, 0, 0, 1};
  } else {
    address.bytes[15] = 1;
  }
  return address;
}

mk_unique_id_t id_with_root_at(const SocketAddress& address) {
  UniqueId id;
  id.root = address;
  id.secret.fill(std::byte{7});
  return encode_unique_id(id);
}

Status join_alone(const mk_unique_id_t& id, milliseconds timeout, milliseconds* took) {
  AbortToken abort;
  BootstrapOptions options;
  options.timeout = timeout;
  const auto start = std::chrono::steady_clock::now();
  const auto joined = Bootstrap::join(id, 2, 1, options, abort);
  *took = std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start);
  return joined.status();
}

bool has(const Status& status, const std::string& part) {
  return status.sentence().find(part) != std::string::npos;
}

void check_all(Job& job, mk_status_t code, const std::string& sentence) {
  for (auto& rank : job.ranks) {
    CAPTURE(rank->rank);
    CHECK(rank->status.code() == code);
    CHECK(rank->status.sentence() == sentence);
  }
}

}  // namespace

TEST_CASE("missing ranks are listed to every rank that came, by its deadline") {
  Job job(4, milliseconds(700));
  for (auto& rank : job.ranks) rank->nranks = 8;
  job[3].rank = 4;
  job[1].options.timeout = milliseconds(3000);
  job.join();
  check_all(job, MK_ERROR_TIMEOUT, "ranks 3, 5-7 of 8 did not join within 0.7 s (init_timeout_ms)");
  for (auto& rank : job.ranks) {
    CHECK(rank->took >= milliseconds(400));  // the deadline is that of the first, others may start later
    CHECK(rank->took < milliseconds(2700));  // and not that of another rank
  }
}

TEST_CASE("a rank that comes after the job has failed hears why") {
  Job job(3, milliseconds(300));
  std::thread late([&] {
    std::this_thread::sleep_for(milliseconds(600));
    job.join_one(job[2]);
  });
  std::thread early([&] { job.join_one(job[0]); });
  job.join_one(job[1]);
  early.join();
  late.join();
  check_all(job, MK_ERROR_TIMEOUT, "rank 2 of 3 did not join within 0.3 s (init_timeout_ms)");
}

TEST_CASE("what ranks disagree on is named on every rank, whoever comes first") {
  Job job(4);
  std::vector<std::string> parts;
  SECTION("number of ranks") {
    job[3].nranks = 8;
    parts = {"rank 3", "as one of 8 ranks", "as one of 4 ranks"};
  }
  SECTION("configuration") {
    for (auto& rank : job.ranks) rank->options.config = "device=host;max_ctas=0;require_prepare=0";
    job[3].options.config = "device=host;max_ctas=64;require_prepare=0";
    parts = {"rank 3 has max_ctas=64", " has max_ctas=0"};
  }
  SECTION("version of the library") {
    job[3].options.abi_version = MK_VERSION + 1;
    parts = {"rank 3", format("version %d", MK_VERSION + 1), format("version %d", MK_VERSION),
             "of the library"};
  }
  SECTION("build") {
    job[3].options.build_id = "0.1.0-abc";
    parts = {"rank 3", "build 0.1.0-abc", "build test", "of the library"};
  }
  SECTION("a rank given twice") {
    job[3].rank = 1;
    parts = {"rank 1 was given twice: two of the 4 callers joined with the same rank"};
  }
  std::vector<std::thread> threads;
  for (auto& rank : job.ranks) threads.emplace_back([&] { job.join_one(*rank); });
  for (std::thread& thread : threads) thread.join();
  check_all(job, MK_ERROR_MISMATCH, job[0].status.sentence());
  CAPTURE(job[0].status.sentence());
  for (const std::string& part : parts) CHECK(has(job[0].status, part));
}

TEST_CASE("without a root, the sentence names its address") {
  SocketAddress address = loopback();
  milliseconds took;
  SECTION("nobody listens") {
    { const auto listener = listen_on(address); }
    const Status status = join_alone(id_with_root_at(address), milliseconds(500), &took);
    CHECK(status.code() == MK_ERROR_NETWORK);
    CHECK(has(status, address.text()));
    CHECK(has(status, "Connection refused"));
  }
  SECTION("it never answers") {
    const auto listener = listen_on(address);
    REQUIRE(listener.ok());
    const Status status = join_alone(id_with_root_at(address), milliseconds(500), &took);
    CHECK(status.code() == MK_ERROR_NETWORK);
    CHECK(has(status, address.text() + " within 0.5 s: no answer"));
  }
  CHECK(took >= milliseconds(400));
  CHECK(took < milliseconds(5000));
}

TEST_CASE("another program at the root's address is not mistaken for it") {
  SocketAddress address = loopback();
  auto listener = listen_on(address);
  REQUIRE(listener.ok());
  std::atomic<bool> stop{false};
  std::thread talker([&] {
    while (!stop) {
      bool exhausted;
      const FileDescriptor accepted = accept_connection(listener.value().get(), &exhausted);
      if (accepted.valid()) send(accepted.get(), "HTTP/1.1 400 Bad Request\r\n\r\n", 28, MSG_NOSIGNAL);
      std::this_thread::sleep_for(milliseconds(5));
    }
  });
  milliseconds took;
  const Status status = join_alone(id_with_root_at(address), milliseconds(500), &took);
  stop = true;
  talker.join();
  CHECK(status.code() == MK_ERROR_NETWORK);
  CHECK(has(status, address.text()));
  CHECK(took < milliseconds(5000));
}

TEST_CASE("a root with another secret says so at once, and its own job goes on") {
  Job job(2);
  UniqueId stale = decode_unique_id(job.id).take();
  stale.secret[31] ^= std::byte{1};
  milliseconds took;
  const Status status = join_alone(encode_unique_id(stale), milliseconds(5000), &took);
  CHECK(status.code() == MK_ERROR_NETWORK);
  CHECK(has(status, "the root at " + stale.root.text() + " does not know the secret of this id"));
  CHECK(took < milliseconds(4000));
  job.join();
  REQUIRE(job.all_joined());
  CHECK(job.leave() == "");
}

TEST_CASE("bytes that are no id, and arguments out of range, are refused") {
  Job job(2);
  milliseconds took;
  mk_unique_id_t zeros{};
  CHECK(join_alone(zeros, milliseconds(500), &took).code() == MK_ERROR_INVALID_ARGUMENT);
  mk_unique_id_t flipped = job.id;
  flipped.bytes[40] ^= 1;
  CHECK(join_alone(flipped, milliseconds(500), &took).code() == MK_ERROR_INVALID_ARGUMENT);

  AbortToken abort;
  CHECK(Bootstrap::join(job.id, 0, 0, {}, abort).status().code() == MK_ERROR_INVALID_ARGUMENT);
  CHECK(Bootstrap::join(job.id, 2, 2, {}, abort).status().sentence() == "rank: expected 0 to 1, saw 2");
  CHECK(Bootstrap::join(job.id, 2, -1, {}, abort).status().code() == MK_ERROR_INVALID_ARGUMENT);
  CHECK(Bootstrap::create_root(nullptr).code() == MK_ERROR_INVALID_ARGUMENT);
  job.join();
  REQUIRE(job.all_joined());
}

TEST_CASE("two roots on one port: the second is refused, naming the port") {
  const uint16_t port = [] {
    SocketAddress address = loopback();
    const auto listener = listen_on(address);
    return address.port;
  }();
  const Setting setting("MK_ROOT_PORT", std::to_string(port));
  Job first(2);
  REQUIRE(first.root.ok());
  mk_unique_id_t second;
  const Status refused = Bootstrap::create_root(&second);
  CHECK(refused.code() == MK_ERROR_NETWORK);
  CHECK(has(refused, std::to_string(port)));
  first.join();
  REQUIRE(first.all_joined());
  CHECK(first.leave() == "");
}

TEST_CASE("malformed variables and unknown interfaces are refused") {
  mk_unique_id_t id;
  {
    const Setting setting("MK_ROOT_PORT", "70000");
    CHECK(Bootstrap::create_root(&id).code() == MK_ERROR_INVALID_ARGUMENT);
  }
  {
    const Setting setting("MK_SOCKET_IFNAME", "=nosuch0");
    const Status status = Bootstrap::create_root(&id);
    CHECK(status.code() == MK_ERROR_NETWORK);
    CHECK(has(status, "=nosuch0"));
    CHECK(has(status, "lo"));
  }
}

TEST_CASE("a root that nobody visits ends after its lifetime") {
  const Setting setting("MK_ROOT_TIMEOUT_MS", "200");
  Job job(2, milliseconds(400));
  std::this_thread::sleep_for(milliseconds(500));
  job.join();
  for (auto& rank : job.ranks) CHECK(has(rank->status, "Connection refused"));
}

TEST_CASE("a root serves one job only") {
  Job job(2, milliseconds(5000));
  job.join();
  REQUIRE(job.all_joined());
  milliseconds took;
  const Status status = join_alone(job.id, milliseconds(400), &took);
  CHECK(status.code() == MK_ERROR_NETWORK);
  CHECK(has(status, "Connection refused"));
}

TEST_CASE("jobs join over the loopback interface, IPv4 and IPv6") {
  const auto family = static_cast<uint8_t>(GENERATE(4, 6));
  CAPTURE(static_cast<int>(family));
  Job job(0);
  UniqueId id;
  id.root = loopback(family);
  auto listener = listen_on(id.root);
  if (!listener.ok() && family == 6) return;  // a kernel without IPv6
  REQUIRE(listener.ok());
  REQUIRE(fill_random(id.secret).ok());
  REQUIRE(start_root(listener.take(), id, milliseconds(10000)).ok());
  job.id = encode_unique_id(id);
  for (int r = 0; r < 3; ++r) {
    job.ranks.push_back(std::make_unique<Rank>());
    job[static_cast<size_t>(r)].rank = r;
    job[static_cast<size_t>(r)].nranks = 3;
  }
  job.join();
  for (auto& rank : job.ranks) CHECK(rank->status.sentence() == "");
  REQUIRE(job.all_joined());
  CHECK(job.leave() == "");
}

TEST_CASE("an abort ends join within a second, and the others hear of it") {
  Job job(3);
  std::thread aborter([&] {
    std::this_thread::sleep_for(milliseconds(200));
    job[1].abort.raise(Status(MK_ERROR_ABORTED, "the caller gave up"));
  });
  std::thread other([&] { job.join_one(job[0]); });
  job.join_one(job[1]);
  aborter.join();
  other.join();
  CHECK(job[1].status.code() == MK_ERROR_ABORTED);
  CHECK(job[1].status.sentence() == "the caller gave up");
  CHECK(job[1].took < milliseconds(1200));
  CHECK(job[0].status.code() == MK_ERROR_REMOTE);
  CHECK(has(job[0].status, "rank 1 left before all 3 ranks had joined"));
  CHECK(job[0].took < milliseconds(1200));
}

TEST_CASE("an abort ends the search for a root within a second") {
  SocketAddress address = loopback();
  const auto listener = listen_on(address);
  AbortToken abort;
  std::thread aborter([&] {
    std::this_thread::sleep_for(milliseconds(100));
    abort.raise(Status(MK_ERROR_ABORTED, "the caller gave up"));
  });
  const auto start = std::chrono::steady_clock::now();
  const auto joined = Bootstrap::join(id_with_root_at(address), 2, 0, {}, abort);
  aborter.join();
  CHECK(joined.status().code() == MK_ERROR_ABORTED);
  CHECK(std::chrono::steady_clock::now() - start < milliseconds(1100));
}
