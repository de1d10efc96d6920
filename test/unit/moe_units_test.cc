// SPDX-License-Identifier: MIT
// The mixture-of-experts operators on GPUs, as far as they are functions of counts: every row is pushed once
// and lands where it belongs, every block's flag is raised once, by whom the waiting ones expect; and the plan.
#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/cuda/moe_plan.h"
#include "kernels/device/grouped_tiles.h"
#include "kernels/ops/moe_dispatch_gemm/push_units.h"
#include "kernels/ops/moe_gemm_combine/push_units.h"
#include "test/support/catch.h"

namespace {

using namespace mk;

MoeCall make_call(mk_operator_t op, int experts, int topk) {
  MoeCall call;
  call.op = op;
  call.hidden = 64;
  call.inter = 64;
  call.experts = experts;
  call.topk = topk;
  call.capacity_rows = 1 << 16;
  return call;
}

// How many rows each rank sends to each expert, as all ranks know it, and the order of rows.
struct Job {
  int nranks;
  int experts;
  std::vector<std::vector<uint32_t>> rows;  // [source][expert]
  std::vector<uint64_t> blocks;             // of counts

  Job(int nranks_in, int experts_in, std::mt19937& random) : nranks(nranks_in), experts(experts_in) {
    const int spread = static_cast<int>(random() % 4);
    const moe::CudaRouting layout = routing(0);
    blocks.resize(static_cast<size_t>(layout.block_bytes) * nranks / 8 + 1);
    for (int source = 0; source < nranks; ++source) {
      rows.emplace_back();
      auto* numbers = reinterpret_cast<uint32_t*>(reinterpret_cast<std::byte*>(blocks.data()) +
                                                  source * layout.block_bytes + sizeof(moe::CountsHead));
      for (int expert = 0; expert < experts; ++expert) {
        const uint32_t limits[] = {1, 5, 70, 700};
        const uint32_t count = spread == 0 && expert + 1 < experts ? 0 : random() % (limits[spread] + 1);
        rows.back().push_back(count);
        numbers[expert] = count;
      }
    }
  }

