// SPDX-License-Identifier: MIT
// Calls that one rank makes with a bad argument, and what they have to answer.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "test/multi_rank/thread_job.h"

namespace mk::test {

struct BadCall {
  std::string name;
  mk_status_t expected;
  std::vector<std::string> says;  // in the sentence, each
  std::function<mk_status_t(mk_comm_t comm)> call;
};

std::vector<BadCall> bad_attention_calls();
std::vector<BadCall> bad_gemm_calls();
std::vector<BadCall> bad_handle_calls();
std::vector<BadCall> bad_memory_calls();
std::vector<BadCall> bad_moe_calls();
std::vector<BadCall> bad_routing_bytes_calls();  // need no communicator
std::vector<BadCall> bad_query_calls();

}  // namespace mk::test
