// SPDX-License-Identifier: MIT
#include "cuda.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>

namespace softnic {

// Types and numbers are those of the driver's stable interface (cuda.h), which is not needed to build this.
namespace {

using Result = int;
using Pointer = uint64_t;
using Handle = uint64_t;

constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;
constexpr int kAttributeMemoryType = 2;
constexpr int kAttributeDevice = 9;
constexpr int kAttributeMappingSize = 18;
constexpr int kAttributeMappingBase = 19;
constexpr unsigned kMemoryTypeDevice = 2;
constexpr int kHandleTypeDescriptor = 1;
constexpr int kLocationDevice = 1;
constexpr int kAccessReadWrite = 3;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventWithoutTiming = 2;
constexpr unsigned kIpcEnablePeerAccess = 1;

}  // namespace

struct CudaIpcHandle {
  char reserved[64];
};

struct CudaAccessDescription {
  int location_type;
  int location_id;
  int flags;
};

struct CudaDriver {
  Result (*cuPointerGetAttribute)(void*, int, Pointer);
  Result (*cuDeviceGetCount)(int*);
  Result (*cuDevicePrimaryCtxRetain)(void**, int);
  Result (*cuDevicePrimaryCtxRelease_v2)(int);
  Result (*cuCtxSetCurrent)(void*);
  Result (*cuCtxEnablePeerAccess)(void*, unsigned);
  Result (*cuStreamCreate)(void**, unsigned);
  Result (*cuStreamDestroy_v2)(void*);
  Result (*cuStreamSynchronize)(void*);
  Result (*cuMemcpyAsync)(Pointer, Pointer, size_t, void*);
  Result (*cuEventCreate)(void**, unsigned);
  Result (*cuEventRecord)(void*, void*);
  Result (*cuEventQuery)(void*);
  Result (*cuEventDestroy_v2)(void*);
  Result (*cuMemGetAddressRange_v2)(Pointer*, size_t*, Pointer);
  Result (*cuMemRetainAllocationHandle)(Handle*, void*);
  Result (*cuMemExportToShareableHandle)(void*, Handle, int, unsigned long long);
  Result (*cuMemImportFromShareableHandle)(Handle*, void*, int);
  Result (*cuMemRelease)(Handle);
  Result (*cuMemAddressReserve)(Pointer*, size_t, size_t, Pointer, unsigned long long);
  Result (*cuMemAddressFree)(Pointer, size_t);
  Result (*cuMemMap)(Pointer, size_t, size_t, Handle, unsigned long long);
  Result (*cuMemUnmap)(Pointer, size_t);
  Result (*cuMemSetAccess)(Pointer, size_t, const CudaAccessDescription*, size_t);
  Result (*cuIpcGetMemHandle)(CudaIpcHandle*, Pointer);
  Result (*cuIpcOpenMemHandle_v2)(Pointer*, CudaIpcHandle, unsigned);
  Result (*cuIpcCloseMemHandle)(Pointer);
};

namespace {

template <class F>
bool resolve(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

#define SOFTNIC_RESOLVE(name) resolve(library, #name, driver->name)

const CudaDriver* load() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  auto driver = std::make_unique<CudaDriver>();
  const bool complete =
      SOFTNIC_RESOLVE(cuPointerGetAttribute) && SOFTNIC_RESOLVE(cuDeviceGetCount) &&
      SOFTNIC_RESOLVE(cuDevicePrimaryCtxRetain) && SOFTNIC_RESOLVE(cuDevicePrimaryCtxRelease_v2) &&
      SOFTNIC_RESOLVE(cuCtxSetCurrent) && SOFTNIC_RESOLVE(cuCtxEnablePeerAccess) &&
      SOFTNIC_RESOLVE(cuStreamCreate) && SOFTNIC_RESOLVE(cuStreamDestroy_v2) &&
      SOFTNIC_RESOLVE(cuStreamSynchronize) && SOFTNIC_RESOLVE(cuMemcpyAsync) &&
      SOFTNIC_RESOLVE(cuEventCreate) && SOFTNIC_RESOLVE(cuEventRecord) && SOFTNIC_RESOLVE(cuEventQuery) &&
      SOFTNIC_RESOLVE(cuEventDestroy_v2) && SOFTNIC_RESOLVE(cuMemGetAddressRange_v2) &&
      SOFTNIC_RESOLVE(cuMemRetainAllocationHandle) && SOFTNIC_RESOLVE(cuMemExportToShareableHandle) &&
      SOFTNIC_RESOLVE(cuMemImportFromShareableHandle) && SOFTNIC_RESOLVE(cuMemRelease) &&
      SOFTNIC_RESOLVE(cuMemAddressReserve) && SOFTNIC_RESOLVE(cuMemAddressFree) && SOFTNIC_RESOLVE(cuMemMap) &&
      SOFTNIC_RESOLVE(cuMemUnmap) && SOFTNIC_RESOLVE(cuMemSetAccess) && SOFTNIC_RESOLVE(cuIpcGetMemHandle) &&
      SOFTNIC_RESOLVE(cuIpcOpenMemHandle_v2) && SOFTNIC_RESOLVE(cuIpcCloseMemHandle);
  return complete ? driver.release() : nullptr;
}

#undef SOFTNIC_RESOLVE

// Null until the process has loaded the driver. Kept for the life of the process once it is there.
const CudaDriver* cuda() {
  static std::mutex mutex;
  static const CudaDriver* driver = nullptr;
  const std::lock_guard lock(mutex);
  if (driver == nullptr) driver = load();
  return driver;
}

// The requests that need the memory fail; the interface has no other place for the reason. Once is enough.
void complain(const char* what, Result result) {
  static std::atomic<bool> has_complained{false};
  if (!has_complained.exchange(true))
    std::fprintf(stderr, "softnic: %s (CUDA driver error %d)\n", what, result);
}

// Of drivers of 580 it has been seen that they free memory twice when two threads give up mappings of one
// allocation at the same time.
struct MappingsOfThisProcess {
  std::mutex mutex;  // for all that maps and unmaps
  std::condition_variable dropped;
  std::multiset<uint64_t> bases;                         // of own allocations, where their owner has them
  std::multiset<std::pair<uint64_t, uint64_t>> regions;  // registered: first address, end
};
MappingsOfThisProcess& mappings_of_this_process() {
  static auto* const mappings = new MappingsOfThisProcess;  // outlives whatever static objects hold
  return *mappings;
}

// Maps an allocation for all devices of this process; 0 when the driver refuses.
Pointer map_allocation(const CudaDriver& driver, Handle handle, uint64_t bytes) {
  Pointer address = 0;
  int devices = 0;
  if (driver.cuMemAddressReserve(&address, bytes, 0, 0, 0) != kSuccess) return 0;
  if (driver.cuMemMap(address, bytes, 0, handle, 0) != kSuccess) {
    driver.cuMemAddressFree(address, bytes);
    return 0;
  }
  driver.cuDeviceGetCount(&devices);
  bool reachable = false;
  for (int device = 0; device < devices; ++device) {
    // Not every device need reach every other one.
    const CudaAccessDescription access{kLocationDevice, device, kAccessReadWrite};
    reachable = driver.cuMemSetAccess(address, bytes, &access, 1) == kSuccess || reachable;
  }
  if (reachable) return address;
  complain("no GPU here reaches GPU memory of another process", 0);
  driver.cuMemUnmap(address, bytes);
  driver.cuMemAddressFree(address, bytes);
  return 0;
}

Pointer import_descriptor(const CudaDriver& driver, const CudaExport& exported, bool is_own, int descriptor) {
  Handle handle = 0;
  const Result result =
      is_own ? driver.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(exported.base))
             : driver.cuMemImportFromShareableHandle(
                   &handle, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)), kHandleTypeDescriptor);
  if (result != kSuccess) {
    complain("the driver does not hand over an allocation of GPU memory", result);
    return 0;
  }
  const Pointer address = map_allocation(driver, handle, exported.bytes);
  driver.cuMemRelease(handle);
  return address;
}

