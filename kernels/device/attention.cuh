// SPDX-License-Identifier: MIT
// Attention of a tile of queries, 64 a consumer warpgroup, over blocks of keys and values that a producer
// brings into shared memory. The softmax of one block runs under the products of the next, and the warpgroups
// take turns, so that one's softmax runs under the other's products. Weights stay in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/warp.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace mk {

// HEAD_DIM is 64 or 128; smaller heads are padded with zeros by TMA.
template <int HEAD_DIM_, int BLOCK_N_, int NUM_STAGES_, class Element_>
struct AttentionConfig {
  using Element = Element_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int BLOCK_N = BLOCK_N_;  // keys
  static constexpr int NUM_STAGES = NUM_STAGES_;
  static constexpr int NUM_CONSUMER_WARPGROUPS = 2;
  static constexpr int NUM_CONSUMER_WARPS = 4 * NUM_CONSUMER_WARPGROUPS;
  static constexpr int BLOCK_M = 64 * NUM_CONSUMER_WARPGROUPS;  // queries
  static constexpr int NUM_THREADS = 128 * (NUM_CONSUMER_WARPGROUPS + 1);
  // In shared memory a tile is blocks of 64 columns, one behind the other: rows of 128 bytes, swizzled.
  static constexpr int NUM_COLUMN_BLOCKS = HEAD_DIM / 64;
  static constexpr int QUERY_COLUMN_BYTES = BLOCK_M * 128;
  static constexpr int KEY_COLUMN_BYTES = BLOCK_N * 128;
  static constexpr int QUERY_BYTES = NUM_COLUMN_BLOCKS * QUERY_COLUMN_BYTES;
  static constexpr int KEY_BYTES = NUM_COLUMN_BLOCKS * KEY_COLUMN_BYTES;
};

template <class Config>
struct alignas(1024) AttentionStorage {
  uint8_t queries[Config::QUERY_BYTES];
  uint8_t keys[Config::NUM_STAGES][Config::KEY_BYTES];
  uint8_t values[Config::NUM_STAGES][Config::KEY_BYTES];
  uint64_t queries_full, queries_empty;
  uint64_t keys_full[Config::NUM_STAGES], keys_empty[Config::NUM_STAGES];
  uint64_t values_full[Config::NUM_STAGES], values_empty[Config::NUM_STAGES];
};

// By one thread of the CTA; a fence.mbarrier_init and a CTA-wide barrier must follow.
template <class Config>
__device__ __forceinline__ void attention_init(AttentionStorage<Config>& smem) {
  ptx::mbarrier_init(&smem.queries_full, 1);
  ptx::mbarrier_init(&smem.queries_empty, Config::NUM_CONSUMER_WARPS);
  for (int stage = 0; stage < Config::NUM_STAGES; ++stage) {
    ptx::mbarrier_init(&smem.keys_full[stage], 1);
    ptx::mbarrier_init(&smem.keys_empty[stage], Config::NUM_CONSUMER_WARPS);
    ptx::mbarrier_init(&smem.values_full[stage], 1);
    ptx::mbarrier_init(&smem.values_empty[stage], Config::NUM_CONSUMER_WARPS);
  }
}

// Named barriers: whose turn it is to multiply.
constexpr int ATTENTION_TURN_BARRIER = 1;

// Two 16-bit elements.
template <class Element>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    const __nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(packed);
  } else {
    const __half2 packed = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(packed);
  }
}

// A thread's two rows of its warpgroup's 64: lane / 4 and 8 further on, of the warp's 16.
struct SoftmaxRows {
  float maximum[2];  // of the logits before scaling
  float sum[2];      // of this thread's part of the weights
};

// A consumer warpgroup's walk through blocks of keys: state that outlives a tile.
template <class Config>
class AttentionConsumer {
 public:
  using Element = typename Config::Element;
  static constexpr int NUM_LOGITS = Config::BLOCK_N / 2;
  static constexpr int NUM_OUTPUTS = Config::HEAD_DIM / 2;

  // scale_log2: of the logits, times log2(e). Not negative: `negate` says that it would be.
  __device__ __forceinline__ AttentionConsumer(AttentionStorage<Config>& smem, int warpgroup, float scale_log2,
                                               bool negate)
      : smem_(smem),
        warpgroup_(warpgroup),
        scale_log2_(scale_log2),
        negate_(negate),
        queries_(ptx::wgmma_descriptor_swizzle_128b(ptx::smem_address(smem.queries) + warpgroup * 64 * 128, 0,
                                                    1024)),
        keys_(ptx::wgmma_descriptor_swizzle_128b(ptx::smem_address(smem.keys[0]), 0, 1024)),
        values_(ptx::wgmma_descriptor_swizzle_128b(ptx::smem_address(smem.values[0]), Config::KEY_COLUMN_BYTES,
                                                   1024)) {}

