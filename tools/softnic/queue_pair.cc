// SPDX-License-Identifier: MIT
#include "queue_pair.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "nic.h"

namespace softnic {
namespace {

struct Transition {
  ibv_qp_state from, to;
  int required, optional;
};

constexpr int kSrdInit = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
constexpr int kRcInit = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;

constexpr std::array kRcTransitions = {
    Transition{IBV_QPS_RESET, IBV_QPS_INIT, kRcInit, 0},
    Transition{IBV_QPS_INIT, IBV_QPS_INIT, 0, kRcInit},
    Transition{IBV_QPS_INIT, IBV_QPS_RTR,
               IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                   IBV_QP_MIN_RNR_TIMER,
               IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_ALT_PATH},
    Transition{IBV_QPS_RTR, IBV_QPS_RTS,
               IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
               IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE},
    Transition{IBV_QPS_RTS, IBV_QPS_RTS, 0,
               IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE},
};

constexpr std::array kSrdTransitions = {
    Transition{IBV_QPS_RESET, IBV_QPS_INIT, kSrdInit, 0},
    Transition{IBV_QPS_INIT, IBV_QPS_INIT, 0, kSrdInit},
    Transition{IBV_QPS_INIT, IBV_QPS_RTR, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    Transition{IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, IBV_QP_QKEY | IBV_QP_RNR_RETRY},
    Transition{IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_QKEY},
};

bool values_make_sense(const ibv_qp_attr& attributes, int mask) {
  constexpr uint32_t kMaxQpNumber = 0xffffff;
  if ((mask & IBV_QP_PKEY_INDEX) != 0 && attributes.pkey_index != 0) return false;
  if ((mask & IBV_QP_DEST_QPN) != 0 && attributes.dest_qp_num > kMaxQpNumber) return false;
  if ((mask & IBV_QP_PATH_MTU) != 0 &&
      (attributes.path_mtu < IBV_MTU_256 || attributes.path_mtu > IBV_MTU_4096)) {
    return false;
  }
  if ((mask & IBV_QP_MIN_RNR_TIMER) != 0 && attributes.min_rnr_timer > 31) return false;
  if ((mask & IBV_QP_TIMEOUT) != 0 && attributes.timeout > 31) return false;
  if ((mask & IBV_QP_RETRY_CNT) != 0 && attributes.retry_cnt > 7) return false;
  if ((mask & IBV_QP_RNR_RETRY) != 0 && attributes.rnr_retry > 7) return false;
  return (mask & IBV_QP_ALT_PATH) == 0;
}

}  // namespace

uint32_t Arrival::num_pieces() const {
  if (packet.bytes == 0) return 0;
  return (packet.bytes - 1) / piece_bytes + 1;
}

uint32_t Arrival::piece_length(uint64_t offset) const {
  return static_cast<uint32_t>(std::min<uint64_t>(piece_bytes, packet.bytes - offset));
}

QueuePair::QueuePair(Nic* owner) : ibv_qp_ex{}, nic(owner) {
  pthread_mutex_init(&qp_base.mutex, nullptr);
  pthread_cond_init(&qp_base.cond, nullptr);
}

QueuePair::~QueuePair() {
  pthread_cond_destroy(&qp_base.cond);
  pthread_mutex_destroy(&qp_base.mutex);
}

void QueuePair::retire(bool is_receive, uint64_t before) {
  std::atomic<uint64_t>& retired = is_receive ? num_receives_retired : num_retired;
  // SRD completes in any order and each completion frees its own slot; RC frees all up to the polled one.
  const uint64_t now = retired.load();
  retired.store(is_srd || is_receive ? now + 1 : std::max(now, before));
}

int QueuePair::post(WorkRequest&& request) {
  const std::lock_guard lock(post_mutex);
  const ibv_qp_state state = current_state.load();
  if (state == IBV_QPS_RESET || state == IBV_QPS_INIT || state == IBV_QPS_RTR) return EINVAL;
  if (num_posted - num_retired.load() >= capacity.max_send_wr) return ENOMEM;
  request.sequence = num_posted++;
  posted.push_back(std::move(request));
  return 0;
}

int QueuePair::post_all(std::vector<WorkRequest>& requests) {
  const std::lock_guard lock(post_mutex);
  const ibv_qp_state state = current_state.load();
  if (state == IBV_QPS_RESET || state == IBV_QPS_INIT || state == IBV_QPS_RTR) return EINVAL;
  if (num_posted - num_retired.load() + requests.size() > capacity.max_send_wr) return ENOMEM;
  for (WorkRequest& request : requests) {
    request.sequence = num_posted++;
    posted.push_back(std::move(request));
  }
  return 0;
}

int QueuePair::post_receive(const ibv_recv_wr& request) {
  const std::lock_guard lock(post_mutex);
  if (current_state.load() == IBV_QPS_RESET) return EINVAL;
  if (request.num_sge < 0 || static_cast<uint32_t>(request.num_sge) > capacity.max_recv_sge) return EINVAL;
  if (num_receives - num_receives_retired.load() >= capacity.max_recv_wr) return ENOMEM;
  receives.emplace_back(request.wr_id, num_receives++);
  return 0;
}

void QueuePair::ring() { nic->ring(this); }

WorkRequest* QueuePair::find(uint64_t sequence) {
  if (sending.empty() || sequence < sending.front().sequence) return nullptr;
  const uint64_t index = sequence - sending.front().sequence;
  return index < sending.size() ? &sending[index] : nullptr;
}

int check_modify(const QueuePair& qp, const ibv_qp_attr& attributes, int mask) {
  const ibv_qp_state from = qp.current_state.load();
  const ibv_qp_state to = (mask & IBV_QP_STATE) != 0 ? attributes.qp_state : from;
  if ((mask & IBV_QP_CUR_STATE) != 0 && attributes.cur_qp_state != from) return EINVAL;
  const int rest = mask & ~(IBV_QP_STATE | IBV_QP_CUR_STATE);
  if (to == IBV_QPS_RESET || to == IBV_QPS_ERR) return rest == 0 ? 0 : EINVAL;
  const Transition* transitions = qp.is_srd ? kSrdTransitions.data() : kRcTransitions.data();
  const size_t count = qp.is_srd ? kSrdTransitions.size() : kRcTransitions.size();
  for (size_t index = 0; index < count; ++index) {
    const Transition& transition = transitions[index];
    if (transition.from != from || transition.to != to) continue;
    const bool complete = (rest & transition.required) == transition.required;
    const bool known = (rest & ~(transition.required | transition.optional)) == 0;
    return complete && known && values_make_sense(attributes, mask) ? 0 : EINVAL;
  }
  return EINVAL;
}

void take_attributes(ibv_qp_attr& to, const ibv_qp_attr& from, int mask) {
  const auto take = [&](int bit, auto ibv_qp_attr::*field) {
    if ((mask & bit) != 0) to.*field = from.*field;
  };
  take(IBV_QP_ACCESS_FLAGS, &ibv_qp_attr::qp_access_flags);
  take(IBV_QP_PKEY_INDEX, &ibv_qp_attr::pkey_index);
  take(IBV_QP_PORT, &ibv_qp_attr::port_num);
  take(IBV_QP_QKEY, &ibv_qp_attr::qkey);
  take(IBV_QP_AV, &ibv_qp_attr::ah_attr);
  take(IBV_QP_PATH_MTU, &ibv_qp_attr::path_mtu);
  take(IBV_QP_TIMEOUT, &ibv_qp_attr::timeout);
  take(IBV_QP_RETRY_CNT, &ibv_qp_attr::retry_cnt);
  take(IBV_QP_RNR_RETRY, &ibv_qp_attr::rnr_retry);
  take(IBV_QP_RQ_PSN, &ibv_qp_attr::rq_psn);
  take(IBV_QP_SQ_PSN, &ibv_qp_attr::sq_psn);
  take(IBV_QP_MAX_QP_RD_ATOMIC, &ibv_qp_attr::max_rd_atomic);
  take(IBV_QP_MAX_DEST_RD_ATOMIC, &ibv_qp_attr::max_dest_rd_atomic);
  take(IBV_QP_MIN_RNR_TIMER, &ibv_qp_attr::min_rnr_timer);
  take(IBV_QP_DEST_QPN, &ibv_qp_attr::dest_qp_num);
}

uint64_t rnr_delay_ns(uint8_t timer) {
  // InfiniBand Architecture Specification, volume 1, table "Encoding for RNR NAK Timer Field", in 10 us.
  static constexpr std::array<uint32_t, 32> kTenMicroseconds = {
      65536, 1,   2,   3,   4,    6,    8,    12,   16,   24,   32,   48,    64,    96,    128,   192,
      256,   384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};
  return kTenMicroseconds[timer & 31] * 10000ull;
}

}  // namespace softnic
