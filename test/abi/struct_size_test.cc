// SPDX-License-Identifier: MIT
// Callers that were compiled against an older or newer header: what each function makes of struct_size.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "mkernel.h"
#include "test/support/catch.h"

namespace {

// A struct as a newer header would have it: the fields known here, then new ones.
template <class Struct>
struct Newer {
  Struct known;
  unsigned char tail[40];
};

bool sentence_has(mk_comm_t comm, size_t number) {
  return std::string(mk_get_last_error(comm)).find(std::to_string(number)) != std::string::npos;
}

enum class Direction { kIn, kOut };

// `usual` is what the call answers when struct_size is right.
template <class Struct>
void check_struct_size(const char* what, mk_comm_t comm, const Struct& initial, mk_status_t usual,
                       const std::function<mk_status_t(Struct*)>& call, Direction direction = Direction::kIn) {
  using Larger = Newer<Struct>;
  static_assert(offsetof(Larger, tail) == sizeof(Struct));
  INFO(what);
  Larger larger = {initial, {}};

  REQUIRE(call(&larger.known) == usual);

  larger = {initial, {}};
  larger.known.struct_size = sizeof larger;
  REQUIRE(call(&larger.known) == usual);
  for (unsigned char byte : larger.tail) REQUIRE(byte == 0);

  for (const size_t position : {size_t{0}, size_t{13}, sizeof larger.tail - 1}) {
    larger = {initial, {}};
    larger.known.struct_size = sizeof larger;
    larger.tail[position] = 1;
    if (direction == Direction::kOut) {
      // What the caller has there is not the library's to judge, nor to change.
      REQUIRE(call(&larger.known) == usual);
      REQUIRE(larger.tail[position] == 1);
      continue;
    }
    REQUIRE(call(&larger.known) == MK_ERROR_INVALID_ARGUMENT);
    INFO(mk_get_last_error(comm));
    REQUIRE(sentence_has(comm, sizeof(Struct) + position));
  }

  // This is the first version, so nothing smaller has ever been right. The largest must not be read to its end.
  for (const size_t size : {size_t{0}, size_t{1}, size_t{8}, sizeof(Struct) - 8, sizeof(Struct) - 1,
                            size_t{1} << 40, std::numeric_limits<size_t>::max()}) {
    larger = {initial, {}};
    larger.known.struct_size = size;
    Larger before;
    std::memcpy(&before, &larger, sizeof larger);
    REQUIRE(call(&larger.known) == MK_ERROR_INVALID_ARGUMENT);
    INFO(mk_get_last_error(comm));
    REQUIRE(sentence_has(comm, size));
    REQUIRE(sentence_has(comm, sizeof(Struct)));
    REQUIRE(std::memcmp(&before, &larger, sizeof larger) == 0);
  }

  larger = {initial, {}};
  REQUIRE(call(&larger.known) == usual);
}

// A communicator of one rank on the host executor.
class Alone {
 public:
  Alone() {
    mk_comm_config_t config = MK_COMM_CONFIG_INIT;
    config.device = MK_DEVICE_HOST;
    mk_unique_id_t id;
    REQUIRE(mk_get_unique_id(&id) == MK_SUCCESS);
    REQUIRE(mk_comm_init(&comm_, &id, 1, 0, &config) == MK_SUCCESS);
  }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;
  ~Alone() { mk_comm_destroy(comm_); }
  operator mk_comm_t() const { return comm_; }

 private:
  mk_comm_t comm_ = nullptr;
};

// Operands of C[8, 8] = A[8, 8] * B[8, 8].
struct Product {
  std::vector<uint16_t> a = std::vector<uint16_t>(64), b = std::vector<uint16_t>(64);
  std::vector<float> c = std::vector<float>(64);

