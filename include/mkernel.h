/* SPDX-License-Identifier: MIT */
/*
 * libmkernel: distributed operators that fuse communication and matrix work.
 *
 * A call replaces a pair "collective + GEMM" at a call site of NCCL and cuBLAS:
 *
 *   mk_allgather_gemm        C[M,N]   = allgather(A)[M,K] * B[K,N]
 *   mk_gemm_reduce_scatter   C[m_r,N] = rows of rank r of sum over ranks of A[M,K] * B[K,N]
 *   mk_gemm_allreduce        C[M,N]   = sum over ranks of A[M,K] * B[K,N]
 *   mk_moe_dispatch_gemm     tokens to the ranks of their experts, times the experts' weights
 *   mk_moe_gemm_combine      expert rows times weights, home again, weighted sum
 *   mk_ring_attention        exact attention over a sequence spread across ranks (+ backward)
 *
 * This header is the whole interface. It is C99 and C++17, includes no CUDA header, and only ever
 * grows. What follows holds everywhere; each function says only what is its own.
 *
 * Status. Every function but mk_status_string and mk_get_last_error returns mk_status_t;
 *   mk_get_last_error gives the sentence: what happened, expected and seen, what to do.
 *   After MK_ERROR_INVALID_ARGUMENT, _INVALID_HANDLE, _UNSUPPORTED, _NOT_PREPARED, _BUSY, _MISMATCH,
 *   _DATA and _OUT_OF_MEMORY the communicator is as usable as before. After _REMOTE, _TIMEOUT, _NETWORK,
 *   _CUDA, _SYSTEM, _INTERNAL and _ABORTED reported as asynchronous errors it is not, nor, on CUDA with ranks on
 *   several nodes, after a _MISMATCH of launches: every later call returns the same status until mk_comm_destroy or
 *   mk_comm_abort.
 * Handles. mk_comm_t and mk_memory_t are names, not addresses: use after destruction is
 *   MK_ERROR_INVALID_HANDLE, not a crash.
 * Structs. A struct that begins with struct_size is initialised with its _INIT macro. A larger struct from
 *   a newer caller is accepted when the part unknown here is zero, a smaller one from an older caller reads
 *   as if the rest were zero; the smallest accepted size is that of the version in which it first appeared.
 * Matrices are row-major with a leading dimension in elements. Row starts are 16-byte aligned: a base
 *   pointer is a multiple of 16 bytes and so is a leading dimension in bytes (no such rule for a matrix of
 *   one row). The library reads and writes nothing beyond the last element of a row.
 * Rows. Rank r of W owns rows [r*ceil(M/W), min(M, (r+1)*ceil(M/W))), m_r of them, perhaps none; experts and
 *   contiguous sequence slices follow the same rule.
 * Arithmetic: fp32 accumulation in an order fixed by topology, plan and, of experts, how many rows each gets,
 *   so the bits of a result are the same on every run.
 * Streams. A call on a CUDA communicator enqueues on the given stream and returns; buffers belong to the
 *   caller, who leaves them alone until the work has completed in stream order. A communicator on the host
 *   executor has one in-order queue of its own: stream must be NULL, and mk_comm_synchronize waits.
 *   Calls on one communicator are issued in the same order on every rank and never overlap: a caller that
 *   uses several streams orders them by events.
 * Threads. A communicator is used by one thread at a time, except mk_comm_abort, mk_comm_get_async_error
 *   and mk_get_last_error, which any thread may call at any moment; a second concurrent call answers
 *   MK_ERROR_BUSY. Different communicators are independent.
 * Host-collective functions (mk_comm_init, mk_comm_finalize, mk_mem_alloc, mk_mem_free, mk_mem_register,
 *   mk_mem_deregister, *_prepare) are called by every rank in the same order and block until all have.
 *   One thread that drives several ranks issues them between mk_group_start and mk_group_end.
 */
#ifndef MKERNEL_H
#define MKERNEL_H

#include <stddef.h>
#include <stdint.h>

#define MK_VERSION_MAJOR 0
#define MK_VERSION_MINOR 1
#define MK_VERSION_PATCH 0
/* 10000 * major + 100 * minor + patch */
#define MK_VERSION 100

#if defined(__GNUC__)
#define MK_API __attribute__((visibility("default")))
#else
#define MK_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------ types */

typedef struct mk_comm *mk_comm_t;
typedef struct mk_memory *mk_memory_t;
/* The same type as cudaStream_t and CUstream. */
typedef struct CUstream_st *mk_stream_t;

typedef enum mk_status {
  MK_SUCCESS = 0,
  MK_ERROR_INVALID_ARGUMENT = 1, /* an argument is wrong; the sentence names it, expected and seen */
  MK_ERROR_INVALID_HANDLE = 2,   /* null, never created, or already destroyed */
  MK_ERROR_UNSUPPORTED = 3,      /* in the ABI but not built, or not possible on this machine */
  MK_ERROR_NOT_PREPARED = 4,     /* beyond the prepared maxima where preparing is not allowed */
  MK_ERROR_OUT_OF_MEMORY = 5,    /* host or device memory, or max_workspace_bytes, is exhausted */
  MK_ERROR_BUSY = 6,             /* another thread is inside a call on this communicator */
  MK_ERROR_MISMATCH = 7,         /* ranks disagree; the sentence names two of them and what differs */
  MK_ERROR_DATA = 8,             /* data-dependent: a bad expert index, capacity exceeded, bad cu_seqlens */
  MK_ERROR_TIMEOUT = 9,          /* a deadline passed; the sentence names the waiter and what it waited for */
  MK_ERROR_REMOTE = 10,          /* another rank died, aborted or was cut off; the sentence names it */
  MK_ERROR_NETWORK = 11,         /* a socket or NIC failed, or the root cannot be reached */
  MK_ERROR_CUDA = 12,            /* the CUDA driver returned an error */
  MK_ERROR_SYSTEM = 13,          /* the operating system returned an error */
  MK_ERROR_ABORTED = 14,         /* mk_comm_abort was called on this communicator */
  MK_ERROR_INTERNAL = 15         /* a bug in the library */
} mk_status_t;

typedef enum mk_dtype {
  MK_DTYPE_DEFAULT = 0, /* what the field's description says */
  MK_DTYPE_BF16 = 1,
  MK_DTYPE_FP16 = 2,
  MK_DTYPE_FP32 = 3,
  MK_DTYPE_FP8_E4M3 = 4, /* not built yet: MK_ERROR_UNSUPPORTED */
  MK_DTYPE_FP8_E5M2 = 5  /* not built yet: MK_ERROR_UNSUPPORTED */
} mk_dtype_t;

typedef enum mk_device {
  MK_DEVICE_AUTO = 0, /* CUDA where a usable GPU is present, the host executor elsewhere */
  MK_DEVICE_HOST = 1, /* roles as threads; the same protocol; needs no GPU */
  MK_DEVICE_CUDA = 2  /* one persistent kernel a call, compute capability 9.0; at most 32 ranks, of which those of a
                         node have peer access to each other */
} mk_device_t;

typedef enum mk_layout {
  MK_LAYOUT_KN = 0, /* B is [K,N]: B[k,n] at b[k*ldb + n] */
  MK_LAYOUT_NK = 1  /* B is [N,K]: B[k,n] at b[n*ldb + k] */
} mk_layout_t;

typedef enum mk_operator {
  MK_OPERATOR_NONE = 0,
  MK_OPERATOR_ALLGATHER_GEMM = 1,
  MK_OPERATOR_GEMM_REDUCE_SCATTER = 2,
  MK_OPERATOR_GEMM_ALLREDUCE = 3,
  MK_OPERATOR_MOE_DISPATCH_GEMM = 4,
  MK_OPERATOR_MOE_GEMM_COMBINE = 5,
  MK_OPERATOR_RING_ATTENTION = 6,
  MK_OPERATOR_RING_ATTENTION_BACKWARD = 7
} mk_operator_t;

