// SPDX-License-Identifier: MIT
// Nothing of a product runs on the host.
#pragma once
