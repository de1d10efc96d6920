// SPDX-License-Identifier: MIT
#include "topology.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <utility>

namespace mk {

Topology Topology::make(int rank, std::span<const std::string> host_of_rank,
                        std::span<const int32_t> emulated_node_of_rank) {
  Topology topology;
  topology.rank = rank;
  topology.nranks = static_cast<int>(host_of_rank.size());
  std::map<std::pair<std::string, int32_t>, int> node_of_place;
  for (int r = 0; r < topology.nranks; ++r) {
    const int32_t emulated = emulated_node_of_rank.empty() ? 0 : emulated_node_of_rank[r];
    const auto [place, added] =
        node_of_place.try_emplace({host_of_rank[r], emulated}, static_cast<int>(node_of_place.size()));
    if (added) topology.ranks_of_node.emplace_back();
    auto& ranks = topology.ranks_of_node[place->second];
    topology.node_of_rank.push_back(place->second);
    topology.local_rank_of_rank.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(r);
  }
  topology.num_nodes = static_cast<int>(topology.ranks_of_node.size());
  return topology;
}

std::string host_identity() {
  std::string boot_id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot_id);
  if (boot_id.empty()) {
    char name[256] = {};
    gethostname(name, sizeof name - 1);
    boot_id = name;
  }
  // Descriptors are handed over by abstract sockets, which end at the network namespace.
  struct stat network = {};
  if (stat("/proc/self/ns/net", &network) == 0) boot_id += ":" + std::to_string(network.st_ino);
  return boot_id;
}

}  // namespace mk
