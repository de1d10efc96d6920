// SPDX-License-Identifier: MIT
// What is the loopback's own: strangers at its sockets, malformed packets, other hosts, and that nothing stays
// behind.
#include "transport/loopback/loopback.h"

#include <dirent.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <thread>

#include "../support/catch.h"
#include "harness.h"
#include "transport/loopback/connect.h"
#include "transport/loopback/wire.h"

namespace mk::test {
namespace {

using loopback::PacketHeader;
using loopback::PacketKind;

const std::vector<int> kTwoNodes{0, 1};
const BackendCase kLoopback{"loopback", "0"};

int count_entries(const char* directory) {
  int count = 0;
  DIR* entries = opendir(directory);
  REQUIRE(entries != nullptr);
  while (readdir(entries) != nullptr) ++count;
  closedir(entries);
  return count;
}

// A rank that speaks the handshake and then sends, per put, the packet that the test wants.
std::vector<std::vector<std::byte>> g_packets;

class MalformedTransport : public Transport {
 public:
  explicit MalformedTransport(std::vector<FileDescriptor> channels) : channels_(std::move(channels)) {}
  Result<Bytes> add_region(uint32_t, std::byte*, size_t) override { return Bytes{}; }
  Status set_peer_keys(uint32_t, std::span<const Bytes>) override { return {}; }
  void remove_region(uint32_t) override {}
  bool post(const Put& put) override {
    for (const auto& packet : g_packets) {
      send(channels_[static_cast<size_t>(put.peer)].get(), packet.data(), packet.size(), MSG_NOSIGNAL);
    }
    return true;
  }
  void poll(TransportEvents&) override {}
  std::chrono::microseconds prepare_wait(std::vector<pollfd>&) override {
    return std::chrono::microseconds::max();
  }
  void leave() override {}

