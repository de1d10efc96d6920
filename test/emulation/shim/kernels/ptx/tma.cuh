// SPDX-License-Identifier: MIT
// kernels/ptx/tma.cuh on the host: plain bulk copies, done when they are waited for; boxes of tensors, at once.
#pragma once

#include "kernels/ptx/mbarrier.cuh"

namespace mk::ptx {

inline void cp_async_bulk_shared_global(void* smem_destination, const void* gmem_source, uint32_t num_bytes,
                                        uint64_t* barrier) {
  emulation::bulk_copies().load(smem_destination, gmem_source, num_bytes, barrier);
}
inline void cp_async_bulk_global_shared(void* gmem_destination, const void* smem_source, uint32_t num_bytes) {
  emulation::bulk_copies().store(gmem_destination, smem_source, num_bytes);
}
// What a CUtensorMap of three or four dimensions holds here: boxes are 64 columns of box_rows rows, filled up
// with zeros, and not swizzled.
struct EmulatedTensor {
  const uint16_t* data;
  int64_t dims[4];
  int64_t stride_bytes[3];
  int64_t box_rows;
};
inline void cp_async_bulk_tensor_4d_shared_global(void* smem_destination, const CUtensorMap* map, uint64_t*,
                                                  int32_t column, int32_t row, int32_t third, int32_t fourth) {
  EmulatedTensor tensor;
  static_assert(sizeof tensor <= sizeof *map);
  std::memcpy(&tensor, map, sizeof tensor);
  auto* to = static_cast<uint16_t*>(smem_destination);
  for (int64_t y = row; y < row + tensor.box_rows; ++y) {
    for (int64_t x = column; x < column + 64; ++x, ++to) {
      const int64_t offset =
          y * tensor.stride_bytes[0] + third * tensor.stride_bytes[1] + fourth * tensor.stride_bytes[2];
      *to = x < tensor.dims[0] && y < tensor.dims[1] ? tensor.data[offset / 2 + x] : 0;
    }
  }
}
inline void prefetch_tensormap(const CUtensorMap*) {}
// Of three dimensions; it counts itself in at the barrier, for who stands in for consumers.
inline void cp_async_bulk_tensor_3d_shared_global(void* smem_destination, const CUtensorMap* map,
                                                  uint64_t* barrier, int32_t column, int32_t row,
                                                  int32_t third) {
  EmulatedTensor tensor;
  std::memcpy(&tensor, map, sizeof tensor);
  auto* to = static_cast<uint16_t*>(smem_destination);
  for (int64_t y = row; y < row + tensor.box_rows; ++y) {
    for (int64_t x = column; x < column + 64; ++x, ++to) {
      const bool is_inside =
          x < tensor.dims[0] && y >= 0 && y < tensor.dims[1] && third >= 0 && third < tensor.dims[2];
      const int64_t offset = y * tensor.stride_bytes[0] + third * tensor.stride_bytes[1];
      *to = is_inside ? tensor.data[offset / 2 + x] : 0;
    }
  }
  __atomic_fetch_add(barrier, 1, __ATOMIC_RELEASE);
  emulation::has_stored();
}
// What a CUtensorMap of an output holds here; its boxes are rows of 128 bytes, swizzled.
struct EmulatedOutput {
  std::byte* data;
  int64_t rows;
  int64_t row_bytes;
  int64_t pitch;
  int element_bytes;
  int box_rows;
};
// to_output(to, from, bytes) takes what of a box lies in the output, in chunks of 16 bytes.
template <class ToOutput>
void for_chunks_of_box(const CUtensorMap* map, const void* smem_source, int32_t column, int32_t row,
                       ToOutput&& to_output) {
  EmulatedOutput output;
  static_assert(sizeof output <= sizeof *map);
  std::memcpy(&output, map, sizeof output);
  if (reinterpret_cast<uintptr_t>(smem_source) % 1024 != 0) std::abort();  // the swizzle is one of addresses
  for (int64_t y = 0; y < output.box_rows && row + y < output.rows; ++y) {
    for (int64_t chunk = 0; chunk < 8; ++chunk) {
      const int64_t byte = int64_t{column} * output.element_bytes + chunk * 16;
      if (byte >= output.row_bytes) break;
      to_output(output.data + (row + y) * output.pitch + byte,
                static_cast<const std::byte*>(smem_source) + y * 128 + (chunk ^ y % 8) * 16, 16);
    }
  }
}
inline void cp_async_bulk_tensor_2d_global_shared(const CUtensorMap* map, const void* smem_source,
                                                  int32_t column, int32_t row) {
  for_chunks_of_box(map, smem_source, column, row, [](void* to, const void* from, size_t num_bytes) {
    emulation::bulk_copies().store(to, from, num_bytes);
  });
}
inline void cp_reduce_async_bulk_tensor_2d_add_global_shared(const CUtensorMap* map, const void* smem_source,
                                                             int32_t column, int32_t row) {
  for_chunks_of_box(map, smem_source, column, row, [](void* to, const void* from, size_t num_bytes) {
    emulation::bulk_copies().add(to, from, num_bytes);
  });
}
inline void cp_async_bulk_prefetch_tensor_2d_l2(const CUtensorMap*, int32_t, int32_t) {}
inline void cp_async_bulk_commit_group() { emulation::bulk_copies().commit_group(); }
template <int NUM_PENDING>
void cp_async_bulk_wait_group() {
  emulation::bulk_copies().complete_stores(NUM_PENDING);
}
template <int NUM_PENDING>
void cp_async_bulk_wait_group_read() {
  emulation::bulk_copies().complete_reads(NUM_PENDING);
}

}  // namespace mk::ptx
