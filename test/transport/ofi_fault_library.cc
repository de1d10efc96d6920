// SPDX-License-Identifier: MIT
#include "ofi_fault_library.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

#include "transport/ofi/ofi.h"

namespace mk::test {
namespace {

constexpr size_t kMostAtOnce = 32;
constexpr int kLateByReads = 20;

// A write that was reported complete and is still to be done.
struct LyingWrite {
  fi_msg_rma request;
  iovec from;
  fi_rma_iov to;
  void* descriptor;
  int reads_left;
};

// One rank's objects, used by one thread at a time.
struct State {
  int rank = -1;
  bool open = false;  // the endpoint is enabled
  std::mt19937_64 random;
  fid_ep* endpoint = nullptr;
  std::deque<fi_cq_msg_entry> held;
  std::optional<fi_cq_err_entry> error;
  std::deque<LyingWrite> lies;
  int keys_refused = 0;
};

struct Real {
  fi_ops_fabric fabric;
  fi_ops_domain domain;
  fi_ops_mr mr;
  fi_ops_cq cq;
  fi_ops_msg msg;
  fi_ops_rma rma;
};

std::mutex g_mutex;  // of g_states and g_real
std::map<const void*, std::shared_ptr<State>> g_states;
Real g_real, g_fake;
OfiFaults g_faults;
thread_local int t_rank = -1;
thread_local std::shared_ptr<State> t_state;
fi_context2 g_lie;  // context of the writes that have been reported

State& state_of(const void* object) {
  const std::lock_guard lock(g_mutex);
  return *g_states.at(object);
}
void remember(const void* object) {
  const std::lock_guard lock(g_mutex);
  g_states[object] = t_state;
}
bool chance(State& state, int percent) { return static_cast<int>(state.random() % 100) < percent; }
bool armed(const State& state) { return state.rank == 0 && g_faults.armed.load(); }

// Gives an object its faulty table. All objects of a type have the same real one.
template <class OPS>
void replace(OPS*& table, OPS& real, OPS& fake, void (*change)(OPS&)) {
  const std::lock_guard lock(g_mutex);
  if (fake.size == 0) {
    real = *table;
    fake = *table;
    change(fake);
  }
  table = &fake;
}

OfiOperation kind_of(const fi_cq_msg_entry& entry) {
  if ((entry.flags & FI_RMA) != 0) return OfiOperation::write;
  return (entry.flags & FI_RECV) != 0 ? OfiOperation::receive : OfiOperation::message;
}

ssize_t issue(State& state, LyingWrite& lie) {
  lie.request.msg_iov = &lie.from;
  lie.request.rma_iov = &lie.to;
  lie.request.desc = &lie.descriptor;
  lie.request.context = &g_lie;
  return g_real.rma.writemsg(state.endpoint, &lie.request, FI_COMPLETION);
}

// Takes what the real queue has.
ssize_t collect(fid_cq* queue, State& state) {
  while (!state.lies.empty() && --state.lies.front().reads_left < 0) {
    if (issue(state, state.lies.front()) != 0) break;
    state.lies.pop_front();
  }
  fi_cq_msg_entry entries[kMostAtOnce];
  const ssize_t count = g_real.cq.read(queue, entries, kMostAtOnce);
  for (ssize_t n = 0; n < count; ++n) {
    const fi_cq_msg_entry& entry = entries[n];
    if (entry.op_context == &g_lie || (armed(state) && g_faults.swallow)) continue;
    if (armed(state) && kind_of(entry) == g_faults.failing) {
      state.error.emplace();
      state.error->op_context = entry.op_context;
      state.error->flags = entry.flags;
      state.error->err = g_faults.error;
      g_faults.armed = false;
      continue;
    }
    state.held.push_back(entry);
  }
  return count < 0 && count != -FI_EAGAIN ? count : 0;
}

ssize_t read_queue(fid_cq* queue, void* buffer, size_t count) {
  State& state = state_of(queue);
  if (armed(state) && g_faults.queue_error != 0) return -g_faults.queue_error;
  if (chance(state, g_faults.refuse_percent)) return -FI_EAGAIN;
  if (const ssize_t result = collect(queue, state); result != 0) return result;
  if (state.error) return -FI_EAVAIL;
  size_t given = std::min({count, state.held.size(), kMostAtOnce});
  if (g_faults.late && !state.held.empty()) {
    std::shuffle(state.held.begin(), state.held.end(), state.random);
    given = state.random() % 4 == 0 ? state.random() % (given + 1) : 0;
  }
  if (given == 0) return -FI_EAGAIN;
  std::copy_n(state.held.begin(), given, static_cast<fi_cq_msg_entry*>(buffer));
  state.held.erase(state.held.begin(), state.held.begin() + static_cast<ptrdiff_t>(given));
  return static_cast<ssize_t>(given);
}

ssize_t read_error(fid_cq* queue, fi_cq_err_entry* entry, uint64_t flags) {
  State& state = state_of(queue);
  if (!state.error) {
    const ssize_t count = g_real.cq.readerr(queue, entry, flags);
    // Nobody knows of the write that was reported complete and then failed.
    return count == 1 && entry->op_context == &g_lie ? -FI_EAGAIN : count;
  }
  *entry = *state.error;
  state.error.reset();
  return 1;
}

const char* explain(fid_cq*, int, const void*, char*, size_t) { return ""; }

ssize_t write_message(fid_ep* endpoint, const fi_msg_rma* request, uint64_t flags) {
  State& state = state_of(endpoint);
  if (chance(state, g_faults.refuse_percent)) return -FI_EAGAIN;
  if (armed(state) && g_faults.post_error != 0) return -g_faults.post_error;
  if (!g_faults.writes_lie) return g_real.rma.writemsg(endpoint, request, flags);
  state.lies.push_back({*request, *request->msg_iov, *request->rma_iov, *request->desc, kLateByReads});
  state.held.push_back({request->context, FI_RMA | FI_WRITE, 0});
  return 0;
}

ssize_t send_message(fid_ep* endpoint, const fi_msg* request, uint64_t flags) {
  State& state = state_of(endpoint);
  if (chance(state, g_faults.refuse_percent)) return -FI_EAGAIN;
  if (!armed(state) || !g_faults.mutate) return g_real.msg.sendmsg(endpoint, request, flags);
  iovec from = *request->msg_iov;
  g_faults.mutate(*static_cast<ofi::Message*>(from.iov_base), from);
  fi_msg changed = *request;
  changed.msg_iov = &from;
  return g_real.msg.sendmsg(endpoint, &changed, flags);
}

int open_queue(fid_domain* domain, fi_cq_attr* attributes, fid_cq** queue, void* context) {
  if (g_faults.no_descriptor && attributes->wait_obj != FI_WAIT_NONE) return -FI_ENOSYS;
  const int result = g_real.domain.cq_open(domain, attributes, queue, context);
  if (result != 0) return result;
  remember(*queue);
  replace<fi_ops_cq>((*queue)->ops, g_real.cq, g_fake.cq, [](fi_ops_cq& table) {
    table.read = read_queue;
    table.readerr = read_error;
    table.strerror = explain;
  });
  return 0;
}

int open_endpoint(fid_domain* domain, fi_info* info, fid_ep** endpoint, void* context) {
  const int result = g_real.domain.endpoint(domain, info, endpoint, context);
  if (result != 0) return result;
  t_state->endpoint = *endpoint;
  remember(*endpoint);
  replace<fi_ops_msg>((*endpoint)->msg, g_real.msg, g_fake.msg,
                      [](fi_ops_msg& table) { table.sendmsg = send_message; });
  replace<fi_ops_rma>((*endpoint)->rma, g_real.rma, g_fake.rma,
                      [](fi_ops_rma& table) { table.writemsg = write_message; });
  return 0;
}

int register_memory(fid* object, const void* base, size_t bytes, uint64_t access, uint64_t offset, uint64_t key,
                    uint64_t flags, fid_mr** memory, void* context) {
  State& state = state_of(object);
  const bool of_a_region = (access & FI_REMOTE_WRITE) != 0;
  if (of_a_region && state.keys_refused++ < g_faults.taken_keys) return -FI_ENOKEY;
  if (of_a_region && state.rank == 1 && g_faults.memory_error != 0) return -g_faults.memory_error;
  return g_real.mr.reg(object, base, bytes, access, offset, key, flags, memory, context);
}

int open_domain(fid_fabric* fabric, fi_info* info, fid_domain** domain, void* context) {
  if (t_rank == 1 && g_faults.domain_error != 0) return -g_faults.domain_error;
  const int result = g_real.fabric.domain(fabric, info, domain, context);
  if (result != 0) return result;
  remember(*domain);
  replace<fi_ops_domain>((*domain)->ops, g_real.domain, g_fake.domain, [](fi_ops_domain& table) {
    table.cq_open = open_queue;
    table.endpoint = open_endpoint;
  });
  replace<fi_ops_mr>((*domain)->mr, g_real.mr, g_fake.mr,
                     [](fi_ops_mr& table) { table.reg = register_memory; });
  return 0;
}

// What is held back has no descriptor to wake anyone.
int try_wait(fid_fabric* fabric, fid** objects, int count) {
  const State& state = state_of(fabric);
  if (!state.held.empty() || !state.lies.empty()) return -FI_EAGAIN;
  return g_real.fabric.trywait(fabric, objects, count);
}

int open_fabric(fi_fabric_attr* attributes, fid_fabric** fabric, void* context) {
  const int result = ofi::load_library().value()->fabric(attributes, fabric, context);
  if (result != 0) return result;
  t_state = std::make_shared<State>();
  t_state->rank = t_rank;
  t_state->random.seed(20261121u + static_cast<uint64_t>(t_rank));
  remember(*fabric);
  replace<fi_ops_fabric>((*fabric)->ops, g_real.fabric, g_fake.fabric, [](fi_ops_fabric& table) {
    table.domain = open_domain;
    table.trywait = try_wait;
  });
  return 0;
}

// An imagined GPU: copies take their time.
class FakeCopies : public ofi::DeviceCopies {
 public:
  explicit FakeCopies(int rank) : rank_(rank), random_(99u + static_cast<uint64_t>(rank)) {}

