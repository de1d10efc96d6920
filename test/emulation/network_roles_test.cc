// SPDX-License-Identifier: MIT
// The roles of AllGather+GEMM between nodes that move data, on emulated warps and host memory, over the real
// transports: pushes, puts, arrivals, forwards and entries of several launches in a row; ranks that disagree; a
// rank that does not come up with its rows. The code is the kernel's own; only the product is missing, and
// someone who waits for all flags stands in for it.
#include "shim/device_words.h"

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include "../support/catch.h"
#include "gather_rank.h"

namespace mk {

struct EmulatedConfig {
  static constexpr int NUM_THREADS = 96;  // two push warps and the one that signals; the network's three
};
template <>
struct RankGemmStorage<EmulatedConfig> {
  uint8_t bytes[sizeof(PushCtaStorage<EmulatedConfig::NUM_THREADS>)];
};

namespace test {
namespace {

using allgather_gemm::NetworkParams;

constexpr int kPushCtas = 2;

// A launch, and who takes what has come.
class ForwardRank : public GatherRank {
 public:
  using GatherRank::GatherRank;

  Status set_up(int64_t wait_timeout_ms = kPatienceMs) {
    return GatherRank::set_up(kPushCtas + allgather_gemm::NUM_NETWORK_CTAS, wait_timeout_ms);
  }

  NetworkParams params(const Shape& shape) {
    NetworkParams params{};
    describe(shape, &params);
    params.push_units = make_push_units(params, {4, 2, 3, 3, 5}, PUSH_CTA_PIECE_BYTES);
    return params;
  }
  void fill(const NetworkParams& params, uint64_t epoch) { fill_rows(params, epoch); }

  // A launch but for its product.
  void launch(const NetworkParams& params) {
    std::vector<std::vector<uint8_t>> smem(kPushCtas + 1, std::vector<uint8_t>(sizeof(Smem) + 128));
    emulation::run_ctas(kPushCtas + 1, EmulatedConfig::NUM_THREADS / 32, [&] {
      const RankLaunch launch(params.comm);
      launch.begin_cta();
      auto address = reinterpret_cast<uintptr_t>(smem[blockIdx.x].data());
      allgather_gemm::run_moving_cta<EmulatedConfig>(launch, params,
                                                     reinterpret_cast<uint8_t*>((address + 127) / 128 * 128));
      launch.end_cta();
    });
  }

  // What the product would have waited for, and then found.
  std::string consume(const NetworkParams& params, uint64_t epoch) {
    const allgather_gemm::Schedule& schedule = params.schedule;
    std::byte* const own = params.comm.memory[rank_.rank];
    const std::byte* const area = gpu_.area(epoch, 0);
    for (int source = 0; source < rank_.nranks && schedule.k > 0; ++source) {
      for (int chunk = 0; chunk < schedule.chunks(source); ++chunk) {
        for (int panel = 0; panel < params.num_panels; ++panel) {
          const int index = schedule.flag(source, chunk) * params.num_panels + panel;
          auto* const flag =
              reinterpret_cast<uint64_t*>(own + ControlLayout{rank_.nranks}.flag(bank_of(epoch), index));
          const Deadline deadline = Deadline::after(rank_.timeout);
          while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) < epoch) {
            if (deadline.passed() || rank_.abort.raised())
              return format("launch %llu: chunk %d of rank %d, panel %d did not come; ",
                            (unsigned long long)epoch, chunk, source, panel);
            std::this_thread::yield();
          }
        }
      }
      for (int64_t row = 0; row < schedule.rows(source); ++row) {
        const int64_t gathered = int64_t{source} * params.max_rows + row;
        const auto* const at =
            reinterpret_cast<const uint16_t*>(area + static_cast<size_t>(gathered) * schedule.row_pitch());
        for (int64_t column = 0; column < schedule.k; ++column) {
          if (at[column] == element(epoch, gathered, column)) continue;
          return format("launch %llu: row %lld of rank %d, column %lld is wrong; ", (unsigned long long)epoch,
                        (long long)row, source, (long long)column);
        }
      }
    }
    return "";
  }

