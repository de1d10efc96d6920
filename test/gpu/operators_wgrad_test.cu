// SPDX-License-Identifier: MIT
// Mode WGRAD of the all-gather between GPUs, and on one, through the C interface: integer inputs whose every
// partial sum is representable, compared to the last bit with a product of the naive kind; outputs poisoned,
// inputs new in every launch; the same bits from 50 runs on real numbers.
//
//   operators_wgrad_test [RANKS]     default: the number of GPUs, at least 2 (several ranks then share a GPU)
#include <algorithm>

#include "operators_elements.cuh"

namespace {

using namespace operators;

std::atomic<int> num_passed{0};
std::atomic<int> num_failed{0};

// C[k, n] = dY[m, k]^T X[m, n], of whose X the ranks have rows. Each rank has its own k.
struct WgradCase {
  int64_t m, n, k;
  bool transposed = false;  // dY as [k, m]
  mk_dtype_t dtype = MK_DTYPE_BF16;
  mk_dtype_t out = MK_DTYPE_FP32;
  bool accumulate = false;
  bool gathered = false;
  int tile_m = 0;
  int tile_n = 0;
  int copy_ctas = 0;
  bool symmetric = false;  // the gathered X, which peers may then write
};

std::string describe(const WgradCase& c, int nranks) {
  char text[256];
  std::snprintf(text, sizeof text, "WGRAD W=%d m=%lld n=%lld k=%lld%s %s->%d%s%s tile %dx%d push CTAs %d",
                nranks, static_cast<long long>(c.m), static_cast<long long>(c.n), static_cast<long long>(c.k),
                c.transposed ? " dY transposed" : "", c.dtype == MK_DTYPE_FP16 ? "fp16" : "bf16", c.out,
                c.accumulate ? " accumulate" : "",
                c.symmetric  ? " gathered symmetric"
                : c.gathered ? " gathered"
                             : "",
                c.tile_m, c.tile_n, c.copy_ctas);
  return text;
}

// Row p, column q: the sum over m of dY[m, p] X[m, q]. dY's columns begin at `first_p`.
template <class T>
__global__ void compare_wgrad(const T* c, int64_t ldc, int64_t rows, int64_t columns, int64_t m,
                              int64_t first_p, uint32_t seed, bool accumulate, uint32_t c_seed,
                              unsigned long long* wrong) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * ldc;
       i += gridDim.x * int64_t{blockDim.x}) {
    const int64_t row = i / ldc, column = i % ldc;
    const float seen = static_cast<float>(c[i]);
    bool right;
    if (column >= columns) {
      right = isnan(seen);
    } else {
      float sum = accumulate ? element(c_seed, row, column) : 0;
      for (int64_t k = 0; k < m; ++k) {
        const float dy = element(seed + SEED_B, k, first_p + row);
        if (dy != 0) sum += dy * element(seed + SEED_A, k, column);
      }
      right = seen == sum;
    }
    if (!right) atomicAdd(wrong, 1ull);
  }
}

template <class T>
__global__ void fill_real(T* to, int64_t count, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += gridDim.x * int64_t{blockDim.x}) {
    uint64_t x = (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15ull ^ uint64_t { seed } << 32;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    to[i] = rounded<T>(static_cast<float>(static_cast<int32_t>(x >> 32)) * 0x1p-31f);
  }
}

__global__ void compare_bits(const uint32_t* one, const uint32_t* other, int64_t count,
                             unsigned long long* wrong) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += gridDim.x * int64_t{blockDim.x})
    if (one[i] != other[i]) atomicAdd(wrong, 1ull);
}

// The matrices of a rank's part of a case, and its call.
struct WgradRank {
  const WgradCase c;
  const int rank, nranks;
  const mk_comm_t comm;
  const int64_t begin, own, k, ldx, lddy, ldc, ldg;
  mk_tuning_t tuning = MK_TUNING_INIT;
  Buffer x, dy, out, plain;
  void* gathered = plain.data;  // or in symmetric memory

