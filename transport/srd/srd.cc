// SPDX-License-Identifier: MIT
#include "srd.h"

#include <endian.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <unordered_map>

#include "../verbs/verbs_transport.h"

namespace mk::srd {
namespace {

using verbs::Link;
using verbs::Nic;
using verbs::NicCard;
using verbs::Queue;
using verbs::QueueCard;
using verbs::WorkRequest;

constexpr uint32_t kQkey = 0x1b4d4b4c;
// A receiver that is not ready is asked again for ever: not met in normal running.
constexpr uint8_t kRnrRetry = 7;
// Every write of a put carries an immediate here, and a put has at most 2^32 - 1 bytes.
constexpr uint64_t kLeastWriteBytes = (uint64_t{1} << 32) / 64;

class Srd : public verbs::VerbsTransport {
 public:
  explicit Srd(const TransportContext& context) : VerbsTransport(context, "srd") {}

 protected:
  Status make_queues() override;
  QueueCard describe(const Link& link) const override { return {link.queue->qp->qp_num, 0, kQkey, 0, 0}; }
  Status connect_link(Link& link, const NicCard& nic, const QueueCard& queue) override;
  int post_requests(Link& link, std::span<const WorkRequest> requests) override;
  Link* link_of_receive(size_t nic, const ibv_wc& completion) override;
  bool unordered() const override { return true; }

 private:
  Status make_queue(Queue& queue);
  Status bring_up(const Queue& queue);
  static uint64_t source_key(size_t nic, uint32_t qpn, uint16_t address_number) {
    return static_cast<uint64_t>(nic) << 48 | static_cast<uint64_t>(address_number) << 32 | qpn;
  }

