// SPDX-License-Identifier: MIT
// The plain product against cublasLt (the fastest of the heuristic's first proposals), bf16, interleaved,
// random data, rotating buffers. Two modes: isolated launches behind a short spin, and batches back to back.
// Medians.
//   gemm_bench [--set large|layers|small|all] [--sweep] [--layout kn|nk|both|tn] [--fp32] [--accumulate] [m n k
//   ...]
// --sweep times every plan instead of the chosen one: what the plan's model is fitted to. tn: A is transposed,
// as for the gradient of a weight. --fp32: C is. --accumulate: C is added to.
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kernels/gemm/gemm.h"

namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  std::printf("%s: cublas status %d\n", what, status);
  std::exit(1);
}
#define CHECK(call) check((call), #call)

constexpr size_t CUBLAS_WORKSPACE_BYTES = size_t{64} << 20;
constexpr int NUM_PROPOSALS = 10;
constexpr int NUM_PAIRS = 21;

struct Problem {
  int64_t m, n, k;
  bool a_transposed = false, b_transposed = false, is_fp32 = false, accumulate = false;

  // As at the head of a sweep's lines.
  std::string kind() const {
    const std::string layout = a_transposed ? "TN" : b_transposed ? "NK" : "KN";
    return layout + (accumulate ? "+" : is_fp32 ? "=" : "") + (is_fp32 ? "fp32" : accumulate ? "bf16" : "");
  }
};

struct Operands {
  __nv_bfloat16 *a, *b;
  void* c;
};

__global__ void fill(__nv_bfloat16* p, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t x = (seed << 40) + i;
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
    p[i] = __float2bfloat16(static_cast<uint32_t>(x >> 32) * (2.0f / 4294967296.0f) - 1.0f);
  }
}

__global__ void spin(int64_t num_cycles) {
  const int64_t begin = clock64();
  while (clock64() - begin < num_cycles) {
  }
}

// NVML by name: the machine that builds need not have a driver.
class Sensors {
 public:
  Sensors() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library == nullptr) return;
    const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
    const auto get =
        reinterpret_cast<int (*)(unsigned, void**)>(dlsym(library, "nvmlDeviceGetHandleByIndex_v2"));
    clock_ = reinterpret_cast<int (*)(void*, int, unsigned*)>(dlsym(library, "nvmlDeviceGetClockInfo"));
    power_ = reinterpret_cast<int (*)(void*, unsigned*)>(dlsym(library, "nvmlDeviceGetPowerUsage"));
    if (init() != 0 || get(0, &device_) != 0) device_ = nullptr;
  }
  void sample() {
    unsigned mhz = 0, milliwatts = 0;
    if (device_ == nullptr || clock_(device_, 1, &mhz) != 0 || power_(device_, &milliwatts) != 0) return;
    mhz_.push_back(mhz);
    watts_.push_back(milliwatts / 1000.0);
  }
  void take_medians(double* mhz, double* watts);

 private:
  void* device_ = nullptr;
  int (*clock_)(void*, int, unsigned*) = nullptr;
  int (*power_)(void*, unsigned*) = nullptr;
  std::vector<double> mhz_, watts_;
};

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void Sensors::take_medians(double* mhz, double* watts) {
  *mhz = median(mhz_);
  *watts = median(watts_);
  mhz_.clear();
  watts_.clear();
}

class Timer {
 public:
  explicit Timer(cudaStream_t stream) : stream_(stream) {
    CHECK(cudaEventCreate(&begin_));
    CHECK(cudaEventCreate(&end_));
  }
  // The spin hides the host's share of the launch.
  double isolated_us(const std::function<void()>& launch) {
    CHECK(cudaStreamSynchronize(stream_));
    spin<<<1, 1, 0, stream_>>>(60000);
    return timed_us(launch);
  }
  double timed_us(const std::function<void()>& launch) {
    CHECK(cudaEventRecord(begin_, stream_));
    launch();
    CHECK(cudaEventRecord(end_, stream_));
    if (on_running) on_running();
    CHECK(cudaEventSynchronize(end_));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin_, end_));
    return ms * 1e3;
  }
  std::function<void()> on_running;

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
};

