/* SPDX-License-Identifier: MIT */
/* Opens the library by name, as a plugin of a framework would, and runs a product on the host executor. The
 * test's LD_LIBRARY_PATH puts broken drivers and NIC libraries first, so this is what a machine without them
 * sees. usage: dlopen_test LIBRARY */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "mkernel.h"

static void* library;
static int missing;

static void find(const char* name, void* function, size_t bytes) {
  void* symbol = dlsym(library, name);
  if (!symbol) {
    fprintf(stderr, "dlsym: %s\n", dlerror());
    missing = 1;
  }
  /* ISO C has no conversion from an object pointer to a function pointer; POSIX lets the bits be copied. */
  memcpy(function, &symbol, bytes);
}
#define FIND(function) find("mk_" #function, &function, sizeof function)

int main(int argc, char** argv) {
  mk_status_t (*get_version)(int*);
  const char* (*get_last_error)(mk_comm_t);
  mk_status_t (*get_unique_id)(mk_unique_id_t*);
  mk_status_t (*comm_init)(mk_comm_t*, const mk_unique_id_t*, int, int, const mk_comm_config_t*);
  mk_status_t (*comm_get_info)(mk_comm_t, mk_comm_info_t*);
  mk_status_t (*comm_synchronize)(mk_comm_t, mk_stream_t);
  mk_status_t (*comm_destroy)(mk_comm_t);
  mk_status_t (*gemm_allreduce)(mk_comm_t, const mk_gemm_allreduce_args_t*, mk_stream_t);
  static const uint16_t ones[64] = {0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80};
  static float c[8];
  int version = 0;
  mk_unique_id_t id;
  mk_comm_t comm = NULL;
  mk_comm_info_t info = MK_COMM_INFO_INIT;
  mk_gemm_allreduce_args_t args = MK_GEMM_ALLREDUCE_ARGS_INIT;

  if (argc != 2) return 2;
  library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    fprintf(stderr, "dlopen: %s\n", dlerror());
    return 1;
  }
  FIND(get_version);
  FIND(get_last_error);
  FIND(get_unique_id);
  FIND(comm_init);
  FIND(comm_get_info);
  FIND(comm_synchronize);
  FIND(comm_destroy);
  FIND(gemm_allreduce);
  if (missing) return 1;

  if (get_version(&version) != MK_SUCCESS || version != MK_VERSION) {
    fprintf(stderr, "version: expected %d, saw %d\n", MK_VERSION, version);
    return 1;
  }
  /* No config: MK_DEVICE_AUTO must choose the host executor. C[1,8] = A[1,8] * B[8,8], ones in A and in B's
   * first row. */
  args.m = 1, args.n = 8, args.k = 8, args.out_dtype = MK_DTYPE_FP32;
  args.a = ones, args.lda = 8, args.b = ones, args.ldb = 8, args.c = c, args.ldc = 8;
  if (get_unique_id(&id) || comm_init(&comm, &id, 1, 0, NULL) || comm_get_info(comm, &info) ||
      gemm_allreduce(comm, &args, NULL) || comm_synchronize(comm, NULL)) {
    fprintf(stderr, "%s\n", get_last_error(comm));
    return 1;
  }
  if (info.device != MK_DEVICE_HOST || c[0] != 1.0f || c[7] != 1.0f) {
    fprintf(stderr, "expected the host executor and ones, saw device %d, c[0] %g, c[7] %g\n", (int)info.device,
            c[0], c[7]);
    return 1;
  }
  if (comm_destroy(comm) != MK_SUCCESS) return 1;
  /* Threads of a communicator that is still there must keep their code. */
  if (get_unique_id(&id) || comm_init(&comm, &id, 1, 0, NULL)) {
    fprintf(stderr, "%s\n", get_last_error(comm));
    return 1;
  }
  dlclose(library);
  if (!dlopen(argv[1], RTLD_NOW | RTLD_NOLOAD)) {
    fprintf(stderr, "dlclose took the library away\n");
    return 1;
  }
  return comm_destroy(comm) != MK_SUCCESS;
}
