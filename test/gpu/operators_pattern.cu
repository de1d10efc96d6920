// SPDX-License-Identifier: MIT
#include "operators_pattern.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>

#include "kernels/ptx/warp.cuh"
#include "operators_job.h"

namespace operators {
namespace {

constexpr int THREADS = 256;
constexpr uint32_t SALT_A = 0x51ed270b, SALT_B = 0x2545f491, SALT_BIAS = 0x9e3779b9, SALT_C = 0x7f4a7c15;

__device__ uint32_t hash(uint32_t seed, uint64_t row, uint64_t column) {
  uint64_t x = row * 0x9e3779b97f4a7c15ull ^ (column + 1) * 0xd1b54a32d192ed03ull ^ uint64_t { seed } << 17;
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93ull;
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93ull;
  return static_cast<uint32_t>(x >> 32);
}

__device__ float small_integer(uint32_t bits) { return static_cast<float>(bits % 7) - 3.0f; }

// The two elements of a row of A that are not zero. `slice`: whose slice of the inner dimension, 0 for the
// all-gather's.
struct SparseRow {
  int64_t at[2];
  float value[2];
};

__device__ SparseRow sparse_row(uint32_t turn, int slice, int64_t row, int64_t k) {
  SparseRow sparse{};
  for (int i = 0; i < 2; ++i) {
    const uint32_t bits = hash(turn ^ SALT_A, row, 2 * slice + i);
    sparse.at[i] = k > 0 ? static_cast<int64_t>((bits * uint64_t{0x9e3779b97f4a7c15ull} >> 16) % k) : -1;
    const float magnitude = static_cast<float>(1 + (bits >> 8) % 2);
    sparse.value[i] = bits & 1 ? magnitude : -magnitude;
  }
  return sparse;
}

__device__ float pattern_a(uint32_t turn, int slice, int64_t row, int64_t column, int64_t k) {
  const SparseRow sparse = sparse_row(turn, slice, row, k);
  return (column == sparse.at[0] ? sparse.value[0] : 0.0f) + (column == sparse.at[1] ? sparse.value[1] : 0.0f);
}

// Every rank has its own B; the X of mode WGRAD is rank 0's.
__device__ float pattern_b(uint32_t turn, int rank, int64_t row, int64_t column) {
  return small_integer(hash((turn ^ SALT_B) + 977 * rank, row, column));
}
__device__ float pattern_bias(uint32_t turn, int64_t column) {
  return small_integer(hash(turn ^ SALT_BIAS, 0, column));
}
__device__ float pattern_c(uint32_t turn, int rank, int64_t row, int64_t column) {
  return small_integer(hash((turn ^ SALT_C) + 1327 * rank, row, column));
}

// About normal, in magnitude mostly below 2.
__device__ float random_number(uint32_t bits) {
  return (static_cast<float>(bits & 255) + static_cast<float>(bits >> 8 & 255) +
          static_cast<float>(bits >> 16 & 255) + static_cast<float>(bits >> 24) - 510.0f) /
         148.0f;
}

__device__ float operand(Filling filling, uint32_t seed, int rank, int64_t row, int64_t column, bool is_a) {
  const uint32_t bits = hash(seed + 977 * rank, row, column);
  if (filling == Filling::random) return random_number(bits);
  const float integer = static_cast<float>(bits % 31) - 15.0f;
  return is_a && rank % 2 == 1 ? integer * 262144.0f : integer;
}

__device__ void store(void* to, int type, int64_t index, float value) {
  if (type == MK_DTYPE_BF16) static_cast<__nv_bfloat16*>(to)[index] = __float2bfloat16(value);
  if (type == MK_DTYPE_FP16) static_cast<__half*>(to)[index] = __float2half(value);
  if (type == MK_DTYPE_FP32) static_cast<float*>(to)[index] = value;
}

__device__ float load(const void* from, int type, int64_t index) {
  if (type == MK_DTYPE_BF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[index]);
  if (type == MK_DTYPE_FP16) return __half2float(static_cast<const __half*>(from)[index]);
  return static_cast<const float*>(from)[index];
}

__device__ float rounded(float value, int type) {
  if (type == MK_DTYPE_BF16) return __bfloat162float(__float2bfloat16(value));
  if (type == MK_DTYPE_FP16) return __half2float(__float2half(value));
  return value;
}

__device__ float nan_value() { return __int_as_float(0x7fc00000); }

__device__ int64_t first_index() { return blockIdx.x * int64_t{blockDim.x} + threadIdx.x; }
__device__ int64_t index_step() { return gridDim.x * int64_t{blockDim.x}; }

__device__ void complain(Wrong* wrong, int where, uint32_t turn, int label, int64_t row, int64_t column,
                         float seen, float expected) {
  atomicAdd(&wrong->count, 1ull);
  if (atomicCAS(&wrong->claimed, 0, 1) != 0) return;
  wrong->where = where, wrong->turn = turn, wrong->label = label;
  wrong->row = row, wrong->column = column;
  wrong->seen = seen, wrong->expected = expected;
}

__global__ void next_turn_kernel(uint32_t* turn) { ++*turn; }

__global__ void fill_kernel(const Operands to, Filling filling, const uint32_t* turn_at) {
  const uint32_t turn = *turn_at;
  const bool gathers = to.op == MK_OPERATOR_ALLGATHER_GEMM;
  const int slice = gathers ? 0 : to.rank;
  for (int64_t i = first_index(); i < to.a_rows * to.lda; i += index_step()) {
    const int64_t row = to.a_first_row + i / to.lda, column = i % to.lda;
    float value = nan_value();
    if (column < to.a_columns) {
      value = filling != Filling::pattern ? operand(filling, turn ^ SALT_A, slice, row, column, true)
              : to.wgrad                  ? pattern_b(turn, 0, row, column)
                                          : pattern_a(turn, slice, row, column, to.k);
    }
    store(to.a, to.dtype, i, value);
  }
  for (int64_t i = first_index(); i < to.b_rows * to.ldb; i += index_step()) {
    const int64_t row = i / to.ldb, column = i % to.ldb;
    const int64_t inner = to.transposed ? column : row, outer = to.transposed ? row : column;
    float value = nan_value();
    if (column < to.b_columns) {
      value = filling != Filling::pattern ? operand(filling, turn ^ SALT_B, to.rank, inner, outer, false)
              : to.wgrad                  ? pattern_a(turn, to.rank, outer, inner, to.m)
                                          : pattern_b(turn, to.rank, inner, outer);
    }
    store(to.b, to.dtype, i, value);
  }
  for (int64_t i = first_index(); i < to.c_rows * to.ldc; i += index_step()) {
    const int64_t row = to.c_first_row + i / to.ldc, column = i % to.ldc;
    const bool fills = to.accumulate && column < to.n;
    store(to.c, to.out_dtype, i, fills ? pattern_c(turn, to.rank, row, column) : nan_value());
  }
  for (int64_t i = first_index(); to.has_bias && i < to.n; i += index_step())
    store(to.bias, to.dtype, i, pattern_bias(turn, i));
  for (int64_t i = first_index(); to.has_gathered && i < to.m * to.ld_gathered; i += index_step())
    store(to.gathered, to.dtype, i, nan_value());
}

__device__ float expected_c(const Operands& of, uint32_t turn, int64_t row, int64_t column) {
  const bool gathers = of.op == MK_OPERATOR_ALLGATHER_GEMM;
  float sum = 0;
  for (int slice = 0; slice < (gathers ? 1 : of.nranks); ++slice) {
    const int64_t k = of.wgrad ? of.m : gathers ? of.k : max(int64_t{0}, of.first_k - slice * of.k_less);
    const SparseRow sparse = sparse_row(turn, of.wgrad ? of.rank : slice, row, k);
    const int source = of.wgrad ? 0 : gathers ? of.rank : slice;
    for (int i = 0; i < 2 && k > 0; ++i) sum += sparse.value[i] * pattern_b(turn, source, sparse.at[i], column);
  }
  if (of.has_bias) sum += pattern_bias(turn, column);
  if (of.accumulate) sum += pattern_c(turn, of.rank, row, column);
  return sum;
}

__global__ void check_kernel(const Operands of, const uint32_t* turn_at, int label, Wrong* wrong) {
  const uint32_t turn = *turn_at;
  for (int64_t i = first_index(); i < of.c_rows * of.ldc; i += index_step()) {
    const int64_t row = of.c_first_row + i / of.ldc, column = i % of.ldc;
    const float seen = load(of.c, of.out_dtype, i);
    const float expected = column < of.n ? expected_c(of, turn, row, column) : nan_value();
    if (column < of.n ? seen != expected : !isnan(seen))
      complain(wrong, 0, turn, label, row, column, seen, expected);
  }
  for (int64_t i = first_index(); of.has_gathered && i < of.m * of.ld_gathered; i += index_step()) {
    const int64_t row = i / of.ld_gathered, column = i % of.ld_gathered;
    const float seen = load(of.gathered, of.dtype, i);
    const float value = of.wgrad ? pattern_b(turn, 0, row, column) : pattern_a(turn, 0, row, column, of.k);
    const float expected = column < of.a_columns ? value : nan_value();
    if (column < of.a_columns ? seen != expected : !isnan(seen))
      complain(wrong, 1, turn, label, row, column, seen, expected);
  }
}

__global__ void equal_kernel(const uint16_t* one, const uint16_t* other, int64_t count, int label,
                             Wrong* wrong) {
  for (int64_t i = first_index(); i < count; i += index_step()) {
    if (one[i] != other[i]) complain(wrong, 2, 0, label, 0, i, one[i], other[i]);
  }
}

__global__ void ordered_sum_kernel(const Operands of, const float* partials, int comm_type, int label,
                                   Wrong* wrong) {
  for (int64_t i = first_index(); i < of.c_rows * of.n; i += index_step()) {
    const int64_t row = i / of.n, column = i % of.n;
    float sum = 0;
    for (int source = 0; source < of.nranks; ++source)
      sum += rounded(partials[(source * of.m + of.c_first_row + row) * of.n + column], comm_type);
    const float expected = rounded(sum, of.out_dtype);
    const float seen = load(of.c, of.out_dtype, row * of.ldc + column);
    if (__float_as_uint(seen) != __float_as_uint(expected) && seen != expected)
      complain(wrong, 0, 0, label, of.c_first_row + row, column, seen, expected);
  }
}

__global__ void stall_kernel(uint64_t ns) {
  const uint64_t begin = mk::ptx::globaltimer();
  while (mk::ptx::globaltimer() - begin < ns) continue;
}

__global__ void fill_floats_kernel(float* to, int64_t count, float value) {
  for (int64_t i = first_index(); i < count; i += index_step()) to[i] = value;
}

__global__ void check_floats_kernel(const float* of, int64_t count, float value, int label, Wrong* wrong) {
  for (int64_t i = first_index(); i < count; i += index_step()) {
    if (of[i] != value) complain(wrong, 2, 0, label, 0, i, of[i], value);
  }
}

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }
int64_t out_bytes(mk_dtype_t type) { return type == MK_DTYPE_FP32 ? 4 : 2; }

void require_launched(const char* what) { require_cuda(cudaGetLastError(), what); }

// Enough to fill a GPU, few enough for small matrices.
int num_blocks(int64_t elements) {
  return static_cast<int>(std::clamp<int64_t>((elements + THREADS - 1) / THREADS, 1, 1056));
}

// Shape and leading dimensions; no addresses.
Operands shape_of(const Problem& problem, int rank, int nranks) {
  Operands of{};
  const bool gathers = problem.op == MK_OPERATOR_ALLGATHER_GEMM;
  const bool scatters = problem.op == MK_OPERATOR_GEMM_REDUCE_SCATTER;
  const int64_t per_rank = (problem.m + nranks - 1) / nranks;
  const int64_t begin = std::min(problem.m, per_rank * rank);
  const int64_t own = std::min(problem.m, begin + per_rank) - begin;
  of.op = problem.op, of.wgrad = problem.wgrad, of.rank = rank, of.nranks = nranks;
  of.m = problem.m, of.n = problem.n;
  of.first_k = problem.k, of.k_less = gathers && !problem.wgrad ? 0 : problem.k_less;
  of.k = std::max<int64_t>(0, problem.k - of.k_less * rank);
  of.a_rows = gathers ? own : problem.m, of.a_first_row = gathers ? begin : 0;
  of.a_columns = problem.wgrad ? of.n : of.k;
  const int64_t inner = problem.wgrad ? of.m : of.k, outer = problem.wgrad ? of.k : of.n;
  of.b_rows = problem.transposed ? outer : inner, of.b_columns = problem.transposed ? inner : outer;
  of.c_rows = problem.wgrad ? of.k : scatters ? own : problem.m, of.c_first_row = scatters ? begin : 0;
  of.lda = std::max<int64_t>(8, round_up(of.a_columns, 8) + problem.padding);
  of.ldb = std::max<int64_t>(8, round_up(of.b_columns, 8) + problem.padding);
  of.ldc = std::max<int64_t>(8, round_up(of.n, 8) + problem.padding);
  of.ld_gathered = of.lda;
  of.dtype = problem.dtype, of.out_dtype = problem.out;
  of.transposed = problem.transposed, of.accumulate = problem.accumulate, of.has_bias = problem.bias;
  of.has_gathered = gathers && problem.gathered;
  return of;
}

}  // namespace

