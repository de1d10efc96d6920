// SPDX-License-Identifier: MIT
#include "host_tiles.h"

#include <array>

namespace mk::ring_attention {
namespace {

std::vector<Tile> make_tiles(const HostLaunch& launch, int64_t rows) {
  const RingAttentionCall& call = launch.attention();
  const int group = call.heads / call.kv_heads;
  std::vector<Tile> tiles;
  for (int64_t row = 0; row < rows; row += launch.plan.tile_m) {
    const int count = static_cast<int>(min_of(launch.plan.tile_m, rows - row));
    for (int64_t batch = 0; batch < call.batch; ++batch) {
      for (int head = 0; head < call.heads; ++head) tiles.push_back({batch, head, row, count, head / group});
    }
  }
  return tiles;
}

}  // namespace

HostTiles::HostTiles(HostLaunch& launch, const HostKeyValues& key_values, Merge merge, Finish finish)
    : launch_(launch),
      key_values_(key_values),
      merge_(std::move(merge)),
      finish_(std::move(finish)),
      tiles_(make_tiles(launch, key_values.schedule().rows(launch.view().rank))),
      states_(tiles_.size()),
      left_(tiles_.size()) {
  for (size_t number = 0; number < tiles_.size(); ++number) {
    const Tile& tile = tiles_[number];
    const auto [place, added] = steps_.try_emplace(tile.row);
    for (size_t at = 0; added && at < key_values.needed().size(); ++at) {
      const Chunk& chunk = key_values.needed()[at];
      bool sees = false;
      for (int i = 0; i < tile.rows && !sees; ++i) {
        const KeyRange range = key_values.visible(tile.row + i, chunk);
        sees = range.begin < range.end;
      }
      if (sees) place->second.push_back(chunk);
    }
    states_[number].computed.resize(place->second.size());
  }
}

bool HostTiles::work(size_t& next, const Compute& compute) {
  for (size_t count = 0; count < tiles_.size() && !launch_.stopped(); ++count) {
    const size_t number = next % tiles_.size();
    next = number + 1;
    State& state = states_[number];
    if (state.done.load(std::memory_order_relaxed) || state.taken.exchange(true, std::memory_order_acquire))
      continue;
    const bool worked = !state.done.load(std::memory_order_relaxed) && advance(number, compute);
    state.taken.store(false, std::memory_order_release);
    if (worked) return true;
  }
  return false;
}

// Computes every step of a tile whose chunk is here.
bool HostTiles::advance(size_t number, const Compute& compute) {
  const Tile& tile = tiles_[number];
  State& state = states_[number];
  const std::vector<Chunk>& steps = steps_.find(tile.row)->second;
  if (state.all.values.empty()) state.all = Part(tile.rows, launch_.attention().dim);
  bool worked = false;
  for (size_t step = state.merged; step < steps.size() && !launch_.stopped(); ++step) {
    if (state.computed[step] || !key_values_.here(steps[step])) continue;
    std::array<KeyRange, kMostTileRows> visible;
    for (int i = 0; i < tile.rows; ++i) {
      visible[static_cast<size_t>(i)] = key_values_.visible(tile.row + i, steps[step]);
    }
    take(state, step, compute(tile, steps[step], visible.data()));
    launch_.tile_done(steps[step].source);
    worked = true;
  }
  if (state.merged < steps.size()) return worked;
  finish_(tile, state.all);
  state.all = Part();
  state.done.store(true, std::memory_order_relaxed);
  left_.fetch_sub(1, std::memory_order_acq_rel);
  return true;
}

void HostTiles::take(State& state, size_t step, Part part) {
  state.computed[step] = true;
  if (step != state.merged) {
    state.early.emplace(step, std::move(part));
    return;
  }
  merge_(state.all, part);
  ++state.merged;
  for (auto next = state.early.find(state.merged); next != state.early.end();
       next = state.early.find(state.merged)) {
    merge_(state.all, next->second);
    state.early.erase(next);
    ++state.merged;
  }
}

bool first_missing(const HostKeyValues& key_values, WaitTarget& target) {
  for (const Chunk& chunk : key_values.needed()) {
    if (key_values.here(chunk)) continue;
    target = key_values.target_of(chunk);
    return true;
  }
  return false;
}

}  // namespace mk::ring_attention
