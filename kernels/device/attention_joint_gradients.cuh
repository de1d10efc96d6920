// SPDX-License-Identifier: MIT
// Gradients of attention of a tile of keys by the products of attention_gradients.cuh, and with dS at hand what
// the tile adds to dQ of the queries that stream past:
//   dQ / scale += dS k, 64 queries, over the tile's keys
// So five products a pair of blocks are enough, where tiles of queries that go over all keys once more make it
// seven. Each warpgroup has dS^T of its 64 keys in registers and puts it into shared memory; each multiplies
// all of it by half of the keys' columns, one block of queries behind the other products, so that neither waits
// for the other. The sums go to shared memory and are somebody else's from there on.
#pragma once

#include "kernels/device/attention_gradients.cuh"
#include "kernels/device/gemm_epilogue.cuh"

namespace mk {

template <class Config>
struct alignas(1024) JointGradientStorage : AttentionGradientStorage<Config> {
  static constexpr int HALF_SUMS = Config::BLOCK_N * Config::HEAD_DIM / 2;
  // dS^T, a row a key of the tile, of 64 queries: 128 bytes, swizzled. Of two blocks of queries in turn.
  uint8_t d_weights[2][Config::BLOCK_M * 128];
  // What a tile adds to dQ of a block: of each warpgroup its columns, in the order of its accumulators.
  float staged[Config::NUM_CONSUMER_WARPGROUPS][HALF_SUMS];
};

// Apart, since the storage's size is a multiple of 1,024.
struct JointGradientBarriers {
  uint64_t d_weights_full[2], d_weights_empty[2];
  uint64_t staged_full[2];  // of blocks in turn: two threads take what is staged
  uint64_t staged_empty;
};

// By one thread of the CTA; a fence.mbarrier_init and a CTA-wide barrier must follow.
template <class Config>
__device__ __forceinline__ void joint_gradient_init(JointGradientBarriers& barriers) {
  for (int buffer = 0; buffer < 2; ++buffer) {
    ptx::mbarrier_init(&barriers.d_weights_full[buffer], Config::NUM_CONSUMER_WARPS);
    ptx::mbarrier_init(&barriers.d_weights_empty[buffer], Config::NUM_CONSUMER_WARPS);
    ptx::mbarrier_init(&barriers.staged_full[buffer], Config::NUM_CONSUMER_WARPS);
  }
  ptx::mbarrier_init(&barriers.staged_empty, 1);
}

// A consumer warpgroup's walk.
template <class Config>
class JointGradientConsumer : public AttentionGradientConsumer<Config> {
 public:
  using Base = AttentionGradientConsumer<Config>;
  using Storage = JointGradientStorage<Config>;
  using Base::NUM_SUMS;
  using Base::NUM_WEIGHTS;
  using typename Base::Element;
  static constexpr int NUM_HALF_SUMS = NUM_SUMS / 2;  // of a thread, of a block's dQ

  __device__ __forceinline__ JointGradientConsumer(Storage& smem, JointGradientBarriers& barriers,
                                                   int warpgroup, float scale)
      : Base(smem, warpgroup, scale),
        joint_(smem),
        barriers_(barriers),
        warpgroup_(warpgroup),
        d_weights_(ptx::smem_address(smem.d_weights[0])) {}

  // A tile of keys. mask(weights, block) is called for each block in order and sets to zero what is not to be
  // seen, rows behind the tile's last, too: nothing of them is to get into dQ. `is_used`: false if no row of
  // this warpgroup's is; then both sums stay zero, and the rows of its keys are set to zero. Weights are packed
  // last of all, and dV's product begins no sooner: so they fit into the registers.
  template <class Mask>
  __device__ __forceinline__ void add_queries(bool is_used, Mask&& mask, float (&d_keys)[NUM_SUMS],
                                              float (&d_values)[NUM_SUMS]) {
#pragma unroll
    for (int i = 0; i < NUM_SUMS; ++i) d_keys[i] = d_values[i] = 0.0f;
    Base::begin_tile();
    settle();
    if (__any_sync(~0u, is_used)) {
      walk<true>(mask, d_keys, d_values);
    } else {
      clear_keys();
      walk<false>(mask, d_keys, d_values);
    }
  }

