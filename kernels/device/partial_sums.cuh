// SPDX-License-Identifier: MIT
// Partial tiles on their way to the rank that sums them: in the order of the accumulators, so that both ends
// read and write whole lines without a transposition. The sum is in fp32, in the order of ranks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "kernels/device/gemm_epilogue.cuh"
#include "kernels/device/host_device.h"

namespace mk {

// A slab is a warp's 16 rows of a tile; a tile is its slabs one after another. A chunk of 16 bytes holds
// consecutive accumulators of a lane; chunk i of all lanes is followed by chunk i + 1.
template <int BLOCK_N>
MK_HOST_DEVICE constexpr int slab_bytes(int element_bytes) {
  return 16 * BLOCK_N * element_bytes;
}

template <class T>
struct PartialChunk {
  static constexpr int NUM = 8;
  __device__ static __forceinline__ uint4 pack(const float* a) {
    return make_uint4(pack_pair<T>(a[0], a[1]), pack_pair<T>(a[2], a[3]), pack_pair<T>(a[4], a[5]),
                      pack_pair<T>(a[6], a[7]));
  }
  __device__ static __forceinline__ void add(float* a, uint4 chunk) {
    add_pair<T>(a, chunk.x);
    add_pair<T>(a + 2, chunk.y);
    add_pair<T>(a + 4, chunk.z);
    add_pair<T>(a + 6, chunk.w);
  }
};
template <>
struct PartialChunk<float> {
  static constexpr int NUM = 4;
  __device__ static __forceinline__ uint4 pack(const float* a) {
    return make_uint4(__float_as_uint(a[0]), __float_as_uint(a[1]), __float_as_uint(a[2]),
                      __float_as_uint(a[3]));
  }
  __device__ static __forceinline__ void add(float* a, uint4 chunk) {
    a[0] += __uint_as_float(chunk.x);
    a[1] += __uint_as_float(chunk.y);
    a[2] += __uint_as_float(chunk.z);
    a[3] += __uint_as_float(chunk.w);
  }
};

template <class T, int N>
__device__ __forceinline__ void store_slab_as(const float (&accumulators)[N], std::byte* slab) {
  uint4* chunks = reinterpret_cast<uint4*>(slab) + threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < N / PartialChunk<T>::NUM; ++i) {
    chunks[32 * i] = PartialChunk<T>::pack(accumulators + i * PartialChunk<T>::NUM);
  }
}

// A warp's rows to `slab`, which may be a peer's.
template <int N>
__device__ __forceinline__ void store_slab(const float (&accumulators)[N], GemmType type, std::byte* slab) {
  if (type == GemmType::bf16) {
    store_slab_as<__nv_bfloat16>(accumulators, slab);
  } else if (type == GemmType::fp16) {
    store_slab_as<__half>(accumulators, slab);
  } else {
    store_slab_as<float>(accumulators, slab);
  }
}

// The same slab of every source, in this rank's memory.
struct PartialSlabs {
  const std::byte* first;  // source 0's
  int64_t slot_bytes;      // from source to source
  int nranks;
};

// Accumulators [first, first + N) of a warp's slab, summed.
template <class T, int N>
__device__ __forceinline__ void sum_slabs_as(float (&sums)[N], const PartialSlabs& slabs, int first) {
  constexpr int NUM = PartialChunk<T>::NUM;
  constexpr int CHUNKS = N / NUM;
  constexpr int SOURCES = 4;  // read together
  const std::byte* lane = slabs.first + first / NUM * 512 + threadIdx.x % 32 * 16;
#pragma unroll
  for (int i = 0; i < N; ++i) sums[i] = 0.0f;
#pragma unroll 1
  for (int group = 0; group < slabs.nranks; group += SOURCES) {
    uint4 chunks[SOURCES][CHUNKS];
#pragma unroll
    for (int s = 0; s < SOURCES; ++s) {
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        chunks[s][j] = make_uint4(0, 0, 0, 0);
        if (group + s < slabs.nranks)
          chunks[s][j] =
              __ldcg(reinterpret_cast<const uint4*>(lane + (group + s) * slabs.slot_bytes + j * 512));
      }
    }
#pragma unroll
    for (int s = 0; s < SOURCES; ++s) {
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) PartialChunk<T>::add(sums + j * NUM, chunks[s][j]);
    }
  }
}

