// SPDX-License-Identifier: MIT
// What a launch of ring attention over packed sequences does beside its products, on emulated warps and host
// memory: the check of cu_seqlens, the table of rows, the maps, entries with their hash, pushes of what some
// query sees and of nothing else. The code is the kernel's own; who walks through this rank's tiles and waits
// for the flags of their blocks stands in for the attention.
#include "shim/device_words.h"

#include <set>
#include <thread>
#include <vector>

#include "../support/catch.h"
#include "../unit/packed_cut.h"
#include "emulated_gpu.h"
#include "kernels/ops/ring_attention/cuda_packed.cuh"

namespace mk::test {
namespace {

using namespace ring_attention;

struct Config {
  static constexpr int NUM_THREADS = 128;
  static constexpr int BLOCK_M = 16;
  static constexpr int BLOCK_N = 32;
  static constexpr int NUM_COLUMN_BLOCKS = 2;
  static constexpr int KEY_COLUMN_BYTES = BLOCK_N * 128;
  static constexpr int KEY_BYTES = NUM_COLUMN_BLOCKS * KEY_COLUMN_BYTES;
};
constexpr int kDim = 128;
constexpr int kCtas = 3;  // all of them push
constexpr int kKvHeads = 2;
constexpr size_t kBankBytes = 8 << 20;

using Arguments = PackedArguments<PackedParams>;

struct Shape {
  mk_causal_t causal;
  bool heads_first;
  std::vector<int32_t> cu_seqlens;
};

uint16_t element(uint64_t epoch, bool value, int head, int position, int column) {
  return static_cast<uint16_t>(epoch * 40503 + (value ? 9973u : 0u) + static_cast<unsigned>(head) * 1709u +
                               static_cast<unsigned>(position) * 331u + static_cast<unsigned>(column) * 7u);
}

// Of one rank: keys and values, a launch, and who takes what has come.
class PackedRank {
 public:
  explicit PackedRank(Rank& rank) : rank_(rank), gpu_(rank) {}

  Status set_up() { return gpu_.set_up(kCtas, kBankBytes); }
  EmulatedGpu& gpu() { return gpu_; }

  // seq: what the call says, whatever the entries.
  void prepare(const Shape& shape, int64_t seq) {
    shape_ = shape;
    call_ = RingAttentionCall{};
    call_.op = MK_OPERATOR_RING_ATTENTION;
    call_.batch = 1;
    call_.seq = seq;
    call_.heads = 2 * kKvHeads;
    call_.kv_heads = kKvHeads;
    call_.dim = kDim;
    call_.causal = shape.causal;
    call_.num_sequences = static_cast<int>(shape.cu_seqlens.size()) - 1;
    call_.cu_seqlens = shape_.cu_seqlens.data();
    const bool zigzag = shape.causal == MK_CAUSAL_ZIGZAG;
    arguments_ = Arguments{};
    PackedParams& params = arguments_.params;
    params.comm = gpu_.comm();
    params.comm.entry.op = MK_OPERATOR_RING_ATTENTION;
    params.comm.entry.output_offset = kNoOutput;
    params.comm.entry.shape[1] = seq;
    params.comm.entry.shape[3] = int64_t{kDim} << 32 | call_.num_sequences;
    params.tiles = {packed_slices(call_, rank_.nranks, zigzag), rank_.rank, call_.heads, kKvHeads,
                    Config::BLOCK_M};
    params.num_push_ctas = kCtas;
    params.dim = kDim;
    params.panels = packed_panels(call_, rank_.nranks, zigzag, kDim, Config::BLOCK_N, 1, 1);
    arguments_.table_offset = row_table_offset(kCtas);
    arguments_.is_empty = seq == 0;
    arguments_.rows_are_known = !zigzag;
    arguments_.heads_first = shape.heads_first;
  }
  // Of entries that are right.
  void fill(uint64_t epoch) {
    slices_ = arguments_.params.tiles.slices;
    row_begins_ = row_begins_of(slices_);
    slices_.row_begins = row_begins_.data();
    const int rows = slices_.rows(rank_.rank);
    const int64_t map_rows = arguments_.rows_are_known ? rows : 1;
    for (const bool value : {false, true}) {
      std::vector<uint16_t>& tensor = value ? values_ : keys_;
      tensor.assign(static_cast<size_t>(kKvHeads * rows * kDim + 1), 0xdead);
      for (int head = 0; head < kKvHeads; ++head) {
        for (int row = 0; row < rows; ++row) {
          const int position = packed_row(slices_, rank_.rank, row).position;
          const int at = shape_.heads_first ? head * rows + row : row * kKvHeads + head;
          for (int column = 0; column < kDim; ++column)
            tensor[static_cast<size_t>(at * kDim + column)] = element(epoch, value, head, position, column);
        }
      }
      const ptx::EmulatedTensor map = {tensor.data(),
                                       {kDim, map_rows, kKvHeads, 1},
                                       {shape_.heads_first ? kDim * 2 : kKvHeads * kDim * 2,
                                        shape_.heads_first ? map_rows * kDim * 2 : kDim * 2, 0},
                                       Config::BLOCK_N};
      std::memcpy(&arguments_.maps[value ? PACKED_V : PACKED_K], &map, sizeof map);
    }
  }

