// SPDX-License-Identifier: MIT
// The calls of libefa.
#include <infiniband/efadv.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "capabilities.h"
#include "export.h"
#include "nic.h"

namespace {

// Numbers of enumerators that older headers lack.
constexpr uint32_t kCapsRdmaRead = 1u << 0;
constexpr uint32_t kCapsRnrRetry = 1u << 1;
constexpr uint32_t kCapsRdmaWrite = 1u << 3;

bool is_efa(ibv_context* context) { return softnic::nic_of(context).is_efa(); }

}  // namespace

SOFTNIC_EXPORT int efadv_query_device(ibv_context* context, efadv_device_attr* attributes, uint32_t bytes) {
  if (!is_efa(context)) return EOPNOTSUPP;
  if (bytes < offsetof(efadv_device_attr, device_caps)) return EINVAL;
  efadv_device_attr full{};
  full.max_sq_wr = full.max_rq_wr = softnic::kMaxEfaQueueDepth;
  full.max_sq_sge = full.max_rq_sge = 1;
  full.inline_buf_size = softnic::kMaxEfaInlineBytes;
  full.device_caps = kCapsRdmaRead | kCapsRnrRetry | kCapsRdmaWrite;
  full.max_rdma_size = softnic::kMaxMessageBytes;
  std::memset(static_cast<void*>(attributes), 0, bytes);
  std::memcpy(static_cast<void*>(attributes), &full, std::min<size_t>(bytes, sizeof(full)));
  return 0;
}

SOFTNIC_EXPORT ibv_qp* efadv_create_qp_ex(ibv_context* context, ibv_qp_init_attr_ex* attributes,
                                          efadv_qp_init_attr* efa, uint32_t bytes) {
  constexpr uint64_t kOperations =
      IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ;
  constexpr uint32_t kMask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  if (!is_efa(context) || attributes->qp_type != IBV_QPT_DRIVER) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  if (efa == nullptr || bytes < sizeof(*efa) || efa->comp_mask != 0 ||
      efa->driver_qp_type != EFADV_QP_DRIVER_TYPE_SRD || attributes->comp_mask != kMask ||
      (attributes->send_ops_flags & ~kOperations) != 0) {
    errno = EINVAL;
    return nullptr;
  }
  softnic::QueuePair* const qp = softnic::create_srd_queue_pair(context, *attributes);
  return qp == nullptr ? nullptr : qp->base();
}

SOFTNIC_EXPORT int efadv_query_ah(ibv_ah* handle, efadv_ah_attr* attributes, uint32_t bytes) {
  if (!is_efa(handle->context)) return EOPNOTSUPP;
  if (bytes < sizeof(*attributes)) return EINVAL;
  *attributes = {};
  attributes->ahn = static_cast<softnic::AddressHandle*>(handle)->number;
  return 0;
}
