// SPDX-License-Identifier: MIT
#pragma once

#include <utility>

#include "bootstrap_frame.h"

namespace mk {

// What rank `rank` tells its caller about a loss: the rank that is lost, and the sentence.
std::pair<int, Status> as_loss(const News& news, int rank);

}  // namespace mk
