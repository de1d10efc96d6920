// SPDX-License-Identifier: MIT
// The first phase of both mixture-of-experts kernels, before their CTAs part into roles. Some CTAs count this
// rank's rows for every expert; the last of them sends the counts to all ranks. Every CTA waits for the counts
// of all ranks and decides for itself, all alike. No number goes by way of the host.
#pragma once

#include "kernels/device/rank_launch.cuh"
#include "kernels/ops/moe_routing/cuda_params.h"
#include "kernels/ops/moe_routing/data_error.h"

namespace mk::moe {

// Shared memory of the first phase.
template <int NUM_THREADS>
struct CountingStorage {
  static constexpr int NUM_WARPS = NUM_THREADS / 32;
  static constexpr int MAX_BLOCK_WORDS = sizeof(CountsHead) / 4 + 2 * CUDA_MAX_EXPERTS + 4 * MAX_GPU_RANKS + 4;
  uint32_t taken[NUM_WARPS][CUDA_MAX_EXPERTS];  // rows of the warp's items so far, by expert
  alignas(16) uint32_t block[MAX_BLOCK_WORDS];
  bool is_last;
};

// What a CTA knows at the end of it.
struct RoutingDecision {
  Verdict verdict;
  bool has_counts;  // false: the launch ends early
};

__device__ __forceinline__ int64_t expert_at(const CudaRouting& routing, int64_t item) {
  if (routing.reads_record) return routing.items[item].expert;
  return routing.has_wide_indices ? static_cast<const int64_t*>(routing.topk_idx)[item]
                                  : static_cast<const int32_t*>(routing.topk_idx)[item];
}

// The k of a (token, k). There are fewer than 2^32, and a division by 64 bits takes ten times as long.
__device__ __forceinline__ int choice_of(const CudaRouting& routing, int64_t item) {
  return static_cast<int>(static_cast<uint32_t>(item) % static_cast<uint32_t>(routing.topk));
}

// The expert of a (token, k); -1: none, or not one that can be.
__device__ __forceinline__ int checked_expert(const CudaRouting& routing, LaunchProgress& progress,
                                              int64_t item) {
  const int64_t expert = expert_at(routing, item);
  bool is_good = expert >= -1 && expert < routing.experts;
  if (is_good && expert >= 0) {
    const int k = choice_of(routing, item);
    for (int before = 1; before <= k; ++before) {
      is_good = is_good && expert_at(routing, item - before) != expert;
    }
  }
  if (is_good) return static_cast<int>(expert);
  atomicMax(reinterpret_cast<unsigned long long*>(&progress.fault), ~static_cast<unsigned long long>(item));
  return -1;
}

// A warp numbers the items [begin, end) among those of the same expert_of(item), beyond what `taken` counts
// already; -1: not at all. visit(item, expert, number).
template <class ExpertOf, class Visit>
__device__ __forceinline__ void number_by_expert(uint32_t* taken, int64_t begin, int64_t end,
                                                 ExpertOf&& expert_of, Visit&& visit) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int64_t first = begin; first < end; first += 32) {
    const int64_t item = first + lane;
    const int expert = item < end ? expert_of(item) : -1;
    const unsigned same = __match_any_sync(~0u, expert);
    const int before = __popc(same & ((1u << lane) - 1));
    const uint32_t number = expert >= 0 ? taken[expert] + before : 0;
    __syncwarp();
    if (expert >= 0 && before == 0) taken[expert] += __popc(same);
    __syncwarp();
    if (item < end) visit(item, expert, number);
  }
}

// All items. A token's experts differ, so items of an expert follow each other as their tokens do.
template <class Visit>
__device__ __forceinline__ void number_items(const CudaRouting& routing, LaunchProgress& progress,
                                             uint32_t* taken, int64_t begin, int64_t end, Visit&& visit) {
  number_by_expert(
      taken, begin, end, [&](int64_t item) { return checked_expert(routing, progress, item); }, visit);
}

// The items of a counting CTA's warp.
template <int NUM_THREADS>
struct WarpItems {
  int64_t begin;
  int64_t end;
  __device__ explicit WarpItems(const CudaRouting& routing) {
    const int64_t num_warps = int64_t{routing.num_counting_ctas} * (NUM_THREADS / 32);
    const int64_t warp = int64_t{blockIdx.x} * (NUM_THREADS / 32) + threadIdx.x / 32;
    const int64_t per_warp = ceil_div(routing.num_items(), num_warps * 32) * 32;
    begin = min_of(routing.num_items(), warp * per_warp);
    end = min_of(routing.num_items(), begin + per_warp);
  }
};

