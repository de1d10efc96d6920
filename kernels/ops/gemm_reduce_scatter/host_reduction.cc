// SPDX-License-Identifier: MIT
#include "host_reduction.h"

#include "../../host/number_format.h"
#include "../../host/tile_gemm.h"

namespace mk::gemm_reduce_scatter {

HostReduction::HostReduction(HostLaunch& launch, const Schedule& schedule, FinishRow finish_row,
                             FinishChunk finish_chunk)
    : launch_(launch),
      schedule_(schedule),
      finish_row_(std::move(finish_row)),
      finish_chunk_(std::move(finish_chunk)),
      num_columns_(ceil_div(launch.gemm().n, launch.plan.tile_n)),
      tiles_left_(static_cast<size_t>(launch.view().nranks) * schedule.max_chunks) {
  for (int position = 0; position < launch_.view().nranks; ++position) {
    const int owner = schedule_.owner_at(position);
    for (int64_t tile = 0; tile < schedule_.tile_rows(owner); ++tile) tile_rows_.push_back({owner, tile});
    for (int chunk = 0; chunk < schedule_.chunks(owner); ++chunk) {
      const int64_t tile_rows = ceil_div(schedule_.chunk_count(owner, chunk), schedule_.tile_m);
      tiles_left_[owner * schedule_.max_chunks + chunk].store(tile_rows * num_columns_,
                                                              std::memory_order_relaxed);
    }
  }
}

// Computes one tile of this rank's partial product and stores it, rounded once, in the reducer's slot.
void HostReduction::push_tile(const TileRow& tile, int64_t column_tile) {
  const GemmCall& call = launch_.gemm();
  const TopologyView& view = launch_.view();
  const int64_t begin = tile.index * schedule_.tile_m;  // a row of the owner's
  const int64_t column = column_tile * launch_.plan.tile_n;
  const int rows = static_cast<int>(min_of(schedule_.tile_m, schedule_.rows(tile.owner) - begin));
  const int columns = static_cast<int>(min_of(launch_.plan.tile_n, call.n - column));
  const int64_t first = rows_begin(call.m, view.nranks, tile.owner) + begin;
  const auto* a = static_cast<const uint16_t*>(call.a) + (call.k > 0 ? first * call.lda : 0);
  alignas(64) float sums[TileGemm::kRows * TileGemm::kColumns];
  TileGemm{a, call.lda, call.b, call.ldb, call.b_layout, call.dtype, call.k, column, rows, columns}.compute(
      sums);

  const int reducer = schedule_.reducer(tile.owner, view.node());
  const int local_rank = view.local_rank_of_rank[reducer];
  const int reduction = schedule_.reduction(tile.owner, view.node());
  for (int i = 0; i < rows; ++i) {
    std::byte* row = launch_.peer_area(
        local_rank, schedule_.partial_offset(view.node(), reduction, view.local_rank(), begin + i));
    for (int j = 0; j < columns; ++j) {
      store_element(row, call.comm_dtype, column + j, sums[i * TileGemm::kColumns + j]);
    }
  }
}

// Whoever completes a chunk's last tile raises its flag: every tile's stores happened before its own count.
void HostReduction::count_tile(int owner, int chunk) {
  if (tiles_left_[owner * schedule_.max_chunks + chunk].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const TopologyView& view = launch_.view();
  const int reducer = schedule_.reducer(owner, view.node());
  launch_.raise_flag(view.local_rank_of_rank[reducer],
                     schedule_.flag(schedule_.reduction(owner, view.node()), view.local_rank(), chunk));
}

void HostReduction::run_compute(Waiter& waiter) {
  const int64_t total = static_cast<int64_t>(tile_rows_.size()) * num_columns_;
  // Tests hold the chunks of one owner back by keeping their tiles for last, until they are released.
  std::vector<int64_t> held;
  const auto is_held = [&](const TileRow& tile) {
    return launch_.hooks && launch_.hooks->hold &&
           launch_.hooks->hold(launch_.view().rank, tile.owner,
                               static_cast<int>(tile.index * schedule_.tile_m / schedule_.chunk_rows));
  };
  const auto perform = [&](int64_t number) {
    const TileRow& tile = tile_rows_[number / num_columns_];
    if (is_held(tile)) return false;
    const HostSpan span(waiter.track(), TraceKind::compute, number, tile.owner);
    push_tile(tile, number % num_columns_);
    count_tile(tile.owner, static_cast<int>(tile.index * schedule_.tile_m / schedule_.chunk_rows));
    return true;
  };
  while (!launch_.stopped()) {
    const int64_t number = next_tile_.fetch_add(1, std::memory_order_relaxed);
    if (number >= total) break;
    if (!perform(number)) held.push_back(number);
    waiter.progressed();
  }
  while (!held.empty()) {
    waiter.look();
    if (std::erase_if(held, perform) == 0 && !waiter.sleep({"held tile"})) return;
  }
}

bool HostReduction::partials_ready(const Item& item) const {
  const TopologyView& view = launch_.view();
  const int reduction = schedule_.reduction(item.owner, view.node());
  for (int local_source = 0; local_source < view.local_nranks(); ++local_source) {
    if (!launch_.flag_raised(schedule_.flag(reduction, local_source, item.chunk))) return false;
  }
  return true;
}

bool HostReduction::sums_ready(int chunk) const {
  const TopologyView& view = launch_.view();
  for (int node = 0; node < view.num_nodes; ++node) {
    if (node != view.node() && !launch_.signal_arrived(schedule_.signal(node, chunk))) return false;
  }
  return true;
}

// The first thing that a chunk still lacks.
WaitTarget HostReduction::target_of(const Item& item) const {
  const TopologyView& view = launch_.view();
  const int reduction = schedule_.reduction(item.owner, view.node());
  for (int local_source = 0; local_source < view.local_nranks(); ++local_source) {
    const int flag = schedule_.flag(reduction, local_source, item.chunk);
    if (!launch_.flag_raised(flag)) {
      return {"partial", static_cast<uint64_t>(item.chunk), view.rank_at(view.node(), local_source),
              launch_.flag_value(flag), launch_.epoch};
    }
  }
  for (int node = 0; node < view.num_nodes; ++node) {
    if (node != view.node() && !launch_.signal_arrived(schedule_.signal(node, item.chunk))) {
      return {"node sum", static_cast<uint64_t>(item.chunk), schedule_.reducer(view.rank, node), 0, 1};
    }
  }
  return {"chunk", static_cast<uint64_t>(item.chunk), item.owner, 0, 0};
}

void HostReduction::sum_partials(int owner, int64_t row, float* sums) const {
  const TopologyView& view = launch_.view();
  const int reduction = schedule_.reduction(owner, view.node());
  for (int local_source = 0; local_source < view.local_nranks(); ++local_source) {
    const std::byte* partial =
        launch_.area(schedule_.partial_offset(view.node(), reduction, local_source, row));
    for (int64_t column = 0; column < schedule_.n; ++column) {
      const float value = load_element(partial, launch_.gemm().comm_dtype, column);
      sums[column] = local_source == 0 ? value : sums[column] + value;
    }
  }
}

// Sums the node's partials of a chunk. An owner elsewhere gets the node's sum by put; this rank's own is kept,
// or, with one node, finished at once. False: the role has to end.
bool HostReduction::reduce_local(const Item& item, Waiter& waiter) {
  const TopologyView& view = launch_.view();
  const int64_t begin = item.chunk * schedule_.chunk_rows;
  const int64_t rows = schedule_.chunk_count(item.owner, item.chunk);
  const bool mine = item.owner == view.rank;
  const int reduction = schedule_.reduction(item.owner, view.node());
  std::vector<float> sums(schedule_.n);
  for (int64_t row = begin; row < begin + rows; ++row) {
    sum_partials(item.owner, row, sums.data());
    if (view.num_nodes == 1) {
      finish_row_(row, sums.data());
      continue;
    }
    std::byte* node_sum = launch_.area(mine ? schedule_.sum_offset(view.node(), row)
                                            : schedule_.send_offset(view.node(), reduction, row));
    for (int64_t column = 0; column < schedule_.n; ++column) {
      store_element(node_sum, launch_.gemm().comm_dtype, column, sums[column]);
    }
  }
  if (mine && view.num_nodes == 1) finish_chunk_(item.chunk);
  if (mine) return true;
  return waiter.put(item.owner, launch_.area_address(schedule_.send_offset(view.node(), reduction, begin)),
                    launch_.area_address(schedule_.sum_offset(view.node(), begin)),
                    static_cast<size_t>(rows) * schedule_.row_pitch(),
                    schedule_.signal(view.node(), item.chunk));
}

// Adds the nodes' sums of one of this rank's chunks in node order.
void HostReduction::finish(int chunk) {
  const TopologyView& view = launch_.view();
  for (int node = 0; node < view.num_nodes; ++node) {
    if (node != view.node()) launch_.take_signal(schedule_.signal(node, chunk));
  }
  const int64_t begin = chunk * schedule_.chunk_rows;
  std::vector<float> sums(schedule_.n);
  for (int64_t row = begin; row < begin + schedule_.chunk_count(view.rank, chunk); ++row) {
    for (int node = 0; node < view.num_nodes; ++node) {
      const std::byte* node_sum = launch_.area(schedule_.sum_offset(node, row));
      for (int64_t column = 0; column < schedule_.n; ++column) {
        const float value = load_element(node_sum, launch_.gemm().comm_dtype, column);
        sums[column] = node == 0 ? value : sums[column] + value;
      }
    }
    finish_row_(row, sums.data());
  }
  finish_chunk_(chunk);
}

void HostReduction::run_reduce(Waiter& waiter) {
  const TopologyView& view = launch_.view();
  std::vector<Item> partial;  // in the order in which tiles are computed: other nodes' owners first
  for (int position = 0; position < view.nranks; ++position) {
    const int owner = schedule_.owner_at(position);
    if (schedule_.reducer(owner, view.node()) != view.rank) continue;
    for (int chunk = 0; chunk < schedule_.chunks(owner); ++chunk) partial.push_back({owner, chunk});
  }
  std::vector<Item> unfinished;
  bool ended = false;
  const auto reduce = [&](const Item& item) {
    if (ended || !partials_ready(item)) return false;
    const HostSpan span(waiter.track(), TraceKind::reduce, item.chunk, item.owner);
    if (!reduce_local(item, waiter)) ended = true;
    if (item.owner == view.rank && view.num_nodes > 1) unfinished.push_back(item);
    return true;
  };
  const auto complete = [&](const Item& item) {
    if (!sums_ready(item.chunk)) return false;
    const HostSpan span(waiter.track(), TraceKind::reduce, item.chunk, item.owner);
    finish(item.chunk);
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

}  // namespace mk::gemm_reduce_scatter
