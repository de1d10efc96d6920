// SPDX-License-Identifier: MIT
// The cache of what was worked out for a call: found again by an equal call with other addresses, and by no
// call that differs in anything else.
#include "kernels/cuda/call_cache.h"

#include <functional>
#include <string>
#include <vector>

#include "test/support/catch.h"

namespace {

using namespace mk;

GemmCall some_call() {
  GemmCall call;
  call.op = MK_OPERATOR_ALLGATHER_GEMM;
  call.m = 4096, call.n = 1024, call.k = 2048;
  call.lda = 2048, call.ldb = 1024, call.ldc = 1024, call.lda_gathered = 2048;
  return call;
}

using Change = std::function<void(GemmCall&)>;

// Every field that is no address.
std::vector<Change> changes() {
  return {[](GemmCall& call) { call.op = MK_OPERATOR_GEMM_ALLREDUCE; },
          [](GemmCall& call) { call.mode = MK_ALLGATHER_WGRAD; },
          [](GemmCall& call) { ++call.m; },
          [](GemmCall& call) { ++call.n; },
          [](GemmCall& call) { ++call.k; },
          [](GemmCall& call) { call.dtype = MK_DTYPE_FP16; },
          [](GemmCall& call) { call.out_dtype = MK_DTYPE_FP32; },
          [](GemmCall& call) { call.comm_dtype = MK_DTYPE_FP32; },
          [](GemmCall& call) { call.bias_dtype = MK_DTYPE_FP32; },
          [](GemmCall& call) { call.b_layout = MK_LAYOUT_NK; },
          [](GemmCall& call) { call.accumulate = true; },
          [](GemmCall& call) { ++call.lda; },
          [](GemmCall& call) { ++call.ldb; },
          [](GemmCall& call) { ++call.ldc; },
          [](GemmCall& call) { ++call.lda_gathered; },
          [](GemmCall& call) { call.tuning.algorithm = MK_ALGORITHM_TWO_SHOT; },
          [](GemmCall& call) { call.tuning.compute_ctas = 1; },
          [](GemmCall& call) { call.tuning.copy_ctas = 1; },
          [](GemmCall& call) { call.tuning.send_ctas = 1; },
          [](GemmCall& call) { call.tuning.receive_ctas = 1; },
          [](GemmCall& call) { call.tuning.reduce_ctas = 1; },
          [](GemmCall& call) { call.tuning.tile_m = 64; },
          [](GemmCall& call) { call.tuning.tile_n = 64; },
          [](GemmCall& call) { call.tuning.chunk_bytes = 4096; }};
}

}  // namespace

TEST_CASE("a call is found again whatever its addresses") {
  CallCache<GemmCall, int> cache;
  GemmCall call = some_call();
  CHECK(cache.find(call) == nullptr);
  int& value = cache.insert(call, 7);
  char memory[8];
  call.a = memory, call.b = memory + 1, call.c = memory + 2, call.bias = memory + 3;
  call.a_gathered = memory + 4;
  CHECK(cache.find(call) == &value);
  CHECK(*cache.find(call) == 7);
}

TEST_CASE("a call that differs in any other field is another one") {
  // A field that is added to the call belongs into the comparison, and above.
  static_assert(sizeof(GemmCall) == 176);
  CallCache<GemmCall, int> cache;
  cache.insert(some_call(), 0);
  int number = 0;
  for (const Change& change : changes()) {
    GemmCall call = some_call();
    change(call);
    INFO("change " << ++number);
    CHECK(cache.find(call) == nullptr);
    cache.insert(call, number);
  }
  number = 0;
  for (const Change& change : changes()) {
    GemmCall call = some_call();
    change(call);
    REQUIRE(cache.find(call) != nullptr);
    CHECK(*cache.find(call) == ++number);
  }
  REQUIRE(cache.find(some_call()) != nullptr);
  CHECK(*cache.find(some_call()) == 0);
}

TEST_CASE("so is one of attention") {
  static_assert(sizeof(RingAttentionCall) == 200);
  RingAttentionCall some;
  some.op = MK_OPERATOR_RING_ATTENTION;
  some.batch = 2, some.seq = 4096, some.heads = 8, some.kv_heads = 4, some.dim = 128;
  const std::vector<std::function<void(RingAttentionCall&)>> attention_changes = {
      [](RingAttentionCall& call) { call.op = MK_OPERATOR_RING_ATTENTION_BACKWARD; },
      [](RingAttentionCall& call) { ++call.batch; },
      [](RingAttentionCall& call) { ++call.seq; },
      [](RingAttentionCall& call) { ++call.heads; },
      [](RingAttentionCall& call) { ++call.kv_heads; },
      [](RingAttentionCall& call) { ++call.dim; },
      [](RingAttentionCall& call) { ++call.num_sequences; },
      [](RingAttentionCall& call) { call.dtype = MK_DTYPE_FP16; },
      [](RingAttentionCall& call) { call.causal = MK_CAUSAL_ZIGZAG; },
      [](RingAttentionCall& call) { call.layout = MK_ATTENTION_BHSD; },
      [](RingAttentionCall& call) { call.scale = 2; },
      [](RingAttentionCall& call) { call.tuning.compute_ctas = 1; }};
  CallCache<RingAttentionCall, int> cache;
  cache.insert(some, 1);
  for (const auto& change : attention_changes) {
    RingAttentionCall call = some;
    change(call);
    CHECK(cache.find(call) == nullptr);
  }
  char memory[4];
  some.q = memory, some.k = memory + 1, some.v = memory + 2, some.o = memory + 3;
  REQUIRE(cache.find(some) != nullptr);
}

TEST_CASE("the oldest makes room, and values stay where they are") {
  CallCache<GemmCall, std::string, 4> cache;
  GemmCall call = some_call();
  std::vector<std::string*> values;
  for (call.m = 1; call.m <= 4; ++call.m) values.push_back(&cache.insert(call, std::to_string(call.m)));
  for (call.m = 1; call.m <= 4; ++call.m) CHECK(cache.find(call) == values[call.m - 1]);
  cache.insert(call, "5");
  CHECK(*cache.find(call) == "5");
  call.m = 1;
  CHECK(cache.find(call) == nullptr);
  for (call.m = 2; call.m <= 4; ++call.m) CHECK(cache.find(call) == values[call.m - 1]);
}

TEST_CASE("a cache that was cleared knows nothing, and learns anew") {
  CallCache<GemmCall, int> cache;
  cache.insert(some_call(), 1);
  cache.clear();
  CHECK(cache.find(some_call()) == nullptr);
  cache.insert(some_call(), 2);
  CHECK(*cache.find(some_call()) == 2);
}
