// SPDX-License-Identifier: MIT
// Memory that every rank of a node can address: an address range reserved once, to which growth appends.
#pragma once

#include <cstddef>
#include <memory>

#include "abort_token.h"
#include "exchange.h"
#include "topology.h"

namespace mk {

// Not thread-safe but for local() and peer(), which any thread may call. `topology`, `exchange` and `abort`
// outlive it.
class SymmetricMemory {
 public:
  virtual ~SymmetricMemory() = default;

  // Appends `bytes` (rounded up to granularity(); equal on all ranks) of zeroed memory on every rank and maps
  // it on the ranks of the node. Collective over all ranks of the communicator; on failure no rank has grown,
  // and each gets the error, which names a rank where it happened (MK_ERROR_OUT_OF_MEMORY, _SYSTEM, _CUDA,
  // _INVALID_ARGUMENT; _MISMATCH when ranks ask for different sizes). After these a later growth can succeed.
  // When the ranks could not even exchange their results (MK_ERROR_TIMEOUT, _REMOTE, the reason of the abort
  // token) every later growth answers the same error. Returns the offset of the new piece, equal on every rank.
  virtual Result<size_t> grow(size_t bytes, Deadline deadline) = 0;

  // The sum of the growths so far.
  virtual size_t size() const = 0;
  // This rank's memory at `offset`. Stable for the life of the object.
  virtual std::byte* local(size_t offset) const = 0;
  // The memory of the node's rank `local_rank` at `offset`, as this process addresses it; nullptr for any other
  // number: memory of other nodes is never mapped. In one process it is the owner's own mapping, kept alive by
  // every rank that uses it.
  virtual std::byte* peer(int local_rank, size_t offset) const = 0;
  // Growth is rounded up to a multiple of this; equal on all ranks.
  virtual size_t granularity() const = 0;
};

// memfd on the host: nothing survives a crash. Collective; fails on all ranks or on none.
Result<std::unique_ptr<SymmetricMemory>> make_host_symmetric_memory(const Topology& topology,
                                                                    Exchange& exchange, AbortToken& abort,
                                                                    Deadline deadline);
// Virtual memory management of the CUDA driver on device `cuda_device`. Collective. MK_ERROR_UNSUPPORTED: no
// driver, or built without CUDA; or two ranks of the node have no peer access (the sentence names both
// devices).
Result<std::unique_ptr<SymmetricMemory>> make_cuda_symmetric_memory(const Topology& topology,
                                                                    Exchange& exchange, AbortToken& abort,
                                                                    int cuda_device, Deadline deadline);

}  // namespace mk