// Rows that each counting CTA has for each expert, in this rank's device memory.
__device__ __forceinline__ uint32_t* cta_rows(const RankComm& comm, const CudaRouting& routing, int cta) {
  return reinterpret_cast<uint32_t*>(comm.staging) + cta * routing.experts;
}

__device__ inline CountsHead make_head(const CudaRouting& routing, LaunchProgress& progress, bool is_usable) {
  CountsHead head{};
  head.tokens = routing.tokens;
  head.row_capacity = routing.row_capacity;
  head.has_record = routing.reads_record;
  const uint64_t fault = ptx::ld_relaxed_gpu(&progress.fault);
  if (!is_usable) {
    head.fault = static_cast<int32_t>(Fault::bad_record);
  } else if (routing.combines && !routing.has_rows && routing.record->num_rows > 0) {
    head.fault = static_cast<int32_t>(Fault::no_rows);
    head.value = routing.record->num_rows;
  } else if (fault != 0) {
    const auto item = static_cast<int64_t>(~fault);
    head.value = expert_at(routing, item);
    head.token = static_cast<int32_t>(item / routing.topk);
    head.k = static_cast<int32_t>(item % routing.topk);
    const bool is_expert = head.value >= -1 && head.value < routing.experts;
    head.fault = static_cast<int32_t>(is_expert ? Fault::duplicate : Fault::bad_index);
  }
  return head;
}

// What is counted beside rows: in one node, nothing. All functions are called by all threads of a counting CTA.
struct RowsAlone {
  __device__ void clear() const {}
  __device__ void count(int64_t, int64_t) const {}  // the warp's items
  __device__ void publish() const {}
  __device__ void add_up(uint32_t*) const {}
};

// The last counting CTA adds up what all have counted and sends it to all ranks of the node, itself among them.
template <int NUM_THREADS, class Beside>
__device__ void send_counts(const RankLaunch& launch, const RankComm& comm, const CudaRouting& routing,
                            CountingStorage<NUM_THREADS>& smem, bool is_usable, const Beside& beside) {
  const int num_words = routing.block_bytes / 4;
  auto* numbers = smem.block + sizeof(CountsHead) / 4;
  for (int i = threadIdx.x; i < num_words; i += NUM_THREADS) smem.block[i] = 0;
  __syncthreads();
  if (threadIdx.x == 0)
    *reinterpret_cast<CountsHead*>(smem.block) = make_head(routing, launch.progress(), is_usable);
  __syncthreads();
  if (reinterpret_cast<const CountsHead*>(smem.block)->fault == 0) {
    for (int expert = threadIdx.x; expert < routing.experts; expert += NUM_THREADS) {
      uint32_t rows = 0;
#pragma unroll 8
      for (int cta = 0; cta < routing.num_counting_ctas; ++cta)
        rows += __ldcg(cta_rows(comm, routing, cta) + expert);
      numbers[expert] = rows;
    }
    for (int local = threadIdx.x; routing.reads_record && local < routing.num_experts(routing.rank);
         local += NUM_THREADS) {
      numbers[routing.received_at + local] = RecordView{routing.record}.expert_counts()[local];
    }
    __syncthreads();
    for (int rank = threadIdx.x; rank < routing.nranks; rank += NUM_THREADS) {
      uint32_t rows = 0;
      for (int expert = routing.first_expert(rank); expert < routing.first_expert(rank + 1); ++expert)
        rows += numbers[expert];
      numbers[routing.rank_rows_at + rank] = rows;
    }
    beside.add_up(numbers);
    __syncthreads();
  }
  for (int step = 0; step < comm.order.num_local; ++step) {
    const int peer = comm.order.rank_at[step];
    auto* to = reinterpret_cast<uint32_t*>(launch.area(peer, size_t{1} * routing.rank * routing.block_bytes));
    for (int i = threadIdx.x; i < num_words; i += NUM_THREADS) to[i] = smem.block[i];
  }
  __syncthreads();
  for (int step = threadIdx.x; step < comm.order.num_local; step += NUM_THREADS)
    launch.raise_flag(comm.order.rank_at[step], routing.rank);
  __syncwarp();  // before a lane waits for what another raises
}