  template <class Args>
  Args fill(Args args) {
    args.m = args.n = args.k = 8;
    args.out_dtype = MK_DTYPE_FP32;
    args.a = a.data(), args.b = b.data(), args.c = c.data();
    args.lda = args.ldb = args.ldc = 8;
    return args;
  }
};

template <class Args>
struct GemmOperator {
  const char* name;
  Args initial;
  mk_status_t (*prepare)(mk_comm_t, const mk_gemm_maxima_t*);
  mk_status_t (*workspace_bytes)(mk_comm_t, const mk_gemm_maxima_t*, size_t*);
  mk_status_t (*plan)(mk_comm_t, const Args*, mk_plan_t*);
  mk_status_t (*run)(mk_comm_t, const Args*, mk_stream_t);
};

template <class Args>
void check_gemm_operator(const GemmOperator<Args>& op) {
  INFO(op.name);
  Alone comm;
  Product product;
  mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
  maxima.m = maxima.n = maxima.k = 8;
  maxima.out_dtype = MK_DTYPE_FP32;
  const Args args = product.fill(op.initial);
  mk_plan_t plan = MK_PLAN_INIT;
  const mk_tuning_t tuning = MK_TUNING_INIT;
  size_t bytes = 0;

  check_struct_size<mk_gemm_maxima_t>(
      "workspace_bytes", comm, maxima, MK_SUCCESS,
      [&](mk_gemm_maxima_t* value) { return op.workspace_bytes(comm, value, &bytes); });
  check_struct_size<mk_gemm_maxima_t>("prepare", comm, maxima, MK_SUCCESS,
                                      [&](mk_gemm_maxima_t* value) { return op.prepare(comm, value); });
  check_struct_size<Args>("plan, args", comm, args, MK_SUCCESS,
                          [&](Args* value) { return op.plan(comm, value, &plan); });
  check_struct_size<mk_plan_t>(
      "plan, plan", comm, plan, MK_SUCCESS, [&](mk_plan_t* value) { return op.plan(comm, &args, value); },
      Direction::kOut);
  check_struct_size<Args>("call", comm, args, MK_SUCCESS,
                          [&](Args* value) { return op.run(comm, value, nullptr); });
  check_struct_size<mk_tuning_t>("tuning of a call", comm, tuning, MK_SUCCESS, [&](mk_tuning_t* value) {
    Args tuned = args;
    tuned.tuning = value;
    return op.run(comm, &tuned, nullptr);
  });
  check_struct_size<mk_tuning_t>("tuning of the maxima", comm, tuning, MK_SUCCESS, [&](mk_tuning_t* value) {
    mk_gemm_maxima_t tuned = maxima;
    tuned.tuning = value;
    return op.workspace_bytes(comm, &tuned, &bytes);
  });
  REQUIRE(mk_comm_synchronize(comm, nullptr) == MK_SUCCESS);
}

}  // namespace

TEST_CASE("struct_size of the GEMM operators' structs") {
  SECTION("allgather_gemm") {
    check_gemm_operator<mk_allgather_gemm_args_t>({"mk_allgather_gemm", MK_ALLGATHER_GEMM_ARGS_INIT,
                                                   mk_allgather_gemm_prepare, mk_allgather_gemm_workspace_bytes,
                                                   mk_allgather_gemm_plan, mk_allgather_gemm});
  }
  SECTION("gemm_reduce_scatter") {
    check_gemm_operator<mk_gemm_reduce_scatter_args_t>(
        {"mk_gemm_reduce_scatter", MK_GEMM_REDUCE_SCATTER_ARGS_INIT, mk_gemm_reduce_scatter_prepare,
         mk_gemm_reduce_scatter_workspace_bytes, mk_gemm_reduce_scatter_plan, mk_gemm_reduce_scatter});
  }
  SECTION("gemm_allreduce") {
    check_gemm_operator<mk_gemm_allreduce_args_t>({"mk_gemm_allreduce", MK_GEMM_ALLREDUCE_ARGS_INIT,
                                                   mk_gemm_allreduce_prepare, mk_gemm_allreduce_workspace_bytes,
                                                   mk_gemm_allreduce_plan, mk_gemm_allreduce});
  }
}

TEST_CASE("struct_size of the configuration") {
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  config.device = MK_DEVICE_HOST;
  check_struct_size<mk_comm_config_t>("mk_comm_init", nullptr, config, MK_SUCCESS, [](mk_comm_config_t* value) {
    mk_unique_id_t id;
    REQUIRE(mk_get_unique_id(&id) == MK_SUCCESS);
    mk_comm_t comm = nullptr;
    const mk_status_t status = mk_comm_init(&comm, &id, 1, 0, value);
    REQUIRE((comm != nullptr) == (status == MK_SUCCESS));
    if (comm != nullptr) REQUIRE(mk_comm_destroy(comm) == MK_SUCCESS);
    return status;
  });
}

