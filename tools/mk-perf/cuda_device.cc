// SPDX-License-Identifier: MIT
// Device memory, a stream and its clock.
#include <cuda_runtime_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cuda_matrices.h"
#include "device.h"
#include "errors.h"

namespace perf {
namespace {

void select(int cuda_device) { require_cuda(cudaSetDevice(cuda_device), "cudaSetDevice"); }

void* allocate(size_t bytes) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, bytes ? bytes : 1) == cudaSuccess) return memory;
  cudaGetLastError();  // the caller reports it
  return nullptr;
}

void release(void* memory) { cudaFree(memory); }

void upload(void* device_memory, const void* host_memory, size_t bytes) {
  require_cuda(cudaMemcpy(device_memory, host_memory, bytes, cudaMemcpyHostToDevice), "copying to the device");
}

void download(void* host_memory, const void* device_memory, size_t bytes) {
  require_cuda(cudaMemcpy(host_memory, device_memory, bytes, cudaMemcpyDeviceToHost),
               "copying from the device");
}

// One stream and a pair of events a process, made at first use and left to the end of the process.
struct Clock {
  cudaStream_t stream = nullptr;
  cudaEvent_t start = nullptr;
  cudaEvent_t stop = nullptr;

  Clock() {
    require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    require_cuda(cudaEventCreate(&start), "cudaEventCreate");
    require_cuda(cudaEventCreate(&stop), "cudaEventCreate");
  }
};

Clock& clock() {
  static Clock* const instance = new Clock;
  return *instance;
}

double time_us(mk_comm_t comm, const std::function<void()>& launches, const std::function<void()>& meanwhile) {
  const Clock& times = clock();
  require_cuda(cudaEventRecord(times.start, times.stream), "cudaEventRecord");
  launches();
  require_cuda(cudaEventRecord(times.stop, times.stream), "cudaEventRecord");
  meanwhile();
  require(mk_comm_synchronize(comm, times.stream), "mk_comm_synchronize", comm);
  float milliseconds = 0;
  require_cuda(cudaEventElapsedTime(&milliseconds, times.start, times.stop), "cudaEventElapsedTime");
  return milliseconds * 1000.0;
}

std::string pci_bus_id() {
  int device = 0;
  char name[32] = {};
  require_cuda(cudaGetDevice(&device), "cudaGetDevice");
  require_cuda(cudaDeviceGetPCIBusId(name, sizeof name, device), "cudaDeviceGetPCIBusId");
  return name;
}

}  // namespace

const DeviceOperations* cuda_device() {
  static constexpr DeviceOperations kOperations = {
      MK_DEVICE_CUDA, "cuda",     select,        allocate,
      release,        upload,     download,      [] { return clock().stream; },
      time_us,        pci_bus_id, &kCudaMatrices};
  return &kOperations;
}

int num_gpus() {
  constexpr int kMost = 255;  // that an exit status can say
  const pid_t child = fork();
  if (child < 0) throw RunError(std::string("fork: ") + std::strerror(errno));
  if (child == 0) {
    int count = 0;
    std::_Exit(cudaGetDeviceCount(&count) == cudaSuccess ? std::min(count, kMost) : 0);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) throw RunError(std::string("waitpid: ") + std::strerror(errno));
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

}  // namespace perf