// Row-major C = A B is column-major C^T = B^T A^T.
class CublasProduct {
 public:
  CublasProduct(cublasLtHandle_t handle, const Problem& p, void* workspace)
      : handle_(handle), workspace_(workspace) {
    const cublasOperation_t transpose_a = p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t transpose_b = p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    adds_ = p.accumulate ? 1 : 0;
    CHECK(cublasLtMatmulDescCreate(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CHECK(cublasLtMatmulDescSetAttribute(product_, CUBLASLT_MATMUL_DESC_TRANSA, &transpose_b,
                                         sizeof transpose_b));
    CHECK(cublasLtMatmulDescSetAttribute(product_, CUBLASLT_MATMUL_DESC_TRANSB, &transpose_a,
                                         sizeof transpose_a));
    CHECK(p.b_transposed ? cublasLtMatrixLayoutCreate(&b_, CUDA_R_16BF, p.k, p.n, p.k)
                         : cublasLtMatrixLayoutCreate(&b_, CUDA_R_16BF, p.n, p.k, p.n));
    CHECK(p.a_transposed ? cublasLtMatrixLayoutCreate(&a_, CUDA_R_16BF, p.m, p.k, p.m)
                         : cublasLtMatrixLayoutCreate(&a_, CUDA_R_16BF, p.k, p.m, p.k));
    CHECK(cublasLtMatrixLayoutCreate(&c_, p.is_fp32 ? CUDA_R_32F : CUDA_R_16BF, p.n, p.m, p.n));
    cublasLtMatmulPreference_t preference;
    CHECK(cublasLtMatmulPreferenceCreate(&preference));
    CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                               &CUBLAS_WORKSPACE_BYTES, sizeof CUBLAS_WORKSPACE_BYTES));
    CHECK(cublasLtMatmulAlgoGetHeuristic(handle, product_, b_, a_, c_, c_, preference, NUM_PROPOSALS,
                                         proposals_, &num_proposals_));
    cublasLtMatmulPreferenceDestroy(preference);
  }
  ~CublasProduct() {
    cublasLtMatrixLayoutDestroy(a_);
    cublasLtMatrixLayoutDestroy(b_);
    cublasLtMatrixLayoutDestroy(c_);
    cublasLtMatmulDescDestroy(product_);
  }
  int num_proposals() const { return num_proposals_; }
  void launch(int proposal, const Operands& o, cudaStream_t stream) const {
    const float one = 1;
    CHECK(cublasLtMatmul(handle_, product_, &one, o.b, b_, o.a, a_, &adds_, o.c, c_, o.c, c_,
                         &proposals_[proposal].algo, workspace_, CUBLAS_WORKSPACE_BYTES, stream));
  }

 private:
  cublasLtHandle_t handle_;
  void* workspace_;
  float adds_;
  cublasLtMatmulDesc_t product_;
  cublasLtMatrixLayout_t a_, b_, c_;
  cublasLtMatmulHeuristicResult_t proposals_[NUM_PROPOSALS];
  int num_proposals_ = 0;
};