// What is mapped around an address: the range of it may be all that was reserved, of which this is a part, and
// the driver knows ranges in a context that reaches them only.
bool find_mapping(const CudaDriver& driver, Pointer address, Pointer& base, size_t& length) {
  return driver.cuPointerGetAttribute(&base, kAttributeMappingBase, address) == kSuccess &&
         driver.cuPointerGetAttribute(&length, kAttributeMappingSize, address) == kSuccess && length > 0 &&
         address >= base && address < base + length;
}

}  // namespace

bool cuda_is_loaded() { return cuda() != nullptr; }

int cuda_device_of(uint64_t address) {
  const CudaDriver* const driver = cuda();
  unsigned type = 0;
  int device = -1;
  if (driver == nullptr || driver->cuPointerGetAttribute(&type, kAttributeMemoryType, address) != kSuccess ||
      type != kMemoryTypeDevice ||
      driver->cuPointerGetAttribute(&device, kAttributeDevice, address) != kSuccess) {
    return -1;
  }
  return device;
}

CudaExports::CudaExports(uint64_t address, uint64_t bytes, bool share) {
  const std::lock_guard lock(mappings_of_this_process().mutex);
  const CudaDriver* const driver = cuda();
  const uint64_t end = address + bytes;
  while (driver != nullptr && address < end) {
    CudaExport exported;
    Pointer base = 0;
    size_t length = 0;
    const auto find_range = [&] {
      const Result result = driver->cuMemGetAddressRange_v2(&base, &length, address);
      if (result != kSuccess) complain("the driver does not know a range of GPU memory", result);
      return result == kSuccess && length > 0;
    };
    Handle handle = 0;
    if (driver->cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address)) == kSuccess) {
      exported.kind = CudaExport::Kind::descriptor;
      if (!find_mapping(*driver, address, base, length) && !find_range()) {
        driver->cuMemRelease(handle);
        return;
      }
      int fd = -1;
      if (share && driver->cuMemExportToShareableHandle(&fd, handle, kHandleTypeDescriptor, 0) == kSuccess) {
        exported.fd = fd;
      }
      driver->cuMemRelease(handle);
    } else {
      exported.kind = CudaExport::Kind::ipc;
      CudaIpcHandle ipc{};
      if (!find_range()) return;
      if (share && driver->cuIpcGetMemHandle(&ipc, base) != kSuccess) return;
      std::memcpy(exported.handle, &ipc, sizeof(ipc));
    }
    exported.base = base;
    exported.bytes = length;
    list_.push_back(exported);
    address = base + length;
  }
}

