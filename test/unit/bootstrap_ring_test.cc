// SPDX-License-Identifier: MIT
#include <cstring>
#include <functional>

#include "../support/bootstrap_job.h"
#include "../support/catch.h"

using namespace mk;
using mk::test::Job;
using mk::test::Rank;
using std::chrono::milliseconds;

namespace {

Bytes block_of(int rank, size_t size, int step) {
  Bytes block(size);
  for (size_t i = 0; i < size; ++i)
    block[i] = static_cast<std::byte>((i * 31 + static_cast<size_t>(rank * 7 + step)) & 0xff);
  return block;
}

// The first thing wrong in what `rank` gathered, or "".
std::string gather(Rank& rank, int step, const std::vector<Bytes>& expected) {
  const auto gathered = rank.bootstrap->all_gather(expected[static_cast<size_t>(rank.rank)],
                                                   Deadline::after(milliseconds(30000)), "gathering");
  if (!gathered.ok()) return gathered.status().sentence();
  if (gathered.value().size() != expected.size()) return "wrong number of blocks";
  for (size_t peer = 0; peer < expected.size(); ++peer) {
    const Bytes& block = gathered.value()[peer];
    if (block.size() != expected[peer].size() ||
        (!block.empty() && std::memcmp(block.data(), expected[peer].data(), block.size()) != 0)) {
      return format("wrong block of rank %zu in step %d", peer, step);
    }
  }
  return "";
}

std::string gather_all(Job& job, int steps, const std::function<size_t(int)>& size_of) {
  std::vector<std::string> errors(job.ranks.size());
  std::vector<std::vector<Bytes>> expected(static_cast<size_t>(steps));
  for (int step = 0; step < steps; ++step) {
    for (auto& rank : job.ranks) {
      expected[static_cast<size_t>(step)].push_back(block_of(rank->rank, size_of(rank->rank), step));
    }
  }
  job.each([&](Rank& rank) {
    for (int step = 0; step < steps && errors[static_cast<size_t>(rank.rank)].empty(); ++step) {
      errors[static_cast<size_t>(rank.rank)] = gather(rank, step, expected[static_cast<size_t>(step)]);
    }
  });
  for (const auto& error : errors) {
    if (!error.empty()) return error;
  }
  return "";
}

}  // namespace

TEST_CASE("ranks join, gather blocks of different sizes, and leave") {
  const int nranks = GENERATE(1, 2, 3, 5, 16);
  CAPTURE(nranks);
  Job job(nranks);
  REQUIRE(job.root.ok());
  job.join();
  for (auto& rank : job.ranks) CHECK(rank->status.sentence() == "");
  REQUIRE(job.all_joined());
  CHECK(gather_all(job, 20, [](int rank) { return static_cast<size_t>(rank) * 333; }) == "");
  CHECK(gather_all(job, 1, [](int) { return size_t{0}; }) == "");
  CHECK(job.leave() == "");
}

TEST_CASE("eight ranks gather a MiB each at once") {
  Job job(8);
  job.join();
  REQUIRE(job.all_joined());
  CHECK(gather_all(job, 2, [](int) { return Exchange::kMaxBlockBytes; }) == "");
  CHECK(job.leave() == "");
}

TEST_CASE("two hundred gathers in a row") {
  Job job(5);
  job.join();
  REQUIRE(job.all_joined());
  CHECK(gather_all(job, 200, [](int rank) { return static_cast<size_t>(64 + rank); }) == "");
  CHECK(job.leave() == "");
}
