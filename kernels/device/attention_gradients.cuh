// SPDX-License-Identifier: MIT
// Gradients of attention of a tile of keys, 64 a consumer warpgroup, over blocks of 64 queries and their dO
// that a producer streams past it. With P = exp(scale * q k^T - lse) and dS = P * (dO v^T - delta), delta =
// rowsum(dO * o):
//   dV = P^T dO, dK / scale = dS^T q
// (Dao, FlashAttention-2, section 3.2). P^T and dS^T are computed in the accumulators, whose layout is that of
// the next product's operand: for these sums they never leave the registers. Here are the products; in which
// order a block's are made, and what becomes of dQ, says attention_joint_gradients.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/device/attention.cuh"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/registers.cuh"
#include "kernels/ptx/warp.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace mk {

// HEAD_DIM is 64 or 128; smaller heads are padded with zeros by TMA. With fewer stages of dO than of queries
// each has barriers of its own.
template <int HEAD_DIM_, int NUM_STAGES_, class Element_, int NUM_D_O_STAGES_ = NUM_STAGES_>
struct AttentionGradientConfig {
  using Element = Element_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int BLOCK_N = 64;  // rows that stream past, and of a warpgroup
  static constexpr int NUM_STAGES = NUM_STAGES_;
  static constexpr int NUM_D_O_STAGES = NUM_D_O_STAGES_;
  static constexpr bool ARE_PAIRS = NUM_D_O_STAGES == NUM_STAGES;
  static constexpr int NUM_CONSUMER_WARPGROUPS = 2;
  static constexpr int NUM_CONSUMER_WARPS = 4 * NUM_CONSUMER_WARPGROUPS;
  static constexpr int BLOCK_M = BLOCK_N * NUM_CONSUMER_WARPGROUPS;
  static constexpr int NUM_THREADS = 128 * (NUM_CONSUMER_WARPGROUPS + 1);
  // In shared memory a block of one tensor is columns of 64, one behind the other: rows of 128 bytes, swizzled.
  static constexpr int NUM_COLUMN_BLOCKS = HEAD_DIM / 64;
  static constexpr int KEY_COLUMN_BYTES = BLOCK_N * 128;
  static constexpr int KEY_BYTES = NUM_COLUMN_BLOCKS * KEY_COLUMN_BYTES;
  // Keys and values, or queries and dO, of the same rows.
  static constexpr int PAIR_BYTES = 2 * KEY_BYTES;
};

// Rows that stream past a tile.
struct StreamedBlock {
  int position;  // of the first
  int num_rows;
  int num_left;  // blocks behind it
};

template <class Config>
struct alignas(1024) AttentionGradientStorage {
  uint8_t tile[Config::NUM_CONSUMER_WARPGROUPS][Config::PAIR_BYTES];
  uint8_t queries[Config::NUM_STAGES][Config::KEY_BYTES];
  uint8_t d_outputs[Config::NUM_D_O_STAGES][Config::KEY_BYTES];
  // Of queries that stream past: lse, then delta.
  float rows[Config::NUM_STAGES][2][Config::BLOCK_N];
  StreamedBlock blocks[Config::NUM_STAGES];
  uint64_t tile_full, tile_empty;
  uint64_t stream_full[Config::NUM_STAGES], stream_empty[Config::NUM_STAGES];
  uint64_t d_outputs_full[Config::NUM_D_O_STAGES], d_outputs_empty[Config::NUM_D_O_STAGES];  // unless in pairs
};

// By one thread of the CTA; a fence.mbarrier_init and a CTA-wide barrier must follow.
template <class Config>
__device__ __forceinline__ void attention_gradient_init(AttentionGradientStorage<Config>& smem) {
  ptx::mbarrier_init(&smem.tile_full, 1);
  ptx::mbarrier_init(&smem.tile_empty, Config::NUM_CONSUMER_WARPS);
  for (int stage = 0; stage < Config::NUM_STAGES; ++stage) {
    ptx::mbarrier_init(&smem.stream_full[stage], 1);
    ptx::mbarrier_init(&smem.stream_empty[stage], Config::NUM_CONSUMER_WARPS);
  }
  for (int stage = 0; stage < Config::NUM_D_O_STAGES; ++stage) {
    ptx::mbarrier_init(&smem.d_outputs_full[stage], 1);
    ptx::mbarrier_init(&smem.d_outputs_empty[stage], Config::NUM_CONSUMER_WARPS);
  }
}

