// SPDX-License-Identifier: MIT
// A rank as the CUDA executor has it, on a GPU that is not there.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "../transport/harness.h"
#include "kernels/cuda/cuda_rank.h"

namespace mk::test {

// While these programs ran, with a sanitizer and without, a machine has stood still for 59 and 68 s: what only
// waits for others waits longer.
constexpr int64_t kPatienceMs = 300000;

class EmulatedGpu {
 public:
  explicit EmulatedGpu(Rank& rank) : rank_(rank) {
    rank.timeout = std::chrono::milliseconds(kPatienceMs);
    rank.abort.on_raise([stop = stop_] {
      std::lock_guard lock(stop->mutex);
      if (stop->gpu != nullptr) stop->gpu->set_abort();
    });
  }
  // What the GPU's watcher reports to goes after it.
  ~EmulatedGpu() {
    set_stop(nullptr);
    gpu_.reset();
  }

  Status set_up(int num_ctas, size_t bank_bytes, int64_t wait_timeout_ms = kPatienceMs) {
    EndpointOptions options;
    options.fifo_capacity = 16;
    options.idle = {std::chrono::microseconds(0), std::chrono::microseconds(200)};
    MK_RETURN_IF_ERROR(rank_.connect(std::move(options)));
    mk_comm_config_t config = MK_COMM_CONFIG_INIT;
    config.wait_timeout_ms = wait_timeout_ms;
    context_.emplace(ExecutorContext{rank_.topology,
                                     rank_.exchange,
                                     rank_.abort,
                                     rank_.endpoint.get(),
                                     config,
                                     {},
                                     {},
                                     [this](const mk_async_error_t& error, const std::string& sentence) {
                                       std::lock_guard lock(mutex_);
                                       error_ = error;
                                       sentence_ = sentence;
                                     },
                                     {},
                                     {},
                                     {}});
    auto made = CudaRank::make(*context_, 0, {num_ctas, {}}, Deadline::after(rank_.timeout));
    if (!made.ok()) return made.status();
    gpu_ = made.take();
    set_stop(gpu_.get());
    return add_arena(bank_bytes);
  }
  // Which launches then use.
  Status add_arena(size_t bank_bytes) {
    const auto arena = gpu_->add_arena(bank_bytes, Deadline::after(rank_.timeout));
    if (!arena.ok()) return arena.status();
    arena_ = arena.value();
    return {};
  }

  RankComm comm() const { return gpu_->comm(arena_); }
  // Place in this rank's bank of a launch.
  std::byte* area(uint64_t epoch, size_t offset) const {
    return comm().memory[rank_.rank] + arena_.offset + static_cast<size_t>(bank_of(epoch)) * arena_.bank_bytes +
           offset;
  }
  Rank& rank() { return rank_; }
  CudaRank& gpu() { return *gpu_; }

  // What the rank has reported, after a look.
  mk_async_error_t error() {
    gpu_->look();
    std::lock_guard lock(mutex_);
    return error_;
  }
  std::string sentence() {
    gpu_->look();
    std::lock_guard lock(mutex_);
    return sentence_;
  }
  uint64_t epoch() const { return gpu_->epoch(); }
  bool is_idle() const { return gpu_->idle(); }
  // Is all that the next launch counts at 0?
  bool is_clean() const {
    const LaunchState& state = *comm().state;
    const bool counts = std::all_of(std::begin(state.counts), std::end(state.counts),
                                    [](uint32_t count) { return count == 0; });
    const LaunchProgress& next = state.progress[bank_of(epoch() + 1)];
    return counts && state.num_inside == 0 && state.num_near == 0 && next.failed == 0 && next.fault == 0 &&
           next.push_ticket == 0 && next.late_push_ticket == 0 && next.gather_ticket == 0 &&
           next.tile_ticket == 0 && next.num_counted == 0 && next.num_routed == 0;
  }

 private:
  // What an abort of the rank stops; the token may outlive this object.
  struct Stop {
    std::mutex mutex;
    CudaRank* gpu = nullptr;
  };
  void set_stop(CudaRank* gpu) {
    std::lock_guard lock(stop_->mutex);
    stop_->gpu = gpu;
    if (gpu != nullptr && rank_.abort.raised()) gpu->set_abort();
  }

  Rank& rank_;
  const std::shared_ptr<Stop> stop_ = std::make_shared<Stop>();
  std::optional<ExecutorContext> context_;
  std::unique_ptr<CudaRank> gpu_;
  CudaRank::Arena arena_{};
  std::mutex mutex_;
  mk_async_error_t error_ = MK_ASYNC_ERROR_INIT;
  std::string sentence_;
};

// What a launch leaves behind; "" when it is as it should be.
inline std::string state_after(EmulatedGpu& gpu, const RankComm& comm, uint64_t epoch) {
  if (const std::string sentence = gpu.sentence(); !sentence.empty()) return sentence + "; ";
  MK_EXPECT(gpu.epoch() == epoch && gpu.is_idle());
  MK_EXPECT(gpu.is_clean());
  MK_EXPECT(gpu.rank().endpoint->completed() == comm.network.queue.state->head);
  return "";
}

}  // namespace mk::test
