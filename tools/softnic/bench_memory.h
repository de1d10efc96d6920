// SPDX-License-Identifier: MIT
// Memory for softnic_bench: the host's, or a GPU's, through a libcuda that is found at run time.
#pragma once

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace softnic_bench {

class Memory {
 public:
  // gpu < 0: host memory. Otherwise of that GPU, modulo the GPUs there are.
  Memory(uint64_t bytes, int gpu) : bytes_(bytes) {
    if (gpu < 0) {
      address_ =
          mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
      if (address_ == MAP_FAILED) fail("no memory");
    } else {
      allocate_on(gpu);
    }
  }
  ~Memory() {
    if (free_ == nullptr) {
      munmap(address_, bytes_);
    } else {
      free_(reinterpret_cast<uint64_t>(address_));
    }
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(address_); }
  uint64_t bytes() const { return bytes_; }

 private:
  [[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "softnic_bench: %s\n", what);
    std::exit(1);
  }

  template <class F>
  static F symbol(void* library, const char* name) {
    void* const found = dlsym(library, name);
    if (found == nullptr) fail(name);
    return reinterpret_cast<F>(found);
  }

  void allocate_on(int gpu) {
    void* const cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (cuda == nullptr) fail("no libcuda.so.1");
    const auto init = symbol<int (*)(unsigned)>(cuda, "cuInit");
    const auto count = symbol<int (*)(int*)>(cuda, "cuDeviceGetCount");
    const auto retain = symbol<int (*)(void**, int)>(cuda, "cuDevicePrimaryCtxRetain");
    const auto select = symbol<int (*)(void*)>(cuda, "cuCtxSetCurrent");
    const auto allocate = symbol<int (*)(uint64_t*, size_t)>(cuda, "cuMemAlloc_v2");
    int gpus = 0;
    void* context = nullptr;
    uint64_t address = 0;
    if (init(0) != 0 || count(&gpus) != 0 || gpus == 0) fail("no GPU");
    if (retain(&context, gpu % gpus) != 0 || select(context) != 0 || allocate(&address, bytes_) != 0) {
      fail("no memory of that GPU");
    }
    address_ = reinterpret_cast<void*>(address);
    free_ = symbol<int (*)(uint64_t)>(cuda, "cuMemFree_v2");
  }

  void* address_ = nullptr;
  uint64_t bytes_;
  int (*free_)(uint64_t) = nullptr;
};

}  // namespace softnic_bench
