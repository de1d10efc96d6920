// SPDX-License-Identifier: MIT
#include "kernels/cuda/cuda_trace.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <vector>

#include "kernels/cuda/cuda_error.h"
#include "kernels/cuda/device_trace.h"
#include "lib/deadline.h"

namespace mk {
namespace {

template <class Clock>
int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

}  // namespace

Result<std::unique_ptr<CudaTrace>> CudaTrace::make(int num_ctas, int64_t max_spans) {
  const BesideCaptures beside;
  std::unique_ptr<CudaTrace> trace(new CudaTrace(num_ctas, max_spans));
  MK_RETURN_IF_ERROR(trace->allocate());
  return trace;
}

// Stream-ordered: neither allocation nor release waits for kernels of other communicators on this device, which
// may wait for ranks that this thread has yet to launch.
Status CudaTrace::allocate() {
  MK_RETURN_IF_ERROR(
      cuda_error(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating the trace's stream"));
  MK_RETURN_IF_ERROR(cuda_error(cudaMallocAsync(reinterpret_cast<void**>(&memory_), layout_.bytes(), stream_),
                                "allocating the trace"));
  MK_RETURN_IF_ERROR(
      cuda_error(cudaHostAlloc(reinterpret_cast<void**>(&exchange_), sizeof *exchange_, cudaHostAllocMapped),
                 "allocating pinned host memory"));
  std::vector<std::byte> first(layout_.first_bytes());
  std::memcpy(first.data(), &layout_, sizeof layout_);
  empty_tracks(layout_, first.data(), memory_);
  MK_RETURN_IF_ERROR(
      cuda_error(cudaMemcpyAsync(memory_, first.data(), first.size(), cudaMemcpyHostToDevice, stream_),
                 "starting the trace"));
  return cuda_error(cudaStreamSynchronize(stream_), "starting the trace");
}

CudaTrace::~CudaTrace() {
  const BesideCaptures beside;
  if (memory_ != nullptr) cudaFreeAsync(memory_, stream_);
  if (stream_ != nullptr) {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  if (exchange_ != nullptr) cudaFreeHost(exchange_);
}

Result<Trace> CudaTrace::collect() {
  const BesideCaptures beside;
  std::vector<std::byte> image(layout_.bytes());
  const auto fetch = [&](size_t begin, size_t end, const char* what) -> Status {
    if (begin == end) return {};
    return cuda_error(
        cudaMemcpyAsync(image.data() + begin, memory_ + begin, end - begin, cudaMemcpyDeviceToHost, stream_),
        what);
  };
  MK_RETURN_IF_ERROR(fetch(0, layout_.first_bytes(), "reading the trace"));
  MK_RETURN_IF_ERROR(cuda_error(cudaStreamSynchronize(stream_), "reading the trace"));
  // Of each track what there is: most of the spans' memory is usually untouched.
  for (int cta = 0; cta < static_cast<int>(layout_.num_ctas); ++cta) {
    for (int track = 0; track < NUM_TRACE_TRACKS; ++track) {
      DeviceTrack state;
      std::memcpy(&state, image.data() + layout_.track(cta, track), sizeof state);
      const uint32_t kept = layout_.max_spans - std::min(state.room, layout_.max_spans);
      MK_RETURN_IF_ERROR(
          fetch(layout_.span(cta, track, 0), layout_.span(cta, track, kept), "reading the trace"));
    }
  }
  MK_RETURN_IF_ERROR(cuda_error(cudaStreamSynchronize(stream_), "reading the trace"));
  return convert_device_trace(layout_, image.data(), clock_offset_ns());
}

// The answer that came back soonest lies at most half its way from the middle: within a microsecond. A polling
// thread is what makes it so; it is over in a fraction of a millisecond.
int64_t CudaTrace::clock_offset_ns() {
  // A device without room for the kernel now: its clock and the system's count from the same moment, roughly.
  const int64_t rough = now_ns<std::chrono::steady_clock>() - now_ns<std::chrono::system_clock>();
  std::memset(static_cast<void*>(exchange_), 0, sizeof *exchange_);
  if (answer_clock(exchange_, stream_) != cudaSuccess) return rough;
  std::atomic_ref<uint32_t> asked(exchange_->asked);
  std::atomic_ref<uint32_t> answered(exchange_->answered);
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(200));
  std::optional<int64_t> shortest;
  int64_t offset = rough;
  for (uint32_t turn = 1; turn <= ClockExchange::kTurns; ++turn) {
    const int64_t before = now_ns<std::chrono::steady_clock>();
    asked.store(turn, std::memory_order_release);
    while (answered.load(std::memory_order_acquire) < turn) {
      if (!deadline.passed()) continue;
      asked.store(ClockExchange::kTurns + 1, std::memory_order_release);
      stays_ = true;  // the kernel comes later, and reads the exchange
      return offset;
    }
    const int64_t after = now_ns<std::chrono::steady_clock>();
    if (shortest && after - before >= *shortest) continue;
    shortest = after - before;
    offset =
        before + (after - before) / 2 -
        static_cast<int64_t>(std::atomic_ref<uint64_t>(exchange_->device_ns).load(std::memory_order_relaxed));
  }
  cudaStreamSynchronize(stream_);
  return offset;
}

}  // namespace mk
