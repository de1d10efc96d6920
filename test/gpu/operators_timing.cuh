// SPDX-License-Identifier: MIT
// Times of launches between GPUs: isolated and back to back, the slowest rank's; and random operands.
#pragma once

#include <algorithm>

#include "operators_job.h"

namespace operators {

constexpr int WARM_UP = 5;
constexpr int ISOLATED = 20;
constexpr int BACK_TO_BACK = 20;

static __global__ void fill_random(uint32_t* words, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += gridDim.x * size_t{blockDim.x}) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u ^ seed;
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    // Two bf16 of magnitude 0.5 to 2 and either sign.
    words[i] = (x & 0x80ff80ffu) | 0x3f003f00u;
  }
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Times {
  double isolated;
  double back_to_back;
};

// The slowest rank's, sample by sample.
inline std::vector<double> slowest(Rank& rank, const std::vector<double>& own) {
  static std::vector<double> all[64];
  all[rank.rank] = own;
  rank.meet();
  std::vector<double> result = own;
  for (int r = 0; r < rank.nranks; ++r) {
    for (size_t i = 0; i < own.size(); ++i) result[i] = std::max(result[i], all[r][i]);
  }
  rank.meet();
  return result;
}

// Ranks meet before they launch. Where they share a GPU, memory that one of them has yet to free, or to copy,
// waits for all kernels there, and a kernel for the rank.
inline Times measure(Rank& rank, const std::function<void()>& run) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  const auto timed = [&](int launches) {
    rank.meet();
    cudaEventRecord(begin, rank.stream);
    for (int i = 0; i < launches; ++i) run();
    cudaEventRecord(end, rank.stream);
    require_cuda(cudaStreamSynchronize(rank.stream), "timing");
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, begin, end);
    return milliseconds * 1000.0 / launches;
  };
  timed(WARM_UP);
  std::vector<double> isolated;
  for (int i = 0; i < ISOLATED; ++i) isolated.push_back(timed(1));
  const std::vector<double> back_to_back = {timed(BACK_TO_BACK)};
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return {median(slowest(rank, isolated)), slowest(rank, back_to_back)[0]};
}

}  // namespace operators
