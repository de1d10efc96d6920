// SPDX-License-Identifier: MIT
// The plain product against an independent float64 loop: exact on integers, within tolerance on random data,
// guard bytes untouched, the same bits from run to run. Exit code 1 if anything fails.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "kernels/gemm/gemm.h"

using mk::GemmArguments;
using mk::GemmPlan;
using mk::GemmShape;
using mk::GemmTile;
using mk::GemmType;

namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check((call), #call)

struct Case {
  GemmShape shape;
  bool bias = false;
  GemmType bias_type = GemmType::fp32;
  int ld_pad = 8;    // of A and B: elements past the row, filled with NaN
  int c_pad = 8;     // of C: elements past the row, which must not change
  int c_offset = 0;  // of C's first element: 16-byte alignment or not
};

using PlanChoice = std::function<GemmPlan(const GemmShape&)>;

int type_bytes(GemmType type) { return type == GemmType::fp32 ? 4 : 2; }
const char* type_name(GemmType type) {
  return type == GemmType::bf16 ? "bf16" : type == GemmType::fp16 ? "fp16" : "fp32";
}

__device__ double load(const void* p, GemmType type, int64_t i) {
  if (type == GemmType::bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  if (type == GemmType::fp16) return __half2float(static_cast<const __half*>(p)[i]);
  return static_cast<const float*>(p)[i];
}
__device__ void store(void* p, GemmType type, int64_t i, float value) {
  if (type == GemmType::bf16) {
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(value);
  } else if (type == GemmType::fp16) {
    static_cast<__half*>(p)[i] = __float2half_rn(value);
  } else {
    static_cast<float*>(p)[i] = value;
  }
}
__device__ uint32_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return static_cast<uint32_t>(x >> 32);
}

// Integers of -2..2, or uniform in [-1, 1). Row padding is left as it was.
__global__ void fill(void* p, GemmType type, int64_t rows, int64_t columns, int64_t ld, uint64_t seed,
                     bool integers) {
  const int64_t idx = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (idx >= rows * columns) return;
  const uint32_t bits = mix(seed * 0x9e3779b97f4a7c15ULL + idx);
  const float value = integers ? static_cast<float>(bits % 5) - 2.0f : bits * (2.0f / 4294967296.0f) - 1.0f;
  store(p, type, idx / columns * ld + idx % columns, value);
}

struct Operands {
  GemmArguments arguments;
  const void* c_before;  // C as it was before the launch
};

__global__ void reference(Operands o, double* out) {
  const GemmArguments& g = o.arguments;
  const GemmShape& s = g.shape;
  const int64_t idx = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (idx >= s.m * s.n) return;
  const int64_t m = idx / s.n, n = idx % s.n;
  double sum = 0;
  for (int64_t k = 0; k < s.k; ++k) {
    const double a = load(g.a, s.in_type, s.a_transposed ? k * g.lda + m : m * g.lda + k);
    const double b = load(g.b, s.in_type, s.b_transposed ? n * g.ldb + k : k * g.ldb + n);
    sum += a * b;
  }
  if (s.accumulate) sum += load(o.c_before, s.out_type, m * g.ldc + n);
  if (g.bias != nullptr) sum += load(g.bias, g.bias_type, n);
  out[idx] = sum;
}

struct Difference {
  double error_squared;
  double reference_squared;
  unsigned long long num_different;  // from the rounded reference, NaN included
  unsigned long long num_guard;      // bytes outside the output that changed
};

__global__ void compare(GemmArguments g, const double* expected, const uint8_t* before, const uint8_t* after,
                        int64_t num_bytes, int64_t c_begin, Difference* difference) {
  const int64_t idx = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const GemmShape& s = g.shape;
  const int bytes = s.out_type == GemmType::fp32 ? 4 : 2;
  double error_squared = 0, reference_squared = 0;
  if (idx < s.m * s.n) {
    const int64_t at = idx / s.n * g.ldc + idx % s.n;
    const double got = load(g.c, s.out_type, at);
    const double want = expected[idx];
    double rounded = static_cast<float>(want);
    if (s.out_type == GemmType::bf16) rounded = __bfloat162float(__float2bfloat16_rn(static_cast<float>(want)));
    if (s.out_type == GemmType::fp16) rounded = __half2float(__float2half_rn(static_cast<float>(want)));
    const double error = got - want;
    error_squared = error == error ? error * error : 1e30;
    reference_squared = want * want;
    if (!(got == rounded)) atomicAdd(&difference->num_different, 1ull);
  }
  for (int i = 16; i > 0; i /= 2) {
    error_squared += __shfl_xor_sync(~0u, error_squared, i);
    reference_squared += __shfl_xor_sync(~0u, reference_squared, i);
  }
  if (threadIdx.x % 32 == 0 && reference_squared + error_squared > 0) {
    atomicAdd(&difference->error_squared, error_squared);
    atomicAdd(&difference->reference_squared, reference_squared);
  }
  if (idx < num_bytes) {
    const int64_t offset = idx - c_begin;
    const bool inside = offset >= 0 && offset / (g.ldc * bytes) < s.m && offset % (g.ldc * bytes) < s.n * bytes;
    if (!inside && before[idx] != after[idx]) atomicAdd(&difference->num_guard, 1ull);
  }
}

__global__ void count_different(const uint8_t* x, const uint8_t* y, int64_t num_bytes,
                                unsigned long long* count) {
  const int64_t idx = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (idx < num_bytes && x[idx] != y[idx]) atomicAdd(count, 1ull);
}

// A matrix by which rows are rotated by a column.
__global__ void fill_rotation(__nv_bfloat16* b, int64_t n) {
  const int64_t idx = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (idx < n * n) b[idx] = __float2bfloat16_rn(idx % n == (idx / n + 1) % n ? 1.0f : 0.0f);
}
__global__ void count_not_rotated(const uint16_t* before, const uint16_t* after, int64_t m, int64_t n,
                                  int64_t by, unsigned long long* count) {
  const int64_t idx = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (idx < m * n && after[idx] != before[idx / n * n + (idx % n + n - by % n) % n]) atomicAdd(count, 1ull);
}

// At least one: an empty grid is an error.
unsigned blocks(int64_t n) { return static_cast<unsigned>(std::max<int64_t>((n + 255) / 256, 1)); }

struct Buffer {
  void* p = nullptr;
  size_t num_bytes;
  explicit Buffer(size_t bytes) : num_bytes(bytes + 256) {
    CHECK(cudaMalloc(&p, num_bytes));
    CHECK(cudaMemset(p, 0xFF, num_bytes));  // NaN in every type
  }
  ~Buffer() { cudaFree(p); }
  Buffer(const Buffer&) = delete;
};

int num_passed = 0, num_failed = 0;
int num_sms = 0;
mk::GemmClusterLimits limits;

std::string describe(const Case& test, const GemmPlan& plan, bool integers) {
  char text[256];
  const GemmShape& s = test.shape;
  std::snprintf(text, sizeof text,
                "m %lld n %lld k %lld %s->%s %s%s%s%s%s pad %d,%d,%d tile %dx%d%s split %d streamk %d "
                "workers %d",
                static_cast<long long>(s.m), static_cast<long long>(s.n), static_cast<long long>(s.k),
                type_name(s.in_type), type_name(s.out_type), s.a_transposed ? "A^T " : "",
                s.b_transposed ? "B[N,K] " : "B[K,N] ", test.shape.accumulate ? "acc " : "",
                test.bias ? "bias " : "", integers ? "exact" : "random", test.ld_pad, test.c_pad, test.c_offset,
                plan.block_m, plan.block_n, mk::gemm_plan_kind(plan).c_str(), plan.num_split_ctas,
                plan.num_streamk_tiles, plan.num_workers);
  return text;
}

void fail(const std::string& what, const std::string& why) {
  ++num_failed;
  if (num_failed <= 60) std::printf("FAILED %s: %s\n", what.c_str(), why.c_str());
}

int64_t round_up_8(int64_t x) { return (x + 7) / 8 * 8; }

void run_case(const Case& test, const std::vector<PlanChoice>& choices, bool integers, int num_runs,
              uint64_t seed) {
  const GemmShape& s = test.shape;
  const int out_bytes = type_bytes(s.out_type);
  const int64_t a_rows = s.a_transposed ? s.k : s.m, a_columns = s.a_transposed ? s.m : s.k;
  const int64_t b_rows = s.b_transposed ? s.n : s.k, b_columns = s.b_transposed ? s.k : s.n;
  GemmArguments g;
  g.shape = s;
  g.lda = round_up_8(a_columns) + test.ld_pad;
  g.ldb = round_up_8(b_columns) + test.ld_pad;
  g.ldc = s.n + test.c_pad;
  Buffer a(a_rows * g.lda * 2), b(b_rows * g.ldb * 2), bias(s.n * type_bytes(test.bias_type));
  const int64_t c_begin = 128 + test.c_offset * out_bytes;
  Buffer c(s.m * g.ldc * out_bytes + c_begin), before(c.num_bytes), first(c.num_bytes);
  Buffer expected(s.m * s.n * sizeof(double)), difference(sizeof(Difference));
  fill<<<blocks(a_rows * a_columns), 256>>>(a.p, s.in_type, a_rows, a_columns, g.lda, seed, integers);
  fill<<<blocks(b_rows * b_columns), 256>>>(b.p, s.in_type, b_rows, b_columns, g.ldb, seed + 1, integers);
  fill<<<blocks(s.n), 256>>>(bias.p, test.bias_type, 1, s.n, s.n, seed + 2, integers);
  if (test.shape.accumulate) {
    fill<<<blocks(s.m * s.n), 256>>>(static_cast<char*>(before.p) + c_begin, s.out_type, s.m, s.n, g.ldc,
                                     seed + 3, integers);
  }
  g.a = a.p;
  g.b = b.p;
  g.c = static_cast<char*>(c.p) + c_begin;
  g.bias = test.bias ? bias.p : nullptr;
  g.bias_type = test.bias_type;
  reference<<<blocks(s.m * s.n), 256>>>({g, static_cast<char*>(before.p) + c_begin},
                                        static_cast<double*>(expected.p));
  CHECK(cudaDeviceSynchronize());

  for (const PlanChoice& choice : choices) {
    const GemmPlan plan = choice(s);
    const bool in_clusters = plan.num_cluster_ctas() > 1 && !plan.is_ping_pong_pair();
    if (s.a_transposed && (in_clusters || plan.is_swapped)) continue;  // no such kernel
    const std::string name = describe(test, plan, integers);
    Buffer workspace(plan.workspace_bytes);
    CHECK(cudaMemset(workspace.p, 0, workspace.num_bytes));
    g.workspace = workspace.p;
    g.num_sms = num_sms;
    bool good = true;
    for (int run = 0; run < num_runs && good; ++run) {
      CHECK(cudaMemcpy(c.p, before.p, c.num_bytes, cudaMemcpyDeviceToDevice));
      CHECK(mk::gemm_launch(g, plan, nullptr));
      const cudaError_t error = cudaDeviceSynchronize();
      if (error != cudaSuccess) {
        std::printf("FAILED %s: %s\n", name.c_str(), cudaGetErrorString(error));
        std::exit(1);
      }
      char why[160] = "";
      CHECK(cudaMemset(difference.p, 0, sizeof(Difference)));
      Difference d;
      if (run > 0) {
        count_different<<<blocks(c.num_bytes), 256>>>(static_cast<uint8_t*>(c.p),
                                                      static_cast<uint8_t*>(first.p), c.num_bytes,
                                                      &static_cast<Difference*>(difference.p)->num_different);
        CHECK(cudaMemcpy(&d, difference.p, sizeof d, cudaMemcpyDeviceToHost));
        if (d.num_different != 0) std::snprintf(why, sizeof why, "bits differ in run %d", run);
      } else {
        compare<<<blocks(std::max<int64_t>(s.m * s.n, c.num_bytes)), 256>>>(
            g, static_cast<double*>(expected.p), static_cast<uint8_t*>(before.p), static_cast<uint8_t*>(c.p),
            c.num_bytes, c_begin, static_cast<Difference*>(difference.p));
        CHECK(cudaMemcpy(&d, difference.p, sizeof d, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(first.p, c.p, c.num_bytes, cudaMemcpyDeviceToDevice));
        const double tolerance = s.out_type == GemmType::bf16   ? 5e-3
                                 : s.out_type == GemmType::fp16 ? 1e-3
                                                                : 1e-4;
        const double relative = std::sqrt(d.error_squared / std::max(d.reference_squared, 1e-300));
        if (integers && d.num_different != 0) {
          std::snprintf(why, sizeof why, "%llu elements differ", d.num_different);
        } else if (!integers && !(relative <= tolerance)) {
          std::snprintf(why, sizeof why, "error %.3g > %.1g", relative, tolerance);
        } else if (d.num_guard != 0) {
          std::snprintf(why, sizeof why, "%llu guard bytes changed", d.num_guard);
        }
      }
      if (why[0] != '\0') {
        good = false;
        fail(name, why);
      }
    }
    if (good) ++num_passed;
  }
}

PlanChoice chosen_plan() {
  return [](const GemmShape& s) { return mk::gemm_plan(s, num_sms, limits); };
}
PlanChoice plan_with(GemmTile tile, int num_streamk_tiles, int most_ctas = num_sms) {
  return [=](const GemmShape& s) { return mk::gemm_plan_with(s, most_ctas, tile, num_streamk_tiles); };
}
// Among up to so many clusters of a tile that walks.
PlanChoice swapped_plan_with(mk::GemmSwappedTile tile, int num_streamk_tiles, int most_ctas = num_sms) {
  const int num_ctas = tile.cluster.m * tile.cluster.n;
  const int at_a_time = num_ctas > 1 ? limits.at_a_time[num_ctas] : num_sms;
  const int most_clusters = std::min(at_a_time, std::max(1, most_ctas / num_ctas));
  return
      [=](const GemmShape& s) { return mk::gemm_swapped_plan_with(s, most_clusters, tile, num_streamk_tiles); };
}

// With clusters.
std::vector<PlanChoice> cluster_plans() {
  std::vector<PlanChoice> plans;
  for (const GemmTile& tile : mk::GEMM_SPLIT_TILES) {
    for (const int num_ctas : {2, 3, 4})
      plans.push_back([=](const GemmShape& s) { return mk::gemm_split_plan_with(s, tile, num_ctas); });
  }
  for (const GemmTile& tile : mk::GEMM_PAIR_TILES) {
    for (const int num_ctas : {1, 2}) {
      if (num_ctas > 1 && tile.block_n % mk::SPLIT_CHUNK_COLUMNS != 0) continue;
      plans.push_back([=](const GemmShape& s) { return mk::gemm_pair_plan_with(s, tile, num_ctas); });
    }
  }
  for (const mk::GemmSwappedTile& tile : mk::GEMM_SWAPPED_TILES) {
    for (const int num_ctas : {1, 2, 3, 4}) {
      if (mk::gemm_swapped_tile_can_have(tile, num_ctas))
        plans.push_back(
            [=](const GemmShape& s) { return mk::gemm_swapped_cluster_plan_with(s, tile, num_ctas); });
    }
  }
  return plans;
}

std::vector<PlanChoice> all_plans() {
  constexpr int ALL = 1 << 30;
  std::vector<PlanChoice> plans = {chosen_plan()};
  for (const int num_streamk_tiles : {-1, 1, ALL}) {
    for (const GemmTile& tile : mk::GEMM_TILES) plans.push_back(plan_with(tile, num_streamk_tiles));
    for (const mk::GemmSwappedTile& tile : mk::GEMM_SWAPPED_TILES) {
      if (mk::gemm_swapped_tile_walks(tile)) plans.push_back(swapped_plan_with(tile, num_streamk_tiles));
    }
  }
  const std::vector<PlanChoice> more = cluster_plans();
  plans.insert(plans.end(), more.begin(), more.end());
  return plans;
}

void test_layouts_and_types(const std::vector<PlanChoice>& plans) {
  uint64_t seed = 1;
  for (int layout = 0; layout < 3; ++layout) {
    for (const GemmType in : {GemmType::bf16, GemmType::fp16}) {
      for (const GemmType out : {GemmType::bf16, GemmType::fp16, GemmType::fp32}) {
        for (int extras = 0; extras < 4; ++extras) {
          Case test;
          test.shape = {333, 520, 712, in, out, layout == 2, layout == 1};
          test.shape.accumulate = extras & 1;
          test.bias = extras & 2;
          test.bias_type = extras == 3 ? in : GemmType::fp32;
          run_case(test, plans, true, 1, seed += 10);
          run_case(test, {plans[0]}, false, 2, seed += 10);
        }
      }
    }
  }
}

void test_sizes(const std::vector<PlanChoice>& plans) {
  const int64_t sizes[][3] = {{1, 8, 8},       {16, 8192, 256},    {17, 1300, 1300}, {64, 64, 64},
                              {65, 129, 65},   {127, 255, 72},     {128, 256, 0},    {129, 257, 1},
                              {200, 1, 300},   {1, 1, 1},          {256, 1024, 8},   {512, 512, 512},
                              {1000, 1000, 7}, {1024, 2560, 1024}, {77, 4099, 2051}, {2049, 333, 129}};
  uint64_t seed = 10000;
  for (const auto& size : sizes) {
    for (int layout = 0; layout < 3; ++layout) {
      Case test;
      test.shape = {
          size[0],     size[1],    size[2], GemmType::bf16, layout == 1 ? GemmType::fp32 : GemmType::bf16,
          layout == 2, layout == 1};
      // Rows of C that TMA can store (or cannot, with an odd n), tight or padded.
      test.c_pad = layout == 0 ? static_cast<int>(round_up_8(size[1]) - size[1]) : layout * 8;
      test.bias = layout == 1;
      test.shape.accumulate = layout == 2;
      run_case(test, plans, true, 1, seed += 10);
      if (layout == 1) {
        test.shape.accumulate = true;
        run_case(test, plans, true, 1, seed += 10);
      }
      test.shape.in_type = GemmType::fp16;
      test.ld_pad = 0;
      test.c_offset = 1;
      run_case(test, {plans[0]}, true, 1, seed += 10);
      if (size[2] > 0) run_case(test, {plans[0]}, false, 1, seed += 10);
    }
  }
}

// A CTA's rows of one tile are stored beside the products of its next, where those are long enough, whole ones
// and such as end in the middle of a tile in turn.
void test_many_tiles_a_cta() {
  std::vector<PlanChoice> plans;
  for (const GemmTile& tile : mk::GEMM_TILES) {
    for (const int num_streamk_tiles : {-1, 5})
      plans.push_back(plan_with(tile, num_streamk_tiles, 2 * tile.cluster.m * tile.cluster.n));
  }
  for (const mk::GemmSwappedTile& tile : mk::GEMM_SWAPPED_TILES) {
    if (!mk::gemm_swapped_tile_walks(tile)) continue;
    for (const int num_streamk_tiles : {-1, 5})
      plans.push_back(swapped_plan_with(tile, num_streamk_tiles, 2 * tile.cluster.m * tile.cluster.n));
  }
  uint64_t seed = 20000;
  for (const int64_t k : {64, 300, 384, 448, 512, 576, 640, 1000}) {
    for (const GemmType out : {GemmType::bf16, GemmType::fp16, GemmType::fp32}) {
      for (int layout = 0; layout < 3; ++layout) {
        for (const int64_t n : {1300, 1304}) {  // of the latter rows are whole chunks of 16 bytes
          Case test;
          test.shape = {600, n, k, GemmType::bf16, out, layout == 2, layout == 1};
          test.c_pad = n == 1300 ? 12 : 16;
          test.shape.accumulate = n == 1304 && layout == 1;
          run_case(test, plans, true, 1, seed += 10);
        }
      }
    }
  }
}

void expect(bool condition, const char* what) {
  if (condition) {
    ++num_passed;
  } else {
    fail(what, "not so");
  }
}

// As chosen: each tile cut among as many CTAs or clusters, with partial tiles through memory.
void test_cut_evenly() {
  struct Product {
    int64_t m, n, k;
    bool a_transposed, b_transposed;
  };
  std::vector<Product> products = {
      {64, 64, 8192, true, false},    {64, 64, 2048, true, false},    {512, 504, 2056, true, false},
      {64, 4096, 8192, true, false},  {4096, 16, 8192, true, false},  {256, 1024, 8200, true, false},
      {640, 640, 8192, true, false},  {504, 1000, 8200, true, false}, {1000, 1000, 4096, true, false},
      {384, 1536, 8192, true, false}, {768, 1536, 4104, true, false}};
  for (const bool b_transposed : {false, true}) {
    products.push_back({136, 2048, 4096, false, b_transposed});
    products.push_back({200, 1000, 8192, false, b_transposed});
    products.push_back({128, 1000, 8200, false, b_transposed});
    products.push_back({257, 1000, 14344, false, b_transposed});
    products.push_back({512, 2048, 14336, false, b_transposed});
  }
  uint64_t seed = 30000;
  for (const auto& [m, n, k, a_transposed, b_transposed] : products) {
    for (const GemmType out : {GemmType::bf16, GemmType::fp32}) {
      Case test;
      test.shape = {m, n, k, b_transposed ? GemmType::fp16 : GemmType::bf16, out, a_transposed, b_transposed};
      test.bias = out == GemmType::fp32;
      test.shape.accumulate = test.bias;
      const GemmPlan plan = chosen_plan()(test.shape);
      expect(plan.num_streamk_tiles == mk::gemm_plan_num_tiles(test.shape, plan) &&
                 plan.num_workers % plan.num_streamk_tiles == 0,
             "few tiles of many k-steps are cut evenly");
      run_case(test, {chosen_plan()}, true, 50, seed += 10);
      run_case(test, {chosen_plan()}, false, 50, seed += 10);
    }
  }
}

void test_same_bits(const std::vector<PlanChoice>& plans) {
  Case test;
  test.shape = {300, 2560, 4096, GemmType::bf16, GemmType::fp32, false, false};
  run_case(test, plans, false, 30, 77);
  test.shape = {4096, 4096, 1024, GemmType::bf16, GemmType::bf16, false, true};
  run_case(test, {plans[0]}, false, 200, 78);
  test.shape = {48, 2560, 8192, GemmType::fp16, GemmType::fp16, false, true};
  run_case(test, {plans[0]}, false, 200, 79);
}

void test_arguments_and_graph() {
  GemmArguments g;
  g.shape = {128, 256, 128};
  Buffer a(128 * 128 * 2), b(128 * 256 * 2), c(128 * 256 * 2);
  CHECK(cudaMemset(a.p, 0, a.num_bytes));
  CHECK(cudaMemset(b.p, 0, b.num_bytes));
  g.a = a.p;
  g.b = b.p;
  g.c = c.p;
  g.lda = 128;
  g.ldb = 256;
  g.ldc = 256;
  const GemmPlan plan = mk::gemm_plan_with(g.shape, num_sms, mk::GEMM_TILES[0], -1);
  GemmArguments bad = g;
  bad.lda = 132;
  expect(mk::gemm_launch(bad, plan, nullptr) == cudaErrorInvalidValue, "lda not a multiple of 8 is refused");
  bad = g;
  bad.a = static_cast<char*>(a.p) + 2;
  expect(mk::gemm_launch(bad, plan, nullptr) == cudaErrorInvalidValue, "a misaligned A is refused");
  bad = g;
  bad.shape.m = 0;
  expect(mk::gemm_launch(bad, mk::gemm_plan(bad.shape, num_sms, limits), nullptr) == cudaSuccess,
         "m = 0 succeeds");

  cudaStream_t stream;
  cudaGraph_t graph;
  size_t num_nodes = 0;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  CHECK(mk::gemm_launch(g, plan, stream));
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphGetNodes(graph, nullptr, &num_nodes));
  cudaGraphNode_t node;
  cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
  num_nodes = num_nodes == 1 ? 1 : 0;
  if (num_nodes == 1) {
    CHECK(cudaGraphGetNodes(graph, &node, &num_nodes));
    CHECK(cudaGraphNodeGetType(node, &type));
  }
  expect(num_nodes == 1 && type == cudaGraphNodeTypeKernel, "a captured product is one kernel node");
  cudaGraphExec_t instance;
  CHECK(cudaGraphInstantiate(&instance, graph, 0));
  CHECK(cudaGraphLaunch(instance, stream));
  CHECK(cudaStreamSynchronize(stream));
  uint16_t last = 1;
  CHECK(cudaMemcpy(&last, static_cast<char*>(c.p) + (128 * 256 - 1) * 2, 2, cudaMemcpyDeviceToHost));
  expect(last == 0, "a replay computes");
  cudaGraphExecDestroy(instance);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// Each product reads what the one before has written, and writes what that one has read, while its CTAs may
// already be there: with all plans in turn, in a stream and in a graph.
void test_chain(const std::vector<PlanChoice>& plans, int64_t m, int64_t n, int num_sms_given) {
  constexpr int NUM_ROUNDS = 20;
  const int num_products = 2 * static_cast<int>(plans.size());
  GemmArguments g;
  g.shape = {m, n, n};
  g.lda = g.ldb = g.ldc = n;
  Buffer first(m * n * 2), a(m * n * 2), c(m * n * 2), b(n * n * 2),
      workspace(mk::gemm_max_workspace_bytes(num_sms));
  Buffer difference(sizeof(Difference));
  CHECK(cudaMemset(workspace.p, 0, workspace.num_bytes));
  fill<<<blocks(m * n), 256>>>(first.p, GemmType::bf16, m, n, n, 91, true);
  fill_rotation<<<blocks(n * n), 256>>>(static_cast<__nv_bfloat16*>(b.p), n);
  CHECK(cudaMemcpy(a.p, first.p, m * n * 2, cudaMemcpyDeviceToDevice));
  CHECK(cudaMemset(difference.p, 0, sizeof(Difference)));
  g.b = b.p;
  g.workspace = workspace.p;
  g.num_sms = num_sms_given;
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  const auto enqueue = [&] {
    for (int i = 0; i < num_products; ++i) {
      g.a = i % 2 == 0 ? a.p : c.p;
      g.c = i % 2 == 0 ? c.p : a.p;
      CHECK(mk::gemm_launch(g, plans[i % plans.size()](g.shape), stream));
    }
  };
  int64_t rotated = 0;
  const auto check_all = [&](const char* what) {
    auto* count = &static_cast<Difference*>(difference.p)->num_different;
    count_not_rotated<<<blocks(m * n), 256, 0, stream>>>(static_cast<uint16_t*>(first.p),
                                                         static_cast<uint16_t*>(a.p), m, n, rotated, count);
    CHECK(cudaStreamSynchronize(stream));
    Difference d;
    CHECK(cudaMemcpy(&d, difference.p, sizeof d, cudaMemcpyDeviceToHost));
    expect(d.num_different == 0, what);
  };
  for (int round = 0; round < NUM_ROUNDS; ++round) {
    enqueue();
    rotated += num_products;
    check_all("a product reads what the one before it in the stream has written");
  }
  cudaGraph_t graph;
  cudaGraphExec_t instance;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  enqueue();
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&instance, graph, 0));
  for (int round = 0; round < NUM_ROUNDS; ++round) {
    CHECK(cudaGraphLaunch(instance, stream));
    rotated += num_products;
    check_all("a product reads what the one before it in the graph has written");
  }
  cudaGraphExecDestroy(instance);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace

int main() {
  int num_devices = 0;
  if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) {
    std::printf("no GPU: skipped\n");
    return 77;
  }
  CHECK(mk::gemm_prepare());
  CHECK(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0));
  CHECK(mk::gemm_cluster_limits(&limits));
  const std::vector<PlanChoice> plans = all_plans();
  test_arguments_and_graph();
  test_chain(plans, 520, 512, 1);         // each lets the next one come early
  test_chain(plans, 200, 2048, num_sms);  // some do
  test_sizes(plans);
  test_layouts_and_types(plans);
  test_many_tiles_a_cta();
  test_cut_evenly();
  test_same_bits(plans);
  std::printf("%d passed, %d failed\n", num_passed, num_failed);
  return num_failed == 0 ? 0 : 1;
}
