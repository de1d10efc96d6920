// SPDX-License-Identifier: MIT
// The links between two ranks: each NIC by itself, then all of them, each with an endpoint of its own, so that
// one that fails takes no other with it.
#pragma once

#include <array>
#include <mutex>
#include <string>
#include <vector>

#include "lib/bootstrap.h"
#include "link_meter.h"
#include "link_table.h"
#include "transport/transport.h"

namespace perf {

struct PairFindings {
  std::vector<MeasuredLink> links;
  std::string problems;  // a sentence a line
};

class PairCheck {
 public:
  // `nics`: of every rank, what the backend would use; empty lists where it chooses no NICs.
  PairCheck(mk::Bootstrap& all, const mk::Backend& backend, const std::vector<std::vector<mk::NicPort>>& nics)
      : all_(all), backend_(backend), nics_(nics) {}

  // Collective among all ranks, which all get the same findings. It fails only when the job cannot go on.
  mk::Status run(int low, int high, PairFindings& findings);
  // Ends what is being measured. Any thread.
  void abort(const mk::Status& reason);

 private:
  // What one of the two says of a link.
  struct Side {
    mk::Status failure;
    LinkFigures figures;
    bool measured = false;
  };
  struct Pair;
  using Names = std::array<std::vector<std::string>, 2>;  // of the NICs at each end

  mk::Status check_nic(const Pair& pair, size_t link, PairFindings& findings);
  mk::Status check_all(const Pair& pair, size_t num_links, PairFindings& findings);
  mk::Result<std::array<Side, 2>> measure(const Pair& pair, const Names& names);
  static void record(const Pair& pair, const std::array<Side, 2>& sides,
                     const std::array<MeasuredLink, 2>& ways, const std::string& advice,
                     PairFindings& findings);
  Side measure_side(LinkMeter& meter, int rank);
  void watch(LinkMeter* meter);

  mk::Bootstrap& all_;
  const mk::Backend& backend_;
  const std::vector<std::vector<mk::NicPort>>& nics_;
  std::mutex mutex_;
  LinkMeter* meter_ = nullptr;  // that is to be ended by abort()
  mk::Status aborted_;
};

// In a sentence about the two ranks 0 and 1 of a pair: their ranks in the job instead.
std::string with_ranks(const std::string& sentence, int low, int high);

}  // namespace perf
