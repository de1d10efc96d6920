// SPDX-License-Identifier: MIT
// What a launch over packed sequences begins with: cu_seqlens is in device memory, and what follows from it
// every CTA has to know before its roles begin. The first CTA looks whether it is right; the one that meets the
// other ranks makes the entry's hash; one CTA a rank writes that rank's part of the table of rows; all wait for
// these. One rank alone needs no table, and each CTA looks by itself. Behind that, what the pushes need.
#pragma once

#include "kernels/device/rank_launch.cuh"
#include "kernels/ops/ring_attention/cu_seqlens.h"
#include "kernels/ops/ring_attention/cuda_packed_params.h"
#include "kernels/ops/ring_attention/cuda_push.cuh"
#include "kernels/ptx/tensor_map.cuh"

namespace mk::ring_attention {

// Of cu_seqlens and the table of rows: in shared memory, if they fit. A tile begins with dozens of these loads
// one behind the other, and who waits for turns or flags empties the L1 cache.
constexpr int MOST_NEAR_ENTRIES = 3072;

template <class Params_, int NUM_THREADS_>
struct PackedStorage {
  using Params = Params_;
  static constexpr int NUM_THREADS = NUM_THREADS_;
  static constexpr int NUM_WARPS = NUM_THREADS / 32;
  alignas(128) CUtensorMap maps[Params::NUM_MAPS];
  Params params;
  int fault;  // the first entry of cu_seqlens that is wrong; -1: none
  int sums[NUM_WARPS];
  uint64_t hashes[NUM_WARPS];               // or other sums of 64 bits
  int32_t near_entries[MOST_NEAR_ENTRIES];  // cu_seqlens, then the table of rows, of one rank the same
};

// The first entry that is wrong, or -1, and the hash, for thread 0 of the CTA.
template <class Storage>
__device__ inline void look_at_cu_seqlens(const PackedSlices& slices, Storage& smem, int* fault,
                                          uint64_t* hash) {
  const int warp = threadIdx.x / 32;
  int first = slices.num_sequences + 1;
  uint64_t sum = 0;
  for (int64_t at = threadIdx.x; at <= slices.num_sequences; at += Storage::NUM_THREADS) {
    const int index = static_cast<int>(at);
    sum += hash_of_entry(index, slices.cu_seqlens[index]);
    if (!is_good_entry(slices.cu_seqlens, index, slices.num_sequences, slices.seq)) first = least(first, index);
  }
  first = __reduce_min_sync(~0u, first);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  if (threadIdx.x % 32 == 0) {
    smem.sums[warp] = first;
    smem.hashes[warp] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int other = 1; other < Storage::NUM_WARPS; ++other) {
      first = least(first, smem.sums[other]);
      sum += smem.hashes[other];
    }
    *fault = first <= slices.num_sequences ? first : -1;
    *hash = sum;
  }
  __syncthreads();
}

// A rank's part of the table.
template <class Storage>
__device__ inline void write_row_begins(const PackedSlices& slices, int rank, int32_t* begins, Storage& smem) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (!slices.zigzag) {
    for (int64_t at = threadIdx.x; at <= slices.num_sequences; at += Storage::NUM_THREADS)
      begins[at] = slices.slice_rows_before(rank, slices.cu_seqlens[at]);
    return;
  }
  int carry = 0;
  for (int64_t first = 0; first < slices.num_sequences; first += Storage::NUM_THREADS) {
    const int64_t at = first + threadIdx.x;
    const int rows = at < slices.num_sequences ? slices.share_rows(rank, static_cast<int>(at)) : 0;
    int sum = rows;  // of this lane's and those before it
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == 31) smem.sums[warp] = sum;
    __syncthreads();
    int before = carry;
    for (int other = 0; other < Storage::NUM_WARPS; ++other) {
      if (other < warp) before += smem.sums[other];
      carry += smem.sums[other];
    }
    if (at < slices.num_sequences) begins[at] = before + sum - rows;
    __syncthreads();
  }
  if (threadIdx.x == 0) begins[slices.num_sequences] = carry;
}

