// SPDX-License-Identifier: MIT
// Ranks as processes, one of which is killed or stopped in the middle of things: every survivor is told who, in
// time, and nothing stays behind.
#include <random>
#include <set>

#include "test/multi_rank/exact_call.h"
#include "test/multi_rank/process_job.h"
#include "test/multi_rank/thread_job.h"
#include "test/support/catch.h"

using namespace mk::test;

namespace {

struct Scene {
  int nranks;
  int num_nodes;
  bool collectives;  // host-collective calls among the operators
  int64_t peer_timeout_ms;
  uint64_t seed;
};

// Work without end: operators in a random order that is the same on all ranks, some behind one another.
mk_status_t work(mk_comm_t comm, const RankProcess& self, const Scene& scene, std::string& wrong) {
  std::mt19937_64 random(scene.seed);
  for (uint64_t turn = 0;; ++turn) {
    std::vector<ExactCall> calls;
    const auto depth = 1 + random() % 3;
    for (uint64_t i = 0; i < depth; ++i) {
      const auto op = static_cast<mk_operator_t>(1 + random() % 3);
      calls.emplace_back(op, scene.nranks, self.rank(), random(), static_cast<int64_t>(1 + random() % 200), 16,
                         32);
    }
    mk_status_t status = MK_SUCCESS;
    for (ExactCall& call : calls) {
      if (status == MK_SUCCESS) status = call.launch(comm);
    }
    // The calls read their operands until they have ended.
    const mk_status_t ended = mk_comm_synchronize(comm, nullptr);
    if (status == MK_SUCCESS) status = ended;
    if (status != MK_SUCCESS) return status;
    for (const ExactCall& call : calls) {
      if (wrong.empty()) wrong = call.wrong();
    }
    if (!wrong.empty()) return MK_SUCCESS;
    void* memory = nullptr;
    if (scene.collectives) status = mk_mem_alloc(comm, 1 + random() % (3 << 20), &memory);
    if (scene.collectives && status == MK_SUCCESS && random() % 2 == 0) status = mk_mem_free(comm, memory);
    if (status != MK_SUCCESS) return status;
    Report ready;
    ready.kind = Report::kReady;
    if (turn == 1) self.tell(ready);
  }
}

void be_rank(RankProcess& self, const Scene& scene) {
  const Holdings before;
  Report report;
  mk_unique_id_t id;
  if (!self.share_id(&id)) return;
  const std::vector<int32_t> nodes = node_layout(scene.nranks, scene.num_nodes);
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  config.device = MK_DEVICE_HOST;
  config.host_threads = 1;
  config.node_of_rank = nodes.data();
  config.peer_timeout_ms = scene.peer_timeout_ms;
  mk_comm_t comm = nullptr;
  std::string wrong;
  report.status = mk_comm_init(&comm, &id, scene.nranks, self.rank(), &config);
  if (report.status == MK_SUCCESS) report.status = work(comm, self, scene, wrong);
  report.ended_ms = now_ms();
  std::snprintf(report.sentence, sizeof report.sentence, "%s",
                wrong.empty() ? mk_get_last_error(comm) : wrong.c_str());
  mk_async_error_t error = MK_ASYNC_ERROR_INIT;
  if (mk_comm_get_async_error(comm, &error) == MK_SUCCESS) report.blamed = error.rank;
  report.destroyed = mk_comm_destroy(comm);
  report.destroy_ms = now_ms() - report.ended_ms;
  before.compare(report);
  self.tell(report);
}

// Waits until all ranks are at work, and a little longer.
bool wait_for_work(const ProcessJob& job, const Scene& scene, int extra_us) {
  if (!job.pass_id_on()) return false;
  for (int rank = 0; rank < scene.nranks; ++rank) {
    const auto report = job.receive(rank);
    if (!report || report->kind != Report::kReady) {
      UNSCOPED_INFO("rank " << rank << ": " << (report ? report->text() : "silent"));
      return false;
    }
  }
  usleep(static_cast<useconds_t>(extra_us));
  return true;
}

// The survivor's story: the loss was told in time and by name, and nothing stays.
void check_survivor(ProcessJob& job, int rank, const std::set<int>& lost, int64_t since_ms, int64_t limit_ms) {
  const auto report = job.receive(rank);
  REQUIRE(report);
  INFO("survivor " << rank << ": " << report->text());
  CHECK(report->status == MK_ERROR_REMOTE);
  CHECK(lost.count(report->blamed) == 1);
  CHECK(report->says("rank " + std::to_string(report->blamed)));
  CHECK(report->ended_ms - since_ms < limit_ms);
  CHECK(report->destroyed == MK_SUCCESS);
  CHECK(report->destroy_ms < 5000);
  CHECK(report->descriptors_left == 0);
  CHECK(report->threads_left == 0);
  CHECK(report->mappings_left == 0);
  CHECK(job.wait_for(rank) == 0);
}

void kill_ranks(const Scene& scene, const std::set<int>& victims, int delay_us) {
  INFO("W " << scene.nranks << ", nodes " << scene.num_nodes << ", first victim " << *victims.begin() << " of "
            << victims.size() << ", after " << delay_us << " us, seed " << scene.seed);
  const int shared_before = shared_memory_files();
  ProcessJob job(scene.nranks, 120, [&](RankProcess& self) { be_rank(self, scene); });
  REQUIRE(job.started(scene.nranks));
  REQUIRE(wait_for_work(job, scene, delay_us));
  const int64_t killed_ms = now_ms();
  for (const int victim : victims) job.send_signal(victim, SIGKILL);
  for (int rank = 0; rank < scene.nranks; ++rank) {
    if (victims.count(rank) == 0) check_survivor(job, rank, victims, killed_ms, 10000);
  }
  for (const int victim : victims) CHECK(job.wait_for(victim) == 128 + SIGKILL);
  CHECK(shared_memory_files() == shared_before);
  CHECK(waitpid(-1, nullptr, WNOHANG) == -1);
}

}  // namespace

