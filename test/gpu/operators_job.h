// SPDX-License-Identifier: MIT
// Ranks as threads, each on a GPU (several on one where there are too few), for tests and measurements of the
// operators through the C interface.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "mkernel.h"

namespace operators {

// Must be set before CUDA starts. A kernel that waits for a peer may share its GPU with that peer: a module
// that is loaded late, or a queue shared by two streams, would wait for it in turn.
inline void set_environment() {
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
}

inline void require_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("FAILED: %s: %s\n", what, cudaGetErrorString(error));
  std::fflush(stdout);
  std::_Exit(1);
}

inline void require(mk_status_t status, const char* what, mk_comm_t comm) {
  if (status == MK_SUCCESS) return;
  std::printf("FAILED: %s: %s: %s\n", what, mk_status_string(status), mk_get_last_error(comm));
  std::fflush(stdout);
  std::_Exit(1);
}

struct Rank {
  int rank;
  int nranks;
  int device;
  mk_comm_t comm;
  mk_comm_t alone;  // a communicator of this rank only: the plain product
  cudaStream_t stream;
  std::barrier<>& meeting;

  void meet() { meeting.arrive_and_wait(); }
  void synchronize() const { require(mk_comm_synchronize(comm, stream), "mk_comm_synchronize", comm); }
};

// Runs `body` on `nranks` threads. With fewer GPUs than ranks, a GPU's SMs are dealt out. `adjust` changes the
// communicators' configuration.
inline void run_ranks(int nranks, const std::function<void(Rank&)>& body,
                      const std::function<void(mk_comm_config_t&)>& adjust = {}) {
  int num_devices = 0;
  require_cuda(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount");
  const int ranks_per_device = (nranks + num_devices - 1) / num_devices;
  if (ranks_per_device > 1) setenv("MK_SHARE_GPU", "1", 1);
  mk_unique_id_t id;
  require(mk_get_unique_id(&id), "mk_get_unique_id", nullptr);
  std::barrier<> meeting(nranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < nranks; ++r) {
    threads.emplace_back([&, r] {
      Rank rank{r, nranks, r % num_devices, nullptr, nullptr, nullptr, meeting};
      require_cuda(cudaSetDevice(rank.device), "cudaSetDevice");
      int sms = 0;
      require_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, rank.device), "attribute");
      require_cuda(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking), "cudaStreamCreate");
      mk_comm_config_t config = MK_COMM_CONFIG_INIT;
      config.device = MK_DEVICE_CUDA;
      config.cuda_device = rank.device;
      config.wait_timeout_ms = 10000;
      if (ranks_per_device > 1) config.max_ctas = sms / ranks_per_device;
      if (adjust) adjust(config);
      require(mk_comm_init(&rank.comm, &id, nranks, r, &config), "mk_comm_init", rank.comm);
      mk_unique_id_t own_id;
      require(mk_get_unique_id(&own_id), "mk_get_unique_id", nullptr);
      require(mk_comm_init(&rank.alone, &own_id, 1, 0, &config), "mk_comm_init", rank.alone);
      body(rank);
      rank.meet();
      require(mk_comm_finalize(rank.alone), "mk_comm_finalize", rank.alone);
      require(mk_comm_destroy(rank.alone), "mk_comm_destroy", nullptr);
      if (rank.comm != nullptr) {  // null: `body` has destroyed it
        require(mk_comm_finalize(rank.comm), "mk_comm_finalize", rank.comm);
        require(mk_comm_destroy(rank.comm), "mk_comm_destroy", nullptr);
      }
      cudaStreamDestroy(rank.stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Device memory for the life of the object.
struct Buffer {
  void* data = nullptr;
  size_t bytes;
  std::optional<cudaStream_t> stream;
  explicit Buffer(size_t size) : bytes(size < 256 ? 256 : size) {
    require_cuda(cudaMalloc(&data, bytes), "cudaMalloc");
  }
  // For ranks that may share a GPU, while others have kernels there that wait for this one: cudaFree would wait
  // for those.
  Buffer(size_t size, cudaStream_t of) : bytes(size < 256 ? 256 : size), stream(of) {
    require_cuda(cudaMallocAsync(&data, bytes, of), "cudaMallocAsync");
  }
  ~Buffer() { stream ? cudaFreeAsync(data, *stream) : cudaFree(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
};

}  // namespace operators
