// SPDX-License-Identifier: MIT
// The roles of a CTA that computes, on emulated warps: the kernel's own, but that the tensor cores are missing.
// Consumers multiply with whole numbers, modulo 2^16, which fp32 has exactly in any order. For headers of
// kernels that name these things; included before them.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "kernels/device/load_params.h"
#include "kernels/device/partial_sums.cuh"
#include "kernels/device/rank_gemm.cuh"

namespace mk {

// Two consumer warps, a producer and the copy warps. LARGE: tiles that both warpgroups of a CTA finish
// together.
template <bool LARGE>
struct EmulatedConfig {
  static constexpr bool IS_LARGE = LARGE;
  static constexpr bool B_TRANSPOSED = false;
  static constexpr int BLOCK_M = 32;
  static constexpr int BLOCK_N = 16;
  static constexpr int BLOCK_K = 64;
  static constexpr int NUM_STAGES = 3;
  static constexpr int B_STAGE_BYTES = 0;  // expected by barriers, which count no bytes here
  static constexpr int NUM_ROW_BLOCKS = 1;
  static constexpr int NUM_CONSUMER_WARPGROUPS = LARGE ? 2 : 1;  // as kernels ask for; they are a warp each
  static constexpr int NUM_CONSUMER_WARPS = 2;
  static constexpr int NUM_THREADS = 32 * (NUM_CONSUMER_WARPS + 1 + NUM_COPY_WARPS);
};

// Of A, what has been asked for: rows of a box behind those of the tile are not there yet, or another's, so who
// multiplies loads his own.
struct AskedFor {
  const CUtensorMap* map;
  int row;
  int column;
};

// Of rows of `pitch` bytes, the first dimension of which is contiguous.
inline CUtensorMap emulated_map(const void* data, const std::array<int64_t, 3>& dims, int64_t pitch) {
  const ptx::EmulatedTensor tensor = {static_cast<const uint16_t*>(data),
                                      {dims[0], dims[1], dims[2], 1},
                                      {pitch, dims[1] * pitch, 0},
                                      EmulatedConfig<true>::BLOCK_K};
  CUtensorMap map{};
  std::memcpy(&map, &tensor, sizeof tensor);
  return map;
}

template <class Config>
struct alignas(128) MainloopStorage {
  uint8_t b[Config::NUM_STAGES][Config::BLOCK_K * 128];
  uint8_t rest[192 * 1024 - sizeof b];  // as large as the stages are, where others take their place
  uint64_t stage_full[Config::NUM_STAGES];
  uint64_t stage_empty[Config::NUM_STAGES];
  uint64_t asked[Config::NUM_STAGES];
  AskedFor a[Config::NUM_STAGES];
  uint32_t num_through[Config::NUM_STAGES];  // consumer warps, of all tiles
};

template <class Config>
void mainloop_init(MainloopStorage<Config>& smem) {
  for (int stage = 0; stage < Config::NUM_STAGES; ++stage)
    smem.stage_empty[stage] = smem.asked[stage] = smem.num_through[stage] = 0;
}

// The last loads of a stage, with which it is complete.
template <class Config>
void load_a_stage(MainloopStorage<Config>& smem, int stage, const CUtensorMap* map_a, const StageBoxes&,
                  int row, int column) {
  smem.a[stage] = {map_a, row, column};
  __atomic_fetch_add(&smem.asked[stage], 1, __ATOMIC_RELEASE);
}

// A consumer warp's 16 rows of a stage, as wgmma leaves them.
template <class Config>
void multiply_stage(const MainloopStorage<Config>& smem, int stage, int row_end,
                    uint32_t (&sums)[Config::BLOCK_N / 2]) {
  const AskedFor& asked = smem.a[stage];
  ptx::EmulatedTensor a;
  std::memcpy(&a, asked.map, sizeof a);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const auto* const b = reinterpret_cast<const uint16_t*>(smem.b[stage]) + lane % 4 * 2;
  for (int half = 0; half < 2; ++half) {
    const int row = asked.row + warp * 16 + half * 8 + lane / 4;
    if (row >= row_end || row >= a.dims[1]) continue;
    const uint16_t* const elements = a.data + row * a.stride_bytes[0] / 2;
    for (int k = 0; k < Config::BLOCK_K && asked.column + k < a.dims[0]; ++k) {
      const uint32_t element = elements[asked.column + k];
      for (int i = 0; i < Config::BLOCK_N / 4; ++i)
        sums[i / 2 * 4 + half * 2 + i % 2] += element * b[k * 64 + i / 2 * 8 + i % 2];
    }
  }
}

template <class Config>
void release_stage(MainloopStorage<Config>& smem, int stage) {
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  if (__atomic_add_fetch(&smem.num_through[stage], 1, __ATOMIC_ACQ_REL) % Config::NUM_CONSUMER_WARPS == 0)
    __atomic_fetch_add(&smem.stage_empty[stage], 1, __ATOMIC_RELEASE);
}

// One piece, which is stored beside the products of the next tile.
template <int BLOCK_N, int NUM_BUFFERS>
class DeferredRows {
 public:
  static constexpr int NUM_PIECES = 1;

