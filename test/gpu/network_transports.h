// SPDX-License-Identifier: MIT
// Nodes that are emulated on one machine: the transports between them, by emulated NICs and by libfabric, and
// which ranks are on which node.
#pragma once

#include <dlfcn.h>

#include <string>
#include <utility>
#include <vector>

#include "operators_run.h"

namespace operators {

struct Transport {
  const char* name;
  std::vector<std::pair<const char*, const char*>> environment;
};

inline const std::vector<const char*> VARIABLES = {"MK_SOFTNIC_KIND", "MK_SOFTNIC_SEED", "MK_SOFTNIC_NICS",
                                                   "MK_IB_SIGNAL"};

// Emulated NICs, or libfabric.
inline bool is_there(const Transport& transport) {
  if (std::strcmp(transport.name, "ofi") == 0) return dlopen("libfabric.so.1", RTLD_NOW) != nullptr;
  const char* const library = std::getenv("MK_VERBS_LIBRARY");
  return library != nullptr && access(library, R_OK) == 0;
}

// Those that are here, or of them the one that MK_TEST_TRANSPORT says.
inline std::vector<Transport> transports(Tally& tally) {
  const std::vector<Transport> all = {
      {"rc", {{"MK_SOFTNIC_KIND", "ib"}}},
      {"rc", {{"MK_SOFTNIC_KIND", "roce"}, {"MK_SOFTNIC_SEED", "5"}, {"MK_SOFTNIC_NICS", "2"}}},
      {"rc", {{"MK_SOFTNIC_KIND", "ib"}, {"MK_IB_SIGNAL", "completion"}}},
      {"srd", {{"MK_SOFTNIC_KIND", "efa"}}},
      {"srd", {{"MK_SOFTNIC_KIND", "efa"}, {"MK_SOFTNIC_SEED", "7"}, {"MK_SOFTNIC_NICS", "2"}}},
      {"ofi", {}}};
  const char* const wanted = std::getenv("MK_TEST_TRANSPORT");
  std::vector<Transport> chosen;
  for (const Transport& transport : all) {
    if (wanted != nullptr && std::strcmp(wanted, transport.name) != 0) continue;
    if (is_there(transport)) {
      chosen.push_back(transport);
    } else {
      tally.say(text("%s: left out: no %s", transport.name,
                     std::strcmp(transport.name, "ofi") == 0 ? "libfabric" : "MK_VERBS_LIBRARY"));
    }
  }
  return chosen;
}

inline std::string describe(const Transport& transport) {
  std::string words = transport.name;
  for (const auto& [name, value] : transport.environment) words += text(" %s=%s", name, value);
  return words;
}

inline void set_transport(const Transport& transport) {
  for (const char* const name : VARIABLES) unsetenv(name);
  for (const auto& [name, value] : transport.environment) setenv(name, value, 1);
}

// Node of each rank.
inline std::vector<std::vector<int32_t>> splits(int nranks) {
  switch (nranks) {
    case 2:
      return {{0, 1}};
    case 3:
      return {{0, 0, 1}, {0, 1, 2}};
    case 4:
      return {{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 2, 3}, {0, 0, 0, 1}};
    default: {
      std::vector<std::vector<int32_t>> found(2);
      for (int rank = 0; rank < nranks; ++rank) {
        found[0].push_back(rank * 2 / nranks);
        found[1].push_back(rank / 2);
      }
      return found;
    }
  }
}

inline std::string describe(const std::vector<int32_t>& nodes) {
  std::string words;
  for (const int32_t node : nodes) words += text("%s%d", words.empty() ? "" : ",", node);
  return words;
}

// run_ranks() over a transport, with ranks on nodes as `nodes` says; body(rank, where): in words, for reports.
inline void run_between_nodes(int nranks, Tally& tally, const Transport& transport,
                              const std::vector<int32_t>& nodes,
                              const std::function<void(Rank&, const std::string&)>& body) {
  set_transport(transport);
  const std::string where = describe(transport) + ", nodes " + describe(nodes);
  tally.say(where);
  int num_devices = 0;
  require_cuda(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount");
  run_ranks(
      nranks, [&](Rank& rank) { body(rank, where); },
      [&](mk_comm_config_t& config) {
        config.node_of_rank = nodes.data();
        config.transport = transport.name;
        // Copies within one GPU may be kernels of the driver: some SMs are left to them.
        if (num_devices < nranks) config.max_ctas -= 8;
      });
}

}  // namespace operators
