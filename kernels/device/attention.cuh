// SPDX-License-Identifier: MIT
// Attention of tiles of queries, 64 a consumer warpgroup, over blocks of keys and values that a producer brings
// into shared memory. The softmax of one block runs under the products of the next, and the warpgroups take
// turns, so that one's softmax runs under the other's products. So do a tile's end and the begin of the next:
// the last product of one is on its way with the first of the other. Weights stay in registers.
#pragma once

#include <cstdint>

#include "kernels/device/softmax_rows.cuh"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/warp.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace mk {

// HEAD_DIM is 64 or 128; smaller heads are padded with zeros by TMA.
template <int HEAD_DIM_, int BLOCK_M_, int BLOCK_N_, int NUM_STAGES_, class Element_>
struct AttentionConfig {
  using Element = Element_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int BLOCK_M = BLOCK_M_;  // queries
  static constexpr int BLOCK_N = BLOCK_N_;  // keys
  static constexpr int NUM_STAGES = NUM_STAGES_;
  static constexpr int NUM_CONSUMER_WARPGROUPS = BLOCK_M / 64;
  static constexpr int NUM_CONSUMER_WARPS = 4 * NUM_CONSUMER_WARPGROUPS;
  static constexpr int NUM_THREADS = 128 * (NUM_CONSUMER_WARPGROUPS + 1);
  // In shared memory a tile is blocks of 64 columns, one behind the other: rows of 128 bytes, swizzled.
  static constexpr int NUM_COLUMN_BLOCKS = HEAD_DIM / 64;
  static constexpr int QUERY_COLUMN_BYTES = BLOCK_M * 128;
  static constexpr int KEY_COLUMN_BYTES = BLOCK_N * 128;
  static constexpr int QUERY_BYTES = NUM_COLUMN_BLOCKS * QUERY_COLUMN_BYTES;
  static constexpr int KEY_BYTES = NUM_COLUMN_BLOCKS * KEY_COLUMN_BYTES;
};

// Queries of the next tile come while this one's are in use.
constexpr int NUM_QUERY_SLOTS = 2;

template <class Config>
struct alignas(1024) AttentionStorage {
  uint8_t queries[NUM_QUERY_SLOTS][Config::QUERY_BYTES];
  uint8_t keys[Config::NUM_STAGES][Config::KEY_BYTES];
  uint8_t values[Config::NUM_STAGES][Config::KEY_BYTES];
  uint64_t queries_full[NUM_QUERY_SLOTS], queries_empty[NUM_QUERY_SLOTS];
  uint64_t keys_full[Config::NUM_STAGES], keys_empty[Config::NUM_STAGES];
  uint64_t values_full[Config::NUM_STAGES], values_empty[Config::NUM_STAGES];
};

// By one thread of the CTA; a fence.mbarrier_init and a CTA-wide barrier must follow.
template <class Config>
__device__ __forceinline__ void attention_init(AttentionStorage<Config>& smem) {
  for (int slot = 0; slot < NUM_QUERY_SLOTS; ++slot) {
    ptx::mbarrier_init(&smem.queries_full[slot], 1);
    ptx::mbarrier_init(&smem.queries_empty[slot], Config::NUM_CONSUMER_WARPS);
  }
  for (int stage = 0; stage < Config::NUM_STAGES; ++stage) {
    ptx::mbarrier_init(&smem.keys_full[stage], 1);
    ptx::mbarrier_init(&smem.keys_empty[stage], Config::NUM_CONSUMER_WARPS);
    ptx::mbarrier_init(&smem.values_full[stage], 1);
    ptx::mbarrier_init(&smem.values_empty[stage], Config::NUM_CONSUMER_WARPS);
  }
}

// Named barriers: whose turn it is to multiply.
constexpr int ATTENTION_TURN_BARRIER = 1;

// What weights are relative to stays until one would be larger than this, as a power of two: so in almost all
// blocks. fp16, in which they are multiplied, ends at 2^16.
constexpr float MOST_WEIGHT_LOG2 = 8.0f;

