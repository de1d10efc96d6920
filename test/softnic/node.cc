// SPDX-License-Identifier: MIT
#include "node.h"

#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "../support/catch.h"

namespace softnic_test {
namespace {

constexpr const char* kVariables[] = {"MK_SOFTNIC_NICS",      "MK_SOFTNIC_KIND",
                                      "MK_SOFTNIC_PORTS",     "MK_SOFTNIC_FABRIC",
                                      "MK_SOFTNIC_RATE_GBPS", "MK_SOFTNIC_SEED",
                                      "MK_SOFTNIC_ADVERSITY", "MK_SOFTNIC_LATENCY_US",
                                      "MK_SOFTNIC_DOWN",      "MK_SOFTNIC_BLOCKED",
                                      "MK_SOFTNIC_WRONG_GID", "MK_SOFTNIC_TIMEOUT_DIVISOR",
                                      "MK_SOFTNIC_BUSY_US",   "MK_SOFTNIC_EFA_INLINE_WRITE"};

bool readable(int fd, int milliseconds) {
  pollfd descriptor{fd, POLLIN, 0};
  return poll(&descriptor, 1, milliseconds) == 1;
}

}  // namespace

Environment::Environment(std::initializer_list<std::pair<const std::string, std::string>> variables) {
  for (const char* name : kVariables) unsetenv(name);
  // Tests run side by side.
  setenv("MK_SOFTNIC_FABRIC", ("test-" + std::to_string(getpid())).c_str(), 1);
  for (const auto& [name, value] : variables) setenv(("MK_SOFTNIC_" + name).c_str(), value.c_str(), 1);
}

Environment::~Environment() {
  for (const char* name : kVariables) unsetenv(name);
}

Node::Node(NodeOptions wanted) : options(wanted), memory(wanted.external != nullptr ? 0 : wanted.bytes) {
  int count = 0;
  devices = ibv_get_device_list(&count);
  REQUIRE(devices != nullptr);
  REQUIRE(options.device < count);
  context = ibv_open_device(devices[options.device]);
  REQUIRE(context != nullptr);
  pd = ibv_alloc_pd(context);
  REQUIRE(pd != nullptr);
  channel = ibv_create_comp_channel(context);
  REQUIRE(channel != nullptr);
  cq = ibv_create_cq(context, options.completions, this, channel, 0);
  REQUIRE(cq != nullptr);
  const int access = is_efa() ? options.access & ~IBV_ACCESS_REMOTE_ATOMIC : options.access;
  mr = ibv_reg_mr(pd, base(), options.bytes, access);
  REQUIRE(mr != nullptr);
  ibv_qp_init_attr_ex attributes{};
  attributes.send_cq = attributes.recv_cq = cq;
  attributes.cap = {options.depth, options.depth, 1, 1, is_efa() ? 0u : 64u};
  attributes.pd = pd;
  attributes.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  attributes.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
  if (is_efa()) {
    attributes.qp_type = IBV_QPT_DRIVER;
    efadv_qp_init_attr efa{};
    efa.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD;
    qp = efadv_create_qp_ex(context, &attributes, &efa, sizeof(efa));
  } else {
    attributes.qp_type = IBV_QPT_RC;
    attributes.send_ops_flags |= IBV_QP_EX_WITH_RDMA_READ;
    attributes.cap.max_send_sge = 4;
    qp = ibv_create_qp_ex(context, &attributes);
  }
  REQUIRE(qp != nullptr);
}

Node::~Node() {
  destroy_qp();
  for (const auto& entry : handles) ibv_destroy_ah(entry.second);
  if (mr != nullptr) CHECK(ibv_dereg_mr(mr) == 0);
  CHECK(ibv_destroy_cq(cq) == 0);
  CHECK(ibv_destroy_comp_channel(channel) == 0);
  CHECK(ibv_dealloc_pd(pd) == 0);
  CHECK(ibv_close_device(context) == 0);
  ibv_free_device_list(devices);
}

void Node::destroy_qp() {
  if (qp != nullptr) CHECK(ibv_destroy_qp(qp) == 0);
  qp = nullptr;
}

bool Node::is_efa() const { return context->device->node_type == IBV_NODE_UNSPECIFIED; }

Contact Node::contact() const {
  Contact contact;
  REQUIRE(ibv_query_gid(context, options.port, options.gid_index, &contact.gid) == 0);
  ibv_port_attr port{};
  REQUIRE(ibv_query_port(context, options.port, &port) == 0);
  contact.lid = port.lid;
  contact.qp_number = qp->qp_num;
  contact.psn = options.psn;
  contact.address = reinterpret_cast<uint64_t>(options.external != nullptr ? options.external : memory.data());
  contact.rkey = mr == nullptr ? 0 : mr->rkey;
  return contact;
}

int Node::to_init() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = options.port;
  attributes.qkey = kQkey;
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  const int rest = is_efa() ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;
  return ibv_modify_qp(qp, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | rest);
}