  WgradRank(const WgradCase& which, int r, int n, mk_comm_t communicator)
      : c(which),
        rank(r),
        nranks(n),
        comm(communicator),
        begin(std::min(c.m, (c.m + n - 1) / n * r)),
        own(std::min(c.m, begin + (c.m + n - 1) / n) - begin),
        k(c.k > 0 ? c.k + 24 * r : 0),
        ldx(round_up(c.n, 8) + 8),
        lddy(round_up(c.transposed ? c.m : k, 8) + 16),
        ldc(round_up(c.n, 8) + 8),
        ldg(round_up(c.n, 8) + 16),
        x(own * ldx * 2),
        dy((c.transposed ? k : c.m) * lddy * 2),
        out(k * ldc * 4),
        plain(c.m * ldg * 2) {
    tuning.tile_m = c.tile_m, tuning.tile_n = c.tile_n, tuning.copy_ctas = c.copy_ctas;
    mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
    maxima.m = c.m, maxima.n = c.n, maxima.k = c.k, maxima.dtype = c.dtype, maxima.out_dtype = c.out;
    maxima.mode = MK_ALLGATHER_WGRAD, maxima.tuning = &tuning;
    require(mk_allgather_gemm_prepare(comm, &maxima), describe(c, nranks).c_str(), comm);
    if (c.symmetric) require(mk_mem_alloc(comm, plain.bytes, &gathered), "mk_mem_alloc", comm);
  }
  ~WgradRank() {
    if (c.symmetric) require(mk_mem_free(comm, gathered), "mk_mem_free", comm);
  }

  void call(cudaStream_t stream) const {
    mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
    args.mode = MK_ALLGATHER_WGRAD;
    args.m = c.m, args.n = c.n, args.k = k;
    args.dtype = c.dtype, args.out_dtype = c.out, args.accumulate = c.accumulate;
    args.b_layout = c.transposed ? MK_LAYOUT_NK : MK_LAYOUT_KN;
    args.a = x.data, args.lda = ldx, args.b = dy.data, args.ldb = lddy, args.c = out.data, args.ldc = ldc;
    if (c.gathered) args.a_gathered = gathered, args.lda_gathered = ldg;
    args.tuning = &tuning;
    require(mk_allgather_gemm(comm, &args, stream), describe(c, nranks).c_str(), comm);
  }

  void fill_operands(uint32_t seed, cudaStream_t stream) const {
    with_type(c.dtype, [&](auto type) {
      using T = decltype(type);
      fill<<<256, 256, 0, stream>>>(static_cast<T*>(x.data), own, c.n, ldx, seed + SEED_A, begin, 0);
      poison<<<256, 256, 0, stream>>>(static_cast<T*>(gathered), c.m * ldg);
      if (!c.transposed) {
        fill<<<256, 256, 0, stream>>>(static_cast<T*>(dy.data), c.m, k, lddy, seed + SEED_B, 0, 1000 * rank);
      } else {
        fill_transposed<<<256, 256, 0, stream>>>(static_cast<T*>(dy.data), k, c.m, lddy, seed + SEED_B, 0,
                                                 1000 * rank);
      }
    });
    with_type(c.out, [&](auto type) {
      using T = decltype(type);
      if (c.accumulate) {
        fill<<<256, 256, 0, stream>>>(static_cast<T*>(out.data), k, c.n, ldc, seed + SEED_C, 0, 0);
      } else {
        poison<<<256, 256, 0, stream>>>(static_cast<T*>(out.data), k * ldc);
      }
    });
  }