TEST_CASE("a rank killed in the middle of operators is named by every survivor") {
  std::mt19937_64 random(2024);
  for (int turn = 0; turn < 24; ++turn) {
    const int nranks = 2 + turn % 4;
    const Scene scene{nranks, 1 + turn / 4 % 2, turn % 3 == 2, 0, random()};
    const int victim = static_cast<int>(random() % static_cast<uint64_t>(nranks));
    kill_ranks(scene, {victim}, static_cast<int>(random() % 30000));
  }
}

TEST_CASE("two ranks killed at the same moment") {
  std::mt19937_64 random(7);
  for (int turn = 0; turn < 4; ++turn) {
    const int first = static_cast<int>(random() % 4);
    kill_ranks({5, 1 + turn % 2, false, 0, random()}, {first, first + 1}, static_cast<int>(random() % 20000));
  }
}

TEST_CASE("a stopped rank is told from a slow one by its silence") {
  for (const int num_nodes : {1, 2}) {
    const int nranks = 2 * num_nodes;
    const Scene scene{nranks, num_nodes, false, 1500, static_cast<uint64_t>(nranks)};
    INFO("W " << nranks << ", nodes " << num_nodes);
    ProcessJob job(nranks, 120, [&](RankProcess& self) { be_rank(self, scene); });
    REQUIRE(job.started(nranks));
    REQUIRE(wait_for_work(job, scene, 3000));
    const int victim = nranks / 2;
    const int64_t stopped_ms = now_ms();
    job.send_signal(victim, SIGSTOP);
    for (int rank = 0; rank < nranks; ++rank) {
      if (rank != victim) check_survivor(job, rank, {victim}, stopped_ms, 8000);
    }
    // When it goes on, the others are gone; it ends in order too, whomever it blames.
    job.send_signal(victim, SIGCONT);
    const auto report = job.receive(victim);
    REQUIRE(report);
    INFO("the stopped rank: " << report->text());
    CHECK(report->status == MK_ERROR_REMOTE);
    CHECK(report->descriptors_left == 0);
    CHECK(report->threads_left == 0);
    CHECK(job.wait_for(victim) == 0);
  }
}

