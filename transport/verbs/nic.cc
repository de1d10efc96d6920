// SPDX-License-Identifier: MIT
#include "nic.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "../../lib/env.h"
#include "../../lib/log.h"
#include "../transport.h"
#include "put_pieces.h"

namespace mk::verbs {
namespace {

// sgid_index has 8 bits.
constexpr int kMostGids = 256;

std::string real_path(const std::string& path) {
  char resolved[PATH_MAX];
  return realpath(path.c_str(), resolved) != nullptr ? resolved : "";
}

std::string infiniband_folder(const std::string& device) { return "/sys/class/infiniband/" + device; }

const char* port_state(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_DOWN:
      return "down";
    case IBV_PORT_INIT:
      return "initializing (no subnet manager?)";
    case IBV_PORT_ARMED:
      return "armed";
    case IBV_PORT_ACTIVE:
      return "active";
    default:
      return "in an unknown state";
  }
}

bool set_nonblocking(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
}

// What sysfs says of a GID; containers may hide it.
GidKind kind_from_sysfs(const std::string& device, int port, int index) {
  std::ifstream file(format("%s/ports/%d/gid_attrs/types/%d", infiniband_folder(device).c_str(), port, index));
  std::string text;
  std::getline(file, text);
  return text.find("v2") != std::string::npos ? GidKind::roce_v2 : GidKind::roce_v1;
}

// How far each port is from a GPU; empty when sysfs does not say.
std::vector<int> distances_to(const std::string& pci_bus_id, const std::vector<std::unique_ptr<Nic>>& nics) {
  std::vector<int> distances;
  const std::string gpu = pci_bus_id.empty() ? "" : real_path("/sys/bus/pci/devices/" + pci_bus_id);
  if (gpu.empty()) return distances;
  for (const auto& nic : nics) {
    const std::string path = real_path(infiniband_folder(nic->device) + "/device");
    if (path.empty()) return {};
    distances.push_back(path_distance(gpu, path));
  }
  return distances;
}

// Whether a device is of the kind, and what it can do.
bool is_kind(const Library& library, NicKind kind, ibv_context* context, efadv_device_attr* efa) {
  const bool is_efa =
      library.efa_query_device != nullptr && library.efa_query_device(context, efa, sizeof *efa) == 0;
  if (kind == NicKind::efa) return is_efa;
  return !is_efa && context->device->transport_type == IBV_TRANSPORT_IB;
}

}  // namespace

Nic::~Nic() {
  if (unacknowledged_ > 0) library.ack_cq_events(cq, unacknowledged_);
  if (cq != nullptr) library.destroy_cq(cq);
  if (channel_ != nullptr) library.destroy_comp_channel(channel_);
  if (pd != nullptr) library.dealloc_pd(pd);
  if (context != nullptr) library.close_device(context);
}

uint64_t Nic::most_bytes() const {
  if (kind == NicKind::efa) return efa_attributes.max_rdma_size;
  return port_attributes.max_msg_sz > 0 ? port_attributes.max_msg_sz : 1u << 30;
}

std::vector<GidEntry> Nic::gids() const {
  std::vector<GidEntry> entries;
  for (int index = 0; index < std::min<int>(port_attributes.gid_tbl_len, kMostGids); ++index) {
    GidEntry entry;
    entry.index = index;
    ibv_gid_entry answer{};
    if (library.query_gid_entry != nullptr &&
        library.query_gid_entry(context, port, static_cast<uint32_t>(index), &answer, 0, sizeof answer) == 0) {
      entry.kind = answer.gid_type == IBV_GID_TYPE_ROCE_V2   ? GidKind::roce_v2
                   : answer.gid_type == IBV_GID_TYPE_ROCE_V1 ? GidKind::roce_v1
                                                             : GidKind::infiniband;
      std::memcpy(entry.gid.data(), answer.gid.raw, sizeof answer.gid.raw);
    } else {
      ibv_gid raw{};
      if (library.query_gid(context, port, index, &raw) != 0) continue;
      entry.kind = kind_from_sysfs(device, port, index);
      std::memcpy(entry.gid.data(), raw.raw, sizeof raw.raw);
    }
    entries.push_back(entry);
  }
  return entries;
}

