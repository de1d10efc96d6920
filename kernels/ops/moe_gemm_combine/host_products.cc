// SPDX-License-Identifier: MIT
#include "host_products.h"

#include <algorithm>

#include "../../host/number_format.h"
#include "../../host/tile_gemm.h"

namespace mk::moe_gemm_combine {

void HostProducts::prepare() {
  const moe::Routing& routing = schedule_.routing;
  const TopologyView& view = launch_.view();
  num_columns_ = ceil_div(launch_.moe().hidden, launch_.plan.tile_n);
  left_ = std::vector<std::atomic<int64_t>>(static_cast<size_t>(view.nranks) * routing.max_chunks);
  for (int home = 0; home < view.nranks; ++home) {
    const int collector = schedule_.collector(home, view.node());
    const int64_t count = routing.rank_rows(home, view.rank);
    lists_.push_back(
        {view.local_rank_of_rank[collector], schedule_.list_begin(collector, home, view.rank), count});
    for (int chunk = 0; chunk < routing.chunks(count); ++chunk) {
      left_[static_cast<size_t>(home) * routing.max_chunks + chunk].store(
          routing.chunk_count(count, chunk) * num_columns_, std::memory_order_relaxed);
    }
  }
  std::vector<int64_t> place(lists_.size());
  int64_t row = 0;
  for (int local = 0; local < routing.num_experts(view.rank); ++local) {
    const int64_t begin = row;
    for (int home = 0; home < view.nranks; ++home) {
      const int64_t rows = routing.expert_rows(home, routing.first_expert(view.rank) + local);
      row_begin_.push_back(row);
      list_place_.push_back(place[static_cast<size_t>(home)]);
      row += rows;
      place[static_cast<size_t>(home)] += rows;
    }
    for (int64_t first = begin; first < row; first += launch_.plan.tile_m)
      tiles_.push_back({local, first, static_cast<int>(min_of(launch_.plan.tile_m, row - first))});
  }
  row_begin_.push_back(row);
}

std::vector<HostProducts::Part> HostProducts::parts_of(const Tile& tile) const {
  const moe::Routing& routing = schedule_.routing;
  std::vector<Part> parts;
  for (int home = 0; home < launch_.view().nranks; ++home) {
    const int64_t first = row_begin_[pair(tile.local_expert, home)];
    const int64_t end = std::min(row_begin_[pair(tile.local_expert, home) + 1], tile.begin + tile.rows);
    for (int64_t row = std::max(first, tile.begin); row < end;) {
      const int64_t place = list_place_[pair(tile.local_expert, home)] + row - first;
      const int64_t count = lists_[static_cast<size_t>(home)].count;
      const int chunk = routing.chunk_of(count, place);
      const int64_t chunk_end = routing.chunk_begin(count, chunk) + routing.chunk_count(count, chunk);
      const int64_t rows = std::min(end - row, chunk_end - place);
      parts.push_back({home, chunk, static_cast<int>(row - tile.begin), static_cast<int>(rows), place});
      row += rows;
    }
  }
  return parts;
}

bool HostProducts::held(const std::vector<Part>& parts) const {
  return launch_.hooks && launch_.hooks->hold &&
         std::any_of(parts.begin(), parts.end(), [this](const Part& part) {
           return launch_.hooks->hold(launch_.view().rank, part.home, part.chunk);
         });
}

// Computes one tile and stores it, rounded once, where its rows are collected. Whoever completes a chunk raises
// its flag: every tile's stores happened before its own count.
void HostProducts::push_tile(const Tile& tile, const std::vector<Part>& parts, int64_t column_tile) {
  const MoeCall& call = launch_.moe();
  const TopologyView& view = launch_.view();
  const int64_t column = column_tile * launch_.plan.tile_n;
  const int columns = static_cast<int>(min_of(launch_.plan.tile_n, call.hidden - column));
  const auto* x = static_cast<const uint16_t*>(call.x) + tile.begin * call.ldx;
  const auto* w = static_cast<const uint16_t*>(call.w) + tile.local_expert * call.inter * call.hidden;
  alignas(64) float sums[TileGemm::kRows * TileGemm::kColumns];
  TileGemm{x,
           call.ldx,
           w,
           call.w_layout == MK_LAYOUT_KN ? call.hidden : call.inter,
           call.w_layout,
           call.dtype,
           call.inter,
           column,
           tile.rows,
           columns}
      .compute(sums);
  for (const Part& part : parts) {
    const List& list = lists_[static_cast<size_t>(part.home)];
    for (int i = 0; i < part.rows; ++i) {
      std::byte* row = launch_.peer_area(list.collector, schedule_.row_offset(list.begin + part.place + i));
      const float* from = sums + (part.first + i) * TileGemm::kColumns;
      for (int j = 0; j < columns; ++j) store_element(row, call.out_dtype, column + j, from[j]);
    }
    const auto chunk = static_cast<size_t>(part.home) * schedule_.routing.max_chunks + part.chunk;
    if (left_[chunk].fetch_sub(part.rows, std::memory_order_acq_rel) == part.rows)
      launch_.raise_flag(list.collector, schedule_.flag(part.home, view.rank, part.chunk));
  }
}

void HostProducts::run_compute(Waiter& waiter) {
  const int64_t total = static_cast<int64_t>(tiles_.size()) * num_columns_;
  // Tests hold the chunks of one home back by keeping their tiles for last, until they are released.
  std::vector<int64_t> kept;
  const auto perform = [&](int64_t number) {
    const Tile& tile = tiles_[static_cast<size_t>(number / num_columns_)];
    const std::vector<Part> parts = parts_of(tile);
    if (held(parts)) return false;
    const HostSpan span(waiter.track(), TraceKind::compute, number);
    push_tile(tile, parts, number % num_columns_);
    return true;
  };
  while (!launch_.stopped()) {
    const int64_t number = next_.fetch_add(1, std::memory_order_relaxed);
    if (number >= total) break;
    if (!perform(number)) kept.push_back(number);
    waiter.progressed();
  }
  while (!kept.empty()) {
    waiter.look();
    if (std::erase_if(kept, perform) == 0 && !waiter.sleep({"held tile"})) return;
  }
}

}  // namespace mk::moe_gemm_combine
