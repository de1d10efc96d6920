// SPDX-License-Identifier: MIT
#include "kernels/cuda/cuda_executor.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "kernels/cuda/cuda_error.h"
#include "kernels/cuda/gemm_type.h"
#include "kernels/cuda/rank_gemm_launch.h"
#include "kernels/cuda/rank_gemm_plan.h"
#include "kernels/device/gemm_partials_layout.h"
#include "kernels/protocol.h"
#include "lib/symmetric_memory.h"

namespace mk {
namespace {

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

Status CudaExecutor::set_up(Deadline deadline) {
  const CurrentDevice current(device_);
  MK_RETURN_IF_ERROR(current.status());
  MK_RETURN_IF_ERROR(
      cuda_error(cudaEventCreateWithFlags(&last_launch_, cudaEventDisableTiming), "creating an event"));
  if (nranks() == 1) return {};
  Result<std::unique_ptr<CudaRank>> rank = CudaRank::make(context_, device_, num_sms_, deadline);
  if (!rank.ok()) return rank.status();
  rank_ = rank.take();
  return {};
}

CudaExecutor::~CudaExecutor() {
  const CurrentDevice current(device_);
  wake();
  wait_idle(Deadline::after(std::chrono::seconds(10)));
  rank_.reset();
  trace_.reset();
  ended_traces_.clear();
  if (workspace_ != nullptr) cudaFree(workspace_);
  if (last_launch_ != nullptr) cudaEventDestroy(last_launch_);
}

int CudaExecutor::num_sms_of(const GemmCall& call) const {
  return call.tuning.compute_ctas > 0 ? std::min(num_sms_, call.tuning.compute_ctas) : num_sms_;
}

// The most that any plan for this number of SMs asks for: the largest tile, cut for every SM.
size_t CudaExecutor::max_workspace_bytes() const { return PartialsLayout(num_sms_, 128, 256).num_bytes; }

size_t CudaExecutor::workspace_bytes() const {
  if (rank_) return rank_->workspace_bytes();
  return workspace_ ? max_workspace_bytes() : 0;
}

Result<GemmCall> CudaExecutor::supported(const OperatorCall& call) const {
  const auto* gemm = std::get_if<GemmCall>(&call);
  if (gemm == nullptr) {
    return Status(MK_ERROR_UNSUPPORTED, format("mk_%s is not built for GPUs yet; use MK_DEVICE_HOST",
                                               operator_name(operator_of(call))));
  }
  if (gemm->mode == MK_ALLGATHER_WGRAD) {
    return Status(MK_ERROR_UNSUPPORTED,
                  "mk_allgather_gemm: mode: MK_ALLGATHER_WGRAD is not built for GPUs yet; use MK_DEVICE_HOST");
  }
  return *gemm;
}

Result<mk_plan_t> CudaExecutor::plan(const OperatorCall& any) const {
  const Result<GemmCall> call = supported(any);
  if (!call.ok()) return call.status();
  mk_plan_t plan = MK_PLAN_INIT;
  if (rank_) {
    const Result<RankGemmPlan> chosen =
        rank_gemm_plan(call.value(), context_.topology.rank, nranks(), rank_->num_sms(), rank_->nodes());
    if (!chosen.ok()) return chosen.status();
    plan = chosen.value().plan;
  } else {
    const GemmPlan chosen = gemm_plan(shape_of(call.value()), num_sms_of(call.value()));
    plan.compute_ctas = chosen.num_ctas();
    plan.tile_m = chosen.block_m;
    plan.tile_n = chosen.block_n;
    plan.workspace_bytes = max_workspace_bytes();
  }
  plan.prepared = prepared(any) ? 1 : 0;
  return plan;
}

// Tuning may ask for more than the maxima's own plan did.
const CudaRank::Arena* CudaExecutor::find_arena(const GemmCall& call, int64_t bank_bytes) const {
  for (const Prepared& candidate : prepared_) {
    if (static_cast<int64_t>(candidate.arena->bank_bytes) >= bank_bytes && covers(candidate.maxima, call))
      return candidate.arena;
  }
  return nullptr;
}

bool CudaExecutor::prepared(const OperatorCall& any) const {
  if (!rank_) return workspace_ != nullptr;
  const auto& call = std::get<GemmCall>(any);
  const Result<RankGemmPlan> chosen =
      rank_gemm_plan(call, context_.topology.rank, nranks(), rank_->num_sms(), rank_->nodes());
  return chosen.ok() && find_arena(call, chosen.value().area_bytes) != nullptr;
}

Status CudaExecutor::prepare(const OperatorCall& any, Deadline deadline) {
  const CurrentDevice current(device_);
  MK_RETURN_IF_ERROR(current.status());
  if (!rank_) return prepare_alone();
  const Result<GemmCall> call = supported(any);
  if (!call.ok()) return call.status();
  if (!kernels_loaded_) {
    MK_RETURN_IF_ERROR(cuda_error(rank_gemm_prepare(rank_->nodes() != nullptr), "loading the kernels"));
    kernels_loaded_ = true;
  }
  const Result<RankGemmPlan> chosen =
      rank_gemm_plan(call.value(), context_.topology.rank, nranks(), rank_->num_sms(), rank_->nodes());
  if (!chosen.ok()) return chosen.status();
  const auto bank_bytes = static_cast<size_t>(std::max<int64_t>(chosen.value().area_bytes, 1));
  for (const CudaRank::Arena& arena : arenas_) {
    if (arena.bank_bytes < bank_bytes) continue;
    prepared_.push_back({call.value(), &arena});
    return {};
  }
  // Growth appends: captured launches within earlier maxima keep their arena.
  const Result<CudaRank::Arena> arena = rank_->add_arena(bank_bytes, deadline);
  if (!arena.ok()) return arena.status();
  arenas_.push_back(arena.value());
  prepared_.push_back({call.value(), &arenas_.back()});
  return {};
}

Status CudaExecutor::prepare_alone() {
  if (workspace_ != nullptr) return {};
  MK_RETURN_IF_ERROR(cuda_error(gemm_prepare(), "loading the kernels"));
  void* workspace = nullptr;
  MK_RETURN_IF_ERROR(cuda_error(cudaMalloc(&workspace, max_workspace_bytes()), "allocating the workspace"));
  cudaError_t error = cudaMemset(workspace, 0, max_workspace_bytes());
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) {
    cudaFree(workspace);
    return cuda_error(error, "clearing the workspace");
  }
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

// Of a stream that is being captured the driver does not say the device.
Status CudaExecutor::check_stream(mk_stream_t stream) const {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  MK_RETURN_IF_ERROR(cuda_error(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing"));
  if (capture != cudaStreamCaptureStatusNone || stream == nullptr) return {};
  int device = device_;
  MK_RETURN_IF_ERROR(cuda_error(cudaStreamGetDevice(stream, &device), "cudaStreamGetDevice"));
  if (device == device_) return {};
  return Status(
      MK_ERROR_INVALID_ARGUMENT,
      format("stream: expected a stream of device %d, the communicator's, saw one of device %d; create "
             "it while device %d is current",
             device_, device, device_));
}

Status CudaExecutor::enqueue(const OperatorCall& any, mk_stream_t stream) {
  const CurrentDevice current(device_);
  MK_RETURN_IF_ERROR(current.status());
  MK_RETURN_IF_ERROR(check_stream(stream));
  const auto& call = std::get<GemmCall>(any);
  Status status;
  if (rank_) {
    status = enqueue_with_peers(call, stream);
  } else {
    const uint64_t epoch = ++epoch_;
    flight_.record(epoch, any, FlightRecorder::running);
    status = enqueue_alone(call, stream);
    if (!status.ok()) flight_.record(epoch, any, FlightRecorder::failed);
  }
  MK_RETURN_IF_ERROR(status);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  MK_RETURN_IF_ERROR(cuda_error(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing"));
  if (capture != cudaStreamCaptureStatusNone) {
    if (trace_) trace_->keep();
    return {};
  }
  return cuda_error(cudaEventRecord(last_launch_, stream), "cudaEventRecord");
}

Status CudaExecutor::enqueue_with_peers(const GemmCall& call, cudaStream_t stream) {
  const Result<RankGemmPlan> plan =
      rank_gemm_plan(call, context_.topology.rank, nranks(), rank_->num_sms(), rank_->nodes());
  if (!plan.ok()) return plan.status();
  RankComm comm = rank_->comm(*find_arena(call, plan.value().area_bytes));
  comm.entry = make_entry(call, 0);
  if (trace_) comm.trace = trace_->buffer();
  const std::array<int64_t, 4> shape = flight_shape(call);
  std::copy(shape.begin(), shape.end(), comm.flight_shape);
  return cuda_error(rank_gemm_launch(call, plan.value(), comm, stream), operator_name(call.op));
}

Status CudaExecutor::enqueue_alone(const GemmCall& call, cudaStream_t stream) {
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
  const cudaError_t error = gemm_launch(arguments, gemm_plan(arguments.shape, num_sms_of(call)), stream);
  return cuda_error(error, operator_name(call.op));
}

Status CudaExecutor::synchronize(mk_stream_t stream) {
  const CurrentDevice current(device_);
  const cudaError_t error = cudaStreamSynchronize(stream);
  if (error == cudaSuccess) {
    if (rank_) rank_->look();
    flight_.complete();
    return {};
  }
  Status status = cuda_error(error, "cudaStreamSynchronize");
  mk_async_error_t report = MK_ASYNC_ERROR_INIT;
  report.status = MK_ERROR_CUDA;
  report.rank = -1;
  report.waiter_rank = -1;
  report.epoch = epoch();
  context_.report(report, status.sentence());
  return status;
}

void CudaExecutor::wake() {
  if (rank_ && context_.abort.raised()) rank_->set_abort();
}

bool CudaExecutor::wait_idle(Deadline deadline) {
  const CurrentDevice current(device_);
  while (last_launch_ != nullptr &&
         (cudaEventQuery(last_launch_) == cudaErrorNotReady || (rank_ && !rank_->idle()))) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

std::string cuda_device_identity(int ordinal) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return {};
  if (ordinal < 0 && cudaGetDevice(&ordinal) != cudaSuccess) return {};
  if (ordinal >= count || !is_hopper(ordinal)) return {};
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, ordinal) != cudaSuccess) return {};
  std::string identity;
  for (const char byte : properties.uuid.bytes) identity += format("%02x", static_cast<unsigned char>(byte));
  return identity;
}

Result<std::unique_ptr<Executor>> make_cuda_executor(ExecutorContext context, Deadline deadline) {
  const Topology& topology = context.topology;
  if (topology.nranks > MAX_GPU_RANKS) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("device = MK_DEVICE_CUDA: at most %d ranks, saw %d", MAX_GPU_RANKS, topology.nranks));
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
  auto executor = std::make_unique<CudaExecutor>(std::move(context), device, usable);
  MK_RETURN_IF_ERROR(executor->set_up(deadline));
  return std::unique_ptr<Executor>(std::move(executor));
}

}  // namespace mk