CudaExports::~CudaExports() {
  for (const CudaExport& exported : list_) {
    if (exported.fd >= 0) close(exported.fd);
  }
}

CudaImports::~CudaImports() {
  const CudaDriver* const driver = cuda();
  MappingsOfThisProcess& all = mappings_of_this_process();
  const std::lock_guard lock(all.mutex);
  for (const Mapping& mapping : mappings_) {
    if (mapping.is_own) all.bases.erase(all.bases.find(mapping.exported.base));
    if (mapping.exported.kind == CudaExport::Kind::ipc) {
      driver->cuIpcCloseMemHandle(mapping.address);
    } else {
      driver->cuMemUnmap(mapping.address, mapping.exported.bytes);
      driver->cuMemAddressFree(mapping.address, mapping.exported.bytes);
    }
  }
  all.dropped.notify_all();
}

void gpu_memory_registered(uint64_t address, uint64_t bytes) {
  MappingsOfThisProcess& all = mappings_of_this_process();
  const std::lock_guard lock(all.mutex);
  all.regions.emplace(address, address + bytes);
}

void gpu_memory_deregistered(uint64_t address, uint64_t bytes) {
  constexpr std::chrono::seconds kPatience{2};
  const uint64_t end = address + bytes;
  MappingsOfThisProcess& all = mappings_of_this_process();
  std::unique_lock lock(all.mutex);
  const auto found = all.regions.find({address, end});
  if (found != all.regions.end()) all.regions.erase(found);
  for (const auto& [first, last] : all.regions) {
    if (first < end && address < last) return;
  }
  all.dropped.wait_for(lock, kPatience, [&] {
    const auto first = all.bases.lower_bound(address);
    return first == all.bases.end() || *first >= end;
  });
}

bool CudaImports::add(const CudaExport& exported, bool is_own, int descriptor) {
  const CudaDriver* const driver = cuda();
  if (driver == nullptr || exported.bytes == 0) return false;
  MappingsOfThisProcess& all = mappings_of_this_process();
  const std::lock_guard lock(all.mutex);
  Pointer address = 0;
  if (exported.kind == CudaExport::Kind::descriptor) {
    if (!is_own && descriptor < 0) {
      complain("GPU memory of another process was not created for sharing by file descriptor", 0);
      return false;
    }
    address = import_descriptor(*driver, exported, is_own, descriptor);
  } else if (!is_own) {
    CudaIpcHandle handle;
    std::memcpy(&handle, exported.handle, sizeof(handle));
    const Result result = driver->cuIpcOpenMemHandle_v2(&address, handle, kIpcEnablePeerAccess);
    if (result != kSuccess) {
      complain("the driver does not open another process's GPU memory by IPC handle", result);
      address = 0;
    }
  }
  if (address == 0) return false;
  mappings_.push_back({exported, address, is_own});
  if (is_own) all.bases.insert(exported.base);
  return true;
}