  moe::CudaRouting routing(int rank) const {
    static mk_moe_routing_t record;
    MoeCall call = make_call(MK_OPERATOR_MOE_DISPATCH_GEMM, experts, 2);
    call.routing = &record;
    call.routing_bytes = 1 << 20;
    return cuda_routing(call, rank, nranks);
  }
  moe::Counts counts(const moe::CudaRouting& of) const {
    return {of, reinterpret_cast<const std::byte*>(blocks.data())};
  }
  // The first row from `source` for an expert, among the rows of the expert's rank.
  uint32_t place(int source, int expert) const {
    const moe::CudaRouting of = routing(0);
    uint32_t row = 0;
    for (int before = of.first_expert(expert / of.experts_per_rank); before < expert; ++before) {
      for (int other = 0; other < nranks; ++other) row += rows[other][before];
    }
    for (int other = 0; other < source; ++other) row += rows[other][expert];
    return row;
  }
  // The first row of an expert, among those of a source's tokens.
  uint32_t position(int source, int expert) const {
    uint32_t row = 0;
    for (int before = 0; before < expert; ++before) row += rows[source][before];
    return row;
  }
};

void scan(uint32_t* values, int count) {
  uint32_t sum = 0;
  for (int i = 0; i < count; ++i) sum += std::exchange(values[i], sum);
  values[count] = sum;
}

std::unique_ptr<moe_dispatch_gemm::Tables> dispatch_tables(const Job& job, int rank, uint32_t unit_rows) {
  auto tables = std::make_unique<moe_dispatch_gemm::Tables>();
  const moe::CudaRouting routing = job.routing(rank);
  for (int expert = 0; expert < job.experts; ++expert)
    count_expert(routing, job.counts(routing), unit_rows, expert, *tables);
  for (uint32_t* sums : {tables->rows, tables->blocks, tables->own_rows, tables->units})
    scan(sums, job.experts);
  return tables;
}

std::unique_ptr<moe_gemm_combine::Tables> combine_tables(const Job& job, int rank, uint32_t unit_rows) {
  auto tables = std::make_unique<moe_gemm_combine::Tables>();
  const moe::CudaRouting routing = job.routing(rank);
  const int first = routing.first_expert(rank), count = routing.num_experts(rank);
  fill_homes(
      routing, 0, *tables, [](int) { return false; }, [&](int home) { return home == rank; });
  for (int local = 0; local < count; ++local)
    count_expert(routing, job.counts(routing), unit_rows, local, *tables);
  for (uint32_t* sums : {tables->rows, tables->blocks, tables->rounds}) scan(sums, count);
  for (int home = 0; home < job.nranks; ++home) {
    tables->collector[home] = static_cast<uint8_t>(home);
    uint32_t row = 0, block = 0;
    for (int expert = 0; expert <= job.experts; ++expert) {
      if (home == rank) tables->home_rows[expert] = row, tables->home_blocks[expert] = block;
      if (expert == job.experts) break;
      if (expert >= first && expert < first + count) {
        tables->peer_rows[(expert - first) * job.nranks + home] = row;
        tables->peer_blocks[(expert - first) * job.nranks + home] = block;
      }
      row += job.rows[home][expert];
      block += moe::num_row_blocks(job.rows[home][expert]);
    }
  }
  for (int local = 0; local < count; ++local) keep_rows(routing, job.counts(routing), local, rank, *tables);
  return tables;
}

// Every row of every source, by the units that its push warps take: (rank, row) -> (source, position).
void check_dispatch(const Job& job, uint32_t unit_rows) {
  std::map<std::pair<int, uint32_t>, std::pair<int, uint32_t>> landed;
  std::map<std::tuple<int, uint32_t, int>, uint32_t> units_left;  // (rank, block, source)
  for (int source = 0; source < job.nranks; ++source) {
    const moe::CudaRouting routing = job.routing(source);
    const auto tables = dispatch_tables(job, source, unit_rows);
    moe::Turns turns;
    fill_turns(routing, *tables, turns);
    int rank = 0;
    uint32_t index = 0, turn = 0;
    for (; turns.at(turn, &rank, &index); ++turn) {
      const auto unit = unit_of(routing, unit_rows, *tables, rank, index);
      REQUIRE(unit.num_rows > 0);
      REQUIRE(unit.num_rows <= unit_rows);
      for (uint32_t i = 0; i < unit.num_rows; ++i) {
        const auto [at, is_new] = landed.insert({{rank, unit.row + i}, {source, unit.position + i}});
        REQUIRE(is_new);
      }
      REQUIRE(static_cast<int>(unit.note >> 48) == rank);
      const auto block = static_cast<uint32_t>(unit.note);
      const uint32_t expected = static_cast<uint32_t>(unit.note >> 32) & 0xffff;
      const auto [left, is_first] = units_left.insert({{rank, block, source}, expected});
      REQUIRE(left->second > 0);
      --left->second;
    }
    REQUIRE(turn == tables->units[job.experts]);
  }
  size_t num_rows = 0;
  for (int source = 0; source < job.nranks; ++source) {
    const moe::CudaRouting routing = job.routing(source);
    for (int expert = 0; expert < job.experts; ++expert) {
      const int rank = expert / routing.experts_per_rank;
      for (uint32_t i = 0; i < job.rows[source][expert]; ++i, ++num_rows) {
        const auto found = landed.find({rank, job.place(source, expert) + i});
        REQUIRE(found != landed.end());
        REQUIRE(found->second == std::pair(source, job.position(source, expert) + i));
      }
    }
  }
  REQUIRE(num_rows == landed.size());
  // Whom a block's tiles wait for: as the kernel's wait_block().
  std::set<std::tuple<int, uint32_t, int>> awaited;
  for (int rank = 0; rank < job.nranks; ++rank) {
    const moe::CudaRouting routing = job.routing(rank);
    const auto tables = dispatch_tables(job, rank, unit_rows);
    const int first = routing.first_expert(rank);
    for (int expert = first; expert < routing.first_expert(rank + 1); ++expert) {
      const uint32_t num_blocks = tables->blocks[expert + 1] - tables->blocks[expert];
      for (uint32_t block = 0; block < num_blocks; ++block) {
        uint32_t begin = 0;
        for (int source = 0; source < job.nranks; ++source) {
          const moe::RowSegment segment{begin, job.rows[source][expert]};
          if (segment.in_block(block).count > 0)
            awaited.insert({rank, tables->blocks[expert] - tables->blocks[first] + block, source});
          begin = segment.end();
        }
      }
    }
  }
  for (const auto& [key, left] : units_left) {
    REQUIRE(left == 0);
    REQUIRE(awaited.count(key) == 1);
  }
  REQUIRE(awaited.size() == units_left.size());
}

void check_combine(const Job& job, uint32_t unit_rows) {
  const moe_gemm_combine::CudaLayout layout{0, 16};
  std::map<std::pair<int, int64_t>, std::pair<int, int64_t>> landed;  // (home, row) -> (rank, row computed)
  std::map<std::pair<int, uint32_t>, uint32_t> units_left;            // (home, block)
  for (int rank = 0; rank < job.nranks; ++rank) {
    const moe::CudaRouting routing = job.routing(rank);
    const auto tables = combine_tables(job, rank, unit_rows);
    const int num_experts = routing.num_experts(rank);
    const int64_t products = layout.product_row(tables->home_rows[job.experts], 0);
    std::map<uint32_t, std::pair<int, uint32_t>> counted;  // place of a count -> (home, block)
    for (uint32_t turn = 0; num_experts > 0 && turn < num_turns(routing, *tables); ++turn) {
      const auto unit = unit_of(routing, layout, unit_rows, *tables, job.counts(routing), turn);
      if (unit.num_bytes == 0) continue;
      const int64_t row = (unit.from - products) / layout.row_bytes;
      const int64_t num_rows = unit.num_bytes / layout.row_bytes;
      for (int64_t i = 0; i < num_rows; ++i) {
        const auto [at, is_new] = landed.insert({{unit.rank, unit.to / layout.row_bytes + i}, {rank, row + i}});
        REQUIRE(is_new);
        // It waits for the block of each of its rows.
        const int expert = moe::find_interval(tables->rows, num_experts, static_cast<uint32_t>(row + i));
        const uint32_t block = tables->blocks[expert] + (row + i - tables->rows[expert]) / moe::BLOCK_ROWS;
        REQUIRE(block >= unit.first_block);
        REQUIRE(block < unit.first_block + unit.num_blocks);
      }
      REQUIRE(unit.rank != rank);
      REQUIRE(static_cast<int>(unit.note >> 56) == unit.rank);
      const uint32_t block = unit.note >> 24 & 0xffffff;
      const auto [left, is_first] =
          units_left.insert({{unit.rank, block}, static_cast<uint32_t>(unit.note >> 48 & 0xff)});
      REQUIRE(left->second > 0);
      --left->second;
      const auto [place, is_place_new] =
          counted.insert({static_cast<uint32_t>(unit.note & 0xffffff), {unit.rank, block}});
      REQUIRE(place->second == std::pair(unit.rank, block));
      REQUIRE(place->first < moe_gemm_combine::HALF_FLAGS);
    }
  }
  size_t num_rows = 0;
  std::set<std::pair<int, uint32_t>> awaited;
  for (int home = 0; home < job.nranks; ++home) {
    const auto tables = combine_tables(job, home, unit_rows);
    const moe::CudaRouting routing = job.routing(home);
    for (int expert = 0; expert < job.experts; ++expert) {
      for (uint32_t slot = 0; slot < job.rows[home][expert]; ++slot) {
        if (expert / routing.experts_per_rank == home) {
          const auto its = kept_row(routing, *tables, expert, home, slot);
          const int64_t row = int64_t{job.place(home, expert)} + slot;
          const int local = expert - routing.first_expert(home);
          REQUIRE(its.row == tables->home_rows[job.experts] + row);
          REQUIRE(its.block == tables->blocks[local] + (row - tables->rows[local]) / moe::BLOCK_ROWS);
          continue;
        }
        ++num_rows;
        const auto found = landed.find({home, tables->home_rows[expert] + slot});
        REQUIRE(found != landed.end());
        REQUIRE(found->second ==
                std::pair(expert / routing.experts_per_rank, int64_t{job.place(home, expert)} + slot));
        awaited.insert({home, tables->home_blocks[expert] + slot / moe::BLOCK_ROWS});
      }
    }
  }
  REQUIRE(num_rows == landed.size());
  for (const auto& [key, left] : units_left) {
    REQUIRE(left == 0);
    REQUIRE(awaited.count(key) == 1);
  }
  REQUIRE(awaited.size() == units_left.size());
}

}  // namespace