typedef enum mk_algorithm {
  MK_ALGORITHM_AUTO = 0,
  MK_ALGORITHM_ONE_SHOT = 1, /* GEMM+AllReduce: every rank sums everything; for few bytes. Not built for the host
                                executor: MK_ERROR_UNSUPPORTED there */
  MK_ALGORITHM_TWO_SHOT = 2  /* GEMM+AllReduce: reduce-scatter, then gather */
} mk_algorithm_t;

/* Opaque; travels between the ranks by any means the caller has (MPI, a file, a store). It contains a
 * 256-bit secret: whoever has it can join the job. */
typedef struct mk_unique_id {
  unsigned char bytes[128];
} mk_unique_id_t;

/* What a communicator is made with. Zero or NULL means "default" unless a field says otherwise. Every field
 * but cuda_device is the same on all ranks (checked; MK_ERROR_MISMATCH names the ranks and the field). */
typedef struct mk_comm_config {
  size_t struct_size;
  mk_device_t device;
  int32_t cuda_device;           /* CUDA ordinal; -1: the calling thread's current device */
  const int32_t *node_of_rank;   /* [nranks] emulated nodes: ranks with equal numbers share memory, others talk
                                    through a transport; ranks on different hosts never share a node.
                                    NULL: one node per host. Read during mk_comm_init only. */
  const char *transport;         /* "loopback" (not on CUDA), "rc", "srd", "ofi"; NULL: MK_TRANSPORT, else automatic */
  int32_t host_threads;          /* host executor: compute threads a rank; 0: cores / ranks of the host, >= 1 */
  int32_t max_ctas;              /* CUDA: upper bound of the grid; 0: all SMs */
  int32_t reserved_sms;          /* CUDA: SMs left free for other kernels */
  int32_t require_prepare;       /* 1: an unprepared call answers MK_ERROR_NOT_PREPARED instead of preparing */
  uint64_t max_workspace_bytes;  /* cap on library memory a rank; 0: none */
  int64_t init_timeout_ms;       /* mk_comm_init and every other host-collective step; 0: 60 000 */
  int64_t wait_timeout_ms;       /* a wait inside an operator for a peer that has entered it; 0: 30 000 */
  int64_t peer_timeout_ms;       /* silence after which a peer counts as dead; 0: 8 000 */
} mk_comm_config_t;
#define MK_COMM_CONFIG_INIT {sizeof(mk_comm_config_t), MK_DEVICE_AUTO, -1, NULL, NULL, 0, 0, 0, 0, 0, 0, 0, 0}

typedef struct mk_comm_info {
  size_t struct_size;
  int32_t rank;
  int32_t nranks;
  int32_t node;         /* nodes are numbered by their lowest rank */
  int32_t num_nodes;
  int32_t local_rank;   /* position among the ranks of the node, in rank order */
  int32_t local_nranks;
  mk_device_t device;   /* MK_DEVICE_HOST or MK_DEVICE_CUDA */
  int32_t cuda_device;  /* -1 on the host executor */
  int32_t host_threads; /* compute threads of the host executor, 0 on CUDA */
  int32_t prepared;     /* operators prepared so far, as bits 1 << mk_operator_t */
  uint64_t epoch;       /* operator launches so far */
  uint64_t workspace_bytes; /* library memory of this rank */
  char transport[16];   /* backend between nodes; "none" with one node */
} mk_comm_info_t;
#define MK_COMM_INFO_INIT {sizeof(mk_comm_info_t), 0, 0, 0, 0, 0, 0, MK_DEVICE_AUTO, 0, 0, 0, 0, 0, {0}}

/* Overrides of the planner; zero means "choose". Globally equal. CTAs on CUDA, threads on the host. */
typedef struct mk_tuning {
  size_t struct_size;
  mk_algorithm_t algorithm;
  int32_t compute_ctas;
  int32_t copy_ctas;    /* pushes inside the node */
  int32_t send_ctas;    /* puts to other nodes */
  int32_t receive_ctas; /* arrivals from other nodes, forwarded inside this one */
  int32_t reduce_ctas;
  int32_t tile_m;
  int32_t tile_n;
  int64_t chunk_bytes;  /* unit of transfer and of arrival flags */
} mk_tuning_t;
#define MK_TUNING_INIT {sizeof(mk_tuning_t), MK_ALGORITHM_AUTO, 0, 0, 0, 0, 0, 0, 0, 0}

/* What the planner chose for a call. */
typedef struct mk_plan {
  size_t struct_size;
  mk_algorithm_t algorithm;
  int32_t compute_ctas;
  int32_t copy_ctas;
  int32_t send_ctas;
  int32_t receive_ctas;
  int32_t reduce_ctas;
  int32_t tile_m;
  int32_t tile_n;
  int32_t chunk_rows;   /* rows a transfer unit */
  int32_t num_chunks;   /* transfer units a rank's rows are cut into, at most */
  int64_t chunk_bytes;
  int64_t link_bytes;   /* bytes this rank sends to ranks of its node */
  int64_t network_bytes; /* bytes this rank sends to other nodes */
  uint64_t workspace_bytes; /* banked workspace the call needs on this rank */
  int32_t prepared;     /* 1: covered by the maxima prepared so far */
  int32_t reserved;     /* 0 */
} mk_plan_t;
#define MK_PLAN_INIT {sizeof(mk_plan_t), MK_ALGORITHM_AUTO, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/* ----------------------------------------------------- library-wide calls */

/* Writes the version of the loaded library, encoded as MK_VERSION. Does not block.
 * MK_ERROR_INVALID_ARGUMENT: version is NULL. */
MK_API mk_status_t mk_get_version(int *version);

/* The name of a status, e.g. "MK_ERROR_TIMEOUT"; a static string, never NULL. */
MK_API const char *mk_status_string(mk_status_t status);

/* The sentence of the last error: of the communicator when comm is valid (asynchronous errors included),
 * else of the calling thread. "" when there was none. The string belongs to the library and stays valid
 * until the calling thread's next call of this function. Never NULL; any thread, any time. */
MK_API const char *mk_get_last_error(mk_comm_t comm);

typedef enum mk_log_level {
  MK_LOG_NONE = 0,
  MK_LOG_ERROR = 1,
  MK_LOG_WARN = 2,
  MK_LOG_INFO = 3,
  MK_LOG_DEBUG = 4
} mk_log_level_t;
typedef void (*mk_log_callback_t)(void *user, mk_log_level_t level, const char *line);

/* Sends log lines up to `level` to callback(user, ...), called from any thread of the library, which holds a
 * lock meanwhile: the callback must not call the library. callback NULL: back to standard error at the level of
 * MK_LOG (default: warn). Nothing is ever written to standard output. Warnings are errors of launches, as soon
 * as they are known, launches that peers have not entered for wait_timeout_ms, and trouble with the network.
 * MK_ERROR_INVALID_ARGUMENT: level is not one of mk_log_level_t. */
MK_API mk_status_t mk_set_log_callback(mk_log_callback_t callback, void *user, mk_log_level_t level);

/* One environment variable that the library reads. The strings are static but `value`, which is NULL when the
 * variable is unset and otherwise the process environment's own. */
typedef struct mk_env {
  size_t struct_size;
  const char *name;
  const char *default_value;
  const char *description;
  const char *value;
} mk_env_t;
#define MK_ENV_INIT {sizeof(mk_env_t), NULL, NULL, NULL, NULL}

/* Describes variable number `index`, from 0. MK_ERROR_INVALID_ARGUMENT: index is past the last, env is NULL
 * or its struct_size is wrong. */
MK_API mk_status_t mk_env_get(size_t index, mk_env_t *env);

/* ----------------------------------------------------------- communicator */

/* Makes an id and starts its root: a thread of this process that listens on a TCP port until one job of ranks
 * has been introduced, or the root lifetime (MK_ROOT_TIMEOUT_MS) has passed. Called by one process, usually the one
 * of rank 0, which must live until the job's mk_comm_init has returned everywhere. The address is chosen by
 * MK_SOCKET_IFNAME, the port by MK_ROOT_PORT (default: any free one).
 * Does not block. MK_ERROR_INVALID_ARGUMENT: id is NULL, or a variable is malformed. MK_ERROR_NETWORK: no usable
 * interface, or the port is taken. MK_ERROR_SYSTEM: no thread or descriptor. */
