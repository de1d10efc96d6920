// SPDX-License-Identifier: MIT
// What a kind of memory (host, CUDA) does for SymmetricMemory; the protocol between the ranks is the same for
// all.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "abort_token.h"
#include "deadline.h"
#include "exchange.h"
#include "file_descriptor.h"
#include "status.h"
#include "symmetric_memory.h"
#include "topology.h"

namespace mk {

// For sentences.
inline double mebibytes(size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// The memory of one rank as this process addresses it: an address range reserved once, its start filled. The
// destructor unmaps everything.
class MemoryRange {
 public:
  virtual ~MemoryRange() = default;

  virtual std::byte* base() const = 0;
  virtual size_t reserved_bytes() const = 0;
  // Makes `bytes` of new zeroed memory, maps it at `offset`, and returns a descriptor that other processes can
  // map.
  virtual Result<FileDescriptor> append(size_t offset, size_t bytes, AbortToken& abort, Deadline deadline) = 0;
  // Maps at `offset` what the append of another process returned.
  virtual Status append_shared(size_t offset, size_t bytes, const FileDescriptor& memory) = 0;
  // Unmaps everything from `offset` on; the addresses stay reserved.
  virtual void truncate(size_t offset) = 0;
};

class MemoryBackend {
 public:
  virtual ~MemoryBackend() = default;

  // Divides every growth; a power of two. The largest of all ranks' is used.
  virtual size_t granularity() const = 0;
  // What the ranks of the node must know of this one, at most kMaxDescriptionBytes.
  virtual Bytes description() const = 0;
  static constexpr size_t kMaxDescriptionBytes = 256;

  // The range of this rank.
  virtual Result<std::shared_ptr<MemoryRange>> reserve_own() = 0;
  // Called once for every other rank of the node, after reserve_own: checks that this rank can reach that one's
  // memory. `here`: that rank is in this process, and will use the range of reserve_own too.
  virtual Status meet(int peer_rank, std::span<const std::byte> description, bool here) = 0;
  // A range for the memory of a rank of another process.
  virtual Result<std::shared_ptr<MemoryRange>> reserve_peer(int peer_rank,
                                                            std::span<const std::byte> description) = 0;
};

// Collective. Errors as those of the functions in symmetric_memory.h.
Result<std::unique_ptr<SymmetricMemory>> make_symmetric_memory(const Topology& topology, Exchange& exchange,
                                                               AbortToken& abort,
                                                               std::unique_ptr<MemoryBackend> backend,
                                                               Deadline deadline);

}  // namespace mk
