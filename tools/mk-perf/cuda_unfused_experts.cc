// SPDX-License-Identifier: MIT
// The baseline of the expert operators: rows to their experts' ranks by NCCL and a grouped product, or the
// product and its rows home. Counts and places of rows are there before, for nothing.
#include <algorithm>

#include "cuda_expert_rows.h"
#include "cuda_unfused.h"
#include "element.h"
#include "errors.h"
#include "grouped_product.h"
#include "watchdog.h"

namespace perf {
namespace {

constexpr int kTrialRuns = 3;

DeviceBuffer device_copy(const DeviceOperations& device, const std::vector<int64_t>& values) {
  DeviceBuffer copy(device, values.size() * sizeof(int64_t));
  if (!values.empty()) copy.upload(values.data());
  return copy;
}

class CudaUnfusedExperts : public CapturedPair {
 public:
  CudaUnfusedExperts(const UnfusedTools& tools, const Context& context, RankGroup& group,
                     const UnfusedExperts& experts, const std::vector<ExpertOperands>& sets)
      : CapturedPair(tools, context),
        group_(group),
        experts_(experts),
        sets_(sets),
        places_(device_copy(*context.device, exchange().places)),
        guest_places_(device_copy(*context.device, exchange().guest_places)),
        stage_(*context.device, static_cast<size_t>(exchange().stage_rows() * row_bytes())) {
    const Watchdog watchdog(kNcclDeadline,
                            "rank " + std::to_string(context.rank) + ": the first run of NCCL and cuBLAS");
    for (size_t set = 0; set < sets.size(); ++set)
      outputs_.emplace_back(*context.device, static_cast<size_t>(output_rows() * output_columns()) *
                                                 element_bytes(experts.dtypes.out_dtype));
    make_products();
    require_cuda(cudaDeviceSynchronize(), "placing rows");  // the stream does not wait for copies from the host
    // NCCL connects the ranks at first use, which cannot be captured; and what is chosen next works on rows.
    for (const RowsMessages* way : {&exchange().by_expert, &exchange().by_rank}) {
      messages_ = way;
      enqueue_pair(0);
    }
    synchronize();
    choose_messages();
    choose_product();
    for (size_t set = 0; set < sets.size(); ++set) {
      capture([&] { enqueue_pair(set); }, [&] { enqueue_product(set); }, [&] { enqueue_messages(); });
    }
    for (size_t set = 0; set < sets.size(); ++set) run_pair(static_cast<int>(set));
    synchronize();
  }

  std::string description() const override {
    const char* way =
        messages_ == &exchange().by_rank ? "a message a rank, then a copy" : "a message a rank and expert";
    return std::string(context_.nranks > 1 ? std::string("ncclSend and ncclRecv, ") + way + "; " : "") +
           product_->name();
  }

  MatrixDifference difference(int set) override {
    DeviceMatrix matrix = {outputs_[static_cast<size_t>(set)].data(), experts_.dtypes.out_dtype, output_rows(),
                           output_columns(), output_columns()};
    DeviceMatrix reference = matrix;
    reference.data = sets_[static_cast<size_t>(set)].y;
    return context_.device->matrices->difference(matrix, reference);
  }

 private:
  const ExpertExchange& exchange() const { return experts_.exchange; }
  bool combines() const { return experts_.combines; }
  mk_dtype_t row_dtype() const { return combines() ? experts_.dtypes.out_dtype : experts_.dtypes.dtype; }
  int64_t row_bytes() const { return experts_.hidden * static_cast<int64_t>(element_bytes(row_dtype())); }
  int64_t output_rows() const { return combines() ? exchange().tokens : exchange().expert_rows; }
  int64_t output_columns() const { return experts_.product_columns(); }
  bool copies() const { return messages_ == &exchange().by_rank; }
  const int64_t* places() const { return static_cast<const int64_t*>(places_.data()); }

  void make_products() {
    const GroupedShape shape = {exchange().expert_counts, experts_.product_columns(), experts_.product_inner(),
                                experts_.dtypes.dtype, experts_.dtypes.out_dtype};
    std::vector<GroupedOperands> operands;
    for (size_t set = 0; set < sets_.size(); ++set) {
      operands.push_back({combines() ? sets_[set].rows : stage_.data(), sets_[set].w,
                          combines() ? stage_.data() : outputs_[set].data()});
    }
    candidates_.push_back(std::make_unique<ExpertByExpert>(tools_.cublaslt, shape, operands));
    if (tools_.cublas) {
      candidates_.push_back(
          std::make_unique<OneGroupedProduct>(*tools_.cublas, *context_.device, shape, operands));
    }
    product_ = candidates_.front().get();
  }

  void enqueue_product(size_t set) {
    tools_.cublaslt.require(product_->try_launch(set, stream()), product_->name().c_str());
  }

