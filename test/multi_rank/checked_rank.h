// SPDX-License-Identifier: MIT
// What a rank does in tests of operators over some network: calls one after another, each checked.
#pragma once

#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <string>

#include "test/multi_rank/fault_operators.h"
#include "test/multi_rank/process_job.h"

namespace mk::test {

// The operators in turns, `launches` in all, on a communicator of its own made with `config`.
inline Report run_checked_rank(const RankProcess& self, int nranks, const mk_comm_config_t& config,
                               std::span<const FaultOperator> operators, uint64_t launches, uint64_t seed) {
  Report report;
  mk_unique_id_t id;
  if (!self.share_id(&id)) return report;
  mk_comm_t comm = nullptr;
  report.status = mk_comm_init(&comm, &id, nranks, self.rank(), &config);
  std::string wrong;
  std::mt19937_64 random(seed);
  for (uint64_t n = 0; n < launches && report.status == MK_SUCCESS && wrong.empty(); ++n) {
    const FaultOperator& row = operators[n % operators.size()];
    const auto call = row.make(nranks, self.rank(), random());
    report.status = call->launch(comm);
    // The call reads its operands until it has ended.
    const mk_status_t ended = mk_comm_synchronize(comm, nullptr);
    if (report.status == MK_SUCCESS) report.status = ended;
    if (report.status == MK_SUCCESS) wrong = call->wrong();
    if (!wrong.empty()) wrong = std::string(row.name) + ": " + wrong;
  }
  report.was_wrong = !wrong.empty();
  std::snprintf(report.sentence, sizeof report.sentence, "%s",
                wrong.empty() ? mk_get_last_error(comm) : wrong.c_str());
  if (report.status == MK_SUCCESS) report.status = mk_comm_finalize(comm);
  if (comm != nullptr) report.destroyed = mk_comm_destroy(comm);
  return report;
}

// Waits for all ranks' reports: "" when all went well.
inline std::string join_checked_ranks(const ProcessJob& job, int nranks, int timeout_ms) {
  std::string wrong;
  for (int rank = 0; rank < nranks; ++rank) {
    const auto report = job.receive(rank, timeout_ms);
    const bool fine =
        report && report->status == MK_SUCCESS && !report->was_wrong && report->destroyed == MK_SUCCESS;
    if (!fine)
      wrong += "rank " + std::to_string(rank) + " " + (report ? report->text() : "ended or hangs") + "; ";
  }
  return wrong;
}

}  // namespace mk::test
