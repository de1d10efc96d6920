// SPDX-License-Identifier: MIT
#include "host_executor.h"

#include <algorithm>
#include <map>
#include <system_error>

namespace mk {
namespace {

constexpr const HostOperator* kOperators[] = {
    &kHostAllgatherGemm,         &kHostGemmReduceScatter, &kHostGemmAllreduce, &kHostRingAttention,
    &kHostRingAttentionBackward, &kHostMoeDispatchGemm,   &kHostMoeGemmCombine};

}  // namespace

const HostOperator* host_operator(mk_operator_t op) {
  for (const HostOperator* candidate : kOperators) {
    if (candidate->op == op) return candidate;
  }
  return nullptr;
}

HostExecutor::HostExecutor(ExecutorContext context, std::unique_ptr<HostRank> rank, int num_threads)
    : context_(std::move(context)),
      rank_(std::move(rank)),
      num_threads_(num_threads),
      thread_([this] { serve(); }) {}

HostExecutor::~HostExecutor() { stop(); }

void HostExecutor::stop() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Result<mk_plan_t> HostExecutor::plan(const OperatorCall& call) const {
  const HostOperator* op = host_operator(operator_of(call));
  if (op == nullptr) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("%s is not built for the host executor", operator_name(operator_of(call))));
  }
  Result<mk_plan_t> plan = op->plan(call, rank_->view(), num_threads_);
  if (plan.ok()) plan->prepared = prepared(call) ? 1 : 0;
  return plan;
}

const HostExecutor::Prepared* HostExecutor::find_prepared(const OperatorCall& call) const {
  // The largest of those that cover it: what a launch of a mixture-of-experts operator needs depends on its
  // data.
  const Prepared* found = nullptr;
  for (const Prepared& candidate : prepared_) {
    if (!covers(candidate.maxima, call)) continue;
    if (found == nullptr || arenas_[found->arena].bank_bytes < arenas_[candidate.arena].bank_bytes) {
      found = &candidate;
    }
  }
  return found;
}

Status HostExecutor::prepare(const OperatorCall& call, Deadline deadline) {
  if (find_prepared(call) != nullptr) return {};
  const Result<mk_plan_t> wanted = plan(call);
  if (!wanted.ok()) return wanted.status();
  const size_t bank_bytes = std::max<size_t>(wanted.value().workspace_bytes / 2, 1);
  for (size_t index = 0; index < arenas_.size(); ++index) {
    if (arenas_[index].bank_bytes < bank_bytes) continue;
    prepared_.push_back({call, index});
    return {};
  }
  // Growth appends: launches within earlier maxima keep their arena.
  Result<Arena> arena = rank_->add_arena(bank_bytes, deadline);
  if (!arena.ok()) return arena.status();
  arenas_.push_back(arena.value());
  prepared_.push_back({call, arenas_.size() - 1});
  return {};
}

Status HostExecutor::enqueue(const OperatorCall& call, mk_stream_t) {
  const Prepared* prepared = find_prepared(call);
  const Result<mk_plan_t> chosen = plan(call);
  if (!chosen.ok()) return chosen.status();
  {
    std::lock_guard lock(mutex_);
    queue_.push_back({call, chosen.value(), prepared->arena});
  }
  changed_.notify_all();
  return {};
}

Status HostExecutor::synchronize(mk_stream_t) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty() && !running_; });
  return {};
}

bool HostExecutor::wait_idle(Deadline deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline.moment(), [this] { return queue_.empty() && !running_; });
}

uint64_t HostExecutor::epoch() const {
  std::lock_guard lock(mutex_);
  return epoch_;
}

void HostExecutor::set_epoch(uint64_t epoch) {
  std::lock_guard lock(mutex_);
  epoch_ = epoch;
}

uint64_t HostExecutor::signals_sent(int peer) const {
  return rank_->signals_sent(peer).load(std::memory_order_relaxed);
}

uint64_t HostExecutor::signals_received() const { return rank_->endpoint() ? rank_->signals_received() : 0; }

void HostExecutor::rebase_signals() {
  if (rank_->endpoint()) rank_->rebase_signals();
}

Status HostExecutor::start_trace(int64_t max_spans) {
  constexpr int64_t kDefaultSpans = 65536;
  trace_ = std::make_unique<HostTrace>(static_cast<size_t>(max_spans > 0 ? max_spans : kDefaultSpans));
  running_trace_.store(trace_.get(), std::memory_order_release);
  return {};
}

Result<Trace> HostExecutor::collect_trace() {
  MK_RETURN_IF_ERROR(synchronize(nullptr));
  return trace_->trace();
}

void HostExecutor::stop_trace() {
  (void)synchronize(nullptr);
  running_trace_.store(nullptr, std::memory_order_release);
  trace_.reset();
}

