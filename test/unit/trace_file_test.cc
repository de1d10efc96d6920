// SPDX-License-Identifier: MIT
// The file that a trace becomes, event by event.
#include <string>
#include <vector>

#include "kernels/trace.h"
#include "test/support/catch.h"

using namespace mk;

namespace {

std::vector<std::string> lines_of(const Trace& trace, int rank) {
  std::FILE* file = std::tmpfile();
  REQUIRE(file != nullptr);
  CHECK(write_trace(trace, rank, file));
  std::rewind(file);
  std::vector<std::string> lines(1);
  for (int byte = std::fgetc(file); byte != EOF; byte = std::fgetc(file)) {
    if (byte == '\n') {
      lines.emplace_back();
    } else {
      lines.back() += static_cast<char>(byte);
    }
  }
  std::fclose(file);
  return lines;
}

std::vector<std::string> spans_of(const std::vector<std::string>& lines, int track) {
  const std::string tid = "\"tid\":" + std::to_string(track) + ",";
  std::vector<std::string> spans;
  for (const std::string& line : lines) {
    if (line.find("\"ph\":\"X\"") != std::string::npos && line.find(tid) != std::string::npos)
      spans.push_back(line);
  }
  return spans;
}

}  // namespace

TEST_CASE("spans are written in the order of their starts, what contains others before them") {
  Trace trace;
  trace.executor = "host";
  trace.tracks.push_back({"copy",
                          {{2500, 2600, 1, 4, -1, TraceKind::wait, "put"},
                           {2000, 2300, 1, 3, 2, TraceKind::wait, "chunk"},
                           {2000, 3000, 1, 2, 1, TraceKind::send},
                           {1000, 1500, 1, -1, -1, TraceKind::copy}},
                          7});
  const auto lines = lines_of(trace, 5);
  const auto spans = spans_of(lines, 1);
  REQUIRE(spans.size() == 4);
  CHECK(spans[0] == R"({"ph":"X","name":"copy","pid":5,"tid":1,"ts":1.000,"dur":0.500,"args":{"epoch":1}},)");
  CHECK(
      spans[1] ==
      R"({"ph":"X","name":"send","pid":5,"tid":1,"ts":2.000,"dur":1.000,"args":{"epoch":1,"index":2,"peer":1}},)");
  CHECK(
      spans[2] ==
      R"({"ph":"X","name":"wait","pid":5,"tid":1,"ts":2.000,"dur":0.300,"args":{"epoch":1,"index":3,"peer":2,"object":"chunk"}},)");
  CHECK(spans[3].find("\"ts\":2.500,\"dur\":0.100") != std::string::npos);
  bool says_dropped = false;
  for (const std::string& line : lines) {
    says_dropped = says_dropped || (line.find("\"name\":\"dropped\"") != std::string::npos &&
                                    line.find("{\"spans\":7}") != std::string::npos);
  }
  CHECK(says_dropped);
}

TEST_CASE("times beyond what a double has digits for stay exact") {
  Trace trace;
  trace.executor = "cuda";
  trace.launches.push_back(
      {9, MK_OPERATOR_GEMM_ALLREDUCE, "m=1, n=2, k=3", 1234567890123456789u, 1234567890123456799u});
  const auto spans = spans_of(lines_of(trace, 0), 0);
  REQUIRE(spans.size() == 1);
  CHECK(
      spans[0] ==
      R"({"ph":"X","name":"gemm_allreduce","pid":0,"tid":0,"ts":1234567890123456.789,"dur":0.010,"args":{"epoch":9,"shape":"m=1, n=2, k=3"}},)");
}
