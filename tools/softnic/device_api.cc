// SPDX-License-Identifier: MIT
// Devices, contexts, ports, asynchronous events.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "capabilities.h"
#include "export.h"
#include "nic.h"
#include "queue_pair.h"
#include "softnic.h"

// verbs.h has them as macros around the functions defined here.
#undef ibv_query_port

using softnic::Configuration;
using softnic::Context;
using softnic::Device;
using softnic::LinkKind;
using softnic::nic_of;

namespace {

// The caller holds devices through a list; contexts hold theirs on their own.
struct DeviceList {
  std::vector<std::shared_ptr<Device>> devices;
  std::vector<ibv_device*> pointers;
};

std::mutex lists_mutex;
std::map<ibv_device**, std::unique_ptr<DeviceList>>& lists() {
  static auto* const instance = new std::map<ibv_device**, std::unique_ptr<DeviceList>>;
  return *instance;
}

std::shared_ptr<Device> make_device(const std::shared_ptr<const Configuration>& configuration, int nic) {
  auto device = std::make_shared<Device>();
  device->configuration = configuration;
  device->nic = nic;
  const bool efa = configuration->kind == LinkKind::efa;
  device->node_type = efa ? IBV_NODE_UNSPECIFIED : IBV_NODE_CA;
  device->transport_type = efa ? IBV_TRANSPORT_UNSPECIFIED : IBV_TRANSPORT_IB;
  std::snprintf(device->name, sizeof(device->name), "softnic%d", nic);
  std::snprintf(device->dev_name, sizeof(device->dev_name), "softnic-uverbs%d", nic);
  return device;
}

std::shared_ptr<Device> find_device(ibv_device* wanted) {
  const std::lock_guard lock(lists_mutex);
  for (const auto& entry : lists()) {
    for (const std::shared_ptr<Device>& device : entry.second->devices) {
      if (device.get() == wanted) return device;
    }
  }
  return nullptr;
}

void fill_device(const softnic::Nic& nic, ibv_device_attr& attributes) {
  attributes = {};
  const bool efa = nic.is_efa();
  std::snprintf(attributes.fw_ver, sizeof(attributes.fw_ver), "softnic");
  attributes.node_guid = attributes.sys_image_guid = softnic::guid_of(nic.claimed_address(1));
  attributes.max_mr_size = UINT64_MAX;
  attributes.page_size_cap = ~uint64_t{4095};
  attributes.max_qp = static_cast<int>(softnic::kMaxQueuePairs);
  attributes.max_qp_wr = static_cast<int>(efa ? softnic::kMaxEfaQueueDepth : softnic::kMaxQueueDepth);
  attributes.max_sge = attributes.max_sge_rd = efa ? 1 : static_cast<int>(softnic::kMaxSegments);
  attributes.max_cq = attributes.max_mr = attributes.max_pd = attributes.max_ah = 1 << 20;
  attributes.max_cqe = static_cast<int>(softnic::kMaxCompletions);
  attributes.max_qp_rd_atom = attributes.max_qp_init_rd_atom = efa ? 0 : 16;
  attributes.atomic_cap = IBV_ATOMIC_NONE;
  attributes.max_pkeys = 1;
  attributes.phys_port_cnt = static_cast<uint8_t>(nic.configuration().num_ports);
}

int query_device_ex(ibv_context* context, const ibv_query_device_ex_input*, ibv_device_attr_ex* attributes,
                    size_t bytes) {
  if (bytes < sizeof(attributes->orig_attr)) return EINVAL;
  std::memset(attributes, 0, bytes);
  fill_device(nic_of(context), attributes->orig_attr);
  if (bytes >= sizeof(*attributes)) attributes->phys_port_cnt_ex = attributes->orig_attr.phys_port_cnt;
  return 0;
}

// The encoding of active_speed with four lanes (width 2): the nearest rate from above.
uint8_t active_speed(double gigabits_per_second) {
  if (gigabits_per_second <= 0 || gigabits_per_second > 200) return 128;  // NDR
  if (gigabits_per_second > 100) return 64;                               // HDR
  return 32;                                                              // EDR
}

int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attributes, size_t bytes) {
  const softnic::Nic& nic = nic_of(context);
  const Configuration& configuration = nic.configuration();
  if (port < 1 || port > configuration.num_ports) return EINVAL;
  ibv_port_attr full{};
  const bool up = nic.port_is_up(port);
  const bool infiniband = configuration.kind == LinkKind::infiniband;
  full.state = up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
  full.max_mtu = full.active_mtu = IBV_MTU_4096;
  full.gid_tbl_len = softnic::gid_table_length(configuration.kind);
  full.port_cap_flags = infiniband ? 0 : static_cast<uint32_t>(IBV_PORT_IP_BASED_GIDS);
  full.max_msg_sz = softnic::kMaxMessageBytes;
  full.pkey_tbl_len = 1;
  full.lid = infiniband ? softnic::lid_of(nic.claimed_address(port)) : 0;
  full.sm_lid = infiniband ? 1 : 0;
  full.active_width = 2;
  full.active_speed = active_speed(configuration.nics[static_cast<size_t>(nic.index())].gigabits_per_second);
  full.phys_state = up ? 5 : 3;  // LinkUp, Disabled
  full.link_layer = infiniband                             ? IBV_LINK_LAYER_INFINIBAND
                    : configuration.kind == LinkKind::roce ? IBV_LINK_LAYER_ETHERNET
                                                           : IBV_LINK_LAYER_UNSPECIFIED;
  std::memset(static_cast<void*>(attributes), 0, bytes);
  std::memcpy(static_cast<void*>(attributes), &full, std::min(bytes, sizeof(full)));
  return 0;
}

}  // namespace

