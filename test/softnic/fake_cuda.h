// SPDX-License-Identifier: MIT
// A CUDA driver for machines without a GPU: what softnic asks of libcuda.so.1, over memory of the host that can
// be reached through copies alone. Copies run late: not before an event behind them was asked for a second
// time.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Memory of a device (0 or 1); `by_handle`: of the virtual memory interface, else as by cuMemAlloc.
std::byte* fake_cuda_allocate(int device, size_t bytes, int by_handle);
void fake_cuda_free(std::byte* address);
// The same bytes for the CPU: looking at the memory itself ends the program.
std::byte* fake_cuda_shadow(const std::byte* address);
// Pieces of memory that have an address: allocations, and what was mapped a second time.
int fake_cuda_mappings();
// Copies that named memory their device may not reach.
int fake_cuda_violations();
}
