// SPDX-License-Identifier: MIT
#include "report.h"
#include "test/support/catch.h"

using namespace perf;

namespace {

Result example() {
  Result result;
  result.operator_name = "gemm_allreduce";
  result.device = "host";
  result.ranks = 4;
  result.nodes = 2;
  result.shape = {{"m", 64}, {"n", 32}, {"k", 16}};
  result.dtype = "bf16";
  result.fused = {12.5, 10, 20};
  result.tflops = 0.01;
  return result;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("median, minimum and maximum") {
  CHECK(summarize({3}).median_us == 3);
  CHECK(summarize({4, 1, 3}).median_us == 3);
  CHECK(summarize({4, 1, 3, 2}).median_us == 2.5);
  CHECK(summarize({4, 1, 3, 2}).min_us == 1);
  CHECK(summarize({4, 1, 3, 2}).max_us == 4);
}

TEST_CASE("timed launches are cut into loops") {
  CHECK(loops_of({Mode::kIsolated, 3, 4}) == std::vector<int>{1, 1, 1, 1});
  CHECK(loops_of({Mode::kBackToBack, 3, 12}) == std::vector<int>{3, 3, 2, 2, 2});
  CHECK(loops_of({Mode::kBackToBack, 3, 2}) == std::vector<int>{1, 1});
}

TEST_CASE("a loop on a GPU has about 10 ms of launches, from 3 to 20") {
  CHECK(launches_a_loop(10) == 20);
  CHECK(launches_a_loop(1000) == 10);
  CHECK(launches_a_loop(26000) == 3);
  CHECK(launches_a_loop(0) == 20);
}

TEST_CASE("a verdict needs every part of the check") {
  Check check;
  check.relative_error_limit = 5e-3;
  check.relative_error = 5e-3;
  CHECK(check.passed());
  for (bool Check::*part : {&Check::exact, &Check::complete, &Check::same_bits}) {
    Check lacking = check;
    lacking.*part = false;
    CHECK(!lacking.passed());
  }
  check.relative_error = 5.1e-3;
  CHECK(!check.passed());
}

TEST_CASE("the table says what was measured, and what was not") {
  Result unchecked = example();
  Result checked = example();
  checked.check = CheckResult{true, true, false, 1.5e-3};
  checked.baseline_us = 25;
  Result failed = example();
  failed.check = CheckResult{false, false, true, 0.5};
  const std::string table = table_text({unchecked, checked, failed}, {Mode::kIsolated, 3, 20});
  CHECK(contains(table, "operator"));
  CHECK(contains(table, "m=64,n=32,k=16"));
  CHECK(contains(table, "2.00"));  // speed-up
  CHECK(contains(table, "ok, exact, 1.5e-03 (sample)"));
  CHECK(contains(table, "FAILED, not exact, 5.0e-01"));
  CHECK(contains(table, "\u2014"));
  CHECK(contains(table, "median of 20 isolated launches"));
  CHECK(contains(table, "check (sample)"));
  CHECK(!contains(table_text({unchecked}, {Mode::kIsolated, 3, 20}), "check (sample)"));
}

TEST_CASE("columns that no line has a figure for are left out, but for the baseline's") {
  Result result = example();
  const Schedule schedule = {Mode::kIsolated, 3, 20};
  const std::string host = table_text({result}, schedule);
  for (const char* column : {"alone us", "cublas us", "link us", "x roofline", "host us", "SM MHz", "  W  ",
                             "network us", "unfused", "moving us"})
    CHECK(!contains(host, column));
  for (const char* column : {"baseline us", "speed-up", "collective us", "roofline us"})
    CHECK(contains(host, column));
  Result measured = result;
  measured.alone_us = 10.5;
  measured.cublas_us = 11.5;
  measured.link_us = 9;
  measured.network_us = 8.5;
  measured.moving_us = 7.25;
  measured.unfused_us = 25;
  measured.roofline_us = 11.5;
  measured.host_us = 4.5;
  measured.sm_mhz = 1755;
  measured.watts = 612.4;
  const std::string table = table_text({result, measured}, schedule);
  for (const char* part :
       {"alone us", "10.5", "cublas us", "link us", "x roofline", "host us", "SM MHz", "network us", "8.5",
        "moving us", "7.2", "unfused us", "25.0", "x unfused", "11.5", "1.09", "4.5", "1755", "612"})
    CHECK(contains(table, part));
}

TEST_CASE("a table has the lines of its mode") {
  Result isolated = example();
  Result looped = example();
  looped.mode = Mode::kBackToBack;
  looped.operator_name = "allgather_gemm";
  const std::string table = table_text({isolated, looped}, {Mode::kBackToBack, 3, 20});
  CHECK(contains(table, "allgather_gemm"));
  CHECK(!contains(table, "gemm_allreduce"));
  CHECK(contains(table, "median of 20 back-to-back launches in 5 loops"));
  looped.device = "cuda";
  CHECK(contains(table_text({looped}, {Mode::kBackToBack, 3, 20}),
                 "median of 20 loops of back-to-back launches"));
}

TEST_CASE("what a run found out besides its results") {
  Machine machine;
  CHECK(notes_text(machine, {}).empty());
  machine.link = LinkRate{366.4, 351};
  machine.nvlinks = 18;
  machine.nccl = "2.28.3";
  machine.cublaslt = "13.1.0";
  CHECK(notes_text(machine, {"one thing", "another"}) ==
        "link, all ranks sending: 366 GB/s to the next rank, 351 to all others (18 NVLinks).\n"
        "baseline: NCCL 2.28.3 and cublasLt 13.1.0 in one CUDA graph.\none thing.\nanother.\n");
  const std::string json = json_text({}, machine, "1");
  for (const char* part : {"\"ring_gb_per_s\": 366.4", "\"all_peers_gb_per_s\": 351", "\"valid\": true",
                           "\"nvlinks\": 18", "\"nccl\": \"2.28.3\"", "\"cublaslt\": \"13.1.0\""})
    CHECK(contains(json, part));
  machine.link = LinkRate{340, 330};
  CHECK(contains(json_text({}, machine, "1"), "\"valid\": false"));
}

TEST_CASE("the JSON has every key, absent figures null") {
  const std::string json = json_text({example()}, Machine{}, "1.2.3");
  for (const char* part : {"\"version\": \"1.2.3\"",
                           "\"machine\": {",
                           "\"results\": [",
                           "\"operator\": \"gemm_allreduce\"",
                           "\"device\": \"host\"",
                           "\"ranks\": 4",
                           "\"nodes\": 2",
                           "\"m\": 64",
                           "\"dtype\": \"bf16\"",
                           "\"mode\": \"isolated\"",
                           "\"passed\": null",
                           "\"exact\": null",
                           "\"relative_error\": null",
                           "\"median\": 12.5",
                           "\"min\": 10",
                           "\"max\": 20",
                           "\"baseline_us\": null",
                           "\"gemm_us\": null",
                           "\"alone_us\": null",
                           "\"collective_us\": null",
                           "\"roofline_us\": null",
                           "\"tflops\": 0.01",
                           "\"cublas_us\": null",
                           "\"link_us\": null",
                           "\"host_us\": null",
                           "\"sm_mhz\": null",
                           "\"watts\": null",
                           "\"link\": null"}) {
    INFO(part);
    CHECK(contains(json, part));
  }
}

TEST_CASE("the types of inputs and output") {
  CHECK(dtypes_text({MK_DTYPE_FP16, MK_DTYPE_FP16, MK_DTYPE_FP16}) == "fp16");
  CHECK(dtypes_text({MK_DTYPE_BF16, MK_DTYPE_FP32, MK_DTYPE_BF16}) == "bf16->fp32");
}
