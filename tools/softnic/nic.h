// SPDX-License-Identifier: MIT
// One opened device: its objects, and the worker thread that moves everything.
//
// Locks. `mutex_` guards the tables, the attributes and whatever the worker does; the worker lets go of it
// while it copies payload and while it sleeps. Posting and polling do not take it: they meet the worker at
// QueuePair::post_mutex and CompletionQueue::entries_mutex. Order: mutex_, then any of those, then an inbox.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "address.h"
#include "configuration.h"
#include "cuda.h"
#include "queue_pair.h"
#include "wire.h"

namespace softnic {

uint64_t now_ns();

struct Device : ibv_device {
  std::shared_ptr<const Configuration> configuration;
  int nic = 0;
};

struct Context : verbs_context {
  std::shared_ptr<Device> owner;
  std::unique_ptr<Nic> nic;
};

struct MemoryRegion : ibv_mr {
  uint64_t iova = 0;
  unsigned access = 0;
  int device = -1;  // GPU; -1: host memory
  int copies = 0;   // on a GPU, under way
  std::unique_ptr<CudaExports> exports;
};

struct AddressHandle : ibv_ah {
  Address remote;
  uint16_t number = 0;
};

class Nic {
 public:
  using Lock = std::unique_lock<std::mutex>;

  Nic(Context& context, std::shared_ptr<const Configuration> configuration, int index);
  ~Nic();
  Nic(const Nic&) = delete;
  Nic& operator=(const Nic&) = delete;

  bool usable() const { return wire_->endpoint() != 0; }
  const Configuration& configuration() const { return *configuration_; }
  int index() const { return index_; }
  bool is_efa() const { return configuration_->kind == LinkKind::efa; }
  // What the NIC says of itself, and what is true: not the same when its GIDs are meant to be wrong.
  Address claimed_address(uint8_t port) const;
  bool port_is_up(uint8_t port) const { return (down_ports_.load() >> (port - 1) & 1) == 0; }

  // Each returns 0 or an errno; what creates returns null and sets errno.
  MemoryRegion* add_memory(ibv_pd* pd, void* address, size_t bytes, uint64_t iova, unsigned access);
  int remove_memory(MemoryRegion* region);
  QueuePair* add_queue_pair(ibv_pd* pd, const ibv_qp_init_attr_ex& attributes, bool is_srd);
  int modify(QueuePair* qp, const ibv_qp_attr& attributes, int mask);
  void query(QueuePair* qp, ibv_qp_attr& attributes);
  // First `stop`: nothing moves any more for that QP.
  int stop(QueuePair* qp);
  void remove_queue_pair(QueuePair* qp);
  AddressHandle* add_address_handle(ibv_pd* pd, const ibv_ah_attr& attributes);
  void remove_address_handle(AddressHandle* handle);
  bool in_use(const CompletionQueue* cq);
  bool in_use(const ibv_pd* pd);

  // Tells the worker that `qp` has something new.
  void ring(QueuePair* qp);

  // Asynchronous events; the descriptor is ibv_context::async_fd.
  void raise(const ibv_async_event& event);
  bool take_event(ibv_async_event& event);
  void forget_events(const void* element);

  // Faults at a moment that a test chooses. False: there is no such fault.
  bool inject(const char* fault, QueuePair* qp, uint8_t port);

 private:
  friend class ControlLock;

  // control
  std::optional<Address> resolve(const ibv_ah_attr& attributes, int& error) const;
  int prepare_route(QueuePair* qp, const ibv_qp_attr& attributes);
  void set_state(QueuePair* qp, ibv_qp_state state);
  int quiesce(QueuePair* qp, Lock& lock);
  void clear(QueuePair* qp);
  void raise_qp(QueuePair* qp, ibv_event_type type);
  void fail_port(uint8_t port);

  // worker.cc
  void run();
  void wake_by(uint64_t time_ns) { wake_ns_ = std::min(wake_ns_, time_ns); }
  bool take_doorbells();
  bool handle_quiescing();
  bool dispatch_held();
  void on_packet(const std::shared_ptr<Link>& link, const Packet& packet);
  void on_lost(const std::shared_ptr<Link>& link);
  void on_quiesced(QueuePair* qp);
  void fail(QueuePair* qp);
  void flush(QueuePair* qp);
  void push(CompletionQueue* cq, const Completion& completion);
  QueuePair* find(uint32_t number);
  MemoryRegion* find_memory(uint32_t key);

  // sender.cc
  bool transmit();
  bool transmit_from(QueuePair* qp);
  WorkRequest* next_request(QueuePair* qp);
  bool send_request(QueuePair* qp, WorkRequest& request);
  bool strike_sender(QueuePair* qp, WorkRequest& request);
  uint8_t check_local(const QueuePair& qp, const WorkRequest& request);
  Packet make_request(const QueuePair& qp, const WorkRequest& request);
  uint64_t pace(uint32_t bytes);
  void on_reply(const std::shared_ptr<Link>& link, const Packet& packet);
  void on_not_ready(QueuePair* qp, WorkRequest& request, const Packet& packet);
  void unanswered(QueuePair* qp, WorkRequest& request);
  void retry(QueuePair* qp, WorkRequest& request, uint64_t delay_ns);
  void finish(QueuePair* qp, WorkRequest& request, uint8_t status, uint8_t vendor);
  void complete(QueuePair* qp, const WorkRequest& request);
  void scatter(const WorkRequest& request, const Packet& packet);

