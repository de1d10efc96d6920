// SPDX-License-Identifier: MIT
// What travels between two NICs of the fabric. Payload does not: a request says where its bytes are in the
// sender's memory, and the receiving NIC fetches them (memory.h). Between processes packets go through a
// socket of one host, so there is one byte order and one layout.
#pragma once

#include <cstddef>
#include <cstdint>

namespace softnic {

enum class PacketKind : uint8_t {
  hello = 1,      // first on a socket: who connects
  request,        // a work request
  acknowledge,    // it is done; a read's bytes are in the payload
  not_ready,      // RNR: no receive request; `bytes` is the receiver's RNR timer
  refuse,         // it failed with `status`
  unanswered,     // nobody there who would answer: the sender goes on as though it had been lost
  fence,          // forget what is not done of my QP's requests, and say so
  fence_reply,    // from now on none of your memory is read for that QP
  export_memory,  // how to map GPU memory of region `rkey`: a CudaExport in the payload
  forget_memory,  // that region is no more
};

struct Segment {
  uint64_t address = 0;
  uint32_t bytes = 0;
  uint32_t key = 0;
};
inline constexpr uint32_t kMaxSegments = 16;
inline constexpr uint32_t kMaxInlineBytes = 256;
static_assert(sizeof(Segment) == 16);

union Payload {
  Segment segments[kMaxSegments];
  std::byte inline_data[kMaxInlineBytes];
};
static_assert(sizeof(Payload) == 256);

struct Packet {
  uint32_t size = 0;  // of the whole packet, without what of the payload is not used
  PacketKind kind{};
  uint8_t opcode = 0;  // ibv_wr_opcode
  uint8_t status = 0;  // refuse: ibv_wc_status
  uint8_t vendor = 0;  // refuse: the vendor's error code
  uint16_t source_endpoint = 0;
  uint8_t source_nic = 0;
  uint8_t path = 0;  // type of the sender's GID: both ends must speak the same
  uint8_t is_inline = 0;
  uint8_t solicited = 0;
  uint8_t source_port = 0;
  uint8_t target_port = 0;
  uint32_t source_qp = 0;
  uint32_t target_qp = 0;
  uint32_t psn = 0;
  uint32_t attempt = 0;
  uint32_t immediate = 0;  // as the caller gave it, network byte order
  uint32_t rkey = 0;
  uint32_t bytes = 0;
  uint32_t qkey = 0;
  uint32_t num_segments = 0;
  uint32_t gpu_segments = 0;  // bit i: segment i is GPU memory
  uint64_t sequence = 0;
  uint64_t remote_address = 0;
  uint64_t arrival_ns = 0;  // CLOCK_MONOTONIC, which all processes of the host share
  Payload payload{};
};
static_assert(offsetof(Packet, payload) == 80 && sizeof(Packet) == 336);

inline constexpr uint32_t kPacketHead = offsetof(Packet, payload);

// The bytes of the payload that are in use.
inline uint32_t payload_bytes(const Packet& packet) {
  return packet.is_inline != 0 ? packet.bytes : packet.num_segments * static_cast<uint32_t>(sizeof(Segment));
}

}  // namespace softnic
