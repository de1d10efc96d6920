// SPDX-License-Identifier: MIT
// Symmetric memory in memfds: anonymous files that vanish with the last process that maps them.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "symmetric_backend.h"

namespace mk {
namespace {

// A multiple of every page size in use (4, 16 and 64 KiB), so that ranks agree whatever their kernels.
constexpr size_t kGranularity = 64 << 10;
// Addresses cost nothing; a refused reservation is tried again at half the size.
constexpr size_t kReservation = size_t{64} << 30;
constexpr size_t kSmallestHostReservation = size_t{16} << 20;
// Pages are made in steps, between which the abort token and the deadline are looked at.
constexpr size_t kPopulateStep = size_t{64} << 20;

Status out_of_memory_or_system(const char* call, size_t bytes, int error) {
  const bool exhausted = error == ENOMEM || error == ENOSPC || error == EFBIG;
  return Status(
      exhausted ? MK_ERROR_OUT_OF_MEMORY : MK_ERROR_SYSTEM,
      format("%s for %.1f MiB of shared host memory: %s", call, mebibytes(bytes), std::strerror(error)));
}

// Memory that the kernel would give without killing anyone; SIZE_MAX where it does not say.
size_t available_memory() {
  std::FILE* file = std::fopen("/proc/meminfo", "re");
  if (!file) return SIZE_MAX;
  char line[256];
  size_t available = SIZE_MAX;
  while (std::fgets(line, sizeof line, file)) {
    unsigned long long kibibytes = 0;
    if (std::sscanf(line, "MemAvailable: %llu kB", &kibibytes) == 1) available = kibibytes << 10;
  }
  std::fclose(file);
  return available;
}

// Fails before the kernel would do worse than fail: a file over RLIMIT_FSIZE means SIGXFSZ, memory beyond what
// there is the out-of-memory killer.
Status check_limits(size_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur) {
    return Status(MK_ERROR_OUT_OF_MEMORY,
                  format("%.1f MiB of shared host memory exceed the limit of %.1f MiB a file "
                         "(RLIMIT_FSIZE); raise ulimit -f",
                         mebibytes(bytes), mebibytes(limit.rlim_cur)));
  }
  if (const size_t available = available_memory(); bytes > available) {
    return Status(MK_ERROR_OUT_OF_MEMORY,
                  format("%.1f MiB of shared host memory were asked for, and %.1f MiB are "
                         "available (MemAvailable)",
                         mebibytes(bytes), mebibytes(available)));
  }
  return {};
}

Status populate(int fd, size_t bytes, AbortToken& abort, Deadline deadline) {
  size_t done = 0;
  while (done < bytes) {
    if (abort.raised()) return abort.reason();
    if (deadline.passed()) {
      return Status(MK_ERROR_TIMEOUT,
                    format("the deadline passed with %.1f of %.1f MiB of host memory populated",
                           mebibytes(done), mebibytes(bytes)));
    }
    const size_t step = std::min(kPopulateStep, bytes - done);
    if (fallocate(fd, 0, static_cast<off_t>(done), static_cast<off_t>(step)) == 0) {
      done += step;
    } else if (errno != EINTR) {
      return out_of_memory_or_system("fallocate", bytes, errno);
    }
  }
  return {};
}

class HostRange final : public MemoryRange {
 public:
  HostRange(std::byte* base, size_t reserved) : base_(base), reserved_(reserved) {}
  ~HostRange() override { munmap(base_, reserved_); }

  std::byte* base() const override { return base_; }
  size_t reserved_bytes() const override { return reserved_; }