// By all threads of a CTA: the table of rows, which CTAs write together, and what the first one has found
// wrong.
template <class Arguments, class Storage>
__device__ inline void share_row_begins(const Arguments& arguments, Storage& smem, int fault) {
  const RankComm& comm = arguments.params.comm;
  const PackedSlices& slices = arguments.params.tiles.slices;
  auto* const table = reinterpret_cast<int32_t*>(comm.staging + arguments.table_offset);
  for (int rank = blockIdx.x; rank < comm.nranks; rank += gridDim.x) {
    write_row_begins(slices, rank, table + static_cast<size_t>(rank) * (slices.num_sequences + 1), smem);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  LaunchProgress& progress = RankLaunch(comm).progress();
  if (fault >= 0) ptx::st_relaxed_gpu(&progress.fault, ~static_cast<uint64_t>(fault));
  const uint32_t num_writers = least(comm.nranks, static_cast<int>(gridDim.x));
  if (blockIdx.x < num_writers) ptx::red_release_gpu_add(&progress.num_counted, 1);
  while (ptx::ld_acquire_gpu(&progress.num_counted) < num_writers) __nanosleep(POLL_PAUSE_NS);
  const uint64_t found = ptx::ld_relaxed_gpu(&progress.fault);
  if (found != 0) smem.fault = static_cast<int>(~found);
  smem.params.tiles.slices.row_begins = table;
}

// By all threads of a CTA: brings what rows are looked up in to shared memory, if it fits.
template <class Storage>
__device__ inline void bring_near(Storage& smem) {
  PackedSlices& slices = smem.params.tiles.slices;
  const int num_bounds = slices.num_sequences + 1;
  const int first_row_begin = slices.nranks == 1 ? 0 : num_bounds;
  const int64_t num_entries = first_row_begin + int64_t{slices.nranks} * num_bounds;
  if (num_entries > MOST_NEAR_ENTRIES) return;
  for (int i = threadIdx.x; i < num_entries; i += Storage::NUM_THREADS)
    smem.near_entries[i] = i < num_bounds ? slices.cu_seqlens[i] : slices.row_begins[i - num_bounds];
  __syncthreads();
  if (threadIdx.x == 0) {
    slices.cu_seqlens = smem.near_entries;
    slices.row_begins = smem.near_entries + first_row_begin;
  }
  __syncthreads();
}

// By a warp: maps that end with the rank's last row, since what lies behind it may not be read. In device
// memory, where each CTA has room of its own.
template <class Arguments, class Storage>
__device__ inline void make_packed_maps(const Arguments& arguments, Storage& smem, int rows) {
  constexpr int NUM_MAPS = Storage::Params::NUM_MAPS;
  static_assert(sizeof(CUtensorMap) == 32 * 4 && NUM_MAPS <= MOST_PACKED_MAPS);
  auto* const room =
      reinterpret_cast<CUtensorMap*>(arguments.params.comm.staging + blockIdx.x * PACKED_MAP_BYTES);
  const int lane = threadIdx.x % 32;
  for (int map = 0; map < NUM_MAPS; ++map) {
    reinterpret_cast<uint32_t*>(&smem.maps[map])[lane] =
        reinterpret_cast<const uint32_t*>(&arguments.maps[map])[lane];
    __syncwarp();
    if (lane == 0) {
      ptx::tensormap_replace_global_dim_1(&smem.maps[map], most(rows, 1));
      if (arguments.heads_first) {
        ptx::tensormap_replace_global_stride_1(&smem.maps[map],
                                               static_cast<uint64_t>(most(rows, 1)) * smem.params.dim * 2);
      }
      smem.params.maps[map] = room + map;
    }
    __syncwarp();
    ptx::tensormap_cp_fenceproxy_release_gpu(room + map, &smem.maps[map]);
  }
}

// The first CTA meets the other ranks, or, between nodes, the one that has the network.
template <class Params>
__device__ __forceinline__ bool greets() {
  return blockIdx.x == (HasNodes<Params> ? gridDim.x - 1 : 0);
}

// By every CTA, all threads: fills smem.params in. False: there is nothing to do, or smem.fault is wrong.
// settle(params, rows): by one thread, what else follows from the number of this rank's rows.
template <class Arguments, class Storage, class Settle>
__device__ inline bool begin_packed(const Arguments& arguments, Storage& smem, Settle&& settle) {
  using Params = typename Storage::Params;
  static_assert(sizeof(Params) % 4 == 0);
  const RankComm& comm = arguments.params.comm;
  const PackedSlices& slices = arguments.params.tiles.slices;
  for (size_t word = threadIdx.x; word < sizeof(Params) / 4; word += Storage::NUM_THREADS) {
    reinterpret_cast<uint32_t*>(&smem.params)[word] =
        reinterpret_cast<const uint32_t*>(&arguments.params)[word];
  }
  __syncthreads();
  const bool is_alone = comm.nranks == 1;
  int fault = -1;
  if (is_alone || blockIdx.x == 0 || greets<Params>()) {
    uint64_t hash = 0;
    look_at_cu_seqlens(slices, smem, &fault, &hash);
    if (threadIdx.x == 0) smem.params.comm.entry.modes[1] = hash;
  }
  if (threadIdx.x == 0) smem.fault = is_alone && !arguments.is_empty ? fault : -1;
  if (arguments.is_empty) {
    __syncthreads();
    return false;
  }
  if (is_alone) {
    if (threadIdx.x == 0) smem.params.tiles.slices.row_begins = slices.cu_seqlens;
  } else {
    share_row_begins(arguments, smem, fault);
  }
  __syncthreads();
  if (smem.fault >= 0) return false;
  bring_near(smem);
  const int rows = smem.params.tiles.slices.rows(comm.rank);
  if (threadIdx.x == 0) {
    settle(smem.params, rows);
    for (int map = 0; map < Params::NUM_MAPS; ++map) smem.params.maps[map] = &arguments.maps[map];
  }
  if (arguments.rows_are_known) {
    __syncthreads();
    return true;
  }
  __syncwarp();
  if (threadIdx.x < 32) make_packed_maps(arguments, smem, rows);
  __syncthreads();
  for (int map = 0; map < Params::NUM_MAPS; ++map)
    ptx::fence_proxy_tensormap_acquire_gpu(smem.params.maps[map]);
  return true;
}

// By a warp that has met the other ranks: if cu_seqlens is wrong, and everywhere the same, says so.
template <class Storage>
__device__ inline void report_fault(const RankLaunch& launch, const Storage& smem) {
  const auto& params = smem.params;
  if (smem.fault < 0 || threadIdx.x % 32 != 0 || launch.stopped()) return;
  const PackedSlices& slices = params.tiles.slices;
  if (launch.report(DEVICE_DATA, DeviceRole::entry, DeviceObject::entry, -1, smem.fault)) {
    *reinterpret_cast<CuSeqlensFault*>(params.comm.mailbox->error.details) =
        fault_of(slices.cu_seqlens, smem.fault, slices.num_sequences, slices.seq);
    launch.publish_error();
  }
}

// By a warp: meets the other ranks of a node.
template <class Storage>
__device__ inline void greet_packed(const Storage& smem) {
  const RankLaunch launch(smem.params.comm);
  launch.greet();
  report_fault(launch, smem);
}

// ------------------------------------------------------- what the pushes need

template <IsPacked Params>
__device__ __forceinline__ const CUtensorMap* key_map(const Params& params, bool value) {
  return params.maps[value ? PACKED_V : PACKED_K];
}
template <class Config, class Params>
__device__ __forceinline__ bool receiver_needs(const Params&, const PackedPanelUnit& unit, int peer) {
  return (unit.needed_by >> peer & 1) != 0;
}

}  // namespace mk::ring_attention
