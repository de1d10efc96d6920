// SPDX-License-Identifier: MIT
// Gradients of ring attention on the host executor.
#include <memory>

#include "../../host/host_operator.h"
#include "../../host/number_format.h"
#include "../ring_attention/host_tiles.h"
#include "host_key_gradients.h"
#include "plan.h"

namespace mk::ring_attention_backward {
namespace {

using ring_attention::HostTiles;
using ring_attention::Part;
using ring_attention::Tile;

struct State {
  HostLaunch& launch;
  HostKeyValues key_values;
  HostKeyGradients key_gradients;
  HostTiles tiles;

  explicit State(HostLaunch& in)
      : launch(in),
        key_values(in),
        key_gradients(in, key_values, make_schedule(in.attention(), in.plan, key_values.schedule())),
        tiles(
            in, key_values,
            [](Part& into, const Part& from) {
              for (size_t at = 0; at < into.values.size(); ++at) into.values[at] += from.values[at];
            },
            [this](const Tile& tile, const Part& all) { store(tile, all); }) {}

  int64_t own_rows() const { return key_values.schedule().rows(launch.view().rank); }
  Part compute(const Tile& tile, const Chunk& chunk, const ring_attention::KeyRange* visible,
               GradientScratch& scratch) const;
  void store(const Tile& tile, const Part& all) const;
};

// A chunk's part of dQ of a tile.
Part State::compute(const Tile& tile, const Chunk& chunk, const ring_attention::KeyRange* visible,
                    GradientScratch& scratch) const {
  const RingAttentionCall& call = launch.attention();
  Part part(tile.rows, call.dim);
  const auto keys = key_values.rows_of(false, chunk, tile.batch, tile.kv_head);
  const auto values = key_values.rows_of(true, chunk, tile.batch, tile.kv_head);
  const int64_t count = key_values.count_of(chunk);
  scratch.load_queries(query_tile(call, own_rows(), tile.batch, tile.head, tile.row, tile.rows));
  for (int64_t begin = 0; begin < count; begin += launch.plan.tile_n) {
    scratch.load_keys(keys.from(begin), values.from(begin),
                      static_cast<int>(min_of(launch.plan.tile_n, count - begin)));
    scratch.weigh(visible, begin, call.scale);
    scratch.add_to_d_queries(part.values.data());
  }
  return part;
}

void State::store(const Tile& tile, const Part& all) const {
  const RingAttentionCall& call = launch.attention();
  const int64_t stride = ring_attention::row_stride(call, call.heads);
  const int64_t first =
      ring_attention::first_element(call, call.heads, own_rows(), tile.batch, tile.head) + tile.row * stride;
  for (int64_t i = 0; i < tile.rows; ++i) {
    for (int64_t d = 0; d < call.dim; ++d) {
      store_element(call.dq, call.dtype, first + i * stride + d,
                    call.scale * all.values[static_cast<size_t>(i * call.dim + d)]);
    }
  }
}

// Parts of dK and dV first: others wait for them.
void run_compute(State& state, Waiter& waiter) {
  GradientScratch scratch(state.launch.attention().dim);
  const auto compute = [&](const Tile& tile, const Chunk& chunk, const ring_attention::KeyRange* visible) {
    const HostSpan span(waiter.track(), TraceKind::compute, chunk.chunk, chunk.source);
    return state.compute(tile, chunk, visible, scratch);
  };
  size_t next = 0;
  while (!state.launch.stopped()) {
    waiter.look();
    WaitTarget missing{"chunk"};
    const bool waits = first_missing(state.key_values, missing);
    if (state.key_gradients.work(scratch, waiter.track()) || state.tiles.work(next, compute)) {
      waiter.progressed();
      continue;
    }
    // With every chunk here before the look, what is left is in the hands of other threads.
    if (!waits || !waiter.sleep(missing)) return;
  }
}

std::vector<Role> make_roles(HostLaunch& launch) {
  std::vector<Role> roles;
  const RingAttentionCall& call = launch.attention();
  if (call.batch == 0 || call.seq == 0) return roles;
  if (const std::string problem = cu_seqlens_problem(call); !problem.empty()) {
    launch.set_data_error(problem);
    return roles;
  }
  auto state = std::make_shared<State>(launch);
  if (launch.view().nranks > 1) {
    roles.emplace_back("copy", [state](Waiter& waiter) { state->key_values.run_copy(waiter); });
  }
  if (launch.view().num_nodes > 1) {
    roles.emplace_back("send", [state](Waiter& waiter) { state->key_values.run_send(waiter); });
    roles.emplace_back("receive", [state](Waiter& waiter) { state->key_values.run_receive(waiter); });
  }
  roles.emplace_back("reduce", [state](Waiter& waiter) { state->key_gradients.run_reduce(waiter); });
  for (int thread = 0; thread < launch.plan.compute_ctas; ++thread) {
    roles.emplace_back("compute", [state](Waiter& waiter) { run_compute(*state, waiter); });
  }
  return roles;
}

}  // namespace
}  // namespace mk::ring_attention_backward

const mk::HostOperator mk::kHostRingAttentionBackward = {
    MK_OPERATOR_RING_ATTENTION_BACKWARD,
    mk::plan_call<mk::RingAttentionCall, mk::ring_attention_backward::plan_host>,
    mk::ring_attention_backward::make_roles};
