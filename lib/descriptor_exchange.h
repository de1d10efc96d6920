// SPDX-License-Identifier: MIT
// Hands file descriptors between the processes of one host, over unix sockets in the abstract namespace: no
// file bears their name, so that nothing is left when a process dies.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "abort_token.h"
#include "deadline.h"
#include "file_descriptor.h"
#include "status.h"

namespace mk {

// 128 bits from the kernel's random number generator.
using RandomToken = std::array<std::byte, 16>;
Result<RandomToken> make_random_token();

// Where a rank listens and what it wants to be shown there. Travels through the authenticated Exchange only;
// whoever has it may hand this rank a descriptor.
struct DescriptorAddress {
  RandomToken name;
  RandomToken secret;
};
static_assert(sizeof(DescriptorAddress) == 32);

struct DescriptorPeer {
  int rank;
  DescriptorAddress address;
};

// One round of the exchange: open() on every rank, then the addresses are gathered, then swap() on every rank.
class DescriptorExchange {
 public:
  // Listens, and takes what sending to `num_peers` others will need: a rank that is short of descriptors fails
  // here, or in swap() after it has sent, so that no other waits for it in vain.
  static Result<DescriptorExchange> open(int rank, int num_peers);

  const DescriptorAddress& address() const { return address_; }

  // Hands `mine` to every peer and receives one descriptor from each, in the order of `peers`. Connections of
  // another user, or that do not know the secret, are dropped. MK_ERROR_TIMEOUT names the ranks that are
  // missing, MK_ERROR_REMOTE one that no longer listens; the reason of `abort` when it is raised. Called once;
  // the caller keeps the object until it knows that the peers have come to an end too.
  Result<std::vector<FileDescriptor>> swap(int mine, std::span<const DescriptorPeer> peers, AbortToken& abort,
                                           Deadline deadline);

 private:
  DescriptorExchange(int rank, DescriptorAddress address, FileDescriptor listener,
                     std::vector<FileDescriptor> senders)
      : rank_(rank), address_(address), listener_(std::move(listener)), senders_(std::move(senders)) {}

  int rank_;
  DescriptorAddress address_;
  FileDescriptor listener_;
  std::vector<FileDescriptor> senders_;  // one a peer, not connected
  // Accepted, nothing said yet. After a failure they stay open: a peer that is just sending is not to take this
  // rank for dead, but to hear of the failure through the Exchange.
  std::deque<FileDescriptor> accepted_;
};

}  // namespace mk
