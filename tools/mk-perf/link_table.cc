// SPDX-License-Identifier: MIT
#include "link_table.h"

#include <algorithm>

#include "lib/status.h"

namespace perf {
namespace {

using mk::format;

// Beyond noise: a third of the others' bandwidth, five times their latency.
constexpr double kSlow = 1.0 / 3, kFar = 5;

// Of an even number the one that is nearer to what a link should be: the smaller latency, the larger bandwidth.
double median_of(std::vector<double> values, bool smaller) {
  const size_t middle = (values.size() - (smaller ? 1 : 0)) / 2;
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(middle), values.end());
  return values[middle];
}

std::string name_of(const MeasuredLink& link) {
  const std::string nic = link.nic.empty() ? "" : link.all_nics ? " over all NICs" : " over " + link.nic;
  return format("rank %d to rank %d", link.from, link.to) + nic;
}

std::string judge_alike(const std::vector<MeasuredLink>& links) {
  if (links.empty()) return "";
  std::vector<double> latencies, bandwidths;
  for (const MeasuredLink& link : links) {
    latencies.push_back(link.latency_us);
    bandwidths.push_back(link.gigabytes);
  }
  const double latency = median_of(latencies, true), bandwidth = median_of(bandwidths, false);
  std::string problems;
  for (const MeasuredLink& link : links) {
    if (link.gigabytes < kSlow * bandwidth) {
      problems += format(
          "%s: %.2f GB/s where most links have %.2f: a slower cable or port, a "
          "detour, or someone else's traffic; compare the ports above\n",
          name_of(link).c_str(), link.gigabytes, bandwidth);
    }
    if (link.latency_us > kFar * latency) {
      problems += format(
          "%s: %.1f us where most links have %.1f: more hops, or an interface that "
          "is not meant for this (MK_SOCKET_IFNAME, MK_IB_HCA)\n",
          name_of(link).c_str(), link.latency_us, latency);
    }
  }
  return problems;
}

}  // namespace

std::string table_of(const std::vector<MeasuredLink>& links) {
  size_t width = 3;
  for (const MeasuredLink& link : links) width = std::max(width, link.nic.size());
  const int column = static_cast<int>(width);
  std::string text = format("from   to   %-*s   latency [us]   bandwidth [GB/s]   path\n", column, "NIC");
  for (const MeasuredLink& link : links) {
    text += format("%4d %4d   %-*s   ", link.from, link.to, column, link.nic.empty() ? "-" : link.nic.c_str());
    text += link.failed ? format("%12s   %16s", "failed", "-")
                        : format("%12.1f   %16.2f", link.latency_us, link.gigabytes);
    text += "   " + link.path + "\n";
  }
  return text;
}

std::string judge_links(const std::vector<MeasuredLink>& links) {
  std::vector<MeasuredLink> single, all;
  for (const MeasuredLink& link : links) {
    if (!link.failed) (link.all_nics ? all : single).push_back(link);
  }
  return judge_alike(single) + judge_alike(all);
}

}  // namespace perf