// A consumer warpgroup's walk: state that outlives a tile. A thread's rows of the warpgroup's 64 are those of
// the accumulators, its columns 8 j + 2 (lane % 4) and the next.
template <class Config>
class AttentionGradientConsumer {
 public:
  using Element = typename Config::Element;
  static constexpr int NUM_WEIGHTS = Config::BLOCK_N / 2;
  static constexpr int NUM_SUMS = Config::HEAD_DIM / 2;

  __device__ __forceinline__ AttentionGradientConsumer(AttentionGradientStorage<Config>& smem, int warpgroup,
                                                       float scale)
      : smem_(smem),
        scale_(scale),
        tile_(ptx::smem_address(smem.tile[warpgroup]) >> 4),
        queries_(ptx::smem_address(smem.queries[0]) >> 4),
        d_outputs_(ptx::smem_address(smem.d_outputs[0]) >> 4) {}

  // The tile's room may be filled again.
  __device__ __forceinline__ void end_tile() { release(smem_.tile_empty); }

 protected:
  static __device__ __forceinline__ void wait(uint64_t* barrier, uint32_t phase) {
    while (!ptx::mbarrier_try_wait_parity(barrier, phase)) {
    }
  }
  static __device__ __forceinline__ void release(uint64_t& barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&barrier);
  }
  // This block's stages. What was read of its rows by plain loads, TMA overwrites.
  __device__ __forceinline__ void release_stage() {
    ptx::fence_proxy_async_shared_cta();
    __syncwarp();
    release(smem_.stream_empty[stage_]);
    if constexpr (!Config::ARE_PAIRS) release(smem_.d_outputs_empty[d_outputs_stage_]);
  }
  __device__ __forceinline__ void advance() {
    if (++stage_ == Config::NUM_STAGES) {
      stage_ = 0;
      phase_ ^= 1;
    }
    if constexpr (!Config::ARE_PAIRS) {
      if (++d_outputs_stage_ == Config::NUM_D_O_STAGES) {
        d_outputs_stage_ = 0;
        d_outputs_phase_ ^= 1;
      }
    }
  }
  __device__ __forceinline__ int d_outputs_stage() const {
    return Config::ARE_PAIRS ? stage_ : d_outputs_stage_;
  }
  __device__ __forceinline__ void await_queries() const { wait(&smem_.stream_full[stage_], phase_); }
  __device__ __forceinline__ void await_d_outputs() const {
    if constexpr (!Config::ARE_PAIRS) wait(&smem_.d_outputs_full[d_outputs_stage_], d_outputs_phase_);
  }
  __device__ __forceinline__ void begin_tile() {
    wait(&smem_.tile_full, tile_phase_);
    tile_phase_ ^= 1;
  }

  // `low`: address in shared memory / 16; the step between columns of 64, which K-major operands do not need.
  static __device__ __forceinline__ uint64_t descriptor(uint32_t low) {
    return ptx::wgmma_descriptor_swizzle_128b(0, Config::KEY_COLUMN_BYTES, 1024) | low;
  }

  // Addresses / 16 of this block's rows.
  __device__ __forceinline__ uint32_t queries() const { return queries_ + stage_ * (Config::KEY_BYTES >> 4); }
  __device__ __forceinline__ uint32_t d_outputs() const {
    return d_outputs_ + d_outputs_stage() * (Config::KEY_BYTES >> 4);
  }

  // The tile's rows by those of this block, on their way: keys by queries, values by dO.
  __device__ __forceinline__ void multiply_queries(float (&weights)[NUM_WEIGHTS]) const {
    await_queries();
    multiply_tensors(0, queries(), weights);
  }
  __device__ __forceinline__ void multiply_d_outputs(float (&d_weights)[NUM_WEIGHTS]) const {
    await_d_outputs();
    multiply_tensors(Config::KEY_BYTES, d_outputs(), d_weights);
  }
  __device__ __forceinline__ void multiply_tensors(int offset_bytes, uint32_t stream,
                                                   float (&products)[NUM_WEIGHTS]) const {
    uint32_t tile = tile_;
    ptx::forget(tile);
    ptx::wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < Config::HEAD_DIM / 16; ++k16) {
      const int at = k16 / 4 * (Config::KEY_COLUMN_BYTES >> 4) + k16 % 4 * (32 >> 4);
      ptx::wgmma_mma_async_k16<Element, 0, 0>(products, descriptor(tile + (offset_bytes >> 4) + at),
                                              descriptor(stream + at), k16 > 0);
    }
    ptx::wgmma_commit_group();
  }

  // sums += operand by queries() or d_outputs(), on its way.
  __device__ __forceinline__ void accumulate(uint32_t (&operand)[NUM_WEIGHTS / 2], uint32_t stream,
                                             float (&sums)[NUM_SUMS]) const {
    ptx::wgmma_fence_registers(sums);
    ptx::wgmma_fence_registers(operand);
    ptx::wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < Config::BLOCK_N / 16; ++k16) {
      ptx::wgmma_mma_async_k16_a_registers<Element, 1>(sums, operand[4 * k16], operand[4 * k16 + 1],
                                                       operand[4 * k16 + 2], operand[4 * k16 + 3],
                                                       descriptor(stream + k16 * (16 * 128 >> 4)));
    }
    ptx::wgmma_commit_group();
  }

  // The logit that is equal to lse gets a weight of exactly 1, so the factor log2(e) comes last.
  __device__ __forceinline__ float weigh(float logit, float lse) const {
    constexpr float LOG2E = 1.44269504088896341f;
    return ptx::ex2_approx(fmaf(logit, scale_, -lse) * LOG2E);
  }
  // Of this stage's queries what a thread's columns need: lse (0) or delta (1).
  __device__ __forceinline__ void load_columns(int which, float2 (&columns)[NUM_WEIGHTS / 4]) const {
#pragma unroll
    for (int j = 0; j < NUM_WEIGHTS / 4; ++j) {
      columns[j] = *reinterpret_cast<const float2*>(&smem_.rows[stage_][which][8 * j + threadIdx.x % 4 * 2]);
    }
  }
  // P, then dS, of what is on its way, in place. `lse` and delta are there before they are needed, and `mask`
  // is told of this stage's block.
  template <class Mask>
  __device__ __forceinline__ void weigh_columns(const float2 (&lse)[NUM_WEIGHTS / 4],
                                                const StreamedBlock& block, Mask&& mask,
                                                float (&weights)[NUM_WEIGHTS],
                                                float (&d_weights)[NUM_WEIGHTS]) const {
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_fence_registers(weights);
    float2 delta[NUM_WEIGHTS / 4];
    load_columns(1, delta);
#pragma unroll
    for (int j = 0; j < NUM_WEIGHTS / 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weights[4 * j + i] = weigh(weights[4 * j + i], i % 2 == 0 ? lse[j].x : lse[j].y);
    }
    mask(weights, block);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_registers(d_weights);
#pragma unroll
    for (int j = 0; j < NUM_WEIGHTS / 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& value = d_weights[4 * j + i];
        value = weights[4 * j + i] * (value - (i % 2 == 0 ? delta[j].x : delta[j].y));
      }
    }
  }

  static __device__ __forceinline__ void pack(const float (&values)[NUM_WEIGHTS],
                                              uint32_t (&packed)[NUM_WEIGHTS / 2]) {
#pragma unroll
    for (int i = 0; i < NUM_WEIGHTS / 2; ++i) packed[i] = pack_pair<Element>(values[2 * i], values[2 * i + 1]);
  }

  AttentionGradientStorage<Config>& smem_;
  const float scale_;
  const uint32_t tile_, queries_, d_outputs_;  // addresses / 16, of the first stages
  int stage_ = 0, d_outputs_stage_ = 0;
  uint32_t phase_ = 0, d_outputs_phase_ = 0, tile_phase_ = 0;
};

// A warpgroup's rows times `factor`, rounded, to rows of `dim` elements, of which there are num_rows.
template <class Element, int N>
__device__ __forceinline__ void store_gradient_rows(const float (&sums)[N], float factor, std::byte* first_row,
                                                    int64_t row_bytes, int num_rows, int dim) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int at = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * row;
    std::byte* const to = first_row + at * row_bytes;
#pragma unroll
    for (int i = 0; i < N / 16; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int first = 4 * (4 * i + j) + 2 * row;
        words[j] = pack_pair<Element>(sums[first] * factor, sums[first + 1] * factor);
      }
      transpose_quad(words);
      const int column = 8 * (4 * i + lane);
      if (at < num_rows && column < dim) {
        *reinterpret_cast<uint4*>(to + column * 2) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

}  // namespace mk
