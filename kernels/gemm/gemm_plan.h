// SPDX-License-Identifier: MIT
// How a product is cut up for a device: pure host code, shape in, configuration out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "kernels/device/gemm_cluster.h"

namespace mk {

enum class GemmType : int { bf16 = 1, fp16 = 2, fp32 = 3 };

// C[m, n] = A[m, k] B[k, n]. All of it global, none of it addresses: equal shapes get equal plans.
struct GemmShape {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  GemmType in_type = GemmType::bf16;
  GemmType out_type = GemmType::bf16;
  bool a_transposed = false;  // A is [k, m] row-major
  bool b_transposed = false;  // B is [n, k] row-major
  bool accumulate = false;    // C += A B, the sum in fp32 and rounded once
};

struct GemmPlan {
  int block_m = 0;
  int block_n = 0;
  bool ping_pong = false;
  int num_split_ctas = 1;      // of a cluster, which share a tile's inner dimension and add up what they have
  GemmCluster cluster;         // of CTAs with a tile each, which share what they load
  bool is_swapped = false;     // tiles have block_m of B's columns and block_n of A's rows
  int num_workers = 0;         // CTAs, or clusters of these
  int num_streamk_tiles = 0;   // tiles that are cut along k; the rest are whole
  int group_m = 1;             // raster: see TileRaster
  size_t workspace_bytes = 0;  // 0 unless tiles are cut, or so many that CTAs are kept in step
  double predicted_us = 0;     // the model's time, by which this plan was chosen

