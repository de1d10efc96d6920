// SPDX-License-Identifier: MIT
// The GEMM operators between GPUs through the C interface: integer inputs whose every partial sum is
// representable, compared to the last bit with a product of the naive kind; outputs poisoned, inputs new in
// every launch.
//
//   operators_test [RANKS]     default: the number of GPUs, at least 2 (several ranks then share a GPU)
#include <algorithm>
#include <array>
#include <cstring>

#include "operators_elements.cuh"

namespace {

using namespace operators;

std::atomic<int> num_passed{0};
std::atomic<int> num_failed{0};

struct Case {
  mk_operator_t op;
  int64_t m, n, k;  // k: of the all-gather, or of each rank's slice
  bool transposed = false;
  mk_dtype_t dtype = MK_DTYPE_BF16;
  mk_dtype_t out = MK_DTYPE_BF16;
  bool accumulate = false;
  bool bias = false;
  bool gathered = false;
  int tile_m = 0;
  int tile_n = 0;
  mk_algorithm_t algorithm = MK_ALGORITHM_AUTO;
  int copy_ctas = 0;
  bool mixes_layouts = false;  // of b: every second rank has it transposed
};

struct Reference {
  uint32_t seed;
  int64_t rows, first_row, n, k_total;
  int64_t b_first_column;  // the all-gather's B differs between ranks
  bool accumulate, bias;
  int64_t c_first_row;  // of the C that was there
  uint32_t c_seed;
};

// Wrong elements of c, and anything but the poison behind a row's end.
template <class T>
__global__ void compare(const T* c, int64_t ldc, Reference ref, unsigned long long* wrong) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < ref.rows * ldc;
       i += gridDim.x * int64_t{blockDim.x}) {
    const int64_t row = i / ldc, column = i % ldc;
    const float seen = static_cast<float>(c[i]);
    bool right;
    if (column >= ref.n) {
      right = isnan(seen);
    } else {
      float sum = 0;
      for (int64_t k = 0; k < ref.k_total; ++k) {
        const float a = element(ref.seed + SEED_A, ref.first_row + row, k);
        if (a != 0) sum += a * element(ref.seed + SEED_B, k, ref.b_first_column + column);
      }
      if (ref.bias) sum += element(ref.seed + SEED_BIAS, 0, ref.b_first_column + column);
      if (ref.accumulate) sum += element(ref.c_seed, ref.c_first_row + row, column);
      right = seen == sum;
    }
    if (!right) atomicAdd(wrong, 1ull);
  }
}

std::string describe(const Case& c, int nranks) {
  const char* names[] = {"none", "allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"};
  char text[256];
  std::snprintf(text, sizeof text,
                "%s W=%d m=%lld n=%lld k=%lld%s %s->%d%s%s%s tile %dx%d algorithm %d push CTAs %d", names[c.op],
                nranks, static_cast<long long>(c.m), static_cast<long long>(c.n), static_cast<long long>(c.k),
                c.transposed ? " NK" : "", c.dtype == MK_DTYPE_FP16 ? "fp16" : "bf16", c.out,
                c.accumulate ? " accumulate" : "", c.bias ? " bias" : "", c.gathered ? " gathered" : "",
                c.tile_m, c.tile_n, c.algorithm, c.copy_ctas);
  return text;
}

