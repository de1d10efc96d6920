// SPDX-License-Identifier: MIT
#include "host_key_gradients.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "../../host/number_format.h"

namespace mk::ring_attention_backward {

using ring_attention::first_element;
using ring_attention::HeadRows;
using ring_attention::KeyRange;
using ring_attention::kMostTileRows;
using ring_attention::row_stride;

QueryTile query_tile(const RingAttentionCall& call, int64_t own_rows, int64_t batch, int head, int64_t row,
                     int rows) {
  const int64_t first = first_element(call, call.heads, own_rows, batch, head);
  const auto of = [&](const void* data) {
    const HeadRows all{static_cast<const uint16_t*>(data) + first, row_stride(call, call.heads), call.dim,
                       call.dtype};
    return all.from(row);
  };
  return {of(call.q), of(call.forward_o), of(call.d_o),
          call.forward_lse + (batch * call.heads + head) * own_rows + row, rows};
}

// Chunks that came farthest first: their sums have the longest way home.
HostKeyGradients::HostKeyGradients(HostLaunch& launch, const HostKeyValues& key_values,
                                   const Schedule& schedule)
    : launch_(launch), key_values_(key_values), schedule_(schedule), units_(key_values.needed().size()) {
  for (size_t at = 0; at < units_.size(); ++at) {
    units_[at].chunk = key_values.needed()[units_.size() - 1 - at];
    units_[at].left.store(heads_of_keys(), std::memory_order_relaxed);
  }
}

bool HostKeyGradients::work(GradientScratch& scratch, HostTrack* track) {
  for (Unit& unit : units_) {
    if (launch_.stopped()) return false;
    if (unit.next.load(std::memory_order_relaxed) >= heads_of_keys() || !key_values_.here(unit.chunk)) continue;
    const int64_t number = unit.next.fetch_add(1, std::memory_order_relaxed);
    if (number >= heads_of_keys()) continue;
    const int kv_heads = launch_.attention().kv_heads;
    const HostSpan span(track, TraceKind::compute, unit.chunk.chunk, unit.chunk.source);
    push_part(unit.chunk, number / kv_heads, static_cast<int>(number % kv_heads), scratch);
    // Whoever pushes the last head's part raises the flag: every part's stores happened before its own count.
    if (unit.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return true;
    const TopologyView& view = launch_.view();
    const int reducer = schedule_.reduce.reducer(unit.chunk.source, view.node());
    launch_.raise_flag(view.local_rank_of_rank[reducer],
                       schedule_.flag(unit.chunk.source, view.node(), view.local_rank(), unit.chunk.chunk));
    launch_.tile_done(unit.chunk.source);
    return true;
  }
  return false;
}

// Sums over the query heads that share the head of keys, and over their queries, in ascending order.
void HostKeyGradients::push_part(const Chunk& chunk, int64_t batch, int kv_head, GradientScratch& scratch) {
  const RingAttentionCall& call = launch_.attention();
  const int64_t count = key_values_.count_of(chunk);
  const auto elements = static_cast<size_t>(count * call.dim);
  std::vector<float> d_keys(elements), d_values(elements);
  const HeadRows keys = key_values_.rows_of(false, chunk, batch, kv_head);
  const HeadRows values = key_values_.rows_of(true, chunk, batch, kv_head);
  const int group = call.heads / call.kv_heads;
  for (int64_t begin = 0; begin < count; begin += launch_.plan.tile_n) {
    const int block = static_cast<int>(min_of(launch_.plan.tile_n, count - begin));
    scratch.load_keys(keys.from(begin), values.from(begin), block);
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      add_queries(chunk, begin, batch, head, scratch, d_keys.data() + begin * call.dim,
                  d_values.data() + begin * call.dim);
    }
  }
  for (float& value : d_keys) value *= call.scale;
  const TopologyView& view = launch_.view();
  const int reducer = schedule_.reduce.reducer(chunk.source, view.node());
  std::byte* place =
      launch_.peer_area(view.local_rank_of_rank[reducer],
                        schedule_.partial_offset(chunk.source, view.node(), view.local_rank(), chunk.chunk));
  const auto store = [&](bool value, const std::vector<float>& sums) {
    const int64_t at = schedule_.gather.head_offset(value, batch, kv_head, count);
    std::memcpy(place + at * static_cast<int64_t>(sizeof(float)), sums.data(), elements * sizeof(float));
  };
  store(false, d_keys);
  store(true, d_values);
}

// What this rank's queries of one head give to the block of keys loaded, which begins at row `begin`.
void HostKeyGradients::add_queries(const Chunk& chunk, int64_t begin, int64_t batch, int head,
                                   GradientScratch& scratch, float* d_keys, float* d_values) const {
  const RingAttentionCall& call = launch_.attention();
  const int64_t own_rows = schedule_.gather.rows(launch_.view().rank);
  const int64_t end = min_of(begin + launch_.plan.tile_n, key_values_.count_of(chunk));
  for (int64_t row = 0; row < own_rows && !launch_.stopped(); row += launch_.plan.tile_m) {
    const int rows = static_cast<int>(min_of(launch_.plan.tile_m, own_rows - row));
    std::array<KeyRange, kMostTileRows> visible;
    bool sees = false;
    for (int i = 0; i < rows; ++i) {
      visible[static_cast<size_t>(i)] = key_values_.visible(row + i, chunk);
      const KeyRange& range = visible[static_cast<size_t>(i)];
      sees = sees || std::max(range.begin, begin) < std::min(range.end, end);
    }
    if (!sees) continue;
    scratch.load_queries(query_tile(call, own_rows, batch, head, row, rows));
    scratch.weigh(visible.data(), begin, call.scale);
    scratch.add_to_d_keys_values(d_keys, d_values);
  }
}

bool HostKeyGradients::parts_here(const Chunk& chunk) const {
  const TopologyView& view = launch_.view();
  for (int local_source = 0; local_source < view.local_nranks(); ++local_source) {
    if (schedule_.gather.needs(view.rank_at(view.node(), local_source), chunk.source, chunk.chunk) &&
        !launch_.flag_raised(schedule_.flag(chunk.source, view.node(), local_source, chunk.chunk))) {
      return false;
    }
  }
  return true;
}

bool HostKeyGradients::sums_here(int chunk) const {
  const TopologyView& view = launch_.view();
  for (int node = 0; node < view.num_nodes; ++node) {
    if (node != view.node() && schedule_.gather.node_needs(node, view.rank, chunk) &&
        !launch_.signal_arrived(schedule_.signal(node, chunk))) {
      return false;
    }
  }
  return true;
}

// The first thing that a chunk still lacks.
WaitTarget HostKeyGradients::target_of(const Chunk& chunk) const {
  const TopologyView& view = launch_.view();
  const auto index = static_cast<uint64_t>(chunk.chunk);
  for (int local_source = 0; local_source < view.local_nranks(); ++local_source) {
    const int source = view.rank_at(view.node(), local_source);
    const int flag = schedule_.flag(chunk.source, view.node(), local_source, chunk.chunk);
    if (schedule_.gather.needs(source, chunk.source, chunk.chunk) && !launch_.flag_raised(flag))
      return {"partial", index, source, launch_.flag_value(flag), launch_.epoch};
  }
  for (int node = 0; node < view.num_nodes && chunk.source == view.rank; ++node) {
    if (node != view.node() && schedule_.gather.node_needs(node, view.rank, chunk.chunk) &&
        !launch_.signal_arrived(schedule_.signal(node, chunk.chunk))) {
      return {"node sum", index, schedule_.reduce.reducer(view.rank, node), 0, 1};
    }
  }
  return {"partial", index, chunk.source, 0, 0};
}

void HostKeyGradients::add(size_t place, std::vector<float>& sums, bool first) const {
  const auto* part = reinterpret_cast<const float*>(launch_.area(place));
  for (size_t at = 0; at < sums.size(); ++at) sums[at] = first ? part[at] : sums[at] + part[at];
}

// Sums the node's parts of a chunk in local-rank order. An owner elsewhere gets the sum by put; this rank's own
// is kept, or, with one node, stored at once. False: the role has to end.
bool HostKeyGradients::reduce_local(const Chunk& chunk, Waiter& waiter) {
  const TopologyView& view = launch_.view();
  const size_t bytes = schedule_.chunk_bytes(chunk.source, chunk.chunk);
  std::vector<float> sums(bytes / sizeof(float));
  bool first = true;
  for (int local_source = 0; local_source < view.local_nranks(); ++local_source) {
    if (!schedule_.gather.needs(view.rank_at(view.node(), local_source), chunk.source, chunk.chunk)) continue;
    add(schedule_.partial_offset(chunk.source, view.node(), local_source, chunk.chunk), sums, first);
    first = false;
  }
  const bool mine = chunk.source == view.rank;
  if (mine && view.num_nodes == 1) {
    store(chunk.chunk, sums);
    return true;
  }
  const size_t place = mine ? schedule_.sum_offset(view.node(), chunk.chunk)
                            : schedule_.send_offset(chunk.source, view.node(), chunk.chunk);
  std::memcpy(launch_.area(place), sums.data(), bytes);
  if (mine) return true;
  return waiter.put(chunk.source, launch_.area_address(place),
                    launch_.area_address(schedule_.sum_offset(view.node(), chunk.chunk)), bytes,
                    schedule_.signal(view.node(), chunk.chunk));
}

// Adds the nodes' sums of one of this rank's chunks in node order.
void HostKeyGradients::finish(int chunk) {
  const TopologyView& view = launch_.view();
  std::vector<float> sums(schedule_.chunk_bytes(view.rank, chunk) / sizeof(float));
  bool first = true;
  for (int node = 0; node < view.num_nodes; ++node) {
    if (!schedule_.gather.node_needs(node, view.rank, chunk)) continue;
    if (node != view.node()) launch_.take_signal(schedule_.signal(node, chunk));
    add(schedule_.sum_offset(node, chunk), sums, first);
    first = false;
  }
  store(chunk, sums);
}

void HostKeyGradients::store(int chunk, const std::vector<float>& sums) const {
  const RingAttentionCall& call = launch_.attention();
  const int64_t own_rows = schedule_.gather.rows(launch_.view().rank);
  const int64_t count = schedule_.gather.chunk_count(launch_.view().rank, chunk);
  for (const bool value : {false, true}) {
    for (int64_t head = 0; head < heads_of_keys(); ++head) {
      const int64_t batch = head / call.kv_heads;
      const int kv_head = static_cast<int>(head % call.kv_heads);
      const float* from = sums.data() + schedule_.gather.head_offset(value, batch, kv_head, count);
      const int64_t to = first_element(call, call.kv_heads, own_rows, batch, kv_head);
      for (int64_t row = 0; row < count; ++row) {
        const int64_t at = to + (schedule_.gather.chunk_begin(chunk) + row) * row_stride(call, call.kv_heads);
        for (int d = 0; d < call.dim; ++d)
          store_element(value ? call.dv : call.dk, call.dtype, at + d, from[row * call.dim + d]);
      }
    }
  }
  launch_.tile_done(launch_.view().rank);
}

void HostKeyGradients::run_reduce(Waiter& waiter) {
  const TopologyView& view = launch_.view();
  std::vector<Chunk> partial;
  for (int position = view.nranks; position-- > 0;) {
    const int owner = schedule_.gather.source_at(position);
    if (schedule_.reduce.reducer(owner, view.node()) != view.rank) continue;
    for (int chunk = 0; chunk < schedule_.gather.chunks(owner); ++chunk) {
      if (schedule_.gather.node_needs(view.node(), owner, chunk)) partial.push_back({owner, chunk});
    }
  }
  std::vector<Chunk> unfinished;
  bool ended = false;
  const auto reduce = [&](const Chunk& chunk) {
    if (ended || !parts_here(chunk)) return false;
    const HostSpan span(waiter.track(), TraceKind::reduce, chunk.chunk, chunk.source);
    if (!reduce_local(chunk, waiter)) ended = true;
    if (chunk.source == view.rank && view.num_nodes > 1) unfinished.push_back(chunk);
    return true;
  };
  const auto complete = [&](const Chunk& chunk) {
    if (!sums_here(chunk.chunk)) return false;
    const HostSpan span(waiter.track(), TraceKind::reduce, chunk.chunk, chunk.source);
    finish(chunk.chunk);
    return true;
  };
  while (!partial.empty() || !unfinished.empty()) {
    waiter.look();
    const size_t done = std::erase_if(partial, reduce) + std::erase_if(unfinished, complete);
    if (ended) return;
    if (done > 0) {
      waiter.progressed();
    } else if (!waiter.sleep(target_of(partial.empty() ? unfinished.front() : partial.front()))) {
      return;
    }
  }
}

}  // namespace mk::ring_attention_backward
