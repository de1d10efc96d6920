// SPDX-License-Identifier: MIT
// Tiles of ring attention that are cut along their keys, on emulated warps: parts of known numbers are stored
// as a consumer stores them, by CTAs that take them in turn, and joined by all of them, launch after launch.
#include "shim/device_words.h"

#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "../support/catch.h"
#include "kernels/ops/ring_attention/cuda_params.h"
#include "kernels/ops/ring_attention/cuda_parts.cuh"

namespace mk::test {
namespace {

using namespace ring_attention;

template <int HEAD_DIM_, int BLOCK_M_>
struct Config {
  using Element = __nv_bfloat16;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int BLOCK_M = BLOCK_M_;
  static constexpr int NUM_CONSUMER_WARPS = BLOCK_M / 16;
};

constexpr int NUM_CTAS = 3;
constexpr int HEADS = 2;
constexpr int GUARD_ROWS = 8;        // behind the last
constexpr uint16_t POISON = 0x7fff;  // NaN
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// What a row of a part comes to; of some parts and some whole rows nothing is seen.
float maximum_of(int epoch, int slot, int row, bool is_masked_row) {
  if (is_masked_row || (slot + row) % 7 == 3) return -INFINITE;
  return static_cast<float>((slot * 5 + row * 3 + epoch) % 11) - 5.0f;
}
float sum_of(int slot, int row) { return 1.0f + static_cast<float>((slot + row) % 4); }
float output_of(int epoch, int slot, int row, int column) {
  return static_cast<float>((slot * 3 + row * 7 + column * 5 + epoch) % 17) - 8.0f;
}

template <class Config>
class Launches {
 public:
  // Two stretches of cut tiles behind whole ones.
  Launches(int seq, int dim) : seq_(seq), dim_(dim) {
    const CudaSlices slices = {seq, 1, seq, false, false};
    params_.tiles = {slices, 0, 1, HEADS, 1, Config::BLOCK_M};
    const int num_tiles = params_.tiles.size();
    params_.items.num_stretches = 3;
    params_.items.stretches[0] = {0, 0, 0, 0, 1};
    params_.items.stretches[1] = {1, 1, 0, 0, 3};
    params_.items.stretches[2] = {2, 4, 3, 1, 2};
    params_.items.num_cuts = num_tiles - 1;
    params_.items.num_items = 4 + 2 * (num_tiles - 2);
    const size_t num_slots = 3 + 2 * (static_cast<size_t>(num_tiles) - 2);
    partials_.resize(STAGING_FLAGS_BYTES + num_slots * PART_PLACES<Config>.part_bytes());
    outputs_.resize(static_cast<size_t>(HEADS) * (seq + GUARD_ROWS) * dim);
    lse_.resize(static_cast<size_t>(HEADS) * seq + GUARD_ROWS);
    params_.comm.partials = partials_.data();
    params_.comm.staging = partials_.data() + STAGING_FLAGS_BYTES;
    params_.dim = dim;
    params_.scale_log2 = 0.5f;
    params_.o = reinterpret_cast<std::byte*>(outputs_.data());
    params_.o_row_bytes = HEADS * dim * 2;
    params_.o_head_bytes = dim * 2;
    params_.lse = lse_.data();
    params_.lse_rows = seq;
  }

  // "" or what is wrong.
  std::string run(int epoch) {
    std::fill(outputs_.begin(), outputs_.end(), POISON);
    std::fill(lse_.begin(), lse_.end(), std::nanf(""));
    std::fill(partials_.begin() + STAGING_FLAGS_BYTES, partials_.end(), std::byte{0xff});
    std::vector<std::atomic<int>> tickets(Config::NUM_CONSUMER_WARPS);  // of each warp: CTAs need not agree
    emulation::run_ctas(NUM_CTAS, Config::NUM_CONSUMER_WARPS, [&] {
      const int warp = static_cast<int>(threadIdx.x / 32);
      for (;;) {
        int item = 0;
        if (threadIdx.x % 32 == 0) item = tickets[static_cast<size_t>(warp)]++;
        item = __shfl_sync(~0u, item, 0);
        if (item >= params_.items.num_items) break;
        const QueryItem work = params_.items.at(item);
        if (work.num_parts > 1) store(epoch, work, warp);
      }
      join_tiles<Config>(params_, warp, NUM_CTAS);
    });
    for (size_t at = 0; at < STAGING_FLAGS_BYTES; ++at)
      if (partials_[at] != std::byte{0}) return "a counter is left behind";
    for (int item = 1; item < params_.items.num_items; ++item) {
      const QueryItem work = params_.items.at(item);
      if (work.part > 0) continue;
      const QueryTile tile = params_.tiles.at(work.tile);
      for (int row = 0; row < tile.num_rows; ++row) {
        if (const std::string wrong = wrong_row(epoch, work, tile, row); !wrong.empty()) return wrong;
      }
    }
    for (size_t at = static_cast<size_t>(HEADS) * seq_ * dim_; at < outputs_.size(); ++at)
      if (outputs_[at] != POISON) return "a row behind the last is written";
    for (size_t at = static_cast<size_t>(HEADS) * seq_; at < lse_.size(); ++at)
      if (!std::isnan(lse_[at])) return "lse is written behind its end";
    const QueryTile whole = params_.tiles.at(0);
    for (int row = 0; row < whole.num_rows; ++row)
      if (!std::isnan(lse_[static_cast<size_t>(whole.head * seq_ + whole.row + row)]))
        return "a whole tile is joined";
    return "";
  }

