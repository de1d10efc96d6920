// SPDX-License-Identifier: MIT
#include "kernels/cuda/cuda_rank.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <span>
#include <system_error>
#include <vector>

#include "kernels/cuda/cuda_error.h"
#include "kernels/flight_recorder.h"
#include "kernels/ops/moe_routing/data_error.h"
#include "kernels/ring_attention_call.h"
#include "kernels/wait_report.h"
#include "transport/endpoint.h"

namespace mk {
namespace {

// Own rows go to rail peers, sums and gradients to the owners whose relay this rank is: other ranks, too, where
// nodes have unequal numbers.
std::vector<uint8_t> peers_of_puts(const RankOrder& order) {
  std::vector<uint8_t> peers(order.rail_peers, order.rail_peers + order.num_rail_peers);
  for (int i = 0; i < order.num_relayed; ++i) {
    if (std::find(peers.begin(), peers.end(), order.relayed[i]) == peers.end())
      peers.push_back(order.relayed[i]);
  }
  return peers;
}

// Puts from a new region to each peer: enough for each of several NICs, and for each lane of a transport that
// stages.
constexpr int kPrimes = 16;

// Those that come to a rank.
int count_primes(TopologyView view, int receiver) {
  int count = 0;
  for (view.rank = 0; view.rank < view.nranks; ++view.rank) {
    const std::vector<uint8_t> peers = peers_of_puts(make_rank_order(view));
    if (std::find(peers.begin(), peers.end(), receiver) != peers.end()) count += kPrimes;
  }
  return count;
}

// How soon an error that a kernel has written is seen without anyone asking.
constexpr std::chrono::milliseconds kWatchInterval{10};
// For how long the GPU is asked what has ended. Where all streams share a queue, it answers behind what is in
// it.
constexpr std::chrono::milliseconds kAnswerTime{200};
// In which a launch that has failed in one warp has said by another what it is.
constexpr std::chrono::milliseconds kGreetingTime{100};

constexpr const char* kRoles[] = {"copy", "entry", "compute", "reduce", "gather", "send", "receive"};
constexpr const char* kObjects[] = {"chunk",  "partial",   "reduced tile", "entry",
                                    "counts", "row block", "put",          "place in the FIFO"};
static_assert(std::size(kRoles) == static_cast<size_t>(DeviceRole::NUM));
static_assert(std::size(kObjects) == static_cast<size_t>(DeviceObject::NUM));

template <class T>
const char* name_of(T value, const char* const* names) {
  return value < T::NUM ? names[static_cast<size_t>(value)] : "unknown";
}

// The kernels' clock counts from the same moment as the system's.
uint64_t system_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

template <class Details>
Details details_of(const DeviceError& error) {
  Details details;
  static_assert(sizeof details <= sizeof error.details);
  std::memcpy(&details, error.details, sizeof details);
  return details;
}

std::string describe_data(mk_operator_t op, const DeviceError& error) {
  if (op == MK_OPERATOR_RING_ATTENTION || op == MK_OPERATOR_RING_ATTENTION_BACKWARD)
    return describe(details_of<ring_attention::CuSeqlensFault>(error));
  return moe::describe(details_of<moe::DataError>(error), error.epoch);
}

// The last one that all places of CTAs have.
uint64_t last_of_all(const LaunchEnds& ends, uint64_t CtaEnd::*number) {
  uint64_t last = UINT64_MAX;
  for (const CtaEnd& end : ends.ctas) last = std::min(last, end.*number);
  return last;
}

}  // namespace

Result<std::unique_ptr<CudaRank>> CudaRank::make(const ExecutorContext& context, int device, const Room& room,
                                                 Deadline deadline) {
  std::unique_ptr<CudaRank> rank(new CudaRank(context, device, room));
  MK_RETURN_IF_ERROR(rank->allocate(deadline));
  return rank;
}

Status CudaRank::allocate(Deadline deadline) {
  const Topology& topology = context_.topology;
  auto memory = make_cuda_symmetric_memory(topology, context_.exchange, context_.abort, device_, deadline);
  if (!memory.ok()) return memory.status();
  memory_ = memory.take();
  birth_ns_ = system_ns();
  MK_RETURN_IF_ERROR(
      cuda_error(cudaMalloc(reinterpret_cast<void**>(&state_), sizeof *state_), "allocating the launch state"));
  MK_RETURN_IF_ERROR(cuda_error(cudaMemset(state_, 0, sizeof *state_), "clearing the launch state"));
  MK_RETURN_IF_ERROR(
      cuda_error(cudaHostAlloc(reinterpret_cast<void**>(&mailbox_), sizeof *mailbox_, cudaHostAllocMapped),
                 "allocating pinned host memory"));
  std::memset(static_cast<void*>(mailbox_), 0, sizeof *mailbox_);
  MK_RETURN_IF_ERROR(
      cuda_error(cudaHostGetDevicePointer(reinterpret_cast<void**>(&device_mailbox_), mailbox_, 0),
                 "mapping host memory"));
  MK_RETURN_IF_ERROR(cuda_error(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking),
                                "creating a stream for what the host asks of launches"));
  MK_RETURN_IF_ERROR(agree_on_room(deadline));
  MK_RETURN_IF_ERROR(cuda_error(
      cudaMalloc(reinterpret_cast<void**>(&partials_), STAGING_FLAGS_BYTES + room_.num_sms * STAGING_BYTES),
      "allocating the staging memory"));
  MK_RETURN_IF_ERROR(cuda_error(cudaMemset(partials_, 0, STAGING_FLAGS_BYTES), "clearing the staging memory"));
  MK_RETURN_IF_ERROR(cuda_error(cudaDeviceSynchronize(), "clearing the launch state"));
  // The control block is the first piece, at offset 0.
  const Result<size_t> control = memory_->grow(ControlLayout{topology.nranks}.bytes(), deadline);
  if (!control.ok()) return control.status();
  if (context_.endpoint != nullptr) MK_RETURN_IF_ERROR(connect_network(deadline));
  try {
    watcher_ = std::thread([this] { watch(); });
  } catch (const std::system_error& failure) {
    return Status(MK_ERROR_SYSTEM, format("no thread to watch the GPU: %s", failure.what()));
  }
  return {};
}