  bool owns(const void*) override {
    ++asked_;
    return g_faults.on_device == OnDevice::all ||
           (g_faults.on_device == OnDevice::odd_ranks && rank_ % 2 == 1) ||
           (g_faults.on_device == OnDevice::every_other && (asked_ + rank_) % 2 == 0);
  }
  Result<std::byte*> allocate(size_t bytes) override {
    memories_.push_back(std::make_unique<std::byte[]>(bytes));
    return memories_.back().get();
  }
  Status start_read(size_t lane, std::byte* host, const std::byte* device, size_t bytes) override {
    return start(lane, {host, device, bytes, kLateByReads});
  }
  Status start_write(size_t lane, std::byte* device, const std::byte* host, size_t bytes) override {
    return start(lane, {device, host, bytes, kLateByReads});
  }
  Result<bool> done(size_t lane) override {
    if (g_faults.copies_lie) {
      for (auto& [number, copy] : copies_) {
        if (--copy.looks_left == 0) run(copy);
      }
      return true;
    }
    if (random_() % 3 != 0) return false;
    run(copies_.at(lane));
    return true;
  }

 private:
  struct Copy {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
    int looks_left;
  };
  static void run(Copy& copy) {
    if (copy.bytes > 0) std::memcpy(copy.to, copy.from, copy.bytes);
    copy.bytes = 0;
  }
  Status start(size_t lane, Copy copy) {
    if (rank_ == 0 && g_faults.armed && g_faults.copy_fails) return Status(MK_ERROR_CUDA, "the GPU is on fire");
    copies_[lane] = copy;
    return {};
  }

  const int rank_;
  int asked_ = 0;
  std::mt19937_64 random_;
  std::map<size_t, Copy> copies_;
  std::vector<std::unique_ptr<std::byte[]>> memories_;
};

const ofi::Library& fault_library() {
  static const ofi::Library library = [] {
    ofi::Library faulty = *ofi::load_library().value();
    faulty.fabric = open_fabric;
    return faulty;
  }();
  return library;
}

}  // namespace

OfiFaults& ofi_faults() { return g_faults; }

void reset_ofi_faults() {
  std::destroy_at(&g_faults);
  std::construct_at(&g_faults);
  const std::lock_guard lock(g_mutex);
  g_states.clear();
}

const Backend& ofi_with_faults() {
  static const Backend backend{
      "ofi", ofi::available,
      [](const TransportContext& context, Deadline deadline) -> Result<std::unique_ptr<Transport>> {
        t_rank = context.topology.rank;
        return ofi::create_with(fault_library(), context, deadline, std::make_unique<FakeCopies>(t_rank));
      }};
  return backend;
}

}  // namespace mk::test
