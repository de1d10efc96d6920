// SPDX-License-Identifier: MIT
// What rc and srd share: puts cut into RDMA writes over the links to a peer, immediates counted at the
// receiver, acknowledged slots, failures with their reasons. How a queue pair is made and fed is the derived
// class' part. The protocol is in docs/protocol.md, "On the wire: rc and srd".
#pragma once

#include <array>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../transport.h"
#include "arrivals.h"
#include "immediate.h"
#include "nic.h"
#include "put_pieces.h"
#include "registration.h"
#include "work_id.h"

namespace mk::verbs {

// How a receiver learns that a put is complete (MK_IB_SIGNAL).
enum class SignalMode {
  immediate,   // every write of the put carries an immediate; the receiver counts them
  completion,  // plain writes; when all have completed, one write of no bytes with an immediate
};

// Set by tests, each to leave out one thing that the promise rests on.
struct Sabotage {
  bool no_count = false;       // the receiver publishes a signal at the first immediate of its put
  bool no_slots = false;       // a slot is used again at once, before the receiver has acknowledged it
  bool no_completion = false;  // mode `completion` does not wait for the completions of the data
  bool early_free = false;     // a put counts as complete when it is posted
  std::optional<uint32_t> forged_immediate;  // sent instead of those of puts
};
Sabotage& sabotage();

struct WorkRequest {
  WorkId id;
  const std::byte* local = nullptr;
  uint32_t lkey = 0;
  uint32_t bytes = 0;
  uint64_t remote = 0;
  uint32_t rkey = 0;
  std::optional<uint32_t> immediate;
  bool signaled = true;
};

// A queue pair and how full it is: rc has one a link, srd one a NIC.
struct Queue {
  ibv_qp* qp = nullptr;
  size_t nic = 0;
  uint32_t send_depth = 0;
  uint32_t sends = 0;       // posted, not known to be complete
  uint32_t unsignaled = 0;  // of these, since the last signaled one
  uint32_t receive_depth = 0;
  uint32_t receives_missing = 0;
  WorkId receive_id;
};

// A stripe of a put that waits for room, or what is left of it.
struct Job {
  uint32_t slot = 0;
  Range range;
};

// One of the ways to a peer: a NIC here and a NIC there.
struct Link {
  int peer = 0;
  uint32_t index = 0;
  size_t nic = 0;
  size_t peer_nic = 0;
  Queue* queue = nullptr;
  uint32_t remote_qpn = 0;
  uint32_t remote_qkey = 0;
  ibv_ah* address = nullptr;  // srd
  uint64_t mailbox = 0;       // srd: where writes without bytes of a put go
  uint32_t mailbox_rkey = 0;
  std::deque<Job> jobs;
  uint32_t window_used = 0;  // immediates that the peer has not acknowledged
  uint64_t completed = 0;    // pieces
  std::chrono::steady_clock::time_point last_completed;
};

struct Slot {
  enum class Stage { data, signal };
  Put put;
  std::shared_ptr<const RegionKeys> source, target;
  Stage stage = Stage::data;
  bool used = false;
  bool immediates = false;  // each of its writes carries one
  bool acknowledged = true;
  bool complete = false;  // locally
  uint32_t pieces = 0;
  uint32_t jobs = 0;         // not fully posted
  uint32_t outstanding = 0;  // signaled, not completed
  std::array<uint16_t, kMaxLinks> posted_immediates{};
};

// A link whose failure was seen, before it is decided: what the peer said last may still be in another queue.
struct Suspicion {
  Status status;
  int certainty = 0;
  std::chrono::steady_clock::time_point decide_at;
};

struct Peer {
  std::deque<Link> links;  // none: a rank of this node
  std::array<Slot, kCreditsPerPeer> slots;
  uint64_t free_slots = ~uint64_t{0};
  uint64_t to_acknowledge = 0;
  std::chrono::steady_clock::time_point acknowledge_by;  // where there is something to acknowledge
  uint32_t next_link = 0;
  uint32_t acknowledge_link = 0;
  uint32_t awaited = 0;  // slots whose acknowledgement has not come
  bool heard = true;     // since the last look at the time
  std::chrono::steady_clock::time_point probe_at;
  bool left = false;
  bool bye_sent = false;  // and completed
  bool failed = false;
  Arrivals arrivals;
  std::optional<Suspicion> suspicion;
};

// What a rank tells the others of a NIC, and of its end of a link.
struct NicCard {
  uint8_t link_layer;
  GidKind gid_kind;
  uint8_t global;
  uint8_t mtu;
  uint16_t lid;
  Gid gid;
  std::string text;
};
struct QueueCard {
  uint32_t qpn;
  uint32_t psn;
  uint32_t qkey;
  uint64_t mailbox;
  uint32_t mailbox_rkey;
};

class VerbsTransport : public Transport {
 public:
  ~VerbsTransport() override;

