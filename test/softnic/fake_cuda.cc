// SPDX-License-Identifier: MIT
#include "fake_cuda.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr int kSuccess = 0, kInvalid = 1, kNotReady = 600;

struct Allocation {
  uint64_t base = 0;
  size_t bytes = 0;
  int fd = -1;
  std::byte* shadow = nullptr;
  int device = 0;
  bool by_handle = false;
  std::set<int> reachable_from;
};

struct Copy {
  uint64_t target, source;
  size_t bytes;
};

struct Stream {
  int device;
  std::vector<Copy> copies;
};

struct Event {
  Stream* stream = nullptr;
  size_t behind = 0;
  int questions = 0;
};

struct IpcHandle {
  int process, fd;
  size_t bytes;
  int device;
  char rest[40];
};
static_assert(sizeof(IpcHandle) == 64);

struct Access {
  int type, id, flags;
};

std::mutex mutex;
std::vector<std::unique_ptr<Allocation>> allocations;
int violations = 0;
thread_local int current_device = -1;

Allocation* find(uint64_t address) {
  for (const auto& allocation : allocations) {
    if (address >= allocation->base && address < allocation->base + allocation->bytes) return allocation.get();
  }
  return nullptr;
}

uint64_t reserve(size_t bytes) {
  return reinterpret_cast<uint64_t>(mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}

Allocation& add(uint64_t base, size_t bytes, int fd, int device, bool by_handle) {
  auto allocation = std::make_unique<Allocation>();
  allocation->base = base;
  allocation->bytes = bytes;
  allocation->fd = fd;
  allocation->shadow = static_cast<std::byte*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  allocation->device = device;
  allocation->by_handle = by_handle;
  allocations.push_back(std::move(allocation));
  return *allocations.back();
}

void remove(uint64_t base) {
  Allocation* const allocation = find(base);
  if (allocation == nullptr) return;
  munmap(allocation->shadow, allocation->bytes);
  close(allocation->fd);
  std::erase_if(allocations, [&](const auto& entry) { return entry.get() == allocation; });
}

void* cpu_address(uint64_t address, const Stream& stream) {
  const Allocation* const allocation = find(address);
  if (allocation == nullptr) return reinterpret_cast<void*>(address);
  const bool own = !allocation->by_handle || allocation->reachable_from.count(stream.device) != 0;
  violations += own ? 0 : 1;
  return allocation->shadow + (address - allocation->base);
}

void run(Stream& stream, size_t count) {
  for (size_t index = 0; index < count && index < stream.copies.size(); ++index) {
    Copy& copy = stream.copies[index];
    if (copy.bytes > 0)
      std::memcpy(cpu_address(copy.target, stream), cpu_address(copy.source, stream), copy.bytes);
    copy.bytes = 0;
  }
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))

FAKE std::byte* fake_cuda_allocate(int device, size_t bytes, int by_handle) {
  const std::lock_guard lock(mutex);
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return nullptr;
  const uint64_t base = reserve(bytes);
  add(base, bytes, fd, device, by_handle != 0).reachable_from.insert(device);
  return reinterpret_cast<std::byte*>(base);
}

FAKE void fake_cuda_free(std::byte* address) {
  const std::lock_guard lock(mutex);
  const uint64_t base = reinterpret_cast<uint64_t>(address);
  const size_t bytes = find(base)->bytes;
  remove(base);
  munmap(address, bytes);
}

FAKE std::byte* fake_cuda_shadow(const std::byte* address) {
  const std::lock_guard lock(mutex);
  const Allocation* const allocation = find(reinterpret_cast<uint64_t>(address));
  return allocation->shadow + (reinterpret_cast<uint64_t>(address) - allocation->base);
}

FAKE int fake_cuda_mappings() {
  const std::lock_guard lock(mutex);
  return static_cast<int>(allocations.size());
}

FAKE int fake_cuda_violations() {
  const std::lock_guard lock(mutex);
  return violations;
}

FAKE int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  const std::lock_guard lock(mutex);
  const Allocation* const allocation = find(address);
  if (allocation == nullptr) return kInvalid;
  if (attribute == 18) {
    *static_cast<size_t*>(value) = allocation->bytes;
    return kSuccess;
  }
  if (attribute == 19) {
    *static_cast<uint64_t*>(value) = allocation->base;
    return kSuccess;
  }
  if (attribute != 2 && attribute != 9) return kInvalid;
  *static_cast<int*>(value) = attribute == 2 ? 2 : allocation->device;
  return kSuccess;
}

FAKE int cuDeviceGetCount(int* count) {
  *count = 2;
  return kSuccess;
}

FAKE int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(device + 1));
  return kSuccess;
}

FAKE int cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }

FAKE int cuCtxSetCurrent(void* context) {
  current_device = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  return kSuccess;
}

FAKE int cuCtxEnablePeerAccess(void*, unsigned) { return kSuccess; }

FAKE int cuStreamCreate(void** stream, unsigned) {
  if (current_device < 0) return kInvalid;
  *stream = new Stream{current_device, {}};
  return kSuccess;
}

FAKE int cuStreamDestroy_v2(void* stream) {
  delete static_cast<Stream*>(stream);
  return kSuccess;
}

