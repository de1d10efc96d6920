// SPDX-License-Identifier: MIT
#include "bootstrap_news.h"

namespace mk {

std::pair<int, Status> as_loss(const News& news, int rank) {
  const int subject = static_cast<int>(news.subject);
  const int reporter = static_cast<int>(news.reporter);
  const char* why = news.why.c_str();
  if (subject == rank) {
    return {reporter,
            Status(MK_ERROR_REMOTE, format("rank %d gave up this rank (%d): %s", reporter, rank, why))};
  }
  switch (news.fate) {
    case Fate::aborted:
      return {subject, Status(MK_ERROR_REMOTE, format("rank %d aborted: %s", subject, why))};
    case Fate::violated:
      return {subject, Status(MK_ERROR_NETWORK,
                              format("rank %d broke the protocol of the bootstrap ring: %s (seen by rank %d)",
                                     subject, why, reporter))};
    case Fate::silent:
      return {subject, Status(MK_ERROR_REMOTE,
                              format("rank %d does not answer: %s (seen by rank %d)", subject, why, reporter))};
    case Fate::died:
      break;
  }
  return {subject,
          Status(MK_ERROR_REMOTE, format("rank %d is lost: %s (seen by rank %d)", subject, why, reporter))};
}

}  // namespace mk
