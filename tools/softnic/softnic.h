// SPDX-License-Identifier: MIT
// What libsoftnic.so offers beyond libibverbs and libefa, for tests: a fault at a chosen moment.
#pragma once

#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

// `fault`: "port_down" or "port_up" (of `port`), "device_fatal", "vanish" (the NIC falls silent), "qp_fatal"
// (of `qp`). `qp` may be null and `port` 0 where they do not matter. Returns 0, or EINVAL.
int softnic_inject(struct ibv_context* context, const char* fault, struct ibv_qp* qp, uint8_t port);

#ifdef __cplusplus
}
#endif
