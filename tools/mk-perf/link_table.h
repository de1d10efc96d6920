// SPDX-License-Identifier: MIT
// Links between ranks as --check-network has measured them: the table, and what stands out in it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace perf {

// In one direction, over one NIC of each rank or over all that they have.
struct MeasuredLink {
  int32_t from = 0;
  int32_t to = 0;
  double latency_us = 0;
  double gigabytes = 0;
  std::string nic = {};   // of `from`, "mlx5_0:1"; "all"; empty where the transport chooses no NICs
  std::string path = {};  // where it leads, as far as known
  bool failed = false;    // then there are no figures
  bool all_nics = false;  // compared with others of its kind only
};

std::string table_of(const std::vector<MeasuredLink>& links);

// What stands out among those that have figures, a sentence a line.
std::string judge_links(const std::vector<MeasuredLink>& links);

}  // namespace perf
