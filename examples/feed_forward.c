/* SPDX-License-Identifier: MIT */
/*
 * A feed-forward layer of a model that is trained with sequence and tensor parallelism, forward and backward,
 * with libmkernel: Y = relu(X W1^T) W2. Each rank has some rows of X, Y and their gradients, and of W1 and W2,
 * both [units, HIDDEN], the rows of its own units. Every collective is inside a product: two all-gathers, two
 * reduce-scatters, and the gathers of the two weights' gradients. One process a rank (job.h); the id travels
 * through the file named on the command line. Built with cc -std=gnu99 feed_forward.c $(pkg-config --cflags
 * --libs mkernel)
 *
 * All numbers are -1, 0 or 1, and all sums small, so that every result is exact and each rank can check its
 * own.
 */
#include "job.h"

enum { ROWS = 50, HIDDEN = 16 };

/* Ranks need not have equally many; a multiple of 8, for rows of 16-bit numbers are aligned to 16 bytes. */
static int units_of(int rank) { return 8 * (1 + rank % 3); }

/* What the matrices hold: X and dY [row, j], the weights [unit over all ranks, j]. */
enum { X, DY, W1, W2 };
static float value(int matrix, int row, int j) {
  return (float)((row * 7 + j * 5 + row * j * (matrix + 1)) % 3 - 1);
}

static void fill(uint16_t* to, int matrix, int first_row, int rows) {
  int i;
  for (i = 0; i < rows * HIDDEN; ++i) to[i] = to_bf16(value(matrix, first_row + i / HIDDEN, i % HIDDEN));
}

/* c[ROWS, units] = allgather(a) * W^T for a weight of this rank, [units, HIDDEN]. */
static mk_status_t gather(mk_comm_t comm, const uint16_t* a, const uint16_t* weight, int units, float* c) {
  mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
  args.m = ROWS, args.n = units, args.k = HIDDEN;
  args.out_dtype = MK_DTYPE_FP32;
  args.a = a, args.lda = HIDDEN;
  args.b = weight, args.ldb = HIDDEN, args.b_layout = MK_LAYOUT_NK;
  args.c = c, args.ldc = units;
  return mk_allgather_gemm(comm, &args, NULL);
}

/* c, this rank's rows of the sum over ranks of a[ROWS, units] * W. */
static mk_status_t scatter(mk_comm_t comm, const uint16_t* a, const uint16_t* weight, int units, float* c) {
  mk_gemm_reduce_scatter_args_t args = MK_GEMM_REDUCE_SCATTER_ARGS_INIT;
  args.m = ROWS, args.n = HIDDEN, args.k = units;
  args.out_dtype = args.comm_dtype = MK_DTYPE_FP32;
  args.a = a, args.lda = units;
  args.b = weight, args.ldb = HIDDEN;
  args.c = c, args.ldc = HIDDEN;
  return mk_gemm_reduce_scatter(comm, &args, NULL);
}

/* gradient[units, HIDDEN] += a[ROWS, units]^T * allgather(rows), as gradients add up over micro-batches. */
static mk_status_t add_gradient(mk_comm_t comm, const uint16_t* rows, const uint16_t* a, int units,
                                float* gradient) {
  mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
  args.mode = MK_ALLGATHER_WGRAD;
  args.m = ROWS, args.n = HIDDEN, args.k = units;
  args.out_dtype = MK_DTYPE_FP32, args.accumulate = 1;
  args.a = rows, args.lda = HIDDEN;
  args.b = a, args.ldb = units;
  args.c = gradient, args.ldc = HIDDEN;
  return mk_allgather_gemm(comm, &args, NULL);
}

/* What is right, by hand. */
static float row_times_unit(int matrix, int row, int weight, int unit) {
  float sum = 0;
  int j;
  for (j = 0; j < HIDDEN; ++j) sum += value(matrix, row, j) * value(weight, unit, j);
  return sum;
}
static float hidden(int row, int unit) { /* relu(X W1^T) */
  const float sum = row_times_unit(X, row, W1, unit);
  return sum > 0 ? sum : 0;
}
static float hidden_gradient(int row, int unit) {
  return hidden(row, unit) > 0 ? row_times_unit(DY, row, W2, unit) : 0;
}

