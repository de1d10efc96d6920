// SPDX-License-Identifier: MIT
#include "test/multi_rank/fault_pool.h"

#include <algorithm>
#include <random>

#include "test/multi_rank/fault_operators.h"
#include "test/multi_rank/process_job.h"

namespace mk::test {
namespace {

constexpr int kNamedWithinMs = 10000;
constexpr int kAbortWithinMs = 5000;
constexpr int kPatienceMs = 60000;  // for a worker's word

bool is_victim(const Fault& fault, int rank) { return rank == fault.victim || rank == fault.second_victim; }
// A cut that leaves nobody with a neighbour: any rank may be named but oneself.
bool may_blame(const Fault& fault, int rank, int blamed) {
  return fault.victim < 0 ? blamed >= 0 && blamed != rank : is_victim(fault, blamed);
}
bool ends_by_itself(FaultKind kind) { return kind == FaultKind::abort || kind == FaultKind::cut; }

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

void complain(FaultResult& result, int rank, const std::string& what, const Report* report = nullptr) {
  std::string text = rank_text(rank) + ": " + what;
  if (report) text += "; it said " + report->text();
  result.complaints.push_back(text);
}

// "rank 3" but not the beginning of "rank 31".
bool names(const Report& report, int rank) {
  const std::string sentence = report.sentence;
  const std::string wanted = rank_text(rank);
  for (size_t at = 0; (at = sentence.find(wanted, at)) != std::string::npos; at += wanted.size()) {
    const char behind = at + wanted.size() < sentence.size() ? sentence[at + wanted.size()] : ' ';
    if (behind < '0' || behind > '9') return true;
  }
  return false;
}

void check_left(const Report& report, int rank, FaultResult& result) {
  if (report.destroyed != MK_SUCCESS || report.destroy_ms > kAbortWithinMs)
    complain(result, rank, "mk_comm_destroy took " + std::to_string(report.destroy_ms) + " ms", &report);
  if (report.descriptors_left != 0 || report.threads_left != 0 || report.mappings_left != 0) {
    complain(result, rank,
             "left behind: " + std::to_string(report.descriptors_left) + " descriptors, " +
                 std::to_string(report.threads_left) + " threads, " + std::to_string(report.mappings_left) +
                 " mappings",
             &report);
  }
  if (report.was_wrong) complain(result, rank, "a wrong result", &report);
}

// How the sentence tells this kind of fault from the others.
const char* telling_words(FaultKind kind) {
  if (kind == FaultKind::abort) return "abort";
  if (kind == FaultKind::cut) return "stopped, or cut off";
  return kind == FaultKind::stop ? "does not answer" : "is lost";
}

}  // namespace

const char* name_of(FaultKind kind) {
  static constexpr const char* kNames[kFaultKinds] = {"kill", "two kills", "abort", "stop", "cut"};
  return kNames[static_cast<int>(kind)];
}

std::string Fault::text() const {
  std::string text = std::string(name_of(kind)) + (during_init ? " during init" : "") + ", W " +
                     std::to_string(scene.nranks) + ", nodes " + std::to_string(scene.num_nodes) + ", " +
                     fault_operators()[static_cast<size_t>(scene.op)].name +
                     (scene.collectives ? " and host-collective calls" : "") + ", rank " +
                     std::to_string(victim) + " after " + std::to_string(delay_us) + " us";
  if (second_victim >= 0) {
    text += ", rank " + std::to_string(second_victim) + " " + std::to_string(second_delay_us) + " us later";
  }
  return text;
}

Fault make_fault(uint64_t seed, uint64_t index, bool during_init) {
  std::mt19937_64 random(seed * 1000003 + index);
  const auto below = [&](size_t bound) { return static_cast<int>(random() % bound); };
  Fault fault;
  const int kind = below(100);
  fault.kind = kind < 50                   ? FaultKind::kill
               : kind < 55 && !during_init ? FaultKind::two_kills
               : kind < 95 || during_init  ? FaultKind::abort
                                           : FaultKind::stop;
  const bool one = fault.kind == FaultKind::kill || fault.kind == FaultKind::abort;
  fault.during_init = (one && below(8) == 0) || during_init;
  Scene& scene = fault.scene;
  const int fewest = fault.kind == FaultKind::two_kills ? 3 : 2;
  scene.nranks = fewest + below(4);
  scene.num_nodes = 1 + below(static_cast<size_t>(std::min(scene.nranks, 3)));
  scene.op = static_cast<int32_t>(index % fault_operators().size());
  scene.collectives = below(4) == 0;
  scene.seed = random();
  scene.peer_timeout_ms = fault.kind == FaultKind::stop ? 1500 : 8000;
  scene.init_timeout_ms = fault.during_init ? 3000 : 20000;
  fault.victim = below(static_cast<size_t>(scene.nranks));
  fault.delay_us = below(fault.during_init ? 8000 : 20000);
  if (fault.kind == FaultKind::two_kills) {
    fault.second_victim = (fault.victim + 1 + below(static_cast<size_t>(scene.nranks - 1))) % scene.nranks;
    fault.second_delay_us = below(400000);
  }
  return fault;
}

FaultPool::~FaultPool() {
  for (size_t slot = 0; slot < workers_.size(); ++slot) end_worker(slot, SIGKILL);
}

bool FaultPool::start_worker(size_t slot) {
  Worker& worker = workers_[slot];
  if (worker.process > 0) return true;
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) return false;
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    for (const Worker& other : workers_) {
      if (other.socket >= 0) close(other.socket);
    }
    close(pair[0]);
    if (enter_) enter_(static_cast<int>(slot));
    be_fault_worker(pair[1]);
    _exit(0);
  }
  close(pair[1]);
  if (child < 0) return close(pair[0]), false;
  worker = {child, pair[0]};
  return true;
}