 private:
  // Shows the compiler that a warp's threads have all this alike and are together, as consumer_role() does
  // (gemm_roles.cuh); votes say so of branches and loops around the products.
  __device__ __forceinline__ void settle() {
    Base::stage_ = __shfl_sync(~0u, Base::stage_, 0);
    Base::phase_ = __shfl_sync(~0u, Base::phase_, 0);
    if constexpr (!Config::ARE_PAIRS) {
      Base::d_outputs_stage_ = __shfl_sync(~0u, Base::d_outputs_stage_, 0);
      Base::d_outputs_phase_ = __shfl_sync(~0u, Base::d_outputs_phase_, 0);
    }
    num_blocks_ = __shfl_sync(~0u, num_blocks_, 0);
    staged_phase_ = __shfl_sync(~0u, staged_phase_, 0);
    ptx::wgmma_fence();
  }

  template <bool IS_USED, class Mask>
  __device__ __forceinline__ void walk(Mask&& mask, float (&d_keys)[NUM_SUMS], float (&d_values)[NUM_SUMS]) {
    float d_queries[NUM_HALF_SUMS];
    bool is_last = add_block<IS_USED, 0>(mask, d_keys, d_values, d_queries);
    if (!is_last) {
      is_last = add_block<IS_USED, 1>(mask, d_keys, d_values, d_queries);
      while (!is_last) is_last = add_block<IS_USED, 2>(mask, d_keys, d_values, d_queries);
      stage(num_blocks_ - 2, d_queries);
    }
    await_d_weights(num_blocks_ - 1);
    multiply_d_weights(num_blocks_ - 1, d_queries);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_registers(d_queries);
    release_d_weights(num_blocks_ - 1);
    stage(num_blocks_ - 1, d_queries);
  }

  // The next block, of the one before it what it adds to dQ, and beside this one's first products what the one
  // before that has added; so many as NUM_BEFORE are there. True: it was the tile's last. No branch stands
  // between products that are on their way: with one the compiler would make each wait for the one before.
  template <bool IS_USED, int NUM_BEFORE, class Mask>
  __device__ __forceinline__ bool add_block(Mask&& mask, float (&d_keys)[NUM_SUMS], float (&d_values)[NUM_SUMS],
                                            float (&d_queries)[NUM_HALF_SUMS]) {
    uint32_t packed_weights[NUM_WEIGHTS / 2] = {}, packed_d_weights[NUM_WEIGHTS / 2] = {};
    if constexpr (IS_USED) {
      float weights[NUM_WEIGHTS], d_weights[NUM_WEIGHTS];
      Base::multiply_queries(weights);
      if constexpr (NUM_BEFORE > 1) stage(num_blocks_ - 2, d_queries);
      float2 lse[NUM_WEIGHTS / 4];
      Base::load_columns(0, lse);
      const StreamedBlock block = Base::smem_.blocks[Base::stage_];
      Base::multiply_d_outputs(d_weights);
      Base::weigh_columns(lse, block, mask, weights, d_weights);
      Base::pack(weights, packed_weights);
      Base::pack(d_weights, packed_d_weights);
    } else {
      Base::await_queries();
      if constexpr (NUM_BEFORE > 1) stage(num_blocks_ - 2, d_queries);
      Base::await_d_outputs();
    }
    put_d_weights(packed_d_weights);
    if constexpr (NUM_BEFORE > 0) await_d_weights(num_blocks_ - 1);
    if constexpr (IS_USED) {
      Base::accumulate(packed_weights, Base::d_outputs(), d_values);
      Base::accumulate(packed_d_weights, Base::queries(), d_keys);
    }
    if constexpr (NUM_BEFORE > 0) multiply_d_weights(num_blocks_ - 1, d_queries);
    const bool is_last = __any_sync(~0u, Base::smem_.blocks[Base::stage_].num_left == 0) != 0;
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_registers(d_values);
    ptx::wgmma_fence_registers(d_keys);
    ptx::wgmma_fence_registers(packed_weights);
    ptx::wgmma_fence_registers(packed_d_weights);
    if constexpr (NUM_BEFORE > 0) ptx::wgmma_fence_registers(d_queries);
    Base::release_stage();
    Base::advance();
    if constexpr (NUM_BEFORE > 0) release_d_weights(num_blocks_ - 1);
    ++num_blocks_;
    return is_last;
  }

  __device__ __forceinline__ int buffer_of(uint32_t block) const { return static_cast<int>(block % 2); }

