// SPDX-License-Identifier: MIT
// Words for numbers.
#include <infiniband/verbs.h>

#include <array>

#include "export.h"

namespace {

template <size_t N>
const char* word(const std::array<const char*, N>& words, int index) {
  return index >= 0 && static_cast<size_t>(index) < N ? words[static_cast<size_t>(index)] : "unknown";
}

constexpr std::array kStatus = {"success",
                                "local length error",
                                "local QP operation error",
                                "local EE context operation error",
                                "local protection error",
                                "work request flushed error",
                                "memory bind operation error",
                                "bad response error",
                                "local access error",
                                "remote invalid request error",
                                "remote access error",
                                "remote operation error",
                                "transport retry counter exceeded",
                                "RNR retry counter exceeded",
                                "local RDD violation error",
                                "remote invalid RD request",
                                "remote aborted error",
                                "invalid EE context number",
                                "invalid EE context state",
                                "fatal error",
                                "response timeout error",
                                "general error",
                                "tag matching error",
                                "tag matching rendezvous incomplete"};

constexpr std::array kEvent = {"CQ error",
                               "local work queue catastrophic error",
                               "invalid request local work queue error",
                               "local access violation work queue error",
                               "communication established",
                               "send queue drained",
                               "path migrated",
                               "path migration request error",
                               "local catastrophic error",
                               "port active",
                               "port error",
                               "LID change",
                               "P_Key change",
                               "SM change",
                               "SRQ catastrophic error",
                               "SRQ limit reached",
                               "last WQE reached",
                               "client reregistration",
                               "GID table change",
                               "WQ fatal error"};

constexpr std::array kNode = {"unknown",           "InfiniBand channel adapter",
                              "InfiniBand switch", "InfiniBand router",
                              "iWARP NIC",         "usNIC",
                              "usNIC UDP",         "unspecified"};

constexpr std::array kPort = {"no state change", "down", "init", "armed", "active", "active defer"};

}  // namespace

SOFTNIC_EXPORT const char* ibv_wc_status_str(ibv_wc_status status) { return word(kStatus, status); }
SOFTNIC_EXPORT const char* ibv_event_type_str(ibv_event_type event) { return word(kEvent, event); }
SOFTNIC_EXPORT const char* ibv_node_type_str(ibv_node_type type) { return word(kNode, type); }
SOFTNIC_EXPORT const char* ibv_port_state_str(ibv_port_state state) { return word(kPort, state); }
SOFTNIC_EXPORT int ibv_fork_init(void) { return 0; }