void FaultPool::end_worker(size_t slot, int signal) {
  Worker& worker = workers_[slot];
  if (worker.process <= 0) return;
  kill(worker.process, signal);
  while (waitpid(worker.process, nullptr, 0) < 0 && errno == EINTR) continue;
  close(worker.socket);
  worker = {};
}

bool FaultPool::send_order(int rank, const Order& order) const {
  const int fd = workers_[static_cast<size_t>(rank)].socket;
  return send(fd, &order, sizeof order, MSG_NOSIGNAL) == sizeof order;
}

std::optional<Report> FaultPool::receive(int rank, int timeout_ms) const {
  pollfd readable{workers_[static_cast<size_t>(rank)].socket, POLLIN, 0};
  Report report;
  if (poll(&readable, 1, timeout_ms) != 1) return {};
  if (recv(readable.fd, &report, sizeof report, 0) != sizeof report) return {};
  report.sentence[sizeof report.sentence - 1] = '\0';
  return report;
}

// The ranks come together; unless the fault is to strike before they have, they are at work afterwards.
bool FaultPool::begin(const Fault& fault, FaultResult& result) {
  const int nranks = fault.scene.nranks;
  workers_.resize(std::max(workers_.size(), static_cast<size_t>(nranks)));
  for (int rank = 0; rank < nranks; ++rank) {
    Order order;
    order.kind = Order::kScene;
    order.scene = fault.scene;
    order.scene.rank = rank;
    if (!start_worker(static_cast<size_t>(rank)) || !send_order(rank, order))
      return complain(result, rank, "no process"), false;
  }
  const auto made = receive(0, kPatienceMs);
  if (!made || made->kind != Report::kId) return complain(result, 0, "made no id"), false;
  Order order;
  order.kind = Order::kId;
  order.id = made->id;
  for (int rank = 1; rank < nranks; ++rank) send_order(rank, order);
  for (int rank = 0; rank < nranks && !fault.during_init; ++rank) {
    const auto report = receive(rank, kPatienceMs);
    if (report && report->kind == Report::kReady) continue;
    complain(result, rank, "did not come to work", report ? &*report : nullptr);
    return false;
  }
  usleep(static_cast<useconds_t>(fault.delay_us));
  return true;
}

void FaultPool::strike(const Fault& fault, FaultResult& result) {
  const auto slot = static_cast<size_t>(fault.victim);
  Order order;
  order.kind = Order::kAbort;
  switch (fault.kind) {
    case FaultKind::kill:
      end_worker(slot, SIGKILL);
      break;
    case FaultKind::two_kills:
      kill(workers_[slot].process, SIGKILL);
      usleep(static_cast<useconds_t>(fault.second_delay_us));
      end_worker(static_cast<size_t>(fault.second_victim), SIGKILL);
      end_worker(slot, SIGKILL);
      break;
    case FaultKind::abort:
      if (!send_order(fault.victim, order)) complain(result, fault.victim, "is gone before its abort");
      break;
    case FaultKind::stop:
      kill(workers_[slot].process, SIGSTOP);
      break;
    case FaultKind::cut:
      if (!cut_ || !cut_(fault.victim, true)) complain(result, fault.victim, "its link could not be cut");
      break;
  }
}

