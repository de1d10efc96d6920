// SPDX-License-Identifier: MIT
#include "roofline.h"
#include "test/support/catch.h"

using namespace perf;

namespace {

UnfusedShape shape_of(Collective collective, int64_t m, int64_t n, int64_t k) {
  UnfusedShape shape;
  shape.collective = collective;
  shape.m = m;
  shape.n = n;
  shape.k = k;
  return shape;
}

}  // namespace

TEST_CASE("bytes of the busiest rank") {
  // 1024 rows of 8192 bf16 to three others.
  CHECK(link_bytes(shape_of(Collective::kAllGather, 4096, 512, 8192), 4) == 3.0 * 1024 * 8192 * 2);
  CHECK(link_bytes(shape_of(Collective::kReduceScatter, 4096, 512, 8192), 4) == 3.0 * 1024 * 512 * 2);
  CHECK(link_bytes(shape_of(Collective::kAllReduce, 4096, 512, 8192), 4) == 3.0 * 1024 * 512 * (2 + 2));
  CHECK(link_bytes(shape_of(Collective::kAllGather, 4096, 512, 8192), 1) == 0);
  // 37 rows over 4 ranks: ten of them on the busiest.
  CHECK(link_bytes(shape_of(Collective::kAllGather, 37, 1, 8), 4) == 3.0 * 10 * 8 * 2);
  // Mode WGRAD gathers rows of n columns.
  UnfusedShape gradient = shape_of(Collective::kAllGather, 4096, 512, 8192);
  gradient.is_wgrad = true;
  CHECK(link_bytes(gradient, 4) == 3.0 * 1024 * 512 * 2);
  UnfusedShape wide = shape_of(Collective::kAllReduce, 8, 16, 1);
  wide.dtypes = {MK_DTYPE_BF16, MK_DTYPE_FP32, MK_DTYPE_BF16};
  CHECK(link_bytes(wide, 2) == 4.0 * 16 * (2 + 4));
  wide.dtypes.comm_dtype = MK_DTYPE_FP32;
  wide.collective = Collective::kReduceScatter;
  CHECK(link_bytes(wide, 2) == 4.0 * 16 * 4);
}

TEST_CASE("the roofline is the slower of the faster product and the link") {
  // 16384 rows on 4 GPUs: 402 MB at 370 GB/s, as in the tables of docs/performance.md.
  const double bytes = link_bytes(shape_of(Collective::kAllGather, 16384, 4096, 16384), 4);
  CHECK(transfer_us(bytes, 370) > 1087);
  CHECK(transfer_us(bytes, 370) < 1089);
  CHECK(roofline_us(3.0, 2.0, 1.0) == 2.0);
  CHECK(roofline_us(2.0, 3.0, 1.0) == 2.0);
  CHECK(roofline_us(2.0, 3.0, 4.0) == 4.0);
  CHECK(roofline_us(2.0, std::nullopt, 1.0) == 2.0);
  CHECK(roofline_us(std::nullopt, 3.0, 1.0) == 3.0);
  CHECK(!roofline_us(std::nullopt, std::nullopt, 1.0));
  CHECK(!roofline_us(2.0, 3.0, std::nullopt));
}

TEST_CASE("a link of 18 NVLinks that carries less than 350 GB/s is slow") {
  CHECK(is_slow_link({349, 340}, 18));
  CHECK(!is_slow_link({340, 351}, 18));
  CHECK(!is_slow_link({349, 340}, 12));
  CHECK(!is_slow_link({349, 340}, 0));
}
