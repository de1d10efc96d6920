// SPDX-License-Identifier: MIT
#include <cmath>

#include "json_writer.h"
#include "test/support/catch.h"

using namespace perf;

TEST_CASE("JSON nests, separates and indents") {
  JsonWriter json;
  json.begin_object()
      .member("a", 1)
      .key("b")
      .begin_array()
      .value(true)
      .null()
      .begin_object()
      .end_object()
      .end_array();
  json.member("c", "d").end_object();
  CHECK(json.text() == "{\n  \"a\": 1,\n  \"b\": [\n    true,\n    null,\n    {}\n  ],\n  \"c\": \"d\"\n}\n");
}

TEST_CASE("JSON has no NaN, no infinity and no raw control characters") {
  JsonWriter json;
  json.begin_array().value(NAN).value(-INFINITY).value(0.125).value(std::string("q\"\\\n\x01")).end_array();
  CHECK(json.text() == "[\n  null,\n  null,\n  0.125,\n  \"q\\\"\\\\\\u000a\\u0001\"\n]\n");
}

TEST_CASE("an absent value is null") {
  JsonWriter json;
  json.begin_array().value(std::optional<double>()).value(std::optional<double>(2.5)).end_array();
  CHECK(json.text() == "[\n  null,\n  2.5\n]\n");
}
