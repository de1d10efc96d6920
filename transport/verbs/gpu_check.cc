// SPDX-License-Identifier: MIT
#include "gpu_check.h"

#include <cerrno>

#include "gpu_memory.h"
#include "nic.h"

namespace mk::verbs {
namespace {

// A driver that knows dma-buf finds fault with the descriptor, others with the request.
bool imports_dma_buf(const Library& library, ibv_pd* pd) {
  if (library.register_dmabuf_mr == nullptr) return false;
  errno = 0;
  ibv_mr* const mr = library.register_dmabuf_mr(pd, 0, 4096, 0, -1, IBV_ACCESS_LOCAL_WRITE);
  if (mr != nullptr) library.deregister_mr(mr);
  return mr != nullptr || (errno != EOPNOTSUPP && errno != EPROTONOSUPPORT && errno != ENOSYS);
}

void check_kind(const Library& library, NicKind kind, GpuVerdict& all) {
  const auto nics = Nic::open_all(library, kind);
  if (!nics.ok()) return;
  for (const auto& nic : nics.value()) {
    ibv_pd* const pd = library.alloc_pd(nic->context);
    if (pd == nullptr) continue;
    GpuReach reach;
    reach.has_gpu = true;
    reach.library_dma_buf = library.register_dmabuf_mr != nullptr;
    reach.nic_dma_buf = imports_dma_buf(library, pd);
    reach.gpu_dma_buf = exports_dma_buf();
    reach.peer_memory = has_peer_memory();
    library.dealloc_pd(pd);
    const GpuVerdict verdict = judge(reach);
    all.text += format("GPU memory over %s: %s\n", nic->text().c_str(), verdict.text.c_str());
    if (!verdict.problem.empty())
      all.problem += format("%s: %s\n", nic->text().c_str(), verdict.problem.c_str());
  }
}

}  // namespace

GpuVerdict judge(const GpuReach& reach) {
  if (!reach.has_gpu) return {"there is no GPU", ""};
  if (reach.nic_dma_buf && reach.gpu_dma_buf) return {"through dma-buf", ""};
  if (reach.peer_memory) return {"through nvidia_peermem", ""};
  std::string missing;
  if (!reach.library_dma_buf) {
    missing = "libibverbs has no ibv_reg_dmabuf_mr (rdma-core 34 or newer has)";
  } else if (!reach.nic_dma_buf) {
    missing = "the NIC's kernel driver does not import dma-buf memory (Linux 5.12 or newer, or MLNX_OFED 5.8)";
  } else {
    missing = "the GPU's driver does not export dma-buf memory (the open kernel modules of 515 or newer do)";
  }
  return {"not possible",
          "no dma-buf: " + missing +
              ", and nvidia_peermem is not loaded; load it (modprobe nvidia-peermem) or update what is "
              "missing; until then transport ofi stages a GPU's memory through the host's (MK_TRANSPORT=ofi)"};
}

GpuVerdict check_gpu_memory() {
  GpuVerdict all;
  const auto library = load_library();
  if (!library.ok() || !has_gpu()) return all;
  check_kind(*library.value(), NicKind::rc, all);
  check_kind(*library.value(), NicKind::efa, all);
  return all;
}

}  // namespace mk::verbs
