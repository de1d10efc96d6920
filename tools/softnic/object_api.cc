// SPDX-License-Identifier: MIT
// Protection domains, memory, completion queues, queue pairs, address handles.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>

#include "capabilities.h"
#include "export.h"
#include "nic.h"

// verbs.h has them as macros around the functions defined here.
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

using softnic::CompletionChannel;
using softnic::CompletionQueue;
using softnic::nic_of;
using softnic::QueuePair;
using softnic::to_queue;
using softnic::to_queue_pair;

namespace {

constexpr int kAcknowledgeLimitSeconds = 5;

template <class T>
T* fail(int error) {
  errno = error;
  return nullptr;
}

// Waits until the caller has acknowledged every event it was given, as the verbs prescribe; but not for ever.
bool all_acknowledged(pthread_mutex_t& mutex, pthread_cond_t& condition, const uint32_t& acknowledged,
                      const uint32_t& given) {
  timespec deadline{};
  clock_gettime(CLOCK_REALTIME, &deadline);
  deadline.tv_sec += kAcknowledgeLimitSeconds;
  int error = 0;
  pthread_mutex_lock(&mutex);
  while (acknowledged != given && error == 0) error = pthread_cond_timedwait(&condition, &mutex, &deadline);
  const bool all = acknowledged == given;
  pthread_mutex_unlock(&mutex);
  return all;
}

CompletionQueue* create_queue(ibv_context* context, uint32_t entries, void* user, ibv_comp_channel* channel,
                              uint32_t vector) {
  if (entries == 0 || entries > softnic::kMaxCompletions || vector >= 1) return fail<CompletionQueue>(EINVAL);
  auto* const events = static_cast<CompletionChannel*>(channel);
  auto* const cq = new CompletionQueue(context, entries, user, events);
  softnic::set_extended_calls(*cq);
  if (events == nullptr) return cq;
  pthread_mutex_lock(&context->mutex);
  ++events->refcnt;
  pthread_mutex_unlock(&context->mutex);
  return cq;
}

ibv_cq_ex* create_cq_ex(ibv_context* context, ibv_cq_init_attr_ex* attributes) {
  if ((attributes->wc_flags & ~uint64_t{IBV_WC_STANDARD_FLAGS}) != 0 || attributes->comp_mask != 0) {
    return fail<ibv_cq_ex>(EOPNOTSUPP);
  }
  return create_queue(context, attributes->cqe, attributes->cq_context, attributes->channel,
                      attributes->comp_vector);
}

QueuePair* create_queue_pair(ibv_context* context, ibv_qp_init_attr_ex& attributes, bool is_srd) {
  softnic::Nic& nic = nic_of(context);
  ibv_qp_cap& cap = attributes.cap;
  const uint32_t depth = is_srd ? softnic::kMaxEfaQueueDepth : softnic::kMaxQueueDepth;
  const uint32_t segments = is_srd ? 1 : softnic::kMaxSegments;
  const uint32_t inline_bytes = is_srd ? softnic::kMaxEfaInlineBytes : softnic::kMaxRcInlineBytes;
  if (attributes.pd == nullptr || attributes.send_cq == nullptr || attributes.recv_cq == nullptr ||
      attributes.srq != nullptr || cap.max_send_wr > depth || cap.max_recv_wr > depth ||
      cap.max_send_sge > segments || cap.max_recv_sge > segments || cap.max_inline_data > inline_bytes) {
    return fail<QueuePair>(EINVAL);
  }
  if (nic.is_efa() != is_srd || (!is_srd && attributes.qp_type != IBV_QPT_RC))
    return fail<QueuePair>(EOPNOTSUPP);
  return nic.add_queue_pair(attributes.pd, attributes, is_srd);
}

ibv_qp* create_qp_ex(ibv_context* context, ibv_qp_init_attr_ex* attributes) {
  constexpr uint64_t kOperations =
      IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ;
  constexpr uint32_t kKnown = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  const uint32_t mask = attributes->comp_mask;
  const uint64_t operations = (mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) != 0 ? attributes->send_ops_flags : 0;
  if ((mask & IBV_QP_INIT_ATTR_PD) == 0) return fail<ibv_qp>(EINVAL);
  if ((mask & ~kKnown) != 0 || (operations & ~kOperations) != 0) return fail<ibv_qp>(EOPNOTSUPP);
  QueuePair* const qp = create_queue_pair(context, *attributes, false);
  return qp == nullptr ? nullptr : qp->base();
}

}  // namespace

