// SPDX-License-Identifier: MIT
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda_expert_rows.h"

namespace perf {
namespace {

// A CTA a row: a row of 7168 bf16 is 896 units.
constexpr int NUM_THREADS = 256;

__global__ void __launch_bounds__(NUM_THREADS) spread_kernel(RowSpread spread) {
  const int64_t units = spread.row_bytes / int64_t{sizeof(uint4)};
  const int64_t token = blockIdx.x;
  const auto* from = static_cast<const uint4*>(spread.x) + token * units;
  auto* stage = static_cast<uint4*>(spread.stage);
  const int64_t* places = spread.places + token * spread.topk;
  for (int64_t unit = threadIdx.x; unit < units; unit += NUM_THREADS) {
    const uint4 value = from[unit];
    for (int k = 0; k < spread.topk; ++k) stage[places[k] * units + unit] = value;
  }
}

__global__ void __launch_bounds__(NUM_THREADS) copies_kernel(RowCopies copies) {
  const int64_t units = copies.row_bytes / int64_t{sizeof(uint4)};
  auto* stage = static_cast<uint4*>(copies.stage);
  uint4* row = stage + (copies.first + blockIdx.x) * units;
  uint4* place = stage + copies.places[blockIdx.x] * units;
  const uint4* from = copies.to_places ? row : place;
  uint4* to = copies.to_places ? place : row;
  for (int64_t unit = threadIdx.x; unit < units; unit += NUM_THREADS) to[unit] = from[unit];
}

__device__ float to_float(float value) { return value; }
__device__ float to_float(__half value) { return __half2float(value); }
__device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ void store(float* at, float value) { *at = value; }
__device__ void store(__half* at, float value) { *at = __float2half_rn(value); }
__device__ void store(__nv_bfloat16* at, float value) { *at = __float2bfloat16_rn(value); }

template <typename Element>
__global__ void __launch_bounds__(NUM_THREADS) sum_kernel(RowSum sum) {
  constexpr int PER_UNIT = sizeof(uint4) / sizeof(Element);
  union Unit {
    uint4 bits;
    Element elements[PER_UNIT];
    __device__ Unit() : bits{} {}
  };
  const int64_t units = sum.row_bytes / int64_t{sizeof(uint4)};
  const int64_t token = blockIdx.x;
  const auto* stage = static_cast<const uint4*>(sum.stage);
  const int64_t* places = sum.places + token * sum.topk;
  const float* factors = sum.factors + token * sum.topk;
  for (int64_t unit = threadIdx.x; unit < units; unit += NUM_THREADS) {
    float sums[PER_UNIT] = {};
#pragma unroll 4
    for (int k = 0; k < sum.topk; ++k) {
      Unit row;
      row.bits = stage[places[k] * units + unit];
      const float factor = factors[k];
#pragma unroll
      for (int i = 0; i < PER_UNIT; ++i) sums[i] += factor * to_float(row.elements[i]);
    }
    Unit rounded;
#pragma unroll
    for (int i = 0; i < PER_UNIT; ++i) store(&rounded.elements[i], sums[i]);
    static_cast<uint4*>(sum.y)[token * units + unit] = rounded.bits;
  }
}

}  // namespace

cudaError_t launch_spread(const RowSpread& spread, cudaStream_t stream) {
  if (spread.tokens == 0) return cudaSuccess;
  spread_kernel<<<static_cast<unsigned>(spread.tokens), NUM_THREADS, 0, stream>>>(spread);
  return cudaGetLastError();
}

cudaError_t launch_copies(const RowCopies& copies, cudaStream_t stream) {
  if (copies.rows == 0) return cudaSuccess;
  copies_kernel<<<static_cast<unsigned>(copies.rows), NUM_THREADS, 0, stream>>>(copies);
  return cudaGetLastError();
}

cudaError_t launch_sum(const RowSum& sum, cudaStream_t stream) {
  if (sum.tokens == 0) return cudaSuccess;
  const auto num_ctas = static_cast<unsigned>(sum.tokens);
  if (sum.dtype == MK_DTYPE_FP32) {
    sum_kernel<float><<<num_ctas, NUM_THREADS, 0, stream>>>(sum);
  } else if (sum.dtype == MK_DTYPE_FP16) {
    sum_kernel<__half><<<num_ctas, NUM_THREADS, 0, stream>>>(sum);
  } else {
    sum_kernel<__nv_bfloat16><<<num_ctas, NUM_THREADS, 0, stream>>>(sum);
  }
  return cudaGetLastError();
}

}  // namespace perf