mk_status_t call(mk_comm_t comm, const Case& c, const mk_tuning_t& tuning, const void* a, int64_t lda,
                 const void* b, int64_t ldb, void* out, int64_t ldc, const void* bias, void* gathered,
                 int64_t ldg, cudaStream_t stream) {
  const mk_layout_t layout = c.transposed ? MK_LAYOUT_NK : MK_LAYOUT_KN;
  const auto fill_common = [&](auto& args) {
    args.m = c.m, args.n = c.n, args.k = c.k;
    args.dtype = c.dtype, args.out_dtype = c.out, args.b_layout = layout, args.accumulate = c.accumulate;
    args.a = a, args.lda = lda, args.b = b, args.ldb = ldb, args.c = out, args.ldc = ldc;
    args.bias = bias, args.tuning = &tuning;
  };
  if (c.op == MK_OPERATOR_ALLGATHER_GEMM) {
    mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
    fill_common(args);
    args.a_gathered = gathered, args.lda_gathered = ldg;
    return mk_allgather_gemm(comm, &args, stream);
  }
  if (c.op == MK_OPERATOR_GEMM_REDUCE_SCATTER) {
    mk_gemm_reduce_scatter_args_t args = MK_GEMM_REDUCE_SCATTER_ARGS_INIT;
    fill_common(args);
    return mk_gemm_reduce_scatter(comm, &args, stream);
  }
  mk_gemm_allreduce_args_t args = MK_GEMM_ALLREDUCE_ARGS_INIT;
  fill_common(args);
  return mk_gemm_allreduce(comm, &args, stream);
}