  void check(uint32_t seed, unsigned long long* wrong, cudaStream_t stream) const {
    with_type(c.out, [&](auto type) {
      using T = decltype(type);
      compare_wgrad<<<512, 256, 0, stream>>>(static_cast<const T*>(out.data), ldc, k, c.n, c.m, 1000 * rank,
                                             seed, c.accumulate, seed + SEED_C, wrong);
    });
    if (!c.gathered) return;
    with_type(c.dtype, [&](auto type) {
      using T = decltype(type);
      compare_gathered<<<256, 256, 0, stream>>>(static_cast<const T*>(gathered), ldg, c.m, c.n, seed + SEED_A,
                                                wrong);
    });
  }
};

void count_wrong(const Buffer& wrong, const std::string& what, int rank, cudaStream_t stream) {
  unsigned long long count = 0;
  require_cuda(cudaMemcpyAsync(&count, wrong.data, 8, cudaMemcpyDeviceToHost, stream), "cudaMemcpy");
  require_cuda(cudaStreamSynchronize(stream), "comparing");
  count == 0 ? ++num_passed : ++num_failed;
  if (count == 0) return;
  std::printf("FAILED: rank %d: %llu wrong: %s\n", rank, count, what.c_str());
  std::fflush(stdout);
}

// `alone`: on the communicator of this rank only.
void run_wgrad_case(Rank& rank, const WgradCase& c, bool alone) {
  const WgradRank part(c, alone ? 0 : rank.rank, alone ? 1 : rank.nranks, alone ? rank.alone : rank.comm);
  Buffer wrong(8);
  require_cuda(cudaMemset(wrong.data, 0, 8), "cudaMemset");
  if (rank.rank == 0 && std::getenv("VERBOSE") != nullptr) {
    std::printf("%s\n", describe(c, part.nranks).c_str());
    std::fflush(stdout);
  }
  for (int turn = 0; turn < 2; ++turn) {
    const uint32_t seed = 1000 * turn + 91;
    part.fill_operands(seed, rank.stream);
    require_cuda(cudaStreamSynchronize(rank.stream), "filling");
    rank.meet();  // on a shared GPU nothing of the test's runs beside the operators
    part.call(rank.stream);
    require(mk_comm_synchronize(part.comm, rank.stream), "mk_comm_synchronize", part.comm);
    rank.meet();
    part.check(seed, static_cast<unsigned long long*>(wrong.data), rank.stream);
    require_cuda(cudaStreamSynchronize(rank.stream), "comparing");
    rank.meet();
  }
  count_wrong(wrong, describe(c, part.nranks), rank.rank, rank.stream);
}

// Real numbers, whose sums depend on their order: the same bits from every launch.
void run_wgrad_bits(Rank& rank) {
  const WgradCase c = {3000, 4200, 1000};
  const WgradRank part(c, rank.rank, rank.nranks, rank.comm);
  Buffer first(part.out.bytes), wrong(8);
  require_cuda(cudaMemset(wrong.data, 0, 8), "cudaMemset");
  fill_real<<<256, 256, 0, rank.stream>>>(static_cast<__nv_bfloat16*>(part.x.data), part.own * part.ldx,
                                          5 + rank.rank);
  fill_real<<<256, 256, 0, rank.stream>>>(static_cast<__nv_bfloat16*>(part.dy.data), c.m * part.lddy,
                                          55 + rank.rank);
  for (int turn = 0; turn < 50; ++turn) {
    require_cuda(cudaMemsetAsync(part.out.data, 0xff, part.out.bytes, rank.stream), "cudaMemset");
    require_cuda(cudaStreamSynchronize(rank.stream), "filling");
    rank.meet();
    part.call(rank.stream);
    rank.synchronize();
    rank.meet();
    if (turn == 0) {
      require_cuda(
          cudaMemcpyAsync(first.data, part.out.data, part.out.bytes, cudaMemcpyDeviceToDevice, rank.stream),
          "cudaMemcpy");
    } else {
      compare_bits<<<512, 256, 0, rank.stream>>>(
          static_cast<const uint32_t*>(first.data), static_cast<const uint32_t*>(part.out.data),
          static_cast<int64_t>(part.out.bytes / 4), static_cast<unsigned long long*>(wrong.data));
    }
    require_cuda(cudaStreamSynchronize(rank.stream), "comparing");
    rank.meet();
  }
  count_wrong(wrong, "WGRAD: the same bits", rank.rank, rank.stream);
}

