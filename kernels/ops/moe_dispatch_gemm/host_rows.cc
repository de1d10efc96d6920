// SPDX-License-Identifier: MIT
#include "host_rows.h"

#include <cstring>

#include "../../host/number_format.h"
#include "../../host/tile_gemm.h"
#include "../moe_routing/host_routing.h"
#include "../moe_routing/record.h"

namespace mk::moe_dispatch_gemm {

void HostRows::prepare(const moe::Verdict& verdict) {
  const moe::Routing& routing = schedule_.routing;
  const TopologyView& view = launch_.view();
  const int experts = routing.num_experts(view.rank);
  const bool go = verdict.kind == moe::Verdict::go;
  num_columns_ = ceil_div(launch_.moe().inter, launch_.plan.tile_n);
  expert_begin_.assign(1, 0);
  int64_t row = 0;
  for (int local = 0; local < experts; ++local) {
    for (int source = 0; source < view.nranks; ++source) {
      row_begin_.push_back(row);
      if (go) row += routing.expert_rows(source, routing.first_expert(view.rank) + local);
    }
    first_tile_.push_back(num_tiles_);
    num_tiles_ += static_cast<size_t>(ceil_div(row - expert_begin_.back(), launch_.plan.tile_m));
    expert_begin_.push_back(row);
  }
  rows_.resize(static_cast<size_t>(row));
  tiles_ = std::make_unique<Tile[]>(num_tiles_);
  for (int local = 0; local < experts; ++local) {
    int64_t begin = expert_begin_[local];
    for (size_t tile = first_tile_[local]; begin < expert_begin_[local + 1];
         ++tile, begin += launch_.plan.tile_m) {
      const auto rows = static_cast<int>(min_of(launch_.plan.tile_m, expert_begin_[local + 1] - begin));
      tiles_[tile].local_expert = local;
      tiles_[tile].begin = begin;
      tiles_[tile].rows = rows;
      tiles_[tile].rows_left.store(rows, std::memory_order_relaxed);
      tiles_[tile].columns_left.store(num_columns_, std::memory_order_relaxed);
    }
  }
  if (!launch_.moe().use_routing) begin_record(verdict);
}

// All of the record but the rows, which come one by one.
void HostRows::begin_record(const moe::Verdict& verdict) const {
  const MoeCall& call = launch_.moe();
  const TopologyView& view = launch_.view();
  const moe::Routing& routing = schedule_.routing;
  const int experts = routing.num_experts(view.rank);
  const moe::RecordLayout layout{experts, call.topk, call.tokens};
  const moe::RecordView record{call.routing};
  const auto rows = static_cast<int64_t>(rows_.size());
  const bool go = verdict.kind == moe::Verdict::go;
  *call.routing = {moe::kRecordMagic,
                   moe::kRecordVersion,
                   go ? MK_SUCCESS : MK_ERROR_DATA,
                   experts,
                   call.tokens,
                   rows,
                   go                                       ? rows
                   : verdict.kind == moe::Verdict::capacity ? verdict.needed
                                                            : 0,
                   layout.counts_offset(),
                   layout.offsets_offset(),
                   layout.rows_offset()};
  *record.head() = {view.nranks, view.rank, call.experts, call.topk, layout.items_offset(), 0};
  for (int local = 0; local < experts; ++local) {
    record.expert_counts()[local] = static_cast<int32_t>(expert_begin_[local + 1] - expert_begin_[local]);
    record.expert_offsets()[local] = static_cast<int32_t>(expert_begin_[local]);
  }
  record.expert_offsets()[experts] = static_cast<int32_t>(rows);
}

void HostRows::take_row(int source, int token, int k, const moe::RouteItem& item, const std::byte* data) {
  const MoeCall& call = launch_.moe();
  const TopologyView& view = launch_.view();
  const int local = item.expert - schedule_.routing.first_expert(view.rank);
  const int64_t row = row_begin_[static_cast<size_t>(local) * view.nranks + source] + item.slot;
  rows_[static_cast<size_t>(row)] = {data, item.factor};
  if (!call.use_routing) moe::RecordView{call.routing}.rows()[row] = {source, token, k};
  if (call.dispatched_rows != nullptr) {
    std::memcpy(static_cast<std::byte*>(call.dispatched_rows) + row * call.ld_dispatched_rows * 2, data,
                schedule_.route_offset());
  }
  const auto tile =
      first_tile_[local] + static_cast<size_t>((row - expert_begin_[local]) / launch_.plan.tile_m);
  if (tiles_[tile].rows_left.fetch_sub(1, std::memory_order_acq_rel) == 1) launch_.rank.ring();
}

void HostRows::take_chunk(int source, int chunk) {
  const moe::Routing& routing = schedule_.routing;
  const int self = launch_.view().rank;
  const int64_t total = routing.rank_tokens(source, self);
  const int64_t begin = schedule_.receive_begin(self, source) + routing.chunk_begin(total, chunk);
  for (int64_t i = 0; i < routing.chunk_count(total, chunk); ++i) {
    const std::byte* packet = launch_.area(schedule_.offset(begin + i));
    const std::byte* route = packet + schedule_.route_offset();
    for (int k = 0; k < routing.topk; ++k) {
      const moe::RouteItem& item = moe::route_item(route, k);
      if (item.expert < 0) continue;
      if (!moe::route_sound(routing, source, item)) return moe::report_unsound(launch_, source);
      if (routing.owner(item.expert) == self) take_row(source, moe::route_head(route).token, k, item, packet);
    }
  }
}

void HostRows::compute_tile(const Tile& tile, int64_t column_tile) const {
  const MoeCall& call = launch_.moe();
  const int64_t column = column_tile * launch_.plan.tile_n;
  const int columns = static_cast<int>(min_of(launch_.plan.tile_n, call.inter - column));
  const void* a_rows[TileGemm::kRows];
  for (int i = 0; i < tile.rows; ++i) a_rows[i] = rows_[static_cast<size_t>(tile.begin + i)].data;
  const auto* w = static_cast<const uint16_t*>(call.w) + tile.local_expert * call.hidden * call.inter;
  alignas(64) float sums[TileGemm::kRows * TileGemm::kColumns];
  TileGemm{nullptr,       0,          w,           call.w_layout == MK_LAYOUT_KN ? call.inter : call.hidden,
           call.w_layout, call.dtype, call.hidden, column,
           tile.rows,     columns,    a_rows}
      .compute(sums);
  for (int i = 0; i < tile.rows; ++i) {
    const float scale = rows_[static_cast<size_t>(tile.begin + i)].scale;
    for (int j = 0; j < columns; ++j) {
      store_element(call.y, call.out_dtype, (tile.begin + i) * call.ldy + column + j,
                    sums[i * TileGemm::kColumns + j] * scale);
    }
  }
}

// The first chunk that has not come, for the sentence of a deadline.
WaitTarget HostRows::missing_chunk() const {
  const moe::Routing& routing = schedule_.routing;
  const TopologyView& view = launch_.view();
  for (int position = 0; position < view.nranks; ++position) {
    const int source = view.rotated(position);
    for (int chunk = 0; chunk < routing.chunks(routing.rank_tokens(source, view.rank)); ++chunk) {
      const int flag = schedule_.flag(source, chunk);
      if (!launch_.flag_raised(flag)) {
        return {"chunk", static_cast<uint64_t>(chunk), source, launch_.flag_value(flag), launch_.epoch};
      }
    }
  }
  return {"row block"};
}

void HostRows::run_compute(Waiter& waiter) {
  while (!launch_.stopped()) {
    waiter.look();
    bool worked = false;
    bool left = false;
    for (size_t number = 0; number < num_tiles_ && !launch_.stopped(); ++number) {
      Tile& tile = tiles_[number];
      if (tile.next_column.load(std::memory_order_relaxed) >= num_columns_) continue;
      if (tile.rows_left.load(std::memory_order_acquire) > 0) {
        left = true;
        continue;
      }
      while (!launch_.stopped()) {
        const int64_t column = tile.next_column.fetch_add(1, std::memory_order_relaxed);
        if (column >= num_columns_) break;
        const HostSpan span(waiter.track(), TraceKind::compute,
                            static_cast<int64_t>(number) * num_columns_ + column);
        compute_tile(tile, column);
        worked = true;
        if (tile.columns_left.fetch_sub(1, std::memory_order_relaxed) == 1)
          launch_.tile_done(static_cast<int>(number));
      }
    }
    if (worked) {
      waiter.progressed();
    } else if (!left || !waiter.sleep(missing_chunk())) {
      return;
    }
  }
}

}  // namespace mk::moe_dispatch_gemm