void run_case(Rank& rank, Case c, int launches) {
  if (c.mixes_layouts) c.transposed = rank.rank % 2 == 1;
  const bool gathers = c.op == MK_OPERATOR_ALLGATHER_GEMM;
  const bool scatters = c.op == MK_OPERATOR_GEMM_REDUCE_SCATTER;
  const int64_t per_rank = (c.m + rank.nranks - 1) / rank.nranks;
  const int64_t begin = std::min(c.m, per_rank * rank.rank);
  const int64_t own = std::min(c.m, begin + per_rank) - begin;
  const int64_t a_rows = gathers ? own : c.m;
  const int64_t c_rows = scatters ? own : c.m;
  const int64_t lda = round_up(c.k, 8) + 8, ldb = round_up(c.transposed ? c.k : c.n, 8) + 16;
  const int64_t ldc = round_up(c.n, 8) + 8, ldg = round_up(c.k, 8) + 16;
  const int64_t b_rows = c.transposed ? c.n : c.k;
  Buffer a(a_rows * lda * 2), b(b_rows * ldb * 2), out(c_rows * ldc * 4), gathered(c.m * ldg * 2),
      bias(c.n * 4);
  Buffer wrong(8);
  mk_tuning_t tuning = MK_TUNING_INIT;
  tuning.tile_m = c.tile_m, tuning.tile_n = c.tile_n, tuning.algorithm = c.algorithm;
  tuning.copy_ctas = c.copy_ctas;
  mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
  maxima.m = c.m, maxima.n = c.n, maxima.k = c.k, maxima.dtype = c.dtype, maxima.out_dtype = c.out;
  maxima.tuning = &tuning;
  const auto prepare = gathers    ? mk_allgather_gemm_prepare
                       : scatters ? mk_gemm_reduce_scatter_prepare
                                  : mk_gemm_allreduce_prepare;
  require(prepare(rank.comm, &maxima), describe(c, rank.nranks).c_str(), rank.comm);
  // The all-gather's ranks have different B; the reductions' different slices of the inner dimension.
  const int64_t k_begin = gathers ? 0 : c.k * rank.rank;
  const int64_t column_begin = gathers ? 1000 * rank.rank : 0;
  if (rank.rank == 0 && std::getenv("VERBOSE") != nullptr) {
    std::printf("%s\n", describe(c, rank.nranks).c_str());
    std::fflush(stdout);
  }
  unsigned long long total = 0;
  for (int turn = 0; turn < launches; ++turn) {
    const uint32_t seed = 1000 * turn + 17 * c.op;
    const uint32_t c_seed = seed + SEED_C + 100 * (scatters || gathers ? rank.rank : 0);
    with_type(c.dtype, [&](auto type) {
      using T = decltype(type);
      fill<<<256, 256, 0, rank.stream>>>(static_cast<T*>(a.data), a_rows, c.k, lda, seed + SEED_A,
                                         gathers ? begin : 0, k_begin);
      fill<<<256, 256, 0, rank.stream>>>(static_cast<T*>(bias.data), 1, c.n, c.n, seed + SEED_BIAS, 0,
                                         column_begin);
      poison<<<256, 256, 0, rank.stream>>>(static_cast<T*>(gathered.data), c.m * ldg);
    });
    with_type(c.dtype, [&](auto type) {
      using T = decltype(type);
      if (!c.transposed) {
        fill<<<256, 256, 0, rank.stream>>>(static_cast<T*>(b.data), c.k, c.n, ldb, seed + SEED_B, k_begin,
                                           column_begin);
      } else {
        fill_transposed<<<256, 256, 0, rank.stream>>>(static_cast<T*>(b.data), c.n, c.k, ldb, seed + SEED_B,
                                                      k_begin, column_begin);
      }
    });
    with_type(c.out, [&](auto type) {
      using T = decltype(type);
      if (c.accumulate) {
        fill<<<256, 256, 0, rank.stream>>>(static_cast<T*>(out.data), c_rows, c.n, ldc, c_seed,
                                           scatters ? begin : 0, 0);
      } else {
        poison<<<256, 256, 0, rank.stream>>>(static_cast<T*>(out.data), c_rows * ldc);
      }
    });
    require_cuda(cudaMemsetAsync(wrong.data, 0, 8, rank.stream), "cudaMemset");
    require_cuda(cudaStreamSynchronize(rank.stream), "filling");
    rank.meet();  // on a shared GPU nothing of the test's runs beside the operators
    require(call(rank.comm, c, tuning, a.data, lda, b.data, ldb, out.data, ldc, c.bias ? bias.data : nullptr,
                 c.gathered ? gathered.data : nullptr, ldg, rank.stream),
            describe(c, rank.nranks).c_str(), rank.comm);
    rank.synchronize();
    rank.meet();
    const Reference ref = {seed,
                           c_rows,
                           gathers || !scatters ? 0 : begin,
                           c.n,
                           gathers ? c.k : c.k * rank.nranks,
                           column_begin,
                           c.accumulate,
                           c.bias,
                           scatters ? begin : 0,
                           c_seed};
    with_type(c.out, [&](auto type) {
      using T = decltype(type);
      compare<<<512, 256, 0, rank.stream>>>(static_cast<const T*>(out.data), ldc, ref,
                                            static_cast<unsigned long long*>(wrong.data));
    });
    if (c.gathered && gathers) {
      with_type(c.dtype, [&](auto type) {
        using T = decltype(type);
        compare_gathered<<<256, 256, 0, rank.stream>>>(static_cast<const T*>(gathered.data), ldg, c.m, c.k,
                                                       seed + SEED_A,
                                                       static_cast<unsigned long long*>(wrong.data));
      });
    }
    unsigned long long count = 0;
    require_cuda(cudaMemcpyAsync(&count, wrong.data, 8, cudaMemcpyDeviceToHost, rank.stream), "cudaMemcpy");
    require_cuda(cudaStreamSynchronize(rank.stream), "comparing");
    total += count;
    rank.meet();
  }
  total == 0 ? ++num_passed : ++num_failed;
  if (total > 0) {
    std::printf("FAILED: rank %d: %llu wrong: %s\n", rank.rank, total, describe(c, rank.nranks).c_str());
    std::fflush(stdout);
  }
}

