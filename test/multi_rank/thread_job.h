// SPDX-License-Identifier: MIT
// A job of the C interface whose ranks are threads of the test, taken step by step.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "../support/transport_choice.h"
#include "mkernel.h"

namespace mk::test {

// Rank r of `nranks` on emulated node r * num_nodes / nranks.
inline std::vector<int32_t> node_layout(int nranks, int num_nodes) {
  std::vector<int32_t> nodes;
  for (int rank = 0; rank < nranks; ++rank) nodes.push_back(rank * num_nodes / nranks);
  return nodes;
}

// What a call answered on one rank.
struct Outcome {
  mk_status_t status = MK_SUCCESS;
  std::string sentence;

  bool says(const std::string& text) const { return sentence.find(text) != std::string::npos; }
};

inline std::string text_of(const Outcome& outcome) {
  return std::string(mk_status_string(outcome.status)) + ": " + outcome.sentence;
}
inline std::string text_of(const std::vector<Outcome>& outcomes) {
  std::string text;
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    text += "rank " + std::to_string(rank) + ": " + text_of(outcomes[rank]) + "\n";
  }
  return text;
}
inline bool all_answer(const std::vector<Outcome>& outcomes, mk_status_t status) {
  for (const Outcome& outcome : outcomes) {
    if (outcome.status != status) return false;
  }
  return true;
}

// Of the ranks that did not succeed: "" when all did.
inline std::string failures(const std::vector<Outcome>& outcomes) {
  return all_answer(outcomes, MK_SUCCESS) ? "" : text_of(outcomes);
}

struct JobOptions {
  explicit JobOptions(std::vector<int32_t> nodes) : node_of_rank(std::move(nodes)) {
    config.device = MK_DEVICE_HOST;
    config.host_threads = 1;
    config.transport = test_transport();
    config.init_timeout_ms = 20000;
  }

  std::vector<int32_t> node_of_rank;
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;  // of every rank; node_of_rank is filled in
};

class ThreadJob {
 public:
  using Call = std::function<mk_status_t(int rank, mk_comm_t comm)>;

  explicit ThreadJob(JobOptions options) : options_(std::move(options)), comms_(options_.node_of_rank.size()) {
    mk_unique_id_t id;
    const mk_status_t made = mk_get_unique_id(&id);
    if (made != MK_SUCCESS) {
      started_.assign(comms_.size(), {made, mk_get_last_error(nullptr)});
      return;
    }
    options_.config.node_of_rank = options_.node_of_rank.data();
    started_ = each([&](int rank, mk_comm_t) {
      return mk_comm_init(&comms_[static_cast<size_t>(rank)], &id, nranks(), rank, &options_.config);
    });
  }
  ThreadJob(const ThreadJob&) = delete;
  ThreadJob& operator=(const ThreadJob&) = delete;
  ~ThreadJob() { destroy(); }

  int nranks() const { return static_cast<int>(comms_.size()); }
  mk_comm_t comm(int rank) const { return comms_[static_cast<size_t>(rank)]; }
  // What mk_comm_init answered.
  const std::vector<Outcome>& started() const { return started_; }

  // Calls on every rank at the same time, a thread each, and waits for all.
  std::vector<Outcome> each(const Call& call) {
    std::vector<Outcome> outcomes(comms_.size());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < nranks(); ++rank) {
      threads.emplace_back([&, rank] { outcomes[static_cast<size_t>(rank)] = on(rank, call); });
    }
    for (std::thread& thread : threads) thread.join();
    return outcomes;
  }
  // Calls on one rank, here.
  Outcome on(int rank, const Call& call) const {
    const mk_status_t status = call(rank, comm(rank));
    // Where there is no communicator the sentence is the calling thread's.
    return {status, status == MK_SUCCESS ? "" : mk_get_last_error(comm(rank))};
  }

  std::vector<Outcome> finalize() {
    return each([](int, mk_comm_t comm) { return mk_comm_finalize(comm); });
  }
  std::vector<Outcome> destroy() {
    const auto outcomes =
        each([](int, mk_comm_t comm) { return comm == nullptr ? MK_SUCCESS : mk_comm_destroy(comm); });
    comms_.assign(comms_.size(), nullptr);
    return outcomes;
  }

 private:
  JobOptions options_;
  std::vector<mk_comm_t> comms_;
  std::vector<Outcome> started_;
};

}  // namespace mk::test
