// SPDX-License-Identifier: MIT
#include "data_error.h"

#include "../../../lib/status.h"

namespace mk::moe {
namespace {

std::string describe_fault(const DataError& error) {
  const CountsHead& head = error.counts;
  const auto tokens = static_cast<long long>(head.tokens);
  const auto value = static_cast<long long>(head.value);
  switch (static_cast<Fault>(head.fault)) {
    case Fault::bad_record:
      return format(
          "routing: expected the record of a dispatch with tokens=%lld, experts=%d, topk=%d on this rank, "
          "saw something else",
          tokens, error.experts, error.topk);
    case Fault::no_rows:
      return format("rows: expected a pointer to the %lld rows of the record, saw NULL", value);
    case Fault::duplicate:
      return format("topk_idx[%d, %d]: expected each expert once in a row, saw %lld again", head.token, head.k,
                    value);
    default:
      return format("topk_idx[%d, %d]: expected -1 to %d, saw %lld", head.token, head.k, error.experts - 1,
                    value);
  }
}

}  // namespace

std::string describe(const DataError& error, uint64_t epoch) {
  const auto needed = static_cast<long long>(error.verdict.needed);
  const auto available = static_cast<long long>(error.verdict.available);
  std::string what;
  switch (error.verdict.kind) {
    case Verdict::fault:
      what = describe_fault(error);
      break;
    case Verdict::capacity:
      what =
          format("capacity_rows: expected at least %lld (the most rows that any rank gets), saw room for %lld",
                 needed, available);
      break;
    case Verdict::records_differ:
      what = format(
          "routing: the record has %lld rows for expert %d, the ranks' records together send %lld; pass "
          "the records of one dispatch",
          available, error.verdict.expert, needed);
      break;
    default:
      what = format(
          "workspace: this routing needs %lld bytes a bank there, %lld are prepared; prepare with larger "
          "tokens or capacity_rows",
          needed, available);
  }
  return format("launch %llu, rank %d: %s; no rows were moved on any rank",
                static_cast<unsigned long long>(epoch), error.verdict.rank, what.c_str());
}

}  // namespace mk::moe
