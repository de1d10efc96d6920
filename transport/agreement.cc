// SPDX-License-Identifier: MIT
#include "agreement.h"

#include <algorithm>

namespace mk {

Result<std::vector<Bytes>> agree(const Status& mine, std::span<const std::byte> card, Exchange& exchange,
                                 Deadline deadline, const char* what) {
  // The first byte is the status; a sentence follows it, or the card.
  Bytes block{static_cast<std::byte>(mine.code())};
  if (mine.ok()) {
    block.insert(block.end(), card.begin(), card.end());
  } else {
    const auto text = std::as_bytes(std::span(mine.sentence()));
    block.insert(block.end(), text.begin(), text.end());
  }
  auto blocks = exchange.all_gather(block, deadline, what);
  if (!mine.ok()) return mine;
  if (!blocks.ok()) return blocks.status();
  for (size_t rank = 0; rank < blocks->size(); ++rank) {
    const Bytes& theirs = blocks.value()[rank];
    if (theirs.empty()) return Status(MK_ERROR_NETWORK, format("%s: rank %zu sent nothing", what, rank));
    const auto code = static_cast<int>(theirs[0]);
    if (code == MK_SUCCESS) continue;
    return Status(code <= MK_ERROR_INTERNAL ? static_cast<mk_status_t>(code) : MK_ERROR_INTERNAL,
                  format("%s: rank %zu: %.*s", what, rank, static_cast<int>(theirs.size() - 1),
                         reinterpret_cast<const char*>(theirs.data()) + 1));
  }
  for (Bytes& theirs : blocks.value()) theirs.erase(theirs.begin());
  return blocks;
}

}  // namespace mk
