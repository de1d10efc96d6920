// SPDX-License-Identifier: MIT
// Reads chunk flags without acquire: the thread sanitizer must report a race (expect_race.sh). --acquire reads
// them as the library does.
#include <cstdio>
#include <cstring>

#include "gemm_launch.h"
#include "kernels/host/hooks.h"

using namespace mk::test;

int main(int argc, char** argv) {
  mk::HostHooks hooks;
  hooks.relaxed_flags = !(argc > 1 && std::strcmp(argv[1], "--acquire") == 0);
  mk::host_hooks = &hooks;
  RankJob job;
  job.node_of_rank = {0, 0, 0};
  // Many small chunks: a flag is then often seen long after the doorbell, which would order the reads as well.
  GemmCase gemm;
  gemm.m = 90;
  gemm.n = gemm.k = 48;
  gemm.tuning.tile_m = 1;
  gemm.tuning.chunk_bytes = 1;
  const GemmProblem problem(gemm, job.nranks());
  const auto failures = run_rank_threads(job, [&](RankSession& session) {
    for (int launch = 0; launch < 20; ++launch) {
      if (!run_launch(session, problem, nullptr, launch == 0)) return;
    }
  });
  mk::host_hooks = nullptr;
  std::printf("%s%zu failures\n", join_lines(failures).c_str(), failures.size());
  return failures.empty() ? 0 : 1;
}
