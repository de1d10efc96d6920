// SPDX-License-Identifier: MIT
// MoE GEMM + combine: the weighted sums of this rank's tokens over the rows that have come home, in fp32 and in
// the order of the experts.
#pragma once

#include "kernels/device/gemm_epilogue.cuh"
#include "kernels/ops/moe_gemm_combine/cuda_routes.cuh"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/tma.cuh"

namespace mk::moe_gemm_combine {

// 16 bytes of a row.
template <class Out>
struct Chunk {
  static constexpr int NUM_ELEMENTS = 16 / sizeof(Out);
  __device__ static void add(float (&sums)[NUM_ELEMENTS], const uint4& chunk, float weight) {
    const Out* elements = reinterpret_cast<const Out*>(&chunk);
#pragma unroll
    for (int i = 0; i < NUM_ELEMENTS; ++i) sums[i] = fmaf(weight, static_cast<float>(elements[i]), sums[i]);
  }
  __device__ static uint4 round(const float (&sums)[NUM_ELEMENTS]) {
    uint4 chunk;
    uint32_t* words = reinterpret_cast<uint32_t*>(&chunk);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Out) == 4) {
        words[i] = __float_as_uint(sums[i]);
      } else {
        words[i] = pack_pair<Out>(sums[2 * i], sums[2 * i + 1]);
      }
    }
    return chunk;
  }
};

// A token's rows, in the order of their experts: lane i has the i-th.
struct TokenRows {
  int count;
  uint32_t row;
  float weight;
};

// By a whole warp, of whose first `num_lanes` lanes each may have a row: in the order of their keys, which
// differ.
__device__ __forceinline__ TokenRows order_rows(int num_lanes, bool has_row, int key, uint32_t row,
                                                float weight) {
  const int lane = threadIdx.x % 32;
  if (!has_row) key = INT32_MAX;
  int place = 0;
#pragma unroll 1
  for (int k = 0; k < num_lanes; ++k) place += __shfl_sync(~0u, key, k) < key;
  TokenRows rows{__popc(__ballot_sync(~0u, has_row)), 0, 0};
#pragma unroll 1
  for (int i = 0; i < rows.count; ++i) {
    const int from = __ffs(__ballot_sync(~0u, has_row && place == i)) - 1;
    const uint32_t its_row = __shfl_sync(~0u, row, from & 31);
    const float its_weight = __shfl_sync(~0u, weight, from & 31);
    if (lane == i) {
      rows.row = its_row;
      rows.weight = its_weight;
    }
  }
  return rows;
}

// By a whole warp; waits for the rows. False: the launch is to end.
__device__ __forceinline__ bool find_rows(const RankLaunch& launch, const CudaParams& params,
                                          const Tables& tables, int64_t token, TokenRows* found) {
  const moe::CudaRouting& routing = params.routing;
  const int lane = threadIdx.x % 32;
  int expert = routing.experts;  // beyond all
  uint32_t slot = 0, row = 0;
  float weight = 0;
  bool is_there = true;
  if (lane < routing.topk) {
    const moe::RecordItem item = routing.items[token * routing.topk + lane];
    slot = static_cast<uint32_t>(item.slot);
    if (item.expert >= 0 && item.expert < routing.experts &&
        slot < tables.home_rows[item.expert + 1] - tables.home_rows[item.expert]) {
      expert = item.expert;
      weight = params.weights[token * routing.topk + lane];
      const int rank = expert / routing.experts_per_rank;
      AwaitedRow its;
      if (rank == routing.rank) {
        its = kept_row(routing, tables, expert, rank, slot);
      } else {
        const uint32_t block = tables.home_blocks[expert] + slot / moe::BLOCK_ROWS;
        its = {tables.home_rows[expert] + slot, params.first_flag + static_cast<int>(block), block};
      }
      row = its.row;
      is_there = launch.wait_flag(its.flag, DeviceRole::reduce, DeviceObject::row_block, rank, its.block);
    }
  }
  is_there = __all_sync(~0u, is_there);
  const bool has_row = expert < routing.experts;
  *found = order_rows(routing.topk, has_row, expert, row, weight);
  return is_there;
}

