// SPDX-License-Identifier: MIT
#include "lib/descriptor_exchange.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>
#include <optional>
#include <string>
#include <thread>

#include "test/support/catch.h"
#include "test/support/process_state.h"

using namespace mk;
using namespace std::chrono_literals;

namespace {

DescriptorExchange open(int rank, int num_peers) {
  Result<DescriptorExchange> opened = DescriptorExchange::open(rank, num_peers);
  REQUIRE(opened.ok());
  return opened.take();
}

// A file whose size says whose it is.
FileDescriptor file_of(int rank) {
  FileDescriptor file(memfd_create("test", MFD_CLOEXEC));
  REQUIRE(ftruncate(file.get(), rank + 1) == 0);
  return file;
}

off_t size_of(const FileDescriptor& file) {
  struct stat status {};
  return fstat(file.get(), &status) == 0 ? status.st_size : -1;
}

// Connects as a stranger does, and sends `text` if there is any.
FileDescriptor intrude(const DescriptorAddress& address, const std::string& text) {
  FileDescriptor stranger(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un target{};
  target.sun_family = AF_UNIX;
  std::string name = "mk-";
  for (const std::byte value : address.name) name += format("%02x", static_cast<unsigned>(value));
  std::memcpy(target.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  REQUIRE(connect(stranger.get(), reinterpret_cast<sockaddr*>(&target), length) == 0);
  if (!text.empty()) REQUIRE(send(stranger.get(), text.data(), text.size(), 0) > 0);
  return stranger;
}

}  // namespace

TEST_CASE("every rank receives the descriptor of every other, and nothing stays open") {
  constexpr int kRanks = 6;
  const int before = test::open_descriptors();
  {
    std::vector<DescriptorExchange> ends;
    std::vector<FileDescriptor> files;
    for (int rank = 0; rank < kRanks; ++rank) {
      ends.push_back(open(rank, kRanks - 1));
      files.push_back(file_of(rank));
    }
    std::vector<std::vector<off_t>> seen(kRanks);
    std::vector<std::thread> threads;
    std::vector<DescriptorAddress> addresses;
    for (const DescriptorExchange& end : ends) addresses.push_back(end.address());
    std::vector<int> closed_on_exec(kRanks, 0);
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        std::vector<DescriptorPeer> peers;
        for (int peer = 0; peer < kRanks; ++peer) {
          if (peer != rank) peers.push_back({peer, addresses[static_cast<size_t>(peer)]});
        }
        AbortToken abort;
        const size_t self = static_cast<size_t>(rank);
        auto received = ends[self].swap(files[self].get(), peers, abort, Deadline::after(20s));
        if (!received.ok()) return;
        for (const FileDescriptor& file : received.value()) {
          seen[self].push_back(size_of(file));
          closed_on_exec[self] += fcntl(file.get(), F_GETFD) == FD_CLOEXEC;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (int rank = 0; rank < kRanks; ++rank) {
      std::vector<off_t> expected;
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer != rank) expected.push_back(peer + 1);
      }
      CHECK(seen[static_cast<size_t>(rank)] == expected);
      CHECK(closed_on_exec[static_cast<size_t>(rank)] == kRanks - 1);
    }
  }
  CHECK(test::open_descriptors() == before);
}

TEST_CASE("strangers that are silent, send noise, or claim to be a rank change nothing") {
  DescriptorExchange zero = open(0, 1);
  DescriptorExchange one = open(1, 1);
  const FileDescriptor file_zero = file_of(0);
  const FileDescriptor file_one = file_of(1);
  std::vector<FileDescriptor> strangers;
  strangers.push_back(intrude(zero.address(), ""));
  strangers.push_back(intrude(zero.address(), "short"));
  strangers.push_back(intrude(zero.address(), std::string(5000, 'x')));

  // Speaks the protocol, as rank 1, without rank 0's secret: its file must not be taken.
  DescriptorExchange impostor = open(1, 1);
  DescriptorAddress guessed = zero.address();
  guessed.secret[3] ^= std::byte{1};
  const FileDescriptor wrong = file_of(40);
  AbortToken abort;
  const DescriptorPeer victim{0, guessed};
  auto answer = impostor.swap(wrong.get(), {&victim, 1}, abort, Deadline::after(50ms));
  CHECK(answer.status().code() == MK_ERROR_TIMEOUT);

  const DescriptorPeer to_zero{0, zero.address()};
  const DescriptorPeer to_one{1, one.address()};
  std::optional<Result<std::vector<FileDescriptor>>> of_one;
  std::thread thread([&] { of_one = one.swap(file_one.get(), {&to_zero, 1}, abort, Deadline::after(20s)); });
  auto of_zero = zero.swap(file_zero.get(), {&to_one, 1}, abort, Deadline::after(20s));
  thread.join();
  REQUIRE(of_zero.ok());
  REQUIRE(of_one->ok());
  CHECK(size_of(of_zero.value()[0]) == 2);
  CHECK(size_of(of_one->value()[0]) == 1);
}

TEST_CASE("waiting for a rank ends by deadline, abort or its death, and says so") {
  const FileDescriptor file = file_of(0);
  AbortToken abort;
  DescriptorExchange zero = open(0, 1);
  SECTION("deadline") {
    const DescriptorExchange silent = open(7, 1);
    const DescriptorPeer peer{7, silent.address()};
    auto received = zero.swap(file.get(), {&peer, 1}, abort, Deadline::after(100ms));
    CHECK(received.status().code() == MK_ERROR_TIMEOUT);
    CHECK(received.status().sentence().find("rank 7") != std::string::npos);
  }
  SECTION("abort") {
    const DescriptorExchange silent = open(7, 1);
    const DescriptorPeer peer{7, silent.address()};
    std::thread later([&] {
      std::this_thread::sleep_for(50ms);
      abort.raise(Status(MK_ERROR_ABORTED, "the user aborted"));
    });
    auto received = zero.swap(file.get(), {&peer, 1}, abort, Deadline::after(20s));
    later.join();
    CHECK(received.status().code() == MK_ERROR_ABORTED);
  }
  SECTION("death") {
    const DescriptorAddress gone = open(7, 1).address();
    const DescriptorPeer peer{7, gone};
    auto received = zero.swap(file.get(), {&peer, 1}, abort, Deadline::after(20s));
    CHECK(received.status().code() == MK_ERROR_REMOTE);
    CHECK(received.status().sentence().find("rank 7") != std::string::npos);
  }
}