Status CudaRank::connect_network(Deadline deadline) {
  MK_RETURN_IF_ERROR(cuda_error(cudaMalloc(reinterpret_cast<void**>(&network_), sizeof *network_),
                                "allocating the state of the network"));
  MK_RETURN_IF_ERROR(
      cuda_error(cudaMemset(network_, 0, sizeof *network_), "clearing the state of the network"));
  const SharedWithGpu shared = context_.endpoint->shared_with_gpu();
  auto fifo = MappedPages::map(shared.fifo);
  if (!fifo.ok()) return fifo.status();
  auto counters = MappedPages::map(shared.counters);
  if (!counters.ok()) return counters.status();
  fifo_ = fifo.take();
  counters_ = counters.take();
  fifo_capacity_ = shared.fifo_capacity;
  const size_t bytes = ControlLayout{context_.topology.nranks}.bytes();
  const Result<uint32_t> region = context_.endpoint->register_region(memory_->local(0), bytes, deadline);
  if (!region.ok()) return region.status();
  control_region_ = region.value();
  return prime(control_region_, deadline);
}

// The first puts from a region make an emulated NIC map memory and create streams, and a real one fill its
// caches: not while a kernel fills the GPU and waits for them. They are zeros, and no rank goes on before all
// have arrived, which their senders' completions do not say: one that came later would lie over what a launch
// has received.
Status CudaRank::prime(uint32_t region, Deadline deadline) {
  uint64_t* const device_head = &network_->queue.head;
  uint64_t head = 0;
  // Kernels count commands in the GPU's memory.
  Status status = cuda_error(cudaDeviceSynchronize(), "waiting for what was enqueued before");
  if (status.ok()) {
    status = cuda_error(cudaMemcpy(&head, device_head, sizeof head, cudaMemcpyDeviceToHost),
                        "reading the FIFO's head");
  }
  if (status.ok()) {
    status = post_primes(region, head, deadline);
    const Status written = cuda_error(cudaMemcpy(device_head, &head, sizeof head, cudaMemcpyHostToDevice),
                                      "writing the FIFO's head");
    if (status.ok()) status = written;
  }
  const uint8_t failed = status.ok() ? 0 : 1;
  const auto all = context_.exchange.all_gather(std::as_bytes(std::span(&failed, 1)), deadline,
                                                "the first puts from a region");
  MK_RETURN_IF_ERROR(status);
  if (!all.ok()) return all.status();
  for (size_t rank = 0; rank < all.value().size(); ++rank) {
    const Bytes& block = all.value()[rank];
    if (block.size() != 1 || block[0] != std::byte{0}) {
      return Status(MK_ERROR_NETWORK, format("the first puts of rank %zu from a region failed", rank));
    }
  }
  return {};
}