// By a counting CTA, all threads. Leaves in smem.taken what each warp has.
template <int NUM_THREADS, class Beside = RowsAlone>
__device__ void count_rows(const RankLaunch& launch, const RankComm& comm, const CudaRouting& routing,
                           CountingStorage<NUM_THREADS>& smem, const Beside& beside = {}) {
  constexpr int NUM_WARPS = NUM_THREADS / 32;
  const bool is_usable =
      !routing.reads_record || record_usable(routing.record, routing.record_bytes, routing.record_layout(),
                                             routing.nranks, routing.rank, routing.experts);
  for (int i = threadIdx.x; i < NUM_WARPS * CUDA_MAX_EXPERTS; i += NUM_THREADS) (&smem.taken[0][0])[i] = 0;
  beside.clear();
  __syncthreads();
  if (is_usable) {
    const WarpItems<NUM_THREADS> items(routing);
    number_items(routing, launch.progress(), smem.taken[threadIdx.x / 32], items.begin, items.end,
                 [](int64_t, int, uint32_t) {});
    beside.count(items.begin, items.end);
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < routing.experts; expert += NUM_THREADS) {
    uint32_t rows = 0;
#pragma unroll
    for (int warp = 0; warp < NUM_WARPS; ++warp) rows += smem.taken[warp][expert];
    __stcg(cta_rows(comm, routing, blockIdx.x) + expert, rows);
  }
  beside.publish();
  __syncthreads();
  if (threadIdx.x == 0) {
    smem.is_last = ptx::atom_acq_rel_gpu_add(&launch.progress().num_counted, 1) + 1 ==
                   static_cast<uint32_t>(routing.num_counting_ctas);
  }
  __syncthreads();
  if (smem.is_last) send_counts(launch, comm, routing, smem, is_usable, beside);
}

// The CTA whose warp 0 meets the other ranks: the last, which counts nothing where there are few tokens, and
// whose word to the host holds up nobody.
__device__ __forceinline__ bool greets() { return blockIdx.x == gridDim.x - 1; }

// By warp 0 of every CTA: false when the launch is to end without the counts. Entries first: counts of a rank
// that launched something else are none.
__device__ inline bool await_counts(const RankLaunch& launch, const CudaRouting& routing) {
  bool is_open = launch.wait_all_entered();
  for (int source = threadIdx.x % 32; is_open && source < routing.nranks; source += 32) {
    is_open = launch.wait_flag(source, DeviceRole::receive, DeviceObject::counts, source, source);
  }
  return __all_sync(~0u, is_open);
}

// By a whole warp: Routing::examine() and decide(), in parallel. bytes_of(rank, rows received, rows sent) is
// what a rank's part of the launch takes of a bank; each lane has its rank's.
template <class BytesOf>
__device__ Verdict decide(const CudaRouting& routing, const Counts& counts, size_t bank_bytes,
                          BytesOf&& bytes_of) {
  const int lane = threadIdx.x % 32;
  const bool is_rank = lane < routing.nranks;
  Verdict verdict;
  const unsigned faults = __ballot_sync(~0u, is_rank && counts.head(lane).fault != 0);
  int64_t received = 0, sent = 0, capacity = 0;
  if (is_rank) {
    capacity = counts.head(lane).row_capacity;
    for (int other = 0; other < routing.nranks; ++other) {
      received += counts.rank_rows(other, lane);
      sent += counts.rank_rows(lane, other);
    }
  }
  const unsigned full = __ballot_sync(~0u, is_rank && received > capacity);
  const size_t bytes = is_rank ? bytes_of(lane, received, sent) : 0;
  const unsigned large = __ballot_sync(~0u, bytes > bank_bytes);
  int differing = routing.experts;
  for (int expert = lane; expert < routing.experts && differing == routing.experts; expert += 32) {
    const int owner = expert / routing.experts_per_rank;
    if (counts.head(owner).has_record == 0) continue;
    uint32_t rows = 0;
    for (int source = 0; source < routing.nranks; ++source) rows += counts.expert_rows(source, expert);
    if (rows != counts.received(owner, expert - routing.first_expert(owner))) differing = expert;
  }
  differing = __reduce_min_sync(~0u, differing);
  int64_t most = received;
  for (int distance = 16; distance > 0; distance /= 2) {
    const int64_t other = __shfl_xor_sync(~0u, most, distance);
    if (other > most) most = other;
  }
  if (faults != 0) {
    verdict.kind = Verdict::fault;
    verdict.rank = __ffs(faults) - 1;
  } else if (full != 0) {
    verdict.kind = Verdict::capacity;
    verdict.rank = __ffs(full) - 1;
    verdict.needed = most;
    verdict.available = __shfl_sync(~0u, capacity, verdict.rank);
  } else if (differing < routing.experts) {
    verdict.kind = Verdict::records_differ;
    verdict.rank = differing / routing.experts_per_rank;
    verdict.expert = differing;
    for (int source = 0; source < routing.nranks; ++source)
      verdict.needed += counts.expert_rows(source, differing);
    verdict.available = counts.received(verdict.rank, differing - routing.first_expert(verdict.rank));
  } else if (large != 0) {
    verdict.kind = Verdict::workspace;
    verdict.rank = __ffs(large) - 1;
    verdict.needed =
        static_cast<int64_t>(__shfl_sync(~0u, static_cast<unsigned long long>(bytes), verdict.rank));
    verdict.available = static_cast<int64_t>(bank_bytes);
  }
  return verdict;
}

