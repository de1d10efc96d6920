// SPDX-License-Identifier: MIT
#include "env.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace mk::env {
namespace {

constexpr Variable kVariables[] = {
    {"MK_LOG", "warn", "Log level on standard error: none, error, warn, info, debug."},
    {"MK_SOCKET_IFNAME", "",
     "Network interfaces for the bootstrap: comma-separated prefixes; ^ in front excludes them, = in front "
     "asks for "
     "exact names. Empty: the one that reaches the root, else any but loopback and docker, else any."},
    {"MK_ROOT_PORT", "0", "TCP port on which mk_get_unique_id listens; 0: any free one."},
    {"MK_ROOT_TIMEOUT_MS", "1800000", "How long a root waits for its job's first rank, in ms."},
    {"MK_TRANSPORT", "", "Backend between nodes: rc, srd, loopback, ofi. Empty: automatic."},
    {"MK_SHARE_GPU", "0",
     "1: several ranks may use one GPU, for tests; they must be threads of one process, and max_ctas such that "
     "their "
     "grids fit on it together."},
    {"MK_LOOPBACK_SEED", "0",
     "loopback: 0 delivers in order; another number is the seed of a delivery that splits, reorders and "
     "delays."},
    {"MK_OFI_PROVIDER", "tcp;ofi_rxm", "ofi: libfabric's name of the provider to use; the same on every rank."},
    {"MK_OFI_TIMEOUT_MS", "30000",
     "ofi: a peer that acknowledges nothing for so long, in ms, while something is under way to it is lost."},
    {"MK_VERBS_LIBRARY", "", "rc, srd: the library to load instead of libibverbs.so.1 and libefa.so.1."},
    {"MK_IB_HCA", "",
     "rc, srd: devices to use: comma-separated prefixes of names, each with or without :port; ^ in front "
     "excludes "
     "them, = in front asks for exact names. Empty: all with an active port, those near a rank's GPU first."},
    {"MK_IB_GID_INDEX", "-1", "rc, srd: index of the GID to use; -1: RoCE v2 before v1, IPv4 before IPv6."},
    {"MK_IB_PKEY_INDEX", "0", "rc: index of the partition key."},
    {"MK_IB_TRAFFIC_CLASS", "0", "rc: traffic class of packets with a global header."},
    {"MK_IB_SERVICE_LEVEL", "0", "rc: service level."},
    {"MK_IB_TIMEOUT", "20", "rc: time until a packet is sent again, 4.096 us * 2^value."},
    {"MK_IB_RETRY", "7", "rc: how often a packet is sent again before the link fails."},
    {"MK_IB_SIGNAL", "immediate",
     "rc, srd: how a put's signal travels: immediate (each write carries one, the receiver counts) or "
     "completion "
     "(a write of its own after the data has completed)."},
};

const char* default_of(const char* name) {
  for (const Variable& candidate : kVariables) {
    if (std::strcmp(candidate.name, name) == 0) return candidate.default_value;
  }
  return "";
}

}  // namespace

const Variable* variable(size_t index) { return index < std::size(kVariables) ? &kVariables[index] : nullptr; }

const char* value(const char* name) { return std::getenv(name); }

std::string text(const char* name) {
  const char* set = value(name);
  return set ? set : default_of(name);
}

Result<int64_t> integer(const char* name, int64_t low, int64_t high) {
  const std::string seen = text(name);
  char* end = nullptr;
  errno = 0;
  const long long number = std::strtoll(seen.c_str(), &end, 10);
  if (seen.empty() || *end != '\0' || errno != 0 || number < low || number > high) {
    return Status(MK_ERROR_INVALID_ARGUMENT,
                  format("environment variable %s: expected an integer from %lld to %lld, saw \"%s\"", name,
                         static_cast<long long>(low), static_cast<long long>(high), seen.c_str()));
  }
  return static_cast<int64_t>(number);
}

}  // namespace mk::env
