// SPDX-License-Identifier: MIT
#include "operator_call.h"

#include <cstring>
#include <type_traits>

#include "../lib/status.h"

namespace mk {
namespace {

std::array<int64_t, 9> tuning_fields(const mk_tuning_t& tuning) {
  return {tuning.algorithm,   tuning.compute_ctas, tuning.copy_ctas, tuning.send_ctas,  tuning.receive_ctas,
          tuning.reduce_ctas, tuning.tile_m,       tuning.tile_n,    tuning.chunk_bytes};
}

uint64_t hash_tuning(const mk_tuning_t& tuning) {
  uint64_t hash = 14695981039346656037ull;  // FNV-1a, 64 bits
  for (const int64_t field : tuning_fields(tuning)) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash = (hash ^ (static_cast<uint64_t>(field) >> shift & 0xff)) * 1099511628211ull;
    }
  }
  return hash;
}

const mk_tuning_t& tuning_of(const OperatorCall& call) {
  return std::visit([](const auto& some) -> const mk_tuning_t& { return some.tuning; }, call);
}

}  // namespace

mk_operator_t operator_of(const OperatorCall& call) {
  return std::visit([](const auto& some) { return some.op; }, call);
}

std::string sizes_of(const OperatorCall& call) {
  return std::visit([](const auto& some) { return sizes_of(some); }, call);
}

std::array<int64_t, 4> flight_shape(const OperatorCall& call) {
  return std::visit([](const auto& some) { return flight_shape(some); }, call);
}

bool covers(const OperatorCall& maxima, const OperatorCall& call) {
  return std::visit(
      [](const auto& larger, const auto& smaller) {
        if constexpr (std::is_same_v<decltype(larger), decltype(smaller)>) {
          return covers(larger, smaller);
        } else {
          return false;
        }
      },
      maxima, call);
}

OperatorCall maxima_of(const OperatorCall& call) {
  return std::visit([](const auto& some) -> OperatorCall { return maxima_of(some); }, call);
}

std::vector<int64_t> agreed_fields(const OperatorCall& call) {
  std::vector<int64_t> fields = std::visit([](const auto& some) { return agreed_fields(some); }, call);
  fields.push_back(operator_of(call));
  for (const int64_t field : tuning_fields(tuning_of(call))) fields.push_back(field);
  return fields;
}

EntryRecord make_entry(const OperatorCall& call, uint64_t epoch) {
  EntryRecord record{};
  record.epoch = epoch;
  record.op = operator_of(call);
  record.output_offset = kNoOutput;
  record.tuning_hash = hash_tuning(tuning_of(call));
  std::visit([&record](const auto& some) { fill_entry(some, record); }, call);
  return record;
}

PeerOutput peer_output(const OperatorCall& call) {
  return std::visit([](const auto& some) { return peer_output(some); }, call);
}

std::string describe(const EntryRecord& entry) {
  const auto op = static_cast<mk_operator_t>(entry.op);
  std::string sizes;
  switch (op) {
    case MK_OPERATOR_MOE_DISPATCH_GEMM:
    case MK_OPERATOR_MOE_GEMM_COMBINE:
      sizes = describe_moe_entry(entry);
      break;
    case MK_OPERATOR_RING_ATTENTION:
    case MK_OPERATOR_RING_ATTENTION_BACKWARD:
      sizes = describe_ring_attention_entry(entry);
      break;
    default:
      sizes = describe_gemm_entry(entry);
  }
  return format("%s(%s)", operator_name(op), sizes.c_str());
}

std::string difference(const EntryRecord& a, int rank_a, const EntryRecord& b, int rank_b) {
  const bool same_modes = a.dtypes == b.dtypes && std::memcmp(a.modes, b.modes, sizeof a.modes) == 0;
  if (a.op == b.op && same_modes && std::memcmp(a.shape, b.shape, sizeof a.shape) == 0) {
    if (a.tuning_hash == b.tuning_hash) return {};
    return format("ranks %d and %d called %s with different tuning", rank_a, rank_b, describe(a).c_str());
  }
  const std::string first = describe(a);
  const std::string second = describe(b);
  std::string text =
      format("rank %d called %s, rank %d called %s", rank_a, first.c_str(), rank_b, second.c_str());
  if (first == second) text += " with different out_dtype, comm_dtype or mode";
  return text;
}

}  // namespace mk
