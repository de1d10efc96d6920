// SPDX-License-Identifier: MIT
#include "kernels/cuda/cuda_executor.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "kernels/cuda/cuda_error.h"
#include "kernels/cuda/gemm_type.h"
#include "kernels/cuda/rank_gemm_launch.h"
#include "kernels/cuda/rank_gemm_plan.h"
#include "kernels/device/tagged_packets.h"
#include "kernels/protocol.h"
#include "lib/symmetric_memory.h"

namespace mk {
namespace {

bool is_wgrad(const GemmCall& call) { return call.mode == MK_ALLGATHER_WGRAD; }

// With one rank a call is this product: A B, or dY^T X.
GemmShape shape_of(const GemmCall& call) {
  GemmShape shape;
  shape.m = is_wgrad(call) ? call.k : call.m;
  shape.n = call.n;
  shape.k = is_wgrad(call) ? call.m : call.k;
  shape.in_type = gemm_type(call.dtype);
  shape.out_type = gemm_type(call.out_dtype);
  shape.a_transposed = is_wgrad(call) && call.b_layout == MK_LAYOUT_KN;
  shape.b_transposed = !is_wgrad(call) && call.b_layout == MK_LAYOUT_NK;
  shape.accumulate = call.accumulate;
  return shape;
}

GemmArguments arguments_of(const GemmCall& call) {
  GemmArguments arguments;
  arguments.shape = shape_of(call);
  const GemmShape& shape = arguments.shape;
  const auto pitch = [](int64_t ld, int64_t columns) { return round_up(std::max(ld, columns), 8); };
  arguments.a = is_wgrad(call) ? call.b : call.a;
  arguments.lda = pitch(is_wgrad(call) ? call.ldb : call.lda, shape.a_transposed ? shape.m : shape.k);
  arguments.b = is_wgrad(call) ? call.a : call.b;
  arguments.ldb = pitch(is_wgrad(call) ? call.lda : call.ldb, shape.b_transposed ? shape.k : shape.n);
  arguments.c = call.c;
  arguments.ldc = std::max(call.ldc, call.n);
  arguments.bias = call.bias;
  arguments.bias_type = gemm_type(call.bias_dtype);
  return arguments;
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, name, device) == cudaSuccess ? value : 0;
}

bool is_hopper(int device) {
  return attribute(cudaDevAttrComputeCapabilityMajor, device) == 9 &&
         attribute(cudaDevAttrComputeCapabilityMinor, device) == 0;
}

// What the plan of an unknown GPU takes it for: an H100.
double memory_bytes_per_us(int device) {
  const double khz = attribute(cudaDevAttrMemoryClockRate, device);
  const double bits = attribute(cudaDevAttrGlobalMemoryBusWidth, device);
  const double rate = 2 * khz * bits / 8 / 1000;  // two transfers a cycle
  return rate > 0 ? rate : H100_MEMORY_BYTES_PER_US;
}

}  // namespace

CudaExecutor::CudaExecutor(ExecutorContext context, int device, int num_sms)
    : context_(std::move(context)),
      device_(device),
      num_sms_(num_sms),
      device_sms_(attribute(cudaDevAttrMultiProcessorCount, device)),
      memory_bytes_per_us_(memory_bytes_per_us(device)) {}

Status CudaExecutor::set_up(Deadline deadline) {
  const CurrentDevice current(device_);
  MK_RETURN_IF_ERROR(current.status());
  MK_RETURN_IF_ERROR(
      cuda_error(cudaEventCreateWithFlags(&last_launch_, cudaEventDisableTiming), "creating an event"));
  if (nranks() == 1) return {};
  MK_RETURN_IF_ERROR(count_clusters());
  // Whatever holds the SMs that are left to others (max_ctas, reserved_sms) may take a cluster's place each.
  const int of_others = std::max(0, device_sms_ - num_sms_);
  for (int& clusters : cluster_limits_.at_a_time) clusters = std::max(0, clusters - of_others);
  Result<std::unique_ptr<CudaRank>> rank =
      CudaRank::make(context_, device_, {num_sms_, cluster_limits_}, deadline);
  if (!rank.ok()) return rank.status();
  rank_ = rank.take();
  return {};
}

