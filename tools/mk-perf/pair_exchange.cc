// SPDX-License-Identifier: MIT
#include "pair_exchange.h"

namespace perf {
namespace {

// Beyond all that the two may spend between two steps.
constexpr std::chrono::seconds kStepLimit{120};

bool is(const mk::Bytes& block, auto stage) { return block[0] == static_cast<std::byte>(stage); }

}  // namespace

mk::Result<std::array<mk::Bytes, 2>> PairExchange::step(Stage stage, std::span<const std::byte> data,
                                                        const char* what) {
  mk::Bytes mine{static_cast<std::byte>(stage)};
  mine.insert(mine.end(), data.begin(), data.end());
  auto blocks = all_.all_gather(mine, mk::Deadline::after(kStepLimit), what);
  if (!blocks.ok()) return blocks.status();
  std::array<mk::Bytes, 2> pair;
  for (size_t n = 0; n < pair.size(); ++n) {
    pair[n] = std::move(blocks.value()[static_cast<size_t>(ranks_[n])]);
    if (pair[n].empty())
      return mk::Status(MK_ERROR_NETWORK, mk::format("%s: rank %d sent nothing", what, ranks_[n]));
  }
  return pair;
}

mk::Result<std::vector<mk::Bytes>> PairExchange::all_gather(std::span<const std::byte> mine, mk::Deadline,
                                                            const char* what) {
  auto pair = step(Stage::open, mine, what);
  if (!pair.ok()) return pair.status();
  std::vector<mk::Bytes> blocks;
  for (mk::Bytes& block : pair.value()) {
    if (!is(block, Stage::open))
      return mk::Status(MK_ERROR_ABORTED, mk::format("%s: rank %d has given up", what, 1 - rank()));
    block.erase(block.begin());
    blocks.push_back(std::move(block));
  }
  return blocks;
}

mk::Result<std::array<mk::Bytes, 2>> PairExchange::finish(std::span<const std::byte> outcome, bool gave_up) {
  for (;;) {
    auto pair = step(gave_up ? Stage::gave_up : Stage::finished, outcome, "measuring a link");
    if (!pair.ok()) return pair.status();
    auto& blocks = pair.value();
    if (is(blocks[0], Stage::open) || is(blocks[1], Stage::open)) continue;
    for (mk::Bytes& block : blocks) block.erase(block.begin());
    return pair;
  }
}

bool PairExchange::peer_gave_up() {
  const auto block = all_.peek(ranks_[static_cast<size_t>(1 - rank())]);
  return block && !block->empty() && is(*block, Stage::gave_up);
}

}  // namespace perf