  // receiver.cc
  void on_request(const std::shared_ptr<Link>& link, const Packet& packet);
  bool is_expected(QueuePair* qp, const std::shared_ptr<Link>& link, const Packet& packet);
  uint8_t check_remote(const QueuePair& qp, const Packet& packet);
  bool take_receive(QueuePair* qp, Arrival& arrival);
  void plan_placement(Arrival& arrival);
  void reply(const Arrival& arrival, PacketKind kind);
  void answer(const std::shared_ptr<Link>& link, const Packet& request, PacketKind kind, uint8_t status,
              uint8_t vendor, uint32_t bytes);
  bool place(Lock& lock);
  void place_piece(const std::shared_ptr<Arrival>& arrival, Lock& lock);
  bool deliver();
  bool deliver_from(QueuePair* qp);
  void deliver_one(QueuePair* qp, const std::shared_ptr<Arrival>& arrival);
  void on_fence(const std::shared_ptr<Link>& link, const Packet& packet);
  void drop_arrivals(QueuePair* qp, const Link* link, uint32_t source_qp);
  Subject subject_of(const Packet& packet) const;

  // gpu.cc
  void export_memory(const std::shared_ptr<Link>& link, const WorkRequest& request);
  void on_export(const std::shared_ptr<Link>& link, const Packet& packet);
  bool forget_exports();
  void place_on_gpu(const std::shared_ptr<Arrival>& arrival, MemoryRegion& region);
  bool copy_range(Arrival& arrival, uint64_t target, uint64_t offset, uint64_t bytes);
  uint64_t map_source(Arrival& arrival, const Segment& segment);
  void mark_copies();
  void end_copy(Arrival& arrival);
  bool poll_copies();
  bool is_copying(const QueuePair* qp) const;
  void settle_copies();
  void copy_small(const MemoryRegion* region, void* target, const void* source, size_t bytes);

  Context& context_;
  const std::shared_ptr<const Configuration> configuration_;
  const int index_;
  const double ns_per_byte_;
  const uint64_t latency_ns_;
  const std::shared_ptr<Inbox> inbox_;
  std::unique_ptr<Wire> wire_;

  std::mutex mutex_;
  std::condition_variable changed_;  // quiesced, or a copy has ended
  std::atomic<int> control_waiting_{0};
  std::atomic<uint32_t> down_ports_;
  bool stopping_ = false;
  bool silent_ = false;  // nothing goes out or comes in any more

  std::map<uint32_t, std::unique_ptr<QueuePair>> queue_pairs_;
  uint32_t next_qp_number_ = 0x101;
  std::map<uint32_t, std::unique_ptr<MemoryRegion>> memory_;
  uint32_t next_key_ = 0x1001;
  // Endpoints with an address handle: how many, and the number that all of them bear; completions name the
  // sender by it (slid), as EFA's do.
  struct KnownPeer {
    int handles = 0;
    uint16_t number = 0;
  };
  std::map<uint16_t, KnownPeer> known_peers_;
  uint16_t next_handle_ = 0;

  std::mutex doorbell_mutex_;
  std::vector<QueuePair*> doorbells_;

  std::mutex event_mutex_;
  std::deque<ibv_async_event> events_;

  // The worker's.
  uint64_t wake_ns_ = 0;
  std::vector<QueuePair*> active_;
  std::vector<QueuePair*> quiescing_;
  std::vector<std::pair<std::shared_ptr<Link>, uint32_t>> fences_;  // sent, not replied to: QP numbers
  std::multimap<uint64_t, std::pair<std::shared_ptr<Link>, Packet>> held_;
  std::deque<std::shared_ptr<Arrival>> unplaced_;
  std::vector<std::shared_ptr<Arrival>> copying_;  // on GPUs
  std::set<int> unmarked_;                         // devices with copies that no mark is behind yet
  std::vector<uint32_t> forgotten_;                // regions that were exported and are no more
  CudaCopier copier_;
  std::vector<QueuePair*> delivering_;  // QPs with arrivals
  uint64_t egress_free_ns_ = 0;
  uint64_t ingress_free_ns_ = 0;
  Random random_;
  const MemoryRegion* copying_memory_ = nullptr;
  const QueuePair* copying_qp_ = nullptr;
  std::thread worker_;
};

// Taken by the threads of the caller: the worker makes way for them.
class ControlLock {
 public:
  explicit ControlLock(Nic& nic);
  Nic::Lock& get() { return lock_; }

 private:
  Nic::Lock lock_;
};

void set_object_calls(verbs_context& context);
QueuePair* create_srd_queue_pair(ibv_context* context, ibv_qp_init_attr_ex& attributes);

inline Context* to_context(ibv_context* context) { return static_cast<Context*>(verbs_get_ctx(context)); }
inline Nic& nic_of(ibv_context* context) { return *to_context(context)->nic; }

}  // namespace softnic