CudaExecutor::~CudaExecutor() {
  const CurrentDevice current(device_);
  wake();
  wait_idle(Deadline::after(std::chrono::seconds(10)));
  rank_.reset();
  lone_rank_ = nullptr;
  lone_rank_owner_.reset();
  trace_.reset();
  ended_traces_.clear();
  if (workspace_ != nullptr) cudaFree(workspace_);
  if (last_launch_ != nullptr) cudaEventDestroy(last_launch_);
}

int CudaExecutor::num_sms_of(const GemmCall& call) const {
  return call.tuning.compute_ctas > 0 ? std::min(num_sms_, call.tuning.compute_ctas) : num_sms_;
}

// The most that any plan for this number of SMs asks for: the largest tile, cut for every SM.
size_t CudaExecutor::max_workspace_bytes() const { return gemm_max_workspace_bytes(num_sms_); }

size_t CudaExecutor::workspace_bytes() const {
  if (rank_) return rank_->workspace_bytes();
  const CudaRank* lone_rank = lone_rank_;
  return (workspace_ ? max_workspace_bytes() : 0) + (lone_rank ? lone_rank->workspace_bytes() : 0);
}

size_t CudaExecutor::workspace_granularity() const {
  const CudaRank* rank = device_rank();
  return rank ? rank->workspace_granularity() : 1;
}

// Valid until the next call of this function, or of prepare().
Result<CudaExecutor::Planned*> CudaExecutor::planned(const GemmCall& call) const {
  if (Planned* known = planned_.find(call)) return known;
  Planned planned{};
  if (rank_) {
    const Result<RankGemmPlan> plan = rank_gemm_plan(call, context_.topology.rank, nranks(), rank_->num_sms(),
                                                     nodes(), rank_->cluster_limits(), memory_bytes_per_us_);
    if (!plan.ok()) return plan.status();
    planned.with_peers = plan.value();
    planned.with_peers.packets = packets_ ? packets_->offset : 0;
    planned.arena = find_arena(call, plan.value().area_bytes);
  } else {
    planned.alone = gemm_plan(shape_of(call), num_sms_of(call), cluster_limits_);
  }
  return &planned_.insert(call, std::move(planned));
}

Result<mk_plan_t> CudaExecutor::plan(const OperatorCall& any) const {
  if (const auto* moe = std::get_if<MoeCall>(&any)) return plan_moe(*moe);
  if (const auto* attention = std::get_if<RingAttentionCall>(&any)) return plan_attention(*attention);
  const auto& call = std::get<GemmCall>(any);
  const Result<Planned*> planned = this->planned(call);
  if (!planned.ok()) return planned.status();
  mk_plan_t plan = MK_PLAN_INIT;
  if (rank_) {
    plan = planned.value()->with_peers.plan;
    plan.prepared = planned.value()->arena != nullptr ? 1 : 0;
  } else {
    const GemmPlan& chosen = planned.value()->alone;
    plan.compute_ctas = chosen.num_ctas();
    plan.tile_m = chosen.is_swapped ? chosen.block_n : chosen.block_m;
    plan.tile_n = chosen.is_swapped ? chosen.block_m : chosen.block_n;
    plan.workspace_bytes = max_workspace_bytes();
    plan.prepared = workspace_ != nullptr ? 1 : 0;
  }
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
  const Result<mk_plan_t> plan = this->plan(any);
  return plan.ok() && plan.value().prepared != 0;
}

Status CudaExecutor::prepare(const OperatorCall& any, Deadline deadline) {
  const CurrentDevice current(device_);
  MK_RETURN_IF_ERROR(current.status());
  if (const auto* moe = std::get_if<MoeCall>(&any)) return prepare_moe(*moe, deadline);
  if (const auto* attention = std::get_if<RingAttentionCall>(&any))
    return prepare_attention(*attention, deadline);
  if (!rank_) return prepare_alone();
  const auto& call = std::get<GemmCall>(any);
  if (!kernels_loaded_) {
    MK_RETURN_IF_ERROR(cuda_error(rank_gemm_prepare(nodes() != nullptr), "loading the kernels"));
    kernels_loaded_ = true;
  }
  const Result<Planned*> planned = this->planned(call);
  if (!planned.ok()) return planned.status();
  const int64_t area_bytes = planned.value()->with_peers.area_bytes;
  planned_.clear();  // where calls have their area is decided anew
  MK_RETURN_IF_ERROR(prepare_packets(call, deadline));
  const Result<const CudaRank::Arena*> arena = arena_for(area_bytes, deadline);
  if (!arena.ok()) return arena.status();
  prepared_.push_back({call, arena.value()});
  return {};
}

