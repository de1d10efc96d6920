// SPDX-License-Identifier: MIT
// GEMM+AllReduce on the host executor: the reduction's roles, and copy, send and receive for finished rows.
#include <cstring>
#include <memory>

#include "../../host/host_operator.h"
#include "../../host/number_format.h"
#include "../gemm_reduce_scatter/host_reduction.h"
#include "plan.h"

namespace mk::gemm_allreduce {
namespace {

// A finished chunk that a role still has to move: to a rank of the node, or (-1) to this rank's C.
struct Pending {
  int owner;
  int chunk;
  int to;
};

class Distribution {
 public:
  explicit Distribution(HostLaunch& launch)
      : launch_(launch),
        schedule_(make_schedule(launch.gemm(), launch.plan, launch.view())),
        reduced_(launch.plan.num_chunks),
        reduction_(
            launch, schedule_.reduce, [this](int64_t row, const float* sums) { finish_row(row, sums); },
            [this](int chunk) {
              reduced_[chunk].store(true, std::memory_order_release);
              launch_.rank.ring();
            }) {}

  gemm_reduce_scatter::HostReduction& reduction() { return reduction_; }
  void run_copy(Waiter& waiter);
  void run_send(Waiter& waiter);
  void run_receive(Waiter& waiter);

 private:
  int self() const { return launch_.view().rank; }
  // Sums of one of this rank's rows, rounded to the output type, at their place in the gather area.
  void finish_row(int64_t row, const float* sums);
  bool here(int owner, int chunk) const;
  void push(const Pending& item) const;
  void store(const Pending& item) const;
  WaitTarget target_of(const Pending& item) const;

