// SPDX-License-Identifier: MIT
// One port of one RDMA device, opened for one rank: context, protection domain, completion queue and its
// channel.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "../../lib/topology.h"
#include "port_choice.h"
#include "verbs_library.h"

namespace mk {
struct NicSurvey;
}

namespace mk::verbs {

// libefa's bit for RDMA writes, which the header of rdma-core 44 does not name yet.
inline constexpr uint32_t kEfaCapsRdmaWrite = 1u << 3;

enum class NicKind { rc, efa };

class Nic {
 public:
  ~Nic();
  Nic(const Nic&) = delete;
  Nic& operator=(const Nic&) = delete;

  // The ports of this machine that `kind` can use: ACTIVE, accepted by MK_IB_HCA. MK_ERROR_UNSUPPORTED when
  // there is none; the sentence lists what was seen and why it does not do.
  // `unusable`, where given, gets a sentence for each port that would do but for its state or its address.
  static Result<std::vector<std::unique_ptr<Nic>>> open_all(const Library& library, NicKind kind,
                                                            std::vector<std::string>* unusable = nullptr);
  // Those that this rank uses, one or more: those called `wanted`, in that order, or its own choice.
  // `pci_bus_id` is its GPU's, or empty.
  static Result<std::vector<std::unique_ptr<Nic>>> open_mine(const Library& library, NicKind kind,
                                                             const Topology& topology,
                                                             const std::string& pci_bus_id,
                                                             std::span<const std::string> wanted = {},
                                                             std::vector<std::string>* unusable = nullptr);

  // Protection domain, channel and a completion queue of `depth` entries.
  Status create_queues(uint32_t depth);
  // Collects completions without blocking; at most `most`.
  int poll(ibv_wc* completions, int most);
  // Asks for an event at the next completion, unless one has been asked for that has not come.
  void arm();
  int channel_fd() const { return channel_->fd; }

  // "mlx5_0 port 1"
  std::string text() const { return device + " port " + std::to_string(port); }
  // "mlx5_0:1", as MK_IB_HCA has it
  std::string name() const { return device + ":" + std::to_string(port); }
  uint64_t most_bytes() const;  // of one RDMA write

  const Library& library;
  const NicKind kind;
  ibv_context* context = nullptr;
  std::string device;
  uint8_t port = 1;
  ibv_device_attr device_attributes{};
  efadv_device_attr efa_attributes{};
  ibv_port_attr port_attributes{};
  GidEntry gid;
  bool global = false;  // packets carry a GRH: always on Ethernet
  ibv_pd* pd = nullptr;
  ibv_cq* cq = nullptr;

 private:
  Nic(const Library& table, NicKind nic_kind) : library(table), kind(nic_kind) {}
  struct Found {
    std::vector<std::unique_ptr<Nic>> nics;
    std::string reasons;  // why others are not among them
    std::vector<std::string> unusable;
  };
  static void open_device(const Library& library, NicKind kind, ibv_device* device, const DeviceFilter& filter,
                          Found* found);
  Status choose_address();
  std::vector<GidEntry> gids() const;

  ibv_comp_channel* channel_ = nullptr;
  bool armed_ = false;
  unsigned unacknowledged_ = 0;
};

// What a backend's row says of its NICs.
NicSurvey survey_nics(NicKind kind, const Topology& topology, const std::string& pci_bus_id);

}  // namespace mk::verbs