// Any smaller call than those prepared may be of the few bytes that travel in tagged packets. Collective.
Status CudaExecutor::prepare_packets(const GemmCall& call, Deadline deadline) {
  if (packets_ || nodes() != nullptr || call.op == MK_OPERATOR_ALLGATHER_GEMM) return {};
  const Result<CudaRank::Arena> packets = rank_->add_arena(PACKET_BANK_BYTES, deadline);
  if (!packets.ok()) return packets.status();
  packets_ = packets.value();
  return {};
}

// Communicators of one rank have a CudaRank for operators other than products alone, once these are prepared.
CudaRank* CudaExecutor::device_rank() const { return rank_ ? rank_.get() : lone_rank_.load(); }

int CudaExecutor::device_rank_sms() const { return rank_ ? rank_->num_sms() : num_sms_; }

// One with room for that much a bank. Collective.
Result<const CudaRank::Arena*> CudaExecutor::arena_for(int64_t area_bytes, Deadline deadline) {
  if (device_rank() == nullptr) {
    Result<std::unique_ptr<CudaRank>> rank = CudaRank::make(context_, device_, {num_sms_, {}}, deadline);
    if (!rank.ok()) return rank.status();
    lone_rank_owner_ = rank.take();
    lone_rank_.store(lone_rank_owner_.get());
  }
  const auto bank_bytes = static_cast<size_t>(std::max<int64_t>(area_bytes, 1));
  for (const CudaRank::Arena& arena : arenas_) {
    if (arena.bank_bytes >= bank_bytes) return &arena;
  }
  // Growth appends: captured launches within earlier maxima keep their arena.
  const Result<CudaRank::Arena> arena = device_rank()->add_arena(bank_bytes, deadline);
  if (!arena.ok()) return arena.status();
  arenas_.push_back(arena.value());
  return &arenas_.back();
}

// How many clusters run at a time.
Status CudaExecutor::count_clusters() {
  return cuda_error(gemm_cluster_limits(&cluster_limits_), "cudaOccupancyMaxActiveClusters");
}