// What a warp sums at a time: a strip of some of a token's rows, two chunks a lane.
constexpr int STRIP_CHUNKS = 64;
constexpr int STRIP_BYTES = STRIP_CHUNKS * 16;
constexpr int ROWS_AT_A_TIME = 8;

// Part of a row, in strips.
struct Strips {
  int begin;
  int end;
};

__device__ __forceinline__ Strips all_strips(const CudaParams& params) {
  return {0, static_cast<int>((params.layout.row_bytes + STRIP_BYTES - 1) / STRIP_BYTES)};
}

// Shared memory through which a CTA's warps sum, when it has no other use. Loads into registers are held up by
// what shared memory leaves of the L1 cache: 22 GB/s an SM.
struct SumStorage {
  static constexpr int NUM_BUFFERS = 24;
  alignas(128) uint8_t buffers[NUM_BUFFERS][ROWS_AT_A_TIME][STRIP_BYTES];
  uint8_t barriers_before[256];  // a product's are still there
  uint64_t loaded[NUM_BUFFERS];
};

// By one thread, before a barrier of all.
__device__ __forceinline__ void sums_init(SumStorage& storage) {
  for (uint64_t& loaded : storage.loaded) ptx::mbarrier_init(&loaded, 1);
  ptx::fence_mbarrier_init_release_cluster();
}

// A warp's share of the buffers, one of `NUM_WARPS` warps, and how far it has come with them.
template <int NUM_WARPS>
class SumBuffers {
 public:
  static constexpr int NUM = SumStorage::NUM_BUFFERS / NUM_WARPS;

  __device__ SumBuffers(SumStorage& storage, int warp)
      : buffers_(storage.buffers + warp * NUM), loaded_(storage.loaded + warp * NUM) {}

  // By the whole warp. load(buffer, loaded) asks for what next() will wait for, NUM at a time.
  template <class Load>
  __device__ __forceinline__ void ask(Load&& load) {
    load(buffers_[asked_], &loaded_[asked_]);
    asked_ = asked_ + 1 == NUM ? 0 : asked_ + 1;
  }
  // The buffer that has come; after a __syncwarp() it may be asked for again.
  __device__ __forceinline__ const uint8_t (*next())[STRIP_BYTES] {
    const int buffer = next_;
    while (!ptx::mbarrier_try_wait_parity(&loaded_[buffer], phases_ >> buffer & 1)) {
    }
    phases_ ^= 1u << buffer;
    next_ = next_ + 1 == NUM ? 0 : next_ + 1;
    return buffers_[buffer];
  }

 private:
  uint8_t (*const buffers_)[ROWS_AT_A_TIME][STRIP_BYTES];
  uint64_t* const loaded_;
  uint32_t phases_ = 0;
  int asked_ = 0;
  int next_ = 0;
};

// Strips of some rows, strip by strip: the `strip`-th of ROWS_AT_A_TIME rows from the `row`-th on.
struct StripCursor {
  int strip;
  int row = 0;

  __device__ __forceinline__ void advance(int num_rows) {
    row += ROWS_AT_A_TIME;
    if (row < num_rows) return;
    row = 0;
    ++strip;
  }
};

