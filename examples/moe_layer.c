/* SPDX-License-Identifier: MIT */
/*
 * One mixture-of-experts layer with libmkernel: tokens to their experts and through the first weights,
 * SwiGLU, the second weights, home again. One process a rank (job.h); the id travels through the file named on
 * the command line. Built with cc -std=gnu99 moe_layer.c -lm $(pkg-config --cflags --libs mkernel)
 *
 * All tokens are equal, so that each rank can check its own result by itself.
 */
#include <math.h>

#include "job.h"

enum { HIDDEN = 32, INTER = 16, EXPERTS = 7, TOPK = 2, MAX_TOKENS = 24 };

/* What expert e does to a value: its weights are all (e + 1) / 32 for the gate, 1 / 8 for the rest. */
static float gate_weight(int expert) { return (float)(expert + 1) / 32; }

int main(int argc, char** argv) {
  const int rank = environment_number("MK_RANK", 0), nranks = environment_number("MK_NRANKS", 1);
  const int tokens = MAX_TOKENS - rank * 5 > 0 ? MAX_TOKENS - rank * 5 : 0; /* differs between ranks */
  const int per_rank = (EXPERTS + nranks - 1) / nranks;
  const int first = rank * per_rank < EXPERTS ? rank * per_rank : EXPERTS;
  const int experts = (first + per_rank < EXPERTS ? first + per_rank : EXPERTS) - first;
  const int64_t capacity = (int64_t)nranks * MAX_TOKENS * TOPK;
  uint16_t *x, *w1, *w2, *gated;
  float *up, *y, *weights;
  int32_t* idx;
  mk_moe_routing_t* routing;
  size_t routing_bytes;
  int64_t i, row, wrong = 0;
  int e, k;
  mk_unique_id_t id;
  mk_comm_t comm = NULL;
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  mk_moe_maxima_t maxima = MK_MOE_MAXIMA_INIT;
  mk_moe_dispatch_gemm_args_t dispatch = MK_MOE_DISPATCH_GEMM_ARGS_INIT;
  mk_moe_gemm_combine_args_t combine = MK_MOE_GEMM_COMBINE_ARGS_INIT;

  config.device = MK_DEVICE_HOST; /* with MK_DEVICE_CUDA, all buffers are device memory */
  if (argc < 2 || share_id(argv[1], rank, &id)) return 1;
  if (check(mk_comm_init(&comm, &id, nranks, rank, &config), "mk_comm_init", comm)) return 1;

  /* Once: the largest sizes, the same on every rank. The first product has gate and up side by side. */
  maxima.tokens = MAX_TOKENS, maxima.capacity_rows = capacity;
  maxima.hidden = HIDDEN, maxima.inter = 2 * INTER;
  maxima.experts = EXPERTS, maxima.topk = TOPK;
  maxima.dtype = MK_DTYPE_BF16, maxima.out_dtype = MK_DTYPE_FP32;
  if (check(mk_moe_dispatch_gemm_prepare(comm, &maxima), "mk_moe_dispatch_gemm_prepare", comm)) return 1;
  if (check(mk_moe_routing_bytes(&maxima, nranks, &routing_bytes), "mk_moe_routing_bytes", NULL)) return 1;

  x = (uint16_t*)malloc(MAX_TOKENS * HIDDEN * sizeof *x);
  idx = (int32_t*)malloc(MAX_TOKENS * TOPK * sizeof *idx);
  weights = (float*)malloc(MAX_TOKENS * TOPK * sizeof *weights);
  w1 = (uint16_t*)malloc((size_t)per_rank * HIDDEN * 2 * INTER * sizeof *w1);
  w2 = (uint16_t*)malloc((size_t)per_rank * INTER * HIDDEN * sizeof *w2);
  up = (float*)malloc((size_t)capacity * 2 * INTER * sizeof *up);
  gated = (uint16_t*)malloc((size_t)capacity * INTER * sizeof *gated);
  y = (float*)malloc(MAX_TOKENS * HIDDEN * sizeof *y);
  routing = (mk_moe_routing_t*)malloc(routing_bytes);
  if (!x || !idx || !weights || !w1 || !w2 || !up || !gated || !y || !routing) return 1;
  for (i = 0; i < MAX_TOKENS * HIDDEN; ++i) x[i] = to_bf16(0.5f);
  for (i = 0; i < MAX_TOKENS; ++i) {
    for (k = 0; k < TOPK; ++k) {
      idx[i * TOPK + k] = (int32_t)((i * 3 + k * 2 + rank) % EXPERTS);
      weights[i * TOPK + k] = k == 0 ? 0.75f : 0.25f;
    }
  }
  for (e = 0; e < experts; ++e) {
    for (i = 0; i < HIDDEN * 2 * INTER; ++i) {
      w1[e * HIDDEN * 2 * INTER + i] = to_bf16(i % (2 * INTER) < INTER ? gate_weight(first + e) : 0.125f);
    }
    for (i = 0; i < INTER * HIDDEN; ++i) w2[e * INTER * HIDDEN + i] = to_bf16(0.125f);
  }

  dispatch.tokens = tokens, dispatch.hidden = HIDDEN, dispatch.inter = 2 * INTER;
  dispatch.capacity_rows = capacity, dispatch.experts = EXPERTS, dispatch.topk = TOPK;
  dispatch.out_dtype = MK_DTYPE_FP32;
  dispatch.x = x, dispatch.ldx = HIDDEN, dispatch.topk_idx = idx, dispatch.w = w1;
  dispatch.y = up, dispatch.ldy = 2 * INTER;
  dispatch.routing = routing, dispatch.routing_bytes = routing_bytes;
  if (check(mk_moe_dispatch_gemm(comm, &dispatch, NULL), "mk_moe_dispatch_gemm", comm)) return 1;
  if (check(mk_comm_synchronize(comm, NULL), "mk_comm_synchronize", comm)) return 1;

  /* SwiGLU on the rows that have come. */
  for (row = 0; row < routing->num_rows; ++row) {
    for (i = 0; i < INTER; ++i) {
      const float gate = up[row * 2 * INTER + i];
      gated[row * INTER + i] = to_bf16(gate / (1 + expf(-gate)) * up[row * 2 * INTER + INTER + i]);
    }
  }

  combine.tokens = tokens, combine.hidden = HIDDEN, combine.inter = INTER;
  combine.experts = EXPERTS, combine.topk = TOPK, combine.out_dtype = MK_DTYPE_FP32;
  combine.rows = gated, combine.ld_rows = INTER, combine.w = w2;
  combine.routing = routing, combine.routing_bytes = routing_bytes;
  combine.topk_weights = weights;
  combine.y = y, combine.ldy = HIDDEN;
  if (check(mk_moe_gemm_combine(comm, &combine, NULL), "mk_moe_gemm_combine", comm)) return 1;
  if (check(mk_comm_synchronize(comm, NULL), "mk_comm_synchronize", comm)) return 1;

  for (i = 0; i < tokens * HIDDEN; ++i) {
    float expected = 0;
    for (k = 0; k < TOPK; ++k) {
      const float gate = HIDDEN * 0.5f * gate_weight(idx[i / HIDDEN * TOPK + k]);
      const float value = gate / (1 + expf(-gate)) * (HIDDEN * 0.5f * 0.125f);
      expected += weights[i / HIDDEN * TOPK + k] * INTER * 0.125f * value;
    }
    wrong += !(fabsf(y[i] - expected) <= 0.01f * fabsf(expected));
  }
  printf("rank %d of %d: %d tokens, %d rows, %d wrong\n", rank, nranks, tokens, (int)routing->num_rows,
         (int)wrong);
  if (check(mk_comm_finalize(comm), "mk_comm_finalize", comm)) return 1;
  if (check(mk_comm_destroy(comm), "mk_comm_destroy", NULL)) return 1;
  free(x), free(idx), free(weights), free(w1), free(w2), free(up), free(gated), free(y), free(routing);
  return wrong != 0;
}
