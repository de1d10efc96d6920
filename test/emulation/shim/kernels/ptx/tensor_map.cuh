// SPDX-License-Identifier: MIT
// Of a product: there is none here.
#pragma once

#include "shim/device_words.h"

namespace mk::ptx {

void tensormap_replace_global_dim_1(CUtensorMap* smem_map, uint32_t value);
void tensormap_cp_fenceproxy_release_gpu(CUtensorMap* gmem_map, const CUtensorMap* smem_map);
void fence_proxy_tensormap_acquire_gpu(const CUtensorMap* gmem_map);

}  // namespace mk::ptx
