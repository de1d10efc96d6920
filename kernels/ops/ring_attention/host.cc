// SPDX-License-Identifier: MIT
// Ring attention on the host executor.
#include <cmath>
#include <limits>
#include <memory>

#include "../../host/host_operator.h"
#include "../../host/number_format.h"
#include "host_tiles.h"
#include "plan.h"

namespace mk::ring_attention {
namespace {

struct State {
  HostLaunch& launch;
  HostKeyValues key_values;
  HostTiles tiles;

  explicit State(HostLaunch& in)
      : launch(in),
        key_values(in),
        tiles(
            in, key_values,
            [this](Part& into, const Part& from) { merge_softmax(into, from, launch.attention().dim); },
            [this](const Tile& tile, const Part& all) { store(tile, all); }) {}

  int64_t own_rows() const { return key_values.schedule().rows(launch.view().rank); }
  Part compute(const Tile& tile, const Chunk& chunk, const KeyRange* visible, BlockScratch& scratch) const;
  void store(const Tile& tile, const Part& all) const;
};

Part State::compute(const Tile& tile, const Chunk& chunk, const KeyRange* visible,
                    BlockScratch& scratch) const {
  const RingAttentionCall& call = launch.attention();
  const HeadRows queries{
      static_cast<const uint16_t*>(call.q) + first_element(call, call.heads, own_rows(), tile.batch, tile.head),
      row_stride(call, call.heads), call.dim, call.dtype};
  return attend({queries.from(tile.row), tile.rows, key_values.rows_of(false, chunk, tile.batch, tile.kv_head),
                 key_values.rows_of(true, chunk, tile.batch, tile.kv_head), key_values.count_of(chunk),
                 launch.plan.tile_n, visible, call.scale},
                scratch);
}

// A query that sees nothing, or whose logits are all -inf, gets zeros.
void State::store(const Tile& tile, const Part& all) const {
  const RingAttentionCall& call = launch.attention();
  const int64_t stride = row_stride(call, call.heads);
  const int64_t first = first_element(call, call.heads, own_rows(), tile.batch, tile.head) + tile.row * stride;
  float* lse = call.lse ? call.lse + (tile.batch * call.heads + tile.head) * own_rows() + tile.row : nullptr;
  for (int i = 0; i < tile.rows; ++i) {
    const auto at = static_cast<size_t>(i);
    const bool none = all.maximum[at] == -std::numeric_limits<float>::infinity();
    const float* values = all.values.data() + at * static_cast<size_t>(call.dim);
    for (int d = 0; d < call.dim; ++d) {
      store_element(call.o, call.dtype, first + i * stride + d, none ? 0.0f : values[d] / all.sum[at]);
    }
    if (lse) lse[i] = none ? all.maximum[at] : all.maximum[at] + std::log(all.sum[at]);
  }
}

void run_compute(State& state, Waiter& waiter) {
  BlockScratch scratch(state.launch.attention().dim);
  const auto compute = [&](const Tile& tile, const Chunk& chunk, const KeyRange* visible) {
    const HostSpan span(waiter.track(), TraceKind::compute, chunk.chunk, chunk.source);
    return state.compute(tile, chunk, visible, scratch);
  };
  size_t next = 0;
  while (!state.launch.stopped() && !state.tiles.finished()) {
    waiter.look();
    WaitTarget missing{"chunk"};
    const bool waits = first_missing(state.key_values, missing);
    if (state.tiles.work(next, compute)) {
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
  for (int thread = 0; thread < launch.plan.compute_ctas; ++thread) {
    roles.emplace_back("compute", [state](Waiter& waiter) { run_compute(*state, waiter); });
  }
  return roles;
}

}  // namespace
}  // namespace mk::ring_attention

const mk::HostOperator mk::kHostRingAttention = {
    MK_OPERATOR_RING_ATTENTION, mk::plan_call<mk::RingAttentionCall, mk::ring_attention::plan_host>,
    mk::ring_attention::make_roles};