int Node::to_rtr(const Contact& peer) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  if (is_efa()) return ibv_modify_qp(qp, &attributes, IBV_QP_STATE);
  attributes.path_mtu = IBV_MTU_4096;
  attributes.dest_qp_num = peer.qp_number;
  attributes.rq_psn = peer.psn;
  attributes.min_rnr_timer = options.min_rnr_timer;
  attributes.ah_attr.port_num = options.port;
  attributes.ah_attr.dlid = peer.lid;
  attributes.ah_attr.is_global = peer.lid == 0 ? 1 : 0;
  attributes.ah_attr.grh.dgid = peer.gid;
  attributes.ah_attr.grh.sgid_index = static_cast<uint8_t>(options.gid_index);
  attributes.ah_attr.grh.hop_limit = 255;
  return ibv_modify_qp(qp, &attributes,
                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

int Node::to_rts() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.sq_psn = options.psn;
  attributes.timeout = options.timeout;
  attributes.retry_cnt = options.retry_count;
  attributes.rnr_retry = options.rnr_retry;
  const int rest = is_efa() ? IBV_QP_RNR_RETRY
                            : IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
  return ibv_modify_qp(qp, &attributes, IBV_QP_STATE | IBV_QP_SQ_PSN | rest);
}

int Node::connect(const Contact& peer) {
  if (is_efa()) handle_for(peer);
  if (const int error = to_init(); error != 0) return error;
  if (const int error = to_rtr(peer); error != 0) return error;
  return to_rts();
}

ibv_ah* Node::handle_for(const Contact& peer) {
  ibv_ah*& handle = handles[peer.qp_number];
  if (handle != nullptr) return handle;
  ibv_ah_attr attributes{};
  attributes.port_num = 1;
  attributes.is_global = 1;
  attributes.grh.dgid = peer.gid;
  handle = ibv_create_ah(pd, &attributes);
  REQUIRE(handle != nullptr);
  return handle;
}

int Node::write(const Contact& peer, uint64_t offset, uint32_t bytes, uint64_t wr_id,
                std::optional<uint32_t> immediate, bool signaled) {
  const uint64_t source = reinterpret_cast<uint64_t>(base()) + offset;
  if (is_efa()) {
    ibv_qp_ex* const ex = ibv_qp_to_qp_ex(qp);
    ibv_ah* const handle = handle_for(peer);
    ibv_wr_start(ex);
    ex->wr_id = wr_id;
    ex->wr_flags = 0;
    if (immediate) {
      ibv_wr_rdma_write_imm(ex, peer.rkey, peer.address + offset, *immediate);
    } else {
      ibv_wr_rdma_write(ex, peer.rkey, peer.address + offset);
    }
    ibv_wr_set_ud_addr(ex, handle, peer.qp_number, kQkey);
    ibv_wr_set_sge(ex, mr->lkey, source, bytes);
    return ibv_wr_complete(ex);
  }
  ibv_sge segment{source, bytes, mr->lkey};
  ibv_send_wr request{};
  request.wr_id = wr_id;
  request.sg_list = &segment;
  request.num_sge = 1;
  request.opcode = immediate ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
  request.send_flags = signaled ? static_cast<unsigned>(IBV_SEND_SIGNALED) : 0u;
  request.imm_data = immediate.value_or(0);
  request.wr.rdma.remote_addr = peer.address + offset;
  request.wr.rdma.rkey = peer.rkey;
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(qp, &request, &bad);
}

int Node::receive(uint64_t wr_id) {
  ibv_recv_wr request{};
  request.wr_id = wr_id;
  ibv_recv_wr* bad = nullptr;
  return ibv_post_recv(qp, &request, &bad);
}

std::optional<ibv_wc> Node::poll() {
  ibv_wc completion{};
  const int polled = ibv_poll_cq(cq, 1, &completion);
  // No check of Catch2's: ranks of a test may be threads.
  if (polled == 0) return std::nullopt;
  if (polled < 0) completion.status = static_cast<ibv_wc_status>(-1);
  return completion;
}

ibv_wc Node::wait(int milliseconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  while (std::chrono::steady_clock::now() < deadline) {
    if (const std::optional<ibv_wc> completion = poll()) return *completion;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  ibv_wc none{};
  none.status = static_cast<ibv_wc_status>(-1);
  return none;
}

bool Node::sleep(int milliseconds) {
  if (!readable(channel->fd, milliseconds)) return false;
  ibv_cq* ready = nullptr;
  void* user = nullptr;
  REQUIRE(ibv_get_cq_event(channel, &ready, &user) == 0);
  CHECK(ready == cq);
  CHECK(user == this);
  ibv_ack_cq_events(ready, 1);
  return true;
}

std::optional<ibv_async_event> Node::event(int milliseconds) {
  if (!readable(context->async_fd, milliseconds)) return std::nullopt;
  ibv_async_event event{};
  REQUIRE(ibv_get_async_event(context, &event) == 0);
  ibv_ack_async_event(&event);
  return event;
}

Pair::Pair(NodeOptions options) : a(options), b(options), to_a(a.contact()), to_b(b.contact()) {
  REQUIRE(a.connect(to_b) == 0);
  REQUIRE(b.connect(to_a) == 0);
}

}  // namespace softnic_test