MK_API mk_status_t mk_get_unique_id(mk_unique_id_t *id);

/* Joins a communicator of nranks as `rank`. Host-collective; blocks until every rank has joined or
 * init_timeout_ms has passed. *comm is stored (with release order) before the call blocks, so that another thread
 * that reads it can mk_comm_abort the initialisation; on failure it is NULL again. config may be NULL.
 * Ranks are processes, or threads of one process. Between mk_group_start and mk_group_end the call returns
 * at once and is carried out by mk_group_end; `comm`, `id` and `config` must stay valid until then.
 * MK_ERROR_INVALID_ARGUMENT: comm or id NULL, an id not made by mk_get_unique_id, nranks outside [1, 4096], rank
 *   outside [0, nranks), a bad config field, or two ranks on one GPU. MK_ERROR_MISMATCH: ranks differ in nranks, library
 *   version, build, or configuration; or a rank was given twice. MK_ERROR_TIMEOUT: ranks are missing; the sentence lists them.
 * MK_ERROR_NETWORK: the root does not answer, or does not know the id's secret. MK_ERROR_REMOTE: another rank
 *   failed or died. MK_ERROR_UNSUPPORTED: the device, or a transport between the nodes, is not available; more than 32
 *   ranks on CUDA, or ranks of one node without peer access to each other.
 *   MK_ERROR_ABORTED: aborted meanwhile. MK_ERROR_OUT_OF_MEMORY, _CUDA, _SYSTEM. */
MK_API mk_status_t mk_comm_init(mk_comm_t *comm, const mk_unique_id_t *id, int nranks, int rank,
                                const mk_comm_config_t *config);

/* Between the two, host-collective calls of this thread are recorded (returning MK_SUCCESS, or at once an error
 * that needs no other rank); mk_group_end carries them out, calls on different communicators concurrently and
 * calls on one communicator in order, and returns the first error. May be nested; the outermost end acts.
 * Operator calls are not deferred: only unprepared ones, which would have to prepare, answer
 * MK_ERROR_NOT_PREPARED inside a group. mk_group_end without start: MK_ERROR_INVALID_ARGUMENT. */
MK_API mk_status_t mk_group_start(void);
MK_API mk_status_t mk_group_end(void);

/* Waits for the work enqueued on comm and takes leave of the other ranks; afterwards only mk_comm_destroy is
 * useful. Host-collective; blocks at most init_timeout_ms beyond the enqueued work. Returns the
 * asynchronous error if there is one. MK_ERROR_TIMEOUT, _REMOTE, _ABORTED, _INVALID_HANDLE, _BUSY. */
MK_API mk_status_t mk_comm_finalize(mk_comm_t comm);

/* Frees everything; the handle is invalid afterwards. Not host-collective. After mk_comm_finalize, or alone
 * after an error. Without a finalize, a communicator in good order is aborted first. On CUDA the caller has
 * synchronised the streams used and destroyed the graphs captured. Blocks at most 5 s. MK_ERROR_INVALID_HANDLE, _BUSY. */
MK_API mk_status_t mk_comm_destroy(mk_comm_t comm);

/* Ends everything on comm, from any thread, at any moment, during mk_comm_init too: blocked calls return
 * MK_ERROR_ABORTED, kernels end by themselves, the other ranks get MK_ERROR_REMOTE naming this one. Returns
 * within 5 s. The handle stays until mk_comm_destroy (after a failed mk_comm_init it is gone already).
 * Calling it again is allowed. MK_ERROR_INVALID_HANDLE. */
MK_API mk_status_t mk_comm_abort(mk_comm_t comm);

/* Fills *info. Does not block; on CUDA it asks the GPU for info->epoch, as mk_comm_get_flight_record does.
 * MK_ERROR_INVALID_HANDLE, MK_ERROR_INVALID_ARGUMENT (NULL or bad struct_size). */
MK_API mk_status_t mk_comm_get_info(mk_comm_t comm, mk_comm_info_t *info);

/* Host executor: waits until all calls enqueued on comm have completed; CUDA: waits for `stream`.
 * Returns the asynchronous error of the communicator, MK_SUCCESS if none. Ends by itself when the waits inside
 * the operators end (wait_timeout_ms, dead peers, abort). MK_ERROR_INVALID_HANDLE, _BUSY;
 * MK_ERROR_INVALID_ARGUMENT: a stream on the host executor. */
MK_API mk_status_t mk_comm_synchronize(mk_comm_t comm, mk_stream_t stream);

/* The first asynchronous error since it was last cleared, and the wait that reported it. */
typedef struct mk_async_error {
  size_t struct_size;
  mk_status_t status;         /* MK_SUCCESS: none, and the rest is zero (ranks -1) */
  mk_operator_t op;           /* the operator, MK_OPERATOR_NONE outside one */
  int32_t rank;               /* the rank or peer blamed; -1: unknown */
  int32_t waiter_rank;        /* who waited; -1: the error is not that of a wait */
  uint64_t epoch;             /* the launch */
  uint64_t object_index;      /* which flag, chunk, tile or counter was waited for */
  uint64_t seen;
  uint64_t expected;
  char role[16];              /* "compute", "copy", "send", "receive", "reduce", "gather", "entry", "proxy" or "host" */
  char object[32];            /* what was waited for, e.g. "chunk", "entry" */
} mk_async_error_t;
#define MK_ASYNC_ERROR_INIT \
  {sizeof(mk_async_error_t), MK_SUCCESS, MK_OPERATOR_NONE, 0, 0, 0, 0, 0, 0, {0}, {0}}

/* Fills *error without blocking; any thread. The sentence is in mk_get_last_error(comm).
 * MK_ERROR_INVALID_HANDLE, MK_ERROR_INVALID_ARGUMENT. */
MK_API mk_status_t mk_comm_get_async_error(mk_comm_t comm, mk_async_error_t *error);

/* Clears an asynchronous error of a kind that leaves the communicator usable (see Status above); calls work
 * before it is cleared too. MK_ERROR_INVALID_ARGUMENT: the error is of the other kind. MK_ERROR_INVALID_HANDLE. */
MK_API mk_status_t mk_comm_clear_async_error(mk_comm_t comm);

/* One operator launch in the flight recorder. */
typedef struct mk_flight_entry {
  uint64_t epoch;
  mk_operator_t op;
  int32_t state;          /* 1 running, 2 completed, 3 failed */
  int64_t shape[4];       /* GEMM operators: m, n, k, 0; MoE: tokens, hidden, inter, experts * 2^32 + topk; attention:
                             batch, seq, heads * 2^32 + kv_heads, dim */
  int64_t start_us;       /* since mk_comm_init */
  int64_t duration_us;    /* so far, when running */
} mk_flight_entry_t;

/* Copies the last launches of this rank, oldest first, at most `capacity` (the library keeps 64). With several ranks
 * each replay of a captured call is a launch; the kernels of one rank alone keep no record, so on CUDA such a call is
 * there, and in info->epoch, once, when it is captured. Any thread, but not in a function that CUDA calls
 * (cudaLaunchHostFunc). Waits for no launch; on CUDA it asks the GPU which have ended, by a small copy, and where that
 * stands in a queue behind other work (CUDA_DEVICE_MAX_CONNECTIONS=1) goes on after 0.2 s with what was last known.
 * MK_ERROR_INVALID_HANDLE; MK_ERROR_INVALID_ARGUMENT: a NULL pointer. */
MK_API mk_status_t mk_comm_get_flight_record(mk_comm_t comm, mk_flight_entry_t *entries, size_t capacity,
                                             size_t *count);

/* ----------------------------------------------------------------- traces */

typedef struct mk_trace_config {
  size_t struct_size;
  int64_t max_spans;      /* kept of each row, at most 2^20; further ones are counted only. 0: 65 536 on the host
                             executor, 2 048 on CUDA, where a span is 32 bytes and a CTA has 8 rows */
} mk_trace_config_t;
#define MK_TRACE_CONFIG_INIT {sizeof(mk_trace_config_t), 0}