std::string describe(const Problem& problem, int nranks) {
  const char* names[] = {"none", "allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"};
  const char* types[] = {"default", "bf16", "fp16", "fp32"};
  const char* algorithms[] = {"", " one-shot", " two-shot"};
  char text[256];
  std::snprintf(text, sizeof text, "%s%s W=%d m=%lld n=%lld k=%lld%s %s->%s%s%s%s%s%s", names[problem.op],
                problem.wgrad ? " WGRAD" : "", nranks, static_cast<long long>(problem.m),
                static_cast<long long>(problem.n), static_cast<long long>(problem.k),
                problem.transposed ? " NK" : "", types[problem.dtype], types[problem.out],
                problem.accumulate ? " accumulate" : "", problem.bias ? " bias" : "",
                problem.gathered ? " gathered" : "", problem.k_less > 0 ? " uneven k" : "",
                algorithms[problem.algorithm]);
  return text;
}

std::string describe(const Wrong& wrong) {
  const char* places[] = {"C", "the gathered A", "the bits"};
  char text[256];
  std::snprintf(text, sizeof text,
                "%llu wrong, the first in %s at row %lld, column %lld, turn %u: saw %.9g, expected %.9g",
                wrong.count, places[wrong.where], wrong.row, wrong.column, wrong.turn, wrong.seen,
                wrong.expected);
  return text;
}

