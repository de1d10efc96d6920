// SPDX-License-Identifier: MIT
#include "bootstrap_channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "wire.h"

namespace mk {
namespace {

constexpr size_t kReadBytes = 64 * 1024;
// A turn at one socket, so that a fast neighbour does not starve the other one.
constexpr int kReadsPerTurn = 8;

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

Channel Channel::client(FileDescriptor socket, const Secret& secret, const Hello& hello) {
  Channel channel(std::move(socket), secret);
  channel.hello_ = hello;
  if (!fill_random(channel.hello_.nonce).ok()) channel.finish(End::lost, "no random numbers");
  channel.hello_bytes_ = encode(channel.hello_);
  return channel;
}

Channel Channel::server(FileDescriptor socket, const Secret& secret, Purpose purpose, uint32_t to,
                        std::optional<uint32_t> from) {
  Channel channel(std::move(socket), secret);
  channel.purpose_ = purpose;
  channel.to_ = to;
  channel.from_ = from;
  channel.phase_ = Phase::await_hello;
  return channel;
}

short Channel::events() const {
  if (phase_ == Phase::connecting) return POLLOUT;
  return static_cast<short>(POLLIN | (output_empty() || write_failed() ? 0 : POLLOUT));
}

bool Channel::pump() {
  if (!socket_.valid() || end_ != End::none) return false;
  if (phase_ == Phase::connecting) {
    pollfd ready{fd(), POLLOUT, 0};
    if (poll(&ready, 1, 0) <= 0) return false;
    if (const int error = connect_error(fd()); error != 0) {
      finish_by_errno(error);
      return false;
    }
    phase_ = Phase::await_challenge;
    send(FrameKind::hello, hello_bytes_);
  }
  write_some();
  const bool arrived = read_some();
  if (!open()) handle_handshake();
  write_some();
  return arrived;
}

bool Channel::read_some() {
  bool arrived = false;
  for (int turn = 0; turn < kReadsPerTurn && end_ == End::none; ++turn) {
    // One frame of the largest size, and what came with it, is all that waits here unparsed.
    if (filled_ - parsed_ > max_payload_ + kReadBytes) break;
    make_room();
    const ssize_t count = recv(fd(), input_.data() + filled_, input_.size() - filled_, 0);
    if (count > 0) {
      filled_ += static_cast<size_t>(count);
      arrived = true;
    } else if (count == 0) {
      // The system tells an error once: if write_some() got it, here is only an end.
      if (write_error_ != 0 && write_error_ != EPIPE) return finish_by_errno(write_error_), arrived;
      finish(End::closed, "connection closed");
    } else if (would_block(errno)) {
      break;
    } else {
      finish_by_errno(errno);
    }
  }
  return arrived;
}

// For a read's worth of bytes, and for the rest of a large frame whose header has arrived.
void Channel::make_room() {
  if (parsed_ > 0) {
    std::memmove(input_.data(), input_.data() + parsed_, filled_ - parsed_);
    filled_ -= parsed_;
    parsed_ = 0;
  }
  const size_t needed = std::max(filled_ + kReadBytes, wanted_);
  if (input_.size() < needed) input_.resize(needed);
}

void Channel::write_some() {
  if (phase_ == Phase::connecting) return;
  while (!write_failed()) {
    if (written_ == output_.size()) {
      if (queue_.empty()) return;
      serialise(queue_.front());
      queue_.pop_front();
    }
    const ssize_t count = ::send(fd(), output_.data() + written_, output_.size() - written_, MSG_NOSIGNAL);
    if (count >= 0) {
      written_ += static_cast<size_t>(count);
    } else if (would_block(errno)) {
      return;
    } else {
      // Not the end yet: the other end may have said why it closed, and that is still to be read.
      write_error_ = errno;
    }
  }
}

void Channel::serialise(const Outgoing& frame) {
  const size_t length = frame.prefix.size() + (frame.data ? frame.data->size() : 0);
  output_.clear();
  written_ = 0;
  append_frame_header(output_, frame.kind, length);
  output_.insert(output_.end(), frame.prefix.begin(), frame.prefix.end());
  if (frame.data) output_.insert(output_.end(), frame.data->begin(), frame.data->end());
  if (!is_tagged(frame.kind)) return;
  const Bytes sequence = WireWriter().integer(sent_++).take();
  const Tag tag = hmac_sha256(send_key_, {sequence, output_});
  output_.insert(output_.end(), tag.begin(), tag.end());
}

std::optional<Frame> Channel::next() {
  if (!open() || end_ == End::garbage) return {};
  const FrameParse parse = parse_frame(std::span(input_).subspan(parsed_, filled_ - parsed_), max_payload_);
  if (parse.state == FrameParse::State::incomplete) {
    wanted_ = parse.wanted;
    return {};
  }
  if (parse.state == FrameParse::State::invalid) {
    finish(End::garbage, parse.why);
    return {};
  }
  const Bytes sequence = WireWriter().integer(received_++).take();
  if (!is_tagged(parse.frame.kind) ||
      !equal_in_constant_time(hmac_sha256(receive_key_, {sequence, parse.frame.header, parse.frame.payload}),
                              parse.frame.tag)) {
    finish(End::garbage, "a frame with a wrong authentication code");
    return {};
  }
  Frame frame{parse.frame.kind, Bytes(parse.frame.payload.begin(), parse.frame.payload.end())};
  consume(parse.frame.size);
  return frame;
}

void Channel::handle_handshake() {
  const FrameParse parse =
      parse_frame(std::span(input_).subspan(parsed_, filled_ - parsed_), kMaxHandshakePayload);
  if (parse.state == FrameParse::State::incomplete) return;
  if (parse.state == FrameParse::State::invalid) return finish(End::garbage, parse.why);
  const FrameView& frame = parse.frame;
  if (phase_ == Phase::await_hello && frame.kind == FrameKind::hello) {
    take_hello(frame);
  } else if (phase_ == Phase::await_challenge && frame.kind == FrameKind::challenge) {
    take_challenge(frame);
  } else if (phase_ == Phase::await_proof && frame.kind == FrameKind::proof) {
    take_proof(frame);
  } else {
    return finish(End::garbage, "an unexpected frame");
  }
  consume(frame.size);
  if (phase_ == Phase::await_proof) handle_handshake();
}

void Channel::take_hello(const FrameView& frame) {
  const auto hello = decode_hello(frame.payload);
  if (!hello || hello->purpose != purpose_ || hello->to != to_ || (from_ && hello->from != *from_)) {
    return finish(End::garbage, "a hello that is not for this listener");
  }
  hello_ = *hello;
  hello_bytes_.assign(frame.payload.begin(), frame.payload.end());
  if (!fill_random(server_nonce_).ok()) return finish(End::lost, "no random numbers");
  phase_ = Phase::await_proof;
  send(FrameKind::challenge, encode(Challenge{server_nonce_, transcript_tag("mk-bootstrap server")}));
}

void Channel::take_challenge(const FrameView& frame) {
  const auto challenge = decode_challenge(frame.payload);
  if (!challenge) return finish(End::garbage, "a malformed challenge");
  server_nonce_ = challenge->nonce;
  if (!equal_in_constant_time(transcript_tag("mk-bootstrap server"), challenge->proof)) {
    return finish(End::wrong_secret, "it does not know the secret");
  }
  const Tag proof = transcript_tag("mk-bootstrap client");
  send(FrameKind::proof, Bytes(proof.begin(), proof.end()));
  derive_keys(false);
}

void Channel::take_proof(const FrameView& frame) {
  const auto proof = decode_proof(frame.payload);
  if (!proof || !equal_in_constant_time(transcript_tag("mk-bootstrap client"), *proof)) {
    return finish(End::wrong_secret, "it does not know the secret");
  }
  derive_keys(true);
}

Tag Channel::transcript_tag(const char* label) const {
  return hmac_sha256(secret_,
                     {std::as_bytes(std::span(label, std::strlen(label) + 1)), hello_bytes_, server_nonce_});
}

void Channel::derive_keys(bool server) {
  send_key_ = transcript_tag(server ? "mk-bootstrap to client" : "mk-bootstrap to server");
  receive_key_ = transcript_tag(server ? "mk-bootstrap to server" : "mk-bootstrap to client");
  phase_ = Phase::open;
}

void Channel::consume(size_t bytes) {
  parsed_ += bytes;
  wanted_ = 0;
  if (parsed_ < filled_) return;
  parsed_ = filled_ = 0;
  // A large block's memory is given back once it has gone through.
  if (input_.size() > 4 * kReadBytes) Bytes().swap(input_);
}

void Channel::send(FrameKind kind, Bytes prefix, std::shared_ptr<const Bytes> data) {
  queue_.push_back(Outgoing{kind, std::move(prefix), std::move(data)});
}

void Channel::shut_down_output() {
  if (socket_.valid()) shutdown(fd(), SHUT_WR);
}

void Channel::finish(End end, std::string why) {
  if (end_ != End::none) return;
  end_ = end;
  why_ = std::move(why);
}

void Channel::finish_by_errno(int error) {
  cut_off_ = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == ENETDOWN;
  finish(error == ECONNREFUSED ? End::refused : End::lost, std::strerror(error));
}

}  // namespace mk
