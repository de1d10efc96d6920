// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cstring>
#include <functional>

#include "cublaslt_library.h"
#include "cuda_graph.h"
#include "element.h"
#include "measure.h"
#include "nccl_library.h"
#include "unfused_pair.h"
#include "watchdog.h"

namespace perf {
namespace {

// NCCL connects all pairs of ranks in this time, also on a host that has much else to do.
constexpr std::chrono::seconds kNcclDeadline{90};
constexpr int kTrialRuns = 3;

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

struct Libraries {
  const NcclLibrary& nccl;
  const CublasLtLibrary& cublaslt;
  ncclComm_t comm;
};

class CudaUnfusedPair : public UnfusedPair {
 public:
  CudaUnfusedPair(const Libraries& libraries, const Context& context, RankGroup& group,
                  const UnfusedShape& shape, const std::vector<Operands>& sets)
      : libraries_(libraries),
        context_(context),
        shape_(shape),
        shard_rows_((shape.m + context.nranks - 1) / context.nranks),
        sets_(sets),
        product_(libraries.cublaslt, shape, product_dtype()),
        middle_(*context.device, middle_bytes()) {
    const Watchdog watchdog(kNcclDeadline,
                            "rank " + std::to_string(context.rank) + ": the first run of NCCL and cublasLt");
    for (size_t set = 0; set < sets.size(); ++set) {
      inputs_.push_back(padded_input(set));
      outputs_.emplace_back(*context.device, output_bytes());
    }
    // NCCL connects the ranks at first use, which cannot be captured.
    enqueue_collective(0);
    synchronize();
    choose_product(group);
    for (size_t set = 0; set < sets.size(); ++set) capture(set);
    for (size_t set = 0; set < sets.size(); ++set) run_pair(static_cast<int>(set));
    synchronize();
  }

  void run_pair(int set) override { pairs_[static_cast<size_t>(set)].launch(stream()); }
  void run_product(int set) override { products_[static_cast<size_t>(set)].launch(stream()); }
  void run_collective(int set) override { collectives_[static_cast<size_t>(set)].launch(stream()); }

  MatrixDifference difference(int set) override {
    int64_t rows = shape_.m;
    if (shape_.collective == Collective::kReduceScatter) rows = own_rows();
    DeviceMatrix matrix = {outputs_[static_cast<size_t>(set)].data(), shape_.dtypes.out_dtype, rows, shape_.n,
                           shape_.ldc};
    DeviceMatrix reference = matrix;
    reference.data = sets_[static_cast<size_t>(set)].c;
    return context_.device->matrices->difference(matrix, reference);
  }

 private:
  bool gathers() const { return shape_.collective == Collective::kAllGather; }
  mk_dtype_t product_dtype() const { return gathers() ? shape_.dtypes.out_dtype : shape_.dtypes.comm_dtype; }
  int64_t padded_rows() const { return shard_rows_ * context_.nranks; }
  int64_t own_rows() const {
    const int64_t first = std::min(shape_.m, context_.rank * shard_rows_);
    return std::min(shape_.m, (context_.rank + 1) * shard_rows_) - first;
  }
  cudaStream_t stream() const { return context_.device->stream(); }
  void synchronize() const { require_cuda(cudaStreamSynchronize(stream()), "running NCCL and cublasLt"); }

  // Elements of the shard that a rank gives or gets.
  size_t shard_elements() const {
    return static_cast<size_t>(shard_rows_ * (gathers() ? shape_.lda : shape_.ldc));
  }
  // What one part of the pair hands to the other: the gathered A, or the partial sums.
  size_t middle_bytes() const {
    const mk_dtype_t dtype = gathers() ? shape_.dtypes.dtype : product_dtype();
    return shard_elements() * static_cast<size_t>(context_.nranks) * element_bytes(dtype);
  }
  size_t output_bytes() const {
    const int64_t rows = shape_.collective == Collective::kReduceScatter ? shard_rows_ : padded_rows();
    return static_cast<size_t>(rows * shape_.ldc) * element_bytes(shape_.dtypes.out_dtype);
  }

  // A as the collective or the product takes it: the operator's own, but for a rank with fewer rows than the
  // collective sends, which gets a copy with zeros after them.
  const void* padded_input(size_t set) {
    if (!gathers() || own_rows() == shard_rows_) return sets_[set].a;
    const size_t row_bytes = static_cast<size_t>(shape_.lda) * element_bytes(shape_.dtypes.dtype);
    const DeviceBuffer& copy =
        copies_.emplace_back(*context_.device, static_cast<size_t>(shard_rows_) * row_bytes);
    require_cuda(cudaMemset(copy.data(), 0, copy.bytes()), "cudaMemset");
    require_cuda(cudaMemcpy(copy.data(), sets_[set].a, static_cast<size_t>(own_rows()) * row_bytes,
                            cudaMemcpyDeviceToDevice),
                 "padding A");
    require_cuda(cudaDeviceSynchronize(), "padding A");
    return copy.data();
  }

