// SPDX-License-Identifier: MIT
// Set-up in three collective steps: who has which NICs; queue pairs and mailboxes; everyone can receive.
#include <cerrno>
#include <cstring>

#include "../../lib/wire.h"
#include "../agreement.h"
#include "verbs_transport.h"

namespace mk::verbs {
namespace {

constexpr size_t kMostText = 64;

}  // namespace

Status VerbsTransport::system_error(const Nic& nic, const std::string& what, int error) const {
  return Status(MK_ERROR_SYSTEM,
                format("%s: %s: cannot %s: %s", name_, nic.text().c_str(), what.c_str(), std::strerror(error)));
}

NicCard VerbsTransport::card_of(const Nic& nic) const {
  return {nic.port_attributes.link_layer,
          nic.gid.kind,
          static_cast<uint8_t>(nic.global),
          static_cast<uint8_t>(nic.port_attributes.active_mtu),
          nic.port_attributes.lid,
          nic.gid.gid,
          nic.text()};
}

Status VerbsTransport::read_cards(const std::vector<Bytes>& blocks) {
  for (size_t rank = 0; rank < blocks.size(); ++rank) {
    WireReader reader(blocks[rank]);
    std::vector<NicCard> cards(reader.integer<uint8_t>() % (kMaxLinks + 1));
    for (NicCard& card : cards) {
      card.link_layer = reader.integer<uint8_t>();
      card.gid_kind = static_cast<GidKind>(reader.integer<uint8_t>());
      card.global = reader.integer<uint8_t>();
      card.mtu = reader.integer<uint8_t>();
      card.lid = reader.integer<uint16_t>();
      reader.array(card.gid);
      card.text = reader.text(kMostText);
    }
    if (!reader.complete() || cards.empty()) {
      return Status(MK_ERROR_NETWORK, format("%s: rank %zu describes its NICs in %zu bytes that make no sense",
                                             name_, rank, blocks[rank].size()));
    }
    cards_.push_back(std::move(cards));
  }
  return {};
}

// The same answer on every rank: two NICs that are to speak with each other must be of one kind.
Status VerbsTransport::check_cards() const {
  for (size_t a = 0; a < cards_.size(); ++a) {
    for (size_t b = a + 1; b < cards_.size(); ++b) {
      if (topology_.same_node(static_cast<int>(a), static_cast<int>(b))) continue;
      for (uint32_t link = 0; link < std::max(cards_[a].size(), cards_[b].size()); ++link) {
        const NicCard& one = cards_[a][link % cards_[a].size()];
        const NicCard& other = cards_[b][link % cards_[b].size()];
        if (one.link_layer == other.link_layer && one.gid_kind == other.gid_kind) continue;
        return Status(
            MK_ERROR_UNSUPPORTED,
            format("%s of rank %zu is %s and %s of rank %zu is %s; MK_IB_HCA and MK_IB_GID_INDEX choose "
                   "others",
                   one.text.c_str(), a, name_of(one.gid_kind), other.text.c_str(), b, name_of(other.gid_kind)));
      }
    }
  }
  return {};
}

void VerbsTransport::make_links() {
  const auto& mine = cards_[static_cast<size_t>(rank_)];
  peer_nics_.assign(peers_.size(), 0);
  for (int rank = 0; rank < nranks(); ++rank) {
    if (topology_.same_node(rank, rank_)) continue;
    const size_t r = static_cast<size_t>(rank);
    peer_nics_[r] = cards_[r].size();
    const size_t count = std::max(mine.size(), cards_[r].size());
    for (uint32_t index = 0; index < count; ++index) {
      Link& link = peers_[r].links.emplace_back();
      link.peer = rank;
      link.index = index;
      link.nic = index % mine.size();
      link.peer_nic = index % cards_[r].size();
    }
  }
}

Status VerbsTransport::prepare_nics() {
  // Completions of everything that can be under way at once: a completion queue that overflows is lost.
  std::vector<uint32_t> depths(nics_.size(), 64);
  for (const Peer& peer : peers_) {
    for (const Link& link : peer.links) depths[link.nic] += kReceivesPerLink + kSendsPerLink;
  }
  // First what is written without bytes of a put, then what receives nothing, then a mailbox a link.
  scratch_.assign((2 + peers_.size() * kMaxLinks) * kScratchBytes, std::byte{});
  for (size_t nic = 0; nic < nics_.size(); ++nic) {
    MK_RETURN_IF_ERROR(nics_[nic]->create_queues(depths[nic]));
    ibv_mr* mr = nics_[nic]->library.register_mr(nics_[nic]->pd, scratch_.data(), scratch_.size(),
                                                 IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    if (mr == nullptr) return system_error(*nics_[nic], "register memory", errno);
    scratch_mrs_.push_back(mr);
  }
  stash_.resize(nics_.size());
  registration_ = std::make_unique<Registration>(nics_);
  return {};
}

// For every rank its links, in order.
Bytes VerbsTransport::describe_links() const {
  WireWriter writer;
  for (const Peer& peer : peers_) {
    for (const Link& link : peer.links) {
      const QueueCard card = describe(link);
      const size_t mailbox = 2 + static_cast<size_t>(link.peer) * kMaxLinks + link.index;
      writer.integer(card.qpn).integer(card.psn).integer(card.qkey);
      writer.integer(reinterpret_cast<uint64_t>(scratch_.data()) + mailbox * kScratchBytes);
      writer.integer(scratch_mrs_[link.nic]->rkey);
    }
  }
  return writer.take();
}

Status VerbsTransport::connect_links(const std::vector<Bytes>& blocks) {
  constexpr size_t kCardBytes = 24;
  for (Peer& peer : peers_) {
    if (peer.links.empty()) continue;
    const size_t rank = static_cast<size_t>(peer.links.front().peer);
    // Before the cards for this rank come those for lower ranks of other nodes than the peer's.
    size_t before = 0;
    for (int other = 0; other < rank_; ++other) {
      const size_t o = static_cast<size_t>(other);
      if (!topology_.same_node(other, static_cast<int>(rank)))
        before += std::max(cards_[rank].size(), cards_[o].size());
    }
    if (blocks[rank].size() < (before + peer.links.size()) * kCardBytes) {
      return Status(MK_ERROR_NETWORK, format("%s: rank %zu describes its queue pairs in %zu bytes, too few",
                                             name_, rank, blocks[rank].size()));
    }
    const std::span<const std::byte> block(blocks[rank]);
    WireReader reader(block.subspan(before * kCardBytes));
    for (Link& link : peer.links) {
      QueueCard card{};
      card.qpn = reader.integer<uint32_t>();
      card.psn = reader.integer<uint32_t>();
      card.qkey = reader.integer<uint32_t>();
      link.mailbox = reader.integer<uint64_t>();
      link.mailbox_rkey = reader.integer<uint32_t>();
      link.remote_qpn = card.qpn;
      link.remote_qkey = card.qkey;
      MK_RETURN_IF_ERROR(connect_link(link, cards_[rank][link.peer_nic], card));
    }
  }
  return {};
}

Status VerbsTransport::connect(Exchange& exchange, std::vector<std::unique_ptr<Nic>> nics, Status ready,
                               Deadline deadline) {
  nics_ = std::move(nics);
  const auto mode = signal_mode();
  if (ready.ok() && !mode.ok()) ready = mode.status();
  if (mode.ok()) mode_ = mode.value();
  const std::string name = name_;
  WireWriter writer;
  writer.integer(static_cast<uint8_t>(nics_.size()));
  for (const auto& nic : nics_) {
    const NicCard card = card_of(*nic);
    writer.integer(card.link_layer).integer(static_cast<uint8_t>(card.gid_kind)).integer(card.global);
    writer.integer(card.mtu)
        .integer(card.lid)
        .raw(std::as_bytes(std::span(card.gid)))
        .text(card.text, kMostText);
  }
  auto cards = agree(ready, writer.take(), exchange, deadline, (name + ": introducing NICs").c_str());
  if (!cards.ok()) return cards.status();
  Status status = read_cards(cards.value());
  if (status.ok()) MK_RETURN_IF_ERROR(check_cards());
  if (status.ok()) make_links();
  if (status.ok()) status = prepare_nics();
  if (status.ok()) status = make_queues();
  auto links = agree(status, status.ok() ? describe_links() : Bytes{}, exchange, deadline,
                     (name + ": introducing queue pairs").c_str());
  if (!links.ok()) return links.status();
  status = connect_links(links.value());
  auto connected = agree(status, {}, exchange, deadline, (name + ": connecting queue pairs").c_str());
  return connected.status();
}

}  // namespace mk::verbs
