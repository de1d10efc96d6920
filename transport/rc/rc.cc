// SPDX-License-Identifier: MIT
#include "rc.h"

#include <endian.h>

#include <cerrno>
#include <cstring>
#include <random>

#include "../../lib/env.h"
#include "../verbs/verbs_transport.h"

namespace mk::rc {
namespace {

using verbs::Link;
using verbs::Nic;
using verbs::NicCard;
using verbs::Queue;
using verbs::QueueCard;
using verbs::WorkRequest;

// Codes of the InfiniBand specification: 12 is 0.64 ms between tries of a receiver that is not ready, 7 tries
// for ever; receives are posted such that neither is met in normal running.
constexpr uint8_t kMinRnrTimer = 12;
constexpr uint8_t kRnrRetry = 7;
constexpr uint8_t kHopLimit = 255;

struct Settings {
  uint8_t timeout = 0, retry = 0, traffic_class = 0, service_level = 0;
  uint16_t pkey_index = 0;
};

Result<Settings> read_settings() {
  const auto timeout = env::integer("MK_IB_TIMEOUT", 1, 31);
  const auto retry = env::integer("MK_IB_RETRY", 0, 7);
  const auto traffic_class = env::integer("MK_IB_TRAFFIC_CLASS", 0, 255);
  const auto service_level = env::integer("MK_IB_SERVICE_LEVEL", 0, 15);
  const auto pkey = env::integer("MK_IB_PKEY_INDEX", 0, 65535);
  for (const auto* value : {&timeout, &retry, &traffic_class, &service_level, &pkey}) {
    if (!value->ok()) return value->status();
  }
  Settings settings;
  settings.timeout = static_cast<uint8_t>(timeout.value());
  settings.retry = static_cast<uint8_t>(retry.value());
  settings.traffic_class = static_cast<uint8_t>(traffic_class.value());
  settings.service_level = static_cast<uint8_t>(service_level.value());
  settings.pkey_index = static_cast<uint16_t>(pkey.value());
  return settings;
}

class Rc : public verbs::VerbsTransport {
 public:
  explicit Rc(const TransportContext& context) : VerbsTransport(context, "rc") {}

  void use(const Settings& settings) { settings_ = settings; }

 protected:
  Status make_queues() override;
  QueueCard describe(const Link& link) const override { return {link.queue->qp->qp_num, first_psn_, 0, 0, 0}; }
  Status connect_link(Link& link, const NicCard& nic, const QueueCard& queue) override;
  int post_requests(Link& link, std::span<const WorkRequest> requests) override;
  Link* link_of_receive(size_t, const ibv_wc& completion) override {
    return link_of(verbs::decode_work(completion.wr_id));
  }
  bool unordered() const override { return false; }

 private:
  Status make_queue(Link& link);
  ibv_ah_attr path_to(const Link& link, const NicCard& other) const;
  Status modify(const Link& link, ibv_qp_attr& attributes, int mask, const char* state) const;

