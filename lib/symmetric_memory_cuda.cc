// SPDX-License-Identifier: MIT
// Symmetric memory on CUDA devices, by the driver's virtual memory management: addresses are reserved once, and
// each growth maps new physical memory behind the last. Ranks of other processes import it through a
// descriptor; ranks of this process use the owner's addresses, to which the owner gives their devices access.
#include <fcntl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "cuda_driver_table.h"
#include "symmetric_backend.h"

namespace mk {
namespace {

using cuda::CurrentContext;
using cuda::Driver;

constexpr size_t kSmallestDeviceReservation = size_t{1} << 30;
// The driver has no wait with a deadline: its stream is looked at this often.
constexpr std::chrono::microseconds kStreamLook{200};

// What a rank tells the others of its device.
struct DeviceDescription {
  CUuuid uuid;
  uint64_t total_bytes;
  char words[168];  // for sentences
};
static_assert(sizeof(DeviceDescription) == 192 &&
              sizeof(DeviceDescription) <= MemoryBackend::kMaxDescriptionBytes);

// The device's primary context, and a stream of our own in it.
class DeviceContext {
 public:
  static Result<std::shared_ptr<DeviceContext>> open(int ordinal) {
    Result<const Driver*> loaded = cuda::load();
    if (!loaded.ok()) return loaded.status();
    const Driver& driver = *loaded.value();
    CUdevice device = 0;
    MK_RETURN_IF_ERROR(
        cuda::error(driver, driver.cuDeviceGet(&device, ordinal), format("CUDA device %d", ordinal)));
    std::shared_ptr<DeviceContext> opened(new DeviceContext(driver, device));
    CUcontext context = nullptr;
    MK_RETURN_IF_ERROR(
        cuda::error(driver, driver.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain"));
    opened->context_ = context;
    const CurrentContext current(driver, context);
    MK_RETURN_IF_ERROR(current.status());
    MK_RETURN_IF_ERROR(
        cuda::error(driver, driver.cuStreamCreate(&opened->stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate"));
    return opened;
  }

  ~DeviceContext() {
    if (!context_) return;
    if (stream_) {
      const CurrentContext current(driver_, context_);
      driver_.cuStreamDestroy(stream_);
    }
    driver_.cuDevicePrimaryCtxRelease(device_);
  }

  const Driver& driver() const { return driver_; }
  CUdevice device() const { return device_; }
  CUcontext context() const { return context_; }
  CUstream stream() const { return stream_; }

  bool supports(CUdevice_attribute attribute) const {
    int value = 0;
    return driver_.cuDeviceGetAttribute(&value, attribute, device_) == CUDA_SUCCESS && value != 0;
  }

  CUmemAllocationProp allocation() const {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_};
    properties.allocFlags.gpuDirectRDMACapable =
        supports(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) ? 1 : 0;
    return properties;
  }

 private:
  DeviceContext(const Driver& driver, CUdevice device) : driver_(driver), device_(device) {}

  const Driver& driver_;
  const CUdevice device_;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
};

// A handle of physical memory; mappings outlive it.
class PhysicalMemory {
 public:
  explicit PhysicalMemory(const Driver& driver) : driver_(driver) {}
  ~PhysicalMemory() {
    if (held_) driver_.cuMemRelease(handle_);
  }
  PhysicalMemory(const PhysicalMemory&) = delete;
  PhysicalMemory& operator=(const PhysicalMemory&) = delete;

  Status create(size_t bytes, const CUmemAllocationProp& properties, const std::string& device) {
    const CUresult result = driver_.cuMemCreate(&handle_, bytes, &properties, 0);
    held_ = result == CUDA_SUCCESS;
    return cuda::error(driver_, result, format("%.0f MiB of memory on %s", mebibytes(bytes), device.c_str()));
  }
  Status import(const FileDescriptor& memory) {
    void* descriptor = reinterpret_cast<void*>(static_cast<uintptr_t>(memory.get()));
    const CUresult result =
        driver_.cuMemImportFromShareableHandle(&handle_, descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    held_ = result == CUDA_SUCCESS;
    return cuda::error(driver_, result, "importing device memory of another process");
  }
  CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  const Driver& driver_;
  CUmemGenericAllocationHandle handle_ = 0;
  bool held_ = false;
};

class CudaRange final : public MemoryRange {
 public:
  // Reserves `bytes` of addresses, or fewer where the driver refuses.
  static Result<std::shared_ptr<CudaRange>> reserve(std::shared_ptr<DeviceContext> context, size_t bytes,
                                                    size_t granularity) {
    const Driver& driver = context->driver();
    const CurrentContext current(driver, context->context());
    MK_RETURN_IF_ERROR(current.status());
    while (true) {
      bytes = (bytes + granularity - 1) / granularity * granularity;
      CUdeviceptr base = 0;
      const CUresult result = driver.cuMemAddressReserve(&base, bytes, granularity, 0, 0);
      if (result == CUDA_SUCCESS) {
        return std::shared_ptr<CudaRange>(new CudaRange(std::move(context), base, bytes));
      }
      if (bytes / 2 < kSmallestDeviceReservation) {
        return cuda::error(driver, result, format("reserving %.0f MiB of device addresses", mebibytes(bytes)));
      }
      bytes /= 2;
    }
  }

  ~CudaRange() override {
    truncate(0);
    const CurrentContext current(driver_, context_->context());
    driver_.cuMemAddressFree(base_, reserved_);
  }

  std::byte* base() const override { return reinterpret_cast<std::byte*>(base_); }
  size_t reserved_bytes() const override { return reserved_; }

  // Another device of this process that is to reach the memory. Before the first growth.
  void admit(CUdevice device) {
    if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) devices_.push_back(device);
  }

  Result<FileDescriptor> append(size_t offset, size_t bytes, AbortToken& abort, Deadline deadline) override {
    const CurrentContext current(driver_, context_->context());
    MK_RETURN_IF_ERROR(current.status());
    PhysicalMemory memory(driver_);
    MK_RETURN_IF_ERROR(check_room(offset, bytes));
    MK_RETURN_IF_ERROR(memory.create(bytes, context_->allocation(), cuda::describe_device(context_->device())));
    int fd = -1;
    MK_RETURN_IF_ERROR(cuda::error(
        driver_,
        driver_.cuMemExportToShareableHandle(&fd, memory.handle(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "exporting device memory"));
    FileDescriptor descriptor(fd);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    MK_RETURN_IF_ERROR(map(offset, bytes, memory));
    MK_RETURN_IF_ERROR(clear(offset, bytes, abort, deadline));
    return descriptor;
  }

  Status append_shared(size_t offset, size_t bytes, const FileDescriptor& memory) override {
    const CurrentContext current(driver_, context_->context());
    MK_RETURN_IF_ERROR(current.status());
    PhysicalMemory imported(driver_);
    MK_RETURN_IF_ERROR(check_room(offset, bytes));
    MK_RETURN_IF_ERROR(imported.import(memory));
    return map(offset, bytes, imported);
  }

  void truncate(size_t offset) override {
    const CurrentContext current(driver_, context_->context());
    while (!pieces_.empty() && pieces_.back().offset >= offset) {
      driver_.cuMemUnmap(base_ + pieces_.back().offset, pieces_.back().bytes);
      pieces_.pop_back();
    }
  }

 private:
  struct Piece {
    size_t offset;
    size_t bytes;
  };

  CudaRange(std::shared_ptr<DeviceContext> context, CUdeviceptr base, size_t reserved)
      : context_(std::move(context)),
        driver_(context_->driver()),
        base_(base),
        reserved_(reserved),
        devices_{context_->device()} {}

  Status check_room(size_t offset, size_t bytes) const {
    if (bytes <= reserved_ - offset) return {};
    return Status(
        MK_ERROR_OUT_OF_MEMORY,
        format("%.0f MiB of device addresses are reserved for a rank's symmetric memory, %.0f MiB of them "
               "are used, and %.0f MiB more were asked for",
               mebibytes(reserved_), mebibytes(offset), mebibytes(bytes)));
  }

  Status map(size_t offset, size_t bytes, const PhysicalMemory& memory) {
    MK_RETURN_IF_ERROR(
        cuda::error(driver_, driver_.cuMemMap(base_ + offset, bytes, 0, memory.handle(), 0), "cuMemMap"));
    pieces_.push_back({offset, bytes});
    std::vector<CUmemAccessDesc> access;
    for (const CUdevice device : devices_) {
      access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    }
    return cuda::error(driver_, driver_.cuMemSetAccess(base_ + offset, bytes, access.data(), access.size()),
                       "cuMemSetAccess");
  }

  Status clear(size_t offset, size_t bytes, AbortToken& abort, Deadline deadline) {
    MK_RETURN_IF_ERROR(cuda::error(
        driver_, driver_.cuMemsetD8Async(base_ + offset, 0, bytes, context_->stream()), "cuMemsetD8Async"));
    while (true) {
      const CUresult state = driver_.cuStreamQuery(context_->stream());
      if (state != CUDA_ERROR_NOT_READY) return cuda::error(driver_, state, "clearing device memory");
      if (abort.raised()) return abort.reason();
      if (deadline.passed()) {
        return Status(
            MK_ERROR_TIMEOUT,
            format("the deadline passed while %s cleared %.0f MiB; a kernel that fills the device may be "
                   "running",
                   cuda::describe_device(context_->device()).c_str(), mebibytes(bytes)));
      }
      std::this_thread::sleep_for(kStreamLook);
    }
  }

  const std::shared_ptr<DeviceContext> context_;
  const Driver& driver_;
  const CUdeviceptr base_;
  const size_t reserved_;
  std::vector<CUdevice> devices_;
  std::vector<Piece> pieces_;
};

class CudaBackend final : public MemoryBackend {
 public:
  // A device that cannot be used is reported by reserve_own, so that the other ranks hear of it.
  CudaBackend(int rank, int ordinal) : rank_(rank) { status_ = open(ordinal); }

  size_t granularity() const override { return granularity_; }

  Bytes description() const override {
    const auto* bytes = reinterpret_cast<const std::byte*>(&own_);
    return Bytes(bytes, bytes + sizeof own_);
  }

  Result<std::shared_ptr<MemoryRange>> reserve_own() override {
    MK_RETURN_IF_ERROR(status_);
    Result<std::shared_ptr<CudaRange>> range = CudaRange::reserve(context_, own_.total_bytes, granularity_);
    if (!range.ok()) return range.status();
    range_ = range.value();
    return std::shared_ptr<MemoryRange>(range_);
  }

  Status meet(int peer_rank, std::span<const std::byte> description, bool here) override {
    Result<DeviceDescription> peer = parse(peer_rank, description);
    if (!peer.ok()) return peer.status();
    if (std::memcmp(&peer->uuid, &own_.uuid, sizeof(CUuuid)) == 0) return {};
    const Driver& driver = context_->driver();
    int count = 0;
    MK_RETURN_IF_ERROR(cuda::error(driver, driver.cuDeviceGetCount(&count), "cuDeviceGetCount"));
    for (int ordinal = 0; ordinal < count; ++ordinal) {
      CUdevice device = 0;
      CUuuid uuid{};
      if (driver.cuDeviceGet(&device, ordinal) != CUDA_SUCCESS ||
          driver.cuDeviceGetUuid(&uuid, device) != CUDA_SUCCESS ||
          std::memcmp(&uuid, &peer->uuid, sizeof uuid) != 0) {
        continue;
      }
      int reachable = 0;
      MK_RETURN_IF_ERROR(cuda::error(driver,
                                     driver.cuDeviceCanAccessPeer(&reachable, context_->device(), device),
                                     "cuDeviceCanAccessPeer"));
      if (!reachable) {
        return Status(
            MK_ERROR_UNSUPPORTED,
            format("rank %d on %s cannot access the memory of rank %d on %s: the devices have no peer access; "
                   "put the ranks on different nodes (node_of_rank)",
                   rank_, own_.words, peer_rank, peer->words));
      }
      if (here) range_->admit(device);
      return {};
    }
    // A device that this process does not see (CUDA_VISIBLE_DEVICES): mapping its memory will tell.
    return {};
  }

  Result<std::shared_ptr<MemoryRange>> reserve_peer(int peer_rank,
                                                    std::span<const std::byte> description) override {
    Result<DeviceDescription> peer = parse(peer_rank, description);
    if (!peer.ok()) return peer.status();
    Result<std::shared_ptr<CudaRange>> range = CudaRange::reserve(context_, peer->total_bytes, granularity_);
    if (!range.ok()) return range.status();
    return std::shared_ptr<MemoryRange>(range.take());
  }

 private:
  Status open(int ordinal) {
    Result<std::shared_ptr<DeviceContext>> context = DeviceContext::open(ordinal);
    if (!context.ok()) return context.status();
    context_ = context.take();
    const std::string words = cuda::describe_device(ordinal);
    if (!context_->supports(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) ||
        !context_->supports(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)) {
      return Status(MK_ERROR_UNSUPPORTED,
                    format("%s has no virtual memory management with file descriptors", words.c_str()));
    }
    const Driver& driver = context_->driver();
    words.copy(own_.words, sizeof own_.words - 1);
    MK_RETURN_IF_ERROR(
        cuda::error(driver, driver.cuDeviceGetUuid(&own_.uuid, context_->device()), "cuDeviceGetUuid"));
    size_t total = 0;
    MK_RETURN_IF_ERROR(
        cuda::error(driver, driver.cuDeviceTotalMem(&total, context_->device()), "cuDeviceTotalMem"));
    own_.total_bytes = total;
    const CUmemAllocationProp properties = context_->allocation();
    return cuda::error(
        driver,
        driver.cuMemGetAllocationGranularity(&granularity_, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity");
  }

  static Result<DeviceDescription> parse(int rank, std::span<const std::byte> description) {
    DeviceDescription device;
    if (description.size() != sizeof device) {
      return Status(MK_ERROR_INTERNAL, format("rank %d describes its device in %zu bytes, expected %zu", rank,
                                              description.size(), sizeof device));
    }
    std::memcpy(&device, description.data(), sizeof device);
    device.words[sizeof device.words - 1] = '\0';
    return device;
  }

  const int rank_;
  Status status_;
  std::shared_ptr<DeviceContext> context_;
  DeviceDescription own_{};
  size_t granularity_ = 1;
  std::shared_ptr<CudaRange> range_;
};

}  // namespace

Result<std::unique_ptr<SymmetricMemory>> make_cuda_symmetric_memory(const Topology& topology,
                                                                    Exchange& exchange, AbortToken& abort,
                                                                    int cuda_device, Deadline deadline) {
  return make_symmetric_memory(topology, exchange, abort,
                               std::make_unique<CudaBackend>(topology.rank, cuda_device), deadline);
}

}  // namespace mk