  void enqueue_messages() {
    const std::vector<RowsMessage>& sent = combines() ? messages_->guests : messages_->away;
    const std::vector<RowsMessage>& received = combines() ? messages_->away : messages_->guests;
    if (sent.empty() && received.empty()) return;
    const NcclLibrary& nccl = tools_.nccl;
    const auto count = [&](const RowsMessage& message) {
      return static_cast<size_t>(message.rows * experts_.hidden);
    };
    const auto at = [&](const RowsMessage& message) {
      return static_cast<char*>(stage_.data()) + message.first * row_bytes();
    };
    nccl.require(nccl.group_start(), "ncclGroupStart");
    for (const RowsMessage& message : sent) {
      nccl.require(
          nccl.send(at(message), count(message), nccl_type(row_dtype()), message.peer, tools_.comm, stream()),
          "ncclSend", tools_.comm);
    }
    for (const RowsMessage& message : received) {
      nccl.require(nccl.receive(at(message), count(message), nccl_type(row_dtype()), message.peer, tools_.comm,
                                stream()),
                   "ncclRecv", tools_.comm);
    }
    nccl.require(nccl.group_end(), "ncclGroupEnd", tools_.comm);
  }

  void enqueue_copies() {
    if (!copies()) return;
    const RowCopies copies = {stage_.data(),
                              static_cast<const int64_t*>(guest_places_.data()),
                              exchange().first_guest(),
                              exchange().guest_rows,
                              row_bytes(),
                              !combines()};
    require_cuda(launch_copies(copies, stream()), "copying rows of other ranks");
  }

  // The rows on their way, apart from what is done at home.
  void enqueue_way() {
    if (combines()) enqueue_copies();
    enqueue_messages();
    if (!combines()) enqueue_copies();
  }

  void enqueue_pair(size_t set) {
    if (!combines()) {
      const RowSpread spread = {sets_[set].rows,   stage_.data(), places(),
                                exchange().tokens, experts_.topk, row_bytes()};
      require_cuda(launch_spread(spread, stream()), "putting tokens in order");
      enqueue_way();
      return enqueue_product(set);
    }
    enqueue_product(set);
    enqueue_way();
    const RowSum sum = {stage_.data(), outputs_[set].data(), row_dtype(),   sets_[set].factors,
                        places(),      exchange().tokens,    experts_.topk, row_bytes()};
    require_cuda(launch_sum(sum, stream()), "adding up rows");
  }

  void choose_messages() {
    messages_ = &exchange().by_expert;
    if (context_.nranks == 1) return;
    const double by_expert = trial_us(CudaGraph(stream(), [this] { enqueue_way(); }));
    messages_ = &exchange().by_rank;
    const double by_rank = trial_us(CudaGraph(stream(), [this] { enqueue_way(); }));
    const std::vector<double> slowest = group_.maximum({by_expert, by_rank});
    if (slowest[0] <= slowest[1]) messages_ = &exchange().by_expert;
  }

  // The fastest on the slowest rank of those that work on every rank.
  void choose_product() {
    double best = 1e30;
    const GroupedProduct* chosen = nullptr;
    // Two on every rank: on one without cuBLAS proper the second does not work.
    for (size_t i = 0; i < 2; ++i) {
      const bool exists = i < candidates_.size();
      if (exists) product_ = candidates_[i].get();
      const bool works = exists && product_->try_launch(0, stream()) == CUBLAS_STATUS_SUCCESS;
      synchronize();
      const std::unique_ptr<CudaGraph> graph = works ? try_capture_product() : nullptr;
      if (group_.maximum({graph ? 0.0 : 1.0})[0] != 0.0) continue;
      const double slowest = group_.maximum({trial_us(*graph)})[0];
      if (slowest >= best) continue;
      best = slowest;
      chosen = product_;
    }
    if (!chosen) throw RunError("the baseline's product by cuBLAS fails; --baseline none leaves it out");
    product_ = chosen;
  }

  // nullptr: not every product that works can be captured.
  std::unique_ptr<CudaGraph> try_capture_product() {
    try {
      return std::make_unique<CudaGraph>(stream(), [this] { enqueue_product(0); });
    } catch (const RunError&) {
      cudaGetLastError();
      return nullptr;
    }
  }

  // Replayed as it will be, so that what the host takes to enqueue it does not decide.
  double trial_us(const CudaGraph& graph) {
    graph.launch(stream());
    synchronize();
    group_.barrier();
    return context_.device->time_us(
        context_.comm,
        [&] {
          for (int i = 0; i < kTrialRuns; ++i) graph.launch(stream());
        },
        [] {});
  }

  RankGroup& group_;
  UnfusedExperts experts_;
  std::vector<ExpertOperands> sets_;
  DeviceBuffer places_;
  DeviceBuffer guest_places_;
  DeviceBuffer stage_;
  std::vector<DeviceBuffer> outputs_;
  std::vector<std::unique_ptr<GroupedProduct>> candidates_;
  const GroupedProduct* product_ = nullptr;
  const RowsMessages* messages_ = nullptr;
};

}  // namespace

std::unique_ptr<UnfusedPair> make_expert_pair(const UnfusedTools& tools, const Context& context,
                                              RankGroup& group, const UnfusedExperts& experts,
                                              const std::vector<ExpertOperands>& sets) {
  return std::make_unique<CudaUnfusedExperts>(tools, context, group, experts, sets);
}

}  // namespace perf
