// SPDX-License-Identifier: MIT
#include "connect.h"

#include <sys/random.h>

#include <cstring>
#include <optional>

#include "../../lib/env.h"
#include "../../lib/network_interface.h"
#include "../agreement.h"

namespace mk::ofi {
namespace {

Result<SocketAddress> choose_address(const std::optional<SocketAddress>& target) {
  auto interfaces = list_network_interfaces();
  if (!interfaces.ok()) return interfaces.status();
  auto chosen = choose_network_interface(interfaces.value(), env::text("MK_SOCKET_IFNAME"), target);
  if (!chosen.ok()) return chosen.status();
  return chosen->address;
}

// Rank 0 takes the best of its interfaces; the others, of theirs, the best to reach that one.
Result<SocketAddress> choose_near(const std::vector<Bytes>& addresses, const Topology& topology,
                                  const SocketAddress& mine) {
  if (topology.rank == 0) return mine;
  SocketAddress root;
  if (addresses[0].size() != sizeof root) {
    return Status(MK_ERROR_NETWORK, format("ofi: rank 0 sent an address of %zu bytes", addresses[0].size()));
  }
  std::memcpy(&root, addresses[0].data(), sizeof root);
  return choose_address(root);
}

Result<Bytes> make_card(const Fabric& fabric, const Token& token) {
  auto name = fabric.name();
  if (!name.ok()) return name.status();
  Card card{};
  card.token = token;
  std::strncpy(card.provider, fabric.provider(), sizeof card.provider - 1);
  Bytes bytes(sizeof card);
  std::memcpy(bytes.data(), &card, sizeof card);
  bytes.insert(bytes.end(), name->begin(), name->end());
  return bytes;
}

Status read_card(const Bytes& bytes, int rank, const Topology& topology, Opened& opened) {
  Card card;
  if (bytes.size() <= sizeof card || bytes.size() > sizeof card + kMaxAddressBytes) {
    return Status(MK_ERROR_NETWORK, format("ofi: rank %d sent a card of %zu bytes", rank, bytes.size()));
  }
  std::memcpy(&card, bytes.data(), sizeof card);
  card.provider[sizeof card.provider - 1] = '\0';
  if (std::strcmp(card.provider, opened.fabric->provider()) != 0) {
    return Status(MK_ERROR_MISMATCH, format("ofi: rank %d uses libfabric's provider %s, rank %d %s; set "
                                            "MK_OFI_PROVIDER to the same on every rank",
                                            topology.rank, opened.fabric->provider(), rank, card.provider));
  }
  if (topology.same_node(rank, topology.rank)) return {};
  auto address = opened.fabric->add_peer(Bytes(bytes.begin() + sizeof card, bytes.end()));
  if (!address.ok()) return address.status();
  opened.peers[static_cast<size_t>(rank)] = {address.value(), card.token};
  return {};
}

}  // namespace

Result<Opened> open_endpoint(const Library& library, const Topology& topology, Exchange& exchange,
                             const Status& ready, size_t operations, Deadline deadline) {
  auto first = !ready.ok()          ? Result<SocketAddress>(ready)
               : topology.rank == 0 ? choose_address(std::nullopt)
                                    : Result<SocketAddress>(SocketAddress{});
  const SocketAddress mine = first.ok() ? first.value() : SocketAddress{};
  auto addresses = agree(first.status(), std::as_bytes(std::span(&mine, 1)), exchange, deadline,
                         "choosing network interfaces (ofi)");
  if (!addresses.ok()) return addresses.status();
  // What fails from here on is told to the others in the next step.
  auto source = choose_near(addresses.value(), topology, mine);
  Status status = source.status();
  Opened opened;
  opened.peers.resize(static_cast<size_t>(topology.nranks));
  Bytes card;
  if (status.ok() &&
      getrandom(opened.token.data(), opened.token.size(), 0) != static_cast<ssize_t>(opened.token.size())) {
    status = Status(MK_ERROR_SYSTEM, "ofi: cannot get random bytes");
  }
  if (status.ok()) {
    auto fabric = Fabric::open(library, env::text("MK_OFI_PROVIDER"), source.value(), operations);
    status = fabric.status();
    if (fabric.ok()) opened.fabric = fabric.take();
  }
  if (status.ok()) {
    auto made = make_card(*opened.fabric, opened.token);
    status = made.status();
    if (made.ok()) card = made.take();
  }
  auto cards = agree(status, card, exchange, deadline, "introducing libfabric endpoints");
  if (!cards.ok()) return cards.status();
  for (int rank = 0; rank < topology.nranks && status.ok(); ++rank) {
    status = read_card(cards.value()[static_cast<size_t>(rank)], rank, topology, opened);
  }
  if (auto read = agree(status, {}, exchange, deadline, "reading libfabric addresses"); !read.ok()) {
    return read.status();
  }
  return opened;
}

}  // namespace mk::ofi
