// SPDX-License-Identifier: MIT
// Spans that a toy kernel's roles record come out on the host: all of them, in order, nested, at the right
// time; those beyond the capacity are counted; captured launches record in their replays, and nothing after the
// end. So do the plain product's. Exit code 1 if anything fails, 77 without a GPU.
#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <map>
#include <string>

#include "kernels/cuda/cuda_trace.h"
#include "kernels/device/trace.cuh"
#include "kernels/gemm/gemm.h"

using mk::Trace;
using mk::TraceKind;
using mk::Tracer;
using mk::TraceSpan;
using mk::TraceTrack;

namespace {

int failed = 0;

void check(bool condition, const std::string& what) {
  if (condition) return;
  ++failed;
  std::printf("FAILED: %s (%s)\n", what.c_str(), cudaGetErrorString(cudaGetLastError()));
}

constexpr int kCtas = 6;
constexpr int kThreads = 384;
constexpr int kTiles = 5;
constexpr uint64_t kStepNs = 4000;

struct Params {
  mk::TraceBuffer* trace;
  uint64_t epoch;
  int64_t shape[4];
};

__device__ void pass(uint64_t ns) {
  const uint64_t since = mk::ptx::globaltimer();
  while (mk::ptx::globaltimer() < since + ns) {
  }
}

// Two consumer warpgroups, then a producer thread and three copy warps.
__global__ void __launch_bounds__(kThreads) toy_kernel(const __grid_constant__ Params params) {
  if (threadIdx.x == 0) mk::trace_enter(params.trace, params.epoch, 1, params.shape);
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  const int warp = threadIdx.x % 128 / 32;
  for (int tile = 0; tile < kTiles; ++tile) {
    if (warpgroup < 2) {
      const Tracer tracer(params.trace, mk::TRACE_COMPUTE + warpgroup);
      tracer.begin(TraceKind::compute, tile);
      pass(kStepNs);
      tracer.end();
      tracer.begin(TraceKind::store, tile, blockIdx.x);
      pass(kStepNs / 4);
      tracer.end();
    } else if (warp == 0) {
      const Tracer tracer(params.trace, mk::TRACE_LOAD);
      tracer.begin(TraceKind::load, tile);
      const uint64_t start = tracer.now();
      pass(kStepNs / 2);
      tracer.record(TraceKind::wait, start, tile, 3);
      pass(kStepNs / 2);
      tracer.end();
    } else {
      const Tracer tracer(params.trace, mk::TRACE_COPY + warp - 1);
      tracer.begin(TraceKind::copy, tile, warp);
      pass(kStepNs);
      tracer.end();
    }
  }
  if (warpgroup == 0) {
    const Tracer tracer(params.trace, mk::TRACE_COMPUTE);
    tracer.begin(TraceKind::compute);  // there is no tile left
    tracer.cancel();
  }
  __syncthreads();
  if (threadIdx.x == 0) mk::trace_leave(params.trace);
}

void launch(const mk::CudaTrace* trace, uint64_t epoch, cudaStream_t stream) {
  toy_kernel<<<kCtas, kThreads, 0, stream>>>({trace ? trace->buffer() : nullptr, epoch, {64, 128, 256, 0}});
}

std::unique_ptr<mk::CudaTrace> make(int64_t max_spans) {
  auto made = mk::CudaTrace::make(kCtas, max_spans);
  check(made.ok(), "CudaTrace::make: " + made.status().sentence());
  return made.ok() ? made.take() : nullptr;
}

Trace collect(mk::CudaTrace& trace) {
  auto collected = trace.collect();
  check(collected.ok(), "collect: " + collected.status().sentence());
  return collected.ok() ? collected.take() : Trace();
}

uint64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void check_track(const TraceTrack& track, const Trace& trace, size_t launches) {
  const bool is_load = track.name.find("load") != std::string::npos;
  const bool is_compute = track.name.find("compute") != std::string::npos;
  check(track.spans.size() == launches * kTiles * (is_load || is_compute ? 2 : 1),
        track.name + ": every span is there");
  uint64_t outer_end = 0;
  for (size_t i = 0; i < track.spans.size(); ++i) {
    const TraceSpan& span = track.spans[i];
    const bool is_inner = is_load && i % 2 == 1;
    const uint64_t ns = span.end_ns - span.start_ns;
    const uint64_t expected = span.kind == TraceKind::store  ? kStepNs / 4
                              : span.kind == TraceKind::wait ? kStepNs / 2
                                                             : kStepNs;
    // The device's clock may be as coarse as a microsecond, of which a span of it has one more or less.
    check(ns + 1100 >= expected && ns <= expected + 3000,
          track.name + ": " + mk::trace_kind_name(span.kind) + " took " + std::to_string(ns) + " ns");
    check(is_inner ? span.end_ns <= outer_end : span.start_ns >= outer_end, track.name + ": in order, nested");
    if (!is_inner) outer_end = span.end_ns;
    check(span.index == static_cast<int64_t>(is_load || is_compute ? i / 2 : i) % kTiles,
          track.name + ": index");
    bool inside = false;
    for (const mk::TraceLaunch& launch : trace.launches) {
      inside = inside || (launch.epoch == span.epoch && span.start_ns + 1100 >= launch.start_ns &&
                          span.end_ns <= launch.end_ns + 1100);
    }
    check(inside, track.name + ": inside its launch");
  }
}

void check_spans() {
  const auto trace = make(64);
  if (!trace) return;
  launch(nullptr, 1, nullptr);
  check(cudaDeviceSynchronize() == cudaSuccess, "without a trace");
  const uint64_t before = steady_ns();
  for (uint64_t epoch = 7; epoch < 10; ++epoch) launch(trace.get(), epoch, nullptr);
  check(cudaDeviceSynchronize() == cudaSuccess, "traced launches");
  const uint64_t after = steady_ns();
  const Trace seen = collect(*trace);
  check(seen.launches.size() == 3 && seen.dropped_launches == 0, "three launches");
  for (size_t i = 0; i < seen.launches.size(); ++i) {
    const mk::TraceLaunch& launch = seen.launches[i];
    check(launch.epoch == 7 + i && launch.op == MK_OPERATOR_ALLGATHER_GEMM &&
              launch.sizes == "m=64, n=128, k=256",
          "the launch's record");
    // Within what the comparison of the clocks leaves open.
    check(launch.start_ns + 5000 >= before && launch.end_ns <= after + 5000, "the host's clock agrees");
    if (i > 0) check(launch.start_ns + 1100 >= seen.launches[i - 1].end_ns, "one launch after the other");
  }
  check(seen.tracks.size() == kCtas * 6, "six roles a CTA");
  for (const TraceTrack& track : seen.tracks) {
    check(track.dropped == 0, track.name + ": nothing is missing");
    check_track(track, seen, 3);
  }
}

void check_overflow() {
  const auto trace = make(3);
  if (!trace) return;
  for (uint64_t epoch = 1; epoch <= 4; ++epoch) launch(trace.get(), epoch, nullptr);
  check(cudaDeviceSynchronize() == cudaSuccess, "launches beyond the capacity");
  const Trace seen = collect(*trace);
  check(seen.launches.size() == 3 && seen.dropped_launches == 1, "three launches of four");
  for (const TraceTrack& track : seen.tracks) {
    const bool single = track.name.find("copy") != std::string::npos;
    check(track.spans.size() == 3 && track.dropped == 4u * kTiles * (single ? 1 : 2) - 3,
          track.name + ": the rest is counted");
  }
}

// Every tile of a plain product is loaded, multiplied and stored once, and nothing without a trace.
void check_product(const mk::GemmShape& shape, const mk::GemmPlan& plan) {
  const std::string what = "product of " + std::to_string(plan.block_m) + "x" + std::to_string(plan.block_n) +
                           (plan.is_swapped ? " swapped" : "") + (plan.in_clusters() ? " in clusters" : "") +
                           ", split among " + std::to_string(plan.num_split_ctas) + ": ";
  auto made = mk::CudaTrace::make(plan.num_ctas(), 64);
  check(made.ok() && mk::gemm_prepare() == cudaSuccess, what + "prepare");
  if (!made.ok()) return;
  void* memory = nullptr;
  const size_t bytes = size_t{1104} * 1104 * 2;
  check(cudaMalloc(&memory, 3 * bytes) == cudaSuccess && cudaMemset(memory, 0, 3 * bytes) == cudaSuccess,
        what + "memory");
  mk::GemmArguments arguments;
  arguments.shape = shape;
  arguments.a = memory, arguments.lda = 320;
  arguments.b = static_cast<char*>(memory) + bytes, arguments.ldb = 1104;
  arguments.c = static_cast<char*>(memory) + 2 * bytes, arguments.ldc = 1104;
  arguments.workspace = memory;
  check(mk::gemm_launch(arguments, plan, nullptr) == cudaSuccess, what + "without a trace");
  arguments.trace = {made.value()->buffer(), 3, MK_OPERATOR_GEMM_ALLREDUCE, {shape.m, shape.n, shape.k, 0}};
  check(mk::gemm_launch(arguments, plan, nullptr) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess,
        what + "with one");
  const Trace seen = collect(*made.value());
  check(seen.launches.size() == 1 && seen.launches[0].epoch == 3 &&
            seen.launches[0].op == MK_OPERATOR_GEMM_ALLREDUCE &&
            seen.launches[0].sizes ==
                "m=" + std::to_string(shape.m) + ", n=" + std::to_string(shape.n) + ", k=320",
        what + "one launch");
  std::map<std::pair<TraceKind, int64_t>, int> counts;
  for (const TraceTrack& track : seen.tracks) {
    check(track.dropped == 0, what + track.name + ": nothing is missing");
    for (const TraceSpan& span : track.spans) ++counts[{span.kind, span.index}];
  }
  const int64_t num_tiles = mk::gemm_plan_num_tiles(shape, plan) * plan.cluster.m * plan.cluster.n;
  check(static_cast<int64_t>(counts.size()) == 3 * num_tiles, what + "three kinds of spans a tile");
  // Both warpgroups have a part in a tile but in ping-pong, and all CTAs that it is split among.
  const int warpgroups = plan.ping_pong || plan.block_m == 64 ? 1 : 2;
  for (const auto& [span, count] : counts) {
    const int expected = (span.first == TraceKind::load ? 1 : warpgroups) * plan.num_split_ctas;
    check(count == expected,
          what + mk::trace_kind_name(span.first) + " of tile " + std::to_string(span.second));
  }
  cudaFree(memory);
}

// A trace begins, is read and ends while a stream is captured in the strictest mode.
void check_captured() {
  cudaStream_t stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check(cudaStreamCreate(&stream) == cudaSuccess, "a stream");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess, "a capture begins");
  const auto trace = make(64);
  if (!trace) return;
  launch(trace.get(), 5, stream);
  check(collect(*trace).launches.empty(), "a captured launch is none yet");
  check(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "the capture is still valid");
  check(cudaGraphInstantiate(&replay, graph, 0) == cudaSuccess, "instantiate");
  for (int i = 0; i < 2; ++i) cudaGraphLaunch(replay, stream);
  check(cudaStreamSynchronize(stream) == cudaSuccess, "replays");
  check(collect(*trace).launches.size() == 2, "every replay is there");
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace

int main() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return 77;
  check_spans();
  check_overflow();
  check_captured();
  mk::GemmShape shape;
  shape.m = 1000, shape.n = 1100, shape.k = 320;
  for (const mk::GemmTile& tile :
       {mk::GEMM_TILES[0], mk::GEMM_TILES[1], mk::GemmTile{128, 128, true}, mk::GemmTile{64, 128, false}})
    check_product(shape, mk::gemm_plan_with(shape, 7, tile, -1));
  for (const mk::GemmTile& tile : mk::GEMM_SPLIT_TILES)
    check_product(shape, mk::gemm_split_plan_with(shape, tile, 3));
  for (const int num_split_ctas : {1, 2})
    check_product(shape, mk::gemm_pair_plan_with(shape, mk::GEMM_PAIR_TILES[0], num_split_ctas));
  // All clusters' tiles lie within the product.
  shape.m = 416, shape.n = 1024;
  check_product(shape, mk::gemm_plan_with(shape, 14, mk::GemmTile{128, 128, true, {1, 2}}, -1));
  check_product(shape, mk::gemm_swapped_cluster_plan_with(shape, {128, 208, {4, 1}}, 1));
  check_product(shape, mk::gemm_swapped_plan_with(shape, 3, {128, 104, {1, 2}}, -1));
  std::printf(failed ? "%d checks failed\n" : "all checks passed\n", failed);
  return failed != 0;
}
