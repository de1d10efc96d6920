// SPDX-License-Identifier: MIT
// Functions that the host executor and the CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define MK_HD __host__ __device__
#else
#define MK_HD
#endif
