// SPDX-License-Identifier: MIT
// What gemm_plan() chooses, held against the times that every plan of a product took on a GPU: output of
// gemm_bench --sweep, kept in docs/results. Whoever changes the model sees here, without a GPU, what it costs.
// A chip grows hot meanwhile, so that a plan's time counts as a part of cublasLt's beside it.
//   gemm_plan_sweeps_test FILE ALLOWED [FILE ALLOWED ...]
// ALLOWED: how many times as long as the fastest plans the chosen ones may take in the mean, back to back.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "kernels/gemm/gemm_plan.h"

namespace {

using namespace mk;

constexpr int NUM_SMS = 132;
constexpr GemmClusterLimits LIMITS = {{0, 0, 66, 39, 30}};
// A plan that was not built when the sweep was made has no time in it.
constexpr double LEAST_PART_FOUND = 0.5;

struct TimedPlan {
  int block_m = 0;
  int block_n = 0;
  std::string kind;  // gemm_plan_kind()
  int num_split_ctas = 0;
  int num_streamk_tiles = 0;
  int num_workers = 0;
  int group_m = 0;
  double us = 0;
  double part = 0;  // of cublasLt's time beside it

  bool is_of(const GemmPlan& plan) const {
    return block_m == plan.block_m && block_n == plan.block_n && kind == gemm_plan_kind(plan) &&
           num_split_ctas == plan.num_split_ctas && num_streamk_tiles == plan.num_streamk_tiles &&
           num_workers == plan.num_workers && group_m == plan.group_m;
  }
};

struct Sweep {
  GemmShape shape;
  std::vector<TimedPlan> plans;
};

bool read_shape(const std::string& line, GemmShape* shape) {
  long m = 0, n = 0, k = 0;
  char kind[16] = {};  // Problem::kind() of gemm_bench
  if (std::sscanf(line.c_str(), "%ld %ld %ld %15[^: ]", &m, &n, &k, kind) != 4) return false;
  const std::string text = kind;
  *shape = {};
  shape->m = m, shape->n = n, shape->k = k;
  shape->a_transposed = text.starts_with("TN");
  shape->b_transposed = text.starts_with("NK");
  shape->out_type = text.ends_with("fp32") ? GemmType::fp32 : GemmType::bf16;
  shape->accumulate = text.find('+') != std::string::npos;
  return true;
}

bool read_plan(const std::string& line, TimedPlan* plan) {
  int kind_begin = 0;
  if (std::sscanf(line.c_str(), " %dx%d%n", &plan->block_m, &plan->block_n, &kind_begin) != 2) return false;
  const size_t kind_end = line.find(' ', static_cast<size_t>(kind_begin));
  if (kind_end == std::string::npos) return false;
  plan->kind = line.substr(static_cast<size_t>(kind_begin), kind_end - static_cast<size_t>(kind_begin));
  double cublas_us = 0;
  if (std::sscanf(line.c_str() + kind_end, " s%d sk%d w%d g%d : isolated %*f back to back %lf cublas %lf",
                  &plan->num_split_ctas, &plan->num_streamk_tiles, &plan->num_workers, &plan->group_m,
                  &plan->us, &cublas_us) != 6) {
    return false;
  }
  plan->part = plan->us / cublas_us;
  return true;
}

std::vector<Sweep> read_sweeps(const char* path) {
  std::vector<Sweep> sweeps;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    GemmShape shape;
    TimedPlan plan;
    if (read_plan(line, &plan)) {
      if (!sweeps.empty()) sweeps.back().plans.push_back(plan);
    } else if (!line.starts_with(' ') && read_shape(line, &shape)) {
      sweeps.push_back({shape, {}});
    }
  }
  return sweeps;
}

// Answers whether the mean is within `allowed`.
bool check(const char* path, double allowed) {
  const std::vector<Sweep> sweeps = read_sweeps(path);
  int found = 0;
  double sum = 0;
  for (const Sweep& sweep : sweeps) {
    const GemmPlan chosen = gemm_plan(sweep.shape, NUM_SMS, LIMITS);
    TimedPlan best, of_chosen;
    for (const TimedPlan& plan : sweep.plans) {
      if (best.us == 0 || plan.part < best.part) best = plan;
      if (plan.is_of(chosen)) of_chosen = plan;
    }
    std::printf("%5ld %5ld %5ld %s  %3dx%-3d%-5s s%d sk%-3d  ", static_cast<long>(sweep.shape.m),
                static_cast<long>(sweep.shape.n), static_cast<long>(sweep.shape.k),
                sweep.shape.a_transposed   ? "TN"
                : sweep.shape.b_transposed ? "NK"
                                           : "KN",
                chosen.block_m, chosen.block_n, gemm_plan_kind(chosen).c_str(), chosen.num_split_ctas,
                chosen.num_streamk_tiles);
    if (of_chosen.us == 0) {
      std::printf("no time, best %.1f us\n", best.us);
      continue;
    }
    std::printf("%.1f us, best %.1f: %.3f\n", of_chosen.us, best.us, of_chosen.part / best.part);
    ++found;
    sum += of_chosen.part / best.part;
  }
  const bool enough = found > 0 && found >= LEAST_PART_FOUND * static_cast<double>(sweeps.size());
  const double mean = enough ? sum / found : 0;
  std::printf("%s: %d of %zu chosen plans have a time; %.4f of the fastest in the mean, allowed %.4f\n", path,
              found, sweeps.size(), mean, allowed);
  return enough && mean <= allowed;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc % 2 == 0) {
    std::fprintf(stderr, "usage: gemm_plan_sweeps_test FILE ALLOWED [FILE ALLOWED ...]\n");
    return 2;
  }
  int failed = 0;
  for (int i = 1; i < argc; i += 2) {
    if (!check(argv[i], std::atof(argv[i + 1]))) ++failed;
  }
  std::printf("%d passed, %d failed\n", argc / 2 - failed, failed);
  return failed == 0 ? 0 : 1;
}
