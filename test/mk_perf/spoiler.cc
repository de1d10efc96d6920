// SPDX-License-Identifier: MIT
// Preloaded into mk-perf to stand for a library with a bug: after gemm_allreduce has completed on the host
// executor, what MK_PERF_SPOIL asks for happens to its output. The verdict must follow.
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "mkernel.h"

namespace {

mk_gemm_allreduce_args_t last_args = MK_GEMM_ALLREDUCE_ARGS_INIT;
int launches = 0;

void spoil(const char* how) {
  auto* c = static_cast<uint16_t*>(last_args.c);
  if (!c) return;
  if (std::strcmp(how, "bit") == 0) c[last_args.n / 2] ^= 1;
  if (std::strcmp(how, "unwritten") == 0) c[last_args.n / 2] = 0x7fd5;
  // Only what comes after the first checked launches: the same inputs then give other bits.
  if (std::strcmp(how, "late") == 0 && launches > 10) c[0] ^= 1;
}

template <typename Function>
Function* next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" MK_API mk_status_t mk_gemm_allreduce(mk_comm_t comm, const mk_gemm_allreduce_args_t* args,
                                                mk_stream_t stream) {
  last_args = *args;
  ++launches;
  return next(&mk_gemm_allreduce, "mk_gemm_allreduce")(comm, args, stream);
}

// Who asks for symmetric memory finds none.
extern "C" MK_API mk_status_t mk_mem_alloc(mk_comm_t comm, size_t bytes, void** ptr) {
  const char* how = std::getenv("MK_PERF_SPOIL");
  if (how && std::strcmp(how, "no symmetric memory") == 0) return MK_ERROR_OUT_OF_MEMORY;
  return next(&mk_mem_alloc, "mk_mem_alloc")(comm, bytes, ptr);
}

extern "C" MK_API mk_status_t mk_comm_synchronize(mk_comm_t comm, mk_stream_t stream) {
  const mk_status_t status = next(&mk_comm_synchronize, "mk_comm_synchronize")(comm, stream);
  const char* how = std::getenv("MK_PERF_SPOIL");
  if (how) spoil(how);
  last_args.c = nullptr;
  return status;
}
