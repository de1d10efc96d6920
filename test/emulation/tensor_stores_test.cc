// SPDX-License-Identifier: MIT
// Tiles that the copy engine stores, on emulated warps: what comes of them, and that no buffer is filled before
// it has been read.
#include "shim/device_words.h"

#include <memory>
#include <string>

#include "../support/catch.h"
#include "kernels/device/tensor_stores.cuh"
#include "reduced_output.h"

using namespace mk;
using namespace mk::test;

namespace {

constexpr int NUM_WARPS = 4;
constexpr int TILE_COLUMNS = 128;
constexpr int64_t ROWS = 40;  // the third warp has half of its own, the fourth none
constexpr uint64_t EPOCH = 1;

struct Buffers {
  alignas(1024) EpilogueBuffers<2> of_warps[NUM_WARPS];
};

float bias_of(int64_t column) { return static_cast<float>(column % 5); }

std::string stored(GemmType type, bool accumulates, bool has_bias) {
  // Whole chunks of 16 bytes, the last of which ends in the middle of a box; rows are longer.
  const int64_t n = type == GemmType::fp32 ? 196 : 200, ldc = n + 8;
  EpilogueParams params{};
  params.accumulate = accumulates;
  float bias[200];
  for (int64_t column = 0; column < n; ++column) bias[column] = bias_of(column);
  if (has_bias) params.bias = bias;
  params.bias_type = GemmType::fp32;
  ReducedOutput output;
  output.make(ROWS, n, ldc, type, &params);
  const int element_bytes = element_bytes_of(type);
  const ptx::EmulatedOutput boxes = {static_cast<std::byte*>(params.c),
                                     ROWS,
                                     n * element_bytes,
                                     ldc * element_bytes,
                                     element_bytes,
                                     STORE_BOX_ROWS};
  CUtensorMap map{};
  std::memcpy(&map, &boxes, sizeof boxes);
  const auto buffers = std::make_unique<Buffers>();
  emulation::run_ctas(1, NUM_WARPS, [&] {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int m = warp * 16;
    for (int tile = 0; tile < 3; ++tile) {  // the last lies outside
      const int column = tile * TILE_COLUMNS;
      float accumulators[TILE_COLUMNS / 2];
      multiply(accumulators, EPOCH, 0, m, ROWS, column, n);
      store_tile_boxes(accumulators, params, &map, buffers->of_warps[warp], m, static_cast<int>(ROWS), column);
    }
    await_stored_boxes();
    __syncwarp();
    std::memset(&buffers->of_warps[warp], 0xff, sizeof buffers->of_warps[warp]);
    emulation::bulk_copies().complete_stores(0);  // as a launch that ends does
  });
  return output.wrong(accumulates, [&](int64_t row, int64_t column) {
    return partial(EPOCH, 0, row, column) + (has_bias ? bias_of(column) : 0);
  });
}

}  // namespace

TEST_CASE("boxes bring all of a tile that lies in the output, and nothing beside it") {
  for (const GemmType type : {GemmType::bf16, GemmType::fp16, GemmType::fp32}) {
    for (const bool accumulates : {false, true}) {
      for (const bool has_bias : {false, true}) {
        INFO("type " << static_cast<int>(type) << (accumulates ? ", added to" : "")
                     << (has_bias ? ", bias" : ""));
        CHECK(stored(type, accumulates, has_bias) == "");
      }
    }
  }
}
