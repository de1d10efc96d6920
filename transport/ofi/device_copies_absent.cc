// SPDX-License-Identifier: MIT
#include "device_copies.h"

namespace mk::ofi {

std::unique_ptr<DeviceCopies> make_device_copies() { return nullptr; }

}  // namespace mk::ofi