  // Keys that are not there must not be what was there before: zero times infinity.
  __device__ __forceinline__ void clear_keys() const {
    auto* const chunks = reinterpret_cast<uint4*>(joint_.tile[warpgroup_]);
    for (int i = static_cast<int>(threadIdx.x % 128); i < Config::KEY_BYTES / 16; i += 128)
      chunks[i] = make_uint4(0, 0, 0, 0);
    // Before the products that read them, and before TMA writes there.
    ptx::fence_proxy_async_shared_cta();
  }

  // dS^T of this block and of this warpgroup's keys.
  __device__ __forceinline__ void put_d_weights(const uint32_t (&packed)[NUM_WEIGHTS / 2]) const {
    const int buffer = buffer_of(num_blocks_);
    Base::wait(&barriers_.d_weights_empty[buffer], num_blocks_ / 2 % 2 ^ 1);
    // Registers 4 i to 4 i + 3 are columns 16 i on: rows 0 to 7, rows 8 to 15, and the same 8 columns on.
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = static_cast<int>(warpgroup_ * Config::BLOCK_N + threadIdx.x % 128 / 32 * 16) + lane % 16;
    const uint32_t rows = d_weights_ + buffer * (Config::BLOCK_M * 128);
#pragma unroll
    for (int i = 0; i < NUM_WEIGHTS / 8; ++i) {
      ptx::stmatrix_x4(swizzled_chunk<128>(rows, row, 2 * i + lane / 16), packed[4 * i], packed[4 * i + 1],
                       packed[4 * i + 2], packed[4 * i + 3]);
    }
    ptx::fence_proxy_async_shared_cta();
    __syncwarp();
    Base::release(barriers_.d_weights_full[buffer]);
  }

  // Both warpgroups have put theirs.
  __device__ __forceinline__ void await_d_weights(uint32_t block) const {
    Base::wait(&barriers_.d_weights_full[buffer_of(block)], block / 2 % 2);
  }

  // dS k of a block, on its way: of this warpgroup's columns, over all keys of the tile.
  __device__ __forceinline__ void multiply_d_weights(uint32_t block, float (&d_queries)[NUM_HALF_SUMS]) const {
    const int buffer = buffer_of(block);
    constexpr int HALF_BYTES =
        Config::NUM_COLUMN_BLOCKS == 2 ? Config::KEY_COLUMN_BYTES : Config::HEAD_DIM / 2 * 2;
    uint32_t keys = (ptx::smem_address(joint_.tile[0]) + warpgroup_ * HALF_BYTES) >> 4;
    const uint32_t d_weights = (d_weights_ >> 4) + buffer * (Config::BLOCK_M * 128 >> 4);
    ptx::forget(keys);
    ptx::wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < Config::BLOCK_M / 16; ++k16) {
      constexpr int ROWS16 = 16 * 128 >> 4;
      const int key_rows = k16 / 4 * (Config::PAIR_BYTES >> 4) + k16 % 4 * ROWS16;
      ptx::wgmma_mma_async_k16<Element, 1, 1>(d_queries, Base::descriptor(d_weights + k16 * ROWS16),
                                              Base::descriptor(keys + key_rows), k16 > 0);
    }
    ptx::wgmma_commit_group();
  }

  // Its products are made.
  __device__ __forceinline__ void release_d_weights(uint32_t block) const {
    __syncwarp();
    Base::release(barriers_.d_weights_empty[buffer_of(block)]);
  }

  // The sums of a block, to whoever adds them to the others.
  __device__ __forceinline__ void stage(uint32_t block, const float (&d_queries)[NUM_HALF_SUMS]) {
    Base::wait(&barriers_.staged_empty, staged_phase_ ^ 1);
    staged_phase_ ^= 1;
    auto* const chunks = reinterpret_cast<float4*>(joint_.staged[warpgroup_]) +
                         threadIdx.x % 128 / 32 * (NUM_HALF_SUMS / 4 * 32) + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < NUM_HALF_SUMS / 4; ++i) {
      chunks[32 * i] =
          make_float4(d_queries[4 * i], d_queries[4 * i + 1], d_queries[4 * i + 2], d_queries[4 * i + 3]);
    }
    ptx::fence_proxy_async_shared_cta();
    __syncwarp();
    Base::release(barriers_.staged_full[buffer_of(block)]);
  }

  Storage& joint_;
  JointGradientBarriers& barriers_;
  const int warpgroup_;
  const uint32_t d_weights_;  // address of the first buffer
  uint32_t num_blocks_ = 0;   // whose dS has been put, of all tiles
  uint32_t staged_phase_ = 0;
};

}  // namespace mk