// A consumer warpgroup's walk through tiles and their blocks of keys.
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
        queries_(ptx::wgmma_descriptor_swizzle_128b(ptx::smem_address(smem.queries[0]) + warpgroup * 64 * 128,
                                                    0, 1024)),
        keys_(ptx::wgmma_descriptor_swizzle_128b(ptx::smem_address(smem.keys[0]), 0, 1024)),
        values_(ptx::wgmma_descriptor_swizzle_128b(ptx::smem_address(smem.values[0]), Config::KEY_COLUMN_BYTES,
                                                   1024)) {}

  // All tiles, one behind the other. Of `tiles`: next() takes a tile, whose queries are on their way, and says
  // how many blocks it has, at least one, or 0 behind the last; block(stage) is what is known of the block in a
  // stage, and mask(logits, block) sets to -inf what is not to be seen of one that is_masked;
  // store(outputs, rows), behind the next tile's next(), has outputs that are not yet divided by the sums.
  template <class Tiles>
  __device__ __forceinline__ void run(Tiles& tiles) {
    float outputs[NUM_OUTPUTS], logits[NUM_LOGITS];
    uint32_t weights[NUM_LOGITS / 2];
    SoftmaxRows rows, rows_before;
    int num_blocks = tiles.next();
    if (num_blocks == 0) return;
    // The first warpgroup's turn.
    if (warpgroup_ == Config::NUM_CONSUMER_WARPGROUPS - 1) end_turn();
    await_queries();
    wait(&smem_.keys_full[keys_stage_], keys_phase_);
    multiply_keys(logits);
    take_logits<0>(tiles, logits);
    begin_softmax(logits, rows);
    pack(logits, weights);
    clear(outputs);
    while (true) {
      for (int block = 1; block < num_blocks; ++block) {
        multiply(weights, logits, outputs);
        take_logits<1>(tiles, logits);
        float decay[2];
        const bool stays = continue_softmax(logits, rows, decay);
        end_values(rows, weights, outputs);
        pack(logits, weights);
        if (!stays) {
#pragma unroll
          for (int i = 0; i < NUM_OUTPUTS; ++i) outputs[i] *= decay[i / 2 % 2];
        }
      }
      release(smem_.queries_empty[queries_slot_]);
      queries_slot_ ^= 1;
      queries_phase_ ^= queries_slot_ == 0 ? 1 : 0;
      num_blocks = tiles.next();
      if (num_blocks == 0) break;
      await_queries();
      multiply(weights, logits, outputs);
      take_logits<1>(tiles, logits);
      rows_before = rows;
      begin_softmax(logits, rows);
      end_values(rows, weights, outputs);
      finish(tiles, outputs, rows_before);
      pack(logits, weights);
      clear(outputs);
    }
    wait(&smem_.values_full[values_stage_], values_phase_);
    multiply_values(weights, outputs);
    end_values(rows, weights, outputs);
    finish(tiles, outputs, rows);
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
  __device__ __forceinline__ void await_queries() const {
    wait(&smem_.queries_full[queries_slot_], queries_phase_);
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
    const uint64_t queries = queries_ + queries_slot_ * (Config::QUERY_BYTES >> 4);
    const uint64_t keys = keys_ + keys_stage_ * (Config::KEY_BYTES >> 4);
#pragma unroll
    for (int k16 = 0; k16 < Config::HEAD_DIM / 16; ++k16) {
      const int column = k16 / 4, within = k16 % 4 * (32 >> 4);
      ptx::wgmma_mma_async_k16<Element, 0, 0>(
          logits, queries + column * (Config::QUERY_COLUMN_BYTES >> 4) + within,
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

  // One turn: the next block's logits, and what the block before adds to the outputs.
  __device__ __forceinline__ void multiply(uint32_t (&weights)[NUM_LOGITS / 2], float (&logits)[NUM_LOGITS],
                                           float (&outputs)[NUM_OUTPUTS]) const {
    wait(&smem_.keys_full[keys_stage_], keys_phase_);
    await_turn();
    multiply_keys(logits);
    wait(&smem_.values_full[values_stage_], values_phase_);
    multiply_values(weights, outputs);
    end_turn();
  }

  // A block's logits, once all but the last NUM_BEHIND groups of products are done.
  template <int NUM_BEHIND, class Tiles>
  __device__ __forceinline__ void take_logits(Tiles& tiles, float (&logits)[NUM_LOGITS]) {
    const auto block = tiles.block(keys_stage_);
    ptx::wgmma_wait_group<NUM_BEHIND>();
    ptx::wgmma_fence_registers(logits);
    release(smem_.keys_empty[keys_stage_]);
    advance(keys_stage_, keys_phase_);
    // Seldom either, so one branch.
    if (negate_ || block.is_masked) {
      if (negate_) flip(logits);
      if (block.is_masked) tiles.mask(logits, block);
    }
  }

  // Outputs and weights, once their product is done: not before what is worked out of `rows`.
  __device__ __forceinline__ void end_values(const SoftmaxRows& rows, uint32_t (&weights)[NUM_LOGITS / 2],
                                             float (&outputs)[NUM_OUTPUTS]) {
    // Without a branch on its outcome the compiler puts the wait before it.
    if (rows.sum[0] + rows.sum[1] < 0.0f) __nanosleep(1);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_registers(outputs);
    ptx::wgmma_fence_registers(weights);
    release(smem_.values_empty[values_stage_]);
    advance(values_stage_, values_phase_);
  }

  template <class Tiles>
  static __device__ __forceinline__ void finish(Tiles& tiles, const float (&outputs)[NUM_OUTPUTS],
                                                SoftmaxRows& rows) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      rows.sum[row] += __shfl_xor_sync(~0u, rows.sum[row], 1);
      rows.sum[row] += __shfl_xor_sync(~0u, rows.sum[row], 2);
    }
    tiles.store(outputs, rows);
  }

  static __device__ __forceinline__ void clear(float (&outputs)[NUM_OUTPUTS]) {
#pragma unroll
    for (int i = 0; i < NUM_OUTPUTS; ++i) outputs[i] = 0.0f;
  }

  static __device__ __forceinline__ void flip(float (&logits)[NUM_LOGITS]) {
#pragma unroll
    for (int i = 0; i < NUM_LOGITS; ++i) logits[i] = -logits[i];
  }

  // The maximum of a thread's logits and `maximum`.
  static __device__ __forceinline__ float thread_maximum(const float (&logits)[NUM_LOGITS], int row,
                                                         float maximum) {
#pragma unroll
    for (int i = 0; i < NUM_LOGITS; i += 4)
      maximum = fmaxf(maximum, fmaxf(logits[i + 2 * row], logits[i + 2 * row + 1]));
    return maximum;
  }
  // The same of a maximum that is positive: then floats are in the order of their bits as integers, of which
  // one instruction compares three.
  static __device__ __forceinline__ float thread_maximum_of_positive(const float (&logits)[NUM_LOGITS], int row,
                                                                     float maximum) {
    int bits[2] = {__float_as_int(maximum), 0};
#pragma unroll
    for (int i = 0; i < NUM_LOGITS; i += 4) {
      int& most = bits[i / 4 % 2];
      most = max(max(most, __float_as_int(logits[i + 2 * row])), __float_as_int(logits[i + 2 * row + 1]));
    }
    return __int_as_float(max(bits[0], bits[1]));
  }
  // Over a row's four threads.
  static __device__ __forceinline__ float row_maximum(float maximum) {
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

  __device__ __forceinline__ void begin_softmax(float (&logits)[NUM_LOGITS], SoftmaxRows& rows) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      rows.maximum[row] = row_maximum(thread_maximum(logits, row, -INFINITY));
      rows.sum[row] = weigh(logits, row, rows.maximum[row]);
    }
    are_positive_ = __all_sync(~0u, rows.maximum[0] > 0.0f && rows.maximum[1] > 0.0f);
  }

  // Says whether what weights are relative to stays as it is; if not, what the outputs so far are to be
  // multiplied by is `decay`. It stays in most blocks, and then no thread need know another's logits.
  __device__ __forceinline__ bool continue_softmax(float (&logits)[NUM_LOGITS], SoftmaxRows& rows,
                                                   float (&decay)[2]) {
    float maximum[2];
    if (are_positive_) {
#pragma unroll
      for (int row = 0; row < 2; ++row)
        maximum[row] = thread_maximum_of_positive(logits, row, rows.maximum[row]);
    } else {
#pragma unroll
      for (int row = 0; row < 2; ++row) maximum[row] = thread_maximum(logits, row, rows.maximum[row]);
    }
    // Not so where a row has seen nothing yet.
    const bool stays = __all_sync(~0u, (maximum[0] - rows.maximum[0]) * scale_log2_ <= MOST_WEIGHT_LOG2 &&
                                           (maximum[1] - rows.maximum[1]) * scale_log2_ <= MOST_WEIGHT_LOG2);
    if (!stays) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float before = rows.maximum[row];
        rows.maximum[row] = row_maximum(maximum[row]);
        decay[row] = before == -INFINITY ? 0.0f : ptx::ex2_approx((before - rows.maximum[row]) * scale_log2_);
        rows.sum[row] *= decay[row];
      }
      are_positive_ = __all_sync(~0u, rows.maximum[0] > 0.0f && rows.maximum[1] > 0.0f);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) rows.sum[row] += weigh(logits, row, rows.maximum[row]);
    return stays;
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
  int queries_slot_ = 0;
  uint32_t queries_phase_ = 0;
  int keys_stage_ = 0, values_stage_ = 0;
  uint32_t keys_phase_ = 0, values_phase_ = 0;
  bool are_positive_ = false;  // all that the warp's weights are relative to
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
