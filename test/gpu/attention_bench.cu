// SPDX-License-Identifier: MIT
// Times of ring attention between GPUs, and of as much attention on one rank alone, on all GPUs at once.
//
//   attention_bench RANKS BATCH,SEQ,HEADS,KV_HEADS,DIM,CAUSAL[,COPY_CTAS[,TILE_M]] ...     CAUSAL: 0 none,
//   1 contiguous, 2 zigzag. SEQ is over all ranks; alone it is such that there is as much to compute. Times are
//   those of the slowest rank, operations those that the mask leaves.
#include <cmath>
#include <cstring>

#include "operators_timing.cuh"

namespace {

using namespace operators;

struct Shape {
  long long batch, seq;
  int heads, kv_heads, dim, causal, copy_ctas, tile_m;
};

mk_ring_attention_args_t arguments(const Shape& shape, long long seq, const mk_tuning_t* tuning) {
  mk_ring_attention_args_t args = MK_RING_ATTENTION_ARGS_INIT;
  args.batch = shape.batch, args.seq = seq;
  args.heads = shape.heads, args.kv_heads = shape.kv_heads, args.dim = shape.dim;
  args.causal = static_cast<mk_causal_t>(shape.causal);
  args.tuning = tuning;
  return args;
}

double flops(const Shape& shape, double seq) {
  const double pairs = shape.causal != 0 ? seq * (seq + 1) / 2 : seq * seq;
  return 4.0 * pairs * static_cast<double>(shape.batch * shape.heads * shape.dim);
}

void run_shape(Rank& rank, const Shape& shape) {
  const long long rows = (shape.seq + rank.nranks - 1) / rank.nranks + 2 * rank.nranks;
  // As many pairs a rank.
  const auto alone_seq = std::max<long long>(
      1,
      std::llround(static_cast<double>(shape.seq) / std::sqrt(static_cast<double>(rank.nranks)) / 128) * 128);
  const long long most = std::max(rows, alone_seq);
  const size_t queries = shape.batch * most * shape.heads * shape.dim * 2;
  const size_t keys = shape.batch * most * shape.kv_heads * shape.dim * 2;
  Buffer q(queries), k(keys), v(keys), o(queries), lse(shape.batch * most * shape.heads * 4);
  int seed = 1 + rank.rank;
  for (const Buffer* buffer : {&q, &k, &v}) {
    fill_random<<<512, 256, 0, rank.stream>>>(static_cast<uint32_t*>(buffer->data), buffer->bytes / 4, seed);
    seed += 100;
  }
  require_cuda(cudaStreamSynchronize(rank.stream), "filling");
  mk_tuning_t tuning = MK_TUNING_INIT;
  tuning.copy_ctas = shape.copy_ctas;
  tuning.tile_m = shape.tile_m;
  const auto timed = [&](mk_comm_t comm, long long seq) {
    mk_ring_attention_args_t args = arguments(shape, seq, &tuning);
    args.q = q.data, args.k = k.data, args.v = v.data, args.o = o.data;
    args.lse = static_cast<float*>(lse.data);
    require(mk_ring_attention(comm, &args, rank.stream), "mk_ring_attention", comm);
    require(mk_comm_synchronize(comm, rank.stream), "mk_comm_synchronize", comm);
    const Times times =
        measure(rank, [&] { require(mk_ring_attention(comm, &args, rank.stream), "launch", comm); });
    require(mk_comm_synchronize(comm, rank.stream), "mk_comm_synchronize", comm);
    return times;
  };
  const Times alone = timed(rank.alone, alone_seq);
  const Times ring = rank.nranks > 1 ? timed(rank.comm, shape.seq) : alone;
  if (rank.rank != 0) return;
  const auto rate = [](double operations, double microseconds) { return operations / microseconds * 1e-6; };
  const double ring_flops = flops(shape, static_cast<double>(shape.seq)) / rank.nranks;
  const double alone_flops = flops(shape, static_cast<double>(alone_seq));
  std::printf(
      "b %lld s %6lld h %d/%d d %3d causal %d copy %2d  ring %9.1f / %9.1f us (%5.1f / %5.1f TFLOP/s)  alone s "
      "%6lld "
      "%9.1f / %9.1f us (%5.1f / %5.1f)  ratio of rates %.3f / %.3f\n",
      shape.batch, shape.seq, shape.heads, shape.kv_heads, shape.dim, shape.causal, shape.copy_ctas,
      ring.isolated, ring.back_to_back, rate(ring_flops, ring.isolated), rate(ring_flops, ring.back_to_back),
      alone_seq, alone.isolated, alone.back_to_back, rate(alone_flops, alone.isolated),
      rate(alone_flops, alone.back_to_back),
      rate(ring_flops, ring.isolated) / rate(alone_flops, alone.isolated),
      rate(ring_flops, ring.back_to_back) / rate(alone_flops, alone.back_to_back));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s RANKS BATCH,SEQ,HEADS,KV_HEADS,DIM,CAUSAL[,COPY_CTAS[,TILE_M]] ...\n",
                 argv[0]);
    return 2;
  }
  std::vector<Shape> shapes;
  for (int i = 2; i < argc; ++i) {
    Shape shape{};
    if (std::sscanf(argv[i], "%lld,%lld,%d,%d,%d,%d,%d,%d", &shape.batch, &shape.seq, &shape.heads,
                    &shape.kv_heads, &shape.dim, &shape.causal, &shape.copy_ctas, &shape.tile_m) < 6) {
      std::fprintf(stderr, "%s: not a shape\n", argv[i]);
      return 2;
    }
    shapes.push_back(shape);
  }
  run_ranks(std::atoi(argv[1]), [&](Rank& rank) {
    for (const Shape& shape : shapes) {
      rank.meet();
      run_shape(rank, shape);
    }
  });
  return 0;
}
