// SPDX-License-Identifier: MIT
#include "nic.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>

#include "capabilities.h"
#include "memory.h"

namespace softnic {
namespace {

constexpr std::chrono::seconds kQuiesceLimit{2};

}  // namespace

uint64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

ControlLock::ControlLock(Nic& nic) {
  nic.control_waiting_.fetch_add(1);
  lock_ = Nic::Lock(nic.mutex_);
  nic.control_waiting_.fetch_sub(1);
}

Nic::Nic(Context& context, std::shared_ptr<const Configuration> configuration, int index)
    : context_(context),
      configuration_(std::move(configuration)),
      index_(index),
      ns_per_byte_([&] {
        const double rate = configuration_->nics[static_cast<size_t>(index)].gigabits_per_second;
        return rate > 0 ? 8 / rate : 0;
      }()),
      latency_ns_(static_cast<uint64_t>(configuration_->nics[static_cast<size_t>(index)].latency_us * 1000)),
      inbox_(std::make_shared<Inbox>()),
      wire_(std::make_unique<Wire>(configuration_->fabric, inbox_)),
      down_ports_(configuration_->nics[static_cast<size_t>(index)].down_ports),
      random_(static_cast<uint64_t>(index) + 1) {
  permit_fetching();
  if (usable()) worker_ = std::thread([this] { run(); });
}

Nic::~Nic() {
  {
    ControlLock lock(*this);
    for (auto& entry : queue_pairs_) quiesce(entry.second.get(), lock.get());
    stopping_ = true;
  }
  inbox_->wake();
  if (worker_.joinable()) worker_.join();
  wire_.reset();
}

Address Nic::claimed_address(uint8_t port) const {
  const bool wrong = configuration_->nics[static_cast<size_t>(index_)].wrong_gid;
  return {wrong ? kMaxEndpoints : wire_->endpoint(), port};
}

MemoryRegion* Nic::add_memory(ibv_pd* pd, void* address, size_t bytes, uint64_t iova, unsigned access) {
  constexpr unsigned kNeedLocalWrite = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  if (pd == nullptr || ((access & kNeedLocalWrite) != 0 && (access & IBV_ACCESS_LOCAL_WRITE) == 0) ||
      (is_efa() && (access & IBV_ACCESS_REMOTE_ATOMIC) != 0) || (address == nullptr && bytes != 0)) {
    errno = EINVAL;
    return nullptr;
  }
  auto region = std::make_unique<MemoryRegion>();
  region->context = pd->context;
  region->pd = pd;
  region->addr = address;
  region->length = bytes;
  region->iova = iova;
  region->access = access;
  region->device = cuda_device_of(reinterpret_cast<uint64_t>(address));
  if (region->device >= 0) gpu_memory_registered(reinterpret_cast<uint64_t>(address), bytes);
  ControlLock lock(*this);
  // Keys are not used again, so that a stale one is found out.
  region->handle = next_key_;
  region->lkey = region->rkey = next_key_ << 8 | (next_key_ * 37 & 0xff);
  ++next_key_;
  MemoryRegion* const result = region.get();
  memory_[result->rkey] = std::move(region);
  return result;
}

int Nic::remove_memory(MemoryRegion* region) {
  ControlLock lock(*this);
  const auto found = memory_.find(region->rkey);
  if (found == memory_.end() || found->second.get() != region) return EINVAL;
  // From here on it is found by nobody; a copy under way ends first.
  std::unique_ptr<MemoryRegion> owned = std::move(found->second);
  memory_.erase(found);
  if (region->device >= 0) forgotten_.push_back(region->rkey);
  inbox_->wake();
  const auto unused = [&] { return copying_memory_ != region && region->copies == 0; };
  if (changed_.wait_for(lock.get(), kQuiesceLimit, unused)) return 0;
  // Somebody still has it in hand: better lost than freed under him.
  static_cast<void>(owned.release());
  return EBUSY;
}

QueuePair* Nic::add_queue_pair(ibv_pd* pd, const ibv_qp_init_attr_ex& attributes, bool is_srd) {
  auto qp = std::make_unique<QueuePair>(this);
  qp->is_srd = is_srd;
  qp->signal_all = attributes.sq_sig_all != 0 || is_srd;
  qp->capacity = attributes.cap;
  ibv_qp& base = qp->qp_base;
  base.context = pd->context;
  base.qp_context = attributes.qp_context;
  base.pd = pd;
  base.send_cq = attributes.send_cq;
  base.recv_cq = attributes.recv_cq;
  base.state = IBV_QPS_RESET;
  base.qp_type = attributes.qp_type;
  set_work_request_calls(*qp);
  ControlLock lock(*this);
  if (queue_pairs_.size() >= kMaxQueuePairs) {
    errno = ENOMEM;
    return nullptr;
  }
  base.qp_num = base.handle = next_qp_number_++;
  ++to_queue(base.send_cq)->num_users;
  ++to_queue(base.recv_cq)->num_users;
  QueuePair* const result = qp.get();
  queue_pairs_[base.qp_num] = std::move(qp);
  return result;
}

std::optional<Address> Nic::resolve(const ibv_ah_attr& attributes, int& error) const {
  error = EINVAL;
  if (attributes.port_num < 1 || attributes.port_num > configuration_->num_ports) return std::nullopt;
  if (attributes.is_global == 0) {
    // Only InfiniBand has a route without a GRH.
    if (configuration_->kind != LinkKind::infiniband || attributes.dlid == 0) return std::nullopt;
    return address_of_lid(attributes.dlid).value_or(Address{});
  }
  if (attributes.grh.sgid_index >= gid_table_length(configuration_->kind)) return std::nullopt;
  // An unknown GID is no error here: what is sent there is lost.
  return address_of_gid(attributes.grh.dgid).value_or(Address{});
}

int Nic::prepare_route(QueuePair* qp, const ibv_qp_attr& attributes) {
  int error = 0;
  const std::optional<Address> remote = resolve(attributes.ah_attr, error);
  if (!remote) return error;
  qp->remote = *remote;
  qp->path = attributes.ah_attr.is_global == 0
                 ? 0
                 : path_type(configuration_->kind, attributes.ah_attr.grh.sgid_index);
  return 0;
}

void Nic::set_state(QueuePair* qp, ibv_qp_state state) {
  const std::lock_guard lock(qp->post_mutex);
  qp->current_state.store(state);
  qp->qp_base.state = state;
}

int Nic::modify(QueuePair* qp, const ibv_qp_attr& attributes, int mask) {
  ControlLock lock(*this);
  if (const int error = check_modify(*qp, attributes, mask); error != 0) return error;
  if ((mask & IBV_QP_PORT) != 0 &&
      (attributes.port_num < 1 || attributes.port_num > configuration_->num_ports)) {
    return EINVAL;
  }
  if ((mask & IBV_QP_AV) != 0) {
    if (const int error = prepare_route(qp, attributes); error != 0) return error;
  }
  take_attributes(qp->attributes, attributes, mask);
  if ((mask & IBV_QP_STATE) == 0) return 0;
  switch (attributes.qp_state) {
    case IBV_QPS_RESET:
      if (const int error = quiesce(qp, lock.get()); error != 0) return error;
      clear(qp);
      set_state(qp, IBV_QPS_RESET);
      return 0;
    case IBV_QPS_ERR:
      if (qp->current_state.load() != IBV_QPS_RESET) {
        fail(qp);
        inbox_->wake();
      } else {
        set_state(qp, IBV_QPS_ERR);
      }
      return 0;
    default:
      set_state(qp, attributes.qp_state);
      return 0;
  }
}

// Afterwards nobody reads memory for this QP any more, and the worker has forgotten it.
int Nic::quiesce(QueuePair* qp, Lock& lock) {
  set_state(qp, IBV_QPS_ERR);
  qp->discarding = true;
  if (!qp->quiescing) {
    qp->quiescing = true;
    quiescing_.push_back(qp);
  }
  inbox_->wake();
  const bool quiet = changed_.wait_for(lock, kQuiesceLimit, [&] {
    return !qp->quiescing && qp->fences == 0 && copying_qp_ != qp && !is_copying(qp);
  });
  if (!quiet && !qp->quiescing && copying_qp_ != qp && !is_copying(qp)) {
    // A peer does not answer although its link stands: its process is stopped. Hardware would not wait for it
    // either.
    std::erase_if(fences_, [&](const auto& fence) { return fence.second == qp->number(); });
    qp->fences = 0;
    return 0;
  }
  return quiet ? 0 : EBUSY;
}

// Everything that the QP has queued is forgotten, and so are its completions.
void Nic::clear(QueuePair* qp) {
  drop_arrivals(qp, nullptr, 0);
  std::erase(active_, qp);
  std::erase(delivering_, qp);
  {
    const std::lock_guard lock(doorbell_mutex_);
    std::erase(doorbells_, qp);
  }
  const std::lock_guard lock(qp->post_mutex);
  qp->posted.clear();
  qp->receives.clear();
  qp->num_posted = qp->num_receives = 0;
  qp->num_retired = qp->num_receives_retired = 0;
  qp->rung = false;
  qp->sending.clear();
  qp->unsettled.clear();
  qp->retries.clear();
  qp->next_unsent = qp->resume_ns = qp->expected_sequence = 0;
  qp->refused_attempt = -1;
  qp->active = qp->failing = qp->refusing = qp->fatal_raised = qp->discarding = false;
  to_queue(qp->qp_base.send_cq)->purge(qp);
  to_queue(qp->qp_base.recv_cq)->purge(qp);
}

void Nic::query(QueuePair* qp, ibv_qp_attr& attributes) {
  ControlLock lock(*this);
  attributes = qp->attributes;
  attributes.qp_state = attributes.cur_qp_state = qp->current_state.load();
  attributes.cap = qp->capacity;
}

int Nic::stop(QueuePair* qp) {
  ControlLock lock(*this);
  const int error = quiesce(qp, lock.get());
  if (error == 0) clear(qp);
  return error;
}

void Nic::remove_queue_pair(QueuePair* qp) {
  ControlLock lock(*this);
  clear(qp);
  --to_queue(qp->qp_base.send_cq)->num_users;
  --to_queue(qp->qp_base.recv_cq)->num_users;
  queue_pairs_.erase(qp->number());
}

bool Nic::in_use(const CompletionQueue* cq) {
  ControlLock lock(*this);
  return cq->num_users != 0;
}

bool Nic::in_use(const ibv_pd* pd) {
  ControlLock lock(*this);
  const auto of_memory = [pd](const auto& entry) { return entry.second->pd == pd; };
  const auto of_queue_pair = [pd](const auto& entry) { return entry.second->qp_base.pd == pd; };
  return std::any_of(memory_.begin(), memory_.end(), of_memory) ||
         std::any_of(queue_pairs_.begin(), queue_pairs_.end(), of_queue_pair);
}

AddressHandle* Nic::add_address_handle(ibv_pd* pd, const ibv_ah_attr& attributes) {
  int error = 0;
  const std::optional<Address> remote = resolve(attributes, error);
  if (!remote) {
    errno = error;
    return nullptr;
  }
  auto handle = std::make_unique<AddressHandle>();
  handle->context = pd->context;
  handle->pd = pd;
  handle->remote = *remote;
  ControlLock lock(*this);
  KnownPeer& known = known_peers_[remote->endpoint];
  if (known.handles++ == 0) known.number = next_handle_++;
  handle->handle = handle->number = known.number;
  return handle.release();
}

void Nic::remove_address_handle(AddressHandle* handle) {
  ControlLock lock(*this);
  if (--known_peers_[handle->remote.endpoint].handles == 0) known_peers_.erase(handle->remote.endpoint);
  delete handle;
}

void Nic::ring(QueuePair* qp) {
  if (qp->rung.exchange(true)) return;
  {
    const std::lock_guard lock(doorbell_mutex_);
    doorbells_.push_back(qp);
  }
  inbox_->wake();
}

void Nic::raise(const ibv_async_event& event) {
  {
    const std::lock_guard lock(event_mutex_);
    events_.push_back(event);
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(context_.context.async_fd, &one, sizeof(one));
}

bool Nic::take_event(ibv_async_event& event) {
  const std::lock_guard lock(event_mutex_);
  if (events_.empty()) return false;
  event = events_.front();
  events_.pop_front();
  return true;
}

void Nic::forget_events(const void* element) {
  const std::lock_guard lock(event_mutex_);
  for (size_t index = 0; index < events_.size();) {
    if (static_cast<const void*>(events_[index].element.qp) != element) {
      ++index;
      continue;
    }
    events_.erase(events_.begin() + static_cast<std::ptrdiff_t>(index));
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t taken = ::read(context_.context.async_fd, &count, sizeof(count));
  }
}

void Nic::raise_qp(QueuePair* qp, ibv_event_type type) {
  if (qp->fatal_raised) return;
  qp->fatal_raised = true;
  ibv_async_event event{};
  event.element.qp = qp->base();
  event.event_type = type;
  raise(event);
}

void Nic::fail_port(uint8_t port) {
  if ((down_ports_.fetch_or(1u << (port - 1)) >> (port - 1) & 1) != 0) return;
  ibv_async_event event{};
  event.element.port_num = port;
  event.event_type = IBV_EVENT_PORT_ERR;
  raise(event);
}

bool Nic::inject(const char* fault, QueuePair* qp, uint8_t port) {
  ControlLock lock(*this);
  const auto is = [&](const char* name) { return std::strcmp(fault, name) == 0; };
  ibv_async_event event{};
  if (is("port_down") && port >= 1 && port <= configuration_->num_ports) {
    fail_port(port);
  } else if (is("port_up") && port >= 1 && port <= configuration_->num_ports) {
    down_ports_.fetch_and(~(1u << (port - 1)));
    event.element.port_num = port;
    event.event_type = IBV_EVENT_PORT_ACTIVE;
    raise(event);
  } else if (is("vanish")) {
    silent_ = true;
  } else if (is("device_fatal")) {
    silent_ = true;
    event.event_type = IBV_EVENT_DEVICE_FATAL;
    raise(event);
  } else if (is("qp_fatal") && qp != nullptr) {
    raise_qp(qp, IBV_EVENT_QP_FATAL);
    fail(qp);
  } else {
    return false;
  }
  inbox_->wake();
  return true;
}

}  // namespace softnic