class Bench {
 public:
  Bench() {
    CHECK(cudaStreamCreate(&stream_));
    timer_.emplace(stream_);
    CHECK(mk::gemm_prepare());
    CHECK(mk::gemm_cluster_limits(&limits_));
    std::printf("clusters at a time of 2 CTAs and more:");
    for (int size = 2; size <= mk::MAX_CLUSTER_CTAS; ++size) std::printf(" %d", limits_.at_a_time[size]);
    std::printf("\n");
    CHECK(cublasLtCreate(&cublas_));
    CHECK(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, 0));
    CHECK(cudaMalloc(&cublas_workspace_, CUBLAS_WORKSPACE_BYTES));
    CHECK(cudaMalloc(&workspace_, size_t{64} << 20));
    CHECK(cudaMemset(workspace_, 0, size_t{64} << 20));
    CHECK(cudaMalloc(&pool_, POOL_BYTES));
    fill<<<1024, 256>>>(static_cast<__nv_bfloat16*>(pool_), POOL_BYTES / 2, 1);
    CHECK(cudaDeviceSynchronize());
  }

  void compare(const Problem& p) {
    place_operands(p);
    const CublasProduct cublas(cublas_, p, cublas_workspace_);
    const mk::GemmPlan plan = mk::gemm_plan(shape_of(p), num_sms_, limits_);
    const auto ours = [&](int i) { launch_ours(p, plan, i); };
    double ratio[2], tflops[2][2], mhz = 0, watts = 0;
    for (const bool isolated : {true, false}) {
      const int best = best_proposal(cublas, isolated);
      const auto theirs = [&](int i) { cublas.launch(best, operands_[i % operands_.size()], stream_); };
      std::vector<double> us[2], ratios;
      const int batch = isolated ? 1 : batch_of(ours);
      for (int pair = 0; pair < NUM_PAIRS; ++pair) {
        if (!isolated) timer_->on_running = [this] { sensors_.sample(); };
        const double t0 = time_us(ours, isolated, batch), t1 = time_us(theirs, isolated, batch);
        us[0].push_back(t0);
        us[1].push_back(t1);
        ratios.push_back(t1 / t0);
      }
      timer_->on_running = nullptr;
      for (int who = 0; who < 2; ++who) tflops[isolated][who] = 2e-6 * p.m * p.n * p.k / median(us[who]);
      ratio[isolated] = median(ratios);
      if (!isolated) sensors_.take_medians(&mhz, &watts);
    }
    const double us = 2e-6 * p.m * p.n * p.k;
    std::printf(
        "%6ld %6ld %6ld %s | %7.2f us %5.0f %5.0f %6.3f | %7.2f us %5.0f %5.0f %6.3f | %4.0f MHz %3.0f W | "
        "%dx%d%s s%d sk%d w%d\n",
        p.m, p.n, p.k, p.kind().c_str(), us / tflops[1][0], tflops[1][0], tflops[1][1], ratio[1],
        us / tflops[0][0], tflops[0][0], tflops[0][1], ratio[0], mhz, watts, plan.block_m, plan.block_n,
        mk::gemm_plan_kind(plan).c_str(), plan.num_split_ctas, plan.num_streamk_tiles, plan.num_workers);
    std::fflush(stdout);
  }

  void sweep(const Problem& p) {
    place_operands(p);
    const CublasProduct cublas(cublas_, p, cublas_workspace_);
    const int best = best_proposal(cublas, false);
    const auto theirs = [&](int i) { cublas.launch(best, operands_[i % operands_.size()], stream_); };
    const int batch = batch_of(theirs) / 5 + 1;
    std::vector<mk::GemmPlan> plans;
    plans.push_back(mk::gemm_plan(shape_of(p), num_sms_, limits_));
    for (const mk::GemmTile& tile : mk::GEMM_TILES) add_plans(p, tile, &plans);
    if (p.m > 64 && !p.a_transposed) {
      for (const mk::GemmSwappedTile& tile : mk::GEMM_SWAPPED_TILES) add_swapped_plans(p, tile, &plans);
      for (const mk::GemmSwappedTile& tile : mk::GEMM_SWAPPED_TILES) {
        for (const int split : {1, 2, 3, 4}) {
          const mk::GemmPlan plan = mk::gemm_swapped_cluster_plan_with(shape_of(p), tile, split);
          if (mk::gemm_swapped_tile_can_have(tile, split) &&
              plan.num_workers <= limits_.at_a_time[plan.num_cluster_ctas()] && p.k / split >= 256)
            plans.push_back(plan);
        }
      }
    }
    for (const mk::GemmTile& tile : mk::GEMM_SPLIT_TILES) {
      for (int split = 2; split <= mk::MAX_SPLIT_CTAS; ++split) {
        const mk::GemmPlan plan = mk::gemm_split_plan_with(shape_of(p), tile, split);
        if (!p.a_transposed && plan.num_workers <= limits_.at_a_time[split] && p.k / split >= 256 &&
            (p.m > 64 || tile.block_m == 64))
          plans.push_back(plan);
      }
    }
    for (const mk::GemmTile& tile : mk::GEMM_PAIR_TILES) {
      for (const int split : {1, 2}) {
        const mk::GemmPlan plan = mk::gemm_pair_plan_with(shape_of(p), tile, split);
        if (p.m > 128 && !p.a_transposed && plan.num_workers <= limits_.at_a_time[2 * split] &&
            p.k / split >= 256 && (split == 1 || tile.block_n % mk::SPLIT_CHUNK_COLUMNS == 0))
          plans.push_back(plan);
      }
    }
    std::printf("%ld %ld %ld %s: cublas %.2f us\n", p.m, p.n, p.k, p.kind().c_str(),
                time_us(theirs, false, batch));
    for (size_t i = 0; i < plans.size(); ++i) {
      const auto ours = [&](int idx) { launch_ours(p, plans[i], idx); };
      std::vector<double> a, b, c;
      for (int repeat = 0; repeat < 5; ++repeat) {
        a.push_back(time_us(ours, true, 1));
        b.push_back(time_us(ours, false, batch));
        c.push_back(time_us(theirs, false, batch));
      }
      std::printf(
          "  %s%3dx%3d%-5s s%d sk%-4d w%-3d g%-2d: isolated %8.2f  back to back %8.2f  cublas %8.2f  model "
          "%8.2f\n",
          i == 0 ? "*" : " ", plans[i].block_m, plans[i].block_n, mk::gemm_plan_kind(plans[i]).c_str(),
          plans[i].num_split_ctas, plans[i].num_streamk_tiles, plans[i].num_workers, plans[i].group_m,
          median(a), median(b), median(c), plans[i].predicted_us);
      std::fflush(stdout);
    }
  }

 private:
  static constexpr size_t POOL_BYTES = size_t{6} << 30;

  static mk::GemmShape shape_of(const Problem& p) {
    mk::GemmShape shape;
    shape.m = p.m;
    shape.n = p.n;
    shape.k = p.k;
    shape.a_transposed = p.a_transposed;
    shape.b_transposed = p.b_transposed;
    shape.out_type = p.is_fp32 ? mk::GemmType::fp32 : mk::GemmType::bf16;
    shape.accumulate = p.accumulate;
    return shape;
  }

  // As many sets as make up five times the L2, so that no launch finds its inputs there.
  void place_operands(const Problem& p) {
    const auto padded = [](int64_t elements) { return (elements + 127) / 128 * 128; };
    const int64_t elements = padded(p.m * p.k) + padded(p.k * p.n) + padded(p.m * p.n) * (p.is_fp32 ? 2 : 1);
    const int64_t num_sets = std::clamp<int64_t>((int64_t{256} << 20) / (2 * elements) + 1, 2, 200);
    operands_.clear();
    auto* at = static_cast<__nv_bfloat16*>(pool_);
    for (int64_t i = 0; i < num_sets; ++i) {
      operands_.push_back({at, at + padded(p.m * p.k), at + padded(p.m * p.k) + padded(p.k * p.n)});
      at += elements;
    }
    if (2 * num_sets * elements > static_cast<int64_t>(POOL_BYTES)) {
      std::printf("product too large for the pool\n");
      std::exit(1);
    }
  }

  void launch_ours(const Problem& p, const mk::GemmPlan& plan, int i) {
    const Operands& o = operands_[i % operands_.size()];
    mk::GemmArguments g;
    g.shape = shape_of(p);
    g.a = o.a;
    g.lda = p.a_transposed ? p.m : p.k;
    g.b = o.b;
    g.ldb = p.b_transposed ? p.k : p.n;
    g.c = o.c;
    g.ldc = p.n;
    g.workspace = workspace_;
    g.num_sms = num_sms_;
    CHECK(mk::gemm_launch(g, plan, stream_));
  }

  double time_us(const std::function<void(int)>& launch, bool isolated, int batch) {
    if (isolated) return timer_->isolated_us([&] { launch(next_++); });
    return timer_->timed_us([&] {
      for (int i = 0; i < batch; ++i) launch(next_++);
    }) / batch;
  }

  // About 15 ms, so that the clock settles where the power allows.
  int batch_of(const std::function<void(int)>& launch) {
    time_us(launch, true, 1);
    return std::clamp(static_cast<int>(15000 / time_us(launch, true, 1)), 3, 500);
  }

  int best_proposal(const CublasProduct& cublas, bool isolated) {
    int best = 0;
    double best_us = 1e30;
    for (int i = 0; i < cublas.num_proposals(); ++i) {
      const auto launch = [&](int idx) { cublas.launch(i, operands_[idx % operands_.size()], stream_); };
      time_us(launch, true, 1);
      std::vector<double> us;
      for (int repeat = 0; repeat < 5; ++repeat) us.push_back(time_us(launch, isolated, 5));
      if (median(us) < best_us) {
        best_us = median(us);
        best = i;
      }
    }
    return best;
  }

  // As many workers as give each of fewer tiles the same number, some; 0: there are none, or it is all of them.
  static int even_workers(int tiles, int workers) {
    const int even = tiles < workers ? workers / tiles * tiles : 0;
    return even > tiles && even < workers ? even : 0;
  }

  void add_plans(const Problem& p, const mk::GemmTile& tile, std::vector<mk::GemmPlan>* plans) {
    if (p.m <= 64 && tile.block_m > 64 && p.n < 14336) return;
    const int num_ctas = tile.cluster.m * tile.cluster.n;
    const int workers = num_ctas > 1 ? limits_.at_a_time[num_ctas] : num_sms_;
    const mk::GemmPlan whole = mk::gemm_plan_with(shape_of(p), workers * num_ctas, tile, -1);
    const int tiles = static_cast<int>(mk::gemm_plan_num_tiles(shape_of(p), whole));
    if (p.m > 256 && tile.block_m == 64 && tiles > workers) return;
    plans->push_back(whole);
    for (const int streamk : {tiles % workers, tiles % workers + workers}) {
      if (streamk == 0 || streamk > tiles || tiles > 6 * workers) continue;
      plans->push_back(mk::gemm_plan_with(shape_of(p), workers * num_ctas, tile, streamk));
    }
    if (const int even = even_workers(tiles, workers); even > 0)
      plans->push_back(mk::gemm_plan_with(shape_of(p), even * num_ctas, tile, tiles));
    if (tiles > 6 * workers) {
      for (const int group : {8, 32}) {
        plans->push_back(whole);
        plans->back().group_m = group;
      }
    }
  }

  // Those of a tile that walks: whole ones where its CTAs or clusters have more than one, and cut ones; with
  // fewer tiles than clusters among all of these, and among as many as give each tile the same number.
  void add_swapped_plans(const Problem& p, const mk::GemmSwappedTile& tile, std::vector<mk::GemmPlan>* plans) {
    if (!mk::gemm_swapped_tile_walks(tile)) return;
    const int num_ctas = tile.cluster.m * tile.cluster.n;
    const int workers = num_ctas > 1 ? std::min(limits_.at_a_time[num_ctas], num_sms_ / num_ctas) : num_sms_;
    const mk::GemmPlan whole = mk::gemm_swapped_plan_with(shape_of(p), workers, tile, -1);
    const int tiles = static_cast<int>(mk::gemm_plan_num_tiles(shape_of(p), whole));
    if (tiles > workers || num_ctas == 1) plans->push_back(whole);
    for (const int streamk : {tiles % workers, tiles % workers + workers}) {
      if (streamk != 0 && streamk <= tiles)
        plans->push_back(mk::gemm_swapped_plan_with(shape_of(p), workers, tile, streamk));
    }
    if (const int even = even_workers(tiles, workers); even > 0)
      plans->push_back(mk::gemm_swapped_plan_with(shape_of(p), even, tile, tiles));
  }

  cudaStream_t stream_;
  std::optional<Timer> timer_;
  Sensors sensors_;
  cublasLtHandle_t cublas_;
  int num_sms_ = 0;
  mk::GemmClusterLimits limits_;
  void *cublas_workspace_, *workspace_, *pool_;
  std::vector<Operands> operands_;
  int next_ = 0;
};

