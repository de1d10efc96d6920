// SPDX-License-Identifier: MIT
// Times of the GEMM operators between GPUs, and of the same product alone on all GPUs at once.
//
//   operators_bench RANKS OPERATOR:M,N,K[,TILE_M,TILE_N,COPY_CTAS] ...     OPERATOR: ag, rs, ar; K as in the
//   operator's call. Times are those of the slowest rank.
#include <algorithm>
#include <cstring>

#include "operators_job.h"

namespace {

using namespace operators;

constexpr int WARM_UP = 5;
constexpr int ISOLATED = 20;
constexpr int BACK_TO_BACK = 20;
constexpr double LINK_BYTES_PER_US = 370e3;

struct Shape {
  mk_operator_t op;
  long long m, n, k;
  int tile_m = 0, tile_n = 0, copy_ctas = 0;
};

__global__ void fill_random(uint32_t* words, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += gridDim.x * size_t{blockDim.x}) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u ^ seed;
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    // Two bf16 of magnitude 0.5 to 2 and either sign.
    words[i] = (x & 0x80ff80ffu) | 0x3f003f00u;
  }
}

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

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Times {
  double isolated;
  double back_to_back;
};

// The slowest rank's, sample by sample.
std::vector<double> slowest(Rank& rank, const std::vector<double>& own) {
  static std::vector<double> all[64];
  all[rank.rank] = own;
  rank.meet();
  std::vector<double> result = own;
  for (int r = 0; r < rank.nranks; ++r) {
    for (size_t i = 0; i < own.size(); ++i) result[i] = std::max(result[i], all[r][i]);
  }
  rank.meet();
  return result;
}

Times measure(Rank& rank, const std::function<void()>& run) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  const auto timed = [&](int launches) {
    rank.meet();
    cudaEventRecord(begin, rank.stream);
    for (int i = 0; i < launches; ++i) run();
    cudaEventRecord(end, rank.stream);
    require_cuda(cudaStreamSynchronize(rank.stream), "timing");
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, begin, end);
    return milliseconds * 1000.0 / launches;
  };
  timed(WARM_UP);
  std::vector<double> isolated;
  for (int i = 0; i < ISOLATED; ++i) isolated.push_back(timed(1));
  const std::vector<double> back_to_back = {timed(BACK_TO_BACK)};
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return {median(slowest(rank, isolated)), slowest(rank, back_to_back)[0]};
}

void run_shape(Rank& rank, const Shape& shape) {
  const bool gathers = shape.op == MK_OPERATOR_ALLGATHER_GEMM;
  const long long own = (shape.m + rank.nranks - 1) / rank.nranks;
  Buffer a(shape.m * shape.k * 2), b(shape.k * shape.n * 2), c(shape.m * shape.n * 2);
  fill_random<<<512, 256, 0, rank.stream>>>(static_cast<uint32_t*>(a.data), a.bytes / 4, 1 + rank.rank);
  fill_random<<<512, 256, 0, rank.stream>>>(static_cast<uint32_t*>(b.data), b.bytes / 4, 100 + rank.rank);
  require_cuda(cudaStreamSynchronize(rank.stream), "filling");
  mk_tuning_t tuning = MK_TUNING_INIT;
  tuning.tile_m = shape.tile_m, tuning.tile_n = shape.tile_n, tuning.copy_ctas = shape.copy_ctas;
  require(launch(rank.comm, shape, &tuning, a.data, b.data, c.data, rank.stream), "launch", rank.comm);
  rank.synchronize();
  const Times fused = measure(rank, [&] {
    require(launch(rank.comm, shape, &tuning, a.data, b.data, c.data, rank.stream), "launch", rank.comm);
  });
  rank.synchronize();
  const Times alone = measure(rank, [&] {
    require(launch(rank.alone, {MK_OPERATOR_ALLGATHER_GEMM, shape.m, shape.n, shape.k}, nullptr, a.data, b.data,
                   c.data, rank.stream),
            "launch", rank.alone);
  });
  if (rank.rank == 0) {
    const double bytes = gathers ? 2.0 * own * shape.k * (rank.nranks - 1)
                         : shape.op == MK_OPERATOR_GEMM_REDUCE_SCATTER
                             ? 2.0 * (shape.m - own) * shape.n
                             : 2.0 * (2.0 * (shape.m - own)) * shape.n;
    const double link = bytes / LINK_BYTES_PER_US;
    const char* names[] = {"", "ag", "rs", "ar"};
    std::printf(
        "%s %6lld %6lld %6lld tile %3dx%-3d copy %2d fused %9.1f / %9.1f us  alone %9.1f / %9.1f  link %8.1f  "
        "ratio "
        "%.3f / %.3f\n",
        names[shape.op], shape.m, shape.n, shape.k, shape.tile_m, shape.tile_n, shape.copy_ctas, fused.isolated,
        fused.back_to_back, alone.isolated, alone.back_to_back, link,
        fused.isolated / std::max(link, alone.isolated),
        fused.back_to_back / std::max(link, alone.back_to_back));
    std::fflush(stdout);
  }
  rank.meet();
}

}  // namespace

int main(int argc, char** argv) {
  int num_devices = 0;
  if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) return 77;
  if (argc < 3) return 2;
  std::vector<Shape> shapes;
  for (int i = 2; i < argc; ++i) {
    Shape shape{};
    char name[3] = {};
    if (std::sscanf(argv[i], "%2s:%lld,%lld,%lld,%d,%d,%d", name, &shape.m, &shape.n, &shape.k, &shape.tile_m,
                    &shape.tile_n, &shape.copy_ctas) < 4) {
      std::printf("expected ag|rs|ar:M,N,K[,TILE_M,TILE_N,COPY_CTAS], saw %s\n", argv[i]);
      return 2;
    }
    shape.op = std::strcmp(name, "ag") == 0   ? MK_OPERATOR_ALLGATHER_GEMM
               : std::strcmp(name, "rs") == 0 ? MK_OPERATOR_GEMM_REDUCE_SCATTER
                                              : MK_OPERATOR_GEMM_ALLREDUCE;
    shapes.push_back(shape);
  }
  run_ranks(std::atoi(argv[1]), [&](Rank& rank) {
    for (const Shape& shape : shapes) run_shape(rank, shape);
  });
  return 0;
}
