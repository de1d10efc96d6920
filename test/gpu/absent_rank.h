// SPDX-License-Identifier: MIT
// The last rank is late for a launch, beyond wait_timeout_ms, and is waited for, which the log is told; then it
// stays away and aborts, and the others' kernels end by themselves.
#pragma once

#include <chrono>
#include <string>
#include <thread>

#include "operators_run.h"
#include "test/support/log_lines.h"

namespace operators {

constexpr int ABSENT_TIMEOUT_MS = 400;  // of communicators that run_absent() is called with

// `checked` launches and checks; `launch` only launches, and says what mk_... said. Ends with the communicator.
template <class Checked, class Launch>
void run_absent(Rank& rank, const mk::test::LogLines& lines, Tally& tally, Watchdog& watchdog,
                const std::string& name, Checked&& checked, Launch&& launch) {
  const int victim = rank.nranks - 1;
  const auto sleep = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
  watchdog.stage(rank.rank, "a late rank: " + name, 60, rank.comm);
  checked();
  if (rank.rank == victim) sleep(5 * ABSENT_TIMEOUT_MS);
  checked();
  tally.check(
      rank.rank == victim || lines.count({text("rank %d has waited %d ms in ", rank.rank, ABSENT_TIMEOUT_MS),
                                          text(" for rank %d (its last launch: ", victim)}) > 0,
      text("rank %d, %s, rank %d late: the log does not say so", rank.rank, name.c_str(), victim));
  watchdog.stage(rank.rank, "an absent rank aborts: " + name, 60, rank.comm);
  if (rank.rank == victim) {
    sleep(2 * ABSENT_TIMEOUT_MS);
    tally.check(mk_comm_abort(rank.comm) == MK_SUCCESS, "mk_comm_abort");
  } else {
    const auto begin = std::chrono::steady_clock::now();
    const mk_status_t enqueued = launch();
    const mk_status_t seen = mk_comm_synchronize(rank.comm, rank.stream);
    const std::string sentence = mk_get_last_error(rank.comm);
    tally.check(enqueued == MK_SUCCESS && seen == MK_ERROR_REMOTE &&
                    sentence.find(text("rank %d", victim)) != std::string::npos,
                text("rank %d, %s without rank %d: saw %s, %s", rank.rank, name.c_str(), victim,
                     mk_status_string(seen), sentence.c_str()));
    const bool is_idle = cudaStreamSynchronize(rank.stream) == cudaSuccess;
    tally.check(
        is_idle && std::chrono::steady_clock::now() - begin < std::chrono::seconds(10),
        text("rank %d, %s without rank %d: the kernel ended late, or badly", rank.rank, name.c_str(), victim));
  }
  rank.meet();
  tally.check(mk_comm_destroy(rank.comm) == MK_SUCCESS, "mk_comm_destroy");
  rank.comm = nullptr;
}

// On communicators of their own.
inline void run_impatient_ranks(int nranks, const std::function<void(Rank&, const mk::test::LogLines&)>& body) {
  if (nranks == 1) return;
  const mk::test::LogLines lines(MK_LOG_WARN);
  run_ranks(
      nranks, [&](Rank& rank) { body(rank, lines); },
      [](mk_comm_config_t& config) { config.wait_timeout_ms = ABSENT_TIMEOUT_MS; });
}

}  // namespace operators
