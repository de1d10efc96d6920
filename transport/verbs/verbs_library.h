// SPDX-License-Identifier: MIT
// libibverbs and libefa, loaded at run time: the library itself needs neither. The inline functions of
// <infiniband/verbs.h> that go through a context's own table (ibv_post_send, ibv_poll_cq, ibv_wr_*) are used as
// they are; everything else is called through this table.
#pragma once

#include <infiniband/efadv.h>
#include <infiniband/verbs.h>

#include <string>

#include "../../lib/status.h"

// X(member, symbol): without these nothing works ...
#define MK_VERBS_REQUIRED(X)                        \
  X(get_device_list, ibv_get_device_list)           \
  X(free_device_list, ibv_free_device_list)         \
  X(get_device_name, ibv_get_device_name)           \
  X(open_device, ibv_open_device)                   \
  X(close_device, ibv_close_device)                 \
  X(get_async_event, ibv_get_async_event)           \
  X(ack_async_event, ibv_ack_async_event)           \
  X(query_device, ibv_query_device)                 \
  X(query_port_of_old, ibv_query_port)              \
  X(query_gid, ibv_query_gid)                       \
  X(alloc_pd, ibv_alloc_pd)                         \
  X(dealloc_pd, ibv_dealloc_pd)                     \
  X(register_mr, ibv_reg_mr)                        \
  X(deregister_mr, ibv_dereg_mr)                    \
  X(create_comp_channel, ibv_create_comp_channel)   \
  X(destroy_comp_channel, ibv_destroy_comp_channel) \
  X(create_cq, ibv_create_cq)                       \
  X(destroy_cq, ibv_destroy_cq)                     \
  X(get_cq_event, ibv_get_cq_event)                 \
  X(ack_cq_events, ibv_ack_cq_events)               \
  X(create_qp, ibv_create_qp)                       \
  X(modify_qp, ibv_modify_qp)                       \
  X(destroy_qp, ibv_destroy_qp)                     \
  X(create_ah, ibv_create_ah)                       \
  X(destroy_ah, ibv_destroy_ah)                     \
  X(wc_status_str, ibv_wc_status_str)               \
  X(event_type_str, ibv_event_type_str)
// ... these may be missing (nullptr): older libraries, or no libefa.
#define MK_VERBS_OPTIONAL(X)            \
  X(query_gid_entry, _ibv_query_gid_ex) \
  X(register_dmabuf_mr, ibv_reg_dmabuf_mr)
#define MK_EFA_OPTIONAL(X)                \
  X(efa_create_qp, efadv_create_qp_ex)    \
  X(efa_query_device, efadv_query_device) \
  X(efa_query_ah, efadv_query_ah)

namespace mk::verbs {

struct Library {
#define MK_VERBS_MEMBER(member, symbol) decltype(&::symbol) member = nullptr;
  MK_VERBS_REQUIRED(MK_VERBS_MEMBER)
  MK_VERBS_OPTIONAL(MK_VERBS_MEMBER)
  MK_EFA_OPTIONAL(MK_VERBS_MEMBER)
#undef MK_VERBS_MEMBER

  std::string name;         // what was loaded
  std::string efa_missing;  // why the EFA functions are not there; empty when they are

  int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attributes) const;
};

// The table for MK_VERBS_LIBRARY as it is now (default: libibverbs.so.1, with libefa.so.1 beside it). Loaded
// once a name and never unloaded: providers leave threads and handlers behind. MK_ERROR_UNSUPPORTED says what
// is missing.
Result<const Library*> load_library();

}  // namespace mk::verbs