SOFTNIC_EXPORT ibv_device** ibv_get_device_list(int* num_devices) {
  std::string error;
  std::optional<Configuration> configuration = Configuration::from_environment(error);
  if (num_devices != nullptr) *num_devices = 0;
  if (!configuration) {
    // The interface has no place for a sentence.
    std::fprintf(stderr, "softnic: %s\n", error.c_str());
    errno = EINVAL;
    return nullptr;
  }
  auto list = std::make_unique<DeviceList>();
  const auto shared = std::make_shared<const Configuration>(std::move(*configuration));
  for (size_t nic = 0; nic < shared->nics.size(); ++nic) {
    list->devices.push_back(make_device(shared, static_cast<int>(nic)));
    list->pointers.push_back(list->devices.back().get());
  }
  list->pointers.push_back(nullptr);
  if (num_devices != nullptr) *num_devices = static_cast<int>(list->devices.size());
  const std::lock_guard lock(lists_mutex);
  ibv_device** const result = list->pointers.data();
  lists()[result] = std::move(list);
  return result;
}

SOFTNIC_EXPORT void ibv_free_device_list(ibv_device** list) {
  const std::lock_guard lock(lists_mutex);
  lists().erase(list);
}

SOFTNIC_EXPORT const char* ibv_get_device_name(ibv_device* device) { return device->name; }

SOFTNIC_EXPORT int ibv_get_device_index(ibv_device* device) { return static_cast<Device*>(device)->nic; }

SOFTNIC_EXPORT __be64 ibv_get_device_guid(ibv_device* device) {
  // Before it is opened a device has no place on the fabric: its number stands in for that.
  return softnic::guid_of({static_cast<uint16_t>(static_cast<Device*>(device)->nic + 1), 0});
}

SOFTNIC_EXPORT ibv_context* ibv_open_device(ibv_device* handle) {
  std::shared_ptr<Device> device = find_device(handle);
  if (device == nullptr) {
    errno = ENODEV;
    return nullptr;
  }
  auto context = std::make_unique<Context>();
  static_cast<verbs_context&>(*context) = {};
  context->sz = sizeof(verbs_context);
  context->query_port = query_port;
  context->query_device_ex = query_device_ex;
  softnic::set_object_calls(*context);
  ibv_context& base = context->context;
  base.device = handle;
  base.ops.poll_cq = [](ibv_cq* cq, int count, ibv_wc* completions) {
    return softnic::to_queue(cq)->poll(count, completions);
  };
  base.ops.req_notify_cq = [](ibv_cq* cq, int solicited_only) {
    softnic::to_queue(cq)->arm(solicited_only != 0);
    return 0;
  };
  base.ops.post_send = softnic::post_send;
  base.ops.post_recv = softnic::post_recv;
  base.cmd_fd = -1;
  base.async_fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
  base.num_comp_vectors = 1;
  base.abi_compat = __VERBS_ABI_IS_EXTENDED;
  pthread_mutex_init(&base.mutex, nullptr);
  context->nic = std::make_unique<softnic::Nic>(*context, device->configuration, device->nic);
  context->owner = std::move(device);
  if (base.async_fd < 0 || !context->nic->usable()) {
    if (base.async_fd >= 0) close(base.async_fd);
    errno = ENODEV;
    return nullptr;
  }
  return &context.release()->context;
}

SOFTNIC_EXPORT int ibv_close_device(ibv_context* handle) {
  const std::unique_ptr<Context> context(softnic::to_context(handle));
  context->nic.reset();
  pthread_mutex_destroy(&handle->mutex);
  return close(handle->async_fd) == 0 ? 0 : errno;
}

SOFTNIC_EXPORT int ibv_query_device(ibv_context* context, ibv_device_attr* attributes) {
  fill_device(nic_of(context), *attributes);
  return 0;
}

