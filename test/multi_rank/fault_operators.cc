// SPDX-License-Identifier: MIT
#include "test/multi_rank/fault_operators.h"

#include "test/multi_rank/exact_call.h"

namespace mk::test {
namespace {

class GemmCheckedCall : public CheckedCall {
 public:
  explicit GemmCheckedCall(ExactCall call) : call_(std::move(call)) {}
  mk_status_t launch(mk_comm_t comm) override { return call_.launch(comm); }
  std::string wrong() const override { return call_.wrong(); }

 private:
  ExactCall call_;
};

template <mk_operator_t OP, mk_allgather_mode_t MODE = MK_ALLGATHER_FORWARD>
std::unique_ptr<CheckedCall> make_gemm(int nranks, int rank, uint64_t seed) {
  const auto m = static_cast<int64_t>(1 + seed % 200);
  return std::make_unique<GemmCheckedCall>(ExactCall(OP, nranks, rank, seed, m, 16, 32, MODE));
}

}  // namespace

const std::vector<FaultOperator>& fault_operators() {
  static const std::vector<FaultOperator> operators = {
      {"allgather_gemm", make_gemm<MK_OPERATOR_ALLGATHER_GEMM>},
      {"allgather_gemm_wgrad", make_gemm<MK_OPERATOR_ALLGATHER_GEMM, MK_ALLGATHER_WGRAD>},
      {"gemm_reduce_scatter", make_gemm<MK_OPERATOR_GEMM_REDUCE_SCATTER>},
      {"gemm_allreduce", make_gemm<MK_OPERATOR_GEMM_ALLREDUCE>},
  };
  return operators;
}

}  // namespace mk::test
