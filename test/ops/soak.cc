// SPDX-License-Identifier: MIT
// A long run of launches between processes: operators, shapes, features and node layouts mixed, each launch
// checked to the last bit.
//   soak --launches N --seed S [--ranks W] [--nodes N]
// Jobs of a hundred launches follow one another, so that communicators are made and ended too. Ranks and
// nodes that are not given vary from job to job.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "gemm_cases.h"
#include "gemm_launch.h"

using namespace mk::test;

namespace {

constexpr uint64_t kLaunchesPerJob = 100;

struct Options {
  uint64_t launches = 1000;
  uint64_t seed = 1;
  int ranks = 0;
  int nodes = 0;
};

bool parse(int argc, char** argv, Options& options) {
  for (int at = 1; at < argc; at += 2) {
    char* end = nullptr;
    const uint64_t value = at + 1 < argc ? std::strtoull(argv[at + 1], &end, 10) : 0;
    if (end == nullptr || end == argv[at + 1] || *end != 0) return false;
    if (std::strcmp(argv[at], "--launches") == 0) {
      options.launches = value;
    } else if (std::strcmp(argv[at], "--seed") == 0) {
      options.seed = value;
    } else if (std::strcmp(argv[at], "--ranks") == 0 && value >= 1 && value <= 64) {
      options.ranks = static_cast<int>(value);
    } else if (std::strcmp(argv[at], "--nodes") == 0 && value >= 1 && value <= 64) {
      options.nodes = static_cast<int>(value);
    } else {
      return false;
    }
  }
  return options.ranks == 0 || options.nodes <= options.ranks;
}

RankJob random_job(const Options& options, std::mt19937_64& random) {
  const int ranks =
      options.ranks > 0 ? options.ranks : std::max(options.nodes, static_cast<int>(1 + random() % 6));
  const int most_nodes = std::min(ranks, 4);
  const int nodes =
      options.nodes > 0 ? options.nodes : static_cast<int>(1 + random() % static_cast<uint64_t>(most_nodes));
  RankJob job;
  job.host_threads = static_cast<int>(1 + random() % 2);
  for (int rank = 0; rank < ranks; ++rank) {
    // The first ranks make sure that no node is empty.
    job.node_of_rank.push_back(rank < nodes ? rank
                                            : static_cast<int32_t>(random() % static_cast<uint64_t>(nodes)));
  }
  return job;
}

// `count` launches of one rank, in batches that are under way together.
void run_batches(RankSession& session, uint64_t seed, uint64_t count) {
  RankMemory memory;
  if (!memory.allocate(session, kSlotBytes)) return;
  std::mt19937_64 random(seed);  // the same on every rank
  for (uint64_t first = 0; first < count;) {
    const uint64_t batch = std::min<uint64_t>(count - first, 1 + random() % RankMemory::kSlots);
    std::deque<GemmProblem> problems;
    std::deque<GemmLaunch> launches;
    for (uint64_t slot = 0; slot < batch; ++slot) {
      problems.emplace_back(mixed_case(seed, first + slot, session.nranks()), session.nranks());
      launches.emplace_back(session, problems.back(), &memory, static_cast<int>(slot));
    }
    const bool prepare = random() % 8 == 0;
    for (GemmLaunch& launch : launches) {
      if ((prepare && !launch.prepare()) || !launch.enqueue()) return;
    }
    if (!session.ok(mk_comm_synchronize(session.comm(), nullptr), "mk_comm_synchronize")) return;
    for (GemmLaunch& launch : launches) launch.verify();
    first += batch;
  }
  memory.release(session);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) {
    std::fprintf(stderr, "usage: soak --launches N --seed S [--ranks W] [--nodes N]\n");
    return 2;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::mt19937_64 random(options.seed);
  const auto start = std::chrono::steady_clock::now();
  auto reported = start;
  uint64_t done = 0, passed = 0, failed = 0;
  while (done < options.launches) {
    const RankJob job = random_job(options, random);
    const uint64_t seed = random();
    const uint64_t count = std::min(kLaunchesPerJob, options.launches - done);
    const auto failures =
        run_rank_processes(job, 600, [&](RankSession& session) { run_batches(session, seed, count); });
    for (const std::string& failure : failures)
      std::printf("job seed %llu: %s\n", static_cast<unsigned long long>(seed), failure.c_str());
    // A job that ended early counts as one failure for each complaint, and its other launches as run.
    const uint64_t bad = std::min<uint64_t>(failures.size(), count);
    done += count;
    failed += bad;
    passed += count - bad;
    const auto now = std::chrono::steady_clock::now();
    if (now - reported >= std::chrono::minutes(1)) {
      reported = now;
      std::printf(
          "%llu of %llu launches, %llu failed, %lld s\n", static_cast<unsigned long long>(done),
          static_cast<unsigned long long>(options.launches), static_cast<unsigned long long>(failed),
          static_cast<long long>(std::chrono::duration_cast<std::chrono::seconds>(now - start).count()));
    }
  }
  std::printf("%llu passed, %llu failed\n", static_cast<unsigned long long>(passed),
              static_cast<unsigned long long>(failed));
  return failed == 0 ? 0 : 1;
}