  explicit DeferredRows(EpilogueBuffers<NUM_BUFFERS>& buffers) : buffers_(buffers) {}
  bool take(const float (&accumulators)[BLOCK_N / 2], const EpilogueParams& params, int m, int m_end, int n) {
    if (n + BLOCK_N > params.n) return false;
    std::copy_n(accumulators, BLOCK_N / 2, rows_);
    params_ = params;
    m_ = m, m_end_ = m_end, n_ = n;
    return true;
  }
  template <int PIECE>
  void store() {
    flush();
  }
  void flush() {
    store_tile_rows(rows_, params_, buffers_, m_, m_end_, n_);
    m_end_ = 0;
  }

 private:
  EpilogueBuffers<NUM_BUFFERS>& buffers_;
  float rows_[BLOCK_N / 2] = {};
  EpilogueParams params_{};
  int m_ = 0, m_end_ = 0, n_ = 0;
};
struct NothingDeferred {
  static constexpr int NUM_PIECES = 0;
  void flush() {}
};

template <class Config, class Work = TileWork, TilesAre = TilesAre::settled, class Next, class Finish,
          class Deferred = NothingDeferred>
void consumer_role(MainloopStorage<Config>& smem, int warpgroup, TraceBuffer*, Next&& next, Finish&& finish,
                   Deferred&& deferred = {}) {
  constexpr int NUM_PIECES = std::remove_reference_t<Deferred>::NUM_PIECES;
  StageCursor<Config::NUM_STAGES> stages;
  Work work;
  const auto first = [&] {
    const emulation::orders::UnusedReads unused;  // of the tile before, which there is not
    return next(&work);
  };
  bool has_work = first();
  while (has_work) {
    uint32_t sums[Config::BLOCK_N / 2] = {};
    Work next_work{};
    for (int k_step = work.k_begin; k_step < work.k_end; ++k_step) {
      mbarrier_wait(&smem.asked[stages.stage], stages.phase);
      multiply_stage(smem, stages.stage, work.row_end, sums);
      if constexpr (NUM_PIECES > 0) {
        if (k_step == work.k_begin) deferred.template store<0>();
      }
      if (k_step + 1 == work.k_end) has_work = next(&next_work);
      release_stage(smem, stages.stage);
      stages.advance();
    }
    float results[Config::BLOCK_N / 2];
    for (int i = 0; i < Config::BLOCK_N / 2; ++i) results[i] = static_cast<float>(sums[i] % 65536);
    finish(work, warpgroup, results);
    work = next_work;
  }
  deferred.flush();
}

template <class Config, class Produce, class Copy, class Consume>
void run_roles(int num_ctas, Produce&& produce, Copy&& copy, Consume&& consume) {
  const int warp = static_cast<int>(threadIdx.x / 32) - Config::NUM_CONSUMER_WARPS;
  if (warp < 0) {
    consume(0);
  } else if (warp == 0) {
    if (threadIdx.x % 32 == 0) produce();
  } else {
    copy(CopyWarp{warp - 1, num_ctas});
  }
}

// A launch whose CTAs, of shared memory in which something is left, run body(smem) each.
template <class Config, class Smem, class Body>
void run_ctas_of(int num_ctas, Body&& body) {
  std::vector<std::unique_ptr<Smem>> storage;
  for (int cta = 0; cta < num_ctas; ++cta) {
    storage.push_back(std::make_unique_for_overwrite<Smem>());
    std::memset(static_cast<void*>(storage.back().get()), 0xff, sizeof(Smem));
  }
  emulation::run_ctas(static_cast<unsigned>(num_ctas), Config::NUM_THREADS / 32,
                      [&] { body(*storage[blockIdx.x]); });
}

}  // namespace mk
