// SPDX-License-Identifier: MIT
// What a benchmark needs of the memory and the clock that an executor works with. One table an executor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "attention_inputs.h"
#include "input_matrix.h"
#include "mkernel.h"

namespace perf {

// A matrix in device memory.
struct DeviceMatrix {
  void* data;
  mk_dtype_t dtype;
  int64_t rows;
  int64_t cols;
  int64_t ld;
};

struct MatrixScan {
  int64_t first_bad = -1;  // index of the first element that is not finite, or not poison between rows
  uint64_t hash = 0;       // of all bits, padding excluded
};

struct MatrixDifference {
  double squared_difference = 0;
  double squared_reference = 0;
};

// Work on whole matrices that is done where they are, because through host memory it would take longer than all
// that is measured. It writes and sees what the host's code does: fill what InputMatrix::value
// and AttentionInputs give, scan what compare() in reference.h calls complete.
struct MatrixOperations {
  // Element (r, c) is input(row + r, col + c), or input(row + c, col + r) when transposed; between rows zero,
  // if `pads`.
  void (*fill)(const DeviceMatrix& matrix, const InputMatrix& input, int64_t row, int64_t col, bool transposed,
               bool pads);
  // The rows of a rank: [batch][row][head][dim].
  void (*fill_attention)(void* data, const AttentionInputs& inputs, AttentionTensor tensor,
                         const AttentionPositions& positions);
  void (*poison)(void* data, mk_dtype_t dtype, int64_t elements);
  MatrixScan (*scan)(const DeviceMatrix& matrix);
  // Of matrices of one size and dtype.
  MatrixDifference (*difference)(const DeviceMatrix& matrix, const DeviceMatrix& reference);
};

struct DeviceOperations {
  mk_device_t device;
  const char* name;                 // as it is printed
  void (*select)(int cuda_device);  // for what follows in this thread; once, before the rest
  void* (*allocate)(size_t bytes);
  void (*release)(void* memory);
  void (*upload)(void* device_memory, const void* host_memory, size_t bytes);
  void (*download)(void* host_memory, const void* device_memory, size_t bytes);
  mk_stream_t (*stream)();
  // Microseconds from just before `launches` until all that it enqueued on comm has completed; `meanwhile` is
  // called while the device works.
  double (*time_us)(mk_comm_t comm, const std::function<void()>& launches,
                    const std::function<void()>& meanwhile);
  std::string (*pci_bus_id)();       // "" where it is no PCI device
  const MatrixOperations* matrices;  // nullptr: in host memory
};

// nullptr in builds without CUDA.
const DeviceOperations* cuda_device();

// That CUDA shows to this process: 0 in builds without it. Asked in a child, so that this process may still
// fork.
int num_gpus();

// nullptr: this mk-perf cannot drive the device.
const DeviceOperations* find_device(mk_device_t device);

// Memory of a device.
class DeviceBuffer {
 public:
  DeviceBuffer(const DeviceOperations& operations, size_t bytes);
  // Symmetric memory of `comm`, as much on every rank. Making it is host-collective, and so is the end of its
  // life, but on the way out of a failure, when it is left to the communicator.
  DeviceBuffer(const DeviceOperations& operations, mk_comm_t comm, size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void upload(const void* host_memory) const;
  void download(void* host_memory) const;

 private:
  const DeviceOperations* operations_;
  mk_comm_t comm_ = nullptr;  // whose symmetric memory it is
  void* data_ = nullptr;
  size_t bytes_;
};

}  // namespace perf
