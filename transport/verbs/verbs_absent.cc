// SPDX-License-Identifier: MIT
// Stands in for rc and srd where the headers of libibverbs were not there.
#include "../rc/rc.h"
#include "../srd/srd.h"
#include "gpu_check.h"

namespace mk {
namespace {

Status absent() {
  return Status(MK_ERROR_UNSUPPORTED,
                "libmkernel was built without the headers of libibverbs (Debian, Ubuntu: libibverbs-dev)");
}

}  // namespace

namespace rc {

Status available() { return absent(); }
Result<std::unique_ptr<Transport>> create(const TransportContext&, Deadline) { return absent(); }
NicSurvey survey(const Topology&, const std::string&) { return {}; }

}  // namespace rc
namespace srd {

Status available() { return absent(); }
Result<std::unique_ptr<Transport>> create(const TransportContext&, Deadline) { return absent(); }
NicSurvey survey(const Topology&, const std::string&) { return {}; }

}  // namespace srd

namespace verbs {

GpuVerdict check_gpu_memory() { return {}; }

}  // namespace verbs
}  // namespace mk