TEST_CASE("every row of a dispatch and of a combine travels once, to where it belongs") {
  std::mt19937 random(1);
  for (int turn = 0; turn < 150; ++turn) {
    const int nranks = 1 + static_cast<int>(random() % 8);
    const int experts = 1 + static_cast<int>(random() % 40);
    const Job job(nranks, experts, random);
    for (const uint32_t unit_rows : {1u, 2u, 32u}) {
      check_dispatch(job, unit_rows);
      check_combine(job, unit_rows);
    }
  }
}

TEST_CASE("units of lists take turns") {
  moe::Turns turns;
  turns.clear();
  turns.add(7, 2);
  turns.add(3, 0);
  turns.add(5, 2);
  turns.add(1, 4);
  std::vector<std::pair<int, uint32_t>> dealt;
  int list = 0;
  uint32_t unit = 0;
  for (uint32_t turn = 0; turns.at(turn, &list, &unit); ++turn) dealt.emplace_back(list, unit);
  const std::vector<std::pair<int, uint32_t>> expected = {{7, 0}, {5, 0}, {1, 0}, {7, 1},
                                                          {5, 1}, {1, 1}, {1, 2}, {1, 3}};
  REQUIRE(dealt == expected);
}

// Every tile is one worker's, once.
template <class Passes>
void walk(const GroupedTiles& tiles, const Passes& passes) {
  std::set<std::tuple<int, int, int>> seen;
  for (int worker = 0; worker < tiles.num_workers; ++worker) {
    GroupedTileCursor cursor(tiles, passes, worker);
    GroupedTile work;
    int last_group = 0, pass = 0;
    for (int ordinal = 0; cursor.next(&work); ++ordinal) {
      if (work.group < last_group) ++pass;
      last_group = work.group;
      REQUIRE(seen.insert({work.group, work.m_tile, work.n_tile}).second);
      REQUIRE(work.ordinal == ordinal);
      REQUIRE(work.row == tiles.first_row(work.group) + work.m_tile * tiles.block_m);
      REQUIRE(work.row < work.row_end);
      REQUIRE(work.row_end == tiles.first_row(work.group + 1));
      REQUIRE(work.n_tile < tiles.num_n_tiles);
    }
    REQUIRE(pass < Passes::NUM_PASSES);
  }
  size_t expected = 0;
  for (int group = 0; group < tiles.num_groups; ++group)
    expected += tiles.num_m_tiles(group) * tiles.num_n_tiles;
  REQUIRE(seen.size() == expected);
}

