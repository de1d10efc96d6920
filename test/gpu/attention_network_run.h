// SPDX-License-Identifier: MIT
// What the tests of ring attention between nodes share: each case once, and many launches in a row.
#pragma once

#include <deque>
#include <string>

#include "attention_run.h"
#include "network_transports.h"

namespace operators {

// Puts of a panel each, so that even small cases have many.
constexpr int64_t kSmallPuts = 1;

inline void run_all(Seat& seat, Tally& tally, Watchdog& watchdog, const std::string& where,
                    const std::deque<AttentionProblem>& problems) {
  for (size_t number = 0; number < problems.size(); ++number) {
    const AttentionProblem& problem = problems[number];
    watchdog.stage(seat.session.rank(), where + ": " + describe(problem.attention), 60, seat.comm);
    const size_t before = seat.session.failures().size();
    run_case<Forward>(seat, problem, number % 4 == 0);
    if (has_gradients(problem.attention)) run_case<Backward>(seat, problem, number % 4 == 1);
    const auto& failures = seat.session.failures();
    tally.check(failures.size() == before, failures.empty() ? where : where + ": " + failures.back());
    if (failures.size() >= 5) return;
  }
}

// The host does not wait in between, so that ranks drift apart as far as the banks let them.
template <class Direction>
void run_in_a_row(Seat& seat, Tally& tally, Watchdog& watchdog, const std::string& where,
                  const AttentionProblem& problem, int launches) {
  watchdog.stage(seat.session.rank(), where + ": in a row: " + Direction::NAME, 60, seat.comm);
  AttentionLaunch launch(seat.session, problem);
  DeviceTensors tensors(problem.attention, rows_of(problem, seat), seat.stream);
  const auto args = arguments_on<Direction>(launch, tensors);
  Leash leash(8);
  for (int i = 0; i < launches; ++i) {
    if (!seat.session.ok(Direction::call(seat, args), Direction::NAME)) return;
    leash.mark(seat.stream);
  }
  if (!seat.session.ok(mk_comm_synchronize(seat.comm, seat.stream), "mk_comm_synchronize")) return;
  tensors.download();
  const size_t before = seat.session.failures().size();
  Direction::verify(launch);
  tally.check(seat.session.failures().size() == before, where + ": in a row: " + Direction::NAME);
}

}  // namespace operators
