// SPDX-License-Identifier: MIT
// When the host has to flush what a NIC has written to a GPU's memory.
#include "kernels/cuda/write_flush.h"

#include "test/support/catch.h"

using mk::write_flush;
using mk::WriteFlush;

TEST_CASE("writes are flushed where the GPU does not see them in order") {
  CHECK(write_flush(200, 0) == WriteFlush::none);
  CHECK(write_flush(100, 3) == WriteFlush::none);
  CHECK(write_flush(0, 1) == WriteFlush::by_driver);
  CHECK(write_flush(0, 3) == WriteFlush::by_driver);
  CHECK(write_flush(0, 2) == WriteFlush::impossible);
  CHECK(write_flush(0, 0) == WriteFlush::impossible);
}