template <class Out, class Buffers>
__device__ __forceinline__ void sum_rows(const CudaParams& params, const std::byte* home, const TokenRows& rows,
                                         const Strips& strips, std::byte* to, Buffers& buffers) {
  const int lane = threadIdx.x % 32;
  const auto row_bytes = static_cast<int>(params.layout.row_bytes);
  StripCursor asked{strips.begin};
  const auto ask = [&] {
    if (asked.strip >= strips.end) return;
    const int count = min(ROWS_AT_A_TIME, rows.count - asked.row);
    const int bytes = min(STRIP_BYTES, row_bytes - asked.strip * STRIP_BYTES);
    const uint32_t row = __shfl_sync(~0u, rows.row, (asked.row + lane) & 31);
    buffers.ask([&](uint8_t(*buffer)[STRIP_BYTES], uint64_t* loaded) {
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(loaded, count * bytes);
      __syncwarp();
      if (lane < count) {
        ptx::cp_async_bulk_shared_global(
            buffer[lane], home + int64_t{row} * row_bytes + asked.strip * STRIP_BYTES, bytes, loaded);
      }
    });
    asked.advance(rows.count);
  };
#pragma unroll 1
  for (int i = 0; i < Buffers::NUM; ++i) ask();
  constexpr int NUM = Chunk<Out>::NUM_ELEMENTS;
  float sums[2][NUM] = {};
#pragma unroll 1
  for (StripCursor at{strips.begin}; at.strip < strips.end; at.advance(rows.count)) {
    const uint8_t(*buffer)[STRIP_BYTES] = buffers.next();
    const int count = min(ROWS_AT_A_TIME, rows.count - at.row);
#pragma unroll
    for (int j = 0; j < ROWS_AT_A_TIME; ++j) {
      const float weight = __shfl_sync(~0u, rows.weight, (at.row + j) & 31);
      if (j >= count) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        Chunk<Out>::add(sums[half], ptx::ld_shared_v4(ptx::smem_address(buffer[j]) + half * 512 + lane * 16),
                        weight);
    }
    __syncwarp();
    ask();
    if (at.row + ROWS_AT_A_TIME < rows.count) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = at.strip * STRIP_BYTES + half * 512 + lane * 16;
      if (begin < row_bytes) *reinterpret_cast<uint4*>(to + begin) = Chunk<Out>::round(sums[half]);
      for (float& sum : sums[half]) sum = 0;
    }
  }
}

// By a whole warp that has seen the flags of its rows: a token's sum, or some strips of it, to the row at `to`;
// its rows are numbered from `rows_begin` on.
template <class Buffers>
__device__ __forceinline__ void sum_token(const CudaParams& params, const std::byte* rows_begin,
                                          const TokenRows& rows, const Strips& strips, std::byte* to,
                                          Buffers& buffers) {
  // The bulk copy engine is another proxy than the loads that saw the flags.
  ptx::fence_proxy_async_global();
  __syncwarp();
  if (params.products.out_type == GemmType::bf16) {
    sum_rows<__nv_bfloat16>(params, rows_begin, rows, strips, to, buffers);
  } else if (params.products.out_type == GemmType::fp16) {
    sum_rows<__half>(params, rows_begin, rows, strips, to, buffers);
  } else {
    sum_rows<float>(params, rows_begin, rows, strips, to, buffers);
  }
}

// One of `num_warps`: takes this rank's tokens one by one, or parts of them where there are fewer than warps,
// so that no warp has all of a token's strips to wait for. find(token, &rows) waits for a token's rows; false:
// the launch is to end.
template <class Buffers, class Find>
__device__ __forceinline__ void sum_tokens(const RankLaunch& launch, const CudaParams& params, int num_warps,
                                           Buffers&& buffers, Find&& find) {
  const int lane = threadIdx.x % 32;
  const std::byte* home = launch.area(params.comm.rank, params.layout.home_row(0));
  const int64_t tokens = params.routing.tokens;
  const int num_strips = all_strips(params).end;
  const bool is_few = tokens < num_warps;
  const int num_parts = is_few ? min(num_strips, num_warps / max(1, static_cast<int>(tokens))) : 1;
  const int part_strips = (num_strips + num_parts - 1) / num_parts;
  const auto take_ticket = [&] {
    return lane == 0 ? static_cast<uint32_t>(atomicAdd(&launch.progress().gather_ticket, 1u)) : 0;
  };
  uint32_t ticket = take_ticket();
#pragma unroll 1
  while (true) {
    const uint32_t unit = __shfl_sync(~0u, ticket, 0);
    const int64_t token = unit / num_parts;
    if (token >= tokens) return;
    if (!is_few) ticket = take_ticket();  // ahead of its time; of few, it would be another warp's
    const int begin = static_cast<int>(unit % num_parts) * part_strips;
    TokenRows rows;
    if (!find(token, &rows)) return;
    const Tracer tracer(params.comm.trace, trace_track());
    const uint64_t start = tracer.now();
    sum_token(params, home, rows, {begin, min(begin + part_strips, num_strips)},
              params.y + token * params.y_pitch, buffers);
    tracer.record(TraceKind::reduce, start, static_cast<uint32_t>(token));
    if (is_few) ticket = take_ticket();
  }
}

}  // namespace mk::moe_gemm_combine
