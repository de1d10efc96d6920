// SPDX-License-Identifier: MIT
#include "configuration.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

namespace softnic {
namespace {

constexpr int kMaxNics = 32;
constexpr int kMaxPorts = 2;
constexpr size_t kMaxFabricName = 48;

std::string text(const char* name, const char* otherwise) {
  const char* set = std::getenv(name);
  return set != nullptr && *set != '\0' ? set : otherwise;
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream stream(list);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

std::string complaint(const char* name, const std::string& expected, const std::string& seen) {
  return std::string(name) + ": expected " + expected + ", saw \"" + seen + "\"";
}

bool number(const char* name, const char* otherwise, double low, double high, double& value,
            std::string& error) {
  const std::string seen = text(name, otherwise);
  char* end = nullptr;
  value = std::strtod(seen.c_str(), &end);
  if (*end == '\0' && value >= low && value <= high) return true;
  error = complaint(name, "a number from " + std::to_string(low) + " to " + std::to_string(high), seen);
  return false;
}

// One value a NIC; the last one holds for the rest.
bool numbers(const char* name, std::vector<NicConfiguration>& nics, double NicConfiguration::*field,
             std::string& error) {
  const std::vector<std::string> parts = split(text(name, "0"));
  for (size_t nic = 0; nic < nics.size(); ++nic) {
    const std::string& part = parts[std::min(nic, parts.size() - 1)];
    char* end = nullptr;
    nics[nic].*field = std::strtod(part.c_str(), &end);
    if (part.empty() || *end != '\0' || !(nics[nic].*field >= 0)) {
      error = complaint(name, "numbers from 0 separated by commas, one a NIC", part);
      return false;
    }
  }
  return true;
}

// A list of pairs "a<separator>b", or of single numbers (then b is `second`).
bool pairs(const char* name, char separator, int second, std::vector<std::pair<int, int>>& result,
           std::string& error) {
  for (const std::string& part : split(text(name, ""))) {
    char* end = nullptr;
    const long a = std::strtol(part.c_str(), &end, 10);
    long b = second;
    const bool read = end != part.c_str();
    if (*end == separator) b = std::strtol(end + 1, &end, 10);
    if (!read || *end != '\0' || a < 0 || a >= kMaxNics || b < 0 || b >= kMaxNics) {
      error = complaint(name, std::string("NIC numbers as A or A") + separator + "B separated by commas", part);
      return false;
    }
    result.emplace_back(static_cast<int>(a), static_cast<int>(b));
  }
  return true;
}

bool read_kind(Configuration& configuration, std::string& error) {
  const std::string kind = text("MK_SOFTNIC_KIND", "ib");
  if (kind == "ib") {
    configuration.kind = LinkKind::infiniband;
  } else if (kind == "roce") {
    configuration.kind = LinkKind::roce;
  } else if (kind == "efa") {
    configuration.kind = LinkKind::efa;
  } else {
    error = complaint("MK_SOFTNIC_KIND", "ib, roce or efa", kind);
    return false;
  }
  return true;
}

bool read_shape(Configuration& configuration, std::string& error) {
  double nics = 0, ports = 0, divisor = 0, busy = 0, seed = 0;
  if (!number("MK_SOFTNIC_NICS", "1", 0, kMaxNics, nics, error) ||
      !number("MK_SOFTNIC_PORTS", "1", 1, kMaxPorts, ports, error) ||
      !number("MK_SOFTNIC_TIMEOUT_DIVISOR", "16", 1, 1e6, divisor, error) ||
      !number("MK_SOFTNIC_BUSY_US", "0", 0, 1e6, busy, error) ||
      !number("MK_SOFTNIC_SEED", "0", 0, 9e15, seed, error)) {
    return false;
  }
  configuration.nics.resize(static_cast<size_t>(nics));
  configuration.num_ports = configuration.kind == LinkKind::efa ? 1 : static_cast<int>(ports);
  configuration.timeout_scale = 1 / divisor;
  configuration.busy_us = static_cast<uint32_t>(busy);
  configuration.inline_write = text("MK_SOFTNIC_EFA_INLINE_WRITE", "0") == "1";
  configuration.fabric = text("MK_SOFTNIC_FABRIC", "default");
  if (configuration.fabric.size() > kMaxFabricName) {
    error = complaint("MK_SOFTNIC_FABRIC", "at most 48 characters", configuration.fabric);
    return false;
  }
  return configuration.adversity.parse(static_cast<uint64_t>(seed), text("MK_SOFTNIC_ADVERSITY", ""), error);
}

}  // namespace

bool Configuration::is_blocked(int one, int other) const {
  for (const auto& [a, b] : blocked) {
    if ((a == one && b == other) || (a == other && b == one)) return true;
  }
  return false;
}

std::optional<Configuration> Configuration::from_environment(std::string& error) {
  Configuration configuration;
  std::vector<std::pair<int, int>> down, wrong;
  if (!read_kind(configuration, error) || !read_shape(configuration, error) ||
      !numbers("MK_SOFTNIC_RATE_GBPS", configuration.nics, &NicConfiguration::gigabits_per_second, error) ||
      !numbers("MK_SOFTNIC_LATENCY_US", configuration.nics, &NicConfiguration::latency_us, error) ||
      !pairs("MK_SOFTNIC_DOWN", ':', 0, down, error) || !pairs("MK_SOFTNIC_WRONG_GID", ':', 0, wrong, error) ||
      !pairs("MK_SOFTNIC_BLOCKED", '-', 0, configuration.blocked, error)) {
    return std::nullopt;
  }
  for (const auto& [nic, port] : down) {
    if (static_cast<size_t>(nic) >= configuration.nics.size()) continue;
    configuration.nics[static_cast<size_t>(nic)].down_ports |= port == 0 ? ~0u : 1u << (port - 1);
  }
  for (const auto& entry : wrong) {
    const size_t nic = static_cast<size_t>(entry.first);
    if (nic < configuration.nics.size()) configuration.nics[nic].wrong_gid = true;
  }
  return configuration;
}

}  // namespace softnic
