// SPDX-License-Identifier: MIT
#include "cuda_driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <cctype>

#include "cuda_driver_table.h"

namespace mk::cuda {
namespace {

// The oldest toolkit that the library is built with.
constexpr int kOldestDriver = 12090;

Status unsupported(const std::string& sentence) { return Status(MK_ERROR_UNSUPPORTED, sentence); }

Status fill(Driver& driver) {
  // Never unloaded: threads of the driver may run until the process ends.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* reason = dlerror();
    return unsupported(format("the CUDA driver cannot be loaded: %s", reason ? reason : "libcuda.so.1"));
  }
  const auto get = reinterpret_cast<PFN_cuGetProcAddress_v12000>(dlsym(library, "cuGetProcAddress_v2"));
  if (!get) return unsupported("the CUDA driver is older than 12.0; libmkernel needs 12.9 or newer");
  const auto find = [&](const char* name, int version) {
    void* function = nullptr;
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    const CUresult result = get(name, &function, version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &found);
    return result == CUDA_SUCCESS && found == CU_GET_PROC_ADDRESS_SUCCESS ? function : nullptr;
  };
#define MK_CUDA_FIND(name, version)                                              \
  driver.name = reinterpret_cast<PFN_##name##_v##version>(find(#name, version)); \
  if (!driver.name) return unsupported("the CUDA driver lacks " #name "; libmkernel needs 12.9 or newer");
  MK_CUDA_FUNCTIONS(MK_CUDA_FIND)
#undef MK_CUDA_FIND

  int version = 0;
  if (driver.cuDriverGetVersion(&version) != CUDA_SUCCESS || version < kOldestDriver) {
    return unsupported(format("the CUDA driver is for CUDA %d.%d; libmkernel needs one for 12.9 or newer",
                              version / 1000, version % 1000 / 10));
  }
  const CUresult started = driver.cuInit(0);
  if (started != CUDA_SUCCESS)
    return unsupported(error(driver, started, "starting the CUDA driver").sentence());
  return {};
}

struct Loaded {
  Driver driver{};
  Status status = fill(driver);
};

}  // namespace

Result<const Driver*> load() {
  static const Loaded loaded;
  if (!loaded.status.ok()) return loaded.status;
  return &loaded.driver;
}

Result<int> device_count() {
  Result<const Driver*> driver = load();
  if (!driver.ok()) return driver.status();
  int count = 0;
  MK_RETURN_IF_ERROR(error(*driver.value(), driver.value()->cuDeviceGetCount(&count), "cuDeviceGetCount"));
  return count;
}

std::string describe_device(int device) {
  Result<const Driver*> driver = load();
  char name[128] = "";
  char bus_id[32] = "";
  if (!driver.ok() || driver.value()->cuDeviceGetName(name, sizeof name, device) != CUDA_SUCCESS ||
      driver.value()->cuDeviceGetPCIBusId(bus_id, sizeof bus_id, device) != CUDA_SUCCESS) {
    return format("CUDA device %d", device);
  }
  return format("CUDA device %d (%s, %s)", device, name, bus_id);
}

std::string pci_bus_id(int device) {
  Result<const Driver*> driver = load();
  char bus_id[32] = "";
  if (!driver.ok() || driver.value()->cuDeviceGetPCIBusId(bus_id, sizeof bus_id, device) != CUDA_SUCCESS)
    return "";
  std::string name = bus_id;
  // The driver writes capitals, sysfs does not.
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  return name;
}

Status error(const Driver& driver, CUresult result, const std::string& what) {
  if (result == CUDA_SUCCESS) return {};
  const char* name = nullptr;
  const char* words = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &words);
  return Status(result == CUDA_ERROR_OUT_OF_MEMORY ? MK_ERROR_OUT_OF_MEMORY : MK_ERROR_CUDA,
                format("%s: %s (%d): %s", what.c_str(), name ? name : "unknown error", static_cast<int>(result),
                       words ? words : "the driver has no words for it"));
}

}  // namespace mk::cuda
