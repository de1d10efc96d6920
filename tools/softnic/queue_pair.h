// SPDX-License-Identifier: MIT
// One queue pair: what the caller's threads put in, and what the NIC's worker makes of it.
#pragma once

#include <infiniband/efadv.h>
#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "address.h"
#include "completion_queue.h"
#include "packet.h"
#include "wire.h"

namespace softnic {

class Nic;
struct MemoryRegion;

struct WorkRequest {
  uint64_t wr_id = 0;
  ibv_wr_opcode opcode{};
  bool signaled = false;
  bool solicited = false;
  bool is_inline = false;
  uint32_t immediate = 0;
  uint64_t remote_address = 0;
  uint32_t rkey = 0;
  uint32_t bytes = 0;
  uint32_t num_segments = 0;
  Payload payload{};
  // SRD: where to.
  Address destination;
  uint32_t target_qp = 0;
  uint32_t qkey = 0;
  // The worker's.
  enum class Stage : uint8_t { queued, sent, done } stage = Stage::queued;
  uint8_t status = 0;  // ibv_wc_status, once it is done
  uint8_t vendor = 0;
  uint64_t sequence = 0;
  uint32_t attempt = 0;
  uint32_t num_rnr = 0;
  uint64_t failing_since_ns = 0;  // nobody has answered since; 0: somebody has
  std::shared_ptr<Link> link;
};

// A request of a peer, from its arrival to its delivery.
struct Arrival {
  std::shared_ptr<Link> link;
  Packet packet;
  bool has_receive = false;
  uint64_t receive_wr_id = 0;
  uint64_t receive_index = 0;
  uint64_t deliver_ns = 0;
  uint8_t refusal = 0;  // ibv_wc_status
  uint8_t vendor = 0;
  bool dropped = false;
  uint32_t placed = 0;           // pieces
  std::vector<uint64_t> pieces;  // offset of each, in the order of placement; empty: front to back
  uint32_t piece_bytes = 0;
  uint64_t random = 0;
  // GPU memory: the copies are under way until this mark of the device has passed. 0: they are not, or no
  // longer.
  uint64_t mark = 0;
  int device = -1;
  MemoryRegion* region = nullptr;
  std::vector<std::vector<std::byte>> staged;  // host memory of other processes, on its way to a GPU

  uint32_t num_pieces() const;
  uint32_t piece_length(uint64_t offset) const;
};

struct QueuePair : ibv_qp_ex {
  Nic* nic = nullptr;
  bool is_srd = false;
  bool signal_all = false;
  ibv_qp_cap capacity{};

  // Attributes, guarded by the NIC's mutex.
  ibv_qp_attr attributes{};
  Address remote;
  uint8_t path = 0;

  // The caller's side. `stage` mirrors ibv_qp::state for the threads that post.
  std::mutex post_mutex;
  std::atomic<ibv_qp_state> current_state{IBV_QPS_RESET};
  std::deque<WorkRequest> posted;
  std::deque<std::pair<uint64_t, uint64_t>> receives;  // wr_id, index
  uint64_t num_posted = 0, num_receives = 0;
  std::atomic<uint64_t> num_retired{0}, num_receives_retired{0};
  std::atomic<bool> rung{false};

  // ibv_wr_start ... ibv_wr_complete, which hold the mutex from the one to the other.
  std::mutex batch_mutex;
  std::vector<WorkRequest> batch;
  int batch_error = 0;

  // The sender's side: requests [sent.front().sequence, next_sequence), the first of them not sent is
  // `next_unsent`.
  std::deque<WorkRequest> sending;
  uint64_t next_unsent = 0;
  uint64_t resume_ns = 0;
  uint32_t attempt = 0;
  std::map<uint64_t, std::vector<uint64_t>> retries;  // SRD: time, sequences
  bool failing = false;                               // a request failed: nothing more is sent
  std::set<std::shared_ptr<Link>> unsettled;          // where requests that failed may still be read for
  bool quiescing = false;                             // the worker is to see that nobody reads for this QP
  bool discarding = false;                            // what is left is forgotten, not flushed
  int fences = 0;                                     // replies awaited for that
  bool active = false;                                // in the worker's list of QPs that have something to send

  // The receiver's side.
  uint64_t expected_sequence = 0;
  int64_t refused_attempt = -1;
  bool refusing = false;  // RC: a request was refused, nothing comes after it
  std::deque<std::shared_ptr<Arrival>> arrivals;
  uint32_t async_given = 0;  // events that the caller has to acknowledge, guarded by ibv_qp::mutex
  bool fatal_raised = false;

  explicit QueuePair(Nic* owner);
  ~QueuePair();

  ibv_qp* base() { return &qp_base; }
  uint32_t number() const { return qp_base.qp_num; }
  void retire(bool is_receive, uint64_t before);
  // Errors are those of ibv_post_send and ibv_post_recv. `ring` afterwards.
  int post(WorkRequest&& request);
  int post_all(std::vector<WorkRequest>& requests);  // or none
  int post_receive(const ibv_recv_wr& request);
  void ring();
  WorkRequest* find(uint64_t sequence);
};

inline QueuePair* to_queue_pair(ibv_qp* qp) {
  return static_cast<QueuePair*>(reinterpret_cast<ibv_qp_ex*>(qp));
}

// Whether the transition is allowed and the mask complete: 0 or EINVAL.
int check_modify(const QueuePair& qp, const ibv_qp_attr& attributes, int mask);
// Copies what the mask names.
void take_attributes(ibv_qp_attr& to, const ibv_qp_attr& from, int mask);
// min_rnr_timer in nanoseconds.
uint64_t rnr_delay_ns(uint8_t timer);

// The entries of ibv_context_ops, and ibv_wr_*.
int post_send(ibv_qp* qp, ibv_send_wr* request, ibv_send_wr** bad);
int post_recv(ibv_qp* qp, ibv_recv_wr* request, ibv_recv_wr** bad);
void set_work_request_calls(QueuePair& qp);

}  // namespace softnic
