// SPDX-License-Identifier: MIT
// What CudaRank does between nodes before there are launches, and what it knows of these, on emulated GPUs.
#include "shim/device_words.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "../support/catch.h"
#include "emulated_gpu.h"
#include "kernels/device/rank_launch.cuh"
#include "kernels/flight_recorder.h"
#include "warps.h"

namespace mk::test {
namespace {

constexpr uint64_t kFailing = 2, kAborted = 4;

// A launch that only meets the other ranks, and meanwhile looks at its own record. "": as it should be.
std::string launch(EmulatedGpu& gpu, uint64_t epoch) {
  RankComm comm = gpu.comm();
  comm.entry.op = MK_OPERATOR_GEMM_ALLREDUCE;
  comm.flight_shape[0] = static_cast<int64_t>(epoch);
  comm.ticket = gpu.gpu().next_ticket();
  gpu.gpu().count_launch();
  MK_EXPECT(!gpu.is_idle() && gpu.epoch() == epoch - 1);
  mk_flight_entry_t entry{};
  size_t count = 0;
  emulation::run_ctas(2, 1, [&] {
    const RankLaunch launch(comm);
    launch.begin_cta();
    if (blockIdx.x == 0) {
      launch.greet();
      if (threadIdx.x == 0) count = gpu.gpu().flight_record(&entry, 1);
      if (threadIdx.x == 0 && epoch == kFailing)
        launch.report_overdue({DeviceRole::compute, DeviceObject::chunk, 0, 0, 0, epoch});
      while (threadIdx.x == 0 && epoch >= kAborted && !launch.stopped()) __nanosleep(1000);
    }
    launch.end_cta();
  });
  MK_EXPECT(count == 1 && entry.epoch == epoch && entry.state == FlightRecorder::running);
  MK_EXPECT(entry.op == MK_OPERATOR_GEMM_ALLREDUCE && entry.shape[0] == static_cast<int64_t>(epoch));
  MK_EXPECT(gpu.is_idle() && gpu.epoch() == epoch && gpu.is_clean());
  return "";
}

}  // namespace

// A completion is the sender's alone: first puts can arrive when their receiver's launches have begun.
TEST_CASE("an arena's banks are its launches' alone, however late the network's first puts arrive",
          "[emulation]") {
  constexpr int kArenas = 20;
  constexpr size_t kBankBytes = 4096;
  constexpr std::byte kLaunchData{0xab};
  const std::vector<int> nodes = {0, 0, 1, 2};
  for (const BackendCase& backend : fewer_if_slow(backend_cases())) {
    INFO(backend.backend << " seed " << backend.seed << " " << backend.environment);
    CHECK(run_ranks(RankKind::threads, backend, nodes, [&](Rank& rank) -> std::string {
            EmulatedGpu gpu(rank);
            MK_EXPECT_OK(gpu.set_up(1, kBankBytes));
            std::vector<std::byte*> arenas;
            for (int i = 0; i < kArenas; ++i) {
              MK_EXPECT_OK(gpu.add_arena(kBankBytes));
              std::byte* const banks = std::min(gpu.area(0, 0), gpu.area(1, 0));
              std::fill_n(banks, 2 * kBankBytes, kLaunchData);
              arenas.push_back(banks);
            }
            MK_EXPECT(rank.barrier());
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            for (const std::byte* banks : arenas) {
              MK_EXPECT(std::count(banks, banks + 2 * kBankBytes, kLaunchData) == 2 * kBankBytes);
            }
            MK_EXPECT(rank.barrier());
            return rank.failure();
          }) == "");
  }
}

TEST_CASE("a launch that begins while a CTA of another is inside says so", "[emulation]") {
  CHECK(run_ranks(RankKind::threads, backend_cases().front(), {0, 0, 0}, [](Rank& rank) -> std::string {
          EmulatedGpu gpu(rank);
          MK_EXPECT_OK(gpu.set_up(1, 4096));
          RankComm comm = gpu.comm();
          comm.entry.op = MK_OPERATOR_GEMM_ALLREDUCE;
          for (const bool is_alone : {true, false}) {
            const uint32_t others = !is_alone && rank.rank == 1 ? 1 : 0;
            comm.state->num_inside += others;
            emulation::run_ctas(2, 1, [&] {
              const RankLaunch launch(comm);
              launch.begin_cta();
              if (blockIdx.x == 0) launch.greet();
              launch.end_cta();
            });
            MK_EXPECT(comm.state->num_inside == others);
            const bool is_told = gpu.sentence().find("began while another was running") != std::string::npos;
            MK_EXPECT(is_told == (others > 0));
          }
          MK_EXPECT(rank.barrier());
          return "";
        }) == "");
}

TEST_CASE("the flight record says which launches run, have ended, have failed or were aborted", "[emulation]") {
  constexpr uint64_t kLast = 5;
  CHECK(run_ranks(RankKind::threads, backend_cases().front(), {0, 0, 0}, [](Rank& rank) -> std::string {
          EmulatedGpu gpu(rank);
          MK_EXPECT_OK(gpu.set_up(1, 4096));
          for (uint64_t epoch = 1; epoch <= kLast; ++epoch) {
            if (epoch == kAborted) gpu.gpu().set_abort();
            if (const std::string wrong = launch(gpu, epoch); !wrong.empty()) return wrong;
          }
          mk_flight_entry_t entries[kLast + 1];
          MK_EXPECT(gpu.gpu().flight_record(entries, kLast + 1) == kLast);
          for (uint64_t epoch = 1; epoch <= kLast; ++epoch) {
            const mk_flight_entry_t& entry = entries[epoch - 1];
            const bool has_failed = epoch == kFailing || epoch >= kAborted;
            MK_EXPECT(entry.epoch == epoch && entry.duration_us >= 0 && entry.start_us >= 0);
            MK_EXPECT(entry.state == (has_failed ? FlightRecorder::failed : FlightRecorder::completed));
          }
          MK_EXPECT(rank.barrier());
          return rank.failure();
        }) == "");
}

}  // namespace mk::test