Status CudaRank::post_primes(uint32_t region, uint64_t& head, Deadline deadline) {
  constexpr uint32_t kBytes = 16;
  Endpoint& endpoint = *context_.endpoint;
  num_primes_due_ += static_cast<uint64_t>(count_primes(arrays_.view(), context_.topology.rank));
  const auto wait_until = [&](const auto& condition) -> Status {
    while (!condition()) {
      if (context_.abort.raised()) return context_.abort.reason();
      if (deadline.passed()) {
        return Status(
            MK_ERROR_TIMEOUT,
            format("rank %d: the first puts from region %u: at the deadline %llu of %llu puts were complete "
                   "and %llu of %llu had arrived here",
                   context_.topology.rank, region, static_cast<unsigned long long>(endpoint.completed()),
                   static_cast<unsigned long long>(head),
                   static_cast<unsigned long long>(endpoint.signal(PRIME_SIGNAL)),
                   static_cast<unsigned long long>(num_primes_due_)));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return {};
  };
  Command command{};
  command.kind = CommandKind::put;
  command.signal = PRIME_SIGNAL;
  command.source = command.target = region_address(region, 0);
  command.bytes = kBytes;
  for (int put = 0; put < kPrimes; ++put) {
    for (const uint8_t peer : peers_of_puts(order_)) {
      command.peer = peer;
      MK_RETURN_IF_ERROR(wait_until([&] { return endpoint.try_publish(head, command); }));
      ++head;
    }
  }
  return wait_until(
      [&] { return endpoint.completed() >= head && endpoint.signal(PRIME_SIGNAL) >= num_primes_due_; });
}

Status CudaRank::agree_on_room(Deadline deadline) {
  const auto mine = std::as_bytes(std::span(&room_, 1));
  const Result<std::vector<Bytes>> all = context_.exchange.all_gather(mine, deadline, "numbers of SMs");
  if (!all.ok()) return all.status();
  for (const Bytes& bytes : all.value()) {
    Room room;
    if (bytes.size() != sizeof room) {
      return Status(MK_ERROR_SYSTEM, format("numbers of SMs: expected %zu bytes of each rank, saw %zu",
                                            sizeof room, bytes.size()));
    }
    std::memcpy(&room, bytes.data(), sizeof room);
    room_.num_sms = std::clamp(room.num_sms, 1, room_.num_sms);
    for (int i = 0; i <= MAX_CLUSTER_CTAS; ++i)
      room_.clusters.at_a_time[i] = std::clamp(room.clusters.at_a_time[i], 0, room_.clusters.at_a_time[i]);
  }
  return {};
}

CudaRank::~CudaRank() {
  {
    std::lock_guard lock(stop_mutex_);
    stop_ = true;
  }
  stopping_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  if (copies_ != nullptr) cudaStreamDestroy(copies_);
  if (state_ != nullptr) cudaFree(state_);
  if (partials_ != nullptr) cudaFree(partials_);
  if (network_ != nullptr) cudaFree(network_);
  if (mailbox_ != nullptr) cudaFreeHost(mailbox_);
}

Result<CudaRank::Arena> CudaRank::add_arena(size_t bank_bytes, Deadline deadline) {
  bank_bytes = static_cast<size_t>(round_up(static_cast<int64_t>(bank_bytes), 256));
  const Result<size_t> offset = memory_->grow(2 * bank_bytes, deadline);
  if (!offset.ok()) return offset.status();
  Arena arena{offset.value(), bank_bytes};
  if (context_.endpoint == nullptr) return arena;
  const Result<uint32_t> region =
      context_.endpoint->register_region(memory_->local(arena.offset), 2 * bank_bytes, deadline);
  if (!region.ok()) return region.status();
  arena.region = region.value();
  MK_RETURN_IF_ERROR(prime(arena.region, deadline));
  return arena;
}

RankComm CudaRank::comm(const Arena& arena) const {
  RankComm comm{};
  comm.rank = context_.topology.rank;
  comm.nranks = context_.topology.nranks;
  comm.order = order_;
  for (int i = 0; i < order_.num_local; ++i) {
    const int rank = order_.rank_at[i];
    comm.memory[rank] = memory_->peer(context_.topology.local_rank_of_rank[rank], 0);
  }
  comm.arena = arena.offset;
  comm.bank_bytes = arena.bank_bytes;
  comm.state = state_;
  comm.partials = partials_;
  comm.staging = partials_ + STAGING_FLAGS_BYTES;
  comm.mailbox = device_mailbox_;
  comm.wait_timeout_ns = static_cast<uint64_t>(context_.config.wait_timeout_ms) * 1000000;
  if (network_ == nullptr) return comm;
  comm.network.queue = {fifo_->device(), &network_->queue, fifo_capacity_};
  comm.network.counters = counters_->device();
  comm.network.signals_taken = network_->signals_taken;
  comm.network.control_address = region_address(control_region_, 0);
  comm.network.arena_address = region_address(arena.region, 0);
  return comm;
}

cudaError_t CudaRank::await_copy(Deadline deadline) const {
  cudaError_t state = cudaErrorNotReady;
  while ((state = cudaStreamQuery(copies_)) == cudaErrorNotReady && !deadline.passed())
    std::this_thread::sleep_for(std::chrono::microseconds(5));
  is_copying_ = state == cudaErrorNotReady;
  return state;
}

template <class Copy>
bool CudaRank::ask_gpu(Copy&& copy) const {
  const CurrentDevice current(device_);
  const BesideCaptures beside;
  const Deadline deadline = Deadline::after(kAnswerTime);
  // One that an earlier caller has given up may be as old as that.
  if (is_copying_ && await_copy(deadline) == cudaErrorNotReady) return false;
  return copy() == cudaSuccess && await_copy(deadline) == cudaSuccess;
}

LaunchEnds CudaRank::ends() const {
  const std::lock_guard lock(copies_mutex_);
  if (ask_gpu([&] {
        return cudaMemcpyAsync(&mailbox_->ends, &state_->ends, sizeof(LaunchEnds), cudaMemcpyDeviceToHost,
                               copies_);
      })) {
    ends_ = mailbox_->ends;
  }
  return ends_;
}

void CudaRank::look_for_absent() {
  const uint64_t started = std::atomic_ref<uint64_t>(mailbox_->started).load(std::memory_order_acquire);
  const auto now = std::chrono::steady_clock::now();
  if (started != watched_epoch_) {
    watched_epoch_ = started;
    watched_since_ = now;
    has_looked_for_absent_ = false;
  }
  const std::chrono::milliseconds patience(context_.config.wait_timeout_ms);
  if (started == 0 || has_looked_for_absent_ || now - watched_since_ < patience) return;
  has_looked_for_absent_ = true;
  if (context_.abort.raised()) return;
  // Of a launch that has ended, or is at work, all entries are there.
  const int nranks = context_.topology.nranks;
  std::vector<AbsentPeer> absent;
  {
    const std::lock_guard lock(copies_mutex_);
    if (!ask_gpu([&] {
          const std::byte* const epochs = memory_->local(ControlLayout{nranks}.entry(0, 0));
          return cudaMemcpy2DAsync(mailbox_->entries, sizeof(uint64_t), epochs, sizeof(EntryRecord),
                                   sizeof(uint64_t), 2 * nranks, cudaMemcpyDeviceToHost, copies_);
        })) {
      return;
    }
    for (int rank = 0; rank < nranks; ++rank) {
      const uint64_t last = std::max(mailbox_->entries[rank], mailbox_->entries[nranks + rank]);
      if (rank != context_.topology.rank && last < started) absent.push_back({rank, last});
    }
  }
  log_absent(context_, static_cast<mk_operator_t>(mailbox_->flights[started % NUM_FLIGHTS].op), started,
             absent);
}

uint64_t CudaRank::epoch() const { return last_of_all(ends(), &CtaEnd::epoch); }

bool CudaRank::idle() const {
  const LaunchEnds ends = this->ends();
  const uint64_t last_ticket = last_of_all(ends, &CtaEnd::ticket);
  if (last_ticket < num_enqueued_.load(std::memory_order_acquire) && !has_overlapped_) return false;
  return std::atomic_ref<uint64_t>(mailbox_->started).load(std::memory_order_acquire) <=
         last_of_all(ends, &CtaEnd::epoch);
}

void CudaRank::set_abort() { std::atomic_ref<uint32_t>(mailbox_->abort).store(1, std::memory_order_release); }

void CudaRank::look() {
  std::lock_guard lock(look_mutex_);
  std::atomic_ref<uint32_t> failed(mailbox_->failed);
  if (failed.load(std::memory_order_acquire) == 0) return;
  const DeviceError error = mailbox_->error;
  failed.store(0, std::memory_order_release);
  report(error);
}

void CudaRank::report(const DeviceError& error) {
  const int rank = context_.topology.rank;
  const std::atomic_ref<uint64_t> started(mailbox_->started);
  const Deadline greeting = Deadline::after(kGreetingTime);
  while (started.load(std::memory_order_acquire) < error.epoch && !greeting.passed())
    std::this_thread::sleep_for(std::chrono::microseconds(10));
  const DeviceFlight& flight = mailbox_->flights[error.epoch % NUM_FLIGHTS];
  const auto op = static_cast<mk_operator_t>(flight.op);
  if (error.kind == DEVICE_TIMEOUT) {
    report_timeout(context_,
                   {op, error.epoch, rank, name_of(error.role, kRoles), name_of(error.object, kObjects),
                    error.index, error.peer, error.seen, error.expected, error.cta});
    return;
  }
  mk_async_error_t report = MK_ASYNC_ERROR_INIT;
  report.op = op;
  report.rank = error.peer;
  report.waiter_rank = rank;
  report.epoch = error.epoch;
  if (error.kind == DEVICE_OVERLAP) {
    has_overlapped_ = true;
    report.status = MK_ERROR_INTERNAL;
    context_.report(report,
                    format("rank %d: launch %llu of this communicator began while another was running; order "
                           "the streams on which you call it",
                           rank, static_cast<unsigned long long>(error.epoch)));
    return;
  }
  if (error.kind == DEVICE_DATA) {
    report.status = MK_ERROR_DATA;
    report.waiter_rank = -1;
    context_.report(report, format("mk_%s: %s", operator_name(op), describe_data(op, error).c_str()));
    return;
  }
  report.status = MK_ERROR_MISMATCH;
  EntryRecord own = error.own;
  own.epoch = error.epoch;
  const std::string sentence = "ranks disagree: " + difference(own, rank, error.entry, error.peer);
  context_.report(report, sentence);
  // Signals that were sent and never taken would be mistaken for those of later launches.
  if (context_.endpoint != nullptr) context_.abort.raise(Status(MK_ERROR_MISMATCH, sentence));
}

void CudaRank::watch() {
  std::unique_lock lock(stop_mutex_);
  while (!stop_) {
    stopping_.wait_for(lock, kWatchInterval);
    lock.unlock();
    look();
    look_for_absent();
    lock.lock();
  }
}

size_t CudaRank::flight_record(mk_flight_entry_t* entries, size_t capacity) const {
  const LaunchEnds ends = this->ends();
  const uint64_t last = std::atomic_ref<uint64_t>(mailbox_->started).load(std::memory_order_acquire);
  const uint64_t kept = std::min<uint64_t>({last, NUM_FLIGHTS, capacity});
  const uint64_t now_ns = system_ns();
  const uint64_t ended = last_of_all(ends, &CtaEnd::epoch);
  size_t count = 0;
  for (uint64_t epoch = last - kept + 1; epoch <= last; ++epoch) {
    const uint64_t place = epoch % NUM_FLIGHTS;
    const DeviceFlight flight = mailbox_->flights[place];
    if (flight.epoch != epoch) continue;
    mk_flight_entry_t& entry = entries[count++];
    entry.epoch = epoch;
    entry.op = static_cast<mk_operator_t>(flight.op);
    std::copy(std::begin(flight.shape), std::end(flight.shape), entry.shape);
    const bool has_ended = epoch <= ended && ends.end_ns[place] >= flight.start_ns;
    // A launch begins when the one before it has ended, whether the GPU has told of its end or not.
    const uint64_t end_ns = has_ended      ? ends.end_ns[place]
                            : epoch < last ? mailbox_->flights[(epoch + 1) % NUM_FLIGHTS].start_ns
                                           : now_ns;
    const bool has_failed =
        ends.failed_epochs[place] == epoch || (ends.aborted_epoch > 0 && epoch >= ends.aborted_epoch);
    entry.state = !has_ended && epoch == last ? FlightRecorder::running
                  : has_failed                ? FlightRecorder::failed
                                              : FlightRecorder::completed;
    entry.start_us = flight.start_ns > birth_ns_ ? static_cast<int64_t>(flight.start_ns - birth_ns_) / 1000 : 0;
    entry.duration_us = end_ns > flight.start_ns ? static_cast<int64_t>(end_ns - flight.start_ns) / 1000 : 0;
  }
  return count;
}

}  // namespace mk
