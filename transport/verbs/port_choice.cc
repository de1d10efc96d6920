// SPDX-License-Identifier: MIT
#include "port_choice.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstdlib>

namespace mk::verbs {

Result<DeviceFilter> DeviceFilter::parse(std::string_view text) {
  DeviceFilter filter;
  std::string_view rest = text;
  if (rest.starts_with('^')) {
    filter.exclude_ = true;
    rest.remove_prefix(1);
  }
  if (rest.starts_with('=')) {
    filter.exact_ = true;
    rest.remove_prefix(1);
  }
  while (!rest.empty()) {
    const size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view part = rest.substr(0, comma);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    const size_t colon = std::min(part.find(':'), part.size());
    Entry entry{std::string(part.substr(0, colon)), 0};
    if (colon < part.size()) entry.port = std::atoi(std::string(part.substr(colon + 1)).c_str());
    if (entry.name.empty() || entry.port < 0 || (colon < part.size() && entry.port == 0)) {
      return Status(MK_ERROR_INVALID_ARGUMENT,
                    format("environment variable MK_IB_HCA: expected names of devices such as "
                           "\"mlx5_0,mlx5_1:1\", with ^ or = in front, saw \"%s\"",
                           std::string(text).c_str()));
    }
    filter.entries_.push_back(std::move(entry));
  }
  return filter;
}

bool DeviceFilter::accepts(std::string_view device, int port) const {
  if (entries_.empty()) return true;
  const bool named = std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    const bool same = exact_ ? device == entry.name : device.starts_with(entry.name);
    return same && (entry.port == 0 || entry.port == port);
  });
  return named != exclude_;
}

int path_distance(std::string_view a, std::string_view b) {
  const auto parts = [](std::string_view path) {
    std::vector<std::string_view> list;
    while (!path.empty()) {
      const size_t slash = std::min(path.find('/'), path.size());
      if (slash > 0) list.push_back(path.substr(0, slash));
      path.remove_prefix(std::min(slash + 1, path.size()));
    }
    return list;
  };
  const auto left = parts(a), right = parts(b);
  const auto fork = std::mismatch(left.begin(), left.end(), right.begin(), right.end());
  return static_cast<int>((left.end() - fork.first) + (right.end() - fork.second));
}

std::vector<size_t> choose_ports(size_t num_ports, std::span<const int> distances, int local_rank,
                                 int local_nranks, size_t most) {
  std::vector<size_t> chosen;
  if (num_ports == 0) return chosen;
  if (distances.size() == num_ports) {
    const int nearest = *std::min_element(distances.begin(), distances.end());
    for (size_t i = 0; i < num_ports; ++i) {
      if (distances[i] == nearest) chosen.push_back(i);
    }
  } else if (num_ports < static_cast<size_t>(local_nranks)) {
    chosen.push_back(static_cast<size_t>(local_rank) % num_ports);
  } else {
    for (size_t i = static_cast<size_t>(local_rank); i < num_ports; i += static_cast<size_t>(local_nranks)) {
      chosen.push_back(i);
    }
  }
  if (chosen.size() > most) chosen.resize(most);
  return chosen;
}

const char* name_of(GidKind kind) {
  switch (kind) {
    case GidKind::infiniband:
      return "InfiniBand";
    case GidKind::roce_v1:
      return "RoCE v1";
    case GidKind::roce_v2:
      return "RoCE v2";
    case GidKind::efa:
      return "EFA";
  }
  return "unknown";
}

bool is_ipv4_mapped(const Gid& gid) {
  return std::all_of(gid.begin(), gid.begin() + 10, [](uint8_t b) { return b == 0; }) && gid[10] == 0xff &&
         gid[11] == 0xff;
}

bool is_link_local(const Gid& gid) { return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80; }

std::string text_of(const Gid& gid) {
  char text[INET6_ADDRSTRLEN] = {};
  if (is_ipv4_mapped(gid)) {
    inet_ntop(AF_INET, gid.data() + 12, text, sizeof text);
  } else {
    inet_ntop(AF_INET6, gid.data(), text, sizeof text);
  }
  return text;
}

std::optional<GidEntry> choose_gid(std::span<const GidEntry> entries) {
  const auto rank = [](const GidEntry& entry) {
    const int version = entry.kind == GidKind::roce_v2 ? 0 : 10;
    return version + (is_ipv4_mapped(entry.gid) ? 0 : is_link_local(entry.gid) ? 2 : 1);
  };
  std::optional<GidEntry> best;
  for (const GidEntry& entry : entries) {
    if (entry.gid == Gid{} || (entry.kind != GidKind::roce_v1 && entry.kind != GidKind::roce_v2)) continue;
    if (!best || rank(entry) < rank(*best)) best = entry;
  }
  return best;
}

}  // namespace mk::verbs
