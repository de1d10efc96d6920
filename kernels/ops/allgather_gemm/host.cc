// SPDX-License-Identifier: MIT
// AllGather+GEMM on the host executor: copy, send and receive roles, and compute of mode FORWARD.
#include <cstring>
#include <memory>

#include "../../host/host_operator.h"
#include "../../host/number_format.h"
#include "../../host/tile_gemm.h"
#include "host_wgrad.h"
#include "plan.h"

namespace mk::allgather_gemm {
namespace {

// A transfer that a role still owes.
struct Pending {
  int source;
  int chunk;
  int to;  // rank, or -1: this rank's own gathered A
};

struct State {
  HostLaunch& launch;
  const Schedule schedule;
  // Compute, mode FORWARD: tile rows in the order of the schedule, and the next column tile of each.
  struct TileRow {
    int source;
    int64_t index;
  };
  std::vector<TileRow> tile_rows;
  std::vector<std::atomic<int64_t>> next_column;
  std::vector<std::atomic<int64_t>> columns_left;
  int64_t num_columns;

  explicit State(HostLaunch& in)
      : launch(in),
        schedule(make_schedule(in.gemm(), in.plan, in.view())),
        num_columns(ceil_div(in.gemm().n, in.plan.tile_n)) {
    const bool forward = launch.gemm().mode == MK_ALLGATHER_FORWARD && num_columns > 0;
    for (int position = 0; position < launch.view().nranks && forward; ++position) {
      const int source = schedule.source_at(position);
      for (int64_t tile = 0; tile < schedule.tile_rows(source); ++tile) tile_rows.push_back({source, tile});
    }
    next_column = std::vector<std::atomic<int64_t>>(tile_rows.size());
    columns_left = std::vector<std::atomic<int64_t>>(tile_rows.size());
    for (auto& left : columns_left) left.store(num_columns, std::memory_order_relaxed);
  }

  bool transfers() const { return schedule.m > 0 && schedule.k > 0; }
  int self() const { return launch.view().rank; }
  bool held(int source, int chunk) const {
    return launch.hooks && launch.hooks->hold && launch.hooks->hold(self(), source, chunk);
  }
  bool offers_output() const { return launch.entry(self()).output_offset != kNoOutput; }
  bool wants_gathered() const { return launch.gemm().a_gathered != nullptr; }
  std::byte* gathered_row(int64_t row) const {
    return static_cast<std::byte*>(launch.gemm().a_gathered) + row * launch.gemm().lda_gathered * 2;
  }
  const std::byte* own_row(int64_t row) const {
    return static_cast<const std::byte*>(launch.gemm().a) + row * launch.gemm().lda * 2;
  }

  // Does `writer` put rows straight into the gathered A of `receiver`? Both have entered.
  bool direct(int writer, int receiver) const {
    return writer != receiver && launch.direct_output(writer, receiver);
  }

