// SPDX-License-Identifier: MIT
#include "network_ports.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

namespace perf {
namespace {

namespace fs = std::filesystem;

constexpr int kMostGids = 256;

// The first line of a file; "" when it cannot be read, which in containers is common.
std::string line_of(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "4: ACTIVE"
std::string behind_colon(const std::string& text) {
  const size_t at = text.find(": ");
  return at == std::string::npos ? text : text.substr(at + 2);
}

std::vector<fs::path> entries(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(folder, error)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  return paths;
}

// 0: useless; otherwise larger is better.
int worth(const std::string& gid, const std::string& type) {
  if (gid.empty() || gid == "0000:0000:0000:0000:0000:0000:0000:0000") return 0;
  const bool is_ipv4 = gid.starts_with("0000:0000:0000:0000:0000:ffff:");
  const bool is_link_local = gid.starts_with("fe80:");
  return (type == "RoCE v2" ? 4 : 1) + (is_ipv4 ? 2 : is_link_local ? 0 : 1);
}

void choose_gid(const fs::path& port, NetworkPort& found) {
  int best = 0;
  for (int index = 0; index < kMostGids; ++index) {
    const fs::path path = port / "gids" / std::to_string(index);
    std::error_code error;
    if (!fs::exists(path, error)) return;
    const std::string gid = line_of(path);
    const std::string type = line_of(port / "gid_attrs" / "types" / std::to_string(index));
    if (worth(gid, type) <= best) continue;
    best = worth(gid, type);
    found.gid_index = index;
    found.gid = gid;
    found.gid_type = type;
  }
}

}  // namespace

std::string NetworkPort::text() const {
  std::string text = name + " " + state + ", " + rate + ", " + layer;
  if (gid_index >= 0) {
    text += ", GID " + std::to_string(gid_index) + " " + gid + (gid_type.empty() ? "" : " (" + gid_type + ")");
  }
  return text;
}

std::string NetworkPort::problem() const {
  if (state == "INIT" && layer == "InfiniBand")
    return name +
           " is INIT: the link is up but no subnet manager has seen it; start one (opensm), or ask who runs "
           "the fabric";
  if (state != "ACTIVE") {
    return name + " is " + (state.empty() ? "in an unknown state" : state) +
           ": it will not be used; check the cable and the switch's port, and bring its interface up (ip link, "
           "rdma link)";
  }
  if (gid_index < 0) return name + " has no GID: nobody can reach it; give its interface an address";
  if (layer == "Ethernet" && gid.starts_with("fe80:")) {
    return name +
           " has no GID but a link-local one: give its interface an IP address, or no peer in another subnet "
           "can reach it";
  }
  return "";
}

std::vector<NetworkPort> list_network_ports(const std::string& folder) {
  std::vector<NetworkPort> ports;
  for (const fs::path& device : entries(folder)) {
    for (const fs::path& port : entries(device / "ports")) {
      NetworkPort found;
      found.name = device.filename().string() + " port " + port.filename().string();
      found.state = behind_colon(line_of(port / "state"));
      found.rate = line_of(port / "rate");
      found.layer = line_of(port / "link_layer");
      choose_gid(port, found);
      ports.push_back(std::move(found));
    }
  }
  return ports;
}

}  // namespace perf