TEST_CASE("every tile of a grouped product is one worker's, once") {
  std::mt19937 random(2);
  for (int turn = 0; turn < 300; ++turn) {
    std::vector<uint32_t> row_begin = {static_cast<uint32_t>(random() % 1000)};
    const int groups = static_cast<int>(random() % 20);
    for (int group = 0; group < groups; ++group)
      row_begin.push_back(row_begin.back() + (random() % 3 == 0 ? 0 : random() % 600));
    const int block_m = turn % 2 == 0 ? 128 : 64;
    const GroupedTiles tiles{row_begin.data(),
                             groups,
                             block_m,
                             1 + static_cast<int>(random() % 9),
                             3,
                             1 + static_cast<int>(random() % 4),
                             1 + static_cast<int>(random() % 40)};
    walk(tiles, OnePass{});
    std::vector<TileRange> ranges;
    for (int group = 0; group < groups; ++group) {
      const auto end = static_cast<uint16_t>(random() % (tiles.num_m_tiles(group) + 1));
      ranges.push_back({static_cast<uint16_t>(random() % (end + 1)), end});
    }
    const int pass_of_ranges = turn % 2;
    walk(tiles, TwoPasses{ranges.data(), pass_of_ranges});
    GroupedTiles alone = tiles;
    alone.num_workers = 1;
    GroupedTileCursor cursor(alone, TwoPasses{ranges.data(), pass_of_ranges}, 0);
    GroupedTile work;
    bool is_second = false;
    while (cursor.next(&work)) {
      const TileRange range = ranges[static_cast<size_t>(work.group)];
      const bool is_in_range = work.m_tile >= range.begin && work.m_tile < range.end;
      const bool is_of_second = is_in_range == (pass_of_ranges == 1);
      REQUIRE((is_of_second || !is_second));
      is_second = is_of_second;
    }
  }
}

