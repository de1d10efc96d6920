// SPDX-License-Identifier: MIT
// The links of one NIC to others: an inbox within the process, a socket of the host between processes.
// Everything here is called by the NIC's worker alone, but for the constructor and the destructor.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cuda.h"
#include "inbox.h"
#include "packet.h"

namespace softnic {

struct Link {
  ~Link();

  uint16_t peer = 0;  // 0: has not said hello yet
  std::shared_ptr<Inbox> inbox;
  int fd = -1;
  pid_t pid = 0;  // of the peer's process, as the kernel says
  bool dead = false;
  std::set<uint32_t> exported;                               // regions of ours that the peer can map
  std::map<uint32_t, std::shared_ptr<CudaImports>> imports;  // regions of the peer's that we have mapped
  std::vector<std::byte> in;
  std::vector<std::byte> out;
  bool is_full = false;  // the socket takes no more of it
  // Descriptors travel with the first byte of their packet.
  struct Departure {
    size_t position;  // of that byte in `out`
    int descriptor;
  };
  std::deque<Departure> departures;
  std::deque<int> arrivals;  // not taken yet
  // The next that has come; -1: none has. The caller closes it.
  int take_descriptor();
};

class Wire {
 public:
  using Handler = std::function<void(const std::shared_ptr<Link>&, const Packet&)>;

  // Takes the lowest endpoint number of the fabric that is free. 0: there is none, or no sockets.
  Wire(const std::string& fabric, std::shared_ptr<Inbox> inbox);
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  uint16_t endpoint() const { return endpoint_; }
  int descriptor() const { return epoll_; }

  // The link to an endpoint, opened if need be; null when nobody is there.
  std::shared_ptr<Link> open(uint16_t peer);
  // False when the link is dead. A descriptor goes along to another process; it stays the caller's. To another
  // process packets leave with the next flush: many in one system call.
  bool send(const std::shared_ptr<Link>& link, const Packet& packet, int descriptor = -1);
  void broadcast(const Packet& packet);
  void flush();
  // Hands over what has come in; `lost` is called once for each link that broke.
  bool receive(const Handler& handler, const std::function<void(const std::shared_ptr<Link>&)>& lost);

 private:
  bool bind_endpoint(uint16_t number);
  std::shared_ptr<Link> connect(uint16_t peer);
  void watch(const std::shared_ptr<Link>& link);
  void update_interest(const Link& link) const;
  void accept_links();
  bool read_link(const std::shared_ptr<Link>& link, const Handler& handler);
  void flush_link(Link& link);
  void drop(const std::shared_ptr<Link>& link);
  void bury_closed();

  const std::string fabric_;
  const std::shared_ptr<Inbox> inbox_;
  uint16_t endpoint_ = 0;
  int listener_ = -1;
  int epoll_ = -1;
  std::map<uint16_t, std::shared_ptr<Link>> by_peer_;
  std::map<int, std::shared_ptr<Link>> by_fd_;
  std::map<uint16_t, std::shared_ptr<Link>> in_process_;
  std::vector<std::shared_ptr<Link>> unflushed_;
  std::vector<std::shared_ptr<Link>> closed_;  // of in_process_, not reported as lost yet
  std::vector<Packet> taken_;
  std::vector<std::byte> read_ = std::vector<std::byte>(64 << 10);
};

}  // namespace softnic
