// SPDX-License-Identifier: MIT
// The bounds that a fused operator is held against; docs/performance.md has the formulas in words.
#pragma once

#include <cstdint>
#include <optional>

#include "operators.h"

namespace perf {

// Rates with all ranks sending at once, of the slowest of them, one direction.
struct LinkRate {
  double ring_gb_per_s = 0;       // each to the next rank
  double all_peers_gb_per_s = 0;  // each to all others
  double best() const { return ring_gb_per_s > all_peers_gb_per_s ? ring_gb_per_s : all_peers_gb_per_s; }
};

// What a link between two H200 of one host carries when nothing is wrong (18 links of NVLink 4).
constexpr int kFullNvlinks = 18;
constexpr double kLeastFullLinkRate = 350;

// True when so many links should have carried more, so that a run on them means little.
inline bool is_slow_link(const LinkRate& rate, int num_nvlinks) {
  return num_nvlinks >= kFullNvlinks && rate.best() < kLeastFullLinkRate;
}

// Bytes that the busiest rank has to send to others, however the operator goes about it; all ranks on one node,
// no help from a switch.
double link_bytes(const UnfusedShape& shape, int nranks);

// Microseconds at a rate in GB/s.
inline double transfer_us(double bytes, double gb_per_s) { return bytes / gb_per_s * 1e-3; }

// max(faster of our kernel and cuBLAS alone, transfer); nothing without either.
std::optional<double> roofline_us(const std::optional<double>& alone_us, const std::optional<double>& cublas_us,
                                  const std::optional<double>& link_us);

}  // namespace perf
