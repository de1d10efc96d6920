// SPDX-License-Identifier: MIT
#include "roofline.h"

#include <algorithm>

#include "element.h"

namespace perf {

double link_bytes(const UnfusedShape& shape, int nranks) {
  const auto shard_rows = static_cast<double>((shape.m + nranks - 1) / nranks);
  const double to_others = shard_rows * (nranks - 1);
  const auto k = static_cast<double>(shape.k);
  const auto n = static_cast<double>(shape.n);
  const auto input_bytes = static_cast<double>(element_bytes(shape.dtypes.dtype));
  const auto output_bytes = static_cast<double>(element_bytes(shape.dtypes.out_dtype));
  const auto partial_bytes = static_cast<double>(element_bytes(shape.dtypes.comm_dtype));
  switch (shape.collective) {
    case Collective::kAllGather:
      return to_others * (shape.is_wgrad ? n : k) * input_bytes;
    case Collective::kReduceScatter:
      return to_others * n * partial_bytes;
    case Collective::kAllReduce:
      break;
  }
  return to_others * n * (partial_bytes + output_bytes);
}

std::optional<double> roofline_us(const std::optional<double>& alone_us, const std::optional<double>& cublas_us,
                                  const std::optional<double>& link_us) {
  if (!alone_us && !cublas_us) return std::nullopt;
  const double kernel = std::min(alone_us.value_or(*(cublas_us ? cublas_us : alone_us)),
                                 cublas_us.value_or(*(alone_us ? alone_us : cublas_us)));
  return link_us ? std::max(kernel, *link_us) : std::optional<double>();
}

}  // namespace perf
