// SPDX-License-Identifier: MIT
// Host symmetric memory between ranks that are processes.
#include <sys/resource.h>

#include <atomic>
#include <cstdio>
#include <thread>

#include "lib/symmetric_memory.h"
#include "test/support/catch.h"
#include "test/support/local_exchange.h"
#include "test/support/process_state.h"
#include "test/support/rank_processes.h"
#include "test/support/rank_topology.h"

using namespace mk;
using namespace std::chrono_literals;

namespace {

// In a child the exit code is the line of the first check that failed (modulo 256, never 0); the line is
// printed too.
#define CHILD_CHECK(condition)                                                                     \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      std::fprintf(stderr, "%s:%d: rank %d: %s\n", __FILE__, __LINE__, topology.rank, #condition); \
      return 1;                                                                                    \
    }                                                                                              \
  } while (0)

Deadline soon() { return Deadline::after(20s); }

bool barrier(Exchange& exchange) {
  const std::byte here{1};
  return exchange.all_gather({&here, 1}, soon(), "test barrier").ok();
}

std::atomic_ref<uint64_t> word(std::byte* memory) {
  return std::atomic_ref(*reinterpret_cast<uint64_t*>(memory));
}

bool names(const Status& status, const char* text) { return status.sentence().find(text) != std::string::npos; }

// Sleeps until the word is at least `value`; false after 10 s.
bool await(std::byte* memory, uint64_t value) {
  for (int turn = 0; turn < 10000; ++turn) {
    if (word(memory).load(std::memory_order_acquire) >= value) return true;
    std::this_thread::sleep_for(1ms);
  }
  return false;
}

std::vector<int> one_node(int nranks) { return std::vector<int>(static_cast<size_t>(nranks), 0); }

int grow_and_cross_write(const Topology& topology, Exchange& exchange) {
  AbortToken abort;
  const int descriptors = test::open_descriptors();
  const int threads = test::running_threads();
  auto made = make_host_symmetric_memory(topology, exchange, abort, soon());
  CHILD_CHECK(made.ok());
  SymmetricMemory& memory = *made.value();
  std::vector<std::byte*> first;
  std::vector<size_t> offsets;
  for (uint64_t turn = 1; turn <= 5; ++turn) {
    Result<size_t> offset = memory.grow(100000 * turn, soon());
    CHILD_CHECK(offset.ok());
    CHILD_CHECK(test::open_descriptors() == descriptors);
    offsets.push_back(offset.value());
    for (size_t at = offset.value(); at < memory.size(); at += 8)
      CHILD_CHECK(word(memory.local(at)).load() == 0);
    CHILD_CHECK(barrier(exchange));
    const size_t mine = static_cast<size_t>(topology.local_rank());
    for (int peer = 0; peer < topology.local_nranks(); ++peer) {
      if (turn == 1) first.push_back(memory.peer(peer, 0));
      CHILD_CHECK(memory.peer(peer, 0) == first[static_cast<size_t>(peer)]);
      for (const size_t old : offsets) {
        *reinterpret_cast<uint64_t*>(memory.peer(peer, old + 4096 + mine * 8)) = turn * 100 + mine;
        word(memory.peer(peer, old + mine * 8)).store(turn, std::memory_order_release);
      }
    }
    for (size_t source = 0; source < static_cast<size_t>(topology.local_nranks()); ++source) {
      for (const size_t old : offsets) {
        CHILD_CHECK(await(memory.local(old + source * 8), turn));
        CHILD_CHECK(*reinterpret_cast<uint64_t*>(memory.local(old + 4096 + source * 8)) == turn * 100 + source);
      }
    }
    CHILD_CHECK(barrier(exchange));
  }
  CHILD_CHECK(test::mappings("memfd:mkernel") == 5 * topology.local_nranks());
  made.value().reset();
  CHILD_CHECK(test::open_descriptors() == descriptors && test::running_threads() == threads);
  CHILD_CHECK(test::mappings("memfd:mkernel") == 0);
  return 0;
}

}  // namespace