/* Records what the launches of this rank do from now on: a row for each thread (host executor) or each role of a
 * CTA, with spans for waiting, loading, computing, storing, copying, sending and reducing; docs/tracing.md. Not
 * host-collective: a rank traces itself, and need not when others do. config may be NULL. The memory of a trace does
 * not count towards max_workspace_bytes. May be called while streams are captured: a graph that was captured during a
 * trace records in it whenever it is replayed before the stop, and keeps its memory until mk_comm_destroy; other graphs
 * are not in it. Launches enqueued before may be recorded in part.
 * MK_ERROR_INVALID_ARGUMENT: a trace is under way, or a bad config field. MK_ERROR_OUT_OF_MEMORY, _CUDA,
 *   _INVALID_HANDLE, _BUSY; the error that ended the communicator. */
MK_API mk_status_t mk_trace_start(mk_comm_t comm, const mk_trace_config_t *config);

/* Waits for the work enqueued on comm, as mk_comm_synchronize does for all streams (graphs that the caller replays he
 * has waited for himself), ends the trace and writes it to `path` as JSON of the Trace Event Format, for Perfetto or
 * chrome://tracing; an existing file is replaced. path NULL: the trace is thrown away. Process and thread of an
 * event are rank and row; times are microseconds of a clock that the ranks of a host share. Works after an error that
 * ended the communicator, too. On failure the trace goes on: call again with another path, or NULL.
 * MK_ERROR_INVALID_ARGUMENT: no trace was started, or path cannot be opened for writing. MK_ERROR_SYSTEM: writing
 *   failed, e.g. the disk is full. MK_ERROR_OUT_OF_MEMORY, _CUDA, _INVALID_HANDLE, _BUSY. */
MK_API mk_status_t mk_trace_stop(mk_comm_t comm, const char *path);

/* ------------------------------------------------------- symmetric memory */

/* Allocates `bytes` (the same on every rank) of memory that ranks of a node can write to directly: where
 * an operator's field says so, peers write an output placed here without staging. 256-byte aligned; host
 * memory on the host executor, device memory on CUDA. Host-collective. Memory belongs to the communicator: mk_mem_free, or mk_comm_destroy, frees it.
 * MK_ERROR_INVALID_ARGUMENT: ptr NULL or bytes 0. MK_ERROR_MISMATCH: ranks ask for different sizes.
 * MK_ERROR_OUT_OF_MEMORY: a rank (named) has none, or max_workspace_bytes. MK_ERROR_TIMEOUT, _REMOTE, _ABORTED, _BUSY. */
MK_API mk_status_t mk_mem_alloc(mk_comm_t comm, size_t bytes, void **ptr);

/* Frees what mk_mem_alloc gave, on every rank the same allocation. Waits for enqueued work first (host executor; on
 * CUDA the caller has synchronised). Host-collective. ptr NULL: MK_SUCCESS.
 * MK_ERROR_INVALID_ARGUMENT: not the start of an allocation. MK_ERROR_MISMATCH, _TIMEOUT, _REMOTE, _ABORTED, _BUSY. */
MK_API mk_status_t mk_mem_free(mk_comm_t comm, void *ptr);

/* Makes caller-owned memory known to the communicator (sizes may differ, 0 is allowed), so that NICs may read it
 * without staging. The caller keeps it alive until mk_mem_deregister. Host-collective. A hint: the
 * operators take unregistered pointers too, with the same results.
 * MK_ERROR_INVALID_ARGUMENT: NULL with bytes > 0, or overlapping a registered region. MK_ERROR_OUT_OF_MEMORY: too many
 * regions. MK_ERROR_TIMEOUT, _REMOTE, _ABORTED, _BUSY. */
MK_API mk_status_t mk_mem_register(mk_comm_t comm, void *ptr, size_t bytes, mk_memory_t *memory);
/* MK_ERROR_INVALID_HANDLE: not registered here, or already deregistered; else as mk_mem_register. */
MK_API mk_status_t mk_mem_deregister(mk_comm_t comm, mk_memory_t memory);

/* --------------------------------------------------------- GEMM operators */

/* Every operator has four functions.
 *
 * mk_<op>_prepare(comm, maxima): host-collective. Plans for the largest sizes that will be used (each field of a
 *   later call at most that of one prepared maxima with equal dtypes) and allocates; the maxima are the same
 *   on every rank. Growth appends: graphs captured before stay valid. MK_ERROR_MISMATCH: ranks disagree (two are
 *   named, every rank gets it). MK_ERROR_OUT_OF_MEMORY: memory or max_workspace_bytes. MK_ERROR_INVALID_ARGUMENT,
 *   _UNSUPPORTED, _TIMEOUT, _REMOTE, _ABORTED, _BUSY, _INVALID_HANDLE.
 * mk_<op>_workspace_bytes(comm, maxima, &bytes): what prepare would need on this rank in all. Does not block.
 *   MK_ERROR_INVALID_ARGUMENT, _UNSUPPORTED, _INVALID_HANDLE.
 * mk_<op>_plan(comm, args, &plan): what the call would run with; pointers in args are not looked at. Does not
 *   block. MK_ERROR_INVALID_ARGUMENT, _UNSUPPORTED, _INVALID_HANDLE.
 * mk_<op>(comm, args, stream): enqueues. Beyond the prepared maxima it prepares itself first, which blocks; where that is not
 *   possible (stream capture, inside a group, require_prepare) it returns MK_ERROR_NOT_PREPARED.
 *   args is read during the call only. MK_ERROR_INVALID_ARGUMENT, _UNSUPPORTED, _NOT_PREPARED, _BUSY,
 *   _INVALID_HANDLE; an earlier asynchronous error of the kind that ends the communicator; and, when it prepares
 *   itself, what prepare returns. Asynchronously: MK_ERROR_MISMATCH (ranks launched different operators or
 *   shapes; outputs are undefined, the communicator stays usable but for CUDA between nodes), _TIMEOUT, _REMOTE,
 *   _ABORTED, _NETWORK.
 *
 * On CUDA with ranks on several nodes every operator needs 3 CTAs a rank or more (mk_moe_gemm_combine 4), and
 *   MK_ALGORITHM_ONE_SHOT of mk_gemm_allreduce answers MK_ERROR_UNSUPPORTED. So do GEMM calls of several ranks on CUDA whose
 *   m, n or k is above 1 073 709 055, or which would need more flags or signals of transfer than a launch has: use several
 *   calls.
 *
 * Empty products: m or n may be 0; k 0 gives zero (plus bias, plus C when accumulating). */

typedef enum mk_allgather_mode {
  MK_ALLGATHER_FORWARD = 0,
  MK_ALLGATHER_WGRAD = 1 /* the gather runs along the inner dimension */
} mk_allgather_mode_t;

/* Largest sizes for the GEMM operators; fields as in the operators' arguments. */
typedef struct mk_gemm_maxima {
  size_t struct_size;
  int64_t m;
  int64_t n;
  int64_t k;
  mk_dtype_t dtype;
  mk_dtype_t out_dtype;
  mk_dtype_t comm_dtype;
  mk_allgather_mode_t mode;     /* mk_allgather_gemm only */
  const mk_tuning_t *tuning;    /* NULL: choose */
} mk_gemm_maxima_t;
#define MK_GEMM_MAXIMA_INIT                                                                                   \
  {sizeof(mk_gemm_maxima_t), 0, 0, 0, MK_DTYPE_DEFAULT, MK_DTYPE_DEFAULT, MK_DTYPE_DEFAULT, MK_ALLGATHER_FORWARD, \
   NULL}