  // Rows [begin, begin + count) of the gathered matrix, at this rank. Their flag has been seen.
  struct Rows {
    const std::byte* data;
    int64_t pitch;  // bytes
  };
  Rows rows_at(int source, int64_t row) const {
    const int64_t begin = rows_begin(schedule.m, launch.view().nranks, source);
    if (source == self()) return {own_row(row - begin), launch.gemm().lda * 2};
    if (direct(schedule.writer(source, self()), self()))
      return {gathered_row(row), launch.gemm().lda_gathered * 2};
    const int64_t pitch = static_cast<int64_t>(schedule.row_pitch());
    return {launch.area(static_cast<size_t>(row * pitch)), pitch};
  }
};

void copy_rows(std::byte* to, int64_t to_pitch, const std::byte* from, int64_t from_pitch, int64_t rows,
               size_t bytes) {
  for (int64_t row = 0; row < rows; ++row) std::memcpy(to + row * to_pitch, from + row * from_pitch, bytes);
}

// Writes a chunk that is here into the memory of another rank of the node and raises its flag.
void push_chunk(const State& state, int source, int chunk, int to) {
  const HostLaunch& launch = state.launch;
  const Schedule& schedule = state.schedule;
  const int local_rank = launch.view().local_rank_of_rank[to];
  const int64_t row = schedule.chunk_begin(source, chunk);
  const State::Rows rows = state.rows_at(source, row);
  std::byte* target = launch.peer_area(local_rank, schedule.area_offset(source, chunk));
  int64_t pitch = static_cast<int64_t>(schedule.row_pitch());
  if (state.offers_output() && state.direct(state.self(), to)) {
    const EntryRecord& entry = launch.entry(to);
    pitch = entry.output_ld * 2;
    target =
        launch.context.symmetric_peer(local_rank, entry.output_offset + static_cast<uint64_t>(row * pitch));
  }
  copy_rows(target, pitch, rows.data, rows.pitch, schedule.chunk_count(source, chunk), schedule.row_bytes());
  launch.raise_flag(local_rank, schedule.flag(source, chunk));
}

// A rank that offers a direct output must know whether the receiver does too: the receiver's entry first. It
// also says that the receiver's earlier work no longer reads that buffer.
bool may_push(const State& state, int to) { return !state.offers_output() || state.launch.has_entered(to); }

bool chunk_ready(const State& state, int source, int chunk) {
  return source == state.self() || state.launch.flag_raised(state.schedule.flag(source, chunk));
}

WaitTarget chunk_target(const State& state, int source, int chunk) {
  const int flag = state.schedule.flag(source, chunk);
  return {"chunk", static_cast<uint64_t>(chunk), source, state.launch.flag_value(flag), state.launch.epoch};
}

// Pushes this rank's chunks inside the node, and brings what arrives in the receive area to the caller's
// gathered A.
void run_copy(State& state, Waiter& waiter) {
  const TopologyView& view = state.launch.view();
  const Schedule& schedule = state.schedule;
  std::vector<Pending> pending;
  for (int chunk = 0; chunk < schedule.chunks(state.self()); ++chunk) {
    for (int position = 1; position < view.local_nranks(); ++position) {
      pending.push_back({state.self(), chunk, view.rotated(position)});
    }
  }
  for (int position = 0; state.wants_gathered() && position < view.nranks; ++position) {
    const int source = schedule.source_at(position);
    for (int chunk = 0; chunk < schedule.chunks(source); ++chunk) pending.push_back({source, chunk, -1});
  }
  const auto perform = [&](const Pending& item) {
    if (item.to >= 0) {
      if (state.held(item.source, item.chunk) || !may_push(state, item.to)) return false;
      const HostSpan span(waiter.track(), TraceKind::copy, item.chunk, item.to);
      push_chunk(state, item.source, item.chunk, item.to);
      return true;
    }
    if (!chunk_ready(state, item.source, item.chunk)) return false;
    const HostSpan span(waiter.track(), TraceKind::copy, item.chunk, item.source);
    const int64_t row = schedule.chunk_begin(item.source, item.chunk);
    const State::Rows rows = state.rows_at(item.source, row);
    if (rows.data != state.gathered_row(row)) {
      copy_rows(state.gathered_row(row), state.launch.gemm().lda_gathered * 2, rows.data, rows.pitch,
                schedule.chunk_count(item.source, item.chunk), schedule.row_bytes());
    }
    return true;
  };
  perform_all(waiter, pending, perform,
              [&](const Pending& item) { return chunk_target(state, item.source, item.chunk); });
}

// Puts this rank's chunks to its rail peers in the other nodes.
void run_send(State& state, Waiter& waiter) {
  HostLaunch& launch = state.launch;
  const TopologyView& view = launch.view();
  const Schedule& schedule = state.schedule;
  std::vector<int> left;
  for (int chunk = 0; chunk < schedule.chunks(state.self()); ++chunk) left.push_back(chunk);
  const auto perform = [&](int chunk) {
    if (state.held(state.self(), chunk)) return false;
    const HostSpan span(waiter.track(), TraceKind::send, chunk);
    const int64_t row = chunk * schedule.chunk_rows;
    const int64_t rows = schedule.chunk_count(state.self(), chunk);
    const size_t bytes = static_cast<size_t>(rows) * schedule.row_pitch();
    const size_t place = schedule.area_offset(state.self(), chunk);
    uint64_t source = launch.area_address(place);
    const auto registered = static_cast<size_t>(launch.gemm().lda * 2) == schedule.row_pitch()
                                ? launch.context.registered_region(state.own_row(row), bytes)
                                : std::nullopt;
    if (registered) {
      source = region_address(registered->first, registered->second);
    } else {  // the network reads registered memory only: through this rank's own place in the receive area
      copy_rows(launch.area(place), static_cast<int64_t>(schedule.row_pitch()), state.own_row(row),
                launch.gemm().lda * 2, rows, schedule.row_bytes());
    }
    for (int step = 1; step < view.num_nodes; ++step) {
      const int node = (view.node() + step) % view.num_nodes;
      if (!waiter.put(view.rail_peer(state.self(), node), source, launch.area_address(place), bytes,
                      schedule.signal(state.self(), chunk))) {
        return true;
      }
    }
    return true;
  };
  perform_all(waiter, left, perform, [&](int chunk) { return chunk_target(state, state.self(), chunk); });
}

// Takes chunks of other nodes from the network and forwards them inside this one.
void run_receive(State& state, Waiter& waiter) {
  HostLaunch& launch = state.launch;
  const TopologyView& view = launch.view();
  const Schedule& schedule = state.schedule;
  std::vector<Pending> pending;  // to -1: not arrived yet
  for (int position = view.local_nranks(); position < view.nranks; ++position) {
    const int source = schedule.source_at(position);
    if (!schedule.relays(source)) continue;
    for (int chunk = 0; chunk < schedule.chunks(source); ++chunk) pending.push_back({source, chunk, -1});
  }
  std::vector<Pending> forwards;
  const auto arrived = [&](const Pending& item) {
    const int signal = schedule.signal(item.source, item.chunk);
    if (!launch.signal_arrived(signal)) return false;
    launch.take_signal(signal);
    for (int position = 1; position < view.local_nranks(); ++position) {
      forwards.push_back({item.source, item.chunk, view.rotated(position)});
    }
    launch.raise_flag(view.local_rank(), schedule.flag(item.source, item.chunk));
    return true;
  };
  const auto forward = [&](const Pending& item) {
    if (state.held(item.source, item.chunk) || !may_push(state, item.to)) return false;
    const HostSpan span(waiter.track(), TraceKind::copy, item.chunk, item.to);
    push_chunk(state, item.source, item.chunk, item.to);
    return true;
  };
  while (!pending.empty() || !forwards.empty()) {
    waiter.look();
    const size_t done = std::erase_if(pending, arrived) + std::erase_if(forwards, forward);
    if (done > 0) {
      waiter.progressed();
      continue;
    }
    const Pending& first = pending.empty() ? forwards.front() : pending.front();
    if (!waiter.sleep(chunk_target(state, first.source, first.chunk))) return;
  }
}

void compute_tile(const State& state, const State::TileRow& tile, int64_t column_tile) {
  const HostLaunch& launch = state.launch;
  const GemmCall& call = launch.gemm();
  const int64_t begin = rows_begin(call.m, launch.view().nranks, tile.source) + tile.index * launch.plan.tile_m;
  const int64_t end = rows_begin(call.m, launch.view().nranks, tile.source) + state.schedule.rows(tile.source);
  const int64_t column = column_tile * launch.plan.tile_n;
  const int rows = static_cast<int>(min_of(launch.plan.tile_m, end - begin));
  const int columns = static_cast<int>(min_of(launch.plan.tile_n, call.n - column));
  alignas(64) float sums[TileGemm::kRows * TileGemm::kColumns];
  const State::Rows a = state.transfers() ? state.rows_at(tile.source, begin) : State::Rows{nullptr, 0};
  TileGemm{a.data, a.pitch / 2, call.b, call.ldb, call.b_layout, call.dtype, call.k, column, rows, columns}
      .compute(sums);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) {
      float value = sums[i * TileGemm::kColumns + j];
      const int64_t place = (begin + i) * call.ldc + column + j;
      if (call.bias) value += load_element(call.bias, call.bias_dtype, column + j);
      if (call.accumulate) value += load_element(call.c, call.out_dtype, place);
      store_element(call.c, call.out_dtype, place, value);
    }
  }
}