void next_turn(uint32_t* turn, cudaStream_t stream) {
  next_turn_kernel<<<1, 1, 0, stream>>>(turn);
  require_launched("next_turn");
}

void fill_operands(const Operands& to, Filling filling, const uint32_t* turn, cudaStream_t stream) {
  const int64_t most = std::max({to.a_rows * to.lda, to.b_rows * to.ldb, to.c_rows * to.ldc,
                                 to.has_gathered ? to.m * to.ld_gathered : int64_t{0}, to.n});
  fill_kernel<<<num_blocks(most), THREADS, 0, stream>>>(to, filling, turn);
  require_launched("fill_operands");
}

void check_results(const Operands& of, const uint32_t* turn, int label, Wrong* wrong, cudaStream_t stream) {
  const int64_t most = std::max(of.c_rows * of.ldc, of.has_gathered ? of.m * of.ld_gathered : int64_t{0});
  check_kernel<<<num_blocks(most), THREADS, 0, stream>>>(of, turn, label, wrong);
  require_launched("check_results");
}

void check_equal_bits(const void* one, const void* other, size_t bytes, int label, Wrong* wrong,
                      cudaStream_t stream) {
  const auto count = static_cast<int64_t>(bytes / 2);
  equal_kernel<<<num_blocks(count), THREADS, 0, stream>>>(
      static_cast<const uint16_t*>(one), static_cast<const uint16_t*>(other), count, label, wrong);
  require_launched("check_equal_bits");
}