namespace softnic {

void set_object_calls(verbs_context& context) {
  context.create_cq_ex = create_cq_ex;
  context.create_qp_ex = create_qp_ex;
}

QueuePair* create_srd_queue_pair(ibv_context* context, ibv_qp_init_attr_ex& attributes) {
  return create_queue_pair(context, attributes, true);
}

}  // namespace softnic

SOFTNIC_EXPORT ibv_pd* ibv_alloc_pd(ibv_context* context) { return new ibv_pd{context, 1}; }

SOFTNIC_EXPORT int ibv_dealloc_pd(ibv_pd* pd) {
  if (nic_of(pd->context).in_use(pd)) return EBUSY;
  delete pd;
  return 0;
}

SOFTNIC_EXPORT ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* address, size_t bytes, uint64_t iova,
                                        unsigned access) {
  return nic_of(pd->context).add_memory(pd, address, bytes, iova, access);
}

SOFTNIC_EXPORT ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, size_t bytes, int access) {
  return ibv_reg_mr_iova2(pd, address, bytes, reinterpret_cast<uint64_t>(address),
                          static_cast<unsigned>(access));
}

SOFTNIC_EXPORT ibv_mr* ibv_reg_mr_iova(ibv_pd* pd, void* address, size_t bytes, uint64_t iova, int access) {
  return ibv_reg_mr_iova2(pd, address, bytes, iova, static_cast<unsigned>(access));
}

// A descriptor does not tell where its memory is: `iova` has to be the address that the GPU has it at, which is
// what callers choose anyway.
SOFTNIC_EXPORT ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, uint64_t, size_t bytes, uint64_t iova, int fd,
                                         int access) {
  if (!softnic::cuda_is_loaded()) return fail<ibv_mr>(EOPNOTSUPP);
  if (fcntl(fd, F_GETFD) < 0) return fail<ibv_mr>(EBADF);
  if (softnic::cuda_device_of(iova) < 0) return fail<ibv_mr>(EINVAL);
  return ibv_reg_mr_iova2(pd, reinterpret_cast<void*>(iova), bytes, iova, static_cast<unsigned>(access));
}

SOFTNIC_EXPORT int ibv_dereg_mr(ibv_mr* region) {
  auto* const own = static_cast<softnic::MemoryRegion*>(region);
  const auto address = reinterpret_cast<uint64_t>(own->addr);
  const uint64_t bytes = own->length;
  const bool is_on_gpu = own->device >= 0;
  const int error = nic_of(region->context).remove_memory(own);
  if (error == 0 && is_on_gpu) softnic::gpu_memory_deregistered(address, bytes);
  return error;
}

SOFTNIC_EXPORT ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  auto channel = std::make_unique<CompletionChannel>();
  channel->context = context;
  channel->refcnt = 0;
  channel->fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
  return channel->fd < 0 ? nullptr : channel.release();
}

SOFTNIC_EXPORT int ibv_destroy_comp_channel(ibv_comp_channel* handle) {
  pthread_mutex_lock(&handle->context->mutex);
  const bool used = handle->refcnt != 0;
  pthread_mutex_unlock(&handle->context->mutex);
  if (used) return EBUSY;
  const std::unique_ptr<CompletionChannel> channel(static_cast<CompletionChannel*>(handle));
  return close(channel->fd) == 0 ? 0 : errno;
}

SOFTNIC_EXPORT ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* user, ibv_comp_channel* channel,
                                     int vector) {
  if (entries < 0 || vector < 0) return fail<ibv_cq>(EINVAL);
  CompletionQueue* const cq =
      create_queue(context, static_cast<uint32_t>(entries), user, channel, static_cast<uint32_t>(vector));
  return cq == nullptr ? nullptr : softnic::to_verbs(cq);
}

