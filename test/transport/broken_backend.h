// SPDX-License-Identifier: MIT
// The loopback with one fault each, to show that the suite finds it.
#pragma once

#include <span>

#include "transport/transport.h"

namespace mk::test {

enum class Fault {
  signal_before_data,      // the signal goes ahead, the bytes follow a little later
  completion_before_read,  // a put is reported complete before its source is read
  signal_twice,            // now and then a signal is delivered twice
};

std::span<const Backend> broken_backend(Fault fault);

}  // namespace mk::test
