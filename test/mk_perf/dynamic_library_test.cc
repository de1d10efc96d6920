// SPDX-License-Identifier: MIT
#include "dynamic_library.h"

#include "sensors.h"
#include "test/support/catch.h"

using namespace perf;

namespace {

std::string absence(const std::string& path, const std::vector<std::string>& names, const char* function) {
  try {
    const DynamicLibrary library(path, names);
    int (*found)() = nullptr;
    library.find(function, found);
    return "";
  } catch (const LibraryAbsent& absent) {
    return absent.reason;
  }
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("the first library that is there is taken") {
  CHECK(absence("", {"libno_such_library.so.7", "libc.so.6"}, "getpid") == "");
  CHECK(absence("libc.so.6", {"libno_such_library.so.7"}, "getpid") == "");
}

TEST_CASE("an absent library says what was tried, an absent function where it was looked for") {
  const std::string absent = absence("", {"libno_such_library.so.7"}, "f");
  CHECK(contains(absent, "No such file"));
  CHECK(contains(absent, "(tried libno_such_library.so.7, "));
  CHECK(contains(absent, "/usr/local/cuda/lib64/libno_such_library.so.7"));
  const std::string given = absence("/no/such/library.so", {"libc.so.6"}, "getpid");
  CHECK(contains(given, "(tried /no/such/library.so)"));
  CHECK(absence("", {"libc.so.6"}, "no_such_function") == "libc.so.6 has no function no_such_function");
}

TEST_CASE("without a GPU there are no readings") {
  Sensors sensors("");
  sensors.sample();
  CHECK(!sensors.take_medians().sm_mhz);
  CHECK(!sensors.gpu());
  CHECK(sensors.num_nvlinks() == 0);
  // A bus that no GPU is on, with a driver or without.
  Sensors absent("0000:ff:1f.0");
  absent.sample();
  CHECK(!absent.take_medians().watts);
  CHECK(!absent.clocks());
}