  // A launch but for its attention.
  void launch() {
    std::vector<std::vector<uint8_t>> memory(kCtas, std::vector<uint8_t>(sizeof(Smem) + 128));
    emulation::run_ctas(kCtas, Config::NUM_THREADS / 32, [&] {
      const auto address = reinterpret_cast<uintptr_t>(memory[blockIdx.x].data());
      Smem& smem = *reinterpret_cast<Smem*>((address + 127) / 128 * 128);
      const RankLaunch launch(arguments_.params.comm);
      launch.begin_cta();
      const bool goes_on = begin_packed(arguments_, smem.packed,
                                        [&](PackedParams& params, int rows) { params.lse_rows = rows; });
      const auto warp = static_cast<int>(threadIdx.x / 32), cta = static_cast<int>(blockIdx.x);
      if (goes_on) {
        if (threadIdx.x == 0) {
          key_push_init(smem.signals);
          num_rows_[cta] = static_cast<int>(smem.packed.params.lse_rows);
        }
        __syncthreads();
        const PackedParams& params = smem.packed.params;
        if (warp > 0) {
          push_keys<Config>(launch, params, smem.signals, smem.room, warp - 1, cta);
        } else {
          signal_keys<Config>(launch, params, smem.signals);
        }
      }
      if (cta == 0 && warp == 3) greet_packed(smem.packed);
      launch.end_cta();
    });
  }

  // What the attention would have waited for, and then found.
  std::string consume(uint64_t epoch) {
    needed_.clear();
    PackedQueryTiles tiles = arguments_.params.tiles;
    tiles.slices = slices_;
    const KeyPanels& panels = arguments_.params.panels;
    for (int index = 0; index < tiles.size(); ++index) {
      const QueryTile tile = tiles.at(index);
      PackedKeyWalk walk(slices_, rank_.rank, Config::BLOCK_N, {tile.row, tile.row + tile.num_rows});
      for (PackedBlock block; walk.next(&block);) {
        if (block.step == 0) continue;
        const std::string what = format("launch %llu: block %d of step %d, head %d", (unsigned long long)epoch,
                                        block.index, block.step, tile.kv_head);
        const int flag = panels.flag(block.step, tile.kv_head, 0, block.index / panels.panel_blocks);
        needed_.insert(flag);
        if (!wait(flag, epoch)) return what + " did not come; ";
        if (!is_right(block, tile.kv_head, epoch)) return what + " is wrong; ";
      }
    }
    return "";
  }

  // After all ranks' launches.
  std::string verify(uint64_t epoch) const {
    for (const int rows : num_rows_) {
      if (rows != slices_.rows(rank_.rank)) return "a wrong number of rows; ";
    }
    if (std::memcmp(arguments_.params.comm.staging + arguments_.table_offset, row_begins_.data(),
                    row_begins_.size() * 4) != 0)
      return "a wrong table; ";
    for (int flag = 0; flag < arguments_.params.panels.num_flags(); ++flag) {
      if (*word(flag, epoch) == epoch && needed_.count(flag) == 0)
        return format("flag %d is raised and nobody wants it; ", flag);
    }
    return "";
  }
  bool is_untouched(uint64_t epoch) const {
    for (int flag = 0; flag < arguments_.params.panels.num_flags(); ++flag) {
      if (*word(flag, epoch) == epoch) return false;
    }
    return true;
  }

 private:
  struct Smem {
    PackedStorage<PackedParams, Config::NUM_THREADS> packed;
    KeyPushStorage signals;
    alignas(128) uint8_t room[KEY_PUSH_BYTES<Config>];
  };

  const uint64_t* word(int index, uint64_t epoch) const {
    return reinterpret_cast<const uint64_t*>(gpu_.comm().memory[rank_.rank] +
                                             ControlLayout{rank_.nranks}.flag(bank_of(epoch), index));
  }
  bool wait(int index, uint64_t epoch) const {
    const Deadline deadline = Deadline::after(rank_.timeout);
    while (__atomic_load_n(word(index, epoch), __ATOMIC_ACQUIRE) < epoch) {
      if (deadline.passed() || rank_.abort.raised()) return false;
      std::this_thread::yield();
    }
    return true;
  }
  // Rows behind the last are zeros.
  bool is_right(const PackedBlock& block, int head, uint64_t epoch) const {
    const int source = (rank_.rank + block.step) % rank_.nranks;
    const std::byte* const image =
        gpu_.area(epoch, arguments_.params.panels.offset(block.step, head, 0, block.index));
    for (const bool value : {false, true}) {
      const auto* at = reinterpret_cast<const uint16_t*>(image + (value ? Config::KEY_BYTES : 0));
      for (int columns = 0; columns < kDim; columns += 64) {
        for (int i = 0; i < Config::BLOCK_N; ++i) {
          const int row = block.index * Config::BLOCK_N + i;
          const bool is_row = row < slices_.rows(source);
          const int position = is_row ? packed_row(slices_, source, row).position : 0;
          for (int column = columns; column < columns + 64; ++column, ++at) {
            if (*at != (is_row ? element(epoch, value, head, position, column) : 0)) return false;
          }
        }
      }
    }
    return true;
  }