void HostExecutor::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    const Queued launch = queue_.front();
    queue_.pop_front();
    running_ = true;
    const uint64_t epoch = ++epoch_;
    lock.unlock();
    run(launch, epoch);
    lock.lock();
    running_ = false;
    changed_.notify_all();
  }
}

void HostExecutor::run(const Queued& queued, uint64_t epoch) {
  flight_.record(epoch, queued.call, FlightRecorder::running);
  HostLaunch launch(*rank_, context_, queued.call, queued.plan, arenas_[queued.arena], epoch);
  HostTrace* const trace = running_trace_.load(std::memory_order_acquire);
  const uint64_t start_ns = trace_clock_ns();
  const bool ran = !context_.abort.raised() && run_roles(launch, trace);
  finish(launch, ran);
  if (trace != nullptr) {
    trace->add_launch({epoch, launch.op(), sizes_of(queued.call), start_ns, trace_clock_ns()});
  }
  const bool failed = context_.abort.raised() || launch.mismatched() || !launch.data_error().empty() || !ran;
  flight_.record(epoch, queued.call, failed ? FlightRecorder::failed : FlightRecorder::completed);
}

// False: the system gave no thread.
bool HostExecutor::run_roles(HostLaunch& launch, HostTrace* trace) {
  launch.publish_entry();
  std::vector<Role> roles = host_operator(launch.op())->roles(launch);
  roles.emplace_back("entry", [&launch](Waiter& waiter) { run_entry_role(launch, waiter); });
  std::map<std::string, int> numbers;  // threads of each role so far
  std::vector<std::function<void()>> functions;
  for (const Role& role : roles) {
    HostTrack* const track = trace ? trace->track(role.first, numbers[role.first]++, launch.epoch) : nullptr;
    functions.emplace_back([&launch, &role, track] {
      Waiter waiter(launch, role.first, track);
      role.second(waiter);
    });
  }
  return pool_.run(functions);
}

void HostExecutor::finish(HostLaunch& launch, bool ran) {
  if (context_.abort.raised()) return;
  mk_async_error_t error = MK_ASYNC_ERROR_INIT;
  error.op = launch.op();
  error.rank = -1;
  error.waiter_rank = -1;
  error.epoch = launch.epoch;
  if (!ran) {
    error.status = MK_ERROR_SYSTEM;
    context_.report(error,
                    format("%s: the system gave no thread for a role; lower host_threads (%d) or raise the "
                           "process' thread limit",
                           operator_name(launch.op()), num_threads_));
    return;
  }
  // The launch ends when the network no longer reads what it posted.
  if (rank_->endpoint() && !drain_puts(launch)) return;
  if (!launch.mismatched()) {
    if (launch.data_error().empty()) return;
    error.status = MK_ERROR_DATA;
    error.rank = launch.data_error_rank();
    context_.report(error, format("mk_%s: %s", operator_name(launch.op()), launch.data_error().c_str()));
    return;
  }
  const Result<std::string> sentence = context_.recover(launch.mismatch_sentence());
  if (!sentence.ok()) {
    error.status = sentence.status().code();
    context_.report(error, sentence.status().sentence());
    return;
  }
  error.status = MK_ERROR_MISMATCH;
  context_.report(error, "ranks disagree: " + sentence.value());
}

bool HostExecutor::drain_puts(HostLaunch& launch) {
  Endpoint& endpoint = *rank_->endpoint();
  HostTrace* const trace = running_trace_.load(std::memory_order_acquire);
  Waiter waiter(launch, "host", trace ? trace->track("host", 0, launch.epoch) : nullptr);
  while (true) {
    waiter.look();
    const uint64_t completed = endpoint.completed();
    const uint64_t posted = endpoint.posted();
    if (completed >= posted) return true;
    if (context_.abort.raised()) return false;
    if (launch.mismatched()) {  // a stopped launch still waits for its puts
      rank_->sleep(rank_->doorbell(), 1);
    } else if (!waiter.sleep({"put", posted, -1, completed, posted}) && !launch.mismatched()) {
      return false;
    }
  }
}

Result<std::unique_ptr<Executor>> make_host_executor(ExecutorContext context, Deadline deadline) {
  auto memory = make_host_symmetric_memory(context.topology, context.exchange, context.abort, deadline);
  if (!memory.ok()) return memory.status();
  auto rank = std::make_unique<HostRank>(context.topology, memory.take(), context.endpoint);
  MK_RETURN_IF_ERROR(rank->set_up(deadline));
  int threads = context.config.host_threads;
  if (threads == 0) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    threads = std::max(1, cores / context.topology.local_nranks());
  }
  try {
    return std::unique_ptr<Executor>(
        std::make_unique<HostExecutor>(std::move(context), std::move(rank), threads));
  } catch (const std::system_error& failure) {
    return Status(MK_ERROR_SYSTEM, format("no thread for the host executor: %s", failure.what()));
  }
}

}  // namespace mk
