// SPDX-License-Identifier: MIT
// The libfabric backend over a provider that misbehaves: what it may do changes nothing, what it may not is
// reported, with the peer's name, once.
#include <cstdlib>
#include <cstring>
#include <thread>

#include "../support/catch.h"
#include "ofi_fault_library.h"
#include "put_schedule.h"
#include "transport/ofi/ofi.h"

namespace mk::test {
namespace {

using ofi::Message;
using ofi::MessageKind;

const BackendCase kOfi{"ofi", "0"};
const std::vector<int> kTwoNodes{0, 1};

bool absent() {
  if (ofi::available().ok()) return false;
  WARN("not run: " << ofi::available().sentence());
  return true;
}

std::span<const Backend> faulty() { return std::span(&ofi_with_faults(), 1); }

std::string connect_and_play(Rank& rank, const PutSchedule& schedule) {
  EndpointOptions options;
  options.idle.sleep = std::chrono::hours(1);
  MK_EXPECT_OK(rank.connect(options, faulty()));
  const std::string wrong = play(rank, schedule);
  if (!wrong.empty()) return wrong;
  MK_EXPECT(rank.barrier());
  rank.endpoint.reset();
  return rank.failure();
}

std::string run_schedule() {
  PutSchedule schedule;
  schedule.seed = 7;
  schedule.puts_per_pair = 24;
  schedule.largest_bytes = kThreadSanitizer ? 300001 : 2u << 20;
  return run_ranks(RankKind::threads, kOfi, {0, 1, 2},
                   [&](Rank& rank) { return connect_and_play(rank, schedule); });
}

// Two ranks; rank 0 has the armed fault and puts to rank 1. Returns what the rank that is to notice says.
std::string failure_of(int noticing, int puts, mk_status_t code) {
  std::string said;
  const std::string wrong = run_ranks(RankKind::threads, kOfi, kTwoNodes, [&](Rank& rank) -> std::string {
    MK_EXPECT_OK(rank.connect({}, faulty()));
    auto& memory = rank.make_memory(4096, 3);
    MK_EXPECT_OK(rank.add_region(memory).status());
    if (rank.rank == 0) ofi_faults().armed = true;
    MK_EXPECT(rank.barrier());
    if (rank.rank == 0) {
      for (int n = 0; n < puts; ++n) rank.post(make_put(1, 0, 0, 4096, 1));
    } else if (puts == 0) {
      MK_EXPECT(rank.post(make_signal(0, 1)));
    }
    if (rank.rank == noticing) {
      MK_EXPECT(!rank.wait([] { return false; }, std::chrono::seconds(15)) && rank.abort.raised());
      MK_EXPECT(rank.abort.reason().code() == code);
      MK_EXPECT(rank.failed_peers() == std::vector<int>{1 - rank.rank});
      said = rank.failure();
      // Puts to a lost peer are taken and dropped.
      MK_EXPECT(rank.endpoint->try_post(make_put(1 - rank.rank, 0, 0, 8, 1)));
    }
    MK_EXPECT(rank.barrier());
    return "";
  });
  return wrong + said;
}

// Makes a message one of kind `landed`.
void land(Message& message, iovec& buffer, const ofi::Landed& piece) {
  message.kind = MessageKind::landed;
  message.count = ofi::kLandedWords;
  std::memcpy(message.words, &piece, sizeof piece);
  buffer.iov_len = ofi::message_bytes(message.count);
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("refusals, late completions and a missing descriptor change nothing", "[ofi]") {
  if (absent()) return;
  reset_ofi_faults();
  SECTION("most is refused at first") { ofi_faults().refuse_percent = 75; }
  SECTION("completions are late and shuffled") { ofi_faults().late = true; }
  SECTION("nothing to wait on") { ofi_faults().no_descriptor = true; }
  SECTION("keys are taken") { ofi_faults().taken_keys = 5; }
  SECTION("all at once") {
    ofi_faults().refuse_percent = 50;
    ofi_faults().late = ofi_faults().no_descriptor = true;
  }
  CHECK(run_schedule() == "");
}

// The signal waits for the completions of the put's writes; if those said nothing, bytes would be missing.
TEST_CASE("the schedule finds a provider whose completions come before the bytes", "[ofi]") {
  if (absent() || kThreadSanitizer) return;
  reset_ofi_faults();
  ofi_faults().writes_lie = true;
  PutSchedule schedule;
  schedule.largest_bytes = 100001;
  const std::string wrong = run_ranks(RankKind::threads, kOfi, kTwoNodes, [&](Rank& rank) {
    rank.timeout = std::chrono::seconds(3);
    return connect_and_play(rank, schedule);
  });
  INFO(wrong);
  CHECK(contains(wrong, "is there, byte"));
}

TEST_CASE("an operation that fails ends the link, with the peer's name", "[ofi]") {
  if (absent()) return;
  reset_ofi_faults();
  struct Case {
    OfiOperation operation;
    int error;
    mk_status_t code;
    const char* sentence;
  };
  const Case cases[] = {
      {OfiOperation::write, FI_EIO, MK_ERROR_NETWORK, "to rank 1: a write to it failed: Input/output error"},
      {OfiOperation::write, FI_EACCES, MK_ERROR_NETWORK, "to rank 1: a write to it failed: Permission denied"},
      {OfiOperation::write, FI_ECONNRESET, MK_ERROR_REMOTE, "to rank 1: the connection broke (a write to it"},
      {OfiOperation::message, FI_ENOTCONN, MK_ERROR_REMOTE, "to rank 1: the connection broke (a message to it"},
      {OfiOperation::message, FI_EIO, MK_ERROR_NETWORK, "to rank 1: a message to it failed"},
      {OfiOperation::receive, FI_EIO, MK_ERROR_NETWORK, "to rank 1: receiving failed: Input/output error"},
  };
  for (const Case& one : cases) {
    ofi_faults().failing = one.operation;
    ofi_faults().error = one.error;
    const std::string said = failure_of(0, one.operation == OfiOperation::receive ? 0 : 4, one.code);
    INFO(said << "; expected: " << one.sentence);
    CHECK(contains(said, one.sentence));
    CHECK(contains(said, "rank 0: libfabric link (tcp;ofi_rxm)"));
    reset_ofi_faults();
  }
  ofi_faults().post_error = FI_EINVAL;
  CHECK(contains(failure_of(0, 1, MK_ERROR_NETWORK), "to rank 1: writing failed: Invalid argument"));
  reset_ofi_faults();
  ofi_faults().queue_error = FI_EOVERRUN;
  CHECK(contains(failure_of(0, 1, MK_ERROR_NETWORK), "to rank 1: the completion queue failed: "));
}

TEST_CASE("memory of a GPU is staged through pinned memory, at either end or both", "[ofi]") {
  if (absent()) return;
  reset_ofi_faults();
  SECTION("everything on GPUs") { ofi_faults().on_device = OnDevice::all; }
  SECTION("on every other rank") { ofi_faults().on_device = OnDevice::odd_ranks; }
  SECTION("some regions") { ofi_faults().on_device = OnDevice::every_other; }
  SECTION("some regions, and a provider that is late and refuses") {
    ofi_faults().on_device = OnDevice::every_other;
    ofi_faults().refuse_percent = 50;
    ofi_faults().late = true;
  }
  CHECK(run_schedule() == "");
}

TEST_CASE("copies of a GPU: what lies is found, what fails is reported, what is wrong is refused", "[ofi]") {
  if (absent()) return;
  reset_ofi_faults();
  ofi_faults().on_device = OnDevice::all;
  if (!kThreadSanitizer) {
    ofi_faults().copies_lie = true;
    PutSchedule schedule;
    schedule.largest_bytes = 100001;
    const std::string wrong = run_ranks(RankKind::threads, kOfi, kTwoNodes, [&](Rank& rank) {
      rank.timeout = std::chrono::seconds(3);
      return connect_and_play(rank, schedule);
    });
    INFO(wrong);
    CHECK(contains(wrong, "is there, byte"));
    ofi_faults().copies_lie = false;
  }
  ofi_faults().copy_fails = true;
  CHECK(contains(failure_of(0, 1, MK_ERROR_INTERNAL), "reading a GPU's memory failed: the GPU is on fire"));
  reset_ofi_faults();
  ofi_faults().on_device = OnDevice::all;
  ofi_faults().mutate = [](Message& m, iovec& v) {
    if (m.kind == MessageKind::landed) land(m, v, {0, 0, 7, 8, 0, 0});
  };
  CHECK(contains(failure_of(1, 1, MK_ERROR_INTERNAL), "region 0 of generation 7, which is not registered"));
  ofi_faults().mutate = [](Message& m, iovec& v) {
    if (m.kind == MessageKind::landed) land(m, v, {0, 0, 1, 8, 4089, 0});
  };
  ofi_faults().armed = false;
  CHECK(contains(failure_of(1, 1, MK_ERROR_INTERNAL), "it writes to bytes [4089, +8)"));
}

TEST_CASE("a peer that acknowledges nothing is lost after MK_OFI_TIMEOUT_MS", "[ofi]") {
  if (absent()) return;
  reset_ofi_faults();
  ofi_faults().swallow = true;
  setenv("MK_OFI_TIMEOUT_MS", "700", 1);
  CHECK(contains(failure_of(0, 1, MK_ERROR_NETWORK),
                 "to rank 1: nothing was acknowledged for 700 ms (MK_OFI_TIMEOUT_MS; 1 writes and messages "
                 "under way, 0 puts and 0 signals waiting)"));
  setenv("MK_OFI_TIMEOUT_MS", "soon", 1);
  const std::string said = run_ranks(RankKind::threads, kOfi, kTwoNodes, [](Rank& rank) -> std::string {
    const Status status = rank.connect({}, faulty());
    MK_EXPECT(!status.ok() && contains(status.sentence(), "MK_OFI_TIMEOUT_MS"));
    return "";
  });
  unsetenv("MK_OFI_TIMEOUT_MS");
  CHECK(said == "");
}

TEST_CASE("a malformed message ends the link, an unauthenticated one is not heard", "[ofi]") {
  if (absent()) return;
  struct Case {
    const char* sentence;
    std::function<void(Message&, iovec&)> mutate;
  };
  const std::vector<Case> cases{
      {"signal 65536 is outside", [](Message& m, iovec&) { m.words[0] = kNumSignals; }},
      {"kind 3 with 32 bytes and 2 words", [](Message& m, iovec&) { m.count = 2; }},
      {"kind 3 with 28 bytes and 0 words", [](Message& m, iovec& v) { m.count = 0, v.iov_len = 28; }},
      {"and 4294967295 words", [](Message& m, iovec&) { m.count = ~0u; }},
      {"placed what is in slot 3, where nothing was",
       [](Message& m, iovec&) { m.kind = MessageKind::placed, m.words[0] = 3; }},
      {"kind 5 with 32 bytes and 1 words", [](Message& m, iovec&) { m.kind = MessageKind::landed; }},
      {"a piece of 0 bytes in slot 1",
       [](Message& m, iovec& v) {
         land(m, v, {1, 0, 1, 0, 0, 0});
       }},
      {"a piece of 8 bytes in slot 8",
       [](Message& m, iovec& v) {
         land(m, v, {8, 0, 1, 8, 0, 0});
       }},
      {"a piece of 131073 bytes",
       [](Message& m, iovec& v) {
         land(m, v, {0, 0, 1, 131073, 0, 0});
       }},
      {"the region not in a GPU's",
       [](Message& m, iovec& v) {
         land(m, v, {0, 0, 1, 8, 0, 0});
       }},
      {"the region not in a GPU's",
       [](Message& m, iovec& v) {
         land(m, v, {0, 77777, 1, 8, 0, 0});
       }},
      {"kind 9", [](Message& m, iovec&) { m.kind = static_cast<MessageKind>(9); }},
      {"unexpected message of kind 1",
       [](Message& m, iovec& v) { m.kind = MessageKind::hello, m.count = 0, v.iov_len = 28; }},
      {"unexpected message of kind 2",
       [](Message& m, iovec& v) { m.kind = MessageKind::answer, m.count = 0, v.iov_len = 28; }},
  };
  for (const Case& one : cases) {
    reset_ofi_faults();
    ofi_faults().mutate = one.mutate;
    const std::string said = failure_of(1, 1, MK_ERROR_NETWORK);
    INFO(said << "; expected: " << one.sentence);
    CHECK((contains(said, one.sentence) && contains(said, "to rank 0: it sent something wrong")));
  }
  const std::vector<std::function<void(Message&, iovec&)>> strange{
      [](Message& m, iovec&) { m.token[3] ^= 1; }, [](Message& m, iovec&) { m.magic = 1; },
      [](Message& m, iovec&) { m.sender = 2; }, [](Message&, iovec& v) { v.iov_len = 27; }};
  for (const auto& mutate : strange) {
    reset_ofi_faults();
    ofi_faults().mutate = mutate;
    CHECK(run_ranks(RankKind::threads, kOfi, kTwoNodes, [&](Rank& rank) -> std::string {
            MK_EXPECT_OK(rank.connect({}, faulty()));
            if (rank.rank == 0) {
              ofi_faults().armed = true;
              MK_EXPECT(rank.post(make_signal(1, 1)));
              MK_EXPECT(rank.wait_complete());
              std::this_thread::sleep_for(std::chrono::milliseconds(50));
              ofi_faults().armed = false;
              MK_EXPECT(rank.post(make_signal(1, 2)));
            } else {
              MK_EXPECT(rank.wait([&] { return rank.endpoint->signal(2) == 1; }));
              MK_EXPECT(rank.endpoint->signal(1) == 0);
            }
            MK_EXPECT(rank.barrier());
            return rank.failure();
          }) == "");
  }
}

TEST_CASE("what one rank cannot open all ranks hear of", "[ofi]") {
  if (absent()) return;
  reset_ofi_faults();
  ofi_faults().domain_error = FI_EMFILE;
  const auto connect = [](Rank& rank) -> std::string {
    const Status status = rank.connect({}, faulty());
    return status.ok() ? "connected; " : status.sentence() + "; ";
  };
  std::string said = run_ranks(RankKind::threads, kOfi, {0, 1, 2}, connect);
  INFO(said);
  CHECK(contains(said,
                 "rank 0: introducing libfabric endpoints: rank 1: libfabric provider tcp;ofi_rxm: fi_domain"));
  CHECK(contains(said, "rank 1: libfabric provider tcp;ofi_rxm: fi_domain failed: Too many open files"));
  CHECK(contains(said, "rank 2: introducing"));

  reset_ofi_faults();
  ofi_faults().memory_error = FI_ENOMEM;
  CHECK(run_ranks(RankKind::threads, kOfi, kTwoNodes, [](Rank& rank) -> std::string {
          MK_EXPECT_OK(rank.connect({}, faulty()));
          const Status status = rank.add_region(rank.make_memory(64)).status();
          MK_EXPECT(
              contains(status.sentence(), "rank 1 cannot register a region of 64 bytes: libfabric provider"));
          return rank.failure();
        }) == "");

  reset_ofi_faults();
  setenv("MK_OFI_PROVIDER", "pigeon", 1);
  said = run_ranks(RankKind::threads, kOfi, kTwoNodes, connect);
  unsetenv("MK_OFI_PROVIDER");
  INFO(said);
  CHECK(contains(said, "rank 1: no transport connects the nodes: ofi: libfabric "));
  CHECK(contains(said, "has no provider \"pigeon\""));
  setenv("MK_SOCKET_IFNAME", "=nonesuch7", 1);
  said = run_ranks(RankKind::threads, kOfi, kTwoNodes, connect);
  unsetenv("MK_SOCKET_IFNAME");
  INFO(said);
  CHECK(contains(said, "rank 1: choosing network interfaces (ofi): rank 0: no usable network interface"));
}

}  // namespace mk::test