TEST_CASE("units have as many rows as 32 KB, or fewer where that gives all warps some") {
  REQUIRE(moe::unit_rows_for(14336) == 2);
  REQUIRE(moe::unit_rows_for(14336, 8192, 1452) == 2);
  REQUIRE(moe::unit_rows_for(14336, 1453, 1452) == 2);  // rows of one each would leave one for a second turn
  REQUIRE(moe::unit_rows_for(14336, 1452, 1452) == 1);
  REQUIRE(moe::unit_rows_for(64) == 32);
  REQUIRE(moe::unit_rows_for(64, 100, 84) == 2);
  REQUIRE(moe::unit_rows_for(64, 0, 84) == 1);
}

// What a worker has of a tile.
struct TilePart {
  int worker;
  GroupedTile work;
};

// Each tile is whole, or its parts are all of it, with which its owner knows whose they are: of workers before
// it.
void walk_cut(const GroupedTiles& tiles, int num_tiles) {
  std::map<std::tuple<int, int, int>, std::vector<TilePart>> parts;
  for (int worker = 0; worker < tiles.num_workers; ++worker) {
    GroupedTileCursor cursor(tiles, OnePass{}, worker);
    GroupedTile work;
    bool had_part = false;
    for (int ordinal = 0; cursor.next(&work); ++ordinal) {
      REQUIRE(work.ordinal == ordinal);
      REQUIRE(!had_part);
      had_part = !work.is_whole();
      parts[{work.group, work.m_tile, work.n_tile}].push_back({worker, work});
    }
  }
  REQUIRE(static_cast<int>(parts.size()) == num_tiles);
  int num_cut = 0;
  for (const auto& [tile, of_tile] : parts) {
    REQUIRE(of_tile.front().work.k_begin == 0);
    REQUIRE(of_tile.back().work.k_end == tiles.num_k_steps);
    const GroupedTile& owned = of_tile.back().work;
    REQUIRE(owned.is_owner);
    REQUIRE(owned.num_peers + 1 == static_cast<int>(of_tile.size()));
    if (of_tile.size() > 1) ++num_cut;
    for (size_t i = 0; i + 1 < of_tile.size(); ++i) {
      REQUIRE(of_tile[i].work.k_end == of_tile[i + 1].work.k_begin);
      REQUIRE(of_tile[i].work.k_begin < of_tile[i].work.k_end);
      REQUIRE(!of_tile[i].work.is_owner);
      REQUIRE(of_tile[i].worker == owned.first_peer + static_cast<int>(i) * owned.peer_stride);
      REQUIRE(of_tile[i].worker < of_tile.back().worker);
    }
  }
  REQUIRE(num_cut == tiles.cut.num_tiles);
}