void FaultPool::check_survivor(const Fault& fault, int rank, int64_t since_ms, FaultResult& result) {
  auto report = receive(rank, kPatienceMs);
  if (report && report->kind == Report::kReady) report = receive(rank, kPatienceMs);
  if (!report || report->kind != Report::kEnd) {
    complain(result, rank, "its process ended or hangs");
    end_worker(static_cast<size_t>(rank), SIGKILL);
    return;
  }
  check_left(*report, rank, result);
  const int64_t took_ms = report->ended_ms - since_ms;
  if (fault.kind == FaultKind::abort && rank == fault.victim) {
    result.abort_ms = report->abort_ms;
    if (report->status != MK_ERROR_ABORTED) complain(result, rank, "expected MK_ERROR_ABORTED", &*report);
    if (report->abort_ms < 0 || report->abort_ms > kAbortWithinMs || took_ms > kAbortWithinMs)
      complain(result, rank, "its abort took " + std::to_string(report->abort_ms) + " ms", &*report);
    return;
  }
  result.slowest_survivor_ms = std::max(result.slowest_survivor_ms, took_ms);
  if (took_ms > kNamedWithinMs)
    complain(result, rank, "was told after " + std::to_string(took_ms) + " ms", &*report);
  // Who dies before it has reached the root is missing there; with rank 0 dies the root.
  const bool came_together = report->blamed >= 0;
  if (fault.during_init && !came_together) {
    const bool root_gone = fault.kind == FaultKind::kill && fault.victim == 0 && report->says("the root at");
    if (!names(*report, fault.victim) && !root_gone)
      complain(result, rank, "does not name " + rank_text(fault.victim), &*report);
    return;
  }
  if (report->status != MK_ERROR_REMOTE) complain(result, rank, "expected MK_ERROR_REMOTE", &*report);
  if (!may_blame(fault, rank, report->blamed) || !names(*report, report->blamed))
    complain(result, rank, "blames rank " + std::to_string(report->blamed), &*report);
  if (!report->says(telling_words(fault.kind)))
    complain(result, rank, std::string("does not say: ") + telling_words(fault.kind), &*report);
}

// When it goes on, the others are gone; it ends in order too, whomever it blames.
void FaultPool::resume_stopped(const Fault& fault, FaultResult& result) {
  kill(workers_[static_cast<size_t>(fault.victim)].process, SIGCONT);
  const auto report = receive(fault.victim, kPatienceMs);
  if (!report || report->kind != Report::kEnd) {
    complain(result, fault.victim, "was stopped and does not end");
    end_worker(static_cast<size_t>(fault.victim), SIGKILL);
    return;
  }
  check_left(*report, fault.victim, result);
  if (report->status != MK_ERROR_REMOTE) complain(result, fault.victim, "expected MK_ERROR_REMOTE", &*report);
}

FaultResult FaultPool::run(const Fault& fault) {
  FaultResult result;
  const int shared_before = shared_memory_files();
  if (!begin(fault, result)) {
    for (size_t slot = 0; slot < workers_.size(); ++slot) end_worker(slot, SIGKILL);
    return result;
  }
  const int64_t struck_ms = now_ms();
  strike(fault, result);
  for (int rank = 0; rank < fault.scene.nranks; ++rank) {
    const bool speaks = !is_victim(fault, rank) || ends_by_itself(fault.kind);
    if (speaks) check_survivor(fault, rank, struck_ms, result);
  }
  if (fault.kind == FaultKind::cut && !cut_(fault.victim, false))
    complain(result, fault.victim, "its link could not be mended");
  if (fault.kind == FaultKind::stop) resume_stopped(fault, result);
  const int shared_left = shared_memory_files() - shared_before;
  if (shared_left > 0) result.complaints.push_back(std::to_string(shared_left) + " files left in /dev/shm");
  return result;
}

}  // namespace mk::test
