// SPDX-License-Identifier: MIT
#include "communicator.h"

#include <build_id.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <thread>

#include "env.h"
#include "log.h"
#include "wire.h"

namespace mk {
namespace {

constexpr size_t kMaxDescription = 400;
// How long a failure that another rank may have caused waits for the bootstrap to say which rank is lost.
constexpr std::chrono::seconds kVerdictPatience{3};

// Kernels cannot ring a proxy: it stays awake between the launches of a loop, and looks often when there are
// none.
constexpr IdleStrategy kKernelIdle{std::chrono::milliseconds(20), std::chrono::microseconds(50)};

std::atomic<uint64_t> next_instance{1};

const char* meeting_name(MeetingKind kind) {
  switch (kind) {
    case MeetingKind::prepare:
      return "prepare";
    case MeetingKind::mem_alloc:
      return "mk_mem_alloc";
    case MeetingKind::mem_free:
      return "mk_mem_free";
    case MeetingKind::mem_register:
      return "mk_mem_register";
    case MeetingKind::mem_deregister:
      return "mk_mem_deregister";
    case MeetingKind::finalize:
      return "mk_comm_finalize";
    case MeetingKind::recover:
      return "recovery";
  }
  return "an unknown step";
}

// A rank's block in meet(): who, doing what, after how many launches, with how many signals sent to each rank.
struct MeetingBlock {
  MeetingKind kind = MeetingKind::prepare;
  uint64_t epoch = 0;
  std::string what;
  std::vector<uint64_t> sent;
  Bytes payload;

  Bytes encode() const {
    WireWriter writer;
    writer.integer(static_cast<uint32_t>(kind)).integer(epoch).text(what, kMaxDescription);
    writer.integer(static_cast<uint32_t>(sent.size()));
    for (const uint64_t count : sent) writer.integer(count);
    writer.integer(static_cast<uint32_t>(payload.size())).raw(payload);
    return writer.take();
  }

