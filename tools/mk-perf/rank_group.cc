// SPDX-License-Identifier: MIT
#include "rank_group.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <string>

#include "errors.h"

namespace perf {

// At the start of the shared memory; the slots of the ranks follow.
struct SharedArea {
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> round;  // futex: barriers completed
  std::atomic<uint32_t> abandoned;
  mk_unique_id_t id;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

namespace {

constexpr std::chrono::seconds kBarrierDeadline{300};
constexpr size_t kSlotsOffset = 256;
static_assert(sizeof(SharedArea) <= kSlotsOffset);

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  const timespec second{1, 0};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &second, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

class SharedMemoryGroup : public RankGroup {
 public:
  SharedMemoryGroup(SharedMemory& memory, int rank) : memory_(memory), rank_(rank) {}

  void barrier() override { memory_.barrier(rank_); }

  std::vector<double> maximum(const std::vector<double>& values) override {
    std::vector<double> largest = values;
    for (size_t start = 0; start < values.size(); start += SharedMemory::kSlotValues) {
      const size_t count = std::min(SharedMemory::kSlotValues, values.size() - start);
      std::copy_n(values.data() + start, count, memory_.slot(rank_));
      barrier();
      for (int rank = 0; rank < memory_.nranks(); ++rank) {
        for (size_t index = 0; index < count; ++index) {
          largest[start + index] = std::max(largest[start + index], memory_.slot(rank)[index]);
        }
      }
      barrier();  // the slots are free again
    }
    return largest;
  }

  std::vector<char> all_gather(const void* bytes, size_t count) override {
    static_assert(kMaxGathered <= SharedMemory::kSlotValues * sizeof(double));
    std::vector<char> all(static_cast<size_t>(memory_.nranks()) * count);
    std::memcpy(memory_.slot(rank_), bytes, count);
    barrier();
    for (int rank = 0; rank < memory_.nranks(); ++rank)
      std::memcpy(all.data() + static_cast<size_t>(rank) * count, memory_.slot(rank), count);
    barrier();  // the slots are free again
    return all;
  }

 private:
  SharedMemory& memory_;
  int rank_;
};

// A row of A is 64 numbers taken as bf16 bits, which an all-gather moves unchanged. The product is of no
// interest.
class CommunicatorGroup : public RankGroup {
 public:
  CommunicatorGroup(mk_comm_t comm, int nranks, const DeviceOperations& device)
      : comm_(comm),
        nranks_(nranks),
        device_(device),
        a_(device, kRowBytes),
        b_(device, static_cast<size_t>(kInner) * kColumns * 2),
        c_(device, static_cast<size_t>(nranks) * kColumns * 2),
        gathered_(device, static_cast<size_t>(nranks) * kRowBytes) {
    b_.upload(std::vector<char>(b_.bytes(), 0).data());
  }

  void barrier() override { gather(nullptr, 0); }

  std::vector<double> maximum(const std::vector<double>& values) override {
    std::vector<double> largest = values;
    for (size_t start = 0; start < values.size(); start += kRowValues) {
      const size_t count = std::min(kRowValues, values.size() - start);
      const std::vector<double> all = gather(values.data() + start, count);
      for (int rank = 0; rank < nranks_; ++rank) {
        for (size_t index = 0; index < count; ++index) {
          largest[start + index] =
              std::max(largest[start + index], all[static_cast<size_t>(rank) * kRowValues + index]);
        }
      }
    }
    return largest;
  }

  std::vector<char> all_gather(const void* bytes, size_t count) override {
    static_assert(kMaxGathered <= kRowBytes);
    std::vector<double> row(kRowValues, 0.0);
    std::memcpy(row.data(), bytes, count);
    const std::vector<double> rows = gather(row.data(), kRowValues);
    std::vector<char> all(static_cast<size_t>(nranks_) * count);
    for (size_t rank = 0; rank < static_cast<size_t>(nranks_); ++rank)
      std::memcpy(all.data() + rank * count, rows.data() + rank * kRowValues, count);
    return all;
  }

 private:
  static constexpr size_t kRowValues = 64;
  static constexpr size_t kRowBytes = kRowValues * sizeof(double);
  static constexpr int64_t kInner = kRowBytes / 2;
  static constexpr int64_t kColumns = 8;

  std::vector<double> gather(const double* values, size_t count) {
    std::vector<double> row(kRowValues, 0.0);
    if (count) std::copy_n(values, count, row.data());
    a_.upload(row.data());
    mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
    args.m = nranks_;
    args.n = kColumns;
    args.k = kInner;
    args.dtype = args.out_dtype = MK_DTYPE_BF16;
    args.a = a_.data();
    args.lda = args.lda_gathered = kInner;
    args.b = b_.data();
    args.ldb = args.ldc = kColumns;
    args.c = c_.data();
    args.a_gathered = gathered_.data();
    require(mk_allgather_gemm(comm_, &args, device_.stream()), "mk_allgather_gemm between ranks", comm_);
    require(mk_comm_synchronize(comm_, device_.stream()), "mk_comm_synchronize", comm_);
    std::vector<double> all(static_cast<size_t>(nranks_) * kRowValues);
    gathered_.download(all.data());
    return all;
  }

  mk_comm_t comm_;
  int nranks_;
  const DeviceOperations& device_;
  DeviceBuffer a_;
  DeviceBuffer b_;
  DeviceBuffer c_;
  DeviceBuffer gathered_;
};

}  // namespace

SharedMemory::SharedMemory(int nranks)
    : bytes_(kSlotsOffset + static_cast<size_t>(nranks) * kSlotValues * sizeof(double)), nranks_(nranks) {
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw RunError(std::string("cannot share memory between ranks: ") + std::strerror(errno));
  area_ = new (memory) SharedArea{};
}

SharedMemory::~SharedMemory() { munmap(area_, bytes_); }

mk_unique_id_t& SharedMemory::unique_id() { return area_->id; }

double* SharedMemory::slot(int rank) {
  auto* slots = reinterpret_cast<double*>(reinterpret_cast<char*>(area_) + kSlotsOffset);
  return slots + static_cast<size_t>(rank) * kSlotValues;
}

void SharedMemory::abandon() {
  area_->abandoned.store(1);
  futex_wake_all(area_->round);
}

void SharedMemory::barrier(int rank) {
  const uint32_t round = area_->round.load();
  if (area_->arrived.fetch_add(1) + 1 == static_cast<uint32_t>(nranks_)) {
    area_->arrived.store(0);
    area_->round.store(round + 1);
    futex_wake_all(area_->round);
    return;
  }
  const auto deadline = std::chrono::steady_clock::now() + kBarrierDeadline;
  while (area_->round.load() == round) {
    if (area_->abandoned.load()) throw RunError("gave up: another rank has ended");
    if (std::chrono::steady_clock::now() > deadline) {
      throw RunError("rank " + std::to_string(rank) + " waited " + std::to_string(kBarrierDeadline.count()) +
                     " s for all ranks to meet; " + std::to_string(area_->arrived.load()) + " of " +
                     std::to_string(nranks_) + " came");
    }
    futex_wait(area_->round, round);
  }
}

std::unique_ptr<RankGroup> make_shared_memory_group(SharedMemory& memory, int rank) {
  return std::make_unique<SharedMemoryGroup>(memory, rank);
}

std::unique_ptr<RankGroup> make_communicator_group(mk_comm_t comm, int nranks, const DeviceOperations& device) {
  return std::make_unique<CommunicatorGroup>(comm, nranks, device);
}

}  // namespace perf
