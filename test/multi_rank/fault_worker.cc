// SPDX-License-Identifier: MIT
#include "test/multi_rank/fault_worker.h"

#include <sys/eventfd.h>

#include <atomic>
#include <random>

#include "test/multi_rank/fault_operators.h"
#include "test/multi_rank/process_job.h"
#include "test/multi_rank/thread_job.h"

namespace mk::test {
namespace {

// A scene that has not ended by then ends its process.
constexpr unsigned kSceneLimitS = 120;

bool receive_order(int socket, Order& order) { return recv(socket, &order, sizeof order, 0) == sizeof order; }

// Aborts the scene's communicator when it is ordered to.
class AbortListener {
 public:
  AbortListener(int socket, mk_comm_t* comm)
      : socket_(socket), comm_(comm), stop_(eventfd(0, EFD_CLOEXEC)), thread_([this] { listen(); }) {}
  AbortListener(const AbortListener&) = delete;
  AbortListener& operator=(const AbortListener&) = delete;
  ~AbortListener() { stop(); }

  // How long the abort took; -1: there was none.
  int64_t stop() {
    if (thread_.joinable()) {
      const uint64_t one = 1;
      stopping_ = true;
      [[maybe_unused]] const ssize_t written = write(stop_, &one, sizeof one);
      thread_.join();
      close(stop_);
    }
    return abort_ms_;
  }

 private:
  void listen() {
    pollfd waits[2] = {{socket_, POLLIN, 0}, {stop_, POLLIN, 0}};
    if (poll(waits, 2, static_cast<int>(kSceneLimitS * 1000)) <= 0 || waits[1].revents != 0) return;
    Order order;
    if (!receive_order(socket_, order) || order.kind != Order::kAbort) return;
    // During mk_comm_init the handle is there before the call blocks.
    mk_comm_t comm = nullptr;
    while (!stopping_ && (comm = __atomic_load_n(comm_, __ATOMIC_ACQUIRE)) == nullptr) usleep(100);
    const int64_t start = now_ms();
    if (comm != nullptr && mk_comm_abort(comm) == MK_SUCCESS) abort_ms_ = now_ms() - start;
  }

  const int socket_;
  mk_comm_t* const comm_;
  const int stop_;
  std::atomic<bool> stopping_{false};
  int64_t abort_ms_ = -1;
  std::thread thread_;
};

// Work without end: calls in a random order that is the same on all ranks, some behind one another.
mk_status_t work(mk_comm_t comm, const Scene& scene, const RankProcess& self, std::string& wrong) {
  std::mt19937_64 random(scene.seed);
  const auto& operators = fault_operators();
  for (uint64_t turn = 0;; ++turn) {
    std::vector<std::unique_ptr<CheckedCall>> calls;
    const auto depth = 1 + random() % 3;
    for (uint64_t i = 0; i < depth; ++i) {
      const uint64_t other = random();
      const size_t row = other % 3 == 0 ? other / 3 % operators.size() : static_cast<size_t>(scene.op);
      calls.push_back(operators[row].make(scene.nranks, scene.rank, random()));
    }
    mk_status_t status = MK_SUCCESS;
    for (const auto& call : calls) {
      if (status == MK_SUCCESS) status = call->launch(comm);
    }
    // The calls read their operands until they have ended.
    const mk_status_t ended = mk_comm_synchronize(comm, nullptr);
    if (status == MK_SUCCESS) status = ended;
    if (status != MK_SUCCESS) return status;
    for (const auto& call : calls) {
      if (wrong.empty()) wrong = call->wrong();
    }
    if (!wrong.empty()) return MK_SUCCESS;
    void* memory = nullptr;
    if (scene.collectives) status = mk_mem_alloc(comm, 1 + random() % (3 << 20), &memory);
    if (scene.collectives && status == MK_SUCCESS && random() % 2 == 0) status = mk_mem_free(comm, memory);
    if (status != MK_SUCCESS) return status;
    Report ready;
    ready.kind = Report::kReady;
    if (turn == 0) self.tell(ready);
  }
}

bool clean(const Report& report) {
  return report.descriptors_left == 0 && report.threads_left == 0 && report.mappings_left == 0;
}

void run_scene(int socket, const Scene& scene) {
  alarm(kSceneLimitS);
  const Holdings before;
  const RankProcess self(scene.rank, socket);
  Report report;
  mk_unique_id_t id;
  Order order;
  if (scene.rank == 0) {
    if (!self.share_id(&id)) return;
  } else {
    if (!receive_order(socket, order) || order.kind != Order::kId) return;
    id = order.id;
  }
  const std::vector<int32_t> nodes = node_layout(scene.nranks, scene.num_nodes);
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  config.device = MK_DEVICE_HOST;
  config.host_threads = 1;
  config.node_of_rank = nodes.data();
  config.peer_timeout_ms = scene.peer_timeout_ms;
  config.init_timeout_ms = scene.init_timeout_ms;
  mk_comm_t comm = nullptr;
  {
    AbortListener listener(socket, &comm);
    std::string wrong;
    report.status = mk_comm_init(&comm, &id, scene.nranks, scene.rank, &config);
    if (report.status == MK_SUCCESS) report.status = work(comm, scene, self, wrong);
    report.ended_ms = now_ms();
    report.was_wrong = !wrong.empty();
    std::snprintf(report.sentence, sizeof report.sentence, "%s",
                  wrong.empty() ? mk_get_last_error(comm) : wrong.c_str());
    report.abort_ms = listener.stop();
  }
  mk_async_error_t error = MK_ASYNC_ERROR_INIT;
  if (comm != nullptr && mk_comm_get_async_error(comm, &error) == MK_SUCCESS) report.blamed = error.rank;
  const int64_t before_destroy = now_ms();
  if (comm != nullptr) report.destroyed = mk_comm_destroy(comm);
  report.destroy_ms = now_ms() - before_destroy;
  // The root of a job that did not come together stays a while for those that come late.
  before.compare(report);
  for (int64_t turn = 0; turn < 10 && !clean(report); ++turn) before.compare(report);
  alarm(0);
  self.tell(report);
}

}  // namespace

void be_fault_worker(int socket) {
  Order order;
  while (receive_order(socket, order)) {
    if (order.kind == Order::kQuit) return;
    // An abort that came too late for its scene is dropped.
    if (order.kind == Order::kScene) run_scene(socket, order.scene);
  }
}

}  // namespace mk::test