/* mk_allgather_gemm. mode FORWARD: C[m,n] = allgather(A)[m,k] * B[k,n] (+ bias) (+ C).
 * Mode WGRAD, the gradient of a weight: X[m_r,n] in `a` is gathered along m, dY[m,k] is in `b` (b_layout KN: [m,k];
 *   NK: dY transposed, [k,m]), C[k,n] = dY^T * allgather(X) (+ C). bias must be NULL. a_gathered gets X[m,n]. On the
 *   host executor each element is summed in fp32 over the rows of each source rank, and these sums then in the order:
 *   this rank, the next ranks of its node, the next nodes; on CUDA in one fp32 sum, or a few, added in order: over this
 *   rank's rows, then over 64 rows of each other rank in turn, from the next one on, those of its node before those of
 *   other nodes. (There a row of X meets dY's rows of its own number and, as zeros behind a rank's last row, up to 63 more:
 *   an infinity in dY may become NaN.) With m 0, C is zero (plus C when accumulating). Gradients are usually accumulated
 *   over micro-batches: accumulate 1 with out_dtype FP32. (On CUDA, subnormal numbers in such a C, and sums that would
 *   be, may become 0; this is so of every operator's.)
 * Globally equal: m, k (FORWARD) or m, n (WGRAD), mode, dtype, tuning. Rank-local: the rest, n (FORWARD) or k (WGRAD)
 * included. Calls of a mode are covered by maxima of that mode. */
typedef struct mk_allgather_gemm_args {
  size_t struct_size;
  int64_t m;               /* rows over all ranks */
  int64_t n;               /* columns of this rank's B and C; WGRAD: columns of X and C */
  int64_t k;               /* inner dimension; WGRAD: columns of this rank's dY, rows of its C */
  mk_allgather_mode_t mode;
  mk_dtype_t dtype;        /* of A and B: BF16 (default) or FP16 */
  mk_dtype_t out_dtype;    /* of C: BF16, FP16 or FP32; default: dtype */
  mk_layout_t b_layout;
  int32_t accumulate;      /* 1: add to the C that is there */
  mk_dtype_t bias_dtype;   /* default: dtype; FP32 allowed */
  const void *a;           /* [m_r, k], WGRAD: [m_r, n]; may be NULL when m_r is 0 */
  int64_t lda;
  const void *b;           /* [k, n] or [n, k]; WGRAD: [m, k] or [k, m] */
  int64_t ldb;
  void *c;                 /* [m, n], WGRAD: [k, n]; overlaps no input */
  int64_t ldc;
  const void *bias;        /* [n], or NULL; WGRAD: NULL */
  void *a_gathered;        /* [m, k], WGRAD: [m, n], gets the gathered A, or NULL; from mk_mem_alloc: peers write it directly
                              (on all ranks then the same allocation, offset and leading dimension, or
                              the library stages) */
  int64_t lda_gathered;
  const mk_tuning_t *tuning;
} mk_allgather_gemm_args_t;
#define MK_ALLGATHER_GEMM_ARGS_INIT                                                                            \
  {sizeof(mk_allgather_gemm_args_t), 0, 0, 0, MK_ALLGATHER_FORWARD, MK_DTYPE_DEFAULT, MK_DTYPE_DEFAULT,        \
   MK_LAYOUT_KN, 0, MK_DTYPE_DEFAULT, NULL, 0, NULL, 0, NULL, 0, NULL, NULL, 0, NULL}

MK_API mk_status_t mk_allgather_gemm_prepare(mk_comm_t comm, const mk_gemm_maxima_t *maxima);
MK_API mk_status_t mk_allgather_gemm_workspace_bytes(mk_comm_t comm, const mk_gemm_maxima_t *maxima,
                                                     size_t *bytes);
MK_API mk_status_t mk_allgather_gemm_plan(mk_comm_t comm, const mk_allgather_gemm_args_t *args, mk_plan_t *plan);
MK_API mk_status_t mk_allgather_gemm(mk_comm_t comm, const mk_allgather_gemm_args_t *args, mk_stream_t stream);

/* mk_gemm_reduce_scatter: C[m_r, n] = this rank's rows of sum over ranks of A[m,k] * B[k,n] (+ bias) (+ C).
 * Partial products are rounded once to comm_dtype, summed in fp32 in local-rank order inside each node;
 * with several nodes the node sums are rounded to comm_dtype and summed in fp32 in node order.
 * Globally equal: m, n, dtype, out_dtype, comm_dtype, tuning. Rank-local: the rest, k included (uneven
 * slices of the inner dimension). */
typedef struct mk_gemm_reduce_scatter_args {
  size_t struct_size;
  int64_t m;               /* rows over all ranks, = rows of this rank's A */
  int64_t n;
  int64_t k;               /* this rank's part of the inner dimension */
  mk_dtype_t dtype;        /* of A and B: BF16 (default) or FP16 */
  mk_dtype_t out_dtype;    /* of C: BF16, FP16 or FP32; default: dtype */
  mk_dtype_t comm_dtype;   /* of partial sums on the links: default: out_dtype if 16-bit, else dtype; FP32 allowed */
  mk_layout_t b_layout;
  int32_t accumulate;      /* 1: add to the C that is there */
  mk_dtype_t bias_dtype;   /* default: dtype; FP32 allowed */
  const void *a;           /* [m, k] */
  int64_t lda;
  const void *b;           /* [k, n] or [n, k] */
  int64_t ldb;
  void *c;                 /* [m_r, n]; overlaps no input; may be NULL when m_r is 0 */
  int64_t ldc;
  const void *bias;        /* [n], added once after the reduction, or NULL */
  const mk_tuning_t *tuning;
} mk_gemm_reduce_scatter_args_t;
#define MK_GEMM_REDUCE_SCATTER_ARGS_INIT                                                                       \
  {sizeof(mk_gemm_reduce_scatter_args_t), 0, 0, 0, MK_DTYPE_DEFAULT, MK_DTYPE_DEFAULT, MK_DTYPE_DEFAULT,       \
   MK_LAYOUT_KN, 0, MK_DTYPE_DEFAULT, NULL, 0, NULL, 0, NULL, 0, NULL, NULL}

MK_API mk_status_t mk_gemm_reduce_scatter_prepare(mk_comm_t comm, const mk_gemm_maxima_t *maxima);
MK_API mk_status_t mk_gemm_reduce_scatter_workspace_bytes(mk_comm_t comm, const mk_gemm_maxima_t *maxima,
                                                          size_t *bytes);
MK_API mk_status_t mk_gemm_reduce_scatter_plan(mk_comm_t comm, const mk_gemm_reduce_scatter_args_t *args,
                                               mk_plan_t *plan);
MK_API mk_status_t mk_gemm_reduce_scatter(mk_comm_t comm, const mk_gemm_reduce_scatter_args_t *args,
                                          mk_stream_t stream);

/* mk_gemm_allreduce: C[m, n] = sum over ranks of A[m,k] * B[k,n] (+ bias) (+ C), the same bits on every rank that
 * has the same C and bias. Reduced like mk_gemm_reduce_scatter; the owner of a row rounds its sum once to out_dtype
 * and distributes it. bias is the owner's (equal on all ranks in ordinary use); with accumulate every rank adds the
 * distributed sum to its own C in fp32 and rounds again.
 * Globally equal: m, n, dtype, out_dtype, comm_dtype, tuning. Rank-local: the rest, k included. */
typedef struct mk_gemm_allreduce_args {
  size_t struct_size;
  int64_t m;
  int64_t n;
  int64_t k;               /* this rank's part of the inner dimension */
  mk_dtype_t dtype;        /* of A and B: BF16 (default) or FP16 */
  mk_dtype_t out_dtype;    /* of C: BF16, FP16 or FP32; default: dtype */
  mk_dtype_t comm_dtype;   /* as in mk_gemm_reduce_scatter_args_t */
  mk_layout_t b_layout;
  int32_t accumulate;
  mk_dtype_t bias_dtype;   /* default: dtype; FP32 allowed */
  const void *a;           /* [m, k] */
  int64_t lda;
  const void *b;           /* [k, n] or [n, k] */
  int64_t ldb;
  void *c;                 /* [m, n]; overlaps no input; from mk_mem_alloc: on CUDA peers write it directly, in the
                              two-shot algorithm and without accumulate (on all ranks then the same allocation, offset
                              and leading dimension, or the library stages) */
  int64_t ldc;
  const void *bias;        /* [n], or NULL */
  const mk_tuning_t *tuning;
} mk_gemm_allreduce_args_t;
#define MK_GEMM_ALLREDUCE_ARGS_INIT                                                                            \
  {sizeof(mk_gemm_allreduce_args_t), 0, 0, 0, MK_DTYPE_DEFAULT, MK_DTYPE_DEFAULT, MK_DTYPE_DEFAULT,            \
   MK_LAYOUT_KN, 0, MK_DTYPE_DEFAULT, NULL, 0, NULL, 0, NULL, 0, NULL, NULL}

