// SPDX-License-Identifier: MIT
// Operators on a GPU. So far for communicators of one rank, where every GEMM operator is the plain product: one
// persistent kernel a call.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

#include "kernels/executor.h"
#include "kernels/flight_recorder.h"
#include "kernels/gemm/gemm.h"

namespace mk {

class CudaExecutor : public Executor {
 public:
  CudaExecutor(ExecutorContext context, int device, int num_sms);
  ~CudaExecutor() override;

  mk_device_t device() const override { return MK_DEVICE_CUDA; }
  int cuda_device() const override { return device_; }
  int num_threads() const override { return 0; }
  Result<mk_plan_t> plan(const OperatorCall& call) const override;
  bool prepared(const OperatorCall&) const override { return workspace_ != nullptr; }
  Status prepare(const OperatorCall& call, Deadline deadline) override;
  size_t workspace_bytes() const override { return workspace_ ? max_workspace_bytes() : 0; }
  Result<std::unique_ptr<SymmetricMemory>> make_memory(Deadline deadline) override;
  Status enqueue(const OperatorCall& call, mk_stream_t stream) override;
  Result<bool> capturing(mk_stream_t stream) override;
  Status synchronize(mk_stream_t stream) override;
  uint64_t epoch() const override { return epoch_; }
  void set_epoch(uint64_t epoch) override { epoch_ = epoch; }
  uint64_t signals_sent(int) const override { return 0; }
  uint64_t signals_received() const override { return 0; }
  void rebase_signals() override {}
  size_t flight_record(mk_flight_entry_t* entries, size_t capacity) const override {
    return flight_.copy(entries, capacity);
  }
  void wake() override {}
  bool wait_idle(Deadline) override { return true; }

 private:
  size_t max_workspace_bytes() const;
  Status enqueue_on_device(const GemmCall& call, cudaStream_t stream);

  const ExecutorContext context_;
  const int device_;
  const int num_sms_;  // that a launch may use
  void* workspace_ = nullptr;
  std::atomic<uint64_t> epoch_{0};
  FlightRecorder flight_;
};

}  // namespace mk