int main(int argc, char** argv) {
  const int rank = environment_number("MK_RANK", 0), nranks = environment_number("MK_NRANKS", 1);
  const int rows_a_rank = (ROWS + nranks - 1) / nranks; /* the distribution of mkernel.h */
  const int first_row = rank * rows_a_rank < ROWS ? rank * rows_a_rank : ROWS;
  const int rows = (first_row + rows_a_rank < ROWS ? first_row + rows_a_rank : ROWS) - first_row;
  const int units = units_of(rank);
  int all_units = 0, first_unit = 0, wrong = 0, i, j, r;
  mk_unique_id_t id;
  mk_comm_t comm = NULL;
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  uint16_t* const x = (uint16_t*)calloc(ROWS * HIDDEN, 2);
  uint16_t* const dy = (uint16_t*)calloc(ROWS * HIDDEN, 2);
  uint16_t* const w1 = (uint16_t*)calloc((size_t)units * HIDDEN, 2);
  uint16_t* const w2 = (uint16_t*)calloc((size_t)units * HIDDEN, 2);
  uint16_t* const g = (uint16_t*)calloc((size_t)units * ROWS, 2);  /* relu(H) */
  uint16_t* const dh = (uint16_t*)calloc((size_t)units * ROWS, 2); /* its gradient */
  float* const product = (float*)calloc((size_t)units * ROWS, 4);
  float* const y = (float*)calloc(ROWS * HIDDEN, 4);
  float* const dx = (float*)calloc(ROWS * HIDDEN, 4);
  float* const dw1 = (float*)calloc((size_t)units * HIDDEN, 4);
  float* const dw2 = (float*)calloc((size_t)units * HIDDEN, 4);
  if (!x || !dy || !w1 || !w2 || !g || !dh || !product || !y || !dx || !dw1 || !dw2) return 1;
  for (r = 0; r < nranks; ++r) {
    if (r == rank) first_unit = all_units;
    all_units += units_of(r);
  }
  fill(x, X, first_row, rows), fill(dy, DY, first_row, rows);
  fill(w1, W1, first_unit, units), fill(w2, W2, first_unit, units);

  config.device = MK_DEVICE_HOST; /* with MK_DEVICE_CUDA, all buffers are device memory, and streams need not be
                                     waited for */
  if (argc < 2 || share_id(argv[1], rank, &id)) return 1;
  if (check(mk_comm_init(&comm, &id, nranks, rank, &config), "mk_comm_init", comm)) return 1;

  /* Forward. */
  if (check(gather(comm, x, w1, units, product), "X W1^T", comm)) return 1;
  if (check(mk_comm_synchronize(comm, NULL), "mk_comm_synchronize", comm)) return 1;
  for (i = 0; i < ROWS * units; ++i) g[i] = to_bf16(product[i] > 0 ? product[i] : 0);
  if (check(scatter(comm, g, w2, units, y), "G W2", comm)) return 1;

  /* Backward, from dY on. */
  if (check(gather(comm, dy, w2, units, product), "dY W2^T", comm)) return 1;
  if (check(mk_comm_synchronize(comm, NULL), "mk_comm_synchronize", comm)) return 1;
  for (i = 0; i < ROWS * units; ++i) dh[i] = to_bf16(g[i] ? product[i] : 0);
  if (check(add_gradient(comm, dy, g, units, dw2), "G^T dY", comm)) return 1;
  if (check(scatter(comm, dh, w1, units, dx), "dH W1", comm)) return 1;
  if (check(add_gradient(comm, x, dh, units, dw1), "dH^T X", comm)) return 1;
  if (check(mk_comm_synchronize(comm, NULL), "mk_comm_synchronize", comm)) return 1;

  for (j = 0; j < HIDDEN; ++j) {
    for (i = 0; i < rows; ++i) {
      float y_sum = 0, dx_sum = 0;
      for (r = 0; r < all_units; ++r) {
        y_sum += hidden(first_row + i, r) * value(W2, r, j);
        dx_sum += hidden_gradient(first_row + i, r) * value(W1, r, j);
      }
      wrong += y[i * HIDDEN + j] != y_sum;
      wrong += dx[i * HIDDEN + j] != dx_sum;
    }
    for (i = 0; i < units; ++i) {
      float dw1_sum = 0, dw2_sum = 0;
      for (r = 0; r < ROWS; ++r) {
        dw1_sum += hidden_gradient(r, first_unit + i) * value(X, r, j);
        dw2_sum += hidden(r, first_unit + i) * value(DY, r, j);
      }
      wrong += dw1[i * HIDDEN + j] != dw1_sum;
      wrong += dw2[i * HIDDEN + j] != dw2_sum;
    }
  }
  printf("rank %d of %d: %d rows, %d units, %d wrong\n", rank, nranks, rows, units, wrong);
  if (check(mk_comm_finalize(comm), "mk_comm_finalize", comm)) return 1;
  if (check(mk_comm_destroy(comm), "mk_comm_destroy", NULL)) return 1;
  free(x), free(dy), free(w1), free(w2), free(g), free(dh), free(product), free(y), free(dx), free(dw1),
      free(dw2);
  return wrong != 0;
}
