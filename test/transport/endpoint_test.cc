// SPDX-License-Identifier: MIT
// Creation, regions and bad commands, for every backend.
#include "transport/endpoint.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "../support/catch.h"
#include "harness.h"

namespace mk::test {
namespace {

const std::vector<int> kTwoNodes{0, 1};

bool all_equal(const std::vector<std::byte>& memory, size_t first, size_t last, int value) {
  return std::all_of(memory.begin() + static_cast<std::ptrdiff_t>(first),
                     memory.begin() + static_cast<std::ptrdiff_t>(last),
                     [&](std::byte b) { return b == static_cast<std::byte>(value); });
}

std::string status_name(mk_status_t code) {
  switch (code) {
    case MK_ERROR_INVALID_ARGUMENT:
      return "invalid argument: ";
    case MK_ERROR_UNSUPPORTED:
      return "unsupported: ";
    case MK_ERROR_MISMATCH:
      return "mismatch: ";
    default:
      return "another error: ";
  }
}

// Address space of which only the pages that are touched become memory.
class SparseMemory {
 public:
  explicit SparseMemory(size_t bytes)
      : bytes_(bytes),
        base_(
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~SparseMemory() {
    if (ok()) munmap(base_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  bool ok() const { return base_ != MAP_FAILED; }
  size_t bytes() const { return bytes_; }
  uint8_t* at(size_t offset) const { return static_cast<uint8_t*>(base_) + offset; }

 private:
  size_t bytes_;
  void* base_;
};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("regions differ in size, grow in number, and their ids are used again", "[transport]") {
  for (const BackendCase& backend : backend_cases()) {
    CHECK(run_ranks(RankKind::threads, backend, kTwoNodes, [&](Rank& rank) -> std::string {
            MK_EXPECT_OK(rank.connect({}));
            // Rank 0 sends to the whole of rank 1's larger region; rank 0's second region is empty.
            auto& first = rank.make_memory(rank.rank == 0 ? 100 : 1000);
            auto& second = rank.make_memory(rank.rank == 0 ? 0 : 50);
            for (uint64_t round = 1; round <= 3; ++round) {
              std::fill(first.begin(), first.end(), static_cast<std::byte>(rank.rank == 0 ? round : 0));
              auto a = rank.add_region(first), b = rank.add_region(second);
              MK_EXPECT_OK(a.status());
              MK_EXPECT_OK(b.status());
              MK_EXPECT(a.value() == 0 && b.value() == 1);
              if (rank.rank == 0) {
                for (uint64_t part = 0; part < 10; ++part) {
                  MK_EXPECT(
                      rank.post(make_put(1, region_address(0, 0), region_address(0, part * 100), 100, 1)));
                }
                MK_EXPECT(rank.post(make_put(1, region_address(0, 100), region_address(1, 50), 0, 2)));
                MK_EXPECT(rank.post(make_put(1, region_address(0, 50), region_address(1, 0), 50, 2)));
                MK_EXPECT(rank.wait_complete());
              } else {
                MK_EXPECT(rank.wait([&] { return rank.endpoint->signal(1) == 10 * round; }));
                MK_EXPECT(rank.wait([&] { return rank.endpoint->signal(2) == 2 * round; }));
                MK_EXPECT(all_equal(first, 0, 1000, static_cast<int>(round)));
                MK_EXPECT(all_equal(second, 0, 50, static_cast<int>(round)));
              }
              MK_EXPECT(rank.barrier());
              rank.endpoint->deregister_region(0);
              rank.endpoint->deregister_region(1);
            }
            return rank.failure();
          }) == "");
  }
}

// NICs register memory in pieces of a gigabyte.
TEST_CASE("a put may cross a gigabyte, of its source, its target or both", "[transport]") {
  constexpr uint64_t kGigabyte = 1u << 30;
  constexpr size_t kBytes = 2 * kGigabyte + (1 << 20);
  struct Put {
    uint64_t source;
    uint64_t target;
    uint32_t bytes;
  };
  const Put puts[] = {
      {kGigabyte - 1000, 4096, 3000},                           // the source alone
      {4096, kGigabyte - 2, 3},                                 // the target alone
      {kGigabyte - 150000, kGigabyte - 290000, 300001},         // both, at different bytes
      {2 * kGigabyte - 70000, 2 * kGigabyte - 70000, 140000},   // both at the same byte
      {2 * kGigabyte + 100000, 2 * kGigabyte + 200000, 56000},  // beyond, crossing nothing
      {kGigabyte - 64, kGigabyte + 300000, 64},                 // up to the end of one,
      {kGigabyte, 2 * kGigabyte + 300000, 64},                  // and from the first byte of the next
  };
  const auto value = [](uint64_t offset, uint32_t n) {
    return static_cast<uint8_t>(offset * 7 + offset / 4099 + n + 1);
  };
  for (const BackendCase& backend : backend_cases()) {
    for (const RankKind kind : rank_kinds()) {
      INFO(backend.backend << " " << backend.environment);
      const SparseMemory memories[2]{SparseMemory(kBytes), SparseMemory(kBytes)};
      REQUIRE((memories[0].ok() && memories[1].ok()));
      CHECK(run_ranks(kind, backend, kTwoNodes, [&](Rank& rank) -> std::string {
              const SparseMemory& memory = memories[rank.rank];
              MK_EXPECT_OK(rank.connect({}));
              const auto region =
                  rank.endpoint->register_region(memory.at(0), memory.bytes(), Deadline::after(rank.timeout));
              MK_EXPECT_OK(region.status());
              for (uint32_t n = 0; n < std::size(puts); ++n) {
                const Put& put = puts[n];
                if (rank.rank == 0) {
                  for (uint64_t i = 0; i < put.bytes; ++i)
                    *memory.at(put.source + i) = value(put.source + i, n);
                  MK_EXPECT(rank.barrier());
                  MK_EXPECT(rank.post(
                      make_put(1, region_address(0, put.source), region_address(0, put.target), put.bytes, n)));
                  MK_EXPECT(rank.wait_complete());
                } else {
                  *memory.at(put.target - 1) = 0xee;
                  *memory.at(put.target + put.bytes) = 0xee;
                  MK_EXPECT(rank.barrier());
                  MK_EXPECT(rank.wait([&] { return rank.endpoint->signal(n) == 1; }));
                  for (uint64_t i = 0; i < put.bytes; ++i)
                    MK_EXPECT(*memory.at(put.target + i) == value(put.source + i, n));
                  MK_EXPECT(*memory.at(put.target - 1) == 0xee && *memory.at(put.target + put.bytes) == 0xee);
                }
                MK_EXPECT(rank.barrier());
              }
              rank.endpoint->deregister_region(0);
              return rank.failure();
            }) == "");
    }
  }
}

TEST_CASE("early signals of the other bank leave this one alone", "[transport]") {
  for (const BackendCase& backend : backend_cases()) {
    CHECK(run_ranks(RankKind::threads, backend, kTwoNodes, [&](Rank& rank) -> std::string {
            MK_EXPECT_OK(rank.connect({}));
            const uint32_t last = kSignalsPerBank - 1;
            if (rank.rank == 0) {
              for (int n = 0; n < 7; ++n) MK_EXPECT(rank.post(make_signal(1, kSignalsPerBank + last)));
              MK_EXPECT(rank.wait_complete());
              MK_EXPECT(rank.barrier());
              MK_EXPECT(rank.post(make_signal(1, last)));
              MK_EXPECT(rank.wait_complete());
            } else {
              MK_EXPECT(rank.wait([&] { return rank.endpoint->signal(kSignalsPerBank + last) == 7; }));
              MK_EXPECT(rank.endpoint->signal(last) == 0);
              MK_EXPECT(rank.barrier());
              MK_EXPECT(rank.wait([&] { return rank.endpoint->signal(last) == 1; }));
              MK_EXPECT(rank.endpoint->signal(kSignalsPerBank + last) == 7);
              MK_EXPECT(rank.endpoint->signal(kSignalsPerBank) == 0);
            }
            MK_EXPECT(rank.barrier());
            return rank.failure();
          }) == "");
  }
}

TEST_CASE("a bad command is an error with a sentence, and touches nothing", "[transport]") {
  struct Bad {
    const char* sentence;
    Command command;
  };
  const uint64_t at = region_address(0, 0);
  Command unknown_kind = make_put(2, at, at, 8);
  unknown_kind.kind = static_cast<CommandKind>(77);
  Command signal_with_bytes = make_signal(2, 0);
  signal_with_bytes.bytes = 8;
  const std::vector<Bad> bad{
      {"kind is 77", unknown_kind},
      {"has bytes", signal_with_bytes},
      {"or no signal", make_signal(2, kNoSignal)},
      {"outside [0, 3)", make_put(3, at, at, 8)},
      {"outside [0, 3)", make_put(0xffff, at, at, 8)},
      {"own node", make_put(0, at, at, 8)},
      {"own node", make_put(1, at, at, 8)},
      {"signal 65536", make_put(2, at, at, 8, kNumSignals)},
      {"source is in region 9", make_put(2, region_address(9, 0), at, 8)},
      {"source is in region 65535", make_put(2, region_address(65535, 0), at, 8)},
      {"source is bytes", make_put(2, region_address(0, 57), at, 8)},
      {"source is bytes", make_put(2, region_address(0, (1ull << 48) - 1), at, 0xffffffff)},
      {"target is in region 9", make_put(2, at, region_address(9, 0), 8)},
      {"target is bytes", make_put(2, at, region_address(0, 25), 8)},
  };
  for (const BackendCase& backend : backend_cases()) {
    for (const Bad& candidate : bad) {
      INFO("expected: " << candidate.sentence);
      CHECK(run_ranks(RankKind::threads, backend, {0, 0, 1}, [&](Rank& rank) -> std::string {
              MK_EXPECT_OK(rank.connect({}));
              auto& memory = rank.make_memory(rank.rank == 0 ? 64 : 32);
              std::fill(memory.begin(), memory.end(), static_cast<std::byte>(rank.rank));
              MK_EXPECT_OK(rank.add_region(memory).status());
              if (rank.rank == 0) {
                MK_EXPECT(rank.post(candidate.command));
                MK_EXPECT(!rank.wait([] { return false; }, std::chrono::seconds(15)) && rank.abort.raised());
                MK_EXPECT(rank.abort.reason().code() == MK_ERROR_INTERNAL);
                MK_EXPECT(rank.failed_peers() == std::vector<int>{-1});
                const std::string sentence = rank.failure();
                if (!contains(sentence, candidate.sentence)) return "it said: " + sentence;
              }
              MK_EXPECT(rank.barrier());
              MK_EXPECT(all_equal(memory, 0, memory.size(), rank.rank));
              return "";
            }) == "");
    }
  }
}

TEST_CASE("a put to a region that its owner has deregistered fails the link", "[transport]") {
  for (const BackendCase& backend : backend_cases()) {
    CHECK(run_ranks(RankKind::threads, backend, kTwoNodes, [&](Rank& rank) -> std::string {
            MK_EXPECT_OK(rank.connect({}));
            auto& memory = rank.make_memory(64, rank.rank);
            MK_EXPECT_OK(rank.add_region(memory).status());
            if (rank.rank == 1) rank.endpoint->deregister_region(0);
            MK_EXPECT(rank.barrier());
            if (rank.rank == 0) {
              MK_EXPECT(rank.post(make_put(1, region_address(0, 0), region_address(0, 0), 64, 3)));
            }
            const bool told = rank.rank == 0 || backend.receiver_places;
            if (told) {
              MK_EXPECT(!rank.wait([] { return false; }, std::chrono::seconds(15)) && rank.abort.raised());
              MK_EXPECT(rank.failed_peers() == std::vector<int>{1 - rank.rank});
            }
            MK_EXPECT(rank.barrier());
            if (rank.rank == 1) {
              MK_EXPECT(!told || contains(rank.failure(), "not registered"));
              MK_EXPECT(rank.endpoint->signal(3) == 0);
              MK_EXPECT(all_equal(memory, 0, 64, 1));
            }
            return "";
          }) == "");
  }
}

TEST_CASE("ranks that disagree on regions are told so, and can go on", "[transport]") {
  for (const BackendCase& backend : backend_cases()) {
    CHECK(run_ranks(RankKind::threads, backend, kTwoNodes, [&](Rank& rank) -> std::string {
            MK_EXPECT_OK(rank.connect({}));
            auto& memory = rank.make_memory(64);
            MK_EXPECT_OK(rank.add_region(memory).status());
            if (rank.rank == 0) rank.endpoint->deregister_region(0);
            MK_EXPECT(rank.add_region(memory).status().code() == MK_ERROR_MISMATCH);
            if (rank.rank == 1) rank.endpoint->deregister_region(0);
            // One rank's registration fails: both hear of it, by name.
            void* base = rank.rank == 1 ? nullptr : memory.data();
            auto failed = rank.endpoint->register_region(base, 64, Deadline::after(rank.timeout));
            MK_EXPECT(!failed.ok() && contains(failed.status().sentence(), "rank 1"));
            auto region = rank.add_region(memory);
            MK_EXPECT_OK(region.status());
            MK_EXPECT(region.value() == 0);
            MK_EXPECT(rank.post(make_put(1 - rank.rank, 0, 32, 32, 1)));
            MK_EXPECT(rank.wait([&] { return rank.endpoint->signal(1) == 1; }));
            MK_EXPECT(rank.wait_complete());
            MK_EXPECT(rank.barrier());
            return rank.failure();
          }) == "");
  }
}

TEST_CASE("an endpoint is made with the backend asked for, or a sentence says why not", "[transport]") {
  const BackendCase backend{"loopback", "0"};
  static const Backend absent{
      "absent", [] { return Status(MK_ERROR_UNSUPPORTED, "libabsent.so is not installed"); }, nullptr};
  const auto connect_with = [&](std::vector<Backend> choice, const char* first, const char* second) {
    return run_ranks(RankKind::threads, backend, kTwoNodes, [&](Rank& rank) -> std::string {
      EndpointOptions options;
      options.backend = rank.rank == 0 ? first : second;
      const Topology& topology = rank.topology;
      auto endpoint =
          create_endpoint(choice, topology, rank.exchange, rank.abort, options, Deadline::after(rank.timeout));
      std::string answer = endpoint.ok() ? endpoint.value()->backend()
                                         : status_name(endpoint.status().code()) + endpoint.status().sentence();
      if (endpoint.ok() && !rank.barrier()) answer += " no barrier";
      return answer + "; ";
    });
  };
  const auto all = backends();
  const Backend loopback =
      *std::find_if(all.begin(), all.end(), [](const Backend& b) { return std::string(b.name) == "loopback"; });
  CHECK(connect_with({absent, loopback}, "", "") == "rank 0: loopback; rank 1: loopback; ");
  CHECK(connect_with({loopback}, "loopback", "loopback") == "rank 0: loopback; rank 1: loopback; ");
  CHECK(connect_with({loopback}, "pigeon", "pigeon") ==
        "rank 0: invalid argument: transport (MK_TRANSPORT): expected one of loopback, saw \"pigeon\"; "
        "rank 1: invalid argument: transport (MK_TRANSPORT): expected one of loopback, saw \"pigeon\"; ");
  CHECK(contains(connect_with({loopback}, "", "loopback"),
                 "rank 1: mismatch: rank 0 asks for the transport \"\""));
  const std::string none = connect_with({absent}, "absent", "absent");
  INFO(none);
  CHECK(contains(none, "rank 1: unsupported: no transport connects the nodes: absent: libabsent.so is not"));
}

TEST_CASE("regions in a GPU's memory pass over backends that cannot write there", "[transport]") {
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, kTwoNodes, [&](Rank& rank) -> std::string {
          EndpointOptions options;
          options.gpu_memory = true;
          const Status status = rank.connect(std::move(options));
          MK_EXPECT(status.code() == MK_ERROR_UNSUPPORTED);
          MK_EXPECT(contains(status.sentence(), "loopback: cannot reach a GPU's memory"));
          return "";
        }) == "");
}

TEST_CASE("what the network has written is flushed before its signals are seen", "[transport]") {
  const bool fails = GENERATE(false, true);
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, kTwoNodes, [&](Rank& rank) -> std::string {
          // Signals that arrive together are flushed together: first a flush, then they rise, then the event.
          std::atomic<uint64_t> flushes{0}, flushes_of_event{0}, signals_of_event{0}, early{0};
          std::atomic<Endpoint*> endpoint{nullptr};
          EndpointOptions options;
          options.flush_writes = [&]() -> Status {
            if (endpoint.load()->signal(7) != signals_of_event) ++early;
            ++flushes;
            return fails ? Status(MK_ERROR_CUDA, "no flush today") : Status();
          };
          rank.on_event_hook = [&] {
            if (endpoint.load() == nullptr) return;
            const uint64_t signals = endpoint.load()->signal(7);
            if (signals != signals_of_event && flushes == flushes_of_event) ++early;
            signals_of_event = signals;
            flushes_of_event = flushes.load();
          };
          MK_EXPECT_OK(rank.connect(std::move(options)));
          endpoint = rank.endpoint.get();
          MK_EXPECT(rank.barrier());
          for (int n = 0; n < 5 && rank.rank == 0; ++n) MK_EXPECT(rank.post(make_signal(1, 7)));
          if (fails && rank.rank == 1) {
            MK_EXPECT(!rank.wait([] { return false; }));
            MK_EXPECT(contains(rank.failure(), "no flush today"));
            MK_EXPECT(rank.endpoint->signal(7) == 0);
          } else if (rank.rank == 1) {
            MK_EXPECT(rank.wait([&] { return rank.endpoint->signal(7) == 5; }));
            MK_EXPECT(flushes > 0 && early == 0);
          } else {
            MK_EXPECT(flushes == 0);
          }
          MK_EXPECT(rank.barrier());
          rank.endpoint.reset();
          return "";
        }) == "");
}

TEST_CASE("a thread may post in a kernel's place, and sees what kernels see", "[transport]") {
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, kTwoNodes, [&](Rank& rank) -> std::string {
          EndpointOptions options;
          options.fifo_capacity = 4;
          MK_EXPECT_OK(rank.connect(std::move(options)));
          const SharedWithGpu shared = rank.endpoint->shared_with_gpu();
          MK_EXPECT(shared.fifo_capacity == 4);
          MK_EXPECT(shared.counters->bytes() >= CounterLayout::kBytes);
          MK_EXPECT(rank.barrier());
          constexpr uint64_t kCommands = 50;
          for (uint64_t index = 0; index < kCommands; ++index) {
            const Command command = make_signal(1 - rank.rank, 9);
            while (!rank.endpoint->try_publish(index, command)) {
              MK_EXPECT(!rank.abort.raised());
              std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
          }
          const auto word = [&](size_t offset) {
            return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(shared.counters->data() + offset))
                .load(std::memory_order_acquire);
          };
          MK_EXPECT(rank.wait([&] { return rank.endpoint->signal(9) == kCommands; }));
          MK_EXPECT(rank.wait([&] { return rank.endpoint->completed() == kCommands; }));
          MK_EXPECT(word(CounterLayout::signal(9)) == kCommands);
          MK_EXPECT(word(CounterLayout::kCompleted) == kCommands);
          MK_EXPECT(rank.barrier());
          return rank.failure();
        }) == "");
}

TEST_CASE("a malformed seed is refused on every rank", "[transport]") {
  CHECK(run_ranks(RankKind::threads, {"loopback", "many"}, kTwoNodes, [&](Rank& rank) -> std::string {
          const Status status = rank.connect({});
          MK_EXPECT(!status.ok() && contains(status.sentence(), "MK_LOOPBACK_SEED"));
          return "";
        }) == "");
}

TEST_CASE("with one node there is nobody to send to", "[transport]") {
  for (const BackendCase& backend : backend_cases()) {
    CHECK(run_ranks(RankKind::threads, backend, {0, 0}, [&](Rank& rank) -> std::string {
            MK_EXPECT_OK(rank.connect({}));
            auto& memory = rank.make_memory(64);
            MK_EXPECT_OK(rank.add_region(memory).status());
            MK_EXPECT(rank.endpoint->posted() == 0 && rank.endpoint->completed() == 0);
            MK_EXPECT(rank.barrier());
            return rank.failure();
          }) == "");
  }
}

}  // namespace mk::test