Status Nic::choose_address() {
  const auto wanted = env::integer("MK_IB_GID_INDEX", -1, kMostGids - 1);
  if (!wanted.ok()) return wanted.status();
  const bool ethernet = port_attributes.link_layer == IBV_LINK_LAYER_ETHERNET;
  global = kind == NicKind::rc && (ethernet || wanted.value() >= 0);
  if (kind == NicKind::rc && ethernet && wanted.value() < 0) {
    const auto entries = gids();
    const auto best = choose_gid(entries);
    if (!best) {
      return Status(MK_ERROR_UNSUPPORTED,
                    format("%s has no GID: give its network interface an address", text().c_str()));
    }
    gid = *best;
    return {};
  }
  const int index = static_cast<int>(std::max<int64_t>(wanted.value(), 0));
  ibv_gid seen{};
  if (library.query_gid(context, port, index, &seen) != 0) {
    return Status(MK_ERROR_UNSUPPORTED, format("%s has no GID number %d", text().c_str(), index));
  }
  gid.index = index;
  gid.kind = kind == NicKind::efa ? GidKind::efa : GidKind::infiniband;
  std::memcpy(gid.gid.data(), seen.raw, sizeof seen.raw);
  if (kind == NicKind::rc && ethernet) {
    gid.kind = GidKind::roce_v1;
    for (const GidEntry& entry : gids()) {
      if (entry.index == index) gid.kind = entry.kind;
    }
  }
  return {};
}

void Nic::open_device(const Library& library, NicKind kind, ibv_device* device, const DeviceFilter& filter,
                      Found* found) {
  const std::string name = library.get_device_name(device);
  const auto skip = [&](const std::string& why) {
    found->reasons += (found->reasons.empty() ? "" : "; ") + why;
  };
  const auto refuse = [&](const std::string& why) {
    skip(why);
    found->unusable.push_back(why);
  };
  ibv_device_attr attributes{};
  for (uint8_t port = 1; port == 1 || port <= attributes.phys_port_cnt; ++port) {
    std::unique_ptr<Nic> nic(new Nic(library, kind));
    nic->device = name;
    nic->port = port;
    nic->context = library.open_device(device);
    if (nic->context == nullptr)
      return skip(format("%s cannot be opened: %s", name.c_str(), std::strerror(errno)));
    if (library.query_device(nic->context, &attributes) != 0) return skip(name + " does not answer");
    nic->device_attributes = attributes;
    if (!is_kind(library, kind, nic->context, &nic->efa_attributes)) {
      return skip(name + (kind == NicKind::efa ? " is not an EFA device" : " has no reliable connections"));
    }
    if (kind == NicKind::efa && (nic->efa_attributes.device_caps & kEfaCapsRdmaWrite) == 0) {
      return skip(name + " cannot write to remote memory (EFA of p4d and before)");
    }
    if (!filter.accepts(name, port)) {
      skip(nic->text() + " is excluded by MK_IB_HCA");
      continue;
    }
    if (library.query_port(nic->context, port, &nic->port_attributes) != 0) {
      skip(nic->text() + " does not answer");
      continue;
    }
    if (nic->port_attributes.state != IBV_PORT_ACTIVE) {
      refuse(nic->text() + " is " + port_state(nic->port_attributes.state));
      continue;
    }
    if (const Status status = nic->choose_address(); !status.ok()) {
      refuse(status.sentence());
      continue;
    }
    set_nonblocking(nic->context->async_fd);
    found->nics.push_back(std::move(nic));
  }
}

Result<std::vector<std::unique_ptr<Nic>>> Nic::open_all(const Library& library, NicKind kind,
                                                        std::vector<std::string>* unusable) {
  auto filter = DeviceFilter::parse(env::text("MK_IB_HCA"));
  if (!filter.ok()) return filter.status();
  int count = 0;
  ibv_device** devices = library.get_device_list(&count);
  if (devices == nullptr || count == 0) {
    if (devices != nullptr) library.free_device_list(devices);
    return Status(MK_ERROR_UNSUPPORTED, format("%s finds no RDMA device", library.name.c_str()));
  }
  Found found;
  for (int i = 0; i < count; ++i) open_device(library, kind, devices[i], filter.value(), &found);
  library.free_device_list(devices);
  if (unusable != nullptr) *unusable = std::move(found.unusable);
  if (found.nics.empty()) return Status(MK_ERROR_UNSUPPORTED, "no usable RDMA port: " + found.reasons);
  return std::move(found.nics);
}

