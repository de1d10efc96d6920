// SPDX-License-Identifier: MIT
// A long run that mixes what a program may do: operators, shapes, features and node layouts, communicators made
// and ended, several of them alive at once, ranks that die, stop or abort. Every launch is checked, every
// survivor's error too.
//   soak {--launches N | --seconds T} [--seed S] [--ranks W] [--nodes N]
// Each turn is one of
//   a job      ranks as processes, up to a hundred launches
//   a crowd    several communicators at once in one process, ranks as threads
//   a fault    see fault_campaign.cc
// and a line a minute says how far it is. Ranks and nodes that are not given vary from turn to turn.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "test/multi_rank/fault_operators.h"
#include "test/multi_rank/fault_pool.h"
#include "test/ops/gemm_cases.h"
#include "test/ops/gemm_launch.h"

using namespace mk::test;

namespace {

constexpr uint64_t kLaunchesPerJob = 100;
constexpr uint64_t kLaunchesPerCrowdMember = 15;
constexpr unsigned kJobLimitS = 600;

struct Options {
  uint64_t launches = 0;
  uint64_t seconds = 0;
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
    } else if (std::strcmp(argv[at], "--seconds") == 0) {
      options.seconds = value;
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
  if (options.launches == 0 && options.seconds == 0) return false;
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

// Launches of any operator, waited for one by one. False: a call failed.
bool run_any(RankSession& session, std::mt19937_64& random, uint64_t count) {
  const auto& operators = fault_operators();
  for (uint64_t launch = 0; launch < count; ++launch) {
    const FaultOperator& op = operators[random() % operators.size()];
    const auto call = op.make(session.nranks(), session.rank(), random());
    const mk_status_t launched = call->launch(session.comm());
    // The call reads its operands until it has ended, also one that failed half-way.
    const mk_status_t ended = mk_comm_synchronize(session.comm(), nullptr);
    if (!session.ok(launched, op.name) || !session.ok(ended, op.name)) return false;
    if (const std::string wrong = call->wrong(); !wrong.empty())
      session.fail(std::string(op.name) + ": " + wrong);
  }
  return true;
}

// A batch of GEMM launches that are under way together.
bool run_gemms(RankSession& session, RankMemory& memory, std::mt19937_64& random, uint64_t seed, uint64_t first,
               uint64_t count) {
  std::deque<GemmProblem> problems;
  std::deque<GemmLaunch> launches;
  for (uint64_t slot = 0; slot < count; ++slot) {
    problems.emplace_back(mixed_case(seed, first + slot, session.nranks()), session.nranks());
    launches.emplace_back(session, problems.back(), &memory, static_cast<int>(slot));
  }
  const bool prepare = random() % 8 == 0;
  bool enqueued = true;
  for (GemmLaunch& launch : launches) {
    enqueued = enqueued && (!prepare || launch.prepare()) && launch.enqueue();
  }
  const bool ended = session.ok(mk_comm_synchronize(session.comm(), nullptr), "mk_comm_synchronize");
  if (!enqueued || !ended) return false;
  for (GemmLaunch& launch : launches) launch.verify();
  return true;
}

// `count` launches of one rank.
void run_batches(RankSession& session, uint64_t seed, uint64_t count) {
  RankMemory memory;
  if (!memory.allocate(session, kSlotBytes)) return;
  std::mt19937_64 random(seed);  // the same on every rank
  for (uint64_t first = 0; first < count;) {
    const uint64_t batch = std::min<uint64_t>(count - first, 1 + random() % RankMemory::kSlots);
    const bool gemms = random() % 2 == 0;
    if (!(gemms ? run_gemms(session, memory, random, seed, first, batch) : run_any(session, random, batch)))
      return;
    first += batch;
  }
  memory.release(session);
}

// Several jobs at once in a process of their own, each of ranks as threads.
std::vector<std::string> run_crowd(const std::vector<RankJob>& jobs, uint64_t seed) {
  RankJob one;
  one.node_of_rank = {0};
  return run_rank_processes(one, kJobLimitS, [&](RankSession& session) {
    std::vector<std::vector<std::string>> failures(jobs.size());
    std::vector<std::thread> threads;
    for (size_t at = 0; at < jobs.size(); ++at) {
      threads.emplace_back([&, at] {
        failures[at] = run_rank_threads(
            jobs[at], [&](RankSession& member) { run_batches(member, seed + at, kLaunchesPerCrowdMember); });
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& list : failures) {
      for (const std::string& failure : list) session.fail("in a crowd: " + failure);
    }
  });
}

class Soak {
 public:
  explicit Soak(const Options& options) : options_(options), random_(options.seed) {}

  int run() {
    while (!done()) {
      const uint64_t turn = random_();
      const uint64_t seed = random_();
      if (turn % 8 == 0) {
        fault(seed);
      } else if (turn % 8 == 1) {
        crowd(seed);
      } else {
        job(seed);
      }
      look_at_clock();
    }
    report();
    std::printf("%llu passed, %llu failed\n", number(launches_ + faults_ - failed_), number(failed_));
    return failed_ == 0 ? 0 : 1;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static unsigned long long number(uint64_t value) { return value; }
  uint64_t seconds() const {
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - start_).count());
  }
  bool done() const {
    return (options_.launches > 0 && launches_ >= options_.launches) ||
           (options_.seconds > 0 && seconds() >= options_.seconds);
  }

  void job(uint64_t seed) {
    const RankJob job = random_job(options_, random_);
    const uint64_t left = options_.launches > 0 ? options_.launches - launches_ : kLaunchesPerJob;
    const uint64_t count = std::min(kLaunchesPerJob, left);
    note("job", seed, count,
         run_rank_processes(job, kJobLimitS, [&](RankSession& session) { run_batches(session, seed, count); }));
  }
  void crowd(uint64_t seed) {
    std::vector<RankJob> jobs;
    for (uint64_t member = 2 + random_() % 3; member > 0; --member)
      jobs.push_back(random_job(options_, random_));
    note("crowd", seed, jobs.size() * kLaunchesPerCrowdMember, run_crowd(jobs, seed));
    ++crowds_;
  }
  void fault(uint64_t seed) {
    const Fault fault = make_fault(seed, faults_++);
    const FaultResult result = pool_.run(fault);
    for (const std::string& complaint : result.complaints)
      std::printf("fault (%s): %s\n", fault.text().c_str(), complaint.c_str());
    failed_ += result.complaints.empty() ? 0 : 1;
  }
  // A turn that ended early counts as one failure for each complaint, and its other launches as run.
  void note(const char* kind, uint64_t seed, uint64_t count, const std::vector<std::string>& failures) {
    for (const std::string& failure : failures)
      std::printf("%s, seed %llu: %s\n", kind, number(seed), failure.c_str());
    launches_ += count;
    failed_ += std::min<uint64_t>(failures.size(), count);
    ++jobs_;
  }

  void look_at_clock() {
    if (Clock::now() - reported_ < std::chrono::minutes(1)) return;
    reported_ = Clock::now();
    report();
  }
  void report() const {
    std::printf("%llu s: %llu launches in %llu jobs (%llu crowds), %llu faults, %llu failed\n",
                number(seconds()), number(launches_), number(jobs_), number(crowds_), number(faults_),
                number(failed_));
  }

  const Options options_;
  std::mt19937_64 random_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point reported_ = start_;
  FaultPool pool_;
  uint64_t launches_ = 0, jobs_ = 0, crowds_ = 0, faults_ = 0, failed_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) {
    std::fprintf(stderr, "usage: soak {--launches N | --seconds T} [--seed S] [--ranks W] [--nodes N]\n");
    return 2;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  return Soak(options).run();
}