std::vector<Case> make_cases(int nranks) {
  std::vector<Case> cases;
  const mk_operator_t ops[] = {MK_OPERATOR_ALLGATHER_GEMM, MK_OPERATOR_GEMM_REDUCE_SCATTER,
                               MK_OPERATOR_GEMM_ALLREDUCE};
  for (const mk_operator_t op : ops) {
    const int64_t shapes[][3] = {{512, 512, 256}, {1024, 768, 512}, {1000, 520, 328}, {130, 264, 72},
                                 {16, 512, 512},  {1, 128, 64},     {3, 24, 8},       {2048, 1024, 512},
                                 {600, 8, 1000},  {777, 1031, 77},  {0, 64, 64},      {64, 0, 64},
                                 {64, 64, 0},     {7000, 256, 128}};
    for (const auto& shape : shapes) {
      cases.push_back({op, shape[0], shape[1], shape[2]});
      cases.push_back({op, shape[0], shape[1], shape[2], true, MK_DTYPE_FP16, MK_DTYPE_FP32, true, true, true});
    }
    for (const auto& tile : {std::pair{128, 256}, std::pair{128, 160}, std::pair{128, 128}, std::pair{64, 128},
                             std::pair{64, 64}}) {
      cases.push_back({op, 1100, 1000, 320, false, MK_DTYPE_BF16, MK_DTYPE_BF16, false, true, true, tile.first,
                       tile.second});
      cases.push_back({op, 1100, 1000, 320, true, MK_DTYPE_FP16, MK_DTYPE_FP16, true, false, false, tile.first,
                       tile.second});
      cases.push_back(
          {op, 300, 333, 100, false, MK_DTYPE_BF16, MK_DTYPE_FP32, true, true, true, tile.first, tile.second});
    }
  }
  // All-gathers of one wave of tiles: CTAs that load B in pairs, and CTAs that share tiles along k, where the
  // tile is the plan's and where it is the caller's; besides, the highest tile in any number.
  constexpr mk_operator_t gather = MK_OPERATOR_ALLGATHER_GEMM;
  for (const bool transposed : {false, true}) {
    const mk_dtype_t dtype = transposed ? MK_DTYPE_FP16 : MK_DTYPE_BF16;
    for (const auto& shape : {std::array<int64_t, 3>{512, 5120, 512},
                              {500, 5000, 520},
                              {1024, 2560, 512},
                              {2048, 2560, 2048},
                              {1900, 2500, 2104}}) {
      cases.push_back(
          {gather, shape[0], shape[1], shape[2], transposed, dtype, MK_DTYPE_FP32, false, true, transposed});
    }
    for (const auto& [tile_m, tile_n, n] :
         {std::array<int, 3>{128, 256, 2000}, {128, 160, 1280}, {128, 128, 1024}, {256, 160, 2560}}) {
      cases.push_back(
          {gather, 2000, n, 2048, transposed, dtype, MK_DTYPE_FP32, true, false, !transposed, tile_m, tile_n});
    }
    for (const int64_t m : {130, 600, 1100, 3000}) {
      cases.push_back({gather, m, 700, 328, transposed, dtype, dtype, false, true, transposed, 256, 160});
      cases.push_back({gather, m, 700, 328, transposed, dtype, dtype, false, true, transposed, 128, 224});
    }
    // With the operands swapped, in one wave every tile that there is a kernel for; then more than one, whole
    // tiles and cut ones.
    for (const auto& shape : {std::array<int64_t, 3>{150, 8100, 328},
                              {200, 8190, 328},
                              {250, 8100, 520},
                              {300, 8100, 72},
                              {350, 8104, 328},
                              {420, 8100, 1000},
                              {380, 8104, 328},
                              {470, 8104, 328},
                              {600, 8190, 328},
                              {690, 8104, 520},
                              {300, 14300, 712},
                              {380, 14336, 8200},
                              {135, 14300, 200},
                              {160, 14304, 712},
                              {300, 5100, 1000},
                              {200, 14300, 2056},
                              {200, 16300, 712},
                              {136, 28600, 328},
                              {300, 28600, 520},
                              {420, 14300, 2056},
                              {900, 8100, 520},
                              {420, 14300, 8200},
                              {700, 10200, 8200}}) {
      cases.push_back({gather, shape[0], shape[1], shape[2], transposed, dtype, dtype, false, true, true});
      cases.push_back(
          {gather, shape[0], shape[1], shape[2], !transposed, dtype, MK_DTYPE_FP32, true, false, transposed});
    }
    // Few rows in several waves of tiles: of 132 CTAs the last wave is cut, spread, and cut.
    for (const auto& shape : {std::array<int64_t, 3>{20, 8700, 2200}, {41, 12600, 328}}) {
      cases.push_back(
          {gather, shape[0], shape[1], shape[2], transposed, dtype, dtype, false, true, transposed, 64, 64});
    }
    cases.push_back({gather, 40, 10240, 8200, transposed, dtype, dtype, false, true, transposed});
    // Weights that the L2 does not hold, and few rows: merged, or swept with three ranks and more.
    for (const int64_t m : {250, 509, 700}) {
      cases.push_back({gather, m, 17160, 2056, transposed, dtype, dtype, false, false, transposed});
    }
  }
  // Reductions of some hundred rows with the operands swapped, in the same way.
  for (const mk_operator_t op : {MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
    for (const bool transposed : {false, true}) {
      const mk_dtype_t dtype = transposed ? MK_DTYPE_FP16 : MK_DTYPE_BF16;
      for (const auto& shape : {std::array<int64_t, 3>{135, 8192, 328},
                                {200, 8190, 328},
                                {256, 8103, 520},
                                {301, 8200, 8},
                                {300, 8192, 2056},
                                {350, 8104, 328},
                                {420, 8100, 1000},
                                {380, 8104, 328},
                                {470, 8104, 328},
                                {600, 8200, 328},
                                {650, 8100, 520},
                                {500, 2570, 520},
                                {999, 2048, 712},
                                {300, 5100, 520},
                                {200, 14300, 328},
                                {200, 16300, 520},
                                {300, 14300, 1000},
                                {420, 16300, 328},
                                {900, 8200, 328}}) {
        for (const mk_algorithm_t algorithm : {MK_ALGORITHM_ONE_SHOT, MK_ALGORITHM_TWO_SHOT}) {
          Case some = {op, shape[0], shape[1], shape[2], transposed, dtype, dtype, false, true, false};
          if (op == MK_OPERATOR_GEMM_ALLREDUCE) some.algorithm = algorithm;
          cases.push_back(some);
          some.transposed = !transposed;
          some.out = MK_DTYPE_FP32;
          some.accumulate = true;
          cases.push_back(some);
          if (op == MK_OPERATOR_GEMM_REDUCE_SCATTER) break;
        }
      }
    }
    Case mixed = {op, 300, 8192, 520};
    mixed.mixes_layouts = true;
    cases.push_back(mixed);
  }
  // By its own layout alone a rank would take another tile.
  for (const mk_operator_t op : {MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
    Case mixed = {op, 1024, 7168, 64};
    mixed.mixes_layouts = true;
    cases.push_back(mixed);
  }
  // Few rows of a reduce-scatter: owners whose rows begin anywhere in a tile, or who have none.
  for (const int64_t m : {1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 48, 64, 65, 100, 127, 128, 130}) {
    constexpr mk_operator_t scatter = MK_OPERATOR_GEMM_REDUCE_SCATTER;
    for (const int64_t n : {8, 72, 300, 1000}) {
      const bool transposed = (m + n / 4) % 2 == 1;
      cases.push_back({scatter, m, n, 136, transposed});
      cases.push_back({scatter, m, n, 72, !transposed, MK_DTYPE_FP16, MK_DTYPE_FP16, true});
      cases.push_back({scatter, m, n, 64, transposed, MK_DTYPE_BF16, MK_DTYPE_FP32, true, true});
    }
    for (const auto& tile : {std::pair{128, 128}, std::pair{64, 128}, std::pair{64, 64}}) {
      cases.push_back({scatter, m, 1031, 200, m % 2 == 0, MK_DTYPE_BF16, MK_DTYPE_BF16, m % 3 == 0, true, false,
                       tile.first, tile.second});
    }
    Case wide = {scatter, m, 8192, 128, m % 2 == 1};
    cases.push_back(wide);
    wide.mixes_layouts = true;
    wide.n = 8200;
    cases.push_back(wide);
  }
  for (const int copy_ctas : {1, 7}) {
    for (const auto& tile : {std::pair{128, 256}, std::pair{128, 128}, std::pair{64, 64}}) {
      for (const int64_t m : {5, 700, 7000}) {
        cases.push_back({MK_OPERATOR_ALLGATHER_GEMM, m, 520, 1000, false, MK_DTYPE_BF16, MK_DTYPE_BF16, false,
                         false, true, tile.first, tile.second, MK_ALGORITHM_AUTO, copy_ctas});
      }
    }
  }
  // Own tiles summed while the next are computed: where tiles are several a CTA, and long. Of 51,200 products
  // six sums in a million are beyond 256, up to which every integer is a bf16.
  const int64_t long_k = std::min(6400, 25600 / nranks / 8 * 8);
  for (const mk_operator_t op : {MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
    for (const bool transposed : {false, true}) {
      const mk_dtype_t dtype = transposed ? MK_DTYPE_FP16 : MK_DTYPE_BF16;
      cases.push_back({op, 2100, 4104, long_k, transposed, dtype, dtype, false, false, false, 128, 256});
      cases.push_back({op, 2100, 4104, long_k, transposed, dtype, dtype, false, true, false, 128, 256});
    }
  }
  for (const mk_algorithm_t algorithm : {MK_ALGORITHM_ONE_SHOT, MK_ALGORITHM_TWO_SHOT}) {
    for (const int64_t m : {5, 64, 200, 700}) {
      cases.push_back({MK_OPERATOR_GEMM_ALLREDUCE, m, 1056, 192, false, MK_DTYPE_BF16, MK_DTYPE_BF16, false,
                       true, false, 0, 0, algorithm});
      cases.push_back({MK_OPERATOR_GEMM_ALLREDUCE, m, 250, 192, true, MK_DTYPE_BF16, MK_DTYPE_FP32, true, false,
                       false, 0, 0, algorithm});
    }
  }
  return cases;
}

// 1,000 launches in a row without the host in between; the last is checked.
void run_back_to_back(Rank& rank) {
  for (const mk_operator_t op :
       {MK_OPERATOR_ALLGATHER_GEMM, MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
    const Case c = {op, 384, 256, 128};
    Buffer a(384 * 128 * 2), b(128 * 256 * 2), out(384 * 256 * 2);
    require_cuda(cudaMemset(a.data, 0, a.bytes), "cudaMemset");
    require_cuda(cudaMemset(b.data, 0, b.bytes), "cudaMemset");
    rank.meet();
    const mk_tuning_t tuning = MK_TUNING_INIT;
    for (int i = 0; i < 1000; ++i) {
      require(
          call(rank.comm, c, tuning, a.data, 128, b.data, 256, out.data, 256, nullptr, nullptr, 0, rank.stream),
          "back to back", rank.comm);
    }
    rank.synchronize();
    rank.meet();
    run_case(rank, c, 2);
  }
}

}  // namespace

int main(int argc, char** argv) {
  int num_devices = 0;
  if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) return 77;
  const int nranks = argc > 1 ? std::atoi(argv[1]) : std::max(2, num_devices);
  const std::vector<Case> cases = make_cases(nranks);
  run_ranks(nranks, [&](Rank& rank) {
    for (const Case& c : cases) run_case(rank, c, 2);
    run_back_to_back(rank);
  });
  std::printf("%d ranks on %d GPUs: %d passed, %d failed\n", nranks, num_devices, num_passed.load(),
              num_failed.load());
  return num_failed > 0 || num_passed == 0 ? 1 : 0;
}