namespace {

// Rank 0 puts one wide row to rank 1, which has entered the launch and was stopped then: the channel fills up.
mk_status_t put_to_stopped(mk_comm_t comm, const RankProcess& self) {
  constexpr int64_t kWide = int64_t{4} << 20;
  mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
  maxima.m = 1, maxima.k = kWide;
  if (const mk_status_t status = mk_allgather_gemm_prepare(comm, &maxima); status != MK_SUCCESS) return status;
  const std::vector<uint16_t> row(self.rank() == 0 ? kWide + 8 : 0);
  mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
  args.m = 1, args.k = kWide;
  // 16-byte aligned
  args.a = reinterpret_cast<const void*>((reinterpret_cast<uintptr_t>(row.data()) + 15) / 16 * 16);
  args.lda = kWide;
  // Rank 1 is to have entered by the time it is stopped, however slow it is.
  if (self.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(4000));
  mk_status_t status = mk_allgather_gemm(comm, &args, nullptr);
  Report ready;
  ready.kind = Report::kReady;
  if (self.rank() == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2000));
    self.tell(ready);
  }
  const mk_status_t ended = mk_comm_synchronize(comm, nullptr);
  return status == MK_SUCCESS ? ended : status;
}

void be_rank_at_put(RankProcess& self) {
  Report report;
  mk_unique_id_t id;
  if (!self.share_id(&id)) return;
  const int32_t nodes[] = {0, 1};
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  config.device = MK_DEVICE_HOST;
  config.host_threads = 1;
  config.node_of_rank = nodes;
  config.wait_timeout_ms = 400;
  mk_comm_t comm = nullptr;
  report.status = mk_comm_init(&comm, &id, 2, self.rank(), &config);
  if (report.status == MK_SUCCESS) report.status = put_to_stopped(comm, self);
  std::snprintf(report.sentence, sizeof report.sentence, "%s", mk_get_last_error(comm));
  mk_async_error_t error = MK_ASYNC_ERROR_INIT;
  if (mk_comm_get_async_error(comm, &error) == MK_SUCCESS) report.blamed = error.rank;
  report.destroyed = mk_comm_destroy(comm);
  self.tell(report);
}

}  // namespace

TEST_CASE("a put that the network does not complete is reported by its deadline") {
  ProcessJob job(2, 60, be_rank_at_put);
  REQUIRE(job.started(2));
  REQUIRE(job.pass_id_on());
  const auto entered = job.receive(1);
  REQUIRE(entered);
  REQUIRE(entered->kind == Report::kReady);
  job.send_signal(1, SIGSTOP);
  const auto report = job.receive(0);
  job.send_signal(1, SIGCONT);
  REQUIRE(report);
  INFO(report->text());
  CHECK(report->status == MK_ERROR_TIMEOUT);
  CHECK(report->blamed == -1);
  CHECK(report->says("rank 0, role host, waited 400 ms in allgather_gemm (launch 1) for put "));
  CHECK(report->says(": saw "));
  CHECK(report->says(", expected "));
  CHECK(
      report->says("The network does not complete what this rank has posted; look at the other ranks' own "
                   "errors, or raise wait_timeout_ms"));
  CHECK(report->destroyed == MK_SUCCESS);
  const auto stopped = job.receive(1);
  REQUIRE(stopped);
  INFO(stopped->text());
  CHECK(stopped->status == MK_ERROR_REMOTE);
  CHECK(stopped->blamed == 0);
  CHECK(job.wait_for(0) == 0);
  CHECK(job.wait_for(1) == 0);
}