// By warp 0 of every CTA, which tells the others.
template <class BytesOf>
__device__ __forceinline__ void await_decision(const RankLaunch& launch, const RankComm& comm,
                                               const CudaRouting& routing, RoutingDecision& decision,
                                               BytesOf&& bytes_of) {
  const bool has_counts = await_counts(launch, routing);
  Verdict verdict;
  if (has_counts) {
    verdict = decide(routing, Counts(routing, launch.area(routing.rank, 0)), comm.bank_bytes, bytes_of);
  }
  if (threadIdx.x == 0) decision = {verdict, has_counts};
}

// The first phase up to the verdict, by every CTA, all threads.
template <int NUM_THREADS, class BytesOf>
__device__ void route(const RankLaunch& launch, const RankComm& comm, const CudaRouting& routing,
                      CountingStorage<NUM_THREADS>& smem, RoutingDecision& decision, BytesOf&& bytes_of) {
  if (greets() && threadIdx.x < 32) launch.enter();
  if (static_cast<int>(blockIdx.x) < routing.num_counting_ctas) count_rows(launch, comm, routing, smem);
  if (threadIdx.x < 32) {
    if (greets()) launch.wait_entries();
    await_decision(launch, comm, routing, decision, bytes_of);
  }
  __syncthreads();
}

// The end of the first phase, by every CTA, all threads: true when the roles are to begin. `smem`'s memory is
// theirs then.
__device__ inline bool finish_routing(const RankLaunch& launch, const RankComm& comm,
                                      const CudaRouting& routing, const RoutingDecision& decision) {
  // What generic accesses have left there, TMA may overwrite.
  ptx::fence_proxy_async_shared_cta();
  __syncthreads();
  const bool goes_on = decision.has_counts && decision.verdict.kind == Verdict::go;
  if (threadIdx.x == 0) {
    ptx::red_release_gpu_add(&launch.progress().num_routed, 1);
    if (blockIdx.x == 0 && decision.has_counts && !goes_on) {
      // An error ends all waits: not before every CTA has its verdict.
      while (ptx::ld_acquire_gpu(&launch.progress().num_routed) < gridDim.x) __nanosleep(POLL_PAUSE_NS);
      if (launch.report(DEVICE_DATA, DeviceRole::receive, DeviceObject::counts, decision.verdict.rank, 0)) {
        const Counts counts(routing, launch.area(routing.rank, 0));
        *reinterpret_cast<DataError*>(comm.mailbox->error.details) = {
            decision.verdict, counts.head(decision.verdict.rank), routing.experts, routing.topk};
        launch.publish_error();
      }
    }
  }
  return goes_on;
}

// Waits until all CTAs have done their part, whose stores the calling thread then sees.
__device__ __forceinline__ void wait_routed(const RankLaunch& launch) {
  while (ptx::ld_acquire_gpu(&launch.progress().num_routed) < gridDim.x) __nanosleep(POLL_PAUSE_NS);
}

// In place: each value becomes the sum of those before it, modulo 2^32, and values[count] that of all. By a
// whole warp.
__device__ inline void exclusive_scan(uint32_t* values, int count) {
  const int lane = threadIdx.x % 32;
  uint32_t carry = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane;
    const uint32_t value = i < count ? values[i] : 0;
    uint32_t sum = value;
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (i < count) values[i] = carry + sum - value;
    carry += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) values[count] = carry;
  __syncwarp();
}

}  // namespace mk::moe
