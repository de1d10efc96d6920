// SPDX-License-Identifier: MIT
// How work requests get into a queue pair: ibv_post_send, ibv_post_recv and ibv_wr_*.
#include <cerrno>
#include <cstring>

#include "capabilities.h"
#include "nic.h"
#include "queue_pair.h"

namespace softnic {
namespace {

QueuePair& extended(ibv_qp_ex* qp) { return *static_cast<QueuePair*>(qp); }

int take_segments(const QueuePair& qp, WorkRequest& request, const ibv_sge* segments, size_t count) {
  if (count > qp.capacity.max_send_sge || count > kMaxSegments) return EINVAL;
  uint64_t bytes = 0;
  for (size_t index = 0; index < count; ++index) {
    request.payload.segments[index] = {segments[index].addr, segments[index].length, segments[index].lkey};
    bytes += segments[index].length;
  }
  request.num_segments = static_cast<uint32_t>(count);
  request.bytes = static_cast<uint32_t>(bytes);
  return bytes > kMaxMessageBytes ? EINVAL : 0;
}

int take_inline(const QueuePair& qp, WorkRequest& request, const ibv_data_buf* buffers, size_t count) {
  size_t bytes = 0;
  for (size_t index = 0; index < count; ++index) {
    if (buffers[index].length > qp.capacity.max_inline_data - bytes) return EINVAL;
    if (buffers[index].length > 0) {
      std::memcpy(request.payload.inline_data + bytes, buffers[index].addr, buffers[index].length);
    }
    bytes += buffers[index].length;
  }
  request.is_inline = true;
  request.num_segments = 0;
  request.bytes = static_cast<uint32_t>(bytes);
  return 0;
}

bool carries_immediate(ibv_wr_opcode opcode) { return opcode == IBV_WR_RDMA_WRITE_WITH_IMM; }

int translate(const QueuePair& qp, const ibv_send_wr& from, WorkRequest& to) {
  // On EFA, RDMA goes through ibv_wr_* only; there is nothing else that this NIC sends.
  if (qp.is_srd) return EINVAL;
  if (from.opcode != IBV_WR_RDMA_WRITE && from.opcode != IBV_WR_RDMA_WRITE_WITH_IMM &&
      from.opcode != IBV_WR_RDMA_READ) {
    return EINVAL;
  }
  if (from.num_sge < 0 || (from.opcode == IBV_WR_RDMA_READ && (from.send_flags & IBV_SEND_INLINE) != 0)) {
    return EINVAL;
  }
  to.wr_id = from.wr_id;
  to.opcode = from.opcode;
  to.signaled = (from.send_flags & IBV_SEND_SIGNALED) != 0;
  to.solicited = (from.send_flags & IBV_SEND_SOLICITED) != 0;
  to.immediate = carries_immediate(from.opcode) ? from.imm_data : 0;
  to.remote_address = from.wr.rdma.remote_addr;
  to.rkey = from.wr.rdma.rkey;
  const size_t count = static_cast<size_t>(from.num_sge);
  if ((from.send_flags & IBV_SEND_INLINE) == 0) return take_segments(qp, to, from.sg_list, count);
  std::vector<ibv_data_buf> buffers;
  for (size_t index = 0; index < count; ++index) {
    buffers.push_back({reinterpret_cast<void*>(from.sg_list[index].addr), from.sg_list[index].length});
  }
  return take_inline(qp, to, buffers.data(), count);
}

// ibv_wr_*: the error of a batch is that of its first wrong call.
void note_error(QueuePair& qp, int error) {
  if (qp.batch_error == 0) qp.batch_error = error;
}

void begin(ibv_qp_ex* handle, ibv_wr_opcode opcode, uint32_t rkey, uint64_t remote_address,
           uint32_t immediate) {
  QueuePair& qp = extended(handle);
  WorkRequest request;
  request.wr_id = handle->wr_id;
  request.opcode = opcode;
  request.signaled = (handle->wr_flags & IBV_SEND_SIGNALED) != 0;
  request.solicited = (handle->wr_flags & IBV_SEND_SOLICITED) != 0;
  request.rkey = rkey;
  request.remote_address = remote_address;
  request.immediate = immediate;
  qp.batch.push_back(std::move(request));
}

void rdma_read(ibv_qp_ex* qp, uint32_t rkey, uint64_t address) {
  begin(qp, IBV_WR_RDMA_READ, rkey, address, 0);
}

void rdma_write(ibv_qp_ex* qp, uint32_t rkey, uint64_t address) {
  begin(qp, IBV_WR_RDMA_WRITE, rkey, address, 0);
}

void rdma_write_imm(ibv_qp_ex* qp, uint32_t rkey, uint64_t address, __be32 immediate) {
  begin(qp, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, address, immediate);
}

void set_ud_addr(ibv_qp_ex* handle, ibv_ah* ah, uint32_t remote_qpn, uint32_t remote_qkey) {
  QueuePair& qp = extended(handle);
  if (!qp.is_srd || qp.batch.empty() || ah == nullptr || ah->pd != qp.qp_base.pd) return note_error(qp, EINVAL);
  WorkRequest& request = qp.batch.back();
  request.destination = static_cast<AddressHandle*>(ah)->remote;
  request.target_qp = remote_qpn;
  request.qkey = remote_qkey;
}

void set_sge_list(ibv_qp_ex* handle, size_t count, const ibv_sge* segments) {
  QueuePair& qp = extended(handle);
  if (qp.batch.empty()) return note_error(qp, EINVAL);
  if (const int error = take_segments(qp, qp.batch.back(), segments, count); error != 0) note_error(qp, error);
}

void set_sge(ibv_qp_ex* handle, uint32_t lkey, uint64_t address, uint32_t length) {
  const ibv_sge segment{address, length, lkey};
  set_sge_list(handle, 1, &segment);
}

void set_inline_data_list(ibv_qp_ex* handle, size_t count, const ibv_data_buf* buffers) {
  QueuePair& qp = extended(handle);
  const bool allowed = !qp.is_srd || qp.nic->configuration().inline_write;
  if (qp.batch.empty() || !allowed || qp.batch.back().opcode == IBV_WR_RDMA_READ) return note_error(qp, EINVAL);
  if (const int error = take_inline(qp, qp.batch.back(), buffers, count); error != 0) note_error(qp, error);
}

void set_inline_data(ibv_qp_ex* handle, void* address, size_t length) {
  const ibv_data_buf buffer{address, length};
  set_inline_data_list(handle, 1, &buffer);
}

void start(ibv_qp_ex* handle) {
  QueuePair& qp = extended(handle);
  qp.batch_mutex.lock();
  qp.batch.clear();
  qp.batch_error = 0;
}

int complete(ibv_qp_ex* handle) {
  QueuePair& qp = extended(handle);
  int error = qp.batch_error;
  if (error == 0) error = qp.post_all(qp.batch);
  const bool any = error == 0 && !qp.batch.empty();
  qp.batch.clear();
  qp.batch_mutex.unlock();
  if (any) qp.ring();
  return error;
}

void abort_batch(ibv_qp_ex* handle) {
  QueuePair& qp = extended(handle);
  qp.batch.clear();
  qp.batch_mutex.unlock();
}

void refuse(ibv_qp_ex* qp) { note_error(extended(qp), EINVAL); }

}  // namespace

int post_send(ibv_qp* handle, ibv_send_wr* request, ibv_send_wr** bad) {
  QueuePair& qp = *to_queue_pair(handle);
  int error = 0;
  bool any = false;
  for (; request != nullptr && error == 0; request = error == 0 ? request->next : request) {
    WorkRequest translated;
    error = translate(qp, *request, translated);
    if (error == 0) error = qp.post(std::move(translated));
    if (error != 0) break;
    any = true;
  }
  if (error != 0 && bad != nullptr) *bad = request;
  if (any) qp.ring();
  return error;
}

int post_recv(ibv_qp* handle, ibv_recv_wr* request, ibv_recv_wr** bad) {
  QueuePair& qp = *to_queue_pair(handle);
  for (; request != nullptr; request = request->next) {
    if (const int error = qp.post_receive(*request); error != 0) {
      if (bad != nullptr) *bad = request;
      return error;
    }
  }
  // In the error state the worker flushes them.
  if (qp.current_state.load() == IBV_QPS_ERR) qp.ring();
  return 0;
}

void set_work_request_calls(QueuePair& qp) {
  qp.wr_start = start;
  qp.wr_complete = complete;
  qp.wr_abort = abort_batch;
  qp.wr_rdma_read = rdma_read;
  qp.wr_rdma_write = rdma_write;
  qp.wr_rdma_write_imm = rdma_write_imm;
  qp.wr_set_ud_addr = set_ud_addr;
  qp.wr_set_sge = set_sge;
  qp.wr_set_sge_list = set_sge_list;
  qp.wr_set_inline_data = set_inline_data;
  qp.wr_set_inline_data_list = set_inline_data_list;
  qp.wr_atomic_cmp_swp = [](ibv_qp_ex* handle, uint32_t, uint64_t, uint64_t, uint64_t) { refuse(handle); };
  qp.wr_atomic_fetch_add = [](ibv_qp_ex* handle, uint32_t, uint64_t, uint64_t) { refuse(handle); };
  qp.wr_bind_mw = [](ibv_qp_ex* handle, ibv_mw*, uint32_t, const ibv_mw_bind_info*) { refuse(handle); };
  qp.wr_local_inv = [](ibv_qp_ex* handle, uint32_t) { refuse(handle); };
  qp.wr_send = refuse;
  qp.wr_send_imm = [](ibv_qp_ex* handle, __be32) { refuse(handle); };
  qp.wr_send_inv = [](ibv_qp_ex* handle, uint32_t) { refuse(handle); };
  qp.wr_send_tso = [](ibv_qp_ex* handle, void*, uint16_t, uint16_t) { refuse(handle); };
  qp.wr_set_xrc_srqn = [](ibv_qp_ex* handle, uint32_t) { refuse(handle); };
}

}  // namespace softnic