MK_API mk_status_t mk_gemm_allreduce_prepare(mk_comm_t comm, const mk_gemm_maxima_t *maxima);
MK_API mk_status_t mk_gemm_allreduce_workspace_bytes(mk_comm_t comm, const mk_gemm_maxima_t *maxima,
                                                     size_t *bytes);
MK_API mk_status_t mk_gemm_allreduce_plan(mk_comm_t comm, const mk_gemm_allreduce_args_t *args, mk_plan_t *plan);
MK_API mk_status_t mk_gemm_allreduce(mk_comm_t comm, const mk_gemm_allreduce_args_t *args, mk_stream_t stream);

/* ------------------------------------------------------ mixture of experts */

/* An expert layer is mk_moe_dispatch_gemm, an activation by the caller, and mk_moe_gemm_combine. The dispatch writes
 * a routing record, from which the combine knows the way home. Both have the four functions that "GEMM operators"
 * describes, and these particulars:
 *
 * On CUDA: at most 512 experts over all ranks, hidden and inter up to 262 144, 2 CTAs a rank or more, between nodes 3
 *   and for the combine 4; else MK_ERROR_UNSUPPORTED. Pointers, the routing record's among them, are to device memory
 *   there.
 *
 * Prepare. Whatever one of the two operators prepares covers calls of both, with `inter` of any size: preparing one of
 *   them is enough. A call is covered by maxima with at least its hidden, experts, topk and (dispatch) capacity_rows,
 *   and (combine) an out_dtype at least as wide. tokens is rank-local and bounds only what maxima need: with
 *   maxima.tokens the workspace is smaller where there are several nodes, and for the combine; a dispatch that
 *   prepares itself goes by capacity_rows alone, and prepares for any out_dtype of the combine. A combine cannot
 *   prepare itself, since only its record knows a capacity: when nothing covers it, it answers MK_ERROR_NOT_PREPARED.
 * Plan. link_bytes and network_bytes are the most that this rank's own tokens can cause; workspace_bytes is that of a
 *   call which prepares itself, 0 rows for a combine.
 * Data-dependent errors, MK_ERROR_DATA, asynchronous: a number in topk_idx that is neither -1 nor below experts; an
 *   expert twice in a row of topk_idx; more rows for a rank than capacity_rows (or than routing_bytes has room for);
 *   a routing record that is not one of this rank, communicator and these sizes, or not of the same dispatch on all
 *   ranks; more tokens than what is prepared has room for. The ranks find out from the counts that they exchange
 *   before any row moves: every rank gets the same error, the sentence names the first rank and entry at fault, y and
 *   dispatched_rows keep what they held, the record says so (below), and the communicator goes on.
 * Order of sums: a combine adds a token's rows in fp32, node by node in node order, inside a node in the order of
 *   the experts; rows travel, and the sums of other nodes too, rounded once to out_dtype. */

/* Largest sizes for the mixture-of-experts operators; globally equal. */
typedef struct mk_moe_maxima {
  size_t struct_size;
  int64_t tokens;          /* T of any one rank; 0: no bound but what capacity_rows implies */
  int64_t capacity_rows;   /* rows any one rank can receive; 0: the worst case, nranks * tokens * topk */
  int64_t hidden;          /* H, a multiple of 8 */
  int64_t inter;           /* I, a multiple of 8 */
  int32_t experts;         /* E over all ranks, 1 to 65 536; rank r owns [r*ceil(E/W), ...) */
  int32_t topk;            /* 1 to 16 */
  mk_dtype_t dtype;        /* BF16 (default) or FP16 */
  mk_dtype_t out_dtype;    /* BF16, FP16 or FP32; default: dtype */
  const mk_tuning_t *tuning;
} mk_moe_maxima_t;
#define MK_MOE_MAXIMA_INIT \
  {sizeof(mk_moe_maxima_t), 0, 0, 0, 0, 0, 0, MK_DTYPE_DEFAULT, MK_DTYPE_DEFAULT, NULL}

/* One received row: where it came from. */
typedef struct mk_moe_row {
  int32_t rank;            /* its token's rank, */
  int32_t token;           /* the token's number there, */
  int32_t k;               /* and which of the token's experts this is */
} mk_moe_row_t;

/* The head of a routing record: a caller-owned, relocatable buffer of mk_moe_routing_bytes(maxima) in the memory
 * of the executor, 16-byte aligned. Offsets are bytes from the record's start, so that it may be copied as a whole.
 * Written by mk_moe_dispatch_gemm (in stream order); read by mk_moe_gemm_combine, by a later dispatch (use_routing)
 * and by the caller. Rows are grouped by local expert; inside an expert ordered by source rank, then token. All bytes
 * that the head does not name are the library's. */
typedef struct mk_moe_routing {
  uint32_t magic;
  uint32_t version;
  int32_t status;                /* mk_status_t: MK_SUCCESS, or MK_ERROR_DATA with zero rows */
  int32_t num_local_experts;
  int64_t tokens;                /* T of this rank */
  int64_t num_rows;              /* rows this rank received */
  int64_t needed_rows;           /* num_rows; when status is MK_ERROR_DATA for want of capacity: the capacity_rows that
                                    would have done, equal on all ranks; else 0 */
  int64_t expert_counts_offset;  /* int32_t[num_local_experts] */
  int64_t expert_offsets_offset; /* int32_t[num_local_experts + 1] */
  int64_t rows_offset;           /* mk_moe_row_t[num_rows] */
} mk_moe_routing_t;

typedef enum mk_index_type { MK_INDEX_INT32 = 0, MK_INDEX_INT64 = 1 } mk_index_type_t;

/* Tokens go to the ranks of their experts and through W: for each local expert e, Y rows = X rows * W_e (* row_scale),
 * y and dispatched_rows in the order of the record's rows; rows beyond num_rows are not written. A token travels
 * once to each rank that needs it, and enters each other node once (on CUDA it travels once for each of its experts).
 * Globally equal: hidden, inter, experts, topk, dtype, capacity_rows, tuning. Rank-local: the rest. */
typedef struct mk_moe_dispatch_gemm_args {
  size_t struct_size;
  int64_t tokens;          /* T of this rank, perhaps 0 */
  int64_t hidden;          /* H, a multiple of 8 */
  int64_t inter;           /* I, a multiple of 8 */
  int64_t capacity_rows;   /* rows of y and of dispatched_rows */
  int32_t experts;
  int32_t topk;
  mk_dtype_t dtype;        /* of x and w: BF16 (default) or FP16 */
  mk_dtype_t out_dtype;    /* of y: BF16, FP16 or FP32; default: dtype */
  mk_index_type_t index_type;
  mk_layout_t w_layout;    /* KN: W_e is [hidden, inter]; NK: [inter, hidden] */
  int32_t use_routing;     /* 1: `routing` holds the record of an earlier dispatch, which is read in place of topk_idx
                              and not written: the same rows in the same order (a backward pass) */
  const void *x;           /* [tokens, hidden]; may be NULL when tokens is 0 */
  int64_t ldx;
  const void *topk_idx;    /* [tokens, topk] expert numbers, -1 drops; duplicates in a row are MK_ERROR_DATA */
  const void *w;           /* [local experts, ...], packed, 16-byte aligned */
  void *y;                 /* [capacity_rows, inter]; overlaps no other buffer */
  int64_t ldy;
  mk_moe_routing_t *routing;
  size_t routing_bytes;
  void *dispatched_rows;   /* [capacity_rows, hidden] in dtype gets the rows that the product was of, or NULL */
  int64_t ld_dispatched_rows;
  const float *row_scale;  /* [tokens, topk] multiplies each dispatched row after the product, or NULL */
  const mk_tuning_t *tuning;
} mk_moe_dispatch_gemm_args_t;
#define MK_MOE_DISPATCH_GEMM_ARGS_INIT                                                                         \
  {sizeof(mk_moe_dispatch_gemm_args_t), 0, 0, 0, 0, 0, 0, MK_DTYPE_DEFAULT, MK_DTYPE_DEFAULT, MK_INDEX_INT32,  \
   MK_LAYOUT_KN, 0, NULL, 0, NULL, NULL, NULL, 0, NULL, 0, NULL, 0, NULL, NULL}