  HostLaunch& launch_;
  const Schedule schedule_;
  std::vector<std::atomic<bool>> reduced_;  // own chunks
  gemm_reduce_scatter::HostReduction reduction_;
};

void Distribution::finish_row(int64_t row, const float* sums) {
  const GemmCall& call = launch_.gemm();
  std::byte* place = launch_.area(schedule_.gather_offset(self(), 0) +
                                  static_cast<size_t>(row) * schedule_.gather.row_pitch());
  for (int64_t column = 0; column < call.n; ++column) {
    float value = sums[column];
    if (call.bias) value += load_element(call.bias, call.bias_dtype, column);
    store_element(place, call.out_dtype, column, value);
  }
}

bool Distribution::here(int owner, int chunk) const {
  if (owner == self()) return reduced_[chunk].load(std::memory_order_acquire);
  return launch_.flag_raised(schedule_.gather_flag(owner, chunk));
}

WaitTarget Distribution::target_of(const Pending& item) const {
  const int flag = schedule_.gather_flag(item.owner, item.chunk);
  return {"reduced chunk", static_cast<uint64_t>(item.chunk), item.owner, launch_.flag_value(flag),
          launch_.epoch};
}

void Distribution::push(const Pending& item) const {
  const int local_rank = launch_.view().local_rank_of_rank[item.to];
  const size_t place = schedule_.gather_offset(item.owner, item.chunk);
  const int64_t rows = schedule_.gather.chunk_count(item.owner, item.chunk);
  std::memcpy(launch_.peer_area(local_rank, place), launch_.area(place),
              static_cast<size_t>(rows) * schedule_.gather.row_pitch());
  launch_.raise_flag(local_rank, schedule_.gather_flag(item.owner, item.chunk));
}

// From the gather area to the caller's C.
void Distribution::store(const Pending& item) const {
  const GemmCall& call = launch_.gemm();
  const int64_t begin = schedule_.gather.chunk_begin(item.owner, item.chunk);
  for (int64_t i = 0; i < schedule_.gather.chunk_count(item.owner, item.chunk); ++i) {
    const std::byte* row = launch_.area(schedule_.gather_offset(item.owner, item.chunk) +
                                        static_cast<size_t>(i) * schedule_.gather.row_pitch());
    const int64_t place = (begin + i) * call.ldc;
    if (!call.accumulate) {
      std::memcpy(static_cast<std::byte*>(call.c) + place * element_bytes(call.out_dtype), row,
                  schedule_.gather.row_bytes());
      continue;
    }
    for (int64_t column = 0; column < call.n; ++column) {
      const float value =
          load_element(row, call.out_dtype, column) + load_element(call.c, call.out_dtype, place + column);
      store_element(call.c, call.out_dtype, place + column, value);
    }
  }
}

void Distribution::run_copy(Waiter& waiter) {
  const TopologyView& view = launch_.view();
  std::vector<Pending> pending;
  for (int chunk = 0; chunk < schedule_.gather.chunks(self()); ++chunk) {
    for (int position = 1; position < view.local_nranks(); ++position) {
      pending.push_back({self(), chunk, view.rotated(position)});
    }
  }
  for (int position = 0; position < view.nranks; ++position) {
    const int owner = view.rotated(position);
    for (int chunk = 0; chunk < schedule_.gather.chunks(owner); ++chunk) pending.push_back({owner, chunk, -1});
  }
  const auto perform = [&](const Pending& item) {
    if (!here(item.owner, item.chunk)) return false;
    const HostSpan span(waiter.track(), TraceKind::copy, item.chunk, item.to >= 0 ? item.to : item.owner);
    if (item.to >= 0) {
      push(item);
    } else {
      store(item);
      launch_.tile_done(item.owner);
    }
    return true;
  };
  perform_all(waiter, pending, perform, [this](const Pending& item) { return target_of(item); });
}

void Distribution::run_send(Waiter& waiter) {
  const TopologyView& view = launch_.view();
  std::vector<Pending> pending;
  for (int chunk = 0; chunk < schedule_.gather.chunks(self()); ++chunk) pending.push_back({self(), chunk, -1});
  const auto perform = [&](const Pending& item) {
    if (!here(item.owner, item.chunk)) return false;
    const HostSpan span(waiter.track(), TraceKind::send, item.chunk);
    const uint64_t address = launch_.area_address(schedule_.gather_offset(self(), item.chunk));
    const int64_t rows = schedule_.gather.chunk_count(self(), item.chunk);
    for (int step = 1; step < view.num_nodes; ++step) {
      const int node = (view.node() + step) % view.num_nodes;
      if (!waiter.put(view.rail_peer(self(), node), address, address,
                      static_cast<size_t>(rows) * schedule_.gather.row_pitch(),
                      schedule_.gather_signal(self(), item.chunk))) {
        return true;
      }
    }
    return true;
  };
  perform_all(waiter, pending, perform, [this](const Pending& item) { return target_of(item); });
}

void Distribution::run_receive(Waiter& waiter) {
  const TopologyView& view = launch_.view();
  std::vector<Pending> pending;
  for (int position = view.local_nranks(); position < view.nranks; ++position) {
    const int owner = view.rotated(position);
    if (!schedule_.gather.relays(owner)) continue;
    for (int chunk = 0; chunk < schedule_.gather.chunks(owner); ++chunk) pending.push_back({owner, chunk, -1});
  }
  const auto perform = [&](const Pending& item) {
    const int signal = schedule_.gather_signal(item.owner, item.chunk);
    if (!launch_.signal_arrived(signal)) return false;
    launch_.take_signal(signal);
    const HostSpan span(waiter.track(), TraceKind::copy, item.chunk, item.owner);
    for (int position = 1; position < view.local_nranks(); ++position) {
      push({item.owner, item.chunk, view.rotated(position)});
    }
    launch_.raise_flag(view.local_rank(), schedule_.gather_flag(item.owner, item.chunk));
    return true;
  };
  perform_all(waiter, pending, perform, [this](const Pending& item) { return target_of(item); });
}

std::vector<Role> make_roles(HostLaunch& launch) {
  std::vector<Role> roles;
  if (launch.gemm().m == 0 || launch.gemm().n == 0) return roles;
  auto state = std::make_shared<Distribution>(launch);
  roles.emplace_back("copy", [state](Waiter& waiter) { state->run_copy(waiter); });
  if (launch.view().num_nodes > 1) {
    roles.emplace_back("send", [state](Waiter& waiter) { state->run_send(waiter); });
    roles.emplace_back("receive", [state](Waiter& waiter) { state->run_receive(waiter); });
  }
  roles.emplace_back("reduce", [state](Waiter& waiter) { state->reduction().run_reduce(waiter); });
  for (int thread = 0; thread < launch.plan.compute_ctas; ++thread) {
    roles.emplace_back("compute", [state](Waiter& waiter) { state->reduction().run_compute(waiter); });
  }
  return roles;
}

}  // namespace
}  // namespace mk::gemm_allreduce

const mk::HostOperator mk::kHostGemmAllreduce = {MK_OPERATOR_GEMM_ALLREDUCE,
                                                 mk::plan_call<mk::GemmCall, mk::gemm_allreduce::plan_host>,
                                                 mk::gemm_allreduce::make_roles};
