// SPDX-License-Identifier: MIT
#include "registration.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "../../lib/wire.h"
#include "../region_table.h"
#include "gpu_memory.h"

namespace mk::verbs {
namespace {

constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
// The driver exports whole pages of the host's size.
uint64_t page_bytes() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

Registration::~Registration() {
  for (auto& [region, entry] : entries_) deregister(entry);
}

void Registration::deregister(Entry& entry) const {
  for (ibv_mr* mr : entry.mrs) nics_.front()->library.deregister_mr(mr);
  entry.mrs.clear();
}

Result<ibv_mr*> Registration::register_range(const Nic& nic, std::byte* base, size_t bytes, bool gpu) const {
  std::string hint = "is the limit of locked memory (ulimit -l) low?";
  if (gpu && nic.library.register_dmabuf_mr != nullptr) {
    const auto address = reinterpret_cast<uintptr_t>(base);
    const uint64_t page = page_bytes(), before = address % page;
    const uint64_t whole = (before + bytes + page - 1) / page * page;
    auto exported = export_dma_buf(base - before, whole);
    if (exported.ok()) {
      ibv_mr* mr = nic.library.register_dmabuf_mr(nic.pd, before, bytes, address, exported->get(), kAccess);
      if (mr != nullptr) return mr;
      hint = format("through dma-buf: %s", std::strerror(errno));
    } else {
      hint = exported.status().sentence();
    }
  }
  ibv_mr* mr = nic.library.register_mr(nic.pd, base, bytes, kAccess);
  if (mr == nullptr) {
    const int error = errno;
    const char* const module = gpu && !has_peer_memory()
                                   ? "; GPU memory, and nvidia_peermem is not loaded (modprobe nvidia-peermem)"
                                   : "";
    return Status(MK_ERROR_SYSTEM,
                  format("%s cannot register %zu bytes at %p: %s; %s%s", nic.text().c_str(), bytes,
                         static_cast<void*>(base), std::strerror(error), hint.c_str(), module));
  }
  return mr;
}

Result<Bytes> Registration::add(uint32_t region, std::byte* base, size_t bytes) {
  Entry entry;
  auto keys = std::make_shared<RegionKeys>();
  keys->base = base;
  keys->bytes = bytes;
  keys->lkeys.resize(nics_.size());
  WireWriter writer;
  writer.integer(reinterpret_cast<uint64_t>(base));
  writer.integer(static_cast<uint32_t>(nics_.size()));
  const size_t per_nic = (bytes + kRegistrationBytes - 1) / kRegistrationBytes;
  entry.mrs.reserve(per_nic * nics_.size());
  const bool gpu = bytes > 0 && is_gpu_memory(base);
  for (size_t n = 0; n < nics_.size(); ++n) {
    for (size_t i = 0; i < per_nic; ++i) {
      const uint64_t offset = i * kRegistrationBytes;
      auto mr =
          register_range(*nics_[n], base + offset, std::min<uint64_t>(bytes - offset, kRegistrationBytes), gpu);
      if (!mr.ok()) {
        deregister(entry);
        return mr.status();
      }
      entry.mrs.push_back(mr.value());
      keys->lkeys[n].push_back(mr.value()->lkey);
      writer.integer(mr.value()->rkey);
    }
  }
  entry.keys = std::move(keys);
  std::lock_guard lock(mutex_);
  entries_[region] = std::move(entry);
  return writer.take();
}

Status Registration::set_peer_keys(uint32_t region, std::span<const Bytes> keys,
                                   std::span<const size_t> peer_nics) {
  std::vector<RemoteRegion> peers(keys.size());
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    WireReader reader(keys[rank]);
    peers[rank].base = reader.integer<uint64_t>();
    const uint32_t num_nics = reader.integer<uint32_t>();
    const size_t rest = keys[rank].size() < 12 ? 0 : (keys[rank].size() - 12) / sizeof(uint32_t);
    // A rank of this node is not written to: its key may be anything.
    if (peer_nics[rank] == 0) continue;
    if (num_nics != peer_nics[rank] || rest % num_nics != 0) {
      return Status(MK_ERROR_NETWORK,
                    format("region %u: rank %zu sent keys for %u NICs in %zu bytes, expected %zu NICs", region,
                           rank, num_nics, keys[rank].size(), peer_nics[rank]));
    }
    peers[rank].rkeys.resize(num_nics);
    for (auto& list : peers[rank].rkeys) {
      for (size_t i = 0; i < rest / num_nics; ++i) list.push_back(reader.integer<uint32_t>());
    }
    if (!reader.complete()) {
      return Status(MK_ERROR_NETWORK,
                    format("region %u: rank %zu sent %zu bytes of keys", region, rank, keys[rank].size()));
    }
  }
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(region);
  if (found == entries_.end()) return Status(MK_ERROR_INTERNAL, format("region %u has no keys here", region));
  auto known = std::make_shared<RegionKeys>(*found->second.keys);
  known->peers = std::move(peers);
  found->second.keys = std::move(known);
  return {};
}

void Registration::remove(uint32_t region) {
  Entry entry;
  {
    std::lock_guard lock(mutex_);
    const auto found = entries_.find(region);
    if (found == entries_.end()) return;
    entry = std::move(found->second);
    entries_.erase(found);
  }
  // Slow, and the proxy need not wait for it.
  deregister(entry);
}

std::shared_ptr<const RegionKeys> Registration::find(uint32_t region) const {
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(region);
  return found == entries_.end() ? nullptr : found->second.keys;
}

}  // namespace mk::verbs