FAKE int cuStreamSynchronize(void* stream) {
  const std::lock_guard lock(mutex);
  run(*static_cast<Stream*>(stream), SIZE_MAX);
  return kSuccess;
}

FAKE int cuMemcpyAsync(uint64_t target, uint64_t source, size_t bytes, void* stream) {
  const std::lock_guard lock(mutex);
  if (current_device != static_cast<Stream*>(stream)->device) return kInvalid;
  static_cast<Stream*>(stream)->copies.push_back({target, source, bytes});
  return kSuccess;
}

FAKE int cuEventCreate(void** event, unsigned) {
  *event = new Event;
  return kSuccess;
}

FAKE int cuEventDestroy_v2(void* event) {
  delete static_cast<Event*>(event);
  return kSuccess;
}

FAKE int cuEventRecord(void* event, void* stream) {
  const std::lock_guard lock(mutex);
  Stream* const of = static_cast<Stream*>(stream);
  *static_cast<Event*>(event) = {of, of->copies.size(), 0};
  return kSuccess;
}

FAKE int cuEventQuery(void* handle) {
  const std::lock_guard lock(mutex);
  Event& event = *static_cast<Event*>(handle);
  if (++event.questions < 2) return kNotReady;
  run(*event.stream, event.behind);
  return kSuccess;
}

FAKE int cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t address) {
  const std::lock_guard lock(mutex);
  const Allocation* const allocation = find(address);
  if (allocation == nullptr) return kInvalid;
  *base = allocation->base;
  *bytes = allocation->bytes;
  return kSuccess;
}

// A handle is a descriptor of the memory and a one above it.
FAKE int cuMemRetainAllocationHandle(uint64_t* handle, void* address) {
  const std::lock_guard lock(mutex);
  const Allocation* const allocation = find(reinterpret_cast<uint64_t>(address));
  if (allocation == nullptr || !allocation->by_handle) return kInvalid;
  *handle = static_cast<uint64_t>(fcntl(allocation->fd, F_DUPFD_CLOEXEC, 0)) | 1ull << 32;
  return kSuccess;
}

FAKE int cuMemExportToShareableHandle(void* fd, uint64_t handle, int type, unsigned long long) {
  if (type != 1) return kInvalid;
  *static_cast<int*>(fd) = fcntl(static_cast<int>(handle), F_DUPFD_CLOEXEC, 0);
  return kSuccess;
}

FAKE int cuMemImportFromShareableHandle(uint64_t* handle, void* fd, int) {
  const int taken = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(fd)), F_DUPFD_CLOEXEC, 0);
  if (taken < 0) return kInvalid;
  *handle = static_cast<uint64_t>(taken) | 1ull << 32;
  return kSuccess;
}

FAKE int cuMemRelease(uint64_t handle) { return close(static_cast<int>(handle)) == 0 ? kSuccess : kInvalid; }

FAKE int cuMemAddressReserve(uint64_t* address, size_t bytes, size_t, uint64_t, unsigned long long) {
  *address = reserve(bytes);
  return kSuccess;
}

FAKE int cuMemAddressFree(uint64_t address, size_t bytes) {
  return munmap(reinterpret_cast<void*>(address), bytes) == 0 ? kSuccess : kInvalid;
}

FAKE int cuMemMap(uint64_t address, size_t bytes, size_t, uint64_t handle, unsigned long long) {
  const std::lock_guard lock(mutex);
  struct stat status {};
  if (fstat(static_cast<int>(handle), &status) != 0 || static_cast<size_t>(status.st_size) != bytes)
    return kInvalid;
  add(address, bytes, fcntl(static_cast<int>(handle), F_DUPFD_CLOEXEC, 0), 0, true);
  return kSuccess;
}

FAKE int cuMemUnmap(uint64_t address, size_t) {
  const std::lock_guard lock(mutex);
  remove(address);
  return kSuccess;
}

FAKE int cuMemSetAccess(uint64_t address, size_t, const Access* access, size_t count) {
  const std::lock_guard lock(mutex);
  Allocation* const allocation = find(address);
  if (allocation == nullptr || count != 1 || access->flags != 3) return kInvalid;
  allocation->reachable_from.insert(access->id);
  return kSuccess;
}

FAKE int cuIpcGetMemHandle(IpcHandle* handle, uint64_t address) {
  const std::lock_guard lock(mutex);
  const Allocation* const allocation = find(address);
  if (allocation == nullptr || allocation->by_handle) return kInvalid;
  *handle = {getpid(), allocation->fd, allocation->bytes, allocation->device, {}};
  return kSuccess;
}

FAKE int cuIpcOpenMemHandle_v2(uint64_t* address, IpcHandle handle, unsigned) {
  if (current_device < 0) return kInvalid;
  const std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return kInvalid;
  const std::lock_guard lock(mutex);
  *address = reserve(handle.bytes);
  add(*address, handle.bytes, fd, handle.device, false);
  return kSuccess;
}

FAKE int cuIpcCloseMemHandle(uint64_t address) {
  fake_cuda_free(reinterpret_cast<std::byte*>(address));
  return kSuccess;
}
