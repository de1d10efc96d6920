// SPDX-License-Identifier: MIT
// One rank's view of the NICs in these tests: an opened device with everything that a transport would create.
#pragma once

#include <infiniband/efadv.h>
#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace softnic_test {

inline constexpr uint32_t kQkey = 0x1234567;
inline constexpr uint32_t kImmediate = 0x0a0b0c0d;

// Sets the variables of softnic for the life of the object, after clearing all others of them.
class Environment {
 public:
  Environment(std::initializer_list<std::pair<const std::string, std::string>> variables);
  ~Environment();
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
};

// What another rank has to know.
struct Contact {
  ibv_gid gid{};
  uint16_t lid = 0;
  uint32_t qp_number = 0;
  uint32_t psn = 0;
  uint64_t address = 0;
  uint32_t rkey = 0;
};

struct NodeOptions {
  int device = 0;
  uint8_t port = 1;
  int gid_index = 0;
  uint32_t depth = 256;  // of the send and the receive queue
  int completions = 4096;
  size_t bytes = 1 << 16;  // of the registered memory
  int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  uint8_t timeout = 14;
  uint8_t retry_count = 7;
  uint8_t rnr_retry = 7;
  uint8_t min_rnr_timer = 1;
  uint32_t psn = 77;
  std::byte* external = nullptr;  // `bytes` of memory to register in place of the node's own
};

class Node {
 public:
  explicit Node(NodeOptions options = {});
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  bool is_efa() const;
  Contact contact() const;
  // Through INIT to RTR and RTS; RC: towards `peer`, SRD: with an address handle for it. 0 or an errno.
  int connect(const Contact& peer);
  int to_init();
  int to_rtr(const Contact& peer);
  int to_rts();
  ibv_ah* handle_for(const Contact& peer);

  // A write of bytes [offset, offset + bytes) of the memory to the same place of the peer's. 0 or an errno.
  int write(const Contact& peer, uint64_t offset, uint32_t bytes, uint64_t wr_id = 0,
            std::optional<uint32_t> immediate = std::nullopt, bool signaled = true);
  int receive(uint64_t wr_id = 0);
  // The next completion; none within the time: the status is that of a time-out of this test, -1.
  ibv_wc wait(int milliseconds = 30000);
  std::optional<ibv_wc> poll();
  // Sleeps on the completion channel until there is an event. False: there was none in time.
  bool sleep(int milliseconds);
  std::optional<ibv_async_event> event(int milliseconds);

  void destroy_qp();
  std::byte* base() { return options.external != nullptr ? options.external : memory.data(); }

  NodeOptions options;
  ibv_device** devices = nullptr;
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_comp_channel* channel = nullptr;
  ibv_cq* cq = nullptr;
  ibv_qp* qp = nullptr;
  ibv_mr* mr = nullptr;
  std::vector<std::byte> memory;
  std::map<uint32_t, ibv_ah*> handles;  // by the QP number of the contact
};

// Two nodes, connected with each other.
struct Pair {
  explicit Pair(NodeOptions options = {});
  Node a, b;
  Contact to_a, to_b;
};

}  // namespace softnic_test