 private:
  std::vector<FileDescriptor> channels_;
};

const Backend kWellFormed{"loopback", loopback::available, loopback::create};

const Backend kMalformed{
    "loopback", loopback::available,
    [](const TransportContext& context, Deadline deadline) -> Result<std::unique_ptr<Transport>> {
      auto channels =
          loopback::connect_peers(context.topology, context.exchange, context.abort, Status(), deadline);
      if (!channels.ok()) return channels.status();
      return std::unique_ptr<Transport>(std::make_unique<MalformedTransport>(channels.take()));
    }};

std::vector<std::byte> packet(const PacketHeader& header, size_t payload_bytes) {
  std::vector<std::byte> bytes(sizeof header + payload_bytes, std::byte{0xee});
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

PacketHeader piece(uint32_t put_bytes, uint32_t piece_offset = 0, uint64_t offset = 0, uint32_t region = 0,
                   uint32_t generation = 1, uint32_t signal = 1) {
  return {PacketKind::piece, signal, region, generation, offset, put_bytes, piece_offset};
}

// Connects to every loopback socket of this machine again and again, and says nothing, or something wrong.
void pester(const std::atomic<bool>& stop, std::atomic<int>& visits) {
  std::vector<FileDescriptor> visitors;
  while (!stop.load()) {
    std::ifstream sockets("/proc/net/unix");
    for (std::string line; std::getline(sockets, line);) {
      const size_t at = line.find("@mk-loopback-");
      if (at == std::string::npos) continue;
      const std::string name = line.substr(at + 1);
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      std::memcpy(address.sun_path + 1, name.data(), name.size());
      FileDescriptor visitor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
      if (connect(visitor.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) continue;
      const loopback::Hello wrong_token{loopback::kHelloMagic, 1, {}};
      const size_t bytes = static_cast<size_t>(visits++) % 3 * sizeof wrong_token / 2;
      if (bytes > 0) send(visitor.get(), &wrong_token, bytes, MSG_NOSIGNAL);
      visitors.push_back(std::move(visitor));
      if (visitors.size() > 500) visitors.clear();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Comes late from the step in which the listeners' names are exchanged.
class LateExchange : public Exchange {
 public:
  explicit LateExchange(Exchange& inner) : inner_(inner) {}
  int rank() const override { return inner_.rank(); }
  int nranks() const override { return inner_.nranks(); }
  Result<std::vector<Bytes>> all_gather(std::span<const std::byte> mine, Deadline deadline,
                                        const char* what) override {
    auto blocks = inner_.all_gather(mine, deadline, what);
    if (std::strstr(what, "introducing") != nullptr)
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
    return blocks;
  }

 private:
  Exchange& inner_;
};

}  // namespace

TEST_CASE("malformed packets end the link, with the sender's name, and nothing is placed", "[loopback]") {
  struct Malformed {
    const char* sentence;
    std::vector<std::vector<std::byte>> packets;
  };
  PacketHeader unknown = piece(8);
  unknown.kind = static_cast<PacketKind>(9);
  PacketHeader bye{};
  bye.kind = PacketKind::bye;
  const std::vector<Malformed> cases{
      {"a packet of 3 bytes", {std::vector<std::byte>(3)}},
      {"a packet of 65569 bytes", {packet(piece(65537), 65537)}},
      {"kind 9", {packet(unknown, 8)}},
      {"region 5", {packet(piece(8, 0, 0, 5), 8)}},
      {"region 4000000000", {packet(piece(8, 0, 0, 4000000000u), 8)}},
      {"generation 7", {packet(piece(8, 0, 0, 0, 7), 8)}},
      {"generation 0", {packet(piece(8, 0, 0, 3, 0), 8)}},
      {"bytes [57, +8)", {packet(piece(8, 0, 57), 8)}},
      {"it writes to bytes", {packet(piece(65, 0, ~0ull), 64)}},
      {"it writes to bytes", {packet(piece(0xffffffff), 64)}},
      {"signal 65536", {packet(piece(8, 0, 0, 0, 1, kNumSignals), 8)}},
      {"does not continue", {packet(piece(8, 4), 4)}},
      {"does not continue", {packet(piece(8), 9)}},
      {"does not continue", {packet(piece(8), 0)}},
      {"does not continue", {packet(piece(0), 1)}},
      {"does not continue", {packet(piece(64, 0, 0, 0, 1, kNoSignal), 0), packet(piece(64), 32)}},
      {"kind 2 and 33 bytes", {packet(bye, 1)}},
      {"kind 1 and 40 bytes", {packet(bye, 0), packet(piece(8), 8)}},
  };
  for (const char* seed : {"0", "1"}) {
    for (const Malformed& malformed : cases) {
      INFO("seed " << seed << ", expected: " << malformed.sentence);
      g_packets = malformed.packets;
      CHECK(run_ranks(RankKind::threads, {"loopback", seed}, kTwoNodes, [&](Rank& rank) -> std::string {
              MK_EXPECT_OK(rank.connect({}, std::span(rank.rank == 1 ? &kMalformed : &kWellFormed, 1)));
              auto& memory = rank.make_memory(64, 3);
              MK_EXPECT_OK(rank.add_region(memory).status());
              if (rank.rank == 1) MK_EXPECT(rank.post(make_signal(0, 0)));
              if (rank.rank == 0) {
                MK_EXPECT(!rank.wait([] { return false; }, std::chrono::seconds(15)) && rank.abort.raised());
                MK_EXPECT(rank.failed_peers() == std::vector<int>{1});
                const std::string sentence = rank.failure();
                if (sentence.find(malformed.sentence) == std::string::npos) return "it said: " + sentence;
                MK_EXPECT(sentence.find("rank 1") != std::string::npos);
                MK_EXPECT(rank.endpoint->signal(1) == 0);
                MK_EXPECT(std::count(memory.begin(), memory.end(), std::byte{3}) == 64);
              }
              MK_EXPECT(rank.barrier());
              return "";
            }) == "");
    }
  }
}

TEST_CASE("strangers at a rank's socket do not keep its peers out", "[loopback]") {
  std::atomic<bool> stop{false};
  std::atomic<int> visits{0};
  std::thread stranger([&] { pester(stop, visits); });
  const std::string wrong = run_ranks(RankKind::threads, kLoopback, {0, 1, 2}, [&](Rank& rank) -> std::string {
    LateExchange late(rank.exchange);
    Exchange& exchange = rank.rank == 0 ? rank.exchange : late;
    auto channels =
        loopback::connect_peers(rank.topology, exchange, rank.abort, Status(), Deadline::after(rank.timeout));
    MK_EXPECT_OK(channels.status());
    for (int other = 0; other < rank.nranks; ++other) {
      MK_EXPECT(channels.value()[static_cast<size_t>(other)].valid() == (other != rank.rank));
    }
    return "";
  });
  stop = true;
  stranger.join();
  CHECK(wrong == "");
  CHECK(visits.load() > 10);
}

TEST_CASE("a connection that does not come ends at the deadline, naming the rank", "[loopback]") {
  CHECK(run_ranks(RankKind::threads, kLoopback, kTwoNodes, [&](Rank& rank) -> std::string {
          LateExchange late(rank.exchange);
          Exchange& exchange = rank.rank == 0 ? rank.exchange : late;
          const Deadline deadline = Deadline::after(std::chrono::milliseconds(rank.rank == 0 ? 200 : 2000));
          auto channels = loopback::connect_peers(rank.topology, exchange, rank.abort, Status(), deadline);
          MK_EXPECT(!channels.ok());
          if (rank.rank == 0) MK_EXPECT(channels.status().sentence().find("rank(s) 1") != std::string::npos);
          return "";
        }) == "");
}

TEST_CASE("ranks of different hosts are refused, both named", "[loopback]") {
  // Another network namespace is another host to the loopback; making one takes privileges.
  const std::string wrong =
      run_ranks(RankKind::processes, kLoopback, {0, 1, 2}, [&](Rank& rank) -> std::string {
        if (rank.rank == 2 && unshare(CLONE_NEWNET) != 0)
          rank.abort.raise(Status(MK_ERROR_UNSUPPORTED, "no namespace"));
        const Status status = rank.connect({});
        if (rank.abort.raised()) return "skipped";
        if (status.ok()) return "";
        MK_EXPECT(status.code() == MK_ERROR_UNSUPPORTED);
        MK_EXPECT(status.sentence().find("rank 0 is on") != std::string::npos);
        MK_EXPECT(status.sentence().find("and rank 2 on") != std::string::npos);
        return "refused ";
      });
  if (wrong.find("skipped") != std::string::npos) {
    WARN("needs the right to make a network namespace");
    return;
  }
  CHECK(wrong == "rank 0: refused rank 1: refused rank 2: refused ");
}

TEST_CASE("no descriptor and no thread stays behind", "[loopback]") {
  const auto connect_and_go = [](Rank& rank) -> std::string {
    MK_EXPECT_OK(rank.connect({}));
    MK_EXPECT(rank.barrier());
    return "";
  };
  CHECK(run_ranks(RankKind::threads, kLoopback, {0, 1, 2}, connect_and_go) == "");
  const int descriptors = count_entries("/proc/self/fd");
  const int threads = count_entries("/proc/self/task");
  for (int n = 0; n < 5; ++n) CHECK(run_ranks(RankKind::threads, kLoopback, {0, 1, 2}, connect_and_go) == "");
  CHECK(count_entries("/proc/self/fd") == descriptors);
  // A thread that has been joined may still be on its way out of the kernel.
  for (int n = 0; n < 100 && count_entries("/proc/self/task") > threads; ++n) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(count_entries("/proc/self/task") <= threads);
}

}  // namespace mk::test
