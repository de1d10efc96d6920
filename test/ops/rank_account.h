// SPDX-License-Identifier: MIT
// What a schedule's model notes of one launch at one rank, and what can be wrong with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "mkernel.h"

namespace mk::test {

struct RankAccount {
  struct Raised {
    int times = 0;
    int waited = 0;
  };
  struct Write {
    size_t begin;
    size_t end;
    int writer;
  };
  std::map<int, Raised> flags;
  std::map<int, Raised> signals;
  std::vector<Write> writes;  // to this rank's area
  int64_t link_bytes = 0;
  int64_t network_bytes = 0;
  size_t area_bytes = 0;
  mk_plan_t plan = MK_PLAN_INIT;

  // Each adds what is wrong to `found`; the account is that of `rank`.
  void check_raised(int rank, std::vector<std::string>& found) const;  // once each, and waited for
  void check_bytes(int rank, std::vector<std::string>& found) const;   // as the plan says
  void check_writes(int rank, std::vector<std::string>& found) const;  // inside the area, each byte once
};

}  // namespace mk::test