TEST_CASE("processes grow, keep data and addresses, and leave nothing") {
  const int nranks = GENERATE(2, 3, 4);
  const auto codes = test::run_rank_processes(nranks, 60, [&](Exchange& exchange) {
    return grow_and_cross_write(test::rank_topology(exchange.rank(), one_node(nranks)), exchange);
  });
  CHECK(codes == one_node(nranks));
}

TEST_CASE("processes of two emulated nodes map only their own node") {
  const auto codes = test::run_rank_processes(4, 60, [](Exchange& exchange) {
    return grow_and_cross_write(test::rank_topology(exchange.rank(), {0, 1, 0, 1}), exchange);
  });
  CHECK(codes == one_node(4));
}

TEST_CASE("ranks that are threads of several processes reach each other") {
  const auto codes = test::run_rank_processes(
      4, 60,
      [](Exchange& exchange) -> int {
        const Topology topology = test::rank_topology(exchange.rank(), one_node(4));
        AbortToken abort;
        auto made = make_host_symmetric_memory(topology, exchange, abort, soon());
        CHILD_CHECK(made.ok());
        SymmetricMemory& memory = *made.value();
        for (uint64_t turn = 1; turn <= 3; ++turn) {
          Result<size_t> offset = memory.grow(1 << 16, soon());
          CHILD_CHECK(offset.ok());
          for (int peer = 0; peer < 4; ++peer) {
            const size_t mine = static_cast<size_t>(topology.rank) * 8;
            word(memory.peer(peer, offset.value() + mine)).store(turn, std::memory_order_release);
          }
          for (size_t source = 0; source < 4; ++source) {
            CHILD_CHECK(await(memory.local(offset.value() + source * 8), turn));
          }
        }
        CHILD_CHECK(barrier(exchange));
        // Two own ranges and, for each of the two ranks, two of the other process; three pieces each.
        CHILD_CHECK(test::mappings("memfd:mkernel") == (2 + 2 * 2) * 3);
        CHILD_CHECK(barrier(exchange));
        return 0;
      },
      2);
  CHECK(codes == one_node(2));
}

TEST_CASE("a growth that one rank cannot follow is undone on all") {
  const auto codes = test::run_rank_processes(3, 60, [](Exchange& exchange) -> int {
    const Topology topology = test::rank_topology(exchange.rank(), one_node(3));
    AbortToken abort;
    auto made = make_host_symmetric_memory(topology, exchange, abort, soon());
    CHILD_CHECK(made.ok());
    SymmetricMemory& memory = *made.value();
    CHILD_CHECK(memory.grow(1 << 20, soon()).ok());
    word(memory.local(0)).store(77);

    // No memory on rank 1.
    rlimit unlimited{};
    getrlimit(RLIMIT_FSIZE, &unlimited);
    rlimit low = unlimited;
    low.rlim_cur = 2 << 20;
    if (topology.rank == 1) setrlimit(RLIMIT_FSIZE, &low);
    Result<size_t> grown = memory.grow(4 << 20, soon());
    CHILD_CHECK(!grown.ok() && grown.status().code() == MK_ERROR_OUT_OF_MEMORY &&
                names(grown.status(), "rank 1"));
    if (topology.rank == 1) setrlimit(RLIMIT_FSIZE, &unlimited);

    CHILD_CHECK(memory.size() == 1 << 20);
    CHILD_CHECK(test::mappings("memfd:mkernel") == 3);
    grown = memory.grow(4 << 20, soon());
    CHILD_CHECK(grown.ok() && grown.value() == 1 << 20);
    for (int peer = 0; peer < 3; ++peer) {
      CHILD_CHECK(word(memory.peer(peer, 5 * (1 << 20) - 8)).load() == 0);
    }
    CHILD_CHECK(word(memory.local(0)).load() == 77);
    CHILD_CHECK(barrier(exchange));
    return 0;
  });
  CHECK(codes == one_node(3));
}