  // Collective; see transport.h. The NICs are this rank's, or `ready` says why it has none.
  Status connect(Exchange& exchange, std::vector<std::unique_ptr<Nic>> nics, Status ready, Deadline deadline);

  Result<Bytes> add_region(uint32_t region, std::byte* base, size_t bytes) override;
  Status set_peer_keys(uint32_t region, std::span<const Bytes> keys) override;
  void remove_region(uint32_t region) override;
  bool post(const Put& put) override;
  void poll(TransportEvents& events) override;
  std::chrono::microseconds prepare_wait(std::vector<pollfd>& descriptors) override;
  void leave() override;

 protected:
  VerbsTransport(const TransportContext& context, const char* name);

  // Makes queue pairs with receives posted; every link gets its queue.
  virtual Status make_queues() = 0;
  virtual QueueCard describe(const Link& link) const = 0;
  virtual Status connect_link(Link& link, const NicCard& nic, const QueueCard& queue) = 0;
  // 0 or an errno.
  virtual int post_requests(Link& link, std::span<const WorkRequest> requests) = 0;
  // The link that a received immediate came over; nullptr: a stranger's.
  virtual Link* link_of_receive(size_t nic, const ibv_wc& completion) = 0;
  virtual bool unordered() const = 0;

  Status post_receives(Queue& queue, uint32_t count);
  Status system_error(const Nic& nic, const std::string& what, int error) const;
  int nranks() const { return static_cast<int>(peers_.size()); }
  Link* link_of(const WorkId& id);

  const int rank_;
  const char* const name_;
  AbortToken& abort_;
  const Topology& topology_;
  SignalMode mode_ = SignalMode::immediate;
  std::vector<std::unique_ptr<Nic>> nics_;
  std::vector<std::vector<NicCard>> cards_;  // [rank][NIC]
  std::deque<Queue> queues_;
  std::vector<Peer> peers_;  // by rank
  std::vector<std::byte> scratch_;
  std::vector<ibv_mr*> scratch_mrs_;  // by NIC
  // What a link's queue pair holds: immediates of puts, acknowledgements, and a few more.
  static constexpr uint32_t kWindow = 128;
  static constexpr uint32_t kReceiveBatch = 16;
  static constexpr uint32_t kReceivesPerLink = kWindow + kCreditsPerPeer + kReceiveBatch + 8;
  static constexpr uint32_t kSendsPerLink = 128;
  static constexpr uint32_t kControlSends = kCreditsPerPeer + 8;  // kept free for acknowledgements
  static constexpr size_t kScratchBytes = 64;                     // of a receive, and of a sender's mailbox

 private:
  // connect.cc
  NicCard card_of(const Nic& nic) const;
  Status read_cards(const std::vector<Bytes>& blocks);
  Status check_cards() const;
  void make_links();
  Status prepare_nics();
  Bytes describe_links() const;
  Status connect_links(const std::vector<Bytes>& blocks);

  // verbs_transport.cc
  void plan(int rank, uint32_t slot_index);
  void pump(Link& link);
  void fill_empty(const Link& link, WorkRequest& request) const;
  WorkRequest next_piece(Link& link, Job& job, Slot& slot);
  void mark_signaled(Queue& queue, WorkRequest& request, bool last);
  void advance(int rank, uint32_t slot_index);
  void acknowledge_arrivals(Peer& peer, bool all);
  void acknowledge_all();
  bool send_empty(Link& link, std::optional<ControlImmediate> control, WorkKind kind);
  void refill(Queue& queue);
  std::chrono::microseconds probe_silent_peers();

  // completions.cc
  void handle(size_t nic, const ibv_wc& completion, TransportEvents& events);
  void handle_send(Link& link, const WorkId& id);
  void handle_immediate(Link& link, uint32_t immediate, TransportEvents& events);
  Status handle_put(Link& link, uint32_t immediate, TransportEvents& events);
  Status handle_control(Link& link, const ControlImmediate& control);
  void handle_error(size_t nic, const ibv_wc& completion);
  void check_async_events(size_t nic);
  void suspect(int rank, int certainty, Status status);
  void decide_suspicions();
  void fail(int rank, mk_status_t code, const std::string& why);
  bool has_puts_under_way(const Peer& peer) const;
  std::string text_of_link(const Link& link) const;
  std::vector<int> peers_on(size_t nic, const ibv_qp* qp) const;

  std::unique_ptr<Registration> registration_;
  std::vector<size_t> peer_nics_;           // by rank, 0 for ranks of this node
  std::vector<std::vector<ibv_wc>> stash_;  // by NIC: found by prepare_wait
  std::vector<WorkRequest> requests_;
  std::vector<TransportEvents::Failure> failures_;
  uint64_t completions_ = 0;
  bool credits_ = false;  // some came back
  uint32_t polls_ = 0;
  uint32_t jobs_ = 0;
  uint32_t suspicions_ = 0;
};

// Reads MK_IB_SIGNAL.
Result<SignalMode> signal_mode();

}  // namespace mk::verbs
