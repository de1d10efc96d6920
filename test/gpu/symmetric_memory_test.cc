// SPDX-License-Identifier: MIT
// CUDA symmetric memory between ranks as threads, as processes, and mixed. Ranks are spread over the devices
// there are. Exit code 77 where there is none.
#include "lib/symmetric_memory.h"

#include <chrono>
#include <cstdio>
#include <cstring>

#include "lib/cuda_driver_table.h"
#include "test/support/process_state.h"
#include "test/support/rank_processes.h"
#include "test/support/rank_topology.h"

using namespace mk;
using namespace std::chrono_literals;

namespace {

constexpr size_t kBlock = 1 << 20;

#define CHILD_CHECK(condition)                                                                    \
  do {                                                                                            \
    if (!(condition)) {                                                                           \
      std::fprintf(stderr, "FAILED line %d, rank %d: %s\n", __LINE__, topology.rank, #condition); \
      return 1;                                                                                   \
    }                                                                                             \
  } while (0)

#define CHILD_CHECK_OK(result)                                                       \
  do {                                                                               \
    if (!(result).ok()) {                                                            \
      std::fprintf(stderr, "FAILED line %d, rank %d: %s\n", __LINE__, topology.rank, \
                   (result).status().sentence().c_str());                            \
      return 1;                                                                      \
    }                                                                                \
  } while (0)

Deadline soon() { return Deadline::after(40s); }

bool barrier(Exchange& exchange) {
  const std::byte here{1};
  return exchange.all_gather({&here, 1}, soon(), "test barrier").ok();
}

CUdeviceptr address(const std::byte* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

bool holds(const cuda::Driver& driver, const std::byte* memory, unsigned char value, size_t bytes) {
  std::vector<unsigned char> copy(bytes);
  if (driver.cuMemcpyDtoH(copy.data(), address(memory), bytes) != CUDA_SUCCESS) return false;
  for (const unsigned char seen : copy) {
    if (seen != value) return false;
  }
  return true;
}

unsigned char pattern(int source, int target, size_t turn) {
  return static_cast<unsigned char>(1 + source * 50 + target * 10 + static_cast<int>(turn));
}

bool fill(const cuda::Driver& driver, std::byte* memory, unsigned char value) {
  return driver.cuMemsetD8Async(address(memory), value, kBlock, nullptr) == CUDA_SUCCESS &&
         driver.cuStreamSynchronize(nullptr) == CUDA_SUCCESS;
}

// The open descriptors of this process; ranks of one process would count each other's listings.
int count_in_turn(const Topology& topology, Exchange& exchange) {
  int descriptors = -1;
  for (int rank = 0; rank < topology.nranks; ++rank) {
    if (rank == topology.rank) descriptors = test::open_descriptors();
    if (!barrier(exchange)) return -1;
  }
  return descriptors;
}

// Each rank copies a block into every rank's memory; block `source` of each piece is written by rank `source`,
// the one behind the last is where a rank prepares what it sends.
int grow_and_write(const Topology& topology, Exchange& exchange, const cuda::Driver& driver, int device) {
  AbortToken abort;
  auto made = make_cuda_symmetric_memory(topology, exchange, abort, device, soon());
  CHILD_CHECK_OK(made);
  SymmetricMemory& memory = *made.value();
  std::vector<std::byte*> first;
  std::vector<size_t> offsets;
  const int nranks = topology.nranks;
  const size_t piece_bytes = static_cast<size_t>(nranks + 1) * kBlock;
  int descriptors = 0;
  for (size_t turn = 0; turn < 3; ++turn) {
    const auto start = std::chrono::steady_clock::now();
    Result<size_t> offset = memory.grow(piece_bytes, soon());
    CHILD_CHECK_OK(offset);
    const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
    if (topology.rank == 0) std::printf("  growth %zu: %.2f ms\n", turn, taken.count());
    offsets.push_back(offset.value());
    CHILD_CHECK(holds(driver, memory.local(offset.value()), 0, piece_bytes));
    CHILD_CHECK(barrier(exchange));
    if (turn == 1) descriptors = count_in_turn(topology, exchange);
    for (int peer = 0; peer < nranks; ++peer) {
      if (turn == 0) first.push_back(memory.peer(peer, 0));
      CHILD_CHECK(memory.peer(peer, 0) == first[static_cast<size_t>(peer)]);
      std::byte* staging = memory.local(offset.value() + static_cast<size_t>(nranks) * kBlock);
      CHILD_CHECK(fill(driver, staging, pattern(topology.rank, peer, turn)));
      std::byte* target = memory.peer(peer, offset.value() + static_cast<size_t>(topology.rank) * kBlock);
      CHILD_CHECK(driver.cuMemcpyDtoDAsync(address(target), address(staging), kBlock, nullptr) == CUDA_SUCCESS);
      CHILD_CHECK(driver.cuStreamSynchronize(nullptr) == CUDA_SUCCESS);
    }
    CHILD_CHECK(barrier(exchange));
    for (size_t old = 0; old <= turn; ++old) {
      for (int source = 0; source < nranks; ++source) {
        const std::byte* block = memory.local(offsets[old] + static_cast<size_t>(source) * kBlock);
        CHILD_CHECK(holds(driver, block, pattern(source, topology.rank, old), kBlock));
        // Reading a neighbour's memory works too.
        const int peer = (topology.rank + 1) % nranks;
        block = memory.peer(peer, offsets[old] + static_cast<size_t>(source) * kBlock);
        CHILD_CHECK(holds(driver, block, pattern(source, peer, old), 4096));
      }
    }
    CHILD_CHECK(barrier(exchange));
    if (turn == 2) CHILD_CHECK(count_in_turn(topology, exchange) == descriptors);
  }

  // Growth that no device, and growth that one rank, cannot follow.
  const size_t before = memory.size();
  Result<size_t> grown = memory.grow(size_t{1} << 42, soon());
  CHILD_CHECK(!grown.ok() && grown.status().code() == MK_ERROR_OUT_OF_MEMORY);
  if (topology.rank == 0) std::printf("  refused: %s\n", grown.status().sentence().c_str());
  if (nranks > 1) {
    grown = memory.grow(topology.rank == 1 ? kBlock : 2 * kBlock, soon());
    CHILD_CHECK(!grown.ok() && grown.status().code() == MK_ERROR_MISMATCH);
  }
  CHILD_CHECK(memory.size() == before);
  grown = memory.grow(kBlock, soon());
  CHILD_CHECK(grown.ok() && grown.value() == before);
  CHILD_CHECK(holds(driver, memory.peer(0, before), 0, kBlock));
  CHILD_CHECK(barrier(exchange));
  return 0;
}

// Makes the rank's device current, then runs the body.
int on_device(Exchange& exchange,
              const std::function<int(const Topology&, Exchange&, const cuda::Driver&, int)>& body) {
  const Topology topology =
      test::rank_topology(exchange.rank(), std::vector<int>(static_cast<size_t>(exchange.nranks()), 0));
  Result<const cuda::Driver*> loaded = cuda::load();
  CHILD_CHECK_OK(loaded);
  const cuda::Driver& driver = *loaded.value();
  Result<int> count = cuda::device_count();
  CHILD_CHECK_OK(count);
  const int device = topology.rank % count.value();
  CUcontext context = nullptr;
  CHILD_CHECK(driver.cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS);
  CHILD_CHECK(driver.cuCtxSetCurrent(context) == CUDA_SUCCESS);
  size_t free_before = 0;
  size_t total = 0;
  // One more run inside the context, so that what the driver keeps for itself is there already.
  int code = 0;
  for (int turn = 0; turn < 2 && code == 0; ++turn) {
    code = body(topology, exchange, driver, device);
    CHILD_CHECK(code == 0);
    CHILD_CHECK(barrier(exchange));
    size_t free_now = 0;
    CHILD_CHECK(driver.cuMemGetInfo(&free_now, &total) == CUDA_SUCCESS);
    if (turn == 0) free_before = free_now;
    if (turn == 1 && free_now + (1 << 20) < free_before) {
      std::fprintf(stderr, "FAILED rank %d: %zu bytes free, %zu before\n", topology.rank, free_now,
                   free_before);
      code = 1;
    }
    CHILD_CHECK(barrier(exchange));
  }
  CUcontext current = nullptr;
  CHILD_CHECK(driver.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context);
  driver.cuDevicePrimaryCtxRelease(device);
  return code;
}

// Rank 1 dies; the other keeps its memory.
int survive(const Topology& topology, Exchange& exchange, const cuda::Driver& driver, int device) {
  AbortToken abort;
  auto made = make_cuda_symmetric_memory(topology, exchange, abort, device, soon());
  CHILD_CHECK_OK(made);
  SymmetricMemory& memory = *made.value();
  CHILD_CHECK_OK(memory.grow(4 * kBlock, soon()));
  CHILD_CHECK(fill(driver, memory.local(0), static_cast<unsigned char>(topology.rank + 5)));
  CHILD_CHECK(barrier(exchange));
  if (topology.rank == 1) raise(SIGKILL);
  Result<size_t> grown = memory.grow(kBlock, soon());
  CHILD_CHECK(!grown.ok() && grown.status().code() == MK_ERROR_REMOTE);
  CHILD_CHECK(holds(driver, memory.peer(1, 0), 6, kBlock));
  return 0;
}

int report(const char* name, const std::vector<int>& codes, const std::vector<int>& expected) {
  const bool passed = codes == expected;
  std::printf("%s: %s\n", name, passed ? "passed" : "FAILED");
  return passed ? 0 : 1;
}

}  // namespace

int main() {
  // Children leave by _exit, which flushes nothing.
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  // The driver does not survive a fork: everything that touches it happens in children.
  const std::vector<int> devices = test::run_rank_processes(1, 30, [](Exchange&) {
    Result<int> count = cuda::device_count();
    if (!count.ok()) std::printf("no device: %s\n", count.status().sentence().c_str());
    return count.ok() ? count.value() : 0;
  });
  if (devices.empty() || devices[0] < 1 || devices[0] > 64) return 77;
  std::printf("%d CUDA devices\n", devices[0]);
  const auto everything = [](Exchange& exchange) { return on_device(exchange, grow_and_write); };
  int failures = 0;
  for (const int nranks : {1, 2, 4}) {
    const std::vector<int> good(static_cast<size_t>(nranks), 0);
    failures += report(format("%d threads", nranks).c_str(),
                       test::run_rank_processes(nranks, 90, everything, nranks), {0});
    if (nranks == 1) continue;
    failures +=
        report(format("%d processes", nranks).c_str(), test::run_rank_processes(nranks, 90, everything), good);
  }
  failures += report("2 processes of 2 threads", test::run_rank_processes(4, 90, everything, 2), {0, 0});
  const auto killed = test::run_rank_processes(2, 90, [](Exchange& exchange) {
    const Topology topology = test::rank_topology(exchange.rank(), {0, 0});
    Result<const cuda::Driver*> loaded = cuda::load();
    CHILD_CHECK_OK(loaded);
    const cuda::Driver& driver = *loaded.value();
    Result<int> count = cuda::device_count();
    CHILD_CHECK_OK(count);
    const int device = topology.rank % count.value();
    CUcontext context = nullptr;
    CHILD_CHECK(driver.cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS);
    CHILD_CHECK(driver.cuCtxSetCurrent(context) == CUDA_SUCCESS);
    return survive(topology, exchange, driver, device);
  });
  failures += report("a killed process", killed, {0, 128 + SIGKILL});
  return failures == 0 ? 0 : 1;
}
