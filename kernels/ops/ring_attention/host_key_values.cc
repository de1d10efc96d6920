// SPDX-License-Identifier: MIT
#include "host_key_values.h"

#include <algorithm>
#include <cstring>

namespace mk::ring_attention {

int64_t first_element(const RingAttentionCall& call, int heads, int64_t rows, int64_t batch, int head) {
  return call.layout == MK_ATTENTION_BSHD ? (batch * rows * heads + head) * call.dim
                                          : (batch * heads + head) * rows * call.dim;
}

int64_t row_stride(const RingAttentionCall& call, int heads) {
  return call.layout == MK_ATTENTION_BSHD ? int64_t{heads} * call.dim : call.dim;
}

HostKeyValues::HostKeyValues(HostLaunch& launch)
    : launch_(launch),
      slices_(make_slices(launch.attention(), launch.view(), true)),
      rows_of_rank_(count_rows(slices_)),
      schedule_(make_schedule(launch.attention(), launch.plan, launch.view(), slices_, rows_of_rank_)) {
  for (int rank = 0; rank < slices_.nranks; ++rank) {
    std::vector<int64_t>& positions = positions_.emplace_back();
    positions.reserve(static_cast<size_t>(rows_of_rank_[rank]));
    for (int64_t run = 0; run < slices_.runs(); ++run) {
      const int64_t begin = slices_.run_begin(rank, run);
      for (int64_t row = 0; row < slices_.run_count(rank, run); ++row) positions.push_back(begin + row);
    }
  }
  for (const int64_t position : positions_[self()]) {
    visible_.push_back({slices_.visible_begin(position), slices_.visible_end(position)});
  }
  for (int position = 0; position < slices_.nranks; ++position) {
    const int source = schedule_.source_at(position);
    for (int chunk = 0; chunk < schedule_.chunks(source); ++chunk) {
      if (schedule_.needs(self(), source, chunk)) needed_.push_back({source, chunk});
    }
  }
}

KeyRange HostKeyValues::visible(int64_t row, const Chunk& chunk) const {
  const auto begin = positions_[chunk.source].begin() + schedule_.chunk_begin(chunk.chunk);
  const auto end = begin + count_of(chunk);
  return {std::lower_bound(begin, end, visible_[row].begin) - begin,
          std::lower_bound(begin, end, visible_[row].end) - begin};
}

bool HostKeyValues::held(const Chunk& chunk) const {
  return launch_.hooks && launch_.hooks->hold && launch_.hooks->hold(self(), chunk.source, chunk.chunk);
}

bool HostKeyValues::here(const Chunk& chunk) const {
  return chunk.source == self() || launch_.flag_raised(schedule_.flag(chunk.source, chunk.chunk));
}

WaitTarget HostKeyValues::target_of(const Chunk& chunk) const {
  const int flag = schedule_.flag(chunk.source, chunk.chunk);
  return {"chunk", static_cast<uint64_t>(chunk.chunk), chunk.source, launch_.flag_value(flag), launch_.epoch};
}

HeadRows HostKeyValues::rows_of(bool value, const Chunk& chunk, int64_t batch, int kv_head) const {
  const RingAttentionCall& call = launch_.attention();
  if (chunk.source == self()) {
    const auto* data = static_cast<const uint16_t*>(value ? call.v : call.k);
    const HeadRows all{data + first_element(call, call.kv_heads, schedule_.rows(self()), batch, kv_head),
                       row_stride(call, call.kv_heads), call.dim, call.dtype};
    return all.from(schedule_.chunk_begin(chunk.chunk));
  }
  const auto* data =
      reinterpret_cast<const uint16_t*>(launch_.area(schedule_.chunk_offset(chunk.source, chunk.chunk)));
  return {data + schedule_.head_offset(value, batch, kv_head, count_of(chunk)), call.dim, call.dim, call.dtype};
}

// Lays one of this rank's chunks out as it travels.
void HostKeyValues::pack(const Chunk& chunk, std::byte* to) const {
  const RingAttentionCall& call = launch_.attention();
  const size_t row_bytes = static_cast<size_t>(call.dim) * sizeof(uint16_t);
  for (const bool value : {false, true}) {
    for (int64_t batch = 0; batch < call.batch; ++batch) {
      for (int head = 0; head < call.kv_heads; ++head) {
        const HeadRows rows = rows_of(value, chunk, batch, head);
        for (int64_t row = 0; row < count_of(chunk); ++row, to += row_bytes) {
          std::memcpy(to, rows.from(row).data, row_bytes);
        }
      }
    }
  }
}

// Writes a chunk that is here into the memory of another rank of the node and raises its flag.
void HostKeyValues::push(const Chunk& chunk, int to) const {
  const int local_rank = launch_.view().local_rank_of_rank[to];
  const size_t place = schedule_.chunk_offset(chunk.source, chunk.chunk);
  std::byte* target = launch_.peer_area(local_rank, place);
  if (chunk.source == self()) {
    pack(chunk, target);
  } else {
    std::memcpy(target, launch_.area(place), static_cast<size_t>(count_of(chunk)) * schedule_.row_bytes());
  }
  launch_.raise_flag(local_rank, schedule_.flag(chunk.source, chunk.chunk));
}

void HostKeyValues::run_copy(Waiter& waiter) {
  const TopologyView& view = launch_.view();
  std::vector<Transfer> pending;
  for (int chunk = 0; chunk < schedule_.chunks(self()); ++chunk) {
    for (int position = 1; position < view.local_nranks(); ++position) {
      const int to = view.rotated(position);
      if (schedule_.needs(to, self(), chunk)) pending.push_back({{self(), chunk}, to});
    }
  }
  const auto perform = [&](const Transfer& transfer) {
    if (held(transfer.chunk)) return false;
    const HostSpan span(waiter.track(), TraceKind::copy, transfer.chunk.chunk, transfer.to);
    push(transfer.chunk, transfer.to);
    return true;
  };
  perform_all(waiter, pending, perform, [&](const Transfer& transfer) { return target_of(transfer.chunk); });
}

void HostKeyValues::run_send(Waiter& waiter) {
  const TopologyView& view = launch_.view();
  std::vector<Chunk> left;
  for (int chunk = 0; chunk < schedule_.chunks(self()); ++chunk) left.push_back({self(), chunk});
  const auto perform = [&](const Chunk& chunk) {
    if (held(chunk)) return false;
    const HostSpan span(waiter.track(), TraceKind::send, chunk.chunk);
    const size_t place = schedule_.chunk_offset(self(), chunk.chunk);
    bool packed = false;
    for (int step = 1; step < view.num_nodes; ++step) {
      const int node = (view.node() + step) % view.num_nodes;
      if (!schedule_.node_needs(node, self(), chunk.chunk)) continue;
      // The network reads registered memory only: through this rank's own place in the receive area.
      if (!packed) pack(chunk, launch_.area(place));
      packed = true;
      if (!waiter.put(view.rail_peer(self(), node), launch_.area_address(place), launch_.area_address(place),
                      static_cast<size_t>(count_of(chunk)) * schedule_.row_bytes(),
                      schedule_.signal(self(), chunk.chunk))) {
        return true;
      }
    }
    return true;
  };
  perform_all(waiter, left, perform, [&](const Chunk& chunk) { return target_of(chunk); });
}

void HostKeyValues::run_receive(Waiter& waiter) {
  const TopologyView& view = launch_.view();
  std::vector<Chunk> pending;  // not arrived yet
  for (int position = view.local_nranks(); position < view.nranks; ++position) {
    const int source = schedule_.source_at(position);
    if (!schedule_.relays(source)) continue;
    for (int chunk = 0; chunk < schedule_.chunks(source); ++chunk) {
      if (schedule_.node_needs(view.node(), source, chunk)) pending.push_back({source, chunk});
    }
  }
  std::vector<Transfer> forwards;
  const auto arrived = [&](const Chunk& chunk) {
    const int signal = schedule_.signal(chunk.source, chunk.chunk);
    if (!launch_.signal_arrived(signal)) return false;
    launch_.take_signal(signal);
    for (int position = 1; position < view.local_nranks(); ++position) {
      const int to = view.rotated(position);
      if (schedule_.needs(to, chunk.source, chunk.chunk)) forwards.push_back({chunk, to});
    }
    if (schedule_.needs(self(), chunk.source, chunk.chunk))
      launch_.raise_flag(view.local_rank(), schedule_.flag(chunk.source, chunk.chunk));
    return true;
  };
  const auto forward = [&](const Transfer& transfer) {
    if (held(transfer.chunk)) return false;
    const HostSpan span(waiter.track(), TraceKind::copy, transfer.chunk.chunk, transfer.to);
    push(transfer.chunk, transfer.to);
    return true;
  };
  while (!pending.empty() || !forwards.empty()) {
    waiter.look();
    const size_t done = std::erase_if(pending, arrived) + std::erase_if(forwards, forward);
    if (done > 0) {
      waiter.progressed();
      continue;
    }
    if (!waiter.sleep(target_of(pending.empty() ? forwards.front().chunk : pending.front()))) return;
  }
}

}  // namespace mk::ring_attention
