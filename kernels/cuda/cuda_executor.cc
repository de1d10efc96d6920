// SPDX-License-Identifier: MIT
#include "kernels/cuda/cuda_executor.h"

#include <algorithm>

#include "kernels/device/gemm_partials_layout.h"
#include "kernels/protocol.h"
#include "lib/symmetric_memory.h"

namespace mk {
namespace {

Status cuda_error(cudaError_t error, const char* what) {
  return Status(MK_ERROR_CUDA, format("%s: %s: %s", what, cudaGetErrorName(error), cudaGetErrorString(error)));
}

// Makes a device current and puts the caller's back.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) error_ = cudaSetDevice(device);
    changed_ = error_ == cudaSuccess && before_ != device;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_;
};

constexpr GemmType gemm_type(mk_dtype_t dtype) {
  return dtype == MK_DTYPE_FP32 ? GemmType::fp32 : dtype == MK_DTYPE_FP16 ? GemmType::fp16 : GemmType::bf16;
}

GemmShape shape_of(const GemmCall& call) {
  GemmShape shape;
  shape.m = call.m;
  shape.n = call.n;
  shape.k = call.k;
  shape.in_type = gemm_type(call.dtype);
  shape.out_type = gemm_type(call.out_dtype);
  shape.b_transposed = call.b_layout == MK_LAYOUT_NK;
  return shape;
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, name, device) == cudaSuccess ? value : 0;
}

bool is_hopper(int device) {
  return attribute(cudaDevAttrComputeCapabilityMajor, device) == 9 &&
         attribute(cudaDevAttrComputeCapabilityMinor, device) == 0;
}

}  // namespace

CudaExecutor::CudaExecutor(ExecutorContext context, int device, int num_sms)
    : context_(std::move(context)), device_(device), num_sms_(num_sms) {}

CudaExecutor::~CudaExecutor() {
  if (workspace_ == nullptr) return;
  const CurrentDevice current(device_);
  cudaFree(workspace_);
}

// The most that any plan for this number of SMs asks for: the largest tile, cut for every SM.
size_t CudaExecutor::max_workspace_bytes() const { return PartialsLayout(num_sms_, 128, 256).num_bytes; }

Result<mk_plan_t> CudaExecutor::plan(const OperatorCall& any) const {
  if (!std::holds_alternative<GemmCall>(any)) {
    return Status(MK_ERROR_UNSUPPORTED, format("mk_%s is not built for GPUs yet; use MK_DEVICE_HOST",
                                               operator_name(operator_of(any))));
  }
  const auto& call = std::get<GemmCall>(any);
  if (call.mode == MK_ALLGATHER_WGRAD) {
    return Status(MK_ERROR_UNSUPPORTED,
                  "mk_allgather_gemm: mode MK_ALLGATHER_WGRAD is not built for GPUs yet; use MK_DEVICE_HOST");
  }
  const GemmPlan chosen = gemm_plan(shape_of(call), num_sms_);
  mk_plan_t plan = MK_PLAN_INIT;
  plan.compute_ctas = chosen.num_ctas();
  plan.tile_m = chosen.block_m;
  plan.tile_n = chosen.block_n;
  plan.workspace_bytes = max_workspace_bytes();
  plan.prepared = prepared(call) ? 1 : 0;
  return plan;
}

Status CudaExecutor::prepare(const OperatorCall&, Deadline) {
  if (workspace_ != nullptr) return {};
  const CurrentDevice current(device_);
  if (current.error() != cudaSuccess) return cuda_error(current.error(), "cudaSetDevice");
  if (const cudaError_t error = gemm_prepare(); error != cudaSuccess)
    return cuda_error(error, "loading the kernels");
  void* workspace = nullptr;
  cudaError_t error = cudaMalloc(&workspace, max_workspace_bytes());
  if (error == cudaErrorMemoryAllocation) {
    return Status(MK_ERROR_OUT_OF_MEMORY,
                  format("device %d: no memory for %zu bytes of workspace", device_, max_workspace_bytes()));
  }
  if (error == cudaSuccess) error = cudaMemset(workspace, 0, max_workspace_bytes());
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) return cuda_error(error, "allocating the workspace");
  workspace_ = workspace;
  return {};
}

Result<std::unique_ptr<SymmetricMemory>> CudaExecutor::make_memory(Deadline deadline) {
  return make_cuda_symmetric_memory(context_.topology, context_.exchange, context_.abort, device_, deadline);
}

Result<bool> CudaExecutor::capturing(mk_stream_t stream) {
  const CurrentDevice current(device_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &status); error != cudaSuccess) {
    return cuda_error(error, "cudaStreamIsCapturing");
  }
  return status != cudaStreamCaptureStatusNone;
}