  // Before the first tile: the first warpgroup's turn.
  __device__ __forceinline__ void begin() const {
    if (warpgroup_ == Config::NUM_CONSUMER_WARPGROUPS - 1) end_turn();
  }

  // A tile whose queries are on their way. mask(logits) is called for each block in order, `num_blocks` times,
  // at least once, and sets what is not to be seen to -inf. The outputs are not yet divided by the sums.
  template <class Mask>
  __device__ __forceinline__ void attend(int num_blocks, Mask&& mask, float (&outputs)[NUM_OUTPUTS],
                                         SoftmaxRows& rows) {
    float logits[NUM_LOGITS];
    uint32_t weights[NUM_LOGITS / 2];
#pragma unroll
    for (int i = 0; i < NUM_OUTPUTS; ++i) outputs[i] = 0.0f;
    wait(&smem_.queries_full, queries_phase_);
    queries_phase_ ^= 1;
    wait(&smem_.keys_full[keys_stage_], keys_phase_);
    multiply_keys(logits);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_registers(logits);
    release(smem_.keys_empty[keys_stage_]);
    advance(keys_stage_, keys_phase_);
    if (negate_) flip(logits);
    mask(logits);
    begin_softmax(logits, rows);
    pack(logits, weights);
    for (int block = 1; block < num_blocks; ++block) {
      wait(&smem_.keys_full[keys_stage_], keys_phase_);
      await_turn();
      multiply_keys(logits);
      wait(&smem_.values_full[values_stage_], values_phase_);
      multiply_values(weights, outputs);
      end_turn();
      ptx::wgmma_wait_group<1>();
      ptx::wgmma_fence_registers(logits);
      release(smem_.keys_empty[keys_stage_]);
      advance(keys_stage_, keys_phase_);
      if (negate_) flip(logits);
      mask(logits);
      float decay[2];
      continue_softmax(logits, rows, decay);
      // All of that under the products: without a branch on its outcome the compiler puts the wait before it.
      if (rows.sum[0] + rows.sum[1] < 0.0f) __nanosleep(1);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_fence_registers(outputs);
      ptx::wgmma_fence_registers(weights);
      release(smem_.values_empty[values_stage_]);
      advance(values_stage_, values_phase_);
      pack(logits, weights);
      // Most blocks raise no row's maximum.
      if (!__all_sync(~0u, decay[0] == 1.0f && decay[1] == 1.0f)) {
#pragma unroll
        for (int i = 0; i < NUM_OUTPUTS; ++i) outputs[i] *= decay[i / 2 % 2];
      }
    }
    release(smem_.queries_empty);
    wait(&smem_.values_full[values_stage_], values_phase_);
    multiply_values(weights, outputs);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_registers(outputs);
    ptx::wgmma_fence_registers(weights);
    release(smem_.values_empty[values_stage_]);
    advance(values_stage_, values_phase_);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      rows.sum[row] += __shfl_xor_sync(~0u, rows.sum[row], 1);
      rows.sum[row] += __shfl_xor_sync(~0u, rows.sum[row], 2);
    }
  }

 private:
  static __device__ __forceinline__ void wait(uint64_t* barrier, uint32_t phase) {
    while (!ptx::mbarrier_try_wait_parity(barrier, phase)) {
    }
  }
  static __device__ __forceinline__ void release(uint64_t& barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&barrier);
  }
  static __device__ __forceinline__ void advance(int& stage, uint32_t& phase) {
    if (++stage == Config::NUM_STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void await_turn() const {
    ptx::barrier_sync(ATTENTION_TURN_BARRIER + warpgroup_, 256);
  }
  __device__ __forceinline__ void end_turn() const {
    const int next = warpgroup_ + 1 == Config::NUM_CONSUMER_WARPGROUPS ? 0 : warpgroup_ + 1;
    ptx::barrier_arrive(ATTENTION_TURN_BARRIER + next, 256);
  }

  // logits = queries keys^T, on their way.
  __device__ __forceinline__ void multiply_keys(float (&logits)[NUM_LOGITS]) const {
    ptx::wgmma_fence();
    const uint64_t keys = keys_ + keys_stage_ * (Config::KEY_BYTES >> 4);
#pragma unroll
    for (int k16 = 0; k16 < Config::HEAD_DIM / 16; ++k16) {
      const int column = k16 / 4, within = k16 % 4 * (32 >> 4);
      ptx::wgmma_mma_async_k16<Element, 0, 0>(
          logits, queries_ + column * (Config::QUERY_COLUMN_BYTES >> 4) + within,
          keys + column * (Config::KEY_COLUMN_BYTES >> 4) + within, k16 > 0);
    }
    ptx::wgmma_commit_group();
  }

  // outputs += weights values, on their way.
  __device__ __forceinline__ void multiply_values(uint32_t (&weights)[NUM_LOGITS / 2],
                                                  float (&outputs)[NUM_OUTPUTS]) const {
    ptx::wgmma_fence_registers(outputs);
    ptx::wgmma_fence_registers(weights);
    ptx::wgmma_fence();
    const uint64_t values = values_ + values_stage_ * (Config::KEY_BYTES >> 4);
#pragma unroll
    for (int k16 = 0; k16 < Config::BLOCK_N / 16; ++k16) {
      ptx::wgmma_mma_async_k16_a_registers<Element, 1>(outputs, weights[4 * k16], weights[4 * k16 + 1],
                                                       weights[4 * k16 + 2], weights[4 * k16 + 3],
                                                       values + k16 * (16 * 128 >> 4));
    }
    ptx::wgmma_commit_group();
  }

  static __device__ __forceinline__ void flip(float (&logits)[NUM_LOGITS]) {
#pragma unroll
    for (int i = 0; i < NUM_LOGITS; ++i) logits[i] = -logits[i];
  }

  // The maximum over a row's four threads.
  static __device__ __forceinline__ float row_maximum(const float (&logits)[NUM_LOGITS], int row,
                                                      float maximum) {
#pragma unroll
    for (int i = 0; i < NUM_LOGITS; i += 4)
      maximum = fmaxf(maximum, fmaxf(logits[i + 2 * row], logits[i + 2 * row + 1]));
    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
    return fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
  }

  // Logits become weights; their sum in this thread.
  __device__ __forceinline__ float weigh(float (&logits)[NUM_LOGITS], int row, float maximum) const {
    // A row that has seen nothing yet has no maximum; its weights are 0.
    const float offset = maximum == -INFINITY ? 0.0f : maximum * scale_log2_;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < NUM_LOGITS; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& value = logits[i + 2 * row + j];
        value = ptx::ex2_approx(fmaf(value, scale_log2_, -offset));
        sum[j] += value;
      }
    }
    return sum[0] + sum[1];
  }

  __device__ __forceinline__ void begin_softmax(float (&logits)[NUM_LOGITS], SoftmaxRows& rows) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      rows.maximum[row] = row_maximum(logits, row, -INFINITY);
      rows.sum[row] = weigh(logits, row, rows.maximum[row]);
    }
  }

  // `decay`: what the outputs so far are to be multiplied by.
  __device__ __forceinline__ void continue_softmax(float (&logits)[NUM_LOGITS], SoftmaxRows& rows,
                                                   float (&decay)[2]) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float before = rows.maximum[row];
      rows.maximum[row] = row_maximum(logits, row, before);
      decay[row] = before == -INFINITY ? 0.0f : ptx::ex2_approx((before - rows.maximum[row]) * scale_log2_);
      rows.sum[row] = rows.sum[row] * decay[row] + weigh(logits, row, rows.maximum[row]);
    }
  }

  // The accumulators' layout is that of the next product's operand, two columns a register.
  static __device__ __forceinline__ void pack(const float (&logits)[NUM_LOGITS],
                                              uint32_t (&weights)[NUM_LOGITS / 2]) {
#pragma unroll
    for (int i = 0; i < NUM_LOGITS / 2; ++i) weights[i] = pack_pair<Element>(logits[2 * i], logits[2 * i + 1]);
  }

  AttentionStorage<Config>& smem_;
  const int warpgroup_;
  const float scale_log2_;
  const bool negate_;
  const uint64_t queries_, keys_, values_;  // descriptors of the first stage
  uint32_t queries_phase_ = 0;
  int keys_stage_ = 0, values_stage_ = 0;
  uint32_t keys_phase_ = 0, values_phase_ = 0;
};

// words[i] of the four lanes of a quad: lane t gets the t-th words of lanes 0 to 3.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
  const bool odd = threadIdx.x % 2 != 0, upper = threadIdx.x % 4 >= 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, odd ? words[i] : words[i + 1], 1);
    (odd ? words[i] : words[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, upper ? words[i] : words[i + 2], 2);
    (upper ? words[i] : words[i + 2]) = other;
  }
}

}  // namespace mk