  void enqueue_collective(size_t set) {
    const NcclLibrary& nccl = libraries_.nccl;
    const ncclDataType_t type = nccl_type(gathers() ? shape_.dtypes.dtype : product_dtype());
    void* const output = outputs_[set].data();
    switch (shape_.collective) {
      case Collective::kAllGather:
        return nccl.require(
            nccl.all_gather(inputs_[set], middle_.data(), shard_elements(), type, libraries_.comm, stream()),
            "ncclAllGather", libraries_.comm);
      case Collective::kReduceScatter:
        return nccl.require(nccl.reduce_scatter(middle_.data(), output, shard_elements(), type, ncclSum,
                                                libraries_.comm, stream()),
                            "ncclReduceScatter", libraries_.comm);
      case Collective::kAllReduce:
        break;
    }
    // Not in place: replayed alone, its sums would grow without bounds.
    nccl.require(nccl.all_reduce(middle_.data(), output, static_cast<size_t>(shape_.m * shape_.ldc), type,
                                 ncclSum, libraries_.comm, stream()),
                 "ncclAllReduce", libraries_.comm);
  }

  void enqueue_product(size_t set) {
    product_.launch(gathers() ? middle_.data() : inputs_[set], sets_[set].b,
                    gathers() ? outputs_[set].data() : middle_.data(), stream());
  }

  // The fastest of cublasLt's proposals on the slowest rank, all ranks at work: the order of its heuristic is a
  // guess, and one rank's choice must not differ from another's.
  void choose_product(RankGroup& group) {
    const int num_proposals =
        -static_cast<int>(group.maximum({-static_cast<double>(product_.num_proposals())})[0]);
    std::vector<double> times;
    for (int proposal = 0; proposal < num_proposals; ++proposal) times.push_back(trial_us(proposal, group));
    const std::vector<double> slowest = group.maximum(times);
    product_.choose(static_cast<int>(std::min_element(slowest.begin(), slowest.end()) - slowest.begin()));
  }

  double trial_us(int proposal, RankGroup& group) {
    constexpr double kDoesNotRun = 1e30;
    bool runs = true;
    const auto run = [&](size_t set) {
      const void* a = gathers() ? middle_.data() : inputs_[set];
      void* c = gathers() ? outputs_[set].data() : middle_.data();
      runs = runs && product_.try_launch(proposal, a, sets_[set].b, c, stream()) == CUBLAS_STATUS_SUCCESS;
    };
    run(0);
    synchronize();
    group.barrier();
    const double us = context_.device->time_us(
        context_.comm,
        [&] {
          for (int i = 0; i < kTrialRuns; ++i) run(static_cast<size_t>(i) % sets_.size());
        },
        [] {});
    return runs ? us : kDoesNotRun;
  }

  void capture(size_t set) {
    const auto collective = [this, set] { enqueue_collective(set); };
    const auto product = [this, set] { enqueue_product(set); };
    collectives_.emplace_back(stream(), collective);
    products_.emplace_back(stream(), product);
    pairs_.emplace_back(stream(), [&] {
      if (gathers()) collective();
      product();
      if (!gathers()) collective();
    });
  }

  Libraries libraries_;
  Context context_;
  UnfusedShape shape_;
  int64_t shard_rows_;
  std::vector<Operands> sets_;
  CublasLtProduct product_;
  DeviceBuffer middle_;
  std::vector<DeviceBuffer> copies_;
  std::vector<DeviceBuffer> outputs_;
  std::vector<const void*> inputs_;
  std::vector<CudaGraph> pairs_;
  std::vector<CudaGraph> products_;
  std::vector<CudaGraph> collectives_;
};

class CudaUnfusedLibraries : public UnfusedLibraries {
 public:
  CudaUnfusedLibraries(const Context& context, RankGroup& group, std::unique_ptr<NcclLibrary> nccl,
                       std::unique_ptr<CublasLtLibrary> cublaslt)
      : context_(context),
        group_(group),
        nccl_(std::move(nccl)),
        cublaslt_(std::move(cublaslt)),
        comm_(*nccl_, context, group) {}

  std::string nccl_version() const override { return nccl_->version(); }
  std::string cublaslt_version() const override { return cublaslt_->version(); }

  std::unique_ptr<UnfusedPair> make_pair(const UnfusedShape& shape, const std::vector<Operands>& sets,
                                         std::string& problem) override {
    if (shape.collective != Collective::kAllGather && shape.dtypes.out_dtype != shape.dtypes.comm_dtype) {
      problem = "NCCL sums in the type of its output: no baseline where --out-dtype and --comm-dtype differ";
      return nullptr;
    }
    if (shape.dtypes.out_dtype != MK_DTYPE_FP32 && shape.dtypes.out_dtype != shape.dtypes.dtype) {
      problem = "cublasLt has no product from one 16-bit type to the other: no baseline";
      return nullptr;
    }
    return std::make_unique<CudaUnfusedPair>(Libraries{*nccl_, *cublaslt_, comm_.get()}, context_, group_,
                                             shape, sets);
  }

 private:
  Context context_;
  RankGroup& group_;
  std::unique_ptr<NcclLibrary> nccl_;
  std::unique_ptr<CublasLtLibrary> cublaslt_;
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
    libraries = std::make_unique<CudaUnfusedLibraries>(context, group, std::move(nccl), std::move(cublaslt));
  });
  if (!all_succeeded()) return nullptr;
  return libraries;
}

}  // namespace perf
