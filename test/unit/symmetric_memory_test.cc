// SPDX-License-Identifier: MIT
// Host symmetric memory between ranks that are threads of one process.
#include "lib/symmetric_memory.h"

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

#include "test/support/catch.h"
#include "test/support/local_exchange.h"
#include "test/support/process_state.h"
#include "test/support/rank_topology.h"

using namespace mk;
using namespace std::chrono_literals;

namespace {

// Catch2's assertions are not thread-safe: ranks count what went wrong.
std::atomic<int> faults;
void expect(bool condition) {
  if (!condition) faults.fetch_add(1);
}

void run_ranks(const std::vector<int>& node_of_rank,
               const std::function<void(const Topology&, Exchange&, AbortToken&)>& body) {
  faults = 0;
  const int nranks = static_cast<int>(node_of_rank.size());
  test::LocalExchange job(nranks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < nranks; ++rank) {
    ranks.emplace_back([&, rank] {
      AbortToken abort;
      body(test::rank_topology(rank, node_of_rank), job.of(rank), abort);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  REQUIRE(faults == 0);
}

Deadline soon() { return Deadline::after(20s); }

void barrier(Exchange& exchange) { expect(exchange.all_gather({}, soon(), "test barrier").ok()); }

uint64_t pattern(int rank, size_t piece, size_t index) {
  return static_cast<uint64_t>(rank + 1) << 48 | static_cast<uint64_t>(piece) << 32 | index;
}

uint64_t* words(std::byte* memory) { return reinterpret_cast<uint64_t*>(memory); }

constexpr size_t kPieces = 5;
constexpr size_t kWords = 1000;

// Grows five times; after each growth the new piece is zero, all earlier data and addresses are as before, and
// every rank reads what every other rank of its node wrote.
void grow_and_compare(const Topology& topology, Exchange& exchange, AbortToken& abort) {
  auto made = make_host_symmetric_memory(topology, exchange, abort, soon());
  expect(made.ok());
  if (!made.ok()) return;
  SymmetricMemory& memory = *made.value();
  std::vector<size_t> offsets;
  std::vector<std::byte*> first_addresses;
  for (size_t piece = 0; piece < kPieces; ++piece) {
    const size_t before = memory.size();
    Result<size_t> offset = memory.grow(kWords * sizeof(uint64_t) + piece * memory.granularity(), soon());
    expect(offset.ok());
    if (!offset.ok()) return;
    expect(offset.value() == before && memory.size() == before + (piece + 1) * memory.granularity());
    offsets.push_back(offset.value());
    uint64_t* mine = words(memory.local(offset.value()));
    for (size_t index = 0; index < (memory.size() - before) / 8; ++index) expect(mine[index] == 0);
    for (size_t index = 0; index < kWords; ++index) mine[index] = pattern(topology.rank, piece, index);
    barrier(exchange);
    for (int peer = 0; peer < topology.local_nranks(); ++peer) {
      const int peer_rank =
          topology.ranks_of_node[static_cast<size_t>(topology.node())][static_cast<size_t>(peer)];
      if (piece == 0) first_addresses.push_back(memory.peer(peer, 0));
      expect(memory.peer(peer, 0) == first_addresses[static_cast<size_t>(peer)]);
      for (size_t old = 0; old <= piece; ++old) {
        const uint64_t* theirs = words(memory.peer(peer, offsets[old]));
        for (size_t index = 0; index < kWords; ++index) expect(theirs[index] == pattern(peer_rank, old, index));
      }
    }
    barrier(exchange);
  }
  expect(memory.peer(topology.local_rank(), 0) == memory.local(0));
  expect(memory.peer(-1, 0) == nullptr && memory.peer(topology.local_nranks(), 0) == nullptr);
  barrier(exchange);
}

// Each rank writes a row into each neighbour and raises a flag with release order; the owner acquires it and
// looks.
void cross_writes(const Topology& topology, Exchange& exchange, AbortToken& abort) {
  auto made = make_host_symmetric_memory(topology, exchange, abort, soon());
  expect(made.ok());
  if (!made.ok()) return;
  SymmetricMemory& memory = *made.value();
  const size_t nranks = static_cast<size_t>(topology.nranks);
  const size_t row_bytes = kWords * sizeof(uint64_t);
  Result<size_t> rows = memory.grow(nranks * row_bytes, soon());
  Result<size_t> flags = memory.grow(nranks * 64, soon());
  expect(rows.ok() && flags.ok());
  if (!rows.ok() || !flags.ok()) return;
  const size_t mine = static_cast<size_t>(topology.rank);
  for (int peer = 0; peer < topology.local_nranks(); ++peer) {
    uint64_t* row = words(memory.peer(peer, rows.value() + mine * row_bytes));
    for (size_t index = 0; index < kWords; ++index) row[index] = pattern(topology.rank, 7, index);
    std::atomic_ref<uint64_t> flag(*words(memory.peer(peer, flags.value() + mine * 64)));
    flag.store(1, std::memory_order_release);
    flag.notify_all();
  }
  for (size_t source = 0; source < nranks; ++source) {
    std::atomic_ref<uint64_t> flag(*words(memory.local(flags.value() + source * 64)));
    while (flag.load(std::memory_order_acquire) == 0) flag.wait(0, std::memory_order_acquire);
    const uint64_t* row = words(memory.local(rows.value() + source * row_bytes));
    for (size_t index = 0; index < kWords; ++index)
      expect(row[index] == pattern(static_cast<int>(source), 7, index));
  }
  barrier(exchange);
}

}  // namespace

TEST_CASE("host symmetric memory of threads grows, keeps data and addresses, and leaves nothing") {
  const int nranks = GENERATE(1, 2, 4, 8);
  const int descriptors = test::open_descriptors();
  std::thread([] {}).join();  // ThreadSanitizer's own thread starts with the first one
  const int threads = test::running_threads();
  run_ranks(std::vector<int>(static_cast<size_t>(nranks), 0), grow_and_compare);
  CHECK(test::open_descriptors() == descriptors);
  CHECK(test::running_threads_settle_at(threads));
  CHECK(test::mappings("memfd:mkernel") == 0);
}

TEST_CASE("neighbours in one process write through the owner's mapping") {
  const int nranks = GENERATE(2, 4, 8);
  run_ranks(std::vector<int>(static_cast<size_t>(nranks), 0), cross_writes);
}

TEST_CASE("threads of one process share one mapping of each rank, which outlives its owner") {
  std::atomic<int> mapped{0};
  std::atomic<uint64_t*> owner{nullptr};
  run_ranks({0, 0, 0}, [&](const Topology& topology, Exchange& exchange, AbortToken& abort) {
    auto made = make_host_symmetric_memory(topology, exchange, abort, soon());
    expect(made.ok());
    if (!made.ok()) return;
    std::unique_ptr<SymmetricMemory> memory = made.take();
    expect(memory->grow(4096, soon()).ok());
    expect(memory->grow(4096, soon()).ok());
    if (topology.rank == 0) owner = words(memory->local(0));
    barrier(exchange);
    if (topology.rank == 1) {
      expect(words(memory->peer(0, 0)) == owner.load());
      mapped = test::mappings("memfd:mkernel");
    }
    barrier(exchange);
    if (topology.rank == 0) memory.reset();
    barrier(exchange);
    if (topology.rank == 2) *words(memory->peer(0, 8)) = 5;
    barrier(exchange);
    if (topology.rank == 1) expect(*words(memory->peer(0, 8)) == 5);
    barrier(exchange);
  });
  CHECK(mapped == 6);
  CHECK(test::mappings("memfd:mkernel") == 0);
}

TEST_CASE("emulated nodes: only ranks of the node are peers") {
  run_ranks({0, 1, 0, 1, 1}, [](const Topology& topology, Exchange& exchange, AbortToken& abort) {
    grow_and_compare(topology, exchange, abort);
  });
}

TEST_CASE("no memory file stays open after growth") {
  std::atomic<int> files{-1};
  run_ranks({0, 0, 0, 0}, [&](const Topology& topology, Exchange& exchange, AbortToken& abort) {
    auto made = make_host_symmetric_memory(topology, exchange, abort, soon());
    expect(made.ok());
    if (!made.ok()) return;
    barrier(exchange);
    if (topology.rank == 0) files = test::open_descriptors();
    barrier(exchange);
    for (int turn = 0; turn < 3; ++turn) expect(made.value()->grow(1, soon()).ok());
    barrier(exchange);
    if (topology.rank == 0) expect(test::open_descriptors() == files);
    barrier(exchange);
  });
}

TEST_CASE("ranks that ask for different sizes all learn of it and can grow afterwards") {
  run_ranks({0, 0, 0}, [](const Topology& topology, Exchange& exchange, AbortToken& abort) {
    auto made = make_host_symmetric_memory(topology, exchange, abort, soon());
    expect(made.ok());
    if (!made.ok()) return;
    SymmetricMemory& memory = *made.value();
    expect(memory.grow(100, soon()).ok());
    const size_t before = memory.size();
    Result<size_t> grown = memory.grow(topology.rank == 2 ? 200 : 100, soon());
    expect(!grown.ok() && grown.status().code() == MK_ERROR_MISMATCH);
    expect(grown.status().sentence().find("rank 0") != std::string::npos);
    expect(grown.status().sentence().find("rank 2") != std::string::npos);
    expect(memory.size() == before);
    grown = memory.grow(0, soon());
    expect(!grown.ok() && grown.status().code() == MK_ERROR_INVALID_ARGUMENT);
    grown = memory.grow(size_t{1} << 50, soon());
    expect(!grown.ok() && grown.status().code() == MK_ERROR_OUT_OF_MEMORY);
    // More than the machine has, whether or not the reserved range has room for it.
    const size_t physical =
        static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
    grown = memory.grow(physical + (size_t{1} << 30), soon());
    expect(!grown.ok() && grown.status().code() == MK_ERROR_OUT_OF_MEMORY);
    grown = memory.grow(300, soon());
    expect(grown.ok() && grown.value() == before);
    barrier(exchange);
  });
}

TEST_CASE("a rank that never comes ends growth with its name, and growth stays ended") {
  run_ranks({0, 0}, [](const Topology& topology, Exchange& exchange, AbortToken& abort) {
    auto made = make_host_symmetric_memory(topology, exchange, abort, soon());
    expect(made.ok());
    if (!made.ok() || topology.rank == 1) return;
    Result<size_t> grown = made.value()->grow(100, Deadline::after(200ms));
    expect(!grown.ok() && grown.status().code() == MK_ERROR_TIMEOUT);
    expect(grown.status().sentence().find("rank 1") != std::string::npos);
    grown = made.value()->grow(100, soon());
    expect(!grown.ok() && grown.status().code() == MK_ERROR_TIMEOUT);
    expect(made.value()->size() == 0);
  });
}