SOFTNIC_EXPORT int ibv_query_port(ibv_context* context, uint8_t port, _compat_ibv_port_attr* attributes) {
  // Callers of this symbol know the structure only up to link_layer.
  return query_port(context, port, reinterpret_cast<ibv_port_attr*>(attributes),
                    offsetof(ibv_port_attr, port_cap_flags2));
}

SOFTNIC_EXPORT int ibv_query_gid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) {
  const softnic::Nic& nic = nic_of(context);
  const Configuration& configuration = nic.configuration();
  if (port < 1 || port > configuration.num_ports || index < 0 ||
      index >= softnic::gid_table_length(configuration.kind)) {
    errno = EINVAL;
    return -1;
  }
  *gid = softnic::gid_of(configuration.kind, nic.claimed_address(port), index);
  return 0;
}

SOFTNIC_EXPORT int _ibv_query_gid_ex(ibv_context* context, uint32_t port, uint32_t index, ibv_gid_entry* entry,
                                     uint32_t flags, size_t entry_bytes) {
  ibv_gid_entry full{};
  if (flags != 0 || port > UINT8_MAX || index > INT32_MAX) return EINVAL;
  if (ibv_query_gid(context, static_cast<uint8_t>(port), static_cast<int>(index), &full.gid) != 0)
    return EINVAL;
  full.gid_index = index;
  full.port_num = port;
  full.gid_type = softnic::gid_type(nic_of(context).configuration().kind, static_cast<int>(index));
  std::memset(static_cast<void*>(entry), 0, entry_bytes);
  std::memcpy(static_cast<void*>(entry), &full, std::min(entry_bytes, sizeof(full)));
  return 0;
}

SOFTNIC_EXPORT ssize_t _ibv_query_gid_table(ibv_context* context, ibv_gid_entry* entries, size_t max_entries,
                                            uint32_t flags, size_t entry_bytes) {
  const Configuration& configuration = nic_of(context).configuration();
  std::byte* place = reinterpret_cast<std::byte*>(entries);
  size_t count = 0;
  for (int port = 1; port <= configuration.num_ports; ++port) {
    for (int index = 0; index < softnic::gid_table_length(configuration.kind); ++index) {
      if (count == max_entries) return -EINVAL;
      const int error = _ibv_query_gid_ex(context, static_cast<uint32_t>(port), static_cast<uint32_t>(index),
                                          reinterpret_cast<ibv_gid_entry*>(place), flags, entry_bytes);
      if (error != 0) return -error;
      place += entry_bytes;
      ++count;
    }
  }
  return static_cast<ssize_t>(count);
}

SOFTNIC_EXPORT int ibv_query_pkey(ibv_context* context, uint8_t port, int index, __be16* pkey) {
  if (port < 1 || port > nic_of(context).configuration().num_ports || index != 0) {
    errno = EINVAL;
    return -1;
  }
  *pkey = 0xffff;
  return 0;
}

SOFTNIC_EXPORT int ibv_get_pkey_index(ibv_context*, uint8_t, __be16 pkey) { return pkey == 0xffff ? 0 : -1; }

SOFTNIC_EXPORT int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  uint64_t count = 0;
  if (read(context->async_fd, &count, sizeof(count)) != sizeof(count) || !nic_of(context).take_event(*event)) {
    return -1;
  }
  switch (event->event_type) {
    case IBV_EVENT_CQ_ERR: {
      softnic::CompletionQueue* const cq = softnic::to_queue(event->element.cq);
      pthread_mutex_lock(&cq->mutex);
      ++cq->async_given;
      pthread_mutex_unlock(&cq->mutex);
      break;
    }
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR: {
      ibv_qp* const qp = event->element.qp;
      pthread_mutex_lock(&qp->mutex);
      ++softnic::to_queue_pair(qp)->async_given;
      pthread_mutex_unlock(&qp->mutex);
      break;
    }
    default:
      break;
  }
  return 0;
}

SOFTNIC_EXPORT void ibv_ack_async_event(ibv_async_event* event) {
  switch (event->event_type) {
    case IBV_EVENT_CQ_ERR: {
      ibv_cq* const cq = event->element.cq;
      pthread_mutex_lock(&cq->mutex);
      ++cq->async_events_completed;
      pthread_cond_signal(&cq->cond);
      pthread_mutex_unlock(&cq->mutex);
      return;
    }
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR: {
      ibv_qp* const qp = event->element.qp;
      pthread_mutex_lock(&qp->mutex);
      ++qp->events_completed;
      pthread_cond_signal(&qp->cond);
      pthread_mutex_unlock(&qp->mutex);
      return;
    }
    default:
      return;
  }
}

SOFTNIC_EXPORT int softnic_inject(ibv_context* context, const char* fault, ibv_qp* qp, uint8_t port) {
  return nic_of(context).inject(fault, qp == nullptr ? nullptr : softnic::to_queue_pair(qp), port) ? 0 : EINVAL;
}