/* y[t] = sum over k of topk_weights[t,k] * (expert row of t, k) * W_e; zero for a token without experts. An expert row
 * goes straight home inside its node; the rows of another node's token are added in theirs, weighted, and enter the
 * token's node as one.
 * Globally equal: hidden, inter, experts, topk, dtype, out_dtype, tuning. Rank-local: the rest; tokens, experts and topk
 * are those of the record. */
typedef struct mk_moe_gemm_combine_args {
  size_t struct_size;
  int64_t tokens;          /* T of this rank */
  int64_t hidden;          /* H, a multiple of 8 */
  int64_t inter;           /* I, a multiple of 8 */
  int32_t experts;
  int32_t topk;
  mk_dtype_t dtype;        /* of rows and w: BF16 (default) or FP16 */
  mk_dtype_t out_dtype;    /* of y, and of rows on their way: BF16, FP16 or FP32; default: dtype */
  mk_layout_t w_layout;    /* KN: W_e is [inter, hidden]; NK: [hidden, inter] */
  const void *rows;        /* [record rows, inter], in the record's order; may be NULL when there are none */
  int64_t ld_rows;
  const void *w;           /* [local experts, ...], packed, 16-byte aligned */
  const mk_moe_routing_t *routing;
  size_t routing_bytes;
  const float *topk_weights; /* [tokens, topk] */
  void *y;                 /* [tokens, hidden]; overlaps no other buffer */
  int64_t ldy;
  const mk_tuning_t *tuning;
} mk_moe_gemm_combine_args_t;
#define MK_MOE_GEMM_COMBINE_ARGS_INIT                                                                          \
  {sizeof(mk_moe_gemm_combine_args_t), 0, 0, 0, 0, 0, MK_DTYPE_DEFAULT, MK_DTYPE_DEFAULT, MK_LAYOUT_KN, NULL, 0, \
   NULL, NULL, 0, NULL, NULL, 0, NULL}

/* Bytes of a routing record for calls within maxima in a communicator of nranks; looks at tokens, capacity_rows, experts
 * and topk. Does not block. MK_ERROR_INVALID_ARGUMENT: a NULL pointer, nranks outside [1, 4096], or a maxima field out
 * of range. */
MK_API mk_status_t mk_moe_routing_bytes(const mk_moe_maxima_t *maxima, int nranks, size_t *bytes);

MK_API mk_status_t mk_moe_dispatch_gemm_prepare(mk_comm_t comm, const mk_moe_maxima_t *maxima);
MK_API mk_status_t mk_moe_dispatch_gemm_workspace_bytes(mk_comm_t comm, const mk_moe_maxima_t *maxima,
                                                        size_t *bytes);
MK_API mk_status_t mk_moe_dispatch_gemm_plan(mk_comm_t comm, const mk_moe_dispatch_gemm_args_t *args,
                                             mk_plan_t *plan);
MK_API mk_status_t mk_moe_dispatch_gemm(mk_comm_t comm, const mk_moe_dispatch_gemm_args_t *args,
                                        mk_stream_t stream);

MK_API mk_status_t mk_moe_gemm_combine_prepare(mk_comm_t comm, const mk_moe_maxima_t *maxima);
MK_API mk_status_t mk_moe_gemm_combine_workspace_bytes(mk_comm_t comm, const mk_moe_maxima_t *maxima,
                                                       size_t *bytes);
MK_API mk_status_t mk_moe_gemm_combine_plan(mk_comm_t comm, const mk_moe_gemm_combine_args_t *args,
                                            mk_plan_t *plan);
MK_API mk_status_t mk_moe_gemm_combine(mk_comm_t comm, const mk_moe_gemm_combine_args_t *args,
                                       mk_stream_t stream);

/* ---------------------------------------------------------- ring attention */

/* Exact attention over a sequence that is spread over the ranks. Keys and values travel, inside a node by pushes, once
 * into each other node that needs them, while attention over those at hand runs; o, lse and gradients accumulate in
 * fp32. A chunk travels only to ranks of which a query may see one of its keys.
 *
 * On CUDA: dim at most 128, seq below 2^30, and batch * kv_heads * (W-1), twice that when zigzag, at most 262 144, of
 *   the backward 131 072. Between nodes 3 CTAs a rank or more, and of the backward batch * kv_heads * (3W-L-1), twice
 *   that when zigzag, at most 262 144 (less where nodes have not all L ranks).
 *   Of packed sequences as many as a rank's staging memory has room for (8 ranks: a million; the error says how many).
 *   Beyond that MK_ERROR_UNSUPPORTED. A call of the backward is two kernels.
 * Slices. Not zigzag: rank r holds the r-th slice of the sequence (Rows, above), packed sequences included, which
 *   may lie inside a rank or span several. Zigzag: of each sequence, cut into 2W slices by the same rule, rank r holds
 *   slices r and 2W-1-r, in this order, sequence after sequence. s_r positions in all, perhaps none.
 * Tensors are packed, without leading dimensions: q, o, d_o, dq [batch, s_r, heads, dim], k, v, dk, dv [batch, s_r,
 *   kv_heads, dim], or with MK_ATTENTION_BHSD [batch, heads, s_r, dim]; 16-byte aligned. dim is a multiple of 8, at most
 *   1024. lse is [batch, heads, s_r], natural logarithm, whatever the layout; 4-byte aligned. Query head h goes with
 *   key head h / (heads / kv_heads). A pointer may be NULL on a rank that holds no position, except with sequences
 *   packed zigzag, where the call cannot know. An output overlaps no input and no other output.
 * Packed sequences: batch is 1; sequence i has the positions [cu_seqlens[i], cu_seqlens[i+1]), perhaps none, and a query
 *   sees keys of its own sequence only. cu_seqlens is in the memory of the executor, equal on all ranks, and read when
 *   the launch runs. That it starts with 0, never falls and ends with seq is checked there, on every rank before
 *   anything travels: else the asynchronous error is MK_ERROR_DATA and the outputs are left as they were. Ranks whose
 *   cu_seqlens differ get MK_ERROR_MISMATCH.
 * A query all of whose visible logits are -inf gets o = 0 and lse = -inf, and gradients of zero.
 * Bits are fixed by topology and plan: a query takes its own rank's keys first, then the other ranks' from the next one
 *   on, chunk by chunk, whenever they arrive; parts of dK and dV are summed in local-rank order, then in node order.
 * A plan counts packed sequences as one, since it looks at no pointer. */

typedef enum mk_causal {
  MK_CAUSAL_NONE = 0,
  MK_CAUSAL_CONTIGUOUS = 1, /* rank r holds the r-th slice of the sequence */
  MK_CAUSAL_ZIGZAG = 2      /* 2W slices, rank r holds slices r and 2W-1-r (of each sequence when packed) */
} mk_causal_t;

typedef enum mk_attention_layout {
  MK_ATTENTION_BSHD = 0, /* [batch, s_r, heads, dim] */
  MK_ATTENTION_BHSD = 1  /* [batch, heads, s_r, dim] */
} mk_attention_layout_t;

typedef struct mk_ring_attention_maxima {
  size_t struct_size;
  int64_t batch;
  int64_t seq;             /* over all ranks */
  int32_t heads;
  int32_t kv_heads;
  int32_t dim;
  int32_t num_sequences;   /* packed sequences, 0 when not packed */
  mk_dtype_t dtype;
  const mk_tuning_t *tuning;
} mk_ring_attention_maxima_t;
#define MK_RING_ATTENTION_MAXIMA_INIT {sizeof(mk_ring_attention_maxima_t), 0, 0, 0, 0, 0, 0, MK_DTYPE_DEFAULT, NULL}

