// SPDX-License-Identifier: MIT
// Bad arguments of the functions that are not GEMM operators, and bad handles of all.
#include <cstdint>

#include "test/multi_rank/bad_arguments.h"

namespace mk::test {
namespace {

constexpr auto kInvalid = MK_ERROR_INVALID_ARGUMENT;

template <class Args>
using Launch = mk_status_t (*)(mk_comm_t, const Args*, mk_stream_t);
template <class Args>
using Plan = mk_status_t (*)(mk_comm_t, const Args*, mk_plan_t*);
template <class Maxima>
using Prepare = mk_status_t (*)(mk_comm_t, const Maxima*);
template <class Maxima>
using WorkspaceBytes = mk_status_t (*)(mk_comm_t, const Maxima*, size_t*);

// The four functions of an operator, on valid structs.
template <class Args, class Maxima>
void add_operator(std::vector<BadCall>& calls, const std::string& name, mk_status_t expected,
                  const std::vector<std::string>& says, const Args& args, const Maxima& maxima,
                  Prepare<Maxima> prepare, WorkspaceBytes<Maxima> workspace_bytes, Plan<Args> plan,
                  Launch<Args> launch) {
  const auto with = [&](const std::string& function) {
    std::vector<std::string> all = says;
    all.push_back(function);
    return all;
  };
  calls.push_back({name + "_prepare", expected, with(name + "_prepare"),
                   [=](mk_comm_t comm) { return prepare(comm, &maxima); }});
  calls.push_back({name + "_workspace_bytes", expected, with(name + "_workspace_bytes"), [=](mk_comm_t comm) {
                     size_t bytes = 0;
                     return workspace_bytes(comm, &maxima, &bytes);
                   }});
  calls.push_back({name + "_plan", expected, with(name + "_plan"), [=](mk_comm_t comm) {
                     mk_plan_t chosen = MK_PLAN_INIT;
                     return plan(comm, &args, &chosen);
                   }});
  calls.push_back(
      {name, expected, with(name + ":"), [=](mk_comm_t comm) { return launch(comm, &args, nullptr); }});
}

}  // namespace

// Every function that takes a communicator; `comm` is the bad one.
std::vector<BadCall> bad_handle_calls() {
  const auto bad = MK_ERROR_INVALID_HANDLE;
  std::vector<BadCall> calls;
  const std::vector<std::string> says = {"comm", "expected"};
  const auto add = [&](const std::string& name, std::function<mk_status_t(mk_comm_t)> call) {
    calls.push_back({name, bad, {name, "comm", "expected"}, std::move(call)});
  };
  mk_gemm_maxima_t gemm = MK_GEMM_MAXIMA_INIT;
  add_operator(calls, "mk_allgather_gemm", bad, says, mk_allgather_gemm_args_t MK_ALLGATHER_GEMM_ARGS_INIT,
               gemm, mk_allgather_gemm_prepare, mk_allgather_gemm_workspace_bytes, mk_allgather_gemm_plan,
               mk_allgather_gemm);
  add_operator(calls, "mk_gemm_reduce_scatter", bad, says,
               mk_gemm_reduce_scatter_args_t MK_GEMM_REDUCE_SCATTER_ARGS_INIT, gemm,
               mk_gemm_reduce_scatter_prepare, mk_gemm_reduce_scatter_workspace_bytes,
               mk_gemm_reduce_scatter_plan, mk_gemm_reduce_scatter);
  add_operator(calls, "mk_gemm_allreduce", bad, says, mk_gemm_allreduce_args_t MK_GEMM_ALLREDUCE_ARGS_INIT,
               gemm, mk_gemm_allreduce_prepare, mk_gemm_allreduce_workspace_bytes, mk_gemm_allreduce_plan,
               mk_gemm_allreduce);
  mk_moe_maxima_t moe = MK_MOE_MAXIMA_INIT;
  moe.hidden = moe.inter = 8;
  moe.experts = moe.topk = 1;
  add_operator(calls, "mk_moe_dispatch_gemm", bad, says,
               mk_moe_dispatch_gemm_args_t MK_MOE_DISPATCH_GEMM_ARGS_INIT, moe, mk_moe_dispatch_gemm_prepare,
               mk_moe_dispatch_gemm_workspace_bytes, mk_moe_dispatch_gemm_plan, mk_moe_dispatch_gemm);
  add_operator(calls, "mk_moe_gemm_combine", bad, says,
               mk_moe_gemm_combine_args_t MK_MOE_GEMM_COMBINE_ARGS_INIT, moe, mk_moe_gemm_combine_prepare,
               mk_moe_gemm_combine_workspace_bytes, mk_moe_gemm_combine_plan, mk_moe_gemm_combine);
  const auto attention = [](auto value) {
    value.heads = value.kv_heads = 1;
    value.dim = 8;
    return value;
  };
  const auto maxima = attention(mk_ring_attention_maxima_t MK_RING_ATTENTION_MAXIMA_INIT);
  add_operator(calls, "mk_ring_attention", bad, says,
               attention(mk_ring_attention_args_t MK_RING_ATTENTION_ARGS_INIT), maxima,
               mk_ring_attention_prepare, mk_ring_attention_workspace_bytes, mk_ring_attention_plan,
               mk_ring_attention);
  add_operator(calls, "mk_ring_attention_backward", bad, says,
               attention(mk_ring_attention_backward_args_t MK_RING_ATTENTION_BACKWARD_ARGS_INIT), maxima,
               mk_ring_attention_backward_prepare, mk_ring_attention_backward_workspace_bytes,
               mk_ring_attention_backward_plan, mk_ring_attention_backward);
  add("mk_comm_finalize", [](mk_comm_t comm) { return mk_comm_finalize(comm); });
  add("mk_comm_destroy", [](mk_comm_t comm) { return mk_comm_destroy(comm); });
  add("mk_comm_abort", [](mk_comm_t comm) { return mk_comm_abort(comm); });
  add("mk_comm_synchronize", [](mk_comm_t comm) { return mk_comm_synchronize(comm, nullptr); });
  add("mk_comm_clear_async_error", [](mk_comm_t comm) { return mk_comm_clear_async_error(comm); });
  add("mk_comm_get_info", [](mk_comm_t comm) {
    mk_comm_info_t info = MK_COMM_INFO_INIT;
    return mk_comm_get_info(comm, &info);
  });
  add("mk_comm_get_async_error", [](mk_comm_t comm) {
    mk_async_error_t error = MK_ASYNC_ERROR_INIT;
    return mk_comm_get_async_error(comm, &error);
  });
  add("mk_comm_get_flight_record", [](mk_comm_t comm) {
    mk_flight_entry_t entry;
    size_t count = 0;
    return mk_comm_get_flight_record(comm, &entry, 1, &count);
  });
  add("mk_trace_start", [](mk_comm_t comm) { return mk_trace_start(comm, nullptr); });
  add("mk_trace_stop", [](mk_comm_t comm) { return mk_trace_stop(comm, nullptr); });
  add("mk_mem_alloc", [](mk_comm_t comm) {
    void* pointer = nullptr;
    return mk_mem_alloc(comm, 64, &pointer);
  });
  add("mk_mem_free", [](mk_comm_t comm) { return mk_mem_free(comm, nullptr); });
  add("mk_mem_register", [](mk_comm_t comm) {
    mk_memory_t memory = nullptr;
    return mk_mem_register(comm, nullptr, 0, &memory);
  });
  add("mk_mem_deregister", [](mk_comm_t comm) { return mk_mem_deregister(comm, nullptr); });
  return calls;
}

std::vector<BadCall> bad_memory_calls() {
  static char buffer[64];
  std::vector<BadCall> calls;
  const auto add = [&](const char* name, mk_status_t expected, std::vector<std::string> says,
                       std::function<mk_status_t(mk_comm_t)> call) {
    calls.push_back({name, expected, std::move(says), std::move(call)});
  };
  add("mk_mem_alloc: ptr NULL", kInvalid, {"mk_mem_alloc", "ptr", "NULL"},
      [](mk_comm_t comm) { return mk_mem_alloc(comm, 64, nullptr); });
  const auto allocate = [](size_t bytes) {
    return [bytes](mk_comm_t comm) {
      void* pointer = nullptr;
      return mk_mem_alloc(comm, bytes, &pointer);
    };
  };
  add("mk_mem_alloc: 0 bytes", kInvalid, {"mk_mem_alloc", "bytes", "saw 0"}, allocate(0));
  add("mk_mem_alloc: SIZE_MAX", kInvalid, {"bytes", "18446744073709551615"}, allocate(SIZE_MAX));
  add("mk_mem_free: foreign", kInvalid, {"mk_mem_free", "expected", "0x"},
      [](mk_comm_t comm) { return mk_mem_free(comm, buffer); });
  add("mk_mem_register: memory NULL", kInvalid, {"mk_mem_register", "memory", "NULL"},
      [](mk_comm_t comm) { return mk_mem_register(comm, buffer, 64, nullptr); });
  add("mk_mem_register: ptr NULL", kInvalid, {"mk_mem_register", "ptr", "64 bytes", "NULL"},
      [](mk_comm_t comm) {
        mk_memory_t memory = nullptr;
        return mk_mem_register(comm, nullptr, 64, &memory);
      });
  add("mk_mem_register: wraps around", kInvalid, {"mk_mem_register", "bytes", "wrap"}, [](mk_comm_t comm) {
    mk_memory_t memory = nullptr;
    return mk_mem_register(comm, buffer, SIZE_MAX, &memory);
  });
  add("mk_mem_deregister: never registered", MK_ERROR_INVALID_HANDLE, {"mk_mem_deregister", "expected"},
      [](mk_comm_t comm) { return mk_mem_deregister(comm, reinterpret_cast<mk_memory_t>(0x1234)); });
  add("mk_mem_deregister: NULL", MK_ERROR_INVALID_HANDLE, {"mk_mem_deregister", "expected"},
      [](mk_comm_t comm) { return mk_mem_deregister(comm, nullptr); });
  return calls;
}

std::vector<BadCall> bad_query_calls() {
  std::vector<BadCall> calls;
  const auto add = [&](const char* name, std::vector<std::string> says,
                       std::function<mk_status_t(mk_comm_t)> call) {
    calls.push_back({name, kInvalid, std::move(says), std::move(call)});
  };
  add("mk_comm_get_info: NULL", {"info", "NULL"},
      [](mk_comm_t comm) { return mk_comm_get_info(comm, nullptr); });
  add("mk_comm_get_info: struct_size", {"info.struct_size", "saw 8"}, [](mk_comm_t comm) {
    mk_comm_info_t info = MK_COMM_INFO_INIT;
    info.struct_size = 8;
    return mk_comm_get_info(comm, &info);
  });
  add("mk_comm_get_async_error: NULL", {"error", "NULL"},
      [](mk_comm_t comm) { return mk_comm_get_async_error(comm, nullptr); });
  add("mk_comm_get_async_error: struct_size", {"error.struct_size", "saw 0"}, [](mk_comm_t comm) {
    mk_async_error_t error = MK_ASYNC_ERROR_INIT;
    error.struct_size = 0;
    return mk_comm_get_async_error(comm, &error);
  });
  add("mk_comm_get_flight_record: entries NULL", {"entries", "NULL"}, [](mk_comm_t comm) {
    size_t count = 0;
    return mk_comm_get_flight_record(comm, nullptr, 4, &count);
  });
  add("mk_comm_get_flight_record: count NULL", {"count", "NULL"}, [](mk_comm_t comm) {
    mk_flight_entry_t entry;
    return mk_comm_get_flight_record(comm, &entry, 1, nullptr);
  });
  add("mk_comm_synchronize: a stream", {"stream", "NULL", "0x40"},
      [](mk_comm_t comm) { return mk_comm_synchronize(comm, reinterpret_cast<mk_stream_t>(0x40)); });
  return calls;
}

}  // namespace mk::test