  std::unordered_map<uint64_t, Link*> sources_;  // by NIC, the peer's queue pair, and its NIC's number here
};

Status Srd::make_queues() {
  std::vector<uint32_t> links(nics_.size());
  for (const verbs::Peer& peer : peers_) {
    for (const Link& link : peer.links) ++links[link.nic];
  }
  for (size_t nic = 0; nic < nics_.size(); ++nic) {
    const efadv_device_attr& limits = nics_[nic]->efa_attributes;
    Queue& queue = queues_.emplace_back();
    queue.nic = nic;
    const uint32_t count = std::max(links[nic], 1u);
    queue.send_depth = std::min(count * kSendsPerLink, limits.max_sq_wr);
    queue.receive_depth = count * kReceivesPerLink;
    if (queue.receive_depth > limits.max_rq_wr || queue.send_depth < kSendsPerLink) {
      return Status(
          MK_ERROR_UNSUPPORTED,
          format("srd: %s has queues of %u sends and %u receives, %u links need %u and %u; give each rank "
                 "more NICs (MK_IB_HCA)",
                 nics_[nic]->text().c_str(), limits.max_sq_wr, limits.max_rq_wr, links[nic], kSendsPerLink,
                 queue.receive_depth));
    }
    if (nics_[nic]->most_bytes() < kLeastWriteBytes) {
      return Status(
          MK_ERROR_UNSUPPORTED,
          format("srd: %s writes at most %llu bytes at once, expected at least %llu",
                 nics_[nic]->text().c_str(), static_cast<unsigned long long>(nics_[nic]->most_bytes()),
                 static_cast<unsigned long long>(kLeastWriteBytes)));
    }
    queue.receive_id = {verbs::WorkKind::receive, 0, static_cast<uint8_t>(nic)};
    MK_RETURN_IF_ERROR(make_queue(queue));
    MK_RETURN_IF_ERROR(bring_up(queue));
  }
  for (verbs::Peer& peer : peers_) {
    for (Link& link : peer.links) link.queue = &queues_[link.nic];
  }
  return {};
}

Status Srd::make_queue(Queue& queue) {
  const Nic& nic = *nics_[queue.nic];
  ibv_qp_init_attr_ex init{};
  init.send_cq = init.recv_cq = nic.cq;
  init.cap.max_send_wr = queue.send_depth;
  init.cap.max_recv_wr = queue.receive_depth;
  init.cap.max_send_sge = init.cap.max_recv_sge = 1;
  init.qp_type = IBV_QPT_DRIVER;
  init.sq_sig_all = 1;
  init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  init.pd = nic.pd;
  init.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
  efadv_qp_init_attr driver{};
  driver.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD;
  queue.qp = nic.library.efa_create_qp(nic.context, &init, &driver, sizeof driver);
  if (queue.qp == nullptr) return system_error(nic, "make a queue pair with RDMA writes", errno);
  return {};
}

Status Srd::bring_up(const Queue& queue) {
  const Nic& nic = *nics_[queue.nic];
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = nic.port;
  attributes.qkey = kQkey;
  if (const int error = nic.library.modify_qp(queue.qp, &attributes,
                                              IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
      error != 0) {
    return system_error(nic, "bring a queue pair into INIT", error);
  }
  Queue& mine = queues_[queue.nic];
  attributes = {};
  attributes.qp_state = IBV_QPS_RTR;
  if (const int error = nic.library.modify_qp(queue.qp, &attributes, IBV_QP_STATE); error != 0) {
    return system_error(nic, "bring a queue pair into RTR", error);
  }
  MK_RETURN_IF_ERROR(post_receives(mine, mine.receive_depth));
  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
  if ((nic.efa_attributes.device_caps & EFADV_DEVICE_ATTR_CAPS_RNR_RETRY) != 0) {
    attributes.rnr_retry = kRnrRetry;
    mask |= IBV_QP_RNR_RETRY;
  }
  if (const int error = nic.library.modify_qp(queue.qp, &attributes, mask); error != 0) {
    return system_error(nic, "bring a queue pair into RTS", error);
  }
  return {};
}

// Also what makes the peer's writes welcome: a NIC answers only those that it has an address handle for.
Status Srd::connect_link(Link& link, const NicCard& other, const QueueCard&) {
  const Nic& nic = *nics_[link.nic];
  ibv_ah_attr path{};
  path.is_global = 1;
  path.port_num = nic.port;
  path.grh.sgid_index = static_cast<uint8_t>(nic.gid.index);
  std::memcpy(path.grh.dgid.raw, other.gid.data(), other.gid.size());
  link.address = nic.library.create_ah(nic.pd, &path);
  if (link.address == nullptr) {
    return system_error(
        nic, format("make an address handle of rank %d at %s", link.peer, verbs::text_of(other.gid).c_str()),
        errno);
  }
  efadv_ah_attr attributes{};
  if (const int error = nic.library.efa_query_ah(link.address, &attributes, sizeof attributes); error != 0) {
    return system_error(nic, "query an address handle", error);
  }
  const bool first = sources_.emplace(source_key(link.nic, link.remote_qpn, attributes.ahn), &link).second;
  if (first) return {};
  return Status(MK_ERROR_NETWORK, format("srd: two links to rank %d and another share QP %u of %s", link.peer,
                                         link.remote_qpn, other.text.c_str()));
}

int Srd::post_requests(Link& link, std::span<const WorkRequest> requests) {
  // A queue pair of efadv_create_qp_ex is an extended one, which begins with the plain one.
  auto* queue = reinterpret_cast<ibv_qp_ex*>(link.queue->qp);
  ibv_wr_start(queue);
  for (const WorkRequest& request : requests) {
    queue->wr_id = encode(request.id);
    queue->wr_flags = IBV_SEND_SIGNALED;
    if (request.immediate) {
      ibv_wr_rdma_write_imm(queue, request.rkey, request.remote, htobe32(*request.immediate));
    } else {
      ibv_wr_rdma_write(queue, request.rkey, request.remote);
    }
    ibv_wr_set_ud_addr(queue, link.address, link.remote_qpn, link.remote_qkey);
    ibv_wr_set_sge(queue, request.lkey, reinterpret_cast<uint64_t>(request.local), request.bytes);
  }
  return ibv_wr_complete(queue);
}

// EFA names the sender by its queue pair and by the number of our address handle for its NIC.
Link* Srd::link_of_receive(size_t nic, const ibv_wc& completion) {
  const auto found = sources_.find(source_key(nic, completion.src_qp, completion.slid));
  return found == sources_.end() ? nullptr : found->second;
}

}  // namespace

Status available() {
  const auto library = verbs::load_library();
  if (!library.ok()) return library.status();
  if (!library.value()->efa_missing.empty()) {
    return Status(MK_ERROR_UNSUPPORTED, "libefa: " + library.value()->efa_missing);
  }
  return Nic::open_all(*library.value(), verbs::NicKind::efa).status();
}

Result<std::unique_ptr<Transport>> create(const TransportContext& context, Deadline deadline) {
  auto transport = std::make_unique<Srd>(context);
  std::vector<std::unique_ptr<Nic>> nics;
  const auto library = verbs::load_library();
  Status ready = library.status();
  if (library.ok() && !library.value()->efa_missing.empty()) {
    ready = Status(MK_ERROR_UNSUPPORTED, "libefa: " + library.value()->efa_missing);
  }
  if (ready.ok()) {
    auto mine = Nic::open_mine(*library.value(), verbs::NicKind::efa, context.topology, context.pci_bus_id,
                               context.nics);
    ready = mine.status();
    if (mine.ok()) nics = mine.take();
  }
  MK_RETURN_IF_ERROR(transport->connect(context.exchange, std::move(nics), ready, deadline));
  return std::unique_ptr<Transport>(std::move(transport));
}

NicSurvey survey(const Topology& topology, const std::string& pci_bus_id) {
  return verbs::survey_nics(verbs::NicKind::efa, topology, pci_bus_id);
}

}  // namespace mk::srd