  Settings settings_;
  const uint32_t first_psn_ = std::random_device{}() & 0xffffff;
};

Status Rc::make_queues() {
  for (verbs::Peer& peer : peers_) {
    for (Link& link : peer.links) MK_RETURN_IF_ERROR(make_queue(link));
  }
  return {};
}

Status Rc::make_queue(Link& link) {
  const Nic& nic = *nics_[link.nic];
  Queue& queue = queues_.emplace_back();
  queue.nic = link.nic;
  queue.send_depth = kSendsPerLink;
  queue.receive_depth = kReceivesPerLink;
  queue.receive_id = {verbs::WorkKind::receive, static_cast<uint16_t>(link.peer),
                      static_cast<uint8_t>(link.index)};
  link.queue = &queue;
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = nic.cq;
  init.qp_type = IBV_QPT_RC;
  init.cap.max_send_wr = queue.send_depth;
  init.cap.max_recv_wr = queue.receive_depth;
  init.cap.max_send_sge = init.cap.max_recv_sge = 1;
  queue.qp = nic.library.create_qp(nic.pd, &init);
  if (queue.qp == nullptr)
    return system_error(nic, format("make queue pair number %zu", queues_.size()), errno);
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = nic.port;
  attributes.pkey_index = settings_.pkey_index;
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  MK_RETURN_IF_ERROR(
      modify(link, attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT"));
  return post_receives(queue, queue.receive_depth);
}

Status Rc::modify(const Link& link, ibv_qp_attr& attributes, int mask, const char* state) const {
  const Nic& nic = *nics_[link.nic];
  // Address resolution of RoCE may time out once on a network that has just come up.
  int error = 0;
  for (int attempt = 0; attempt < 3; ++attempt) {
    error = nic.library.modify_qp(link.queue->qp, &attributes, mask);
    if (error != ETIMEDOUT) break;
  }
  if (error == 0) return {};
  return system_error(
      nic,
      format("bring the queue pair to rank %d into %s, GID %s (MK_IB_GID_INDEX, MK_IB_PKEY_INDEX)", link.peer,
             state, verbs::text_of(nic.gid.gid).c_str()),
      error);
}

ibv_ah_attr Rc::path_to(const Link& link, const NicCard& other) const {
  const Nic& nic = *nics_[link.nic];
  ibv_ah_attr path{};
  path.dlid = other.lid;
  path.sl = settings_.service_level;
  path.port_num = nic.port;
  // Between subnets of InfiniBand a LID is not enough.
  const bool other_subnet = std::memcmp(nic.gid.gid.data(), other.gid.data(), 8) != 0;
  if (nic.global || other.global != 0 || other_subnet) {
    path.is_global = 1;
    std::memcpy(path.grh.dgid.raw, other.gid.data(), other.gid.size());
    path.grh.sgid_index = static_cast<uint8_t>(nic.gid.index);
    path.grh.hop_limit = kHopLimit;
    path.grh.traffic_class = settings_.traffic_class;
  }
  return path;
}

Status Rc::connect_link(Link& link, const NicCard& other, const QueueCard& queue) {
  const Nic& nic = *nics_[link.nic];
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = static_cast<ibv_mtu>(
      std::clamp<int>(std::min<int>(nic.port_attributes.active_mtu, other.mtu), IBV_MTU_256, IBV_MTU_4096));
  attributes.dest_qp_num = queue.qpn;
  attributes.rq_psn = queue.psn;
  attributes.max_dest_rd_atomic = 1;
  attributes.min_rnr_timer = kMinRnrTimer;
  attributes.ah_attr = path_to(link, other);
  MK_RETURN_IF_ERROR(modify(link, attributes,
                            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
                            "RTR"));
  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = settings_.timeout;
  attributes.retry_cnt = settings_.retry;
  attributes.rnr_retry = kRnrRetry;
  attributes.sq_psn = first_psn_;
  attributes.max_rd_atomic = 1;
  return modify(link, attributes,
                IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                    IBV_QP_MAX_QP_RD_ATOMIC,
                "RTS");
}

int Rc::post_requests(Link& link, std::span<const WorkRequest> requests) {
  std::array<ibv_send_wr, 16> chain;
  std::array<ibv_sge, 16> buffers;
  for (size_t i = 0; i < requests.size(); ++i) {
    const WorkRequest& request = requests[i];
    buffers[i] = {reinterpret_cast<uint64_t>(request.local), request.bytes, request.lkey};
    ibv_send_wr& work = chain[i];
    work = ibv_send_wr{};
    work.wr_id = encode(request.id);
    work.next = i + 1 < requests.size() ? &chain[i + 1] : nullptr;
    work.sg_list = &buffers[i];
    work.num_sge = request.bytes > 0 ? 1 : 0;
    work.opcode = request.immediate ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
    work.send_flags = request.signaled ? static_cast<unsigned>(IBV_SEND_SIGNALED) : 0;
    work.imm_data = htobe32(request.immediate.value_or(0));
    work.wr.rdma.remote_addr = request.remote;
    work.wr.rdma.rkey = request.rkey;
  }
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(link.queue->qp, chain.data(), &bad);
}

}  // namespace

Status available() {
  const auto library = verbs::load_library();
  if (!library.ok()) return library.status();
  return Nic::open_all(*library.value(), verbs::NicKind::rc).status();
}

Result<std::unique_ptr<Transport>> create(const TransportContext& context, Deadline deadline) {
  auto transport = std::make_unique<Rc>(context);
  Status ready;
  std::vector<std::unique_ptr<Nic>> nics;
  const auto settings = read_settings();
  const auto library = verbs::load_library();
  if (!settings.ok()) {
    ready = settings.status();
  } else if (!library.ok()) {
    ready = library.status();
  } else {
    transport->use(settings.value());
    auto mine = Nic::open_mine(*library.value(), verbs::NicKind::rc, context.topology, context.pci_bus_id,
                               context.nics);
    ready = mine.status();
    if (mine.ok()) nics = mine.take();
  }
  MK_RETURN_IF_ERROR(transport->connect(context.exchange, std::move(nics), ready, deadline));
  return std::unique_ptr<Transport>(std::move(transport));
}

NicSurvey survey(const Topology& topology, const std::string& pci_bus_id) {
  return verbs::survey_nics(verbs::NicKind::rc, topology, pci_bus_id);
}

}  // namespace mk::rc
