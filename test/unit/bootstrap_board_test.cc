// SPDX-License-Identifier: MIT
#include "lib/bootstrap_board.h"

#include "../support/catch.h"
#include "lib/rank_list.h"

using namespace mk;

namespace {

std::shared_ptr<const Bytes> data(int value) {
  return std::make_shared<const Bytes>(1, static_cast<std::byte>(value));
}

}  // namespace

TEST_CASE("a collective is complete with every rank's block") {
  BlockBoard board(1, 3);
  CHECK(board.arrive(0, 0, FrameKind::block, data(10)).ok());
  CHECK(*board.peek(0) == *data(10));
  CHECK(board.enter(FrameKind::block, data(11)) == 0);
  CHECK(board.peek(0) == nullptr);
  CHECK(!board.complete());
  CHECK(board.missing() == std::vector<int>{2});
  CHECK(board.arrive(2, 0, FrameKind::block, data(12)).ok());
  REQUIRE(board.complete());
  const auto blocks = board.finish();
  for (int rank = 0; rank < 3; ++rank) CHECK(*blocks[static_cast<size_t>(rank)] == *data(10 + rank));
  CHECK(board.enter(FrameKind::block, data(0)) == 1);
}

TEST_CASE("a rank may be one collective ahead, and no further") {
  BlockBoard board(0, 2);
  // Nobody can have finished what this rank has not entered.
  CHECK(board.arrive(1, 1, FrameKind::block, data(1)).code() == MK_ERROR_NETWORK);
  board.enter(FrameKind::block, data(0));
  CHECK(board.arrive(1, 0, FrameKind::block, data(1)).ok());
  CHECK(board.arrive(1, 1, FrameKind::block, data(2)).ok());
  CHECK(*board.peek(1) == *data(2));
  CHECK(board.arrive(1, 2, FrameKind::block, data(3)).sentence() ==
        "rank 1 sent a block of step 2, expected 0 to 1");
  board.finish();
  CHECK(board.arrive(1, 0, FrameKind::block, data(4)).code() == MK_ERROR_NETWORK);
  CHECK(*board.peek(1) == *data(2));
}

TEST_CASE("a block given twice, or in this rank's own name, is a violation") {
  BlockBoard board(0, 2);
  CHECK(board.arrive(1, 0, FrameKind::block, data(1)).ok());
  CHECK(board.arrive(1, 0, FrameKind::block, data(1)).sentence() == "rank 1 sent its block of step 0 twice");
  CHECK(board.arrive(0, 0, FrameKind::block, data(1)).code() == MK_ERROR_NETWORK);
}

TEST_CASE("ranks in different kinds of step are told apart") {
  BlockBoard board(0, 2);
  CHECK(board.arrive(1, 0, FrameKind::leave, data(1)).ok());
  board.enter(FrameKind::block, data(1));
  CHECK(board.odd_one() == 1);
}

TEST_CASE("lists of ranks and spans of time read well") {
  const auto list = [](std::vector<int> ranks) { return rank_list(ranks); };
  CHECK(list({3}) == "rank 3");
  CHECK(list({3, 5, 6, 7}) == "ranks 3, 5-7");
  CHECK(list({0, 1}) == "ranks 0, 1");
  std::vector<int> even;
  for (int rank = 0; rank < 100; rank += 2) even.push_back(rank);
  CHECK(rank_list(even).find("ranks 0, 2, 4") == 0);
  CHECK(rank_list(even).find(", and 30 more") != std::string::npos);
  CHECK(seconds(8000) == "8 s");
  CHECK(seconds(2500) == "2.5 s");
}
