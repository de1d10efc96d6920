// SPDX-License-Identifier: MIT
// Ring attention: its shape, and whether the library has it.
#include "errors.h"
#include "operators.h"

namespace perf {
namespace {

void validate(const Shape& shape, int) {
  const std::string where = "--shape \"" + shape.text() + "\": ";
  if (shape["heads"] % shape["kv_heads"]) throw UsageError(where + "kv_heads does not divide heads");
  if (shape["zigzag"] && !shape["causal"]) throw UsageError(where + "zigzag=1 needs causal=1");
}

mk_status_t availability(const Context& context) {
  mk_ring_attention_args_t args = MK_RING_ATTENTION_ARGS_INIT;
  mk_plan_t plan = MK_PLAN_INIT;
  args.batch = 1;
  args.seq = 128;
  args.heads = args.kv_heads = 1;
  args.dim = 64;
  args.dtype = context.dtypes.dtype;
  return mk_ring_attention_plan(context.comm, &args, &plan);
}

}  // namespace

const Operator kRingAttention = {"ring_attention",
                                 {{"batch"},
                                  {"seq"},
                                  {"heads", 1, 1 << 20},
                                  {"kv_heads", 1, 1 << 20},
                                  {"dim", 1, 1 << 16},
                                  {"causal", 0, 1, 0},
                                  {"zigzag", 0, 1, 0}},
                                 availability,
                                 validate,
                                 nullptr};

}  // namespace perf
