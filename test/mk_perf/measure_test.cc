// SPDX-License-Identifier: MIT
// How candidates take turns, on one rank with launches that do nothing.
#include "measure.h"

#include "errors.h"
#include "test/support/catch.h"

using namespace perf;

namespace {

class OneRank : public RankGroup {
 public:
  void barrier() override {}
  std::vector<double> maximum(const std::vector<double>& values) override { return values; }
  std::vector<char> all_gather(const void* bytes, size_t count) override {
    const auto* first = static_cast<const char*>(bytes);
    return {first, first + count};
  }
};

class CountedGpus : public GpuRanks {
 public:
  void line_up() override { ++lined_up; }
  void require_all_came() override { ++asked; }
  LinkRate measure_link() override { return {}; }
  void disconnect() override {}
  int lined_up = 0;
  int asked = 0;
};

// A launch takes a millisecond by this clock.
double us_of_last_loop;
double counted_time_us(mk_comm_t, const std::function<void()>& launches,
                       const std::function<void()>& meanwhile) {
  us_of_last_loop = 0;
  launches();
  meanwhile();
  return us_of_last_loop;
}

class Communicator {
 public:
  Communicator() {
    mk_unique_id_t id;
    mk_comm_config_t config = MK_COMM_CONFIG_INIT;
    config.device = MK_DEVICE_HOST;
    require(mk_get_unique_id(&id), "mk_get_unique_id", nullptr);
    require(mk_comm_init(&comm, &id, 1, 0, &config), "mk_comm_init", nullptr);
  }
  ~Communicator() { mk_comm_destroy(comm); }
  mk_comm_t comm = nullptr;
};

struct Turns {
  std::string order;
  int lined_up;
  int asked;
  std::vector<Timing> timings;
};

// Candidates a and c in every round, b in every second.
Turns take_turns(mk_device_t device, const Schedule& schedule) {
  const Communicator communicator;
  DeviceOperations operations = *find_device(MK_DEVICE_HOST);
  operations.device = device;
  operations.time_us = counted_time_us;
  Context context;
  context.comm = communicator.comm;
  context.device = &operations;
  OneRank group;
  CountedGpus gpus;
  std::string order;
  const auto candidate = [&](char name, bool every_round) {
    return Candidate{communicator.comm,
                     [&order, name] {
                       order += name;
                       us_of_last_loop += 1000;
                     },
                     every_round};
  };
  const std::vector<Timing> timings =
      measure({candidate('a', true), candidate('b', false), candidate('c', true)},
              {context, group, device == MK_DEVICE_CUDA ? &gpus : nullptr, nullptr}, schedule);
  return {order, gpus.lined_up, gpus.asked, timings};
}

}  // namespace

TEST_CASE("isolated launches take turns, after their warm-up") {
  const Turns turns = take_turns(MK_DEVICE_CUDA, {Mode::kIsolated, 2, 3});
  CHECK(turns.order ==
        "aabbcc"
        "abc"
        "ac"
        "abc");
  CHECK(turns.lined_up == 8);
  CHECK(turns.asked == 1);
  REQUIRE(turns.timings.size() == 3);
  for (const Timing& timing : turns.timings) CHECK(timing.median_us == 1000);
}

TEST_CASE("back to back on GPUs, each round is a loop of about 10 ms, after one launch that says how many") {
  const Turns turns = take_turns(MK_DEVICE_CUDA, {Mode::kBackToBack, 0, 2});
  const std::string ten(10, 'a');
  CHECK(turns.order == "abc" + ten + std::string(10, 'b') + std::string(10, 'c') + ten + std::string(10, 'c'));
  for (const Timing& timing : turns.timings) CHECK(timing.max_us == 1000);
}

TEST_CASE("back to back on the host, the launches are cut into five loops") {
  const Turns turns = take_turns(MK_DEVICE_HOST, {Mode::kBackToBack, 0, 6});
  CHECK(turns.order ==
        "aabbcc"
        "ac"
        "abc"
        "ac"
        "abc");
  CHECK(turns.lined_up == 0);
}
