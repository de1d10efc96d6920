// SPDX-License-Identifier: MIT
// The baseline of the GEMM operators.
#include <algorithm>

#include "cuda_unfused.h"
#include "element.h"
#include "watchdog.h"

namespace perf {
namespace {

constexpr int kTrialRuns = 3;

class CudaUnfusedPair : public CapturedPair {
 public:
  CudaUnfusedPair(const UnfusedTools& tools, const Context& context, RankGroup& group,
                  const UnfusedShape& shape, const std::vector<Operands>& sets)
      : CapturedPair(tools, context),
        shape_(shape),
        shard_rows_((shape.m + context.nranks - 1) / context.nranks),
        sets_(sets),
        product_(tools.cublaslt, shape, product_dtype()),
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
    for (size_t set = 0; set < sets.size(); ++set) capture_set(set);
    for (size_t set = 0; set < sets.size(); ++set) run_pair(static_cast<int>(set));
    synchronize();
  }

  // cudaMemcpy would return before it has copied: the operator, on its own stream, adds to what is copied next.
  void take_output(int set) override {
    const DeviceBuffer& output = outputs_[static_cast<size_t>(set)];
    require_cuda(cudaMemcpyAsync(output.data(), sets_[static_cast<size_t>(set)].c, output.bytes(),
                                 cudaMemcpyDeviceToDevice, stream()),
                 "copying C");
    synchronize();
  }

  MatrixDifference difference(int set) override {
    int64_t rows = shape_.is_wgrad ? shape_.k : shape_.m;
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

  // Elements of the shard that a rank gives or gets.
  size_t shard_elements() const {
    return static_cast<size_t>(shard_rows_ * (gathers() ? shape_.lda : shape_.ldc));
  }
  // What one part of the pair hands to the other: the gathered rows, or the partial sums.
  size_t middle_bytes() const {
    const mk_dtype_t dtype = gathers() ? shape_.dtypes.dtype : product_dtype();
    return shard_elements() * static_cast<size_t>(context_.nranks) * element_bytes(dtype);
  }
  size_t output_bytes() const {
    const int64_t rows = shape_.is_wgrad                                   ? shape_.k
                         : shape_.collective == Collective::kReduceScatter ? shard_rows_
                                                                           : padded_rows();
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
    const NcclLibrary& nccl = tools_.nccl;
    const ncclDataType_t type = nccl_type(gathers() ? shape_.dtypes.dtype : product_dtype());
    void* const output = outputs_[set].data();
    switch (shape_.collective) {
      case Collective::kAllGather:
        return nccl.require(
            nccl.all_gather(inputs_[set], middle_.data(), shard_elements(), type, tools_.comm, stream()),
            "ncclAllGather", tools_.comm);
      case Collective::kReduceScatter:
        return nccl.require(
            nccl.reduce_scatter(middle_.data(), output, shard_elements(), type, ncclSum, tools_.comm, stream()),
            "ncclReduceScatter", tools_.comm);
      case Collective::kAllReduce:
        break;
    }
    // Not in place: replayed alone, its sums would grow without bounds.
    nccl.require(nccl.all_reduce(middle_.data(), output, static_cast<size_t>(shape_.m * shape_.ldc), type,
                                 ncclSum, tools_.comm, stream()),
                 "ncclAllReduce", tools_.comm);
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

  void capture_set(size_t set) {
    const auto collective = [this, set] { enqueue_collective(set); };
    const auto product = [this, set] { enqueue_product(set); };
    const auto pair = [&] {
      if (gathers()) collective();
      product();
      if (!gathers()) collective();
    };
    capture(pair, product, collective);
  }

  UnfusedShape shape_;
  int64_t shard_rows_;
  std::vector<Operands> sets_;
  CublasLtProduct product_;
  DeviceBuffer middle_;
  std::vector<DeviceBuffer> copies_;
  std::vector<DeviceBuffer> outputs_;
  std::vector<const void*> inputs_;
};

}  // namespace

std::unique_ptr<UnfusedPair> make_gemm_pair(const UnfusedTools& tools, const Context& context, RankGroup& group,
                                            const UnfusedShape& shape, const std::vector<Operands>& sets) {
  return std::make_unique<CudaUnfusedPair>(tools, context, group, shape, sets);
}

}  // namespace perf