  static std::optional<MeetingBlock> decode(std::span<const std::byte> bytes, int nranks) {
    WireReader reader(bytes);
    MeetingBlock block;
    const auto kind = reader.integer<uint32_t>();
    block.kind = static_cast<MeetingKind>(kind);
    block.epoch = reader.integer<uint64_t>();
    block.what = reader.text(kMaxDescription);
    const auto num_sent = reader.integer<uint32_t>();
    if (num_sent > static_cast<uint32_t>(nranks)) return std::nullopt;
    for (uint32_t i = 0; i < num_sent; ++i) block.sent.push_back(reader.integer<uint64_t>());
    const auto payload_bytes = reader.integer<uint32_t>();
    if (payload_bytes > bytes.size()) return std::nullopt;
    for (uint32_t i = 0; i < payload_bytes; ++i) block.payload.push_back(std::byte{reader.integer<uint8_t>()});
    const bool known = kind >= static_cast<uint32_t>(MeetingKind::prepare) &&
                       kind <= static_cast<uint32_t>(MeetingKind::recover);
    if (!reader.complete() || !known) return std::nullopt;
    return block;
  }
};

Bytes payload_of(const OperatorCall& call) {
  WireWriter writer;
  for (const int64_t field : agreed_fields(call)) writer.integer(field);
  return writer.take();
}

}  // namespace

bool is_fatal(mk_status_t status) {
  switch (status) {
    case MK_ERROR_REMOTE:
    case MK_ERROR_TIMEOUT:
    case MK_ERROR_NETWORK:
    case MK_ERROR_CUDA:
    case MK_ERROR_SYSTEM:
    case MK_ERROR_INTERNAL:
    case MK_ERROR_ABORTED:
      return true;
    default:
      return false;
  }
}

Communicator::Communicator(int nranks, int rank, const mk_comm_config_t& config)
    : nranks_(nranks), rank_(rank), config_(config), instance_(next_instance.fetch_add(1)) {
  if (config.node_of_rank) emulated_nodes_.assign(config.node_of_rank, config.node_of_rank + nranks);
  if (config.transport) transport_ = config.transport;
  config_.node_of_rank = nullptr;  // the caller's memory
  config_.transport = nullptr;
  if (config_.init_timeout_ms == 0) config_.init_timeout_ms = 60000;
  if (config_.wait_timeout_ms == 0) config_.wait_timeout_ms = 30000;
  if (config_.peer_timeout_ms == 0) config_.peer_timeout_ms = 8000;
  async_error_.rank = -1;
  async_error_.waiter_rank = -1;
  abort_.on_raise([this] { on_abort(); });
}

Communicator::~Communicator() { tear_down(); }

std::string Communicator::config_text() const {
  std::string nodes;
  for (const int32_t node : emulated_nodes_) nodes += (nodes.empty() ? "" : ",") + std::to_string(node);
  if (nodes.size() > 512) nodes = format("hash:%zx", std::hash<std::string>{}(nodes));
  return format(
      "device=%d;transport=%s;host_threads=%d;max_ctas=%d;reserved_sms=%d;require_prepare=%d;"
      "max_workspace_bytes=%llu;init_timeout_ms=%lld;wait_timeout_ms=%lld;peer_timeout_ms=%lld;node_of_rank=%s",
      config_.device, transport_.c_str(), config_.host_threads, config_.max_ctas, config_.reserved_sms,
      config_.require_prepare, static_cast<unsigned long long>(config_.max_workspace_bytes),
      static_cast<long long>(config_.init_timeout_ms), static_cast<long long>(config_.wait_timeout_ms),
      static_cast<long long>(config_.peer_timeout_ms), nodes.c_str());
}

Status Communicator::initialise(const mk_unique_id_t& id) {
  Status status = set_up(id);
  // Another rank's abort passed on in an exchange, or the links of one that has gone: the bootstrap says whose.
  const bool perhaps_another = status.code() == MK_ERROR_ABORTED || status.code() == MK_ERROR_REMOTE ||
                               status.code() == MK_ERROR_NETWORK || status.code() == MK_ERROR_SYSTEM;
  if (perhaps_another && bootstrap_ && nranks_ > 1) {
    await_verdict();
    if (abort_.raised()) return abort_.reason();
  }
  return status;
}

Status Communicator::set_up(const mk_unique_id_t& id) {
  const Deadline deadline = step_deadline();
  MK_RETURN_IF_ERROR(join_job(id, deadline));
  MK_RETURN_IF_ERROR(find_topology(deadline));
  if (topology_.num_nodes > 1) MK_RETURN_IF_ERROR(make_endpoint(deadline));
  MK_RETURN_IF_ERROR(make_executor(deadline));
  if (abort_.raised()) return abort_.reason();
  // A barrier: who returns from mk_comm_init knows that everyone has all it needs.
  const auto ready = bootstrap_->all_gather({}, deadline, "the end of mk_comm_init");
  return ready.status();
}

Status Communicator::join_job(const mk_unique_id_t& id, Deadline deadline) {
  BootstrapOptions options;
  options.timeout = std::chrono::milliseconds(deadline.left_ms());
  options.peer_timeout = std::chrono::milliseconds(config_.peer_timeout_ms);
  options.build_id = MK_BUILD_ID;
  options.config = config_text();
  auto joined = Bootstrap::join(id, nranks_, rank_, options, abort_);
  if (!joined.ok()) return joined.status();
  {
    std::lock_guard lock(parts_mutex_);
    bootstrap_ = joined.take();
  }
  bootstrap_->on_peer_lost([this](int peer, Status reason) {
    mk_async_error_t error = MK_ASYNC_ERROR_INIT;
    error.status = reason.code();
    error.rank = peer;
    error.waiter_rank = -1;
    report(error, reason.sentence());
  });
  bootstrap_->on_arrival([this] {
    std::lock_guard lock(parts_mutex_);
    if (executor_) executor_->wake();
  });
  return {};
}

Status Communicator::find_topology(Deadline deadline) {
  constexpr size_t kMaxIdentity = 256;
  WireWriter writer;
  writer.text(host_identity(), kMaxIdentity);
  writer.text(config_.device == MK_DEVICE_HOST ? "" : cuda_device_identity(config_.cuda_device), kMaxIdentity);
  auto blocks = bootstrap_->all_gather(writer.take(), deadline, "the exchange of host identities");
  if (!blocks.ok()) return blocks.status();
  std::vector<std::string> hosts;
  std::vector<std::string> gpus;
  for (int peer = 0; peer < nranks_; ++peer) {
    WireReader reader(blocks.value()[peer]);
    hosts.push_back(reader.text(kMaxIdentity));
    gpus.push_back(reader.text(kMaxIdentity));
    if (!reader.complete()) {
      return Status(MK_ERROR_NETWORK, format("rank %d sent a malformed host identity", peer));
    }
  }
  topology_ = Topology::make(rank_, hosts, emulated_nodes_);
  return choose_device(hosts, gpus);
}

// Every rank comes to the same choice.
Status Communicator::choose_device(const std::vector<std::string>& hosts,
                                   const std::vector<std::string>& gpus) {
  if (config_.device == MK_DEVICE_HOST) return {};
  std::map<std::string, int> rank_of_gpu;
  bool everywhere = true;
  std::string shared;
  for (int peer = 0; peer < nranks_; ++peer) {
    if (gpus[peer].empty()) {
      everywhere = false;
      continue;
    }
    const auto [first, is_new] = rank_of_gpu.emplace(hosts[peer] + gpus[peer], peer);
    if (!is_new && shared.empty()) {
      shared = format("ranks %d and %d use the same GPU; give each a device of its own (config.cuda_device)",
                      first->second, peer);
    }
  }
  if (env::text("MK_SHARE_GPU") == "1") shared.clear();
  if (config_.device == MK_DEVICE_AUTO) {
    config_.device = everywhere && shared.empty() ? MK_DEVICE_CUDA : MK_DEVICE_HOST;
  } else if (!shared.empty()) {
    return Status(MK_ERROR_INVALID_ARGUMENT, shared);
  }
  return {};
}

ExecutorContext Communicator::executor_context() {
  return {topology_,
          *bootstrap_,
          abort_,
          endpoint_.get(),
          config_,
          [this](int peer) { return peek(peer); },
          [this](const std::string& sentence) { return recover(sentence); },
          [this](const mk_async_error_t& error, const std::string& sentence) { report(error, sentence); },
          [this](const void* pointer, size_t bytes) { return symmetric_offset(pointer, bytes); },
          [this](int local_rank, uint64_t offset) { return user_memory_->peer(local_rank, offset); },
          [this](const void* pointer, size_t bytes) { return registered_region(pointer, bytes); }};
}

Status Communicator::make_endpoint(Deadline deadline) {
  EndpointOptions options;
  options.backend = transport_;
  options.on_event = [this] {
    std::lock_guard lock(parts_mutex_);
    if (executor_) executor_->wake();
  };
  options.on_peer_error = [this](int peer, Status reason) {
    if (peer >= 0) await_verdict();
    if (closing_.load(std::memory_order_acquire)) return;  // a peer that has taken leave
    mk_async_error_t error = MK_ASYNC_ERROR_INIT;
    error.status = reason.code();
    error.rank = peer;
    error.waiter_rank = -1;
    report(error, reason.sentence());
  };
  if (config_.device == MK_DEVICE_CUDA) {
    auto traits = cuda_network_traits(config_.cuda_device);
    if (!traits.ok()) return traits.status();
    options.gpu_memory = true;
    options.pci_bus_id = traits->pci_bus_id;
    options.flush_writes = std::move(traits->flush_writes);
    options.idle = kKernelIdle;
  }
  auto endpoint = Endpoint::create(topology_, *bootstrap_, abort_, std::move(options), deadline);
  if (!endpoint.ok()) return endpoint.status();
  std::lock_guard lock(parts_mutex_);
  endpoint_ = endpoint.take();
  return {};
}

Status Communicator::make_executor(Deadline deadline) {
  auto made = config_.device == MK_DEVICE_CUDA ? make_cuda_executor(executor_context(), deadline)
                                               : make_host_executor(executor_context(), deadline);
  if (!made.ok()) return made.status();
  std::lock_guard lock(parts_mutex_);
  executor_ = made.take();
  return {};
}

void Communicator::on_abort() {
  const Status reason = abort_.reason();
  log(MK_LOG_INFO, "rank %d: %s: %s", rank_, mk_status_string(reason.code()), reason.sentence().c_str());
  std::lock_guard lock(parts_mutex_);
  if (executor_) executor_->wake();
  if (bootstrap_ && reason.code() != MK_ERROR_REMOTE) bootstrap_->announce_abort(reason.sentence());
}

void Communicator::abort() {
  abort_.raise(Status(MK_ERROR_ABORTED, format("rank %d called mk_comm_abort", rank_)));
  const Deadline deadline = Deadline::after(std::chrono::seconds(4));
  while (!deadline.passed()) {
    std::lock_guard lock(parts_mutex_);
    if (!executor_ || executor_->wait_idle(Deadline::after(std::chrono::milliseconds(10)))) return;
  }
}

void Communicator::tear_down() {
  torn_down_ = true;
  if (!finalized_) {
    abort_.raise(
        Status(MK_ERROR_ABORTED, format("rank %d destroyed its communicator without mk_comm_finalize", rank_)));
  }
  std::unique_ptr<Executor> executor;
  std::unique_ptr<Endpoint> endpoint;
  std::unique_ptr<Bootstrap> bootstrap;
  {
    std::lock_guard lock(parts_mutex_);
    executor = std::move(executor_);
    endpoint = std::move(endpoint_);
    bootstrap = std::move(bootstrap_);
  }
  if (executor) executor->stop();  // the launches use the rest
  endpoint.reset();                // what peers have sent still goes to the executor's memory
  executor.reset();
  user_memory_.reset();
  bootstrap.reset();
}

Status Communicator::usable() const {
  if (finalized_) {
    return Status(MK_ERROR_INVALID_HANDLE, "the communicator was finalized; only mk_comm_destroy is left");
  }
  return abort_.raised() ? abort_.reason() : Status();
}

Status Communicator::check_stream(mk_stream_t stream) const {
  if (executor_ == nullptr || executor_->device() == MK_DEVICE_CUDA || stream == nullptr) return {};
  return Status(MK_ERROR_INVALID_ARGUMENT,
                format("stream: the host executor has one queue of its own and expects NULL, saw %p",
                       static_cast<void*>(stream)));
}

// A rank that gives up because of another's death or abort closes its links, and fails in exchanges, too. The
// bootstrap knows whose it was, and says so within its time to settle.
void Communicator::await_verdict() const {
  const Deadline limit = Deadline::after(kVerdictPatience);
  while (!abort_.raised() && !closing_.load(std::memory_order_acquire) && !limit.passed()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

Status Communicator::fatal(Status status) {
  if (status.code() == MK_ERROR_ABORTED || status.code() == MK_ERROR_REMOTE) await_verdict();
  if (abort_.raised()) return abort_.reason();
  if (is_fatal(status.code())) {
    mk_async_error_t error = MK_ASYNC_ERROR_INIT;
    error.status = status.code();
    error.rank = -1;
    error.waiter_rank = rank_;
    std::snprintf(error.role, sizeof error.role, "host");
    report(error, status.sentence());
  }
  return status;
}

Status Communicator::meet(MeetingKind kind, const std::string& what, std::span<const std::byte> payload,
                          Deadline deadline) {
  if (kind != MeetingKind::recover) MK_RETURN_IF_ERROR(executor_->synchronize(nullptr));
  if (abort_.raised()) return abort_.reason();
  MeetingBlock mine;
  mine.kind = kind;
  mine.epoch = executor_->epoch();
  mine.what = what;
  mine.payload.assign(payload.begin(), payload.end());
  for (int peer = 0; peer < nranks_ && topology_.num_nodes > 1; ++peer)
    mine.sent.push_back(executor_->signals_sent(peer));
  auto gathered = bootstrap_->all_gather(mine.encode(), deadline, meeting_name(kind));
  if (!gathered.ok()) return fatal(gathered.status());

  std::vector<MeetingBlock> blocks;
  for (int peer = 0; peer < nranks_; ++peer) {
    auto block = MeetingBlock::decode(gathered.value()[peer], nranks_);
    if (!block)
      return fatal(
          Status(MK_ERROR_NETWORK, format("rank %d sent a malformed %s block", peer, meeting_name(kind))));
    blocks.push_back(std::move(*block));
  }
  const auto recovering = std::find_if(blocks.begin(), blocks.end(), [](const MeetingBlock& block) {
    return block.kind == MeetingKind::recover;
  });
  if (recovering != blocks.end()) {
    uint64_t epoch = 0;
    uint64_t expected = 0;
    for (const MeetingBlock& block : blocks) {
      epoch = std::max(epoch, block.epoch);
      if (!block.sent.empty()) expected += block.sent[rank_];
    }
    if (Status quiet = quiesce(expected, epoch, deadline); !quiet.ok()) return fatal(std::move(quiet));
    // The one that is in recovery itself adds the same words.
    return Status(MK_ERROR_MISMATCH,
                  (kind == MeetingKind::recover ? "" : "ranks disagree: ") + recovering->what);
  }
  for (int peer = 1; peer < nranks_; ++peer) {
    if (blocks[peer].kind == blocks[0].kind && blocks[peer].payload == blocks[0].payload) continue;
    std::string sentence =
        format("rank 0 called %s, rank %d called %s", blocks[0].what.c_str(), peer, blocks[peer].what.c_str());
    if (blocks[0].what == blocks[peer].what) sentence += " with other tuning or dtypes";
    return Status(MK_ERROR_MISMATCH, "ranks disagree: " + sentence);
  }
  return {};
}

// Every rank is here: what was sent to this one arrives and belongs to the past, and all count launches alike
// again.
Status Communicator::quiesce(uint64_t expected_signals, uint64_t epoch, Deadline deadline) {
  while (topology_.num_nodes > 1 && executor_->signals_received() < expected_signals) {
    if (abort_.raised()) return abort_.reason();
    if (deadline.passed()) {
      return Status(
          MK_ERROR_TIMEOUT,
          format("rank %d waited for %llu signals on the network to arrive after a disagreement, saw %llu",
                 rank_, static_cast<unsigned long long>(expected_signals),
                 static_cast<unsigned long long>(executor_->signals_received())));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  executor_->rebase_signals();
  executor_->set_epoch(epoch);
  return bootstrap_->all_gather({}, deadline, "recovery from a disagreement").status();
}

Result<std::string> Communicator::recover(const std::string& sentence) {
  // As long as a peer has not come to the launch in question it is waited for, as in the launch itself; its
  // death raises the abort token.
  const Deadline deadline = Deadline::after(std::chrono::hours(24 * 365));
  Status status = meet(MeetingKind::recover, sentence, {}, deadline);
  if (status.code() == MK_ERROR_MISMATCH) return status.sentence();
  return status;
}

std::optional<Meeting> Communicator::peek(int peer) {
  std::optional<Bytes> bytes;
  {
    std::lock_guard lock(parts_mutex_);
    if (!bootstrap_) return std::nullopt;
    bytes = bootstrap_->peek(peer);
  }
  if (!bytes) return std::nullopt;
  const auto block = MeetingBlock::decode(*bytes, nranks_);
  if (!block) return std::nullopt;
  return Meeting{block->kind, block->epoch, block->what};
}

void Communicator::report(const mk_async_error_t& error, const std::string& sentence) {
  {
    std::lock_guard lock(error_mutex_);
    const bool worse = is_fatal(error.status) && !is_fatal(async_error_.status);
    if (async_error_.status == MK_SUCCESS || worse) {
      async_error_ = error;
      async_sentence_ = sentence;
      last_error_ = sentence;
    }
  }
  log(MK_LOG_WARN, "rank %d: %s: %s", rank_, mk_status_string(error.status), sentence.c_str());
  if (is_fatal(error.status)) abort_.raise(Status(error.status, sentence));
}

mk_async_error_t Communicator::async_error() const {
  std::lock_guard lock(error_mutex_);
  mk_async_error_t error = async_error_;
  const Status reason = abort_.reason();
  if (!is_fatal(error.status) && !reason.ok() && !finalized_) error.status = reason.code();
  return error;
}

Status Communicator::asynchronous_status() const {
  std::lock_guard lock(error_mutex_);
  const Status reason = abort_.reason();
  if (!is_fatal(async_error_.status) && !reason.ok() && !finalized_) return reason;
  return async_error_.status == MK_SUCCESS ? Status() : Status(async_error_.status, async_sentence_);
}

Status Communicator::clear_async_error() {
  std::lock_guard lock(error_mutex_);
  if (abort_.raised()) {
    return Status(
        MK_ERROR_INVALID_ARGUMENT,
        format("mk_comm_clear_async_error: %s ends the communicator and cannot be cleared; destroy it",
               mk_status_string(abort_.reason().code())));
  }
  async_error_ = MK_ASYNC_ERROR_INIT;
  async_error_.rank = -1;
  async_error_.waiter_rank = -1;
  return {};
}

void Communicator::set_last_error(const std::string& sentence) {
  std::lock_guard lock(error_mutex_);
  last_error_ = sentence;
}

std::string Communicator::last_error() const {
  std::lock_guard lock(error_mutex_);
  return last_error_;
}

size_t Communicator::flight_record(mk_flight_entry_t* entries, size_t capacity) const {
  std::lock_guard lock(parts_mutex_);
  return executor_ ? executor_->flight_record(entries, capacity) : 0;
}

mk_comm_info_t Communicator::info() const {
  mk_comm_info_t info = MK_COMM_INFO_INIT;
  info.rank = rank_;
  info.nranks = nranks_;
  info.node = topology_.node();
  info.num_nodes = topology_.num_nodes;
  info.local_rank = topology_.local_rank();
  info.local_nranks = topology_.local_nranks();
  info.device = executor_->device();
  info.cuda_device = executor_->cuda_device();
  info.host_threads = executor_->num_threads();
  info.prepared = prepared_bits_;
  info.epoch = executor_->epoch();
  info.workspace_bytes = workspace_bytes();
  std::snprintf(info.transport, sizeof info.transport, "%s", endpoint_ ? endpoint_->backend() : "none");
  return info;
}

Status Communicator::finalize() {
  MK_RETURN_IF_ERROR(usable());
  const Deadline deadline = step_deadline();
  MK_RETURN_IF_ERROR(meet(MeetingKind::finalize, "mk_comm_finalize", {}, deadline));
  // No rank closes anything before all have come to leave().
  closing_.store(true, std::memory_order_release);
  if (Status left = bootstrap_->leave(deadline); !left.ok()) return fatal(std::move(left));
  finalized_ = true;
  return asynchronous_status();
}

Result<size_t> Communicator::workspace_needed(const OperatorCall& call) const {
  const Result<mk_plan_t> plan = executor_->plan(call);
  if (!plan.ok()) return plan.status();
  return static_cast<size_t>(plan.value().workspace_bytes);
}

size_t Communicator::workspace_bytes() const {
  return executor_->workspace_bytes() + (user_memory_ ? user_memory_->size() : 0);
}

bool Communicator::workspace_has_room(size_t bytes, size_t granularity) const {
  const uint64_t limit = config_.max_workspace_bytes;
  const uint64_t in_use = workspace_bytes();
  const uint64_t room = limit > in_use ? limit - in_use : 0;
  return limit == 0 || bytes <= room / granularity * granularity;
}

Status Communicator::prepare(const OperatorCall& call) {
  const std::string what = format("%s prepare(%s)", operator_name(operator_of(call)), sizes_of(call).c_str());
  const Deadline deadline = step_deadline();
  // What cannot be planned needs no other rank to be refused.
  const Result<size_t> needed = workspace_needed(call);
  if (!needed.ok()) return needed.status();
  MK_RETURN_IF_ERROR(meet(MeetingKind::prepare, what, payload_of(call), deadline));
  if (!executor_->prepared(call) && !workspace_has_room(needed.value(), executor_->workspace_granularity())) {
    return Status(MK_ERROR_OUT_OF_MEMORY,
                  format("%s needs %zu bytes of workspace, in steps of %zu, beside the %zu in use, "
                         "max_workspace_bytes is %llu",
                         what.c_str(), needed.value(), executor_->workspace_granularity(), workspace_bytes(),
                         static_cast<unsigned long long>(config_.max_workspace_bytes)));
  }
  if (Status done = executor_->prepare(call, deadline); !done.ok()) return fatal(std::move(done));
  prepared_bits_ |= 1 << operator_of(call);
  return {};
}

Status Communicator::enqueue(const OperatorCall& call, mk_stream_t stream, bool may_prepare) {
  const Result<mk_plan_t> plan = executor_->plan(call);
  if (!plan.ok()) return plan.status();
  if (!plan.value().prepared) {
    const Result<bool> capturing = executor_->capturing(stream);
    if (!capturing.ok()) return capturing.status();
    if (!may_prepare || capturing.value() || config_.require_prepare) {
      const char* why = capturing.value() ? "the stream is being captured"
                        : may_prepare     ? "require_prepare is set"
                                          : "the call is inside a group";
      return Status(MK_ERROR_NOT_PREPARED,
                    format("%s(%s) is beyond what was prepared and %s; call mk_%s_prepare first",
                           operator_name(operator_of(call)), sizes_of(call).c_str(), why,
                           operator_name(operator_of(call))));
    }
    // From globally equal fields alone: the others may differ between ranks.
    MK_RETURN_IF_ERROR(prepare(maxima_of(call)));
  }
  return executor_->enqueue(call, stream);
}

Status Communicator::synchronize(mk_stream_t stream) {
  MK_RETURN_IF_ERROR(executor_->synchronize(stream));
  return asynchronous_status();
}

}  // namespace mk
