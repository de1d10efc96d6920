// SPDX-License-Identifier: MIT
#include "network_rate.h"

#include <memory>

#include "measure.h"

namespace perf {
namespace {

constexpr int64_t kRowElements = 8192;
constexpr int64_t kRowsOfARank = 16384;  // of 2 bytes an element: 256 MiB
constexpr int kLaunches = 7;

}  // namespace

double measure_network(const Context& context, RankGroup& group) {
  const Shape shape =
      kAllgatherGemm.collective_shape({{"m", kRowsOfARank * context.nranks}, {"k", kRowElements}});
  const std::unique_ptr<Problem> problem = kAllgatherGemm.make(context, shape);
  problem->allocate(1);
  problem->fill(0, Pattern::kRandom);
  const Timing timing = measure({{context.comm, [&] { problem->run(0); }, true}}, {context, group},
                                {Mode::kIsolated, 2, kLaunches})
                            .front();
  const double bytes = group.maximum({static_cast<double>(problem->plan().value().network_bytes)})[0];
  return bytes / timing.min_us * 1e-3;
}

}  // namespace perf