TEST_CASE("struct_size of a trace's configuration") {
  Alone comm;
  check_struct_size<mk_trace_config_t>("mk_trace_start", comm, MK_TRACE_CONFIG_INIT, MK_SUCCESS,
                                       [&](mk_trace_config_t* value) {
                                         const mk_status_t status = mk_trace_start(comm, value);
                                         return status == MK_SUCCESS ? mk_trace_stop(comm, nullptr) : status;
                                       });
}

TEST_CASE("struct_size of what the library fills in") {
  Alone comm;
  check_struct_size<mk_comm_info_t>(
      "mk_comm_get_info", comm, MK_COMM_INFO_INIT, MK_SUCCESS,
      [&](mk_comm_info_t* value) { return mk_comm_get_info(comm, value); }, Direction::kOut);
  check_struct_size<mk_async_error_t>(
      "mk_comm_get_async_error", comm, MK_ASYNC_ERROR_INIT, MK_SUCCESS,
      [&](mk_async_error_t* value) { return mk_comm_get_async_error(comm, value); }, Direction::kOut);
  check_struct_size<mk_env_t>(
      "mk_env_get", nullptr, MK_ENV_INIT, MK_SUCCESS, [](mk_env_t* value) { return mk_env_get(0, value); },
      Direction::kOut);
}

TEST_CASE("struct_size of the mixture-of-experts operators") {
  Alone comm;
  size_t bytes = 0;
  mk_plan_t plan = MK_PLAN_INIT;
  mk_moe_maxima_t maxima = MK_MOE_MAXIMA_INIT;
  mk_moe_dispatch_gemm_args_t dispatch = MK_MOE_DISPATCH_GEMM_ARGS_INIT;
  mk_moe_gemm_combine_args_t combine = MK_MOE_GEMM_COMBINE_ARGS_INIT;
  maxima.tokens = maxima.hidden = maxima.inter = dispatch.hidden = dispatch.inter = combine.hidden =
      combine.inter = 8;
  maxima.experts = maxima.topk = dispatch.experts = dispatch.topk = combine.experts = combine.topk = 1;

  check_struct_size<mk_moe_maxima_t>(
      "mk_moe_routing_bytes", nullptr, maxima, MK_SUCCESS,
      [&](mk_moe_maxima_t* value) { return mk_moe_routing_bytes(value, 2, &bytes); });
  check_struct_size<mk_moe_maxima_t>(
      "mk_moe_dispatch_gemm_prepare", comm, maxima, MK_SUCCESS,
      [&](mk_moe_maxima_t* value) { return mk_moe_dispatch_gemm_prepare(comm, value); });
  check_struct_size<mk_moe_dispatch_gemm_args_t>(
      "mk_moe_dispatch_gemm_plan", comm, dispatch, MK_SUCCESS,
      [&](mk_moe_dispatch_gemm_args_t* value) { return mk_moe_dispatch_gemm_plan(comm, value, &plan); });
  check_struct_size<mk_moe_gemm_combine_args_t>(
      "mk_moe_gemm_combine_plan", comm, combine, MK_SUCCESS,
      [&](mk_moe_gemm_combine_args_t* value) { return mk_moe_gemm_combine_plan(comm, value, &plan); });
}

TEST_CASE("struct_size of ring attention") {
  Alone comm;
  mk_plan_t plan = MK_PLAN_INIT;
  mk_ring_attention_maxima_t maxima = MK_RING_ATTENTION_MAXIMA_INIT;
  mk_ring_attention_args_t forward = MK_RING_ATTENTION_ARGS_INIT;
  mk_ring_attention_backward_args_t backward = MK_RING_ATTENTION_BACKWARD_ARGS_INIT;
  maxima.heads = maxima.kv_heads = forward.heads = forward.kv_heads = backward.heads = backward.kv_heads = 1;
  maxima.dim = forward.dim = backward.dim = 8;

  check_struct_size<mk_ring_attention_maxima_t>(
      "mk_ring_attention_prepare", comm, maxima, MK_SUCCESS,
      [&](mk_ring_attention_maxima_t* value) { return mk_ring_attention_prepare(comm, value); });
  check_struct_size<mk_ring_attention_args_t>(
      "mk_ring_attention_plan", comm, forward, MK_SUCCESS,
      [&](mk_ring_attention_args_t* value) { return mk_ring_attention_plan(comm, value, &plan); });
  check_struct_size<mk_ring_attention_backward_args_t>(
      "mk_ring_attention_backward", comm, backward, MK_SUCCESS, [&](mk_ring_attention_backward_args_t* value) {
        return mk_ring_attention_backward(comm, value, nullptr);
      });
}
