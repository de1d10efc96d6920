// SPDX-License-Identifier: MIT
// How a put travels: its bytes as remote writes with FI_DELIVERY_COMPLETE, and when all of these have completed
// its signal in a message, together with those of other puts that are complete by then. A completion of that
// level means that the bytes are in the target's memory, with every provider; what data that comes with a write
// (FI_REMOTE_CQ_DATA) promises differs between providers, 4 bytes of it are not always there, and it says
// nothing of the other pieces of a put.
//
// Memory of a GPU, which few providers can use, is staged in pieces of kStageBytes, kStagesPerPeer of them to a
// peer at a time: copied to pinned memory if the source is the GPU's; written to the target or, if that is a
// GPU's, to a slot of the peer's landing area, which the peer is told of and copies to its place; when it says
// that it has, the piece is done.
#pragma once

#include <array>
#include <chrono>
#include <deque>
#include <mutex>
#include <span>
#include <vector>

#include "../../lib/abort_token.h"
#include "../region_table.h"
#include "../transport.h"
#include "connect.h"
#include "device_copies.h"

namespace mk::ofi {

class OfiTransport : public Transport {
 public:
  // Under way to one peer at a time.
  static constexpr size_t kWritesPerPeer = 32;
  static constexpr size_t kMessagesPerPeer = 4;
  // How many operations may be under way with so many ranks.
  static size_t operations(int nranks);

  // `copies`: nullptr where there is no GPU.
  OfiTransport(const Library& library, const TransportContext& context, Opened opened,
               std::chrono::milliseconds timeout, std::unique_ptr<DeviceCopies> copies);
  ~OfiTransport() override;

  // Before anything else: provides the message buffers, greets every peer and hears from it.
  Status start(Deadline deadline);

  Result<Bytes> add_region(uint32_t region, std::byte* base, size_t bytes) override;
  Status set_peer_keys(uint32_t region, std::span<const Bytes> keys) override;
  void remove_region(uint32_t region) override;
  bool post(const Put& put) override;
  void poll(TransportEvents& events) override;
  std::chrono::microseconds prepare_wait(std::vector<pollfd>& descriptors) override;
  void leave() override;

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr uint32_t kNoStage = ~0u;
  enum class Kind { receive, message, write };
  // What libfabric is given as context; it may use the first member as it likes until the completion.
  struct Operation {
    fi_context2 context{};
    Kind kind = Kind::receive;
    int peer = -1;               // of a message or a write
    Message* message = nullptr;  // of a message or a receive
    uint32_t put = 0;            // of a write: its place in the peer's puts
    uint32_t stage = kNoStage;   // of a write that is staged
  };
  struct OutgoingPut {
    Put put;
    uint32_t posted = 0;   // bytes
    uint32_t pending = 0;  // writes
  };
  // A piece of a put on its way through pinned memory.
  struct Stage {
    enum class State { free, copying, ready, writing, announced } state = State::free;
    uint32_t put = 0;
    uint32_t offset = 0;  // in the put
    uint32_t bytes = 0;
  };
  // A slot of the landing area, at the receiving end.
  struct Landing {
    bool copying = false;
    Landed piece{};
  };
  struct Notice {
    MessageKind kind;
    std::vector<uint32_t> words;
  };
  struct Peer {
    PeerAddress address;
    bool exists = false;   // on another node
    bool greeted = false;  // both ends have heard each other
    bool owes = false;     // `owed` is to be sent to it
    MessageKind owed = MessageKind::hello;
    bool said_bye = false;  // to it
    bool left = false;
    bool failed = false;
    uint32_t credits = kCreditsPerPeer;
    uint32_t pending = 0;              // writes and messages
    Clock::time_point silent_since{};  // nothing was pending, or the last of it that completed
    std::vector<OutgoingPut> puts;
    std::vector<uint32_t> free_puts;
    std::deque<uint32_t> to_write;  // puts with bytes not yet posted
    std::deque<uint32_t> signals;   // whose bytes are in place
    std::deque<Notice> notices;     // of staged pieces, bounded by their slots
    std::array<Stage, kStagesPerPeer> stages;
    std::array<Landing, kStagesPerPeer> landings;
    std::vector<Operation*> free_writes;
    std::vector<Operation*> free_messages;
  };
  struct LocalRegion {
    Fid<fid_mr> memory;
    std::vector<RegionKey> keys;  // by rank
    std::byte* base = nullptr;
    bool on_device = false;
  };

  Status prepare_messages();
  Status wait_for(bool (OfiTransport::*done)() const, Deadline deadline, const char* what);
  bool all_greeted() const;
  bool all_farewells_said() const;
  std::string silent_ranks() const;
  void post_receive(Operation& operation);
  void advance(int rank);
  bool write(int rank, uint32_t number);
  bool write_piece(int rank, uint32_t number, Operation& operation);
  ssize_t post_write(int rank, const std::byte* from, fid_mr* memory, const fi_rma_iov& to,
                     Operation& operation);
  bool send(int rank, MessageKind kind, std::span<const uint32_t> words);
  void send_signals(int rank);

  // ofi_staging.cc
  Status open_staging();
  bool is_staged(const Put& put, int rank) const;
  bool stage_pieces(int rank, uint32_t number);
  void advance_stages(int rank);
  bool write_stage(int rank, uint32_t index);
  void stage_written(int rank, uint32_t index);
  void finish_stage(int rank, uint32_t index);
  void advance_landings(int rank);
  Status accept_landed(int rank, const Message& message);
  Status accept_placed(int rank, const Message& message);
  void wait_for_landings(uint32_t region);
  bool copies_under_way() const;
  size_t lane(int rank, uint32_t slot, bool landing) const;
  void bytes_in_place(Peer& peer, uint32_t number);
  void progress();
  bool take_completions();
  void take_error();
  void complete(Operation& operation, size_t received_bytes);
  void release(Operation& operation);
  void receive(const Message& message, size_t bytes);
  Status accept(int sender, const Message& message, size_t bytes);
  void check_timeouts();
  void fail(int rank, mk_status_t code, const std::string& why);
  void fail_all(const std::string& why);
  bool unreported() const;
  static size_t lane_offset(int rank, uint32_t slot) {
    return (static_cast<size_t>(rank) * kStagesPerPeer + slot) * kStageBytes;
  }
  size_t staging_half() const { return peers_.size() * kStagesPerPeer * kStageBytes; }
  Peer& peer_of(int rank) { return peers_[static_cast<size_t>(rank)]; }

  const Library& library_;
  const int rank_;
  AbortToken& abort_;
  RegionTable& region_table_;
  const std::chrono::milliseconds timeout_;
  const Token token_;

  // The provider's objects are used by one thread at a time; regions are registered while the proxy runs.
  std::mutex mutex_;
  std::unique_ptr<Fabric> fabric_;
  std::unique_ptr<DeviceCopies> copies_;
  std::byte* staging_ = nullptr;  // what is sent, then what lands; kStagesPerPeer slots a rank each
  Fid<fid_mr> staging_memory_;
  Fid<fid_mr> messages_memory_;
  std::vector<Message> messages_;
  std::vector<Operation> operations_;  // addresses stay
  std::vector<Peer> peers_;            // by rank
  std::vector<LocalRegion> regions_;   // by id
  TransportEvents events_;             // not yet reported
  size_t largest_piece_;
  bool blocked_ = false;  // the provider took something not: it says not when it will
  bool moved_ = false;    // something completed since prepare_wait was called last
  bool leaving_ = false;
  Clock::time_point last_poll_{};
};

}  // namespace mk::ofi