SOFTNIC_EXPORT int ibv_destroy_cq(ibv_cq* handle) {
  CompletionQueue* const cq = to_queue(handle);
  if (nic_of(handle->context).in_use(cq)) return EBUSY;
  nic_of(handle->context).forget_events(handle);
  auto* const channel = static_cast<CompletionChannel*>(handle->channel);
  if (channel != nullptr) channel->forget(cq);
  if (!all_acknowledged(cq->mutex, cq->cond, cq->comp_events_completed, cq->events_given) ||
      !all_acknowledged(cq->mutex, cq->cond, cq->async_events_completed, cq->async_given)) {
    return EBUSY;
  }
  if (channel != nullptr) {
    pthread_mutex_lock(&handle->context->mutex);
    --channel->refcnt;
    pthread_mutex_unlock(&handle->context->mutex);
  }
  delete cq;
  return 0;
}

SOFTNIC_EXPORT int ibv_get_cq_event(ibv_comp_channel* handle, ibv_cq** cq, void** user) {
  uint64_t count = 0;
  if (read(handle->fd, &count, sizeof(count)) != sizeof(count)) return -1;
  auto* const channel = static_cast<CompletionChannel*>(handle);
  const std::lock_guard lock(channel->events_mutex);
  if (channel->events.empty()) {
    errno = EAGAIN;
    return -1;
  }
  CompletionQueue* const queue = channel->events.front();
  channel->events.pop_front();
  pthread_mutex_lock(&queue->mutex);
  ++queue->events_given;
  pthread_mutex_unlock(&queue->mutex);
  *cq = softnic::to_verbs(queue);
  *user = queue->cq_context;
  return 0;
}

SOFTNIC_EXPORT void ibv_ack_cq_events(ibv_cq* cq, unsigned count) {
  pthread_mutex_lock(&cq->mutex);
  cq->comp_events_completed += count;
  pthread_cond_signal(&cq->cond);
  pthread_mutex_unlock(&cq->mutex);
}

SOFTNIC_EXPORT ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* attributes) {
  ibv_qp_init_attr_ex extended{};
  extended.qp_context = attributes->qp_context;
  extended.send_cq = attributes->send_cq;
  extended.recv_cq = attributes->recv_cq;
  extended.srq = attributes->srq;
  extended.cap = attributes->cap;
  extended.qp_type = attributes->qp_type;
  extended.sq_sig_all = attributes->sq_sig_all;
  extended.pd = pd;
  QueuePair* const qp = create_queue_pair(pd->context, extended, false);
  if (qp == nullptr) return nullptr;
  attributes->cap = extended.cap;
  return qp->base();
}

SOFTNIC_EXPORT ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* qp) { return to_queue_pair(qp); }

SOFTNIC_EXPORT int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  return nic_of(qp->context).modify(to_queue_pair(qp), *attributes, mask);
}

SOFTNIC_EXPORT int ibv_query_qp(ibv_qp* handle, ibv_qp_attr* attributes, int, ibv_qp_init_attr* init) {
  QueuePair* const qp = to_queue_pair(handle);
  nic_of(handle->context).query(qp, *attributes);
  *init = {};
  init->qp_context = handle->qp_context;
  init->send_cq = handle->send_cq;
  init->recv_cq = handle->recv_cq;
  init->cap = qp->capacity;
  init->qp_type = handle->qp_type;
  init->sq_sig_all = qp->signal_all ? 1 : 0;
  return 0;
}

SOFTNIC_EXPORT int ibv_query_qp_data_in_order(ibv_qp*, ibv_wr_opcode, uint32_t) { return 0; }

SOFTNIC_EXPORT int ibv_destroy_qp(ibv_qp* handle) {
  QueuePair* const qp = to_queue_pair(handle);
  softnic::Nic& nic = nic_of(handle->context);
  if (const int error = nic.stop(qp); error != 0) return error;
  nic.forget_events(handle);
  if (!all_acknowledged(handle->mutex, handle->cond, handle->events_completed, qp->async_given)) return EBUSY;
  nic.remove_queue_pair(qp);
  return 0;
}

SOFTNIC_EXPORT ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr* attributes) {
  return nic_of(pd->context).add_address_handle(pd, *attributes);
}

SOFTNIC_EXPORT int ibv_destroy_ah(ibv_ah* handle) {
  nic_of(handle->context).remove_address_handle(static_cast<softnic::AddressHandle*>(handle));
  return 0;
}
