// SPDX-License-Identifier: MIT
#include "test/multi_rank/fault_operators.h"

#include "test/multi_rank/exact_call.h"
#include "test/ops/attention_launch.h"
#include "test/ops/moe_launch.h"

namespace mk::test {
namespace {

class GemmCheckedCall : public CheckedCall {
 public:
  explicit GemmCheckedCall(ExactCall call) : call_(std::move(call)) {}
  mk_status_t launch(mk_comm_t comm) override { return call_.launch(comm); }
  std::string wrong() override { return call_.wrong(); }

 private:
  ExactCall call_;
};

template <mk_operator_t OP, mk_allgather_mode_t MODE = MK_ALLGATHER_FORWARD>
std::unique_ptr<CheckedCall> make_gemm(int nranks, int rank, uint64_t seed) {
  const auto m = static_cast<int64_t>(1 + seed % 200);
  return std::make_unique<GemmCheckedCall>(ExactCall(OP, nranks, rank, seed, m, 16, 32, MODE));
}

RankJob job_of(int nranks) {
  RankJob job;
  job.node_of_rank.resize(static_cast<size_t>(nranks));  // only how many
  return job;
}

std::string first_of(const std::vector<std::string>& failures) { return failures.empty() ? "" : failures[0]; }

// A dispatch, and behind it, if asked, the combine that uses its record.
class MoeCheckedCall : public CheckedCall {
 public:
  MoeCheckedCall(const MoeCase& moe, int nranks, int rank, bool combine)
      : job_(job_of(nranks)),
        session_(job_, rank),
        problem_(moe, nranks),
        launch_(session_, problem_),
        combine_(combine) {}

  mk_status_t launch(mk_comm_t comm) override {
    // Tokens are a rank's own affair, so that the calls do not prepare for all of them by themselves.
    const mk_moe_maxima_t maxima = launch_.maxima();
    mk_status_t status = mk_moe_dispatch_gemm_prepare(comm, &maxima);
    if (status == MK_SUCCESS && combine_) status = mk_moe_gemm_combine_prepare(comm, &maxima);
    const mk_moe_dispatch_gemm_args_t dispatch = launch_.dispatch_args();
    if (status == MK_SUCCESS) status = mk_moe_dispatch_gemm(comm, &dispatch, nullptr);
    const mk_moe_gemm_combine_args_t combine = launch_.combine_args();
    if (status == MK_SUCCESS && combine_) status = mk_moe_gemm_combine(comm, &combine, nullptr);
    return status;
  }
  std::string wrong() override {
    launch_.verify_dispatch();
    if (combine_) launch_.verify_combine();
    return first_of(session_.failures());
  }

 private:
  const RankJob job_;
  RankSession session_;
  const MoeProblem problem_;
  MoeLaunch launch_;
  const bool combine_;
};

template <bool COMBINE>
std::unique_ptr<CheckedCall> make_moe(int nranks, int rank, uint64_t seed) {
  MoeCase moe;
  moe.tokens = static_cast<int64_t>(1 + seed % 24);
  moe.experts = 2 * nranks - 1;
  moe.topk = 2;
  moe.seed = seed >> 40;
  return std::make_unique<MoeCheckedCall>(moe, nranks, rank, COMBINE);
}

class AttentionCheckedCall : public CheckedCall {
 public:
  AttentionCheckedCall(const AttentionCase& attention, int nranks, int rank, bool backward)
      : job_(job_of(nranks)),
        session_(job_, rank),
        problem_(attention),
        launch_(session_, problem_),
        backward_(backward) {}

  mk_status_t launch(mk_comm_t comm) override {
    session_.use(comm);
    return backward_ ? launch_.try_backward() : launch_.try_forward();
  }
  std::string wrong() override {
    backward_ ? launch_.verify_backward() : launch_.verify_forward();
    return first_of(session_.failures());
  }

 private:
  const RankJob job_;
  RankSession session_;
  const AttentionProblem problem_;
  AttentionLaunch launch_;
  const bool backward_;
};

template <bool BACKWARD>
std::unique_ptr<CheckedCall> make_attention(int nranks, int rank, uint64_t seed) {
  AttentionCase attention;
  attention.seq = static_cast<int64_t>(nranks + seed % 40);
  attention.dim = 16;
  attention.softmax_scale = 1;
  attention.causal = static_cast<mk_causal_t>(seed / 40 % 3);
  attention.numbers = Numbers::one_hot;
  attention.seed = seed >> 40;
  return std::make_unique<AttentionCheckedCall>(attention, nranks, rank, BACKWARD);
}

}  // namespace

const std::vector<FaultOperator>& fault_operators() {
  static const std::vector<FaultOperator> operators = {
      {"allgather_gemm", make_gemm<MK_OPERATOR_ALLGATHER_GEMM>},
      {"allgather_gemm_wgrad", make_gemm<MK_OPERATOR_ALLGATHER_GEMM, MK_ALLGATHER_WGRAD>},
      {"gemm_reduce_scatter", make_gemm<MK_OPERATOR_GEMM_REDUCE_SCATTER>},
      {"gemm_allreduce", make_gemm<MK_OPERATOR_GEMM_ALLREDUCE>},
      {"moe_dispatch_gemm", make_moe<false>},
      {"moe_gemm_combine", make_moe<true>},
      {"ring_attention", make_attention<false>},
      {"ring_attention_backward", make_attention<true>},
  };
  return operators;
}

}  // namespace mk::test
