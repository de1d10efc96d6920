// SPDX-License-Identifier: MIT
#pragma once

// What the library shows: the functions of libibverbs and libefa that softnic.map lists.
#define SOFTNIC_EXPORT extern "C" __attribute__((visibility("default")))
