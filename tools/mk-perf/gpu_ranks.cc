// SPDX-License-Identifier: MIT
#include "gpu_ranks.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <vector>

#include "cuda_matrices.h"
#include "cuda_ranks.h"
#include "measure.h"

namespace perf {
namespace {

constexpr size_t kFlagsBytes = 4096;
constexpr size_t kPushBytes = size_t{256} << 20;
constexpr int kPushes = 9;
static_assert(sizeof(LineUpFlags) <= kFlagsBytes);

// Memory of this GPU that the other ranks have mapped, and theirs.
class SharedWindows {
 public:
  SharedWindows(int rank, int nranks) : rank_(rank), addresses_(static_cast<size_t>(nranks), nullptr) {}
  ~SharedWindows() {
    close_peers();
    if (own()) cudaFree(own());
  }
  SharedWindows(const SharedWindows&) = delete;
  SharedWindows& operator=(const SharedWindows&) = delete;

  // The first step that fails, and how; "" when none did. The steps that all ranks take together are all taken.
  std::string connect(RankGroup& group) {
    std::string problem;
    const auto attempt = [&](cudaError_t error, const std::string& what) {
      if (error == cudaSuccess || !problem.empty()) return;
      problem = what + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error);
      cudaGetLastError();
    };
    cudaIpcMemHandle_t handle{};
    void* memory = nullptr;
    attempt(cudaMalloc(&memory, kFlagsBytes + kPushBytes), "cudaMalloc");
    addresses_[static_cast<size_t>(rank_)] = static_cast<std::byte*>(memory);
    if (memory) {
      attempt(cudaMemset(memory, 0, kFlagsBytes + kPushBytes), "cudaMemset");
      attempt(cudaDeviceSynchronize(), "cudaMemset");
      attempt(cudaIpcGetMemHandle(&handle, memory), "cudaIpcGetMemHandle");
    }
    const std::vector<char> handles = group.all_gather(&handle, sizeof handle);
    if (group.maximum({problem.empty() ? 0.0 : 1.0})[0] != 0.0)
      return problem.empty() ? "another rank's GPU cannot share its memory" : problem;
    for (size_t peer = 0; peer < addresses_.size(); ++peer) {
      if (static_cast<int>(peer) == rank_) continue;
      std::memcpy(&handle, handles.data() + peer * sizeof handle, sizeof handle);
      void* mapped = nullptr;
      attempt(cudaIpcOpenMemHandle(&mapped, handle, cudaIpcMemLazyEnablePeerAccess),
              "cudaIpcOpenMemHandle of rank " + std::to_string(peer) + "'s memory");
      addresses_[peer] = static_cast<std::byte*>(mapped);
    }
    if (group.maximum({problem.empty() ? 0.0 : 1.0})[0] != 0.0) {
      close_peers();
      group.barrier();  // nobody frees what another still maps
      return problem.empty() ? "another rank's GPU cannot map its peers" : problem;
    }
    return "";
  }

  void close_peers() {
    for (size_t peer = 0; peer < addresses_.size(); ++peer) {
      if (static_cast<int>(peer) == rank_ || !addresses_[peer]) continue;
      cudaIpcCloseMemHandle(addresses_[peer]);
      addresses_[peer] = nullptr;
    }
  }

  LineUpFlags* flags(size_t rank) const { return reinterpret_cast<LineUpFlags*>(addresses_[rank]); }
  std::byte* landing(size_t rank) const { return addresses_[rank] + kFlagsBytes; }

 private:
  std::byte* own() const { return addresses_[static_cast<size_t>(rank_)]; }

