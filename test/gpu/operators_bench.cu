// SPDX-License-Identifier: MIT
// Times of the GEMM operators between GPUs, and of the same product alone on all GPUs at once.
//
//   operators_bench RANKS [--zeros] OPERATOR:M,N,K[,TILE_M,TILE_N,COPY_CTAS] ...     OPERATOR: ag, rs, ar, or
//   wg, the all-gather in mode WGRAD; N and K as in the operator's call. Times are those of the slowest rank.
//   Operands of the shapes after --zeros are zero, for which the tensor cores need less power: what is slow
//   then is not slow for want of power.
#include <algorithm>
#include <cstring>

#include "operators_timing.cuh"

namespace {

using namespace operators;

constexpr double LINK_BYTES_PER_US = 370e3;

struct Shape {
  mk_operator_t op;
  bool is_wgrad;
  long long m, n, k;
  int tile_m = 0, tile_n = 0, copy_ctas = 0;
  bool zeros = false;
};

mk_status_t launch(mk_comm_t comm, const Shape& shape, const mk_tuning_t* tuning, const void* a, const void* b,
                   void* c, cudaStream_t stream) {
  const auto fill_common = [&](auto& args) {
    args.m = shape.m, args.n = shape.n, args.k = shape.k;
    args.a = a, args.lda = shape.k, args.b = b, args.ldb = shape.n, args.c = c, args.ldc = shape.n;
    args.tuning = tuning;
  };
  if (shape.op == MK_OPERATOR_ALLGATHER_GEMM) {
    mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
    fill_common(args);
    if (shape.is_wgrad) args.mode = MK_ALLGATHER_WGRAD, args.lda = shape.n, args.ldb = shape.k;
    return mk_allgather_gemm(comm, &args, stream);
  }
  if (shape.op == MK_OPERATOR_GEMM_REDUCE_SCATTER) {
    mk_gemm_reduce_scatter_args_t args = MK_GEMM_REDUCE_SCATTER_ARGS_INIT;
    fill_common(args);
    return mk_gemm_reduce_scatter(comm, &args, stream);
  }
  mk_gemm_allreduce_args_t args = MK_GEMM_ALLREDUCE_ARGS_INIT;
  fill_common(args);
  return mk_gemm_allreduce(comm, &args, stream);
}

void run_shape(Rank& rank, const Shape& shape) {
  const bool gathers = shape.op == MK_OPERATOR_ALLGATHER_GEMM;
  const long long own = (shape.m + rank.nranks - 1) / rank.nranks;
  const long long a_columns = shape.is_wgrad ? shape.n : shape.k;
  Buffer a(shape.m * a_columns * 2), b((shape.is_wgrad ? shape.m * shape.k : shape.k * shape.n) * 2),
      c((shape.is_wgrad ? shape.k : shape.m) * shape.n * 2);
  const auto fill = [&](const Buffer& buffer, uint32_t seed) {
    if (shape.zeros) {
      require_cuda(cudaMemsetAsync(buffer.data, 0, buffer.bytes, rank.stream), "cudaMemsetAsync");
    } else {
      fill_random<<<512, 256, 0, rank.stream>>>(static_cast<uint32_t*>(buffer.data), buffer.bytes / 4, seed);
    }
  };
  fill(a, 1 + rank.rank);
  fill(b, 100 + rank.rank);
  require_cuda(cudaStreamSynchronize(rank.stream), "filling");
  mk_tuning_t tuning = MK_TUNING_INIT;
  tuning.tile_m = shape.tile_m, tuning.tile_n = shape.tile_n, tuning.copy_ctas = shape.copy_ctas;
  rank.meet();  // see measure()
  require(launch(rank.comm, shape, &tuning, a.data, b.data, c.data, rank.stream), "launch", rank.comm);
  rank.synchronize();
  const Times fused = measure(rank, [&] {
    require(launch(rank.comm, shape, &tuning, a.data, b.data, c.data, rank.stream), "launch", rank.comm);
  });
  rank.synchronize();
  const Times alone = measure(rank, [&] {
    require(launch(rank.alone, {MK_OPERATOR_ALLGATHER_GEMM, shape.is_wgrad, shape.m, shape.n, shape.k}, nullptr,
                   a.data, b.data, c.data, rank.stream),
            "launch", rank.alone);
  });
  if (rank.rank == 0) {
    const double bytes = gathers ? 2.0 * own * a_columns * (rank.nranks - 1)
                         : shape.op == MK_OPERATOR_GEMM_REDUCE_SCATTER
                             ? 2.0 * (shape.m - own) * shape.n
                             : 2.0 * (2.0 * (shape.m - own)) * shape.n;
    const double link = bytes / LINK_BYTES_PER_US;
    const char* names[] = {"", "ag", "rs", "ar"};
    std::printf(
        "%s %6lld %6lld %6lld tile %3dx%-3d copy %2d fused %9.1f / %9.1f us  alone %9.1f / %9.1f  link %8.1f  "
        "ratio "
        "%.3f / %.3f%s\n",
        shape.is_wgrad ? "wg" : names[shape.op], shape.m, shape.n, shape.k, shape.tile_m, shape.tile_n,
        shape.copy_ctas, fused.isolated, fused.back_to_back, alone.isolated, alone.back_to_back, link,
        fused.isolated / std::max(link, alone.isolated),
        fused.back_to_back / std::max(link, alone.back_to_back), shape.zeros ? " zeros" : "");
    std::fflush(stdout);
  }
  rank.meet();
}

}  // namespace

int main(int argc, char** argv) {
  operators::set_environment();
  int num_devices = 0;
  if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) return 77;
  if (argc < 3) return 2;
  std::vector<Shape> shapes;
  bool zeros = false;
  for (int i = 2; i < argc; ++i) {
    if (std::strcmp(argv[i], "--zeros") == 0) {
      zeros = true;
      continue;
    }
    Shape shape{};
    shape.zeros = zeros;
    char name[3] = {};
    if (std::sscanf(argv[i], "%2s:%lld,%lld,%lld,%d,%d,%d", name, &shape.m, &shape.n, &shape.k, &shape.tile_m,
                    &shape.tile_n, &shape.copy_ctas) < 4) {
      std::printf("expected ag|wg|rs|ar:M,N,K[,TILE_M,TILE_N,COPY_CTAS], saw %s\n", argv[i]);
      return 2;
    }
    shape.is_wgrad = std::strcmp(name, "wg") == 0;
    shape.op = std::strcmp(name, "ag") == 0 || shape.is_wgrad ? MK_OPERATOR_ALLGATHER_GEMM
               : std::strcmp(name, "rs") == 0                 ? MK_OPERATOR_GEMM_REDUCE_SCATTER
                                                              : MK_OPERATOR_GEMM_ALLREDUCE;
    shapes.push_back(shape);
  }
  run_ranks(std::atoi(argv[1]), [&](Rank& rank) {
    for (const Shape& shape : shapes) run_shape(rank, shape);
  });
  return 0;
}
