// SPDX-License-Identifier: MIT
// The mixture-of-experts operators: their shapes, and whether the library has them.
#include "errors.h"
#include "operators.h"

namespace perf {
namespace {

const ShapeKeys kKeys = {{"tokens"}, {"hidden"}, {"inter"}, {"experts", 1, 1 << 20}, {"topk", 1, 16}};

void validate(const Shape& shape, int) {
  if (shape["topk"] > shape["experts"])
    throw UsageError("--shape \"" + shape.text() + "\": topk exceeds experts");
  for (const char* key : {"hidden", "inter"}) {
    if (shape[key] % 8)
      throw UsageError("--shape \"" + shape.text() + "\": " + key + " is not a multiple of 8");
  }
}

template <typename Args>
mk_status_t ask(const Context& context, Args args, mk_status_t (*plan_of)(mk_comm_t, const Args*, mk_plan_t*)) {
  mk_plan_t plan = MK_PLAN_INIT;
  args.tokens = args.hidden = args.inter = 64;
  args.experts = 8;
  args.topk = 2;
  args.dtype = context.dtypes.dtype;
  args.out_dtype = context.dtypes.out_dtype;
  return plan_of(context.comm, &args, &plan);
}

}  // namespace

const Operator kMoeDispatchGemm = {"moe_dispatch_gemm", kKeys,
                                   [](const Context& context) {
                                     return ask<mk_moe_dispatch_gemm_args_t>(
                                         context, MK_MOE_DISPATCH_GEMM_ARGS_INIT, mk_moe_dispatch_gemm_plan);
                                   },
                                   validate, nullptr};

const Operator kMoeGemmCombine = {"moe_gemm_combine", kKeys,
                                  [](const Context& context) {
                                    return ask<mk_moe_gemm_combine_args_t>(
                                        context, MK_MOE_GEMM_COMBINE_ARGS_INIT, mk_moe_gemm_combine_plan);
                                  },
                                  validate, nullptr};

}  // namespace perf