  int rank_;
  std::vector<std::byte*> addresses_;
};

class CudaRanks : public GpuRanks {
 public:
  CudaRanks(const Context& context, RankGroup& group, std::unique_ptr<SharedWindows> windows)
      : context_(context), group_(group), windows_(std::move(windows)) {
    void* missing = nullptr;
    require_cuda(cudaMalloc(&missing, sizeof(uint32_t)), "cudaMalloc");
    missing_ = static_cast<uint32_t*>(missing);
    require_cuda(cudaMemset(missing_, 0, sizeof(uint32_t)), "cudaMemset");
    int device = 0;
    require_cuda(cudaGetDevice(&device), "cudaGetDevice");
    require_cuda(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, device),
                 "cudaDeviceGetAttribute");
    require_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    line_up_.rank = context.rank;
    line_up_.nranks = context.nranks;
    line_up_.missing = missing_;
    for (int rank = 0; rank < context.nranks; ++rank)
      line_up_.flags[rank] = windows_->flags(static_cast<size_t>(rank));
  }
  ~CudaRanks() override { cudaFree(missing_); }

  void line_up() override {
    ++line_up_.round;
    require_cuda(launch_line_up(line_up_, context_.device->stream()),
                 "launching the kernel that lines ranks up");
  }

  void require_all_came() override {
    uint32_t missing = 0;
    require_cuda(cudaMemcpy(&missing, missing_, sizeof missing, cudaMemcpyDeviceToHost),
                 "reading whether all ranks lined up");
    if (!missing) return;
    throw RunError("rank " + std::to_string(context_.rank) + "'s GPU waited 20 s for rank " +
                   std::to_string(missing - 1) + "'s to line up before a timed launch");
  }

  LinkRate measure_link() override {
    const size_t share = kPushBytes / static_cast<size_t>(context_.nranks - 1) / 16 * 16;
    return {rate({1}, kPushBytes), rate(all_distances(), share)};
  }

  void disconnect() override {
    windows_->close_peers();
    group_.barrier();
  }

 private:
  std::vector<int> all_distances() const {
    std::vector<int> distances;
    for (int distance = 1; distance < context_.nranks; ++distance) distances.push_back(distance);
    return distances;
  }

  // GB/s of the slowest rank, each sending to those that come so far after it; each has its part of a landing
  // area to itself.
  double rate(const std::vector<int>& distances, size_t bytes_a_peer) {
    Push push;
    push.num_peers = static_cast<int>(distances.size());
    push.bytes_a_peer = bytes_a_peer;
    const DeviceBuffer source(*context_.device, kPushBytes);
    require_cuda(cudaMemset(source.data(), 0x5a, kPushBytes), "cudaMemset");
    require_cuda(cudaDeviceSynchronize(), "cudaMemset");
    push.from = static_cast<const std::byte*>(source.data());
    for (size_t i = 0; i < distances.size(); ++i) {
      const int peer = (context_.rank + distances[i]) % context_.nranks;
      push.to[i] = windows_->landing(static_cast<size_t>(peer)) + i * bytes_a_peer;
    }
    std::vector<double> times;
    for (int i = 0; i < kPushes; ++i) {
      group_.barrier();
      line_up();
      times.push_back(context_.device->time_us(
          context_.comm,
          [&] { require_cuda(launch_push(push, num_sms_, context_.device->stream()), "launching a push"); },
          [] {}));
    }
    require_all_came();
    const double bytes = static_cast<double>(bytes_a_peer * distances.size());
    return bytes / median(group_.maximum(times)) * 1e-3;
  }

  Context context_;
  RankGroup& group_;
  std::unique_ptr<SharedWindows> windows_;
  LineUp line_up_;
  uint32_t* missing_ = nullptr;
  int num_sms_ = 0;
};

}  // namespace

std::unique_ptr<GpuRanks> connect_gpus(const Context& context, RankGroup& group, std::string& problem) {
  if (context.device->device != MK_DEVICE_CUDA) return nullptr;
  if (context.nranks > kMaxGpuRanks) {
    problem = "more than " + std::to_string(kMaxGpuRanks) + " ranks";
    return nullptr;
  }
  auto windows = std::make_unique<SharedWindows>(context.rank, context.nranks);
  problem = windows->connect(group);
  if (!problem.empty()) return nullptr;
  return std::make_unique<CudaRanks>(context, group, std::move(windows));
}

}  // namespace perf