void check_ordered_sum(const Operands& of, const float* partials, mk_dtype_t comm_dtype, int label,
                       Wrong* wrong, cudaStream_t stream) {
  ordered_sum_kernel<<<num_blocks(of.c_rows * of.n), THREADS, 0, stream>>>(of, partials, comm_dtype, label,
                                                                           wrong);
  require_launched("check_ordered_sum");
}

void stall(int us, cudaStream_t stream) {
  stall_kernel<<<1, 1, 0, stream>>>(uint64_t{1000} * us);
  require_launched("stall");
}

void occupy(int us, cudaStream_t stream) {
  int device = 0, sms = 0;
  require_cuda(cudaGetDevice(&device), "cudaGetDevice");
  require_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "attribute");
  stall_kernel<<<sms * 2, 1024, 0, stream>>>(uint64_t{1000} * us);
  require_launched("occupy");
}

void fill_floats(float* to, size_t count, float value, cudaStream_t stream) {
  fill_floats_kernel<<<num_blocks(count), THREADS, 0, stream>>>(to, count, value);
  require_launched("fill_floats");
}

void check_floats(const float* of, size_t count, float value, int label, Wrong* wrong, cudaStream_t stream) {
  check_floats_kernel<<<num_blocks(count), THREADS, 0, stream>>>(of, count, value, label, wrong);
  require_launched("check_floats");
}