TEST_CASE("the last tiles of a grouped product are cut where they would leave half of the workers idle") {
  std::mt19937 random(6);
  int num_cut = 0;
  for (int turn = 0; turn < 400; ++turn) {
    std::vector<uint32_t> row_begin = {static_cast<uint32_t>(random() % 1000)};
    const int groups = static_cast<int>(random() % 9);
    for (int group = 0; group < groups; ++group)
      row_begin.push_back(row_begin.back() + (random() % 3 == 0 ? 0 : random() % 600));
    GroupedTiles tiles{row_begin.data(),
                       groups,
                       128,
                       1 + static_cast<int>(random() % 9),
                       1 + static_cast<int>(random() % 120),
                       1 + static_cast<int>(random() % 4),
                       1 + static_cast<int>(random() % 140)};
    int num_tiles = 0;
    for (int group = 0; group < groups; ++group) num_tiles += tiles.num_m_tiles(group) * tiles.num_n_tiles;
    tiles.cut = CutTiles(num_tiles, tiles.num_k_steps, tiles.num_workers);
    if (tiles.cut.num_tiles > 0) {
      ++num_cut;
      REQUIRE(tiles.cut.num_tiles == num_tiles % tiles.num_workers);
      REQUIRE(tiles.cut.num_parts >= 2);
      REQUIRE(tiles.cut.num_parts <= CutTiles::MAX_PARTS);
      REQUIRE(tiles.cut.num_parts * tiles.cut.num_tiles <= tiles.num_workers);
    }
    walk_cut(tiles, num_tiles);
  }
  REQUIRE(num_cut > 50);
  // All that a few tiles of many steps are cut into, and those of few steps.
  REQUIRE(CutTiles(250, 112, 122).num_parts == 8);
  REQUIRE(CutTiles(536, 112, 122).num_parts == 2);
  REQUIRE(CutTiles(550, 112, 122).num_parts == 1);
  REQUIRE(CutTiles(250, 13, 122).num_parts == 1);
}

TEST_CASE("a worker that is told of tiles finds those that it would have counted to") {
  std::mt19937 random(4);
  for (int turn = 0; turn < 100; ++turn) {
    std::vector<uint32_t> row_begin = {7};
    const int groups = 1 + static_cast<int>(random() % 20);
    for (int group = 0; group < groups; ++group)
      row_begin.push_back(row_begin.back() + (random() % 3 == 0 ? 0 : random() % 600));
    const GroupedTiles tiles{row_begin.data(), groups, 128, 1 + static_cast<int>(random() % 9), 3, 2, 1};
    std::vector<GroupedTile> all;
    GroupedTileCursor counting(tiles, OnePass{}, 0);
    for (GroupedTile work; counting.next(&work);) all.push_back(work);
    GroupedTileCursor told(tiles, OnePass{}, 0);
    GroupedTile work;
    int ordinal = 0;
    for (size_t tile = random() % 5; tile < all.size(); tile += 1 + random() % 30) {
      REQUIRE(told.find(static_cast<int>(tile), &work));
      REQUIRE(work.row == all[tile].row);
      REQUIRE(work.n_tile == all[tile].n_tile);
      REQUIRE(work.group == all[tile].group);
      REQUIRE(work.ordinal == ordinal++);
    }
    REQUIRE(!told.find(static_cast<int>(all.size()), &work));
    REQUIRE(!told.find(INT32_MAX, &work));
  }
}

TEST_CASE("a dispatch of few rows an expert has low tiles, and push CTAs that compute as well") {
  const auto plan_of = [](mk_operator_t op, int64_t rows_of_expert, int num_sms) {
    MoeCall call;
    call.op = op;
    call.experts = 256;
    call.topk = 8;
    call.tokens = rows_of_expert * call.experts / call.topk / 2;
    call.hidden = 7168;
    call.inter = 2048;
    call.capacity_rows = call.tokens * call.topk * 2;
    const Result<MoePlan> planned = moe_plan(call, 2, num_sms, nullptr);
    REQUIRE(planned.ok());
    return planned.value().plan;
  };
  for (const int64_t rows : {1, 8, 48}) {
    CHECK(plan_of(MK_OPERATOR_MOE_DISPATCH_GEMM, rows, 132).tile_m == 64);
    CHECK(plan_of(MK_OPERATOR_MOE_DISPATCH_GEMM, rows, 132).copy_ctas == 12);
    CHECK(plan_of(MK_OPERATOR_MOE_DISPATCH_GEMM, rows, 132).compute_ctas == 120);
    CHECK(plan_of(MK_OPERATOR_MOE_DISPATCH_GEMM, rows, 2).copy_ctas == 1);
    CHECK(plan_of(MK_OPERATOR_MOE_DISPATCH_GEMM, rows, 2).compute_ctas == 1);
  }
  CHECK(plan_of(MK_OPERATOR_MOE_DISPATCH_GEMM, 49, 132).tile_m == 128);
  CHECK(plan_of(MK_OPERATOR_MOE_GEMM_COMBINE, 64, 132).tile_m == 64);
  CHECK(plan_of(MK_OPERATOR_MOE_GEMM_COMBINE, 65, 132).tile_m == 128);
}

