// SPDX-License-Identifier: MIT
#include <cstring>
#include <functional>

#include "cuda_unfused.h"
#include "watchdog.h"

namespace perf {
namespace {

// Left to the end of the process: to destroy it would wait for NCCL to let go of captured graphs and for ranks
// that may have failed, before a single result is printed.
class NcclCommunicator {
 public:
  NcclCommunicator(const NcclLibrary& library, const Context& context, RankGroup& group) {
    const Watchdog watchdog(kNcclDeadline, "rank " + std::to_string(context.rank) + ": ncclCommInitRank");
    struct Introduction {
      ncclUniqueId id;
      ncclResult_t result;
    } own{};
    static_assert(sizeof own <= RankGroup::kMaxGathered);
    if (context.rank == 0) own.result = library.get_unique_id(&own.id);
    const std::vector<char> all = group.all_gather(&own, sizeof own);
    Introduction first{};
    std::memcpy(&first, all.data(), sizeof first);
    // On all ranks, or else the others would wait for rank 0.
    library.require(first.result, "ncclGetUniqueId on rank 0");
    library.require(library.comm_init_rank(&comm_, context.nranks, first.id, context.rank), "ncclCommInitRank");
  }

  ncclComm_t get() const { return comm_; }

 private:
  ncclComm_t comm_ = nullptr;
};

class CudaUnfusedLibraries : public UnfusedLibraries {
 public:
  CudaUnfusedLibraries(const Context& context, RankGroup& group, std::unique_ptr<NcclLibrary> nccl,
                       std::unique_ptr<CublasLtLibrary> cublaslt, const std::string& cublaslt_path)
      : context_(context),
        group_(group),
        nccl_(std::move(nccl)),
        cublaslt_(std::move(cublaslt)),
        comm_(*nccl_, context, group) {
    try {
      cublas_ = std::make_unique<CublasLibrary>(cublaslt_path, context.device->stream(), cublaslt_->workspace(),
                                                CublasLtLibrary::kWorkspaceBytes);
    } catch (const LibraryAbsent&) {
      // cublasLt does what it would; the line under the table says which of them did.
    }
  }

  std::string nccl_version() const override { return nccl_->version(); }
  std::string cublaslt_version() const override { return cublaslt_->version(); }

  std::unique_ptr<UnfusedPair> make_pair(const UnfusedShape& shape, const std::vector<Operands>& sets,
                                         std::string& problem) override {
    if (shape.collective != Collective::kAllGather && shape.dtypes.out_dtype != shape.dtypes.comm_dtype) {
      problem = "NCCL sums in the type of its output: no baseline where --out-dtype and --comm-dtype differ";
      return nullptr;
    }
    if (shape.collective != Collective::kAllGather && shape.accumulate) {
      problem = "NCCL does not add to what is there: no baseline of a reduction with --accumulate";
      return nullptr;
    }
    if (!has_product(shape.dtypes, problem)) return nullptr;
    return make_gemm_pair(tools(), context_, group_, shape, sets);
  }

  std::unique_ptr<UnfusedPair> make_experts(const UnfusedExperts& experts,
                                            const std::vector<ExpertOperands>& sets,
                                            std::string& problem) override {
    if (!has_product(experts.dtypes, problem)) return nullptr;
    return make_expert_pair(tools(), context_, group_, experts, sets);
  }

 private:
  static bool has_product(const Dtypes& dtypes, std::string& problem) {
    if (dtypes.out_dtype == MK_DTYPE_FP32 || dtypes.out_dtype == dtypes.dtype) return true;
    problem = "cublasLt has no product from one 16-bit type to the other: no baseline";
    return false;
  }

  UnfusedTools tools() const { return {*nccl_, *cublaslt_, cublas_.get(), comm_.get()}; }

  Context context_;
  RankGroup& group_;
  std::unique_ptr<NcclLibrary> nccl_;
  std::unique_ptr<CublasLtLibrary> cublaslt_;
  std::unique_ptr<CublasLibrary> cublas_;  // nullptr: not found
  NcclCommunicator comm_;
};

}  // namespace

std::unique_ptr<UnfusedLibraries> load_unfused_libraries(const Context& context, RankGroup& group,
                                                         const UnfusedPaths& paths, std::string& problem) {
  if (context.device->device != MK_DEVICE_CUDA) {
    problem = std::string("there is no NCCL on device ") + context.device->name;
    return nullptr;
  }
  std::unique_ptr<NcclLibrary> nccl;
  std::unique_ptr<CublasLtLibrary> cublaslt;
  std::unique_ptr<UnfusedLibraries> libraries;
  const auto attempt = [&](const char* option, const std::function<void()>& step) {
    try {
      step();
    } catch (const LibraryAbsent& absent) {
      problem += (problem.empty() ? "" : "; ") + absent.reason + "; " + option + " PATH says where it is";
    } catch (const RunError& error) {
      problem += (problem.empty() ? "" : "; ") + std::string(error.what());
    }
  };
  const auto all_succeeded = [&] {
    if (group.maximum({problem.empty() ? 0.0 : 1.0})[0] == 0.0) return true;
    if (problem.empty()) problem = "NCCL or cublasLt does not work on another rank";
    return false;
  };
  attempt("--nccl-library", [&] { nccl = std::make_unique<NcclLibrary>(paths.nccl); });
  attempt("--cublaslt-library", [&] { cublaslt = std::make_unique<CublasLtLibrary>(paths.cublaslt); });
  if (!all_succeeded()) return nullptr;
  attempt("", [&] {
    libraries = std::make_unique<CudaUnfusedLibraries>(context, group, std::move(nccl), std::move(cublaslt),
                                                       paths.cublaslt);
  });
  if (!all_succeeded()) return nullptr;
  return libraries;
}

}  // namespace perf