 private:
  using Smem = PushCtaStorage<EmulatedConfig::NUM_THREADS>;
};

std::string run_launches(ForwardRank& gather, const Shape& shape, int launches) {
  const NetworkParams params = gather.params(shape);
  for (int turn = 0; turn < launches; ++turn) {
    const uint64_t epoch = gather.gpu().epoch() + 1;
    gather.fill(params, epoch);
    std::string wrong;
    std::thread consumer([&] { wrong = gather.consume(params, epoch); });
    gather.launch(params);
    consumer.join();
    if (std::string text = state_after(gather.gpu(), params.comm, epoch) + wrong; !text.empty()) return text;
  }
  return "";
}

// With a sanitizer the first and the fourth.
const std::vector<std::vector<int>> kTopologies = {
    {0, 0, 1, 1}, {0, 1}, {0, 1, 0, 1}, {0, 0, 0, 1, 1}, {0, 1, 2}};

}  // namespace

TEST_CASE("rows travel between nodes and inside them, launch after launch", "[emulation]") {
  const std::vector<int> nodes = GENERATE(from_range(fewer_if_slow(kTopologies)));
  for (const BackendCase& backend : fewer_if_slow(backend_cases())) {
    INFO(backend.backend << " seed " << backend.seed << " " << backend.environment << ", " << nodes.size()
                         << " ranks");
    CHECK(run_ranks(RankKind::threads, backend, nodes, [&](Rank& rank) -> std::string {
            ForwardRank gather(rank);
            MK_EXPECT_OK(gather.set_up());
            MK_EXPECT(rank.barrier());
            for (const Shape& shape : {Shape{500, 200}, Shape{3, 72}, Shape{0, 64}, Shape{70, 0},
                                       Shape{257, 33, 64, 1}, Shape{130, 520, 32, 4}, Shape{40, 8}}) {
              if (std::string text = run_launches(gather, shape, 3); !text.empty()) {
                return format("m %lld, k %lld: ", (long long)shape.m, (long long)shape.columns) + text;
              }
            }
            MK_EXPECT(rank.barrier());
            return rank.failure();
          }) == "");
  }
}

TEST_CASE("a disagreement between nodes ends the launch on every rank", "[emulation]") {
  const std::vector<int> nodes = {0, 0, 1, 1};
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          ForwardRank gather(rank);
          MK_EXPECT_OK(gather.set_up());
          MK_EXPECT(rank.barrier());
          NetworkParams params = gather.params({500, 200});
          if (rank.rank == 3) params.comm.entry.shape[0] = 300;
          gather.launch(params);
          MK_EXPECT(gather.gpu().error().status == MK_ERROR_MISMATCH);
          MK_EXPECT(rank.rank == 3 || gather.gpu().error().rank == 3);
          // Between nodes it is the end.
          MK_EXPECT(rank.abort.raised() && rank.abort.reason().code() == MK_ERROR_MISMATCH);
          MK_EXPECT(gather.gpu().sentence().find("m=300") != std::string::npos);
          MK_EXPECT(rank.barrier());
          return "";
        }) == "");
}

TEST_CASE("who waits for a put that does not come says for what", "[emulation]") {
  const std::vector<int> nodes = {0, 1};
  CHECK(run_ranks(RankKind::threads, {"loopback", "0"}, nodes, [&](Rank& rank) -> std::string {
          ForwardRank gather(rank);
          MK_EXPECT_OK(gather.set_up(rank.rank == 0 ? 3000 : kPatienceMs));
          MK_EXPECT(rank.barrier());
          NetworkParams params = gather.params({500, 200});
          // Rank 1 believes that it has no rows to send, but all else is as agreed.
          if (rank.rank == 1) params.schedule.k = 0;
          gather.launch(params);
          if (rank.rank == 0) {
            const mk_async_error_t error = gather.gpu().error();
            MK_EXPECT(error.status == MK_ERROR_TIMEOUT && error.rank == 1 && error.object_index == 0);
            MK_EXPECT(std::string(error.role) == "receive" && std::string(error.object) == "chunk");
          }
          MK_EXPECT(rank.barrier());
          rank.abort.raise(Status(MK_ERROR_TIMEOUT, "as a communicator would"));
          return "";
        }) == "");
}

}  // namespace test
}  // namespace mk
