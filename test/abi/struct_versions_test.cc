// SPDX-License-Identifier: MIT
// How a struct that has grown is read from, and written to, callers of every version. The public structs are
// all in their first version, so these stand in for them.
#include <cstring>
#include <string>

#include "lib/struct_size.h"
#include "test/support/catch.h"

namespace {

struct First {
  size_t struct_size;
  int64_t old_field;
};
struct Second {
  size_t struct_size;
  int64_t old_field;
  int64_t new_field;
};
// What an older caller has in memory: its struct, and then something else of its own.
struct OlderCaller {
  First value;
  int64_t neighbour;
};

const Second* as_second(const OlderCaller& caller) { return reinterpret_cast<const Second*>(&caller.value); }

}  // namespace

TEST_CASE("an older caller's struct reads as if the fields it lacks were zero") {
  const OlderCaller caller = {{sizeof(First), 7}, 99};
  Second seen = {1, 2, 3};
  REQUIRE(mk::read_struct(as_second(caller), sizeof(First), "args", seen).ok());
  REQUIRE(seen.struct_size == sizeof(Second));
  REQUIRE(seen.old_field == 7);
  REQUIRE(seen.new_field == 0);
}

TEST_CASE("nothing is written past an older caller's struct") {
  OlderCaller caller = {{sizeof(First), 7}, 99};
  const Second news = {sizeof(Second), 8, 9};
  REQUIRE(mk::write_struct(news, sizeof(First), "info", reinterpret_cast<Second*>(&caller.value)).ok());
  REQUIRE(caller.value.struct_size == sizeof(First));
  REQUIRE(caller.value.old_field == 8);
  REQUIRE(caller.neighbour == 99);
}

TEST_CASE("a struct smaller than its first version is refused") {
  const OlderCaller caller = {{sizeof(First) - 1, 7}, 99};
  Second seen = {1, 2, 3};
  const mk::Status status = mk::read_struct(as_second(caller), sizeof(First), "args", seen);
  REQUIRE(status.code() == MK_ERROR_INVALID_ARGUMENT);
  REQUIRE(status.sentence().find("args.struct_size") != std::string::npos);
  REQUIRE(status.sentence().find("16") != std::string::npos);
  REQUIRE(status.sentence().find("15") != std::string::npos);
  REQUIRE(seen.old_field == 2);
}