/* o = softmax(scale * q k^T + mask) v over the whole sequence; each rank holds its slice. Globally equal: all sizes,
 * causal, layout, dtype, scale, cu_seqlens, tuning. The caller's k and v are not modified. Prepared maxima hold for
 * every causal mode and layout. */
typedef struct mk_ring_attention_args {
  size_t struct_size;
  int64_t batch;
  int64_t seq;
  int32_t heads;
  int32_t kv_heads;        /* divides heads */
  int32_t dim;
  mk_causal_t causal;
  mk_attention_layout_t layout;
  mk_dtype_t dtype;
  float softmax_scale;     /* 0: 1/sqrt(dim) */
  int32_t num_sequences;   /* packed sequences (batch is 1), 0 when not packed */
  const int32_t *cu_seqlens; /* [num_sequences + 1] prefix sums over the whole sequence, or NULL */
  const void *q;
  const void *k;
  const void *v;
  void *o;
  float *lse;              /* [batch, heads, s_r], or NULL (forward) */
  const mk_tuning_t *tuning;
} mk_ring_attention_args_t;
#define MK_RING_ATTENTION_ARGS_INIT                                                                            \
  {sizeof(mk_ring_attention_args_t), 0, 0, 0, 0, 0, MK_CAUSAL_NONE, MK_ATTENTION_BSHD, MK_DTYPE_DEFAULT, 0.0f, \
   0, NULL, NULL, NULL, NULL, NULL, NULL, NULL}

/* Gradients of mk_ring_attention; o and lse are those of the forward call on the same arguments. With P the weights,
 * dv = P^T d_o, dS = P * (d_o v^T - rowsum(d_o * o)), dq = scale dS k, dk = scale dS^T q. Parts of dk and dv travel in
 * fp32 and are rounded once. Globally equal: as in mk_ring_attention. */
typedef struct mk_ring_attention_backward_args {
  size_t struct_size;
  int64_t batch;
  int64_t seq;
  int32_t heads;
  int32_t kv_heads;
  int32_t dim;
  mk_causal_t causal;
  mk_attention_layout_t layout;
  mk_dtype_t dtype;
  float softmax_scale;
  int32_t num_sequences;
  const int32_t *cu_seqlens;
  const void *q;
  const void *k;
  const void *v;
  const void *o;
  const float *lse;
  const void *d_o;
  void *dq;
  void *dk;
  void *dv;
  const mk_tuning_t *tuning;
} mk_ring_attention_backward_args_t;
#define MK_RING_ATTENTION_BACKWARD_ARGS_INIT                                                                   \
  {sizeof(mk_ring_attention_backward_args_t), 0, 0, 0, 0, 0, MK_CAUSAL_NONE, MK_ATTENTION_BSHD,                \
   MK_DTYPE_DEFAULT, 0.0f, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL}

MK_API mk_status_t mk_ring_attention_prepare(mk_comm_t comm, const mk_ring_attention_maxima_t *maxima);
MK_API mk_status_t mk_ring_attention_workspace_bytes(mk_comm_t comm, const mk_ring_attention_maxima_t *maxima,
                                                     size_t *bytes);
MK_API mk_status_t mk_ring_attention_plan(mk_comm_t comm, const mk_ring_attention_args_t *args, mk_plan_t *plan);
MK_API mk_status_t mk_ring_attention(mk_comm_t comm, const mk_ring_attention_args_t *args, mk_stream_t stream);

MK_API mk_status_t mk_ring_attention_backward_prepare(mk_comm_t comm, const mk_ring_attention_maxima_t *maxima);
MK_API mk_status_t mk_ring_attention_backward_workspace_bytes(mk_comm_t comm,
                                                              const mk_ring_attention_maxima_t *maxima,
                                                              size_t *bytes);
MK_API mk_status_t mk_ring_attention_backward_plan(mk_comm_t comm, const mk_ring_attention_backward_args_t *args,
                                                   mk_plan_t *plan);
MK_API mk_status_t mk_ring_attention_backward(mk_comm_t comm, const mk_ring_attention_backward_args_t *args,
                                              mk_stream_t stream);

#ifdef __cplusplus
}
#endif

/* A complete program: one process a rank, started by any launcher that sets MK_RANK and MK_NRANKS, the id
 * passed through the file named on the command line. Built with
 *   cc example.c $(pkg-config --cflags --libs mkernel)
 */
#ifdef MKERNEL_EXAMPLE
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int check(mk_status_t status, const char *what, mk_comm_t comm) {
  if (status == MK_SUCCESS) return 0;
  fprintf(stderr, "%s: %s: %s\n", what, mk_status_string(status), mk_get_last_error(comm));
  return 1;
}

static int share_id(const char *path, int rank, mk_unique_id_t *id) {
  char part[4096];
  FILE *file;
  int tries;
  if (rank == 0) {
    if (check(mk_get_unique_id(id), "mk_get_unique_id", NULL)) return 1;
    snprintf(part, sizeof part, "%s.part", path);
    file = fopen(part, "wb");
    if (!file || fwrite(id, sizeof *id, 1, file) != 1 || fclose(file) || rename(part, path)) return 1;
    return 0;
  }
  for (tries = 0; tries < 600; ++tries) {
    file = fopen(path, "rb");
    if (file) {
      int got = fread(id, sizeof *id, 1, file) == 1;
      fclose(file);
      return !got;
    }
    usleep(100000);
  }
  return 1;
}

/* C[256,64] = allgather(A)[256,128] * B[128,64] with ones: every element of C is 128. */
int main(int argc, char **argv) {
  enum { M = 256, N = 64, K = 128 };
  const int rank = atoi(getenv("MK_RANK") ? getenv("MK_RANK") : "0");
  const int nranks = atoi(getenv("MK_NRANKS") ? getenv("MK_NRANKS") : "1");
  const uint16_t one = 0x3f80; /* 1.0 in bf16 */
  const int64_t rows = (M + nranks - 1) / nranks;
  int64_t i, wrong = 0;
  mk_unique_id_t id;
  mk_comm_t comm = NULL;
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
  uint16_t *a, *b;
  float *c;

  config.device = MK_DEVICE_HOST; /* with MK_DEVICE_CUDA, a, b and c are device pointers */
  if (argc < 2 || share_id(argv[1], rank, &id)) return 1;
  if (check(mk_comm_init(&comm, &id, nranks, rank, &config), "mk_comm_init", comm)) return 1;

  a = (uint16_t *)malloc((size_t)rows * K * sizeof *a);
  b = (uint16_t *)malloc((size_t)K * N * sizeof *b);
  c = (float *)malloc((size_t)M * N * sizeof *c);
  if (!a || !b || !c) return 1;
  for (i = 0; i < rows * K; ++i) a[i] = one;
  for (i = 0; i < K * N; ++i) b[i] = one;

  args.m = M, args.n = N, args.k = K;
  args.dtype = MK_DTYPE_BF16, args.out_dtype = MK_DTYPE_FP32;
  args.a = a, args.lda = K;
  args.b = b, args.ldb = N;
  args.c = c, args.ldc = N;
  if (check(mk_allgather_gemm(comm, &args, NULL), "mk_allgather_gemm", comm)) return 1;
  if (check(mk_comm_synchronize(comm, NULL), "mk_comm_synchronize", comm)) return 1;

  for (i = 0; i < M * N; ++i) wrong += c[i] != (float)K;
  printf("rank %d of %d: %d wrong\n", rank, nranks, (int)wrong);
  if (check(mk_comm_finalize(comm), "mk_comm_finalize", comm)) return 1;
  if (check(mk_comm_destroy(comm), "mk_comm_destroy", NULL)) return 1;
  free(a), free(b), free(c);
  return wrong != 0;
}
#endif /* MKERNEL_EXAMPLE */

#endif /* MKERNEL_H */
