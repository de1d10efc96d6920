// SPDX-License-Identifier: MIT
// Memory that every rank of a node can address: an address range reserved once, to which growth appends.
#pragma once

#include <cstddef>
#include <memory>

#include "abort_token.h"
#include "exchange.h"
#include "topology.h"

namespace mk {

class SymmetricMemory {
 public:
  virtual ~SymmetricMemory() = default;

  // Appends `bytes` (rounded up to the backend's granularity; equal on all ranks) of zeroed memory on every rank and maps
  // it on the ranks of the node. Collective over all ranks of the communicator; on failure no rank has grown, and each
  // gets the error, which names a rank where it happened (MK_ERROR_OUT_OF_MEMORY, _SYSTEM, _CUDA).
  // Returns the offset of the new piece, equal on every rank.
  virtual Result<size_t> grow(size_t bytes, Deadline deadline) = 0;

  virtual size_t size() const = 0;
  // This rank's memory at `offset`. Stable for the life of the object.
  virtual std::byte* local(size_t offset) const = 0;
  // The memory of the node's rank `local_rank` at `offset`, as this process addresses it. In one process it is
  // the owner's own mapping, kept alive by every rank that uses it.
  virtual std::byte* peer(int local_rank, size_t offset) const = 0;
  // Pieces are physically contiguous registrations for NICs: the piece that holds `offset`.
  virtual size_t granularity() const = 0;
};

// memfd on the host: nothing survives a crash.
Result<std::unique_ptr<SymmetricMemory>> make_host_symmetric_memory(const Topology& topology, Exchange& exchange,
                                                                    AbortToken& abort, Deadline deadline);
// Virtual memory management of the CUDA driver on device `cuda_device`.
Result<std::unique_ptr<SymmetricMemory>> make_cuda_symmetric_memory(const Topology& topology, Exchange& exchange,
                                                                    AbortToken& abort, int cuda_device,
                                                                    Deadline deadline);

}  // namespace mk