Status CudaExecutor::prepare_alone() {
  if (workspace_ != nullptr) return {};
  MK_RETURN_IF_ERROR(cuda_error(gemm_prepare(), "loading the kernels"));
  MK_RETURN_IF_ERROR(count_clusters());
  planned_.clear();  // those before knew of no clusters
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
Status CudaExecutor::check_stream(mk_stream_t stream, bool* is_captured) const {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  MK_RETURN_IF_ERROR(cuda_error(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing"));
  *is_captured = capture != cudaStreamCaptureStatusNone;
  if (*is_captured || stream == nullptr) return {};
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
  bool is_captured = false;
  MK_RETURN_IF_ERROR(check_stream(stream, &is_captured));
  MK_RETURN_IF_ERROR(rank_ ? launch(any, 0, stream, is_captured) : enqueue_alone(any, stream, is_captured));
  if (is_captured && trace_) trace_->keep();
  return {};
}

// `epoch`: with one rank, the executor's own count.
Status CudaExecutor::launch(const OperatorCall& any, uint64_t epoch, cudaStream_t stream, bool is_captured) {
  if (const auto* moe = std::get_if<MoeCall>(&any)) return enqueue_moe(*moe, stream, is_captured);
  if (const auto* attention = std::get_if<RingAttentionCall>(&any))
    return enqueue_attention(*attention, stream, is_captured);
  const auto& gemm = std::get<GemmCall>(any);
  return rank_ ? enqueue_with_peers(gemm, stream, is_captured) : launch_alone(gemm, epoch, stream);
}

Status CudaExecutor::enqueue_with_peers(const GemmCall& call, cudaStream_t stream, bool is_captured) {
  const Result<Planned*> found = planned(call);
  if (!found.ok()) return found.status();
  Planned& planned = *found.value();
  if (!planned.launch) {
    RankComm comm = rank_->comm(*planned.arena);
    comm.entry = make_entry(call, 0);
    const std::array<int64_t, 4> shape = flight_shape(call);
    std::copy(shape.begin(), shape.end(), comm.flight_shape);
    planned.launch = RankGemmLaunch::make(call, planned.with_peers, comm);
    if (!planned.launch) return cuda_error(cudaErrorInvalidValue, operator_name(call.op));
  }
  const LaunchDetails details = details_of(planned.launch->peer_output(call), is_captured);
  const cudaError_t error = planned.launch->enqueue(call, details, stream);
  if (error == cudaSuccess && !is_captured) rank_->count_launch();
  return cuda_error(error, operator_name(call.op));
}

LaunchDetails CudaExecutor::details_of(const PeerOutput& output, bool is_captured) const {
  LaunchDetails details;
  details.trace = trace_ ? trace_->buffer() : nullptr;
  details.ticket = is_captured ? 0 : rank_->next_ticket();
  if (output.data == nullptr) return details;
  const std::optional<uint64_t> offset = context_.symmetric_offset(output.data, output.bytes);
  if (!offset) return details;
  details.output_offset = *offset;
  details.output_ld = output.ld;
  for (int rank = 0; rank < nranks(); ++rank) details.outputs[rank] = context_.symmetric_peer(rank, *offset);
  return details;
}

Status CudaExecutor::enqueue_alone(const OperatorCall& any, cudaStream_t stream, bool is_captured) {
  const uint64_t epoch = ++epoch_;
  flight_.record(epoch, any, FlightRecorder::running);
  if (Status status = launch(any, epoch, stream, is_captured); !status.ok()) {
    flight_.record(epoch, any, FlightRecorder::failed);
    return status;
  }
  return is_captured ? Status() : cuda_error(cudaEventRecord(last_launch_, stream), "cudaEventRecord");
}

Status CudaExecutor::launch_alone(const GemmCall& call, uint64_t epoch, cudaStream_t stream) {
  const Result<Planned*> planned = this->planned(call);
  if (!planned.ok()) return planned.status();
  const int64_t columns = travelling_columns(call);
  if (call.a_gathered != nullptr && call.m > 0 && columns > 0) {
    // With one rank the gathered A is a copy, made by the copy engine beside the kernel's own node.
    const cudaError_t error = cudaMemcpy2DAsync(call.a_gathered, std::max(call.lda_gathered, columns) * 2,
                                                call.a, std::max(call.lda, columns) * 2, columns * 2, call.m,
                                                cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return cuda_error(error, "copying the gathered A");
  }
  GemmArguments arguments = arguments_of(call);
  arguments.workspace = workspace_;
  arguments.num_sms = device_sms_;
  if (trace_) {
    const std::array<int64_t, 4> shape = flight_shape(call);
    arguments.trace = {
        trace_->buffer(), epoch, static_cast<uint32_t>(call.op), {shape[0], shape[1], shape[2], shape[3]}};
  }
  return cuda_error(gemm_launch(arguments, planned.value()->alone, stream), operator_name(call.op));
}

Status CudaExecutor::synchronize(mk_stream_t stream) {
  const CurrentDevice current(device_);
  const cudaError_t error = cudaStreamSynchronize(stream);
  if (error == cudaSuccess) {
    if (CudaRank* rank = device_rank()) rank->look();
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
  CudaRank* rank = device_rank();
  if (rank != nullptr && context_.abort.raised()) rank->set_abort();
}

cudaError_t CudaExecutor::query_launches() const {
  if (last_launch_ == nullptr) return cudaSuccess;
  const cudaError_t state = cudaEventQuery(last_launch_);
  return state == cudaSuccess && device_rank() && !device_rank()->idle() ? cudaErrorNotReady : state;
}

bool CudaExecutor::wait_idle(Deadline deadline) {
  const CurrentDevice current(device_);
  while (query_launches() == cudaErrorNotReady) {
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
