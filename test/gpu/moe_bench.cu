// SPDX-License-Identifier: MIT
// Times of the mixture-of-experts operators between GPUs, and of as many rows an expert on one rank alone, on
// all GPUs at once.
//
//   moe_bench RANKS TOKENS,HIDDEN,INTER,EXPERTS,TOPK[,COPY_CTAS[,TILE_M,TILE_N]] ...     TOKENS and EXPERTS are
//   those of all ranks; alone a rank has its share of both. Routing is uniform. Times are those of the slowest
//   rank.
#include <cstring>
#include <random>

#include "operators_timing.cuh"

namespace {

using namespace operators;

struct Shape {
  long long tokens, hidden, inter;
  int experts, topk, copy_ctas, tile_m, tile_n;
};

std::vector<int32_t> random_experts(long long tokens, int experts, int topk, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<int32_t> all(static_cast<size_t>(experts));
  for (int i = 0; i < experts; ++i) all[static_cast<size_t>(i)] = i;
  std::vector<int32_t> chosen;
  for (long long token = 0; token < tokens; ++token) {
    for (int k = 0; k < topk; ++k) {
      const int other = k + static_cast<int>(random() % static_cast<unsigned>(experts - k));
      std::swap(all[static_cast<size_t>(k)], all[static_cast<size_t>(other)]);
      chosen.push_back(all[static_cast<size_t>(k)]);
    }
  }
  return chosen;
}

struct Pair {
  Times dispatch, combine;
  double flops;  // of the rank with the most rows
};

Pair timed(Rank& rank, mk_comm_t comm, int nranks, const Shape& shape) {
  const long long tokens = shape.tokens / rank.nranks;
  const int experts = nranks == 1 ? shape.experts / rank.nranks : shape.experts;
  const long long capacity = tokens * shape.topk * 5 / 4 + 1024;
  mk_tuning_t tuning = MK_TUNING_INIT;
  tuning.copy_ctas = shape.copy_ctas, tuning.tile_m = shape.tile_m, tuning.tile_n = shape.tile_n;
  mk_moe_maxima_t maxima = MK_MOE_MAXIMA_INIT;
  maxima.tokens = tokens, maxima.hidden = shape.hidden, maxima.inter = shape.inter;
  maxima.capacity_rows = capacity, maxima.experts = shape.experts, maxima.topk = shape.topk;
  size_t routing_bytes = 0;
  require(mk_moe_routing_bytes(&maxima, nranks, &routing_bytes), "mk_moe_routing_bytes", comm);
  const size_t weights = size_t(experts / nranks) * shape.hidden * shape.inter * 2;
  Buffer x(tokens * shape.hidden * 2), w(weights), y(capacity * shape.inter * 2),
      indices(tokens * shape.topk * 4), routing(routing_bytes), gates(tokens * shape.topk * 4),
      out(tokens * shape.hidden * 2);
  int seed = 1 + rank.rank;
  for (const Buffer* buffer : {&x, &w, &y, &gates}) {
    fill_random<<<512, 256, 0, rank.stream>>>(static_cast<uint32_t*>(buffer->data), buffer->bytes / 4, seed);
    seed += 100;
  }
  const std::vector<int32_t> chosen = random_experts(tokens, experts, shape.topk, rank.rank + 7);
  require_cuda(
      cudaMemcpyAsync(indices.data, chosen.data(), chosen.size() * 4, cudaMemcpyHostToDevice, rank.stream),
      "cudaMemcpy");
  require_cuda(cudaStreamSynchronize(rank.stream), "filling");

  mk_moe_dispatch_gemm_args_t dispatch = MK_MOE_DISPATCH_GEMM_ARGS_INIT;
  dispatch.tokens = tokens, dispatch.hidden = shape.hidden, dispatch.inter = shape.inter;
  dispatch.capacity_rows = capacity, dispatch.experts = experts, dispatch.topk = shape.topk;
  dispatch.ldx = shape.hidden, dispatch.ldy = shape.inter;
  dispatch.x = x.data, dispatch.topk_idx = indices.data, dispatch.w = w.data, dispatch.y = y.data;
  dispatch.routing = static_cast<mk_moe_routing_t*>(routing.data), dispatch.routing_bytes = routing_bytes;
  dispatch.tuning = &tuning;
  mk_moe_gemm_combine_args_t combine = MK_MOE_GEMM_COMBINE_ARGS_INIT;
  combine.tokens = tokens, combine.hidden = shape.hidden, combine.inter = shape.inter;
  combine.experts = experts, combine.topk = shape.topk;
  combine.ld_rows = shape.inter, combine.ldy = shape.hidden;
  combine.rows = y.data, combine.w = w.data, combine.routing = dispatch.routing;
  combine.routing_bytes = routing_bytes, combine.topk_weights = static_cast<float*>(gates.data);
  combine.y = out.data, combine.tuning = &tuning;
  const auto measured = [&](const char* what, const std::function<mk_status_t()>& launch) {
    rank.meet();  // see measure()
    require(launch(), what, comm);
    require(mk_comm_synchronize(comm, rank.stream), what, comm);
    const Times times = measure(rank, [&] { require(launch(), what, comm); });
    require(mk_comm_synchronize(comm, rank.stream), what, comm);
    return times;
  };
  Pair pair{};
  pair.dispatch =
      measured("mk_moe_dispatch_gemm", [&] { return mk_moe_dispatch_gemm(comm, &dispatch, rank.stream); });
  mk_moe_routing_t head{};
  require_cuda(cudaMemcpy(&head, routing.data, sizeof head, cudaMemcpyDeviceToHost), "cudaMemcpy");
  pair.combine =
      measured("mk_moe_gemm_combine", [&] { return mk_moe_gemm_combine(comm, &combine, rank.stream); });
  const double rows = slowest(rank, {static_cast<double>(head.num_rows)})[0];
  pair.flops = 2.0 * rows * static_cast<double>(shape.hidden * shape.inter);
  return pair;
}

void run_shape(Rank& rank, const Shape& shape) {
  const Pair alone = timed(rank, rank.alone, 1, shape);
  const Pair all = rank.nranks > 1 ? timed(rank, rank.comm, rank.nranks, shape) : alone;
  if (rank.rank != 0) return;
  const auto print = [&](const char* name, const Times& times, const Times& single) {
    const auto rate = [](double flops, double us) { return flops / us * 1e-6; };
    std::printf(
        "%-8s t %6lld copy %2d tile %dx%d  %8.1f / %8.1f us (%5.1f / %5.1f TFLOP/s)  alone %8.1f / %8.1f us "
        "(%5.1f / %5.1f)\n",
        name, shape.tokens, shape.copy_ctas, shape.tile_m, shape.tile_n, times.isolated, times.back_to_back,
        rate(all.flops, times.isolated), rate(all.flops, times.back_to_back), single.isolated,
        single.back_to_back, rate(alone.flops, single.isolated), rate(alone.flops, single.back_to_back));
  };
  print("dispatch", all.dispatch, alone.dispatch);
  print("combine", all.combine, alone.combine);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s RANKS TOKENS,HIDDEN,INTER,EXPERTS,TOPK[,COPY_CTAS[,TILE_M,TILE_N]] ...\n",
                 argv[0]);
    return 2;
  }
  std::vector<Shape> shapes;
  for (int i = 2; i < argc; ++i) {
    Shape shape{};
    if (std::sscanf(argv[i], "%lld,%lld,%lld,%d,%d,%d,%d,%d", &shape.tokens, &shape.hidden, &shape.inter,
                    &shape.experts, &shape.topk, &shape.copy_ctas, &shape.tile_m, &shape.tile_n) < 5) {
      std::fprintf(stderr, "%s: not a shape\n", argv[i]);
      return 2;
    }
    shapes.push_back(shape);
  }
  set_environment();
  run_ranks(std::atoi(argv[1]), [&](Rank& rank) {
    for (const Shape& shape : shapes) run_shape(rank, shape);
  });
}
