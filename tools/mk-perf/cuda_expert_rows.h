// SPDX-License-Identifier: MIT
// Kernels of the expert operators' baseline: rows of 16-byte units from and to the stage of an ExpertExchange.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "mkernel.h"

namespace perf {

// stage[places[t * topk + k]] = x[t] for all k.
struct RowSpread {
  const void* x;
  void* stage;
  const int64_t* places;
  int64_t tokens;
  int topk;
  int64_t row_bytes;
};
cudaError_t launch_spread(const RowSpread& spread, cudaStream_t stream);

// Rows [first, first + rows) of the stage to or from rows `places` of it.
struct RowCopies {
  void* stage;
  const int64_t* places;
  int64_t first;
  int64_t rows;
  int64_t row_bytes;
  bool to_places;
};
cudaError_t launch_copies(const RowCopies& copies, cudaStream_t stream);

// y[t] = sum over k of factors[t * topk + k] * stage[places[t * topk + k]], in fp32 and rounded once.
struct RowSum {
  const void* stage;
  void* y;
  mk_dtype_t dtype;  // of both
  const float* factors;
  const int64_t* places;
  int64_t tokens;
  int topk;
  int64_t row_bytes;
};
cudaError_t launch_sum(const RowSum& sum, cudaStream_t stream);

}  // namespace perf