TEST_CASE("what maxima have prepared has room for every dispatch that they cover") {
  std::mt19937_64 random(3);
  const auto below = [&](int64_t limit) { return std::uniform_int_distribution<int64_t>(0, limit)(random); };
  for (int turn = 0; turn < 3000; ++turn) {
    const int nranks = 1 + static_cast<int>(below(7));
    MoeCall maxima = make_call(MK_OPERATOR_MOE_DISPATCH_GEMM, 1 + static_cast<int>(below(511)), 1);
    maxima.is_maxima = true;
    maxima.hidden = 8 * (1 + below(1000));
    maxima.topk = 1 + static_cast<int>(below(15));
    maxima.capacity_rows = 1 + below(100000);
    maxima.max_tokens = turn % 2 == 0 ? 0 : 1 + below(5000);
    const Result<MoePlan> prepared = moe_plan(maxima, nranks, 132);
    REQUIRE(prepared.ok());
    MoeCall call = maxima;
    call.is_maxima = false;
    call.max_tokens = 0;
    call.hidden = 8 * (1 + below(maxima.hidden / 8 - 1));
    call.experts = 1 + static_cast<int>(below(maxima.experts - 1));
    call.topk = 1 + static_cast<int>(below(maxima.topk - 1));
    call.capacity_rows = below(maxima.capacity_rows);
    call.tokens = below(100000);
    REQUIRE(covers(maxima, call));
    const Result<MoePlan> plan = moe_plan(call, nranks, 132);
    REQUIRE(plan.ok());
    REQUIRE(plan.value().area_bytes <= prepared.value().area_bytes);
    REQUIRE(plan.value().layout.bytes() <= plan.value().area_bytes);
    REQUIRE(nranks * (1 + plan.value().blocks_per_source) <= kFlagsPerBank);
    // What its own preparation has, covers a combine of the same rows.
    const Result<MoePlan> own = moe_plan(maxima_of(call), nranks, 132);
    REQUIRE(own.ok());
    const moe_gemm_combine::CudaLayout home{plan.value().layout.counts_bytes, call.hidden * 4};
    REQUIRE(home.bytes(call.capacity_rows, nranks * call.capacity_rows) <= own.value().area_bytes);
  }
}

TEST_CASE("a plan says what it cannot do") {
  MoeCall call = make_call(MK_OPERATOR_MOE_DISPATCH_GEMM, 8, 2);
  REQUIRE(moe_plan(call, 4, 132).ok());
  REQUIRE(moe_plan(call, 4, 1).status().code() == MK_ERROR_UNSUPPORTED);
  call.experts = moe::CUDA_MAX_EXPERTS + 1;
  REQUIRE(moe_plan(call, 4, 132).status().code() == MK_ERROR_UNSUPPORTED);
  call.experts = 8;
  call.tuning.tile_n = 96;
  REQUIRE(moe_plan(call, 4, 132).status().code() == MK_ERROR_UNSUPPORTED);
  call.tuning.tile_n = 0;
  call.capacity_rows = INT32_MAX;
  REQUIRE(moe_plan(call, 4, 132).status().code() == MK_ERROR_UNSUPPORTED);
  call.capacity_rows = 65536;
  call.tokens = 8192;
  call.topk = 8;
  call.experts = 256;
  REQUIRE(moe_plan(call, 4, 132).value().plan.tile_n == 256);
  call.tokens = 32;
  REQUIRE(moe_plan(call, 4, 132).value().plan.tile_n == 128);
}