std::vector<Problem> problems_of(const std::string& set) {
  std::vector<Problem> problems;
  if (set == "large" || set == "all") {
    const int64_t sizes[][3] = {
        {4096, 4096, 4096}, {8192, 8192, 8192}, {16384, 16384, 4096}, {8192, 28672, 8192}};
    for (const auto& size : sizes) problems.push_back({size[0], size[1], size[2]});
  }
  // Llama-3-70B on 4 ranks: qkv, o_proj, gate_up, down.
  const int64_t layers[][2] = {{2560, 8192}, {8192, 2048}, {14336, 8192}, {8192, 7168}};
  for (const auto& layer : layers) {
    if (set == "layers" || set == "all") {
      for (const int64_t m : {1024, 2048, 4096, 8192}) problems.push_back({m, layer[0], layer[1]});
    }
    if (set == "small" || set == "all") {
      for (const int64_t m : {16, 32, 64, 128, 256, 512}) problems.push_back({m, layer[0], layer[1]});
    }
  }
  return problems;
}

}  // namespace

int main(int argc, char** argv) {
  std::string set = "large", layout = "both";
  bool sweep = false, is_fp32 = false, accumulate = false;
  std::vector<Problem> problems;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--set" && i + 1 < argc) {
      set = argv[++i];
    } else if (argument == "--layout" && i + 1 < argc) {
      layout = argv[++i];
    } else if (argument == "--sweep") {
      sweep = true;
    } else if (argument == "--fp32") {
      is_fp32 = true;
    } else if (argument == "--accumulate") {
      accumulate = true;
    } else if (i + 2 < argc && std::atoll(argv[i]) > 0) {
      problems.push_back({std::atoll(argv[i]), std::atoll(argv[i + 1]), std::atoll(argv[i + 2])});
      i += 2;
    } else {
      std::printf(
          "usage: gemm_bench [--set large|layers|small|all] [--sweep] [--layout kn|nk|both|tn] [--fp32] "
          "[--accumulate] [m n k ...]\n");
      return 2;
    }
  }
  if (problems.empty()) problems = problems_of(set);
  Bench bench;
  if (!sweep) {
    std::printf(
        "     m      n      k  B | isolated: ours, TFLOP/s ours cublas ratio | back to back: the same | "
        "plan\n");
  }
  for (Problem p : problems) {
    p.is_fp32 = is_fp32;
    p.accumulate = accumulate;
    for (const char* of : {"kn", "nk", "tn"}) {
      if (layout != of && (layout != "both" || of == std::string("tn"))) continue;
      p.a_transposed = of == std::string("tn");
      p.b_transposed = of == std::string("nk");
      if (sweep) {
        bench.sweep(p);
      } else {
        bench.compare(p);
      }
    }
  }
  return 0;
}