// Computes tiles whose rows are here, in the order of the schedule; several threads share the list.
void run_compute(State& state, Waiter& waiter) {
  const Schedule& schedule = state.schedule;
  const HostLaunch& launch = state.launch;
  const auto first_missing = [&](const State::TileRow& tile) {
    if (!state.transfers()) return -1;
    const int last = schedule.tile_last_chunk(tile.source, tile.index);
    for (int chunk = schedule.tile_first_chunk(tile.index); chunk <= last; ++chunk) {
      if (!chunk_ready(state, tile.source, chunk)) return chunk;
    }
    return -1;
  };
  while (!launch.stopped()) {
    waiter.look();
    bool worked = false;
    bool left = false;
    WaitTarget missing{"chunk"};
    for (size_t unit = 0; unit < state.tile_rows.size() && !launch.stopped(); ++unit) {
      const State::TileRow& tile = state.tile_rows[unit];
      if (state.next_column[unit].load(std::memory_order_relaxed) >= state.num_columns) continue;
      if (const int chunk = first_missing(tile); chunk >= 0) {
        if (!left) missing = chunk_target(state, tile.source, chunk);
        left = true;
        continue;
      }
      while (!launch.stopped()) {
        const int64_t column = state.next_column[unit].fetch_add(1, std::memory_order_relaxed);
        if (column >= state.num_columns) break;
        const HostSpan span(waiter.track(), TraceKind::compute, tile.index * state.num_columns + column,
                            tile.source);
        compute_tile(state, tile, column);
        worked = true;
        if (state.columns_left[unit].fetch_sub(1, std::memory_order_relaxed) == 1)
          launch.tile_done(tile.source);
      }
    }
    if (worked) {
      waiter.progressed();
    } else if (!left || !waiter.sleep(missing)) {
      return;
    }
  }
}