template <class T, int BLOCK_N>
__device__ __forceinline__ void sum_slab_as(const PartialSlabs& slabs, std::byte* to) {
  constexpr int COLUMNS = BLOCK_N % 64 == 0 ? 64 : 32;
  constexpr int NUM = PartialChunk<T>::NUM;
#pragma unroll 1
  for (int begin = 0; begin < BLOCK_N; begin += COLUMNS) {
    float sums[COLUMNS / 2];
    sum_slabs_as<T>(sums, slabs, begin / 2);
    uint4* chunks = reinterpret_cast<uint4*>(to + begin / 2 / NUM * 512) + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2 / NUM; ++i) chunks[32 * i] = PartialChunk<T>::pack(sums + i * NUM);
  }
}

// Sums a warp's slab, rounded once, to a slab of the same kind.
template <int BLOCK_N>
__device__ __forceinline__ void sum_slab(const PartialSlabs& slabs, GemmType comm_type, std::byte* to) {
  if (comm_type == GemmType::bf16) {
    sum_slab_as<__nv_bfloat16, BLOCK_N>(slabs, to);
  } else if (comm_type == GemmType::fp16) {
    sum_slab_as<__half, BLOCK_N>(slabs, to);
  } else {
    sum_slab_as<float, BLOCK_N>(slabs, to);
  }
}

// Rounds to the output's type, with the bias added, which is then done.
template <int N>
__device__ __forceinline__ void round_result(float (&sums)[N], EpilogueParams& output, int column) {
  if (output.bias != nullptr) add_bias(sums, output, column + threadIdx.x % 4 * 2);
  output.bias = nullptr;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (output.out_type == GemmType::bf16) sums[i] = __bfloat162float(__float2bfloat16(sums[i]));
    if (output.out_type == GemmType::fp16) sums[i] = __half2float(__float2half(sums[i]));
  }
}

// Columns that are summed at a time, from memory alone: the accumulators are free by then, and registers serve
// to have many loads in flight.
template <int BLOCK_N>
constexpr int SUM_COLUMNS = BLOCK_N % 64 == 0 ? 64 : 32;

// The sums of SUM_COLUMNS columns to `to`; `row`, `row_end`, `column` as for store_tile_rows. `rounds_first`:
// before it adds to C, the all-reduce rounds, so that all ranks add the same.
template <int N>
__device__ __forceinline__ void store_sums(float (&sums)[N], EpilogueParams to, bool rounds_first,
                                           EpilogueBuffers<1>& buffers, int row, int row_end, int column) {
  if (rounds_first && to.accumulate) round_result(sums, to, column);
  store_tile_rows(sums, to, buffers, row, row_end, column);
}

// Sums SUM_COLUMNS columns of a warp's slab, from `begin` on.
template <int BLOCK_N>
__device__ __forceinline__ void sum_columns(float (&sums)[SUM_COLUMNS<BLOCK_N> / 2], const PartialSlabs& slabs,
                                            GemmType comm_type, int begin) {
  if (comm_type == GemmType::bf16) {
    sum_slabs_as<__nv_bfloat16>(sums, slabs, begin / 2);
  } else if (comm_type == GemmType::fp16) {
    sum_slabs_as<__half>(sums, slabs, begin / 2);
  } else {
    sum_slabs_as<float>(sums, slabs, begin / 2);
  }
}