std::vector<WgradCase> make_wgrad_cases() {
  std::vector<WgradCase> cases;
  const int64_t shapes[][3] = {
      {512, 512, 256}, {1024, 768, 512}, {1000, 520, 328}, {130, 264, 72},    {16, 512, 512}, {1, 128, 64},
      {3, 24, 8},      {2, 8, 1},        {600, 1, 1000},   {777, 1031, 77},   {0, 64, 64},    {64, 0, 64},
      {64, 64, 0},     {7000, 256, 128}, {9, 300, 40},     {4099, 1300, 900}, {100, 1031, 77}};
  for (const auto& shape : shapes) {
    cases.push_back({shape[0], shape[1], shape[2]});
    cases.push_back({shape[0], shape[1], shape[2], true, MK_DTYPE_FP16, MK_DTYPE_FP16, true, true});
    cases.push_back({shape[0], shape[1], shape[2], false, MK_DTYPE_BF16, MK_DTYPE_FP32, true, true});
  }
  // Several panels of columns.
  for (const int copy_ctas : {0, 7}) {
    cases.push_back({520, 4500, 264, false, MK_DTYPE_BF16, MK_DTYPE_BF16, false, true, 0, 0, copy_ctas});
    cases.push_back({1100, 9001, 1000, true, MK_DTYPE_FP16, MK_DTYPE_FP32, true, false, 0, 0, copy_ctas});
    cases.push_back({3, 17000, 40, false, MK_DTYPE_BF16, MK_DTYPE_FP32, false, false, 0, 0, copy_ctas});
    cases.push_back({64, 9001, 1000, true, MK_DTYPE_BF16, MK_DTYPE_FP32, true, true, 0, 0, copy_ctas});
    cases.push_back(
        {2304, 8200, 1160, false, MK_DTYPE_BF16, MK_DTYPE_BF16, false, true, 0, 0, copy_ctas, true});
  }
  // CTAs that push and then compute, of 132, of 66 and of 33 (allgather_gemm_plan_test).
  cases.push_back({520, 6152, 1160, false, MK_DTYPE_BF16, MK_DTYPE_FP32, true, true, 128, 128, 10});
  for (const auto& tile : {std::pair{128, 256}, std::pair{128, 128}, std::pair{64, 64}}) {
    for (const int copy_ctas : {0, 1, 7}) {
      cases.push_back({1100, 1000, 320, false, MK_DTYPE_BF16, MK_DTYPE_BF16, false, true, tile.first,
                       tile.second, copy_ctas});
      cases.push_back({1100, 1000, 320, true, MK_DTYPE_FP16, MK_DTYPE_FP32, true, false, tile.first,
                       tile.second, copy_ctas});
    }
  }
  for (const int64_t m : {3, 100, 130, 1000, 4099}) {
    for (const int64_t n : {8, 520, 1031}) {
      WgradCase c = {m, n, 200};
      c.gathered = c.symmetric = true;
      cases.push_back(c);
    }
  }
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  int num_devices = 0;
  if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) return 77;
  const int nranks = argc > 1 ? std::atoi(argv[1]) : std::max(2, num_devices);
  run_ranks(nranks, [&](Rank& rank) {
    for (const WgradCase& c : make_wgrad_cases()) {
      run_wgrad_case(rank, c, false);
      run_wgrad_case(rank, c, true);
    }
    run_wgrad_bits(rank);
  });
  std::printf("%d ranks on %d GPUs: %d passed, %d failed\n", nranks, num_devices, num_passed.load(),
              num_failed.load());
  return num_failed > 0 || num_passed == 0 ? 1 : 0;
}