  Rank& rank_;
  EmulatedGpu gpu_;
  Shape shape_;
  RingAttentionCall call_;
  Arguments arguments_;
  std::vector<int32_t> row_begins_;
  PackedSlices slices_;
  std::vector<uint16_t> keys_, values_;
  std::set<int> needed_;
  int num_rows_[kCtas] = {};
};

std::vector<int32_t> every(int length, int count) {
  std::vector<int32_t> bounds;
  for (int i = 0; i <= count; ++i) bounds.push_back(i * length);
  return bounds;
}

// Sequences within a rank and over several, of one position, empty; one; more of them than threads.
std::vector<std::vector<int32_t>> bounds_of_shapes() {
  return {
      {0, 500},     {0, 0, 3, 4, 120, 121, 333, 500, 500}, every(1, 200), every(3, 300), every(64, 6), {0, 1},
      {0, 0, 0, 2}, {0, 300, 301, 302, 303, 304, 305, 600}};
}

}  // namespace

TEST_CASE("keys of packed sequences go to who sees some of them", "[emulation]") {
  const int nranks = GENERATE(1, 2, 3, 5);
  INFO(nranks << " ranks");
  const std::vector<int> nodes(static_cast<size_t>(nranks), 0);
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          PackedRank packed(rank);
          MK_EXPECT_OK(packed.set_up());
          MK_EXPECT(rank.barrier());
          std::string first;
          for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
            for (const std::vector<int32_t>& bounds : bounds_of_shapes()) {
              packed.prepare({causal, bounds.size() % 2 == 0, bounds}, bounds.back());
              for (int turn = 0; turn < 2; ++turn) {
                const uint64_t epoch = packed.gpu().epoch() + 1;
                packed.fill(epoch);
                std::string wrong;
                std::thread consumer([&] { wrong = packed.consume(epoch); });
                packed.launch();
                consumer.join();
                if (const std::string sentence = packed.gpu().sentence(); !sentence.empty()) return sentence;
                MK_EXPECT(rank.barrier());
                if (wrong.empty()) wrong = packed.verify(epoch);
                if (first.empty() && !wrong.empty())
                  first = format("causal %d, %zu sequences: ", causal, bounds.size() - 1) + wrong;
                MK_EXPECT(packed.gpu().epoch() == epoch && packed.gpu().is_idle());
                const LaunchState& state = *packed.gpu().comm().state;
                MK_EXPECT(EmulatedGpu::is_clean(state) && state.num_counted == 0 && state.fault == 0);
              }
            }
          }
          return first + rank.failure();
        }) == "");
}

TEST_CASE("wrong cu_seqlens move nothing and are named, different ones are a disagreement", "[emulation]") {
  const std::vector<int> nodes = {0, 0, 0};
  struct Bad {
    std::vector<int32_t> bounds;
    std::string says;
  };
  std::vector<int32_t> late = every(1, 400);
  late[390] = 7;
  const std::vector<Bad> cases = {{{1, 300, 400}, "cu_seqlens[0]: expected 0, saw 1"},
                                  {{0, 500, 400}, "cu_seqlens[2]: expected at least 500"},
                                  {{0, -1, 400}, "cu_seqlens[1]: expected at least 0"},
                                  {{0, 300, 399}, "cu_seqlens[2]: expected 400 (seq), saw 399"},
                                  {late, "cu_seqlens[390]: expected at least 389"}};
  for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_ZIGZAG}) {
    for (const Bad& bad : cases) {
      CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
              PackedRank packed(rank);
              MK_EXPECT_OK(packed.set_up());
              MK_EXPECT(rank.barrier());
              packed.prepare({causal, false, bad.bounds}, 400);
              packed.launch();
              MK_EXPECT(packed.gpu().error().status == MK_ERROR_DATA);
              MK_EXPECT(packed.gpu().sentence().find(bad.says) != std::string::npos);
              MK_EXPECT(rank.barrier());
              MK_EXPECT(packed.is_untouched(packed.gpu().epoch()) && packed.gpu().is_idle());
              // Nothing is asked for: entries are not looked at.
              packed.prepare({causal, false, bad.bounds}, 0);
              const std::string before = packed.gpu().sentence();
              packed.launch();
              MK_EXPECT(packed.gpu().sentence() == before);
              MK_EXPECT(rank.barrier());
              return rank.failure();
            }) == "");
    }
    CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
            PackedRank packed(rank);
            MK_EXPECT_OK(packed.set_up());
            MK_EXPECT(rank.barrier());
            packed.prepare({causal, false, {0, rank.rank == 1 ? 301 : 300, 400}}, 400);
            packed.fill(1);
            packed.launch();
            MK_EXPECT(packed.gpu().error().status == MK_ERROR_MISMATCH);
            MK_EXPECT(packed.gpu().sentence().find("cu_seqlens of hash") != std::string::npos);
            MK_EXPECT(rank.barrier());
            return rank.failure();
          }) == "");
  }
}

}  // namespace mk::test