  Result<FileDescriptor> append(size_t offset, size_t bytes, AbortToken& abort, Deadline deadline) override {
    MK_RETURN_IF_ERROR(check_room(offset, bytes));
    MK_RETURN_IF_ERROR(check_limits(bytes));
    FileDescriptor memory(memfd_create("mkernel", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!memory.valid()) return out_of_memory_or_system("memfd_create", bytes, errno);
    if (ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0) {
      return out_of_memory_or_system("ftruncate", bytes, errno);
    }
    MK_RETURN_IF_ERROR(populate(memory.get(), bytes, abort, deadline));
    // A file that cannot shrink cannot raise SIGBUS in a neighbour.
    if (fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      return out_of_memory_or_system("sealing a memfd", bytes, errno);
    }
    MK_RETURN_IF_ERROR(map(offset, bytes, memory));
    return memory;
  }

  Status append_shared(size_t offset, size_t bytes, const FileDescriptor& memory) override {
    MK_RETURN_IF_ERROR(check_room(offset, bytes));
    struct stat file {};
    const int seals = fcntl(memory.get(), F_GET_SEALS);
    if (fstat(memory.get(), &file) != 0 || static_cast<size_t>(file.st_size) != bytes || seals < 0 ||
        !(seals & F_SEAL_SHRINK)) {
      return Status(MK_ERROR_INTERNAL,
                    format("expected a sealed memfd of %zu bytes, saw a file of %lld bytes with seals "
                           "%#x",
                           bytes, static_cast<long long>(file.st_size), static_cast<unsigned>(seals)));
    }
    return map(offset, bytes, memory);
  }

  void truncate(size_t offset) override {
    if (offset >= end_) return;
    // Replaces the pages in one step: at no moment could another mapping of this process slip into the range.
    // Should the kernel refuse, the pages stay until the range goes.
    mmap(base_ + offset, end_ - offset, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
         0);
    end_ = offset;
  }

 private:
  Status check_room(size_t offset, size_t bytes) const {
    if (bytes <= reserved_ - offset) return {};
    return Status(
        MK_ERROR_OUT_OF_MEMORY,
        format("%.1f MiB of addresses are reserved for a rank's symmetric memory, %.1f MiB of them are used, "
               "and %.1f MiB more were asked for; raise the limit on address space (ulimit -v) if there is one",
               mebibytes(reserved_), mebibytes(offset), mebibytes(bytes)));
  }

  Status map(size_t offset, size_t bytes, const FileDescriptor& memory) {
    void* mapped = mmap(base_ + offset, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory.get(), 0);
    if (mapped == MAP_FAILED) return out_of_memory_or_system("mmap", bytes, errno);
    end_ = offset + bytes;
    return {};
  }

  std::byte* const base_;
  const size_t reserved_;
  size_t end_ = 0;
};

class HostBackend final : public MemoryBackend {
 public:
  explicit HostBackend(int num_ranges) : num_ranges_(static_cast<size_t>(num_ranges)) {}

  size_t granularity() const override { return kGranularity; }
  Bytes description() const override { return {}; }
  Result<std::shared_ptr<MemoryRange>> reserve_own() override { return reserve(); }
  Status meet(int, std::span<const std::byte>, bool) override { return {}; }
  Result<std::shared_ptr<MemoryRange>> reserve_peer(int, std::span<const std::byte>) override {
    return reserve();
  }

 private:
  Result<std::shared_ptr<MemoryRange>> reserve() const {
    size_t bytes = kReservation;
    rlimit limit{};
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
      // Leaves three quarters of the address space to the application.
      const size_t share = static_cast<size_t>(limit.rlim_cur) / (4 * num_ranges_);
      bytes = std::min(bytes, std::max(kSmallestHostReservation, share & ~(kGranularity - 1)));
    }
    while (true) {
      void* base = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (base != MAP_FAILED)
        return std::shared_ptr<MemoryRange>(new HostRange(static_cast<std::byte*>(base), bytes));
      if (bytes / 2 < kSmallestHostReservation) {
        return Status(
            MK_ERROR_OUT_OF_MEMORY,
            format("not even %.1f MiB of addresses could be reserved for symmetric memory: %s; raise the "
                   "limit on address space (ulimit -v)",
                   mebibytes(bytes), std::strerror(errno)));
      }
      bytes = (bytes / 2) & ~(kGranularity - 1);
    }
  }

  const size_t num_ranges_;
};

}  // namespace

Result<std::unique_ptr<SymmetricMemory>> make_host_symmetric_memory(const Topology& topology,
                                                                    Exchange& exchange, AbortToken& abort,
                                                                    Deadline deadline) {
  return make_symmetric_memory(topology, exchange, abort,
                               std::make_unique<HostBackend>(topology.local_nranks()), deadline);
}

}  // namespace mk