 private:
  static bool is_masked(const QueryItem& work, int row) { return (work.tile + row) % 13 == 5; }

  void store(int epoch, const QueryItem& work, int warp) {
    const int lane = static_cast<int>(threadIdx.x % 32), first = warp * 16 + lane / 4;
    float outputs[Config::HEAD_DIM / 2];
    SoftmaxRows rows;
    for (int i = 0; i < 2; ++i) {
      const int row = first + 8 * i;
      rows.maximum[i] = maximum_of(epoch, work.slot, row, is_masked(work, row));
      rows.sum[i] = sum_of(work.slot, row);
      for (int j = 0; j < Config::HEAD_DIM / 8; ++j) {
        for (int k = 0; k < 2; ++k)
          outputs[4 * j + 2 * i + k] = output_of(epoch, work.slot, row, 8 * j + 2 * (lane % 4) + k);
      }
    }
    store_part<Config>(params_.comm, place_of(work), first, outputs, rows);
  }

  std::string wrong_row(int epoch, const QueryItem& first, const QueryTile& tile, int row) const {
    double maximum = -INFINITE, sum = 0;
    std::vector<double> expected(static_cast<size_t>(dim_));
    for (int part = 0; part < first.num_parts; ++part)
      maximum = std::max<double>(maximum, maximum_of(epoch, first.slot + part, row, is_masked(first, row)));
    for (int part = 0; part < first.num_parts && maximum > -INFINITE; ++part) {
      const int slot = first.slot + part;
      const double factor = std::exp2(0.5 * (maximum_of(epoch, slot, row, is_masked(first, row)) - maximum));
      sum += factor * sum_of(slot, row);
      for (int column = 0; column < dim_; ++column)
        expected[static_cast<size_t>(column)] += factor * output_of(epoch, slot, row, column);
    }
    const size_t at = static_cast<size_t>(tile.head) * seq_ + tile.row + row;
    const double lse = maximum == -INFINITE ? maximum : maximum * 0.5 * std::log(2.0) + std::log(sum);
    const std::string where = "tile " + std::to_string(first.tile) + ", row " + std::to_string(row);
    if (!(lse_[at] == lse || std::abs(lse_[at] - lse) < 1e-5))
      return where + ": lse " + std::to_string(lse_[at]);
    for (int column = 0; column < dim_; ++column) {
      const uint32_t bits =
          uint32_t{outputs_[((static_cast<size_t>(tile.row) + row) * HEADS + tile.head) * dim_ + column]} << 16;
      const double seen = std::bit_cast<float>(bits);
      const double wanted = sum > 0 ? expected[static_cast<size_t>(column)] / sum : 0;
      if (!(std::abs(seen - wanted) <= std::abs(wanted) / 200 + 1e-6))
        return where + ", column " + std::to_string(column) + ": " + std::to_string(seen) + " for " +
               std::to_string(wanted);
    }
    return "";
  }

  const int seq_, dim_;
  CudaParams params_{};
  std::vector<std::byte> partials_;
  std::vector<uint16_t> outputs_;
  std::vector<float> lse_;
};

template <class Config>
void check_launches(int seq, int dim) {
  Launches<Config> launches(seq, dim);
  for (int epoch = 1; epoch <= 3; ++epoch) {
    INFO("seq " << seq << ", dim " << dim << ", launch " << epoch);
    REQUIRE(launches.run(epoch) == "");
  }
}

}  // namespace

TEST_CASE("parts are joined in their order, rows that nobody stored untouched, and counters end as 0") {
  check_launches<Config<128, 128>>(300, 128);
  check_launches<Config<128, 128>>(256, 72);
  check_launches<Config<64, 192>>(500, 64);
}

}  // namespace mk::test
