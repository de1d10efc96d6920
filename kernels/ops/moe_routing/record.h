// SPDX-License-Identifier: MIT
// The routing record as it lies in the caller's memory: the public head (mk_moe_routing_t), the library's head,
// rows and offsets of each local expert, where this rank's tokens went, received rows. Host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../protocol.h"
#include "mkernel.h"

namespace mk::moe {

inline constexpr uint32_t kRecordMagic = 0x6d6b726d;
inline constexpr uint32_t kRecordVersion = 1;

// Behind the public head.
struct RecordHead {
  int32_t nranks;
  int32_t rank;
  int32_t experts;
  int32_t topk;
  int64_t items_offset;  // RecordItem[tokens][topk]
  int64_t reserved;
};
static_assert(sizeof(mk_moe_routing_t) == 64 && sizeof(RecordHead) == 32);

// Where (token, k) of this rank went: row `slot` of those that this rank sent to `expert`; -1: dropped.
struct RecordItem {
  int32_t expert;
  int32_t slot;
};
static_assert(sizeof(RecordItem) == 8 && sizeof(mk_moe_row_t) == 12);

struct RecordLayout {
  int local_experts;
  int topk;
  int64_t tokens;

  static constexpr int64_t kHead = sizeof(mk_moe_routing_t);
  MK_HOST_DEVICE int64_t counts_offset() const { return kHead + static_cast<int64_t>(sizeof(RecordHead)); }
  MK_HOST_DEVICE int64_t offsets_offset() const {
    return round_up(counts_offset() + int64_t{local_experts} * 4, 16);
  }
  MK_HOST_DEVICE int64_t items_offset() const {
    return round_up(offsets_offset() + (int64_t{local_experts} + 1) * 4, 16);
  }
  MK_HOST_DEVICE int64_t rows_offset() const {
    return round_up(items_offset() + tokens * topk * static_cast<int64_t>(sizeof(RecordItem)), 16);
  }
  MK_HOST_DEVICE int64_t bytes(int64_t rows) const {
    return rows_offset() + rows * static_cast<int64_t>(sizeof(mk_moe_row_t));
  }
};

// The parts of a record in memory.
struct RecordView {
  mk_moe_routing_t* record;

  template <class T>
  MK_HOST_DEVICE T* at(int64_t offset) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(record) + offset);
  }
  MK_HOST_DEVICE RecordHead* head() const { return at<RecordHead>(RecordLayout::kHead); }
  MK_HOST_DEVICE int32_t* expert_counts() const { return at<int32_t>(record->expert_counts_offset); }
  MK_HOST_DEVICE int32_t* expert_offsets() const { return at<int32_t>(record->expert_offsets_offset); }
  MK_HOST_DEVICE RecordItem* items() const { return at<RecordItem>(head()->items_offset); }
  MK_HOST_DEVICE mk_moe_row_t* rows() const { return at<mk_moe_row_t>(record->rows_offset); }
};

// Can this be read as the record of `rank` for `tokens` tokens and the given sizes, without leaving its bytes?
MK_HOST_DEVICE bool record_usable(mk_moe_routing_t* record, size_t bytes, const RecordLayout& layout,
                                  int nranks, int rank, int experts) {
  const auto size = static_cast<int64_t>(bytes);
  if (size < layout.rows_offset()) return false;
  const RecordHead& head = *RecordView{record}.head();
  return record->magic == kRecordMagic && record->version == kRecordVersion &&
         record->num_local_experts == layout.local_experts && record->tokens == layout.tokens &&
         head.nranks == nranks && head.rank == rank && head.experts == experts && head.topk == layout.topk &&
         record->expert_counts_offset == layout.counts_offset() &&
         record->expert_offsets_offset == layout.offsets_offset() &&
         head.items_offset == layout.items_offset() && record->rows_offset == layout.rows_offset() &&
         record->num_rows >= 0 && record->num_rows <= size / static_cast<int64_t>(sizeof(mk_moe_row_t)) &&
         size >= layout.bytes(record->num_rows);
}

}  // namespace mk::moe