  bool in_clusters() const { return cluster.m * cluster.n > 1; }
  bool is_ping_pong_pair() const { return ping_pong && in_clusters(); }
  // The tiles that a cluster has together.
  int cluster_rows() const { return block_m * cluster.m; }
  int cluster_columns() const { return block_n * cluster.n; }
  int num_cluster_ctas() const { return num_split_ctas * cluster.m * cluster.n; }
  int num_ctas() const { return num_workers * num_cluster_ctas(); }
};

struct GemmTile {
  int block_m;
  int block_n;
  bool ping_pong;  // see GemmConfig
  GemmCluster cluster = {};
};
// The tiles that kernels exist for, in the order of their tables.
constexpr GemmTile GEMM_TILES[] = {{128, 256, false}, {256, 160, false}, {128, 224, false},
                                   {128, 192, false}, {128, 160, true},  {128, 128, true},
                                   {64, 128, false},  {64, 64, false},   {128, 128, true, {1, 2}}};
constexpr int NUM_GEMM_TILES = sizeof(GEMM_TILES) / sizeof(GEMM_TILES[0]);
// The same of the kernels whose clusters split the inner dimension.
constexpr GemmTile GEMM_SPLIT_TILES[] = {{128, 192, false}, {128, 128, false}, {64, 64, false}};
constexpr int NUM_GEMM_SPLIT_TILES = sizeof(GEMM_SPLIT_TILES) / sizeof(GEMM_SPLIT_TILES[0]);
constexpr int MAX_SPLIT_CTAS = 4;
// And of those whose CTAs are in pairs.
constexpr GemmTile GEMM_PAIR_TILES[] = {
    {128, 160, false}, {128, 128, false}, {128, 96, false}, {128, 80, false}};
constexpr int NUM_GEMM_PAIR_TILES = sizeof(GEMM_PAIR_TILES) / sizeof(GEMM_PAIR_TILES[0]);
// And of those whose operands are in each other's place, of B's columns, and of A's rows; their clusters split
// the inner dimension, or their CTAs share what they load.
struct GemmSwappedTile {
  int block_m;
  int block_n;
  GemmCluster cluster;
};
constexpr GemmSwappedTile GEMM_SWAPPED_TILES[] = {
    {128, 160, {1, 1}}, {128, 72, {1, 2}},  {128, 80, {1, 2}},  {128, 96, {1, 2}},  {128, 104, {1, 2}},
    {128, 112, {1, 2}}, {128, 128, {1, 2}}, {128, 144, {1, 2}}, {128, 152, {1, 2}}, {128, 160, {1, 2}},
    {128, 176, {1, 2}}, {128, 192, {1, 2}}, {128, 216, {1, 2}}, {128, 240, {1, 2}}, {256, 104, {1, 2}},
    {256, 152, {1, 2}}, {256, 176, {1, 2}}, {64, 104, {4, 1}},  {64, 120, {4, 1}},  {64, 128, {4, 1}},
    {64, 144, {4, 1}},  {64, 168, {4, 1}},  {128, 104, {4, 1}}, {128, 136, {4, 1}}, {128, 160, {4, 1}},
    {128, 208, {4, 1}}, {256, 160, {1, 1}}};
constexpr int NUM_GEMM_SWAPPED_TILES = sizeof(GEMM_SWAPPED_TILES) / sizeof(GEMM_SWAPPED_TILES[0]);
constexpr int MAX_CLUSTER_CTAS = 4;
constexpr int SPLIT_CHUNK_COLUMNS = 32;  // of a tile that is split, what a CTA adds up at a time
constexpr int GEMM_BLOCK_K = 64;

// Of a swapped tile: can the CTAs of a cluster share its inner dimension? Otherwise its kernel walks: a cluster
// may have several of them, whole or cut along k as others are.
constexpr bool gemm_swapped_tile_splits(const GemmSwappedTile& tile) {
  return tile.block_m <= 128 && tile.block_n % SPLIT_CHUNK_COLUMNS == 0;
}
constexpr bool gemm_swapped_tile_walks(const GemmSwappedTile& tile) {
  return tile.block_m > 64 && !gemm_swapped_tile_splits(tile);
}

// How many clusters of so many CTAs, each with an SM to itself, run at a time: which SMs lie together may
// differ from chip to chip.
struct GemmClusterLimits {
  int at_a_time[MAX_CLUSTER_CTAS + 1] = {};
};

// The best plan on `num_sms` multiprocessors (all or those the caller may use), by a model of its time.
GemmPlan gemm_plan(const GemmShape& shape, int num_sms, const GemmClusterLimits& limits);

// The plan with a given tile and number of tiles cut along k (-1: none; tests and tuning), among up to so many
// CTAs, all of which run at a time.
GemmPlan gemm_plan_with(const GemmShape& shape, int num_sms, GemmTile tile, int num_streamk_tiles);
// What tiles take longer than the plan's predicted_us says where they are stored at once: in ping-pong with few
// k-steps, and where C is fp32 or added to.
double gemm_plan_exposed_us(const GemmShape& shape, const GemmPlan& plan);

// The plan with a given tile whose inner dimension `num_split_ctas` CTAs share, all tiles at once.
GemmPlan gemm_split_plan_with(const GemmShape& shape, GemmTile tile, int num_split_ctas);
// The best of these; num_split_ctas 1: none can be, or the product has not few rows.
GemmPlan gemm_split_plan(const GemmShape& shape, int num_sms, const GemmClusterLimits& limits);

// The same in pairs, whose inner dimension may be split among two.
GemmPlan gemm_pair_plan_with(const GemmShape& shape, GemmTile tile, int num_split_ctas);
// The best of these, split among up to `most_split_ctas`; not in clusters: there is none.
GemmPlan gemm_pair_plan(const GemmShape& shape, int num_sms, const GemmClusterLimits& limits,
                        int most_split_ctas = 2);

// The product as a swapped plan has it: m is n, and n is m.
GemmShape swapped(const GemmShape& shape);
// The plan with a tile that walks, among up to so many CTAs or clusters; not for a transposed A.
GemmPlan gemm_swapped_plan_with(const GemmShape& shape, int most_workers, GemmSwappedTile tile,
                                int num_streamk_tiles);
// Whether there is a cluster of such tiles with so many CTAs to a tile.
bool gemm_swapped_tile_can_have(GemmSwappedTile tile, int num_split_ctas);
// The plan with one of GEMM_SWAPPED_TILES, all tiles at once.
GemmPlan gemm_swapped_cluster_plan_with(const GemmShape& shape, GemmSwappedTile tile, int num_split_ctas);
// The best of these with one of `tiles`, each split among up to `most_split_ctas`; not swapped: there is none.
GemmPlan gemm_swapped_cluster_plan(const GemmShape& shape, std::span<const GemmSwappedTile> tiles,
                                   int most_split_ctas, int num_sms, const GemmClusterLimits& limits);

// The best of plans with those of `tiles` that walk in clusters, more of them than run at a time, whole or,
// with `cuts`, some cut along k; not swapped: there is none.
GemmPlan gemm_swapped_waves_plan(const GemmShape& shape, std::span<const GemmSwappedTile> tiles, bool cuts,
                                 int num_sms, const GemmClusterLimits& limits);

// Whether all clusters of a plan run at the same time.
bool gemm_plan_fits_at_once(const GemmPlan& plan, int num_sms, const GemmClusterLimits& limits);

// From one tile's columns to the next one's: all of block_n or, where operands are in each other's place, as
// many as share the rows out evenly.
int gemm_plan_tile_columns(const GemmShape& shape, const GemmPlan& plan);

// In tables of plans, behind the tile: p ping-pong, s swapped, and c with the tiles of a cluster that shares
// what it loads, as c1x2.
std::string gemm_plan_kind(const GemmPlan& plan);

// What no plan's workspace exceeds.
size_t gemm_max_workspace_bytes(int num_sms);

// How many of an operand's `rows` a box of TMA has, where tiles have `block_rows` of them: all of a tile's, or
// of the operand where it has fewer; a part of a tile's, if else the last tile's box would have many outside.
int stage_box_rows(int64_t rows, int block_rows);

// The number of tiles, or of clusters' tiles, that a plan's workers share out.
int64_t gemm_plan_num_tiles(const GemmShape& shape, const GemmPlan& plan);

}  // namespace mk
