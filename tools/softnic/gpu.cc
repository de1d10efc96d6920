// SPDX-License-Identifier: MIT
// GPU memory at either end of a request: the receiving NIC's copies run on the GPU's copy engines, and a
// request is placed once its mark has passed.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <tuple>
#include <utility>

#include "memory.h"
#include "nic.h"

namespace softnic {

// Before the first request that reads a region of GPU memory, another process learns how to map it.
void Nic::export_memory(const std::shared_ptr<Link>& link, const WorkRequest& request) {
  if (link->inbox != nullptr || request.is_inline) return;
  for (uint32_t index = 0; index < request.num_segments; ++index) {
    const Segment& segment = request.payload.segments[index];
    MemoryRegion* const region = segment.bytes > 0 ? find_memory(segment.key) : nullptr;
    if (region == nullptr || region->device < 0 || !link->exported.insert(segment.key).second) continue;
    if (region->exports == nullptr) {
      copier_.activate(region->device);
      region->exports =
          std::make_unique<CudaExports>(reinterpret_cast<uint64_t>(region->addr), region->length, true);
    }
    for (const CudaExport& exported : region->exports->list()) {
      Packet packet;
      packet.kind = PacketKind::export_memory;
      packet.source_endpoint = wire_->endpoint();
      packet.rkey = segment.key;
      packet.is_inline = 1;
      packet.bytes = sizeof(exported);
      packet.size = kPacketHead + packet.bytes;
      std::memcpy(packet.payload.inline_data, &exported, sizeof(exported));
      wire_->send(link, packet, exported.fd);
    }
  }
}

void Nic::on_export(const std::shared_ptr<Link>& link, const Packet& packet) {
  CudaExport exported;
  if (packet.is_inline == 0 || packet.bytes != sizeof(exported) || link->inbox != nullptr) return;
  std::memcpy(&exported, packet.payload.inline_data, sizeof(exported));
  const int descriptor = exported.fd >= 0 ? link->take_descriptor() : -1;
  // A context has to be current for the legacy handles: that of the GPU whose memory this NIC serves.
  int device = 0;
  for (const auto& entry : memory_) device = std::max(device, entry.second->device);
  std::shared_ptr<CudaImports>& imports = link->imports[packet.rkey];
  if (imports == nullptr) imports = std::make_shared<CudaImports>();
  // What cannot be mapped shows when a request reads it.
  if (cuda_is_loaded() && copier_.activate(device)) imports->add(exported, false, descriptor);
  if (descriptor >= 0) close(descriptor);
}

bool Nic::forget_exports() {
  const std::vector<uint32_t> keys = std::exchange(forgotten_, {});
  for (const uint32_t key : keys) {
    Packet packet;
    packet.size = kPacketHead;
    packet.kind = PacketKind::forget_memory;
    packet.source_endpoint = wire_->endpoint();
    packet.rkey = key;
    wire_->broadcast(packet);
  }
  return !keys.empty();
}

// All pieces at once: the copies of a stream run in order, and the mark behind them tells the end.
void Nic::place_on_gpu(const std::shared_ptr<Arrival>& arrival, MemoryRegion& region) {
  const Packet& packet = arrival->packet;
  const uint64_t target = reinterpret_cast<uint64_t>(region.addr) + (packet.remote_address - region.iova);
  arrival->device = region.device;
  // The driver answers questions about addresses in a context only.
  if (region.device >= 0) copier_.activate(region.device);
  for (uint32_t index = 0; arrival->device < 0 && index < packet.num_segments; ++index) {
    arrival->device = cuda_device_of(packet.payload.segments[index].address);
  }
  // Another process's GPU memory, on its way to host memory: it is mapped for every GPU.
  if (arrival->device < 0) arrival->device = 0;
  bool started = true;
  if (arrival->pieces.empty()) started = copy_range(*arrival, target, 0, packet.bytes);
  for (const uint64_t offset : arrival->pieces) {
    started = started && copy_range(*arrival, target, offset, arrival->piece_length(offset));
  }
  if (!started) arrival->refusal = IBV_WC_REM_OP_ERR;
  arrival->placed = arrival->num_pieces();
  arrival->mark = copier_.next_mark(arrival->device);
  unmarked_.insert(arrival->device);
  arrival->region = &region;
  ++region.copies;
  copying_.push_back(arrival);
}

// One mark for all copies that a turn has started.
void Nic::mark_copies() {
  for (const int device : std::exchange(unmarked_, {})) {
    const uint64_t mark = copier_.next_mark(device);
    if (copier_.mark(device)) continue;
    std::erase_if(copying_, [&](const std::shared_ptr<Arrival>& arrival) {
      if (arrival->device != device || arrival->mark != mark) return false;
      arrival->refusal = IBV_WC_REM_OP_ERR;
      end_copy(*arrival);
      return true;
    });
  }
}

void Nic::end_copy(Arrival& arrival) {
  arrival.mark = 0;
  arrival.staged.clear();
  --arrival.region->copies;
  changed_.notify_all();
}

// Starts the copies of payload bytes [offset, offset + bytes).
bool Nic::copy_range(Arrival& arrival, uint64_t target, uint64_t offset, uint64_t bytes) {
  const Packet& packet = arrival.packet;
  target += offset;
  if (packet.is_inline != 0) {
    return copier_.start(arrival.device, target,
                         reinterpret_cast<uint64_t>(packet.payload.inline_data) + offset, bytes);
  }
  for (uint32_t index = 0; index < packet.num_segments && bytes > 0; ++index) {
    Segment segment = packet.payload.segments[index];
    if (offset >= segment.bytes) {
      offset -= segment.bytes;
      continue;
    }
    segment.address += offset;
    segment.bytes = static_cast<uint32_t>(std::min<uint64_t>(bytes, segment.bytes - offset));
    offset = 0;
    uint64_t source = segment.address;
    if ((packet.gpu_segments >> index & 1) != 0) {
      source = map_source(arrival, segment);
    } else if (arrival.link->inbox == nullptr) {
      std::vector<std::byte>& staged = arrival.staged.emplace_back(segment.bytes);
      const int error = fetch_segment(*arrival.link, segment.address, staged.data(), staged.size());
      source = error == 0 ? reinterpret_cast<uint64_t>(staged.data()) : 0;
    }
    if (source == 0 || !copier_.start(arrival.device, target, source, segment.bytes)) return false;
    target += segment.bytes;
    bytes -= segment.bytes;
  }
  return bytes == 0;
}

// The address under which the GPU that copies finds a segment; 0: none.
uint64_t Nic::map_source(Arrival& arrival, const Segment& segment) {
  std::shared_ptr<CudaImports>& imports = arrival.link->imports[segment.key];
  if (imports == nullptr) imports = std::make_shared<CudaImports>();
  auto [address, bytes] = imports->translate(segment.address);
  if (address != 0 || arrival.link->inbox == nullptr) return bytes >= segment.bytes ? address : 0;
  const int device = cuda_device_of(segment.address);
  if (device == arrival.device || imports->direct) return segment.address;
  // Memory of another GPU in this process: an allocation of the virtual memory interface is reachable only from
  // the GPUs that its owner named, so it gets a second address; other memory is reached by peer access.
  copier_.activate(device);  // which reaches it
  const CudaExports exports(segment.address, segment.bytes, false);
  for (const CudaExport& exported : exports.list()) imports->add(exported, true, -1);
  std::tie(address, bytes) = imports->translate(segment.address);
  if (address != 0) return bytes >= segment.bytes ? address : 0;
  imports->direct = true;
  copier_.befriend(arrival.device, device);
  return segment.address;
}

bool Nic::poll_copies() {
  if (copying_.empty()) return false;
  mark_copies();
  std::set<int> running;  // devices: what comes later there is running, too
  std::erase_if(copying_, [&](const std::shared_ptr<Arrival>& arrival) {
    if (running.count(arrival->device) != 0) return false;
    const CudaCopier::Progress progress = copier_.passed(arrival->device, arrival->mark);
    if (progress == CudaCopier::Progress::running) {
      running.insert(arrival->device);
      return false;
    }
    if (progress == CudaCopier::Progress::failed) arrival->refusal = IBV_WC_REM_OP_ERR;
    end_copy(*arrival);
    return true;
  });
  return true;
}

bool Nic::is_copying(const QueuePair* qp) const {
  return std::any_of(copying_.begin(), copying_.end(), [&](const std::shared_ptr<Arrival>& arrival) {
    return arrival->packet.target_qp == qp->number();
  });
}

void Nic::settle_copies() {
  if (copying_.empty()) return;
  copier_.drain();
  poll_copies();
}

// A read's bytes, to or from `region`, the other end being host memory.
void Nic::copy_small(const MemoryRegion* region, void* target, const void* source, size_t bytes) {
  if (region->device < 0) {
    std::memcpy(target, source, bytes);
  } else {
    copier_.copy(region->device, reinterpret_cast<uint64_t>(target), reinterpret_cast<uint64_t>(source), bytes);
  }
}

}  // namespace softnic