Status CudaExecutor::enqueue(const OperatorCall& call, mk_stream_t stream) {
  const CurrentDevice current(device_);
  if (current.error() != cudaSuccess) return cuda_error(current.error(), "cudaSetDevice");
  const uint64_t epoch = ++epoch_;
  flight_.record(epoch, call, FlightRecorder::running);
  Status status = enqueue_on_device(std::get<GemmCall>(call), stream);
  if (!status.ok()) flight_.record(epoch, call, FlightRecorder::failed);
  return status;
}

Status CudaExecutor::enqueue_on_device(const GemmCall& call, cudaStream_t stream) {
  if (call.a_gathered != nullptr && call.m > 0 && call.k > 0) {
    // With one rank the gathered A is a copy, made by the copy engine beside the kernel's own node.
    const cudaError_t error = cudaMemcpy2DAsync(call.a_gathered, call.lda_gathered * 2, call.a, call.lda * 2,
                                                call.k * 2, call.m, cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return cuda_error(error, "copying the gathered A");
  }
  GemmArguments arguments;
  arguments.shape = shape_of(call);
  arguments.a = call.a;
  arguments.lda = std::max(call.lda, round_up(call.k, 8));
  arguments.b = call.b;
  arguments.ldb = std::max(call.ldb, round_up(call.b_layout == MK_LAYOUT_KN ? call.n : call.k, 8));
  arguments.c = call.c;
  arguments.ldc = std::max(call.ldc, call.n);
  arguments.accumulate = call.accumulate;
  arguments.bias = call.bias;
  arguments.bias_type = gemm_type(call.bias_dtype);
  arguments.workspace = workspace_;
  const cudaError_t error = gemm_launch(arguments, gemm_plan(arguments.shape, num_sms_), stream);
  return error == cudaSuccess ? Status() : cuda_error(error, operator_name(call.op));
}

Status CudaExecutor::synchronize(mk_stream_t stream) {
  const CurrentDevice current(device_);
  const cudaError_t error = cudaStreamSynchronize(stream);
  if (error == cudaSuccess) {
    flight_.complete();
    return {};
  }
  Status status = cuda_error(error, "cudaStreamSynchronize");
  mk_async_error_t report = MK_ASYNC_ERROR_INIT;
  report.status = MK_ERROR_CUDA;
  report.rank = -1;
  report.waiter_rank = -1;
  report.epoch = epoch_;
  context_.report(report, status.sentence());
  return status;
}

bool cuda_executor_available(int nranks) {
  int count = 0;
  if (nranks != 1 || cudaGetDeviceCount(&count) != cudaSuccess) return false;
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && is_hopper(device);
}

Result<std::unique_ptr<Executor>> make_cuda_executor(ExecutorContext context, Deadline) {
  if (context.topology.nranks > 1) {
    return Status(
        MK_ERROR_UNSUPPORTED,
        format(
            "device = MK_DEVICE_CUDA: communicators of more than one rank (%d) are not built for GPUs yet; use "
            "MK_DEVICE_HOST or MK_DEVICE_AUTO",
            context.topology.nranks));
  }
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("device = MK_DEVICE_CUDA: expected a GPU and its driver, saw: %s; use MK_DEVICE_HOST",
                         error == cudaSuccess ? "no device" : cudaGetErrorString(error)));
  }
  int device = context.config.cuda_device;
  if (device < 0) {
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess)
      return cuda_error(error, "cudaGetDevice");
  }
  if (device >= count) {
    return Status(MK_ERROR_INVALID_ARGUMENT,
                  format("config.cuda_device: expected less than %d (devices present), saw %d", count, device));
  }
  if (!is_hopper(device)) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("device %d: expected compute capability 9.0 (H100, H200), saw %d.%d", device,
                         attribute(cudaDevAttrComputeCapabilityMajor, device),
                         attribute(cudaDevAttrComputeCapabilityMinor, device)));
  }
  const int sms = attribute(cudaDevAttrMultiProcessorCount, device);
  int usable = sms - context.config.reserved_sms;
  if (context.config.max_ctas > 0) usable = std::min(usable, context.config.max_ctas);
  if (usable < 1) {
    return Status(MK_ERROR_INVALID_ARGUMENT,
                  format("config.reserved_sms: expected less than %d (SMs of device %d), saw %d", sms, device,
                         context.config.reserved_sms));
  }
  return std::unique_ptr<Executor>(std::make_unique<CudaExecutor>(std::move(context), device, usable));
}

}  // namespace mk