TEST_CASE("a rank short of descriptors fails growth on all, whatever the moment it runs out") {
  if (!test::kLimitsCanBeSet) return;
  const auto codes = test::run_rank_processes(3, 60, [](Exchange& exchange) -> int {
    const Topology topology = test::rank_topology(exchange.rank(), one_node(3));
    AbortToken abort;
    auto made = make_host_symmetric_memory(topology, exchange, abort, soon());
    CHILD_CHECK(made.ok());
    SymmetricMemory& memory = *made.value();
    int top = 0;
    while (topology.rank == 2 && top < 30) top = dup(2);
    int failures = 0;
    for (int room = 0; room <= 10; ++room) {
      rlimit files{};
      getrlimit(RLIMIT_NOFILE, &files);
      rlimit low = files;
      low.rlim_cur = static_cast<rlim_t>(top + 1 + room);
      if (topology.rank == 2) setrlimit(RLIMIT_NOFILE, &low);
      const size_t before = memory.size();
      Result<size_t> grown = memory.grow(1 << 16, soon());
      if (topology.rank == 2) setrlimit(RLIMIT_NOFILE, &files);
      if (grown.ok()) continue;
      ++failures;
      CHILD_CHECK(grown.status().code() == MK_ERROR_SYSTEM && names(grown.status(), "rank 2"));
      CHILD_CHECK(memory.size() == before);
    }
    // Without room for its memory, socket and senders, and for one that comes in.
    CHILD_CHECK(failures >= 5 && failures < 10);
    CHILD_CHECK(test::mappings("memfd:mkernel") == 3 * (11 - failures));
    return 0;
  });
  CHECK(codes == one_node(3));
}

TEST_CASE("a rank short of addresses says so on all ranks") {
  if (!test::kLimitsCanBeSet) return;
  const auto codes = test::run_rank_processes(2, 60, [](Exchange& exchange) -> int {
    const Topology topology = test::rank_topology(exchange.rank(), one_node(2));
    AbortToken abort;
    if (topology.rank == 1) {
      rlimit limit{};
      getrlimit(RLIMIT_AS, &limit);
      limit.rlim_cur = size_t{1} << 30;
      if (setrlimit(RLIMIT_AS, &limit) != 0) return 1;
    }
    auto made = make_host_symmetric_memory(topology, exchange, abort, soon());
    CHILD_CHECK(made.ok());
    Result<size_t> grown = made.value()->grow(size_t{1} << 30, soon());
    CHILD_CHECK(!grown.ok() && grown.status().code() == MK_ERROR_OUT_OF_MEMORY);
    CHILD_CHECK(names(grown.status(), "rank 1") && names(grown.status(), "reserved"));
    CHILD_CHECK(made.value()->grow(16 << 20, soon()).ok());
    CHILD_CHECK(barrier(exchange));
    return 0;
  });
  CHECK(codes == one_node(2));
}

TEST_CASE("a killed rank leaves nothing, and the survivors keep its memory and learn its name") {
  const int files_before = test::shared_memory_files();
  const auto codes = test::run_rank_processes(3, 60, [](Exchange& exchange) -> int {
    const Topology topology = test::rank_topology(exchange.rank(), one_node(3));
    AbortToken abort;
    const int descriptors = test::open_descriptors();
    auto made = make_host_symmetric_memory(topology, exchange, abort, soon());
    CHILD_CHECK(made.ok());
    SymmetricMemory& memory = *made.value();
    CHILD_CHECK(memory.grow(1 << 20, soon()).ok());
    word(memory.local(64)).store(topology.rank + 5u);
    CHILD_CHECK(barrier(exchange));
    if (topology.rank == 1) raise(SIGKILL);
    Result<size_t> grown = memory.grow(1 << 20, soon());
    CHILD_CHECK(!grown.ok() && grown.status().code() == MK_ERROR_REMOTE && names(grown.status(), "rank 1"));
    CHILD_CHECK(word(memory.peer(1, 64)).load() == 6);
    word(memory.peer(1, 1 << 19)).store(1);
    CHILD_CHECK(test::open_descriptors() == descriptors);
    // A survivor that leaves earlier would be the death that the other one reports.
    word(memory.peer(0, 128)).fetch_add(1);
    CHILD_CHECK(await(memory.peer(0, 128), 2));
    made.value().reset();
    CHILD_CHECK(test::mappings("memfd:mkernel") == 0);
    return 0;
  });
  CHECK(codes == std::vector<int>{0, 128 + SIGKILL, 0});
  CHECK(test::shared_memory_files() == files_before);
}
