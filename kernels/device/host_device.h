// SPDX-License-Identifier: MIT
// Marks a function that both executors call: a plain inline one where nvcc is not the compiler.
#pragma once

#if defined(__CUDACC__)
#define MK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MK_HOST_DEVICE inline
#endif