// Mode WGRAD: without rows to gather C is zero all the same.
void add_wgrad(const std::shared_ptr<State>& state, std::vector<Role>& roles) {
  const GemmCall& call = state->launch.gemm();
  if (call.k == 0 || call.n == 0) return;
  auto wgrad = std::make_shared<HostWgrad>(
      state->launch, state->schedule,
      [state](int source, int64_t row) {
        const State::Rows rows = state->rows_at(source, row);
        return HostWgrad::Rows{rows.data, rows.pitch};
      },
      [state](int source, int chunk) { return chunk_ready(*state, source, chunk); },
      [state](int source, int chunk) { return chunk_target(*state, source, chunk); });
  for (int thread = 0; thread < state->launch.plan.compute_ctas; ++thread) {
    roles.emplace_back("compute", [wgrad](Waiter& waiter) { wgrad->run(waiter); });
  }
}

std::vector<Role> make_roles(HostLaunch& launch) {
  auto state = std::make_shared<State>(launch);
  std::vector<Role> roles;
  if (state->transfers()) {
    roles.emplace_back("copy", [state](Waiter& waiter) { run_copy(*state, waiter); });
    if (launch.view().num_nodes > 1) {
      roles.emplace_back("send", [state](Waiter& waiter) { run_send(*state, waiter); });
      roles.emplace_back("receive", [state](Waiter& waiter) { run_receive(*state, waiter); });
    }
  }
  if (launch.gemm().mode == MK_ALLGATHER_WGRAD) {
    add_wgrad(state, roles);
    return roles;
  }
  for (int thread = 0; thread < launch.plan.compute_ctas && launch.gemm().m > 0; ++thread) {
    roles.emplace_back("compute", [state](Waiter& waiter) { run_compute(*state, waiter); });
  }
  return roles;
}

}  // namespace
}  // namespace mk::allgather_gemm

const mk::HostOperator mk::kHostAllgatherGemm = {MK_OPERATOR_ALLGATHER_GEMM,
                                                 mk::plan_call<mk::GemmCall, mk::allgather_gemm::plan_host>,
                                                 mk::allgather_gemm::make_roles};