Result<std::vector<std::unique_ptr<Nic>>> Nic::open_mine(const Library& library, NicKind kind,
                                                         const Topology& topology,
                                                         const std::string& pci_bus_id,
                                                         std::span<const std::string> wanted,
                                                         std::vector<std::string>* unusable) {
  auto all = open_all(library, kind, unusable);
  if (!all.ok()) return all.status();
  std::vector<size_t> chosen;
  if (wanted.empty()) {
    chosen = choose_ports(all->size(), distances_to(pci_bus_id, all.value()), topology.local_rank(),
                          topology.local_nranks(), kMaxLinks);
  }
  for (const std::string& name : wanted) {
    const auto found =
        std::find_if(all->begin(), all->end(), [&](const auto& nic) { return nic->name() == name; });
    if (found == all->end()) return Status(MK_ERROR_UNSUPPORTED, name + " is not usable, or not there");
    chosen.push_back(static_cast<size_t>(found - all->begin()));
  }
  std::vector<std::unique_ptr<Nic>> mine;
  for (const size_t index : chosen) {
    mine.push_back(std::move(all.value()[index]));
    log(MK_LOG_INFO, "rank %d uses %s, %s, GID %d (%s)", topology.rank, mine.back()->text().c_str(),
        name_of(mine.back()->gid.kind), mine.back()->gid.index, text_of(mine.back()->gid.gid).c_str());
  }
  return mine;
}

NicSurvey survey_nics(NicKind kind, const Topology& topology, const std::string& pci_bus_id) {
  NicSurvey survey;
  const auto library = load_library();
  if (!library.ok()) return survey;
  auto mine = Nic::open_mine(*library.value(), kind, topology, pci_bus_id, {}, &survey.unusable);
  if (!mine.ok()) return survey;
  for (const auto& nic : mine.value()) {
    const int mtu = nic->port_attributes.active_mtu;
    const bool known = kind == NicKind::rc && mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096;
    survey.used.push_back(
        {nic->name(), text_of(nic->gid.gid), name_of(nic->gid.kind), known ? 128u << mtu : 0});
  }
  survey.opened = std::make_shared<std::vector<std::unique_ptr<Nic>>>(mine.take());
  return survey;
}

Status Nic::create_queues(uint32_t depth) {
  const auto failed = [&](const char* what) {
    return Status(MK_ERROR_SYSTEM,
                  format("%s: cannot make %s: %s; is the limit of locked memory (ulimit -l) low?",
                         text().c_str(), what, std::strerror(errno)));
  };
  if (depth > static_cast<uint32_t>(device_attributes.max_cqe)) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("%s has completion queues of at most %d entries, this job needs %u", text().c_str(),
                         device_attributes.max_cqe, depth));
  }
  pd = library.alloc_pd(context);
  if (pd == nullptr) return failed("a protection domain");
  channel_ = library.create_comp_channel(context);
  if (channel_ == nullptr || !set_nonblocking(channel_->fd)) return failed("a completion channel");
  cq = library.create_cq(context, static_cast<int>(depth), nullptr, channel_, 0);
  if (cq == nullptr) return failed("a completion queue");
  return {};
}

int Nic::poll(ibv_wc* completions, int most) { return ibv_poll_cq(cq, most, completions); }

void Nic::arm() {
  ibv_cq* which = nullptr;
  void* user = nullptr;
  while (library.get_cq_event(channel_, &which, &user) == 0) {
    armed_ = false;
    // Acknowledging takes a lock: now and then for many.
    if (++unacknowledged_ == 1024) library.ack_cq_events(cq, std::exchange(unacknowledged_, 0u));
  }
  if (!armed_) armed_ = ibv_req_notify_cq(cq, 0) == 0;
}

}  // namespace mk::verbs
