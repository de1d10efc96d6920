// SPDX-License-Identifier: MIT
// One non-blocking TCP connection between two holders of a job's secret: mutual challenge, then tagged frames.
//
// The client sends a nonce with its hello; the server answers with a nonce of its own and with
// HMAC(secret, "server" | hello | server nonce); the client proves itself with HMAC(secret, "client" | ...).
// Both nonces are fresh, so nothing recorded can be replayed; the labels differ, so nothing can be reflected.
// Each direction has its own key, HMAC(secret, "to server" | ...), and each later frame a tag over its sequence
// number, header and payload. The secret itself never travels.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "authentication.h"
#include "bootstrap_frame.h"
#include "socket.h"

namespace mk {

struct Frame {
  FrameKind kind;
  Bytes payload;
};

class Channel {
 public:
  enum class End : uint8_t {
    none,
    closed,        // the other end closed the connection
    refused,       // nobody listens there
    lost,          // the operating system reports another error: reset, unreachable, timed out
    garbage,       // what came is not this protocol
    wrong_secret,  // the other end does not know the secret
  };

  // A connection that start_connect() began.
  static Channel client(FileDescriptor socket, const Secret& secret, const Hello& hello);
  // An accepted connection; it takes hellos for `purpose` and `to` only, and from anybody when `from` is empty.
  static Channel server(FileDescriptor socket, const Secret& secret, Purpose purpose, uint32_t to,
                        std::optional<uint32_t> from);

  int fd() const { return socket_.get(); }
  // What to poll for.
  short events() const;
  // Reads and writes what the socket has room for, and carries the handshake on. Returns true if bytes arrived.
  bool pump();
  // Only writes: what pump() reads, somebody must look at before waiting again.
  void flush() {
    if (socket_.valid() && end_ == End::none) write_some();
  }
  // Both ends have proved themselves (the client cannot know yet whether the server took its proof).
  bool open() const { return phase_ == Phase::open; }
  const Hello& hello() const { return hello_; }
  // The next frame that has arrived whole and with a right tag. Drain before looking at end().
  std::optional<Frame> next();
  End end() const { return end_; }
  // The network gave up waiting for the other end, or knows no way to it: that end need not be dead.
  bool cut_off() const { return cut_off_; }
  // In words, when end() is not none.
  const std::string& why() const { return why_; }

  // Appends a frame; `data` (shared with other channels) follows `prefix` in its payload.
  void send(FrameKind kind, Bytes prefix = {}, std::shared_ptr<const Bytes> data = nullptr);
  bool output_empty() const { return queue_.empty() && written_ == output_.size(); }
  // Nothing can be written any more, though there may be something left to read.
  bool write_failed() const { return write_error_ != 0; }
  // Ends the writing direction.
  void shut_down_output();
  void set_max_payload(size_t bytes) { max_payload_ = bytes; }
  void close() { socket_.reset(); }

 private:
  enum class Phase : uint8_t { connecting, await_hello, await_challenge, await_proof, open };
  struct Outgoing {
    FrameKind kind;
    Bytes prefix;
    std::shared_ptr<const Bytes> data;
  };

  Channel(FileDescriptor socket, const Secret& secret) : socket_(std::move(socket)), secret_(secret) {}
  void finish(End end, std::string why);
  void finish_by_errno(int error);
  bool read_some();
  void make_room();
  void write_some();
  void serialise(const Outgoing& frame);
  void handle_handshake();
  void take_hello(const FrameView& frame);
  void take_challenge(const FrameView& frame);
  void take_proof(const FrameView& frame);
  Tag transcript_tag(const char* label) const;
  void derive_keys(bool server);
  void consume(size_t bytes);

  FileDescriptor socket_;
  Secret secret_;
  Phase phase_ = Phase::connecting;
  End end_ = End::none;
  std::string why_;
  bool cut_off_ = false;
  int write_error_ = 0;  // errno of the write that failed

  Purpose purpose_ = Purpose::root;
  uint32_t to_ = 0;
  std::optional<uint32_t> from_;
  Hello hello_;
  Bytes hello_bytes_;
  Nonce server_nonce_{};
  Secret send_key_{};
  Secret receive_key_{};
  uint64_t sent_ = 0;
  uint64_t received_ = 0;

  size_t max_payload_ = kMaxHandshakePayload;
  Bytes input_;
  size_t filled_ = 0;
  size_t parsed_ = 0;
  size_t wanted_ = 0;  // bytes of the frame whose beginning is here
  // Only the frame being written exists as bytes; those behind it share their data.
  std::deque<Outgoing> queue_;
  Bytes output_;
  size_t written_ = 0;
};

}  // namespace mk