std::pair<uint64_t, uint64_t> CudaImports::translate(uint64_t address) const {
  for (const Mapping& mapping : mappings_) {
    const uint64_t offset = address - mapping.exported.base;
    if (address >= mapping.exported.base && offset < mapping.exported.bytes) {
      return {mapping.address + offset, mapping.exported.bytes - offset};
    }
  }
  return {0, 0};
}

CudaCopier::~CudaCopier() {
  const CudaDriver* const driver = cuda();
  for (auto& [device, stream] : streams_) {
    if (stream.stream == nullptr || driver->cuCtxSetCurrent(stream.context) != kSuccess) continue;
    for (void* const event : stream.idle_events) driver->cuEventDestroy_v2(event);
    for (void* const event : stream.events) driver->cuEventDestroy_v2(event);
    driver->cuStreamDestroy_v2(stream.stream);
    driver->cuDevicePrimaryCtxRelease_v2(device);
  }
}

CudaCopier::Stream* CudaCopier::use(int device) {
  const CudaDriver* const driver = cuda();
  if (driver == nullptr) return nullptr;
  Stream& stream = streams_[device];
  if (stream.context == nullptr && driver->cuDevicePrimaryCtxRetain(&stream.context, device) != kSuccess) {
    stream.context = nullptr;
    return nullptr;
  }
  if (driver->cuCtxSetCurrent(stream.context) != kSuccess) return nullptr;
  if (stream.stream == nullptr && driver->cuStreamCreate(&stream.stream, kStreamNonBlocking) != kSuccess) {
    stream.stream = nullptr;
    return nullptr;
  }
  return &stream;
}

bool CudaCopier::start(int device, uint64_t target, uint64_t source, uint64_t bytes) {
  const Stream* const stream = use(device);
  if (stream == nullptr) return false;
  const Result result = cuda()->cuMemcpyAsync(target, source, bytes, stream->stream);
  if (result != kSuccess) complain("the driver refuses a copy", result);
  return result == kSuccess;
}

bool CudaCopier::copy(int device, uint64_t target, uint64_t source, uint64_t bytes) {
  return start(device, target, source, bytes) &&
         cuda()->cuStreamSynchronize(streams_[device].stream) == kSuccess;
}

void CudaCopier::befriend(int device, int other) {
  if (device == other || use(device) == nullptr || !streams_[device].friends.insert(other).second) return;
  const Stream* const peer = use(other);
  // A refusal is no error: the driver then takes the way through host memory.
  if (peer != nullptr && use(device) != nullptr) cuda()->cuCtxEnablePeerAccess(peer->context, 0);
}

bool CudaCopier::mark(int device) {
  Stream* const stream = use(device);
  if (stream == nullptr) return false;
  void* event = nullptr;
  if (!stream->idle_events.empty()) {
    event = stream->idle_events.back();
    stream->idle_events.pop_back();
  } else if (cuda()->cuEventCreate(&event, kEventWithoutTiming) != kSuccess) {
    return false;
  }
  if (cuda()->cuEventRecord(event, stream->stream) != kSuccess) {
    stream->idle_events.push_back(event);
    return false;
  }
  stream->events.push_back(event);
  return true;
}

CudaCopier::Progress CudaCopier::passed(int device, uint64_t mark) {
  Stream& stream = streams_[device];
  // Marks pass in order: only the oldest has to be asked for.
  while (stream.num_passed < mark) {
    const Result result = cuda()->cuEventQuery(stream.events.front());
    if (result == kNotReady) return Progress::running;
    stream.failed = stream.failed || result != kSuccess;
    stream.idle_events.push_back(stream.events.front());
    stream.events.pop_front();
    ++stream.num_passed;
  }
  return stream.failed ? Progress::failed : Progress::done;
}

bool CudaCopier::drain() {
  bool drained = true;
  for (const auto& [device, stream] : streams_) {
    if (stream.stream == nullptr) continue;
    // The calling thread may be another one than the NIC's.
    const bool is_done = cuda()->cuCtxSetCurrent(stream.context) == kSuccess &&
                         cuda()->cuStreamSynchronize(stream.stream) == kSuccess;
    drained = drained && is_done;
  }
  return drained;
}

}  // namespace softnic
