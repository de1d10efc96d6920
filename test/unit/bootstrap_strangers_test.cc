// SPDX-License-Identifier: MIT
// Port scanners, silent clients and malformed frames, at the root and at the ranks' own listeners.
#include <dirent.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstdlib>

#include "../support/bootstrap_job.h"
#include "../support/catch.h"
#include "lib/bootstrap_frame.h"
#include "lib/bootstrap_id.h"

using namespace mk;
using mk::test::Job;
using mk::test::Rank;
using std::chrono::milliseconds;

namespace {

// Connects and says `words`; the connection stays open.
FileDescriptor call(const SocketAddress& address, const Bytes& words = {}) {
  auto socket = start_connect(address);
  if (!socket.ok()) return FileDescriptor();
  pollfd ready{socket->get(), POLLOUT, 0};
  poll(&ready, 1, 1000);
  send(socket->get(), words.data(), words.size(), MSG_NOSIGNAL);
  return socket.take();
}

Bytes text(const std::string& words) {
  const auto all = std::as_bytes(std::span(words));
  return Bytes(all.begin(), all.end());
}

Bytes frame(FrameKind kind, const Bytes& payload, size_t claimed) {
  Bytes bytes;
  append_frame_header(bytes, kind, claimed);
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  return bytes;
}

Bytes hello(Purpose purpose, uint32_t to) {
  const Bytes payload = encode(Hello{purpose, 1, 0, to, {}});
  return frame(FrameKind::hello, payload, payload.size());
}

// What a stranger may say. Each is also said cut off in the middle.
std::vector<Bytes> speeches() {
  std::vector<Bytes> all = {{},
                            text("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
                            text(std::string(100000, 'A')),
                            text("MKRB"),
                            frame(FrameKind::hello, {}, 0xffffffffu),
                            frame(FrameKind::block, Bytes(40), 1 << 20),
                            frame(FrameKind::hello, Bytes(49), 49),
                            hello(Purpose::root, 0),
                            hello(Purpose::ring, 1)};
  // A hello, then a proof made up.
  for (const Purpose purpose : {Purpose::root, Purpose::ring}) {
    Bytes bytes = hello(purpose, purpose == Purpose::root ? 0 : 1);
    const Bytes proof = frame(FrameKind::proof, Bytes(32), 32);
    bytes.insert(bytes.end(), proof.begin(), proof.end());
    all.push_back(bytes);
  }
  const size_t whole = all.size();
  for (size_t i = 0; i < whole; ++i) all.push_back(Bytes(all[i].begin(), all[i].begin() + all[i].size() / 2));
  return all;
}

// Where sockets of this process listen.
std::vector<SocketAddress> listeners() {
  std::vector<SocketAddress> found;
  DIR* listing = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(listing)) {
    const int fd = std::atoi(entry->d_name);
    int listening = 0;
    socklen_t length = sizeof listening;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) != 0 || !listening) continue;
    found.push_back(bound_address(fd));
  }
  closedir(listing);
  return found;
}

}  // namespace

TEST_CASE("strangers at the root neither stall nor fail the job") {
  Job job(4);
  const SocketAddress root = decode_unique_id(job.id).take().root;
  std::vector<FileDescriptor> open;
  for (int round = 0; round < 20; ++round) {
    for (const Bytes& words : speeches()) {
      open.push_back(call(root, words));
      call(root, words);
    }
  }
  const auto start = std::chrono::steady_clock::now();
  job.join();
  for (auto& rank : job.ranks) CHECK(rank->status.sentence() == "");
  CHECK(std::chrono::steady_clock::now() - start < milliseconds(4000));
  REQUIRE(job.all_joined());
  CHECK(job.leave() == "");
}

TEST_CASE("strangers that keep coming while ranks join do not stall them") {
  Job job(4);
  const SocketAddress root = decode_unique_id(job.id).take().root;
  std::atomic<bool> stop{false};
  std::thread scanner([&] {
    std::vector<FileDescriptor> open;
    const auto words = speeches();
    for (size_t turn = 0; !stop; ++turn) {
      open.push_back(call(root, words[turn % words.size()]));
      if (open.size() > 300) open.erase(open.begin());
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  std::thread last([&] {
    std::this_thread::sleep_for(milliseconds(500));
    job.join_one(job[3]);
  });
  std::vector<std::thread> others;
  for (size_t rank = 0; rank < 3; ++rank) others.emplace_back([&job, rank] { job.join_one(job[rank]); });
  for (auto& other : others) other.join();
  last.join();
  stop = true;
  scanner.join();
  for (auto& rank : job.ranks) {
    CHECK(rank->status.sentence() == "");
    CHECK(rank->took < milliseconds(4000));
  }
}

TEST_CASE("strangers at the ranks' listeners neither stall nor fail the job") {
  Job job(3);
  std::vector<FileDescriptor> open;
  std::thread last([&] {
    std::this_thread::sleep_for(milliseconds(300));
    const auto addresses = listeners();
    CHECK(addresses.size() >= 3);
    for (const auto& address : addresses) {
      for (const Bytes& words : speeches()) {
        open.push_back(call(address, words));
        call(address, words);
      }
    }
    job.join_one(job[2]);
  });
  std::thread first([&] { job.join_one(job[0]); });
  job.join_one(job[1]);
  first.join();
  last.join();
  for (auto& rank : job.ranks) {
    CHECK(rank->status.sentence() == "");
    CHECK(rank->took < milliseconds(4000));
  }
  REQUIRE(job.all_joined());
  CHECK(job.leave() == "");
}

TEST_CASE("a silent stranger does not keep the root from answering by the deadline") {
  Job job(2, milliseconds(500));
  std::vector<FileDescriptor> open;
  for (int i = 0; i < 200; ++i) open.push_back(call(decode_unique_id(job.id).take().root));
  job.ranks.pop_back();
  job.join();
  CHECK(job[0].status.sentence() == "rank 1 of 2 did not join within 0.5 s (init_timeout_ms)");
  CHECK(job[0].took < milliseconds(4000));
}