void load_pattern_kernels(cudaStream_t stream) {
  Buffer words(1024);
  require_cuda(cudaMemsetAsync(words.data, 0, words.bytes, stream), "cudaMemsetAsync");
  const Operands none{};
  auto* turn = static_cast<uint32_t*>(words.data);
  auto* floats = static_cast<float*>(words.data);
  auto* wrong = reinterpret_cast<Wrong*>(static_cast<char*>(words.data) + 512);
  next_turn(turn, stream);
  fill_operands(none, Filling::pattern, turn, stream);
  check_results(none, turn, 0, wrong, stream);
  check_equal_bits(words.data, words.data, 256, 0, wrong, stream);
  check_ordered_sum(none, floats, MK_DTYPE_BF16, 0, wrong, stream);
  stall(1, stream);
  fill_floats(floats, 16, 0.0f, stream);
  check_floats(floats, 16, 0.0f, 0, wrong, stream);
  require_cuda(cudaStreamSynchronize(stream), "loading the kernels of the test");
}

void Sizes::cover(const Problem& problem, int rank, int nranks) {
  const Operands of = shape_of(problem, rank, nranks);
  a = std::max<size_t>(a, of.a_rows * of.lda * 2);
  b = std::max<size_t>(b, of.b_rows * of.ldb * 2);
  c = std::max<size_t>(c, of.c_rows * of.ldc * out_bytes(problem.out));
  bias = std::max<size_t>(bias, of.n * 2);
  if (of.has_gathered) gathered = std::max<size_t>(gathered, of.m * of.ld_gathered * 2);
}

Matrices::Matrices(const Sizes& sizes) {
  const size_t bytes[] = {sizes.a, sizes.b, sizes.c, sizes.bias, sizes.gathered};
  for (int i = 0; i < 5; ++i)
    require_cuda(cudaMalloc(&data_[i], std::max<size_t>(bytes[i], 256)), "cudaMalloc");
}

Matrices::~Matrices() {
  for (void* data : data_) cudaFree(data);
}

Operands Matrices::operands(const Problem& problem, int rank, int nranks) const {
  Operands of = shape_of(problem, rank, nranks);
  of.a = data_[0], of.b = data_[1], of.c = data_[2], of.bias = data_[3], of.gathered = data_[4];
  return of;
}

mk_status_t prepare(mk_comm_t comm, const Problem& problem) {
  mk_tuning_t tuning = MK_TUNING_INIT;
  tuning.algorithm = problem.algorithm;
  mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
  maxima.m = problem.m, maxima.n = problem.n, maxima.k = problem.k;
  maxima.dtype = problem.dtype, maxima.out_dtype = problem.out, maxima.comm_dtype = problem.comm;
  maxima.tuning = &tuning;
  if (problem.wgrad) maxima.mode = MK_ALLGATHER_WGRAD;
  if (problem.op == MK_OPERATOR_ALLGATHER_GEMM) return mk_allgather_gemm_prepare(comm, &maxima);
  if (problem.op == MK_OPERATOR_GEMM_REDUCE_SCATTER) return mk_gemm_reduce_scatter_prepare(comm, &maxima);
  return mk_gemm_allreduce_prepare(comm, &maxima);
}

mk_status_t call(mk_comm_t comm, const Problem& problem, const Operands& operands, cudaStream_t stream) {
  mk_tuning_t tuning = MK_TUNING_INIT;
  tuning.algorithm = problem.algorithm;
  const auto fill = [&](auto& args) {
    args.m = operands.m, args.n = operands.n, args.k = operands.k;
    args.dtype = problem.dtype, args.out_dtype = problem.out;
    args.b_layout = problem.transposed ? MK_LAYOUT_NK : MK_LAYOUT_KN;
    args.accumulate = problem.accumulate;
    args.a = operands.a, args.lda = operands.lda;
    args.b = operands.b, args.ldb = operands.ldb;
    args.c = operands.c, args.ldc = operands.ldc;
    args.bias = problem.bias ? operands.bias : nullptr;
    args.tuning = &tuning;
  };
  if (problem.op == MK_OPERATOR_ALLGATHER_GEMM) {
    mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
    fill(args);
    if (problem.wgrad) args.mode = MK_ALLGATHER_WGRAD;
    if (operands.has_gathered) args.a_gathered = operands.gathered, args.lda_gathered = operands.ld_gathered;
    return mk_allgather_gemm(comm, &args, stream);
  }
  if (problem.op == MK_OPERATOR_GEMM_REDUCE_SCATTER) {
    mk_gemm_reduce_scatter_args_t args = MK_GEMM_REDUCE_SCATTER_ARGS_INIT;
    fill(args);
    args.comm_dtype = problem.comm;
    return mk_gemm_reduce_scatter(comm, &args, stream);
  }
  mk_gemm_allreduce_args_t args = MK_GEMM_ALLREDUCE_ARGS_INIT;
  fill(args);
  args.comm_dtype = problem.comm;
  return mk_gemm_allreduce(comm, &args, stream);
}

}  // namespace operators
