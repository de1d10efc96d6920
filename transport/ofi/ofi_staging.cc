// SPDX-License-Identifier: MIT
// Memory of a GPU: both ends of the way through pinned memory (ofi_transport.h).
#include <algorithm>
#include <cstring>
#include <thread>

#include "ofi_transport.h"

namespace mk::ofi {
namespace {

// For copies into a region that is being removed; its owner has seen all of them announced as complete.
constexpr std::chrono::milliseconds kLongestCopy{5000};

}  // namespace

size_t OfiTransport::lane(int rank, uint32_t slot, bool landing) const {
  return (static_cast<size_t>(rank) * 2 + (landing ? 1 : 0)) * kStagesPerPeer + slot;
}

Status OfiTransport::open_staging() {
  if (staging_ != nullptr) return {};
  auto allocated = copies_->allocate(2 * staging_half());
  if (!allocated.ok()) return allocated.status();
  auto memory = fabric_->register_memory(allocated.value(), 2 * staging_half(), FI_WRITE | FI_REMOTE_WRITE);
  if (!memory.ok()) return memory.status();
  staging_memory_ = memory.take();
  staging_ = allocated.value();
  return {};
}

bool OfiTransport::is_staged(const Put& put, int rank) const {
  if (put.source_region >= regions_.size() || put.target_region >= regions_.size()) return false;
  const LocalRegion& target = regions_[put.target_region];
  return regions_[put.source_region].on_device ||
         (!target.keys.empty() && target.keys[static_cast<size_t>(rank)].staged != 0);
}

// Gives pieces of the put to stages that are free. Whether all of it has been given.
bool OfiTransport::stage_pieces(int rank, uint32_t number) {
  Peer& peer = peer_of(rank);
  OutgoingPut& outgoing = peer.puts[number];
  for (uint32_t index = 0; index < kStagesPerPeer && outgoing.posted < outgoing.put.bytes; ++index) {
    Stage& stage = peer.stages[index];
    if (stage.state != Stage::State::free) continue;
    stage = {Stage::State::ready, number, outgoing.posted,
             std::min(outgoing.put.bytes - outgoing.posted, kStageBytes)};
    if (regions_[outgoing.put.source_region].on_device) {
      const Status status = copies_->start_read(lane(rank, index, false), staging_ + lane_offset(rank, index),
                                                outgoing.put.source + stage.offset, stage.bytes);
      if (!status.ok()) {
        fail(rank, MK_ERROR_INTERNAL, "reading a GPU's memory failed: " + status.sentence());
        return false;
      }
      stage.state = Stage::State::copying;
    }
    outgoing.posted += stage.bytes;
    ++outgoing.pending;
  }
  return outgoing.posted == outgoing.put.bytes;
}

void OfiTransport::advance_stages(int rank) {
  Peer& peer = peer_of(rank);
  for (uint32_t index = 0; index < kStagesPerPeer && !peer.failed; ++index) {
    Stage& stage = peer.stages[index];
    if (stage.state == Stage::State::copying) {
      auto done = copies_->done(lane(rank, index, false));
      if (!done.ok())
        return fail(rank, MK_ERROR_INTERNAL, "reading a GPU's memory failed: " + done.status().sentence());
      if (done.value()) stage.state = Stage::State::ready;
    }
    if (stage.state == Stage::State::ready && write_stage(rank, index)) stage.state = Stage::State::writing;
  }
}

bool OfiTransport::write_stage(int rank, uint32_t index) {
  Peer& peer = peer_of(rank);
  const Stage& stage = peer.stages[index];
  const Put& put = peer.puts[stage.put].put;
  if (peer.free_writes.empty()) return false;
  const LocalRegion& source = regions_[put.source_region];
  const LocalRegion& target = regions_[put.target_region];
  if (target.keys.empty() || (!source.on_device && !source.memory)) {
    fail(rank, MK_ERROR_INTERNAL,
         format("a put from region %u to region %u was under way when one of them was deregistered",
                put.source_region, put.target_region));
    return false;
  }
  const RegionKey& key = target.keys[static_cast<size_t>(rank)];
  const uint64_t to =
      key.base + (key.staged != 0 ? lane_offset(rank_, index) : put.target_offset + stage.offset);
  Operation& operation = *peer.free_writes.back();
  operation.put = stage.put;
  operation.stage = index;
  const std::byte* from = source.on_device ? staging_ + lane_offset(rank, index) : put.source + stage.offset;
  fid_mr* memory = source.on_device ? staging_memory_.get() : source.memory.get();
  if (post_write(rank, from, memory, {to, stage.bytes, key.key}, operation) != 0) return false;
  peer.free_writes.pop_back();
  ++peer.pending;
  return true;
}

void OfiTransport::stage_written(int rank, uint32_t index) {
  Peer& peer = peer_of(rank);
  Stage& stage = peer.stages[index];
  const Put& put = peer.puts[stage.put].put;
  if (regions_[put.target_region].keys.empty() ||
      regions_[put.target_region].keys[static_cast<size_t>(rank)].staged == 0) {
    return finish_stage(rank, index);
  }
  stage.state = Stage::State::announced;
  const uint64_t offset = put.target_offset + stage.offset;
  const Landed landed{index,
                      put.target_region,
                      put.target_generation,
                      stage.bytes,
                      static_cast<uint32_t>(offset),
                      static_cast<uint32_t>(offset >> 32)};
  std::vector<uint32_t> words(kLandedWords);
  std::memcpy(words.data(), &landed, sizeof landed);
  peer.notices.push_back({MessageKind::landed, std::move(words)});
}

void OfiTransport::finish_stage(int rank, uint32_t index) {
  Peer& peer = peer_of(rank);
  Stage& stage = peer.stages[index];
  stage.state = Stage::State::free;
  OutgoingPut& outgoing = peer.puts[stage.put];
  --outgoing.pending;
  if (outgoing.pending == 0 && outgoing.posted == outgoing.put.bytes) bytes_in_place(peer, stage.put);
}

Status OfiTransport::accept_placed(int rank, const Message& message) {
  const uint32_t slot = message.words[0];
  if (slot >= kStagesPerPeer || peer_of(rank).stages[slot].state != Stage::State::announced) {
    return Status(MK_ERROR_NETWORK, format("it has placed what is in slot %u, where nothing was", slot));
  }
  finish_stage(rank, slot);
  return {};
}

Status OfiTransport::accept_landed(int rank, const Message& message) {
  Landed piece;
  std::memcpy(&piece, message.words, sizeof piece);
  const uint64_t offset = static_cast<uint64_t>(piece.offset_high) << 32 | piece.offset_low;
  if (piece.slot >= kStagesPerPeer || piece.bytes > kStageBytes || piece.bytes == 0) {
    return Status(MK_ERROR_NETWORK, format("a piece of %u bytes in slot %u", piece.bytes, piece.slot));
  }
  Landing& landing = peer_of(rank).landings[piece.slot];
  if (landing.copying || piece.region >= regions_.size() || !regions_[piece.region].on_device) {
    return Status(
        MK_ERROR_NETWORK,
        format("a piece in slot %u for region %u: the slot is taken or the region not in a GPU's memory",
               piece.slot, piece.region));
  }
  MK_RETURN_IF_ERROR(region_table_.check_put(piece.region, piece.generation, offset, piece.bytes));
  landing = {true, piece};
  return copies_->start_write(lane(rank, piece.slot, true), regions_[piece.region].base + offset,
                              staging_ + staging_half() + lane_offset(rank, piece.slot), piece.bytes);
}

void OfiTransport::advance_landings(int rank) {
  Peer& peer = peer_of(rank);
  for (uint32_t slot = 0; slot < kStagesPerPeer; ++slot) {
    Landing& landing = peer.landings[slot];
    if (!landing.copying) continue;
    auto done = copies_->done(lane(rank, slot, true));
    if (!done.ok())
      return fail(rank, MK_ERROR_INTERNAL, "writing to a GPU's memory failed: " + done.status().sentence());
    if (!done.value()) continue;
    landing.copying = false;
    peer.notices.push_back({MessageKind::placed, {slot}});
  }
}

// Only a put that its owner did not wait for is still being copied.
void OfiTransport::wait_for_landings(uint32_t region) {
  const Deadline deadline = Deadline::after(kLongestCopy);
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    for (uint32_t slot = 0; slot < kStagesPerPeer; ++slot) {
      Landing& landing = peers_[rank].landings[slot];
      if (!landing.copying || landing.piece.region != region) continue;
      for (;;) {
        auto done = copies_->done(lane(static_cast<int>(rank), slot, true));
        if (!done.ok() || done.value() || deadline.passed()) break;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }
}

bool OfiTransport::copies_under_way() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    return std::any_of(peer.landings.begin(), peer.landings.end(),
                       [](const Landing& l) { return l.copying; }) ||
           std::any_of(peer.stages.begin(), peer.stages.end(),
                       [](const Stage& stage) { return stage.state == Stage::State::copying; });
  });
}

}  // namespace mk::ofi
