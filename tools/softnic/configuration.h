// SPDX-License-Identifier: MIT
// What the environment says about the emulated NICs; docs/softnic.md lists the variables.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "adversity.h"

namespace softnic {

enum class LinkKind : uint8_t { infiniband, roce, efa };

struct NicConfiguration {
  double gigabits_per_second = 0;  // 0: as fast as the memory
  double latency_us = 0;
  bool wrong_gid = false;   // its GIDs lead nowhere
  uint32_t down_ports = 0;  // bit p - 1: port p is down
};

struct Configuration {
  LinkKind kind = LinkKind::infiniband;
  int num_ports = 1;
  std::string fabric = "default";
  std::vector<NicConfiguration> nics;
  std::vector<std::pair<int, int>> blocked;  // NICs between which packets are lost
  double timeout_scale = 1.0 / 16;           // of the transport timeouts that a QP asks for
  uint32_t busy_us = 0;                      // how long a worker polls before it sleeps
  bool inline_write = false;                 // EFA: inline data in an RDMA write
  Adversity adversity;

  bool is_blocked(int one, int other) const;

  // Nothing, and a sentence in `error`, when a variable has a value that makes no sense.
  static std::optional<Configuration> from_environment(std::string& error);
};

}  // namespace softnic