// The same, stored as `output` says, but to `num_copies` places: place(i, &output).
template <int BLOCK_N, class Place>
__device__ __forceinline__ void finish_columns(const PartialSlabs& slabs, GemmType comm_type,
                                               const EpilogueParams& output, int num_copies, const Place& place,
                                               EpilogueBuffers<1>& buffers, int row, int row_end, int column,
                                               int begin) {
  float sums[SUM_COLUMNS<BLOCK_N> / 2];
  sum_columns<BLOCK_N>(sums, slabs, comm_type, begin);
  EpilogueParams to = output;
  // Copies get the bias once.
  if (num_copies > 1) round_result(sums, to, column + begin);
#pragma unroll 1
  for (int i = 0; i < num_copies; ++i) {
    place(i, &to);
    store_tile_rows(sums, to, buffers, row, row_end, column + begin);
  }
}

// 16-bit partials of at most two sources, in pieces of SUM_COLUMNS columns. A lane has 16 loads of 16 bytes in
// flight: two pieces', and then the next one's while a piece is stored.
template <int BLOCK_N>
class SlabPieces {
  static constexpr int SOURCES = 2;
  static constexpr int LOADS = 16;
  static constexpr int CHUNKS = SUM_COLUMNS<BLOCK_N> / 16;  // of a source
  static constexpr int SIZE = SOURCES * CHUNKS;             // of a piece

 public:
  static constexpr int NUM = BLOCK_N / SUM_COLUMNS<BLOCK_N>;

  __device__ __forceinline__ explicit SlabPieces(const PartialSlabs& slabs) : slabs_(slabs) {
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) load(i, i);
  }

  // Of piece `number`; they are taken one after the other.
  template <class T>
  __device__ __forceinline__ void take_sums(float (&sums)[8 * CHUNKS], int number) {
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) PartialChunk<T>::add(sums + i % CHUNKS * 8, chunks_[i]);
#pragma unroll
    for (int i = SIZE; i < TOGETHER * SIZE; ++i) chunks_[i - SIZE] = chunks_[i];
    if (number + TOGETHER < NUM) load(TOGETHER - 1, number + TOGETHER);
  }

 private:
  static constexpr int TOGETHER = NUM * SIZE < LOADS ? NUM : LOADS / SIZE;

  __device__ __forceinline__ void load(int place, int number) {
    const std::byte* lane = slabs_.first + number * CHUNKS * 512 + threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
      const int source = i / CHUNKS;
      chunks_[place * SIZE + i] = make_uint4(0, 0, 0, 0);
      if (source < slabs_.nranks)
        chunks_[place * SIZE + i] =
            __ldcg(reinterpret_cast<const uint4*>(lane + source * slabs_.slot_bytes + i % CHUNKS * 512));
    }
  }

  const PartialSlabs slabs_;
  uint4 chunks_[TOGETHER * SIZE];
};

// Sums all columns of a warp's slab.
template <int BLOCK_N>
__device__ __forceinline__ void finish_slab(const PartialSlabs& slabs, GemmType comm_type,
                                            const EpilogueParams& output, bool rounds_first,
                                            EpilogueBuffers<1>& buffers, int row, int row_end, int column) {
  float sums[SUM_COLUMNS<BLOCK_N> / 2];
  if (comm_type == GemmType::fp32 || slabs.nranks > 2) {
#pragma unroll 1
    for (int begin = 0; begin < BLOCK_N; begin += SUM_COLUMNS<BLOCK_N>) {
      sum_columns<BLOCK_N>(sums, slabs, comm_type, begin);
      store_sums(sums, output, rounds_first, buffers, row, row_end, column + begin);
    }
    return;
  }
  using Pieces = SlabPieces<BLOCK_N>;
  Pieces pieces(slabs);
#pragma unroll 1
  for (int piece = 0; piece < Pieces::NUM; ++piece) {
    if (comm_type == GemmType::bf16) {
      pieces.template take_sums<__nv_bfloat16>(sums, piece);
    } else {
      pieces.template take_sums<__half>(sums, piece);
    }
    store_sums(sums, output, rounds_first, buffers, row, row_end, column + piece * SUM_COLUMNS<BLOCK_N>);
  }
}

}  // namespace mk
