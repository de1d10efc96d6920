// SPDX-License-Identifier: MIT
// mk-perf as a user runs it: exit codes, what goes to which output, the JSON file, launchers.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

#include "json_reader.h"
#include "program.h"
#include "test/support/catch.h"

namespace {

using json::Value;
using Type = json::Value::Type;
using program::Outcome;
using program::Variables;

std::string mk_perf_path() {
  const char* path = std::getenv("MK_PERF");
  if (!path) throw std::runtime_error("MK_PERF: expected the path of mk-perf");
  return path;
}

Outcome mk_perf(const std::vector<std::string>& arguments, const Variables& variables = {}) {
  return program::run(mk_perf_path(), arguments, variables);
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

struct Folder {
  std::filesystem::path path;
  Folder() {
    char name[] = "/tmp/mk_perf_test_XXXXXX";
    if (!mkdtemp(name)) throw std::runtime_error("mkdtemp");
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

Value read_json(const std::string& path) {
  std::ifstream file(path);
  return json::parse({std::istreambuf_iterator<char>(file), {}});
}

void check_figures(const Value& result) {
  CHECK(result["fused_us"].keys() == "median min max");
  const double median = result["fused_us"]["median"].number;
  CHECK(result["fused_us"]["min"].number > 0);
  CHECK(result["fused_us"]["min"].number <= median);
  CHECK(median <= result["fused_us"]["max"].number);
  CHECK(result["tflops"].number > 0);
  for (const char* absent :
       {"baseline_us", "collective_us", "roofline_us", "cublas_us", "link_us", "network_us", "sm_mhz", "watts"})
    CHECK(result[absent].is(Type::kNull));
}

const std::vector<std::string> kQuick = {"--device", "host", "--iters", "3", "--warmup", "1"};

std::vector<std::string> with(std::vector<std::string> arguments, const std::vector<std::string>& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

}  // namespace

TEST_CASE("bad usage exits 2 with one sentence on standard error and nothing on standard output") {
  const Folder folder;
  const std::vector<std::vector<std::string>> bad = {
      {},
      {"no_such_operator"},
      {"all", "extra"},
      {"all", "--no-such-option"},
      {"all", "--shape"},
      {"gemm_allreduce", "--shape", "m=4,n=4"},
      {"gemm_allreduce", "--shape", "m=4,n=4,k=-4"},
      {"gemm_allreduce", "--shape", "m=4,n=4,k="},
      {"gemm_allreduce", "--shape", "m=4,n=4,k=4,heads=2"},
      {"all", "--preset", "no-such-preset"},
      {"all", "--dtype", "int8"},
      {"all", "-g", "4", "--nodes", "3"},
      {"all", "-g", "0"},
      {"all", "--iters", "many"},
      {"all", "--device", "host", "--baseline", "nccl"},
      {"all", "--json", folder.path / "missing" / "file.json"},
      {"all", "--json", folder.path},
      {"all", "--trace", folder.path / "missing" / "file.json"},
      {"all", "--trace", folder.path},
  };
  for (const std::vector<std::string>& arguments : bad) {
    std::string line = "mk-perf";
    for (const std::string& argument : arguments) line += " " + argument;
    INFO(line);
    const Outcome outcome = mk_perf(arguments);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out == "");
    CHECK(outcome.err.rfind("mk-perf: ", 0) == 0);
    CHECK(outcome.err.find('\n') == outcome.err.size() - 1);
  }
}

TEST_CASE("a launcher's environment that makes no sense is bad usage") {
  for (const Variables& variables :
       std::vector<Variables>{{{"MK_RANK", "0"}},
                              {{"MK_RANK", "5"}, {"MK_NRANKS", "2"}},
                              {{"MK_RANK", "0"}, {"MK_NRANKS", "2"}},
                              {{"MK_RANK", "0"}, {"MK_NRANKS", "2"}, {"MK_UNIQUE_ID", "12"}}}) {
    const Outcome outcome = mk_perf({"all", "--device", "host"}, variables);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out == "");
    CHECK(outcome.err.rfind("mk-perf: ", 0) == 0);
  }
}

TEST_CASE("help, version and environment") {
  const Outcome help = mk_perf({"--help"});
  CHECK(help.exit_code == 0);
  CHECK(contains(help.out, "--shape"));
  for (const char* name : {"allgather_gemm_wgrad", "gemm_reduce_scatter", "ring_attention_backward"})
    CHECK(contains(help.out, name));
  const Outcome version = mk_perf({"--version"});
  CHECK(version.exit_code == 0);
  CHECK(version.out.rfind("mk-perf 0.", 0) == 0);
  CHECK(contains(version.out, "libmkernel 0."));
  const Outcome env = mk_perf({"--env"}, {{"MK_LOG", "warn"}});
  CHECK(env.exit_code == 0);
  CHECK(contains(env.out, "MK_SOCKET_IFNAME"));
  CHECK(contains(env.out, "warn"));
  CHECK(contains(env.out, "launcher: none found"));
  const Outcome launched = mk_perf({"--env"}, {{"RANK", "3"}, {"WORLD_SIZE", "4"}});
  CHECK(contains(launched.out, "launcher: torchrun, rank 3 of 4"));
}

TEST_CASE("all operators of the host run, pass their checks and come as a table and as JSON") {
  const Folder folder;
  const std::string path = folder.path / "results.json";
  const Outcome outcome = mk_perf(with({"all", "-g", "2", "--check", "--json", path}, kQuick));
  INFO(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  CHECK(outcome.err == "");
  CHECK(contains(outcome.out, "fused us"));
  CHECK(contains(outcome.out, "gemm_reduce_scatter"));
  CHECK(contains(outcome.out, "ok, exact"));

  const Value document = read_json(path);
  CHECK(document.keys() == "version machine results");
  CHECK(document["version"].is(Type::kString));
  CHECK(document["machine"]["cores"].number >= 1);
  CHECK(document["machine"]["build"].is(Type::kString));
  REQUIRE(document["results"].items.size() >= 3);
  std::vector<std::string> operators;
  for (const Value& result : document["results"].items) {
    CHECK(result.keys() ==
          "operator device ranks nodes shape dtype mode check fused_us baseline_us gemm_us alone_us "
          "collective_us roofline_us tflops cublas_us link_us network_us unfused_us moving_us host_us sm_mhz "
          "watts");
    operators.push_back(result["operator"].text);
    CHECK(result["device"].text == "host");
    CHECK(result["ranks"].number == 2);
    CHECK(result["nodes"].number == 1);
    const bool is_attention = result["operator"].text.rfind("ring_attention", 0) == 0;
    const bool is_moe = result["operator"].text.rfind("moe_", 0) == 0;
    CHECK(result["shape"].keys() == (is_attention ? "batch seq heads kv_heads dim causal zigzag packed"
                                     : is_moe     ? "tokens hidden inter experts topk zipf"
                                                  : "m n k"));
    CHECK(result["dtype"].text == "bf16");
    CHECK(result["mode"].text == "isolated");
    CHECK(result["check"].keys() == "passed exact relative_error");
    CHECK(result["check"]["passed"].truth);
    CHECK(result["check"]["exact"].truth);
    CHECK(result["check"]["relative_error"].number <= 5e-3);
    CHECK((is_attention ? result["gemm_us"].is(Type::kNull) : result["gemm_us"].number > 0));
    CHECK((is_attention ? result["alone_us"].number > 0 : result["alone_us"].is(Type::kNull)));
    check_figures(result);
  }
  for (const char* name : {"allgather_gemm", "allgather_gemm_wgrad", "gemm_reduce_scatter", "gemm_allreduce",
                           "ring_attention", "ring_attention_backward"}) {
    CHECK(std::count(operators.begin(), operators.end(), name) >= 1);
  }
}

TEST_CASE("a trace of all operators has launches and work of every rank, and leaves one file") {
  const Folder folder;
  const std::string path = folder.path / "trace.json";
  const Outcome outcome = mk_perf(with({"all", "-g", "2", "--nodes", "2", "--trace", path}, kQuick));
  INFO(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  const auto files = std::filesystem::directory_iterator(folder.path);
  CHECK(std::distance(begin(files), end(files)) == 1);
  const Value trace = read_json(path);
  std::map<std::pair<std::string, int>, int> launches;  // of an operator on a rank
  std::map<std::pair<std::string, int>, int> spans;     // of a kind
  for (const Value& event : trace["traceEvents"].items) {
    if (event["ph"].text != "X") continue;
    const int rank = static_cast<int>(event["pid"].number);
    const bool is_launch = event["tid"].number == 0;
    ++(is_launch ? launches : spans)[{event["name"].text, rank}];
  }
  CHECK(launches.size() == 2 * 7);
  for (const auto& [key, count] : launches) {
    INFO(key.first << " on rank " << key.second);
    CHECK(count > 0);
    CHECK(count % 3 == 0);
  }
  for (const char* kind : {"wait", "copy", "send", "compute", "reduce"}) {
    for (int rank = 0; rank < 2; ++rank) {
      INFO(kind << " on rank " << rank);
      CHECK(spans[{kind, rank}] > 0);
    }
  }
}

TEST_CASE("emulated nodes, other types, back to back, without a check") {
  const Folder folder;
  const std::string path = folder.path / "results.json";
  const Outcome outcome =
      mk_perf(with({"gemm_allreduce", "-g", "4", "--nodes", "2", "--shape", "m=37,n=24,k=17", "--dtype", "fp16",
                    "--out-dtype", "fp32", "--mode", "back-to-back", "--json", path},
                   kQuick));
  INFO(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  const Value document = read_json(path);
  REQUIRE(document["results"].items.size() == 1);
  const Value& result = document["results"].items[0];
  CHECK(result["ranks"].number == 4);
  CHECK(result["nodes"].number == 2);
  CHECK(result["dtype"].text == "fp16->fp32");
  CHECK(result["mode"].text == "back-to-back");
  CHECK(result["check"]["passed"].is(Type::kNull));
  CHECK(result["check"]["relative_error"].is(Type::kNull));
  check_figures(result);
}

TEST_CASE("both modes in one run, B as [n, k], the host's time of a call, a part of a preset") {
  const Folder folder;
  const std::string path = folder.path / "results.json";
  const Outcome outcome = mk_perf(with({"gemm_reduce_scatter", "-g", "2", "--only", "m=197", "--mode", "both",
                                        "--check", "--b-layout", "nk", "--host-time", "--json", path},
                                       kQuick));
  INFO(outcome.err << outcome.out);
  REQUIRE(outcome.exit_code == 0);
  CHECK(contains(outcome.out, "median of 3 isolated launches"));
  CHECK(contains(outcome.out, "median of 3 back-to-back launches"));
  const Value document = read_json(path);
  REQUIRE(document["results"].items.size() == 2);
  for (size_t i = 0; i < 2; ++i) {
    const Value& result = document["results"].items[i];
    CHECK(result["shape"]["m"].number == 197);
    CHECK(result["mode"].text == (i % 2 ? "back-to-back" : "isolated"));
    CHECK(result["check"]["passed"].truth);
    CHECK(result["host_us"].number > 0);
    CHECK(result["gemm_us"].number > 0);
    check_figures(result);
  }
}

TEST_CASE("a call that takes the host longer than it may has failed") {
  const auto run = [](const char* limit_us) {
    return mk_perf(
        with({"gemm_reduce_scatter", "-g", "2", "--only", "m=197", "--host-time", "--host-limit", limit_us},
             kQuick));
  };
  // On the host executor a call only hands over its arguments; the operating system may still take a while.
  CHECK(run("1000000").exit_code == 0);
  const Outcome outcome = run("1");
  INFO(outcome.err << outcome.out);
  CHECK(outcome.exit_code == 1);
  CHECK(contains(outcome.err + outcome.out, "us of the host's time in a call, expected at most 1"));
}

TEST_CASE("without the fusion, beside it: the product alone and what moves the data, one after the other") {
  const Folder folder;
  const std::string path = folder.path / "results.json";
  const Outcome outcome = mk_perf(with(
      {"gemm_allreduce", "-g", "2", "--nodes", "2", "--unfused", "--shape", "m=37,n=16,k=33", "--json", path},
      kQuick));
  INFO(outcome.err << outcome.out);
  REQUIRE(outcome.exit_code == 0);
  CHECK(contains(outcome.out, "x unfused"));
  const Value document = read_json(path);
  REQUIRE(document["results"].items.size() == 1);
  const Value& result = document["results"].items[0];
  CHECK(result["nodes"].number == 2);
  // Which of the two is longer is not certain: medians of three launches, on a machine that does other things.
  CHECK(result["moving_us"].number > 0);
  CHECK(result["unfused_us"].number > 0);
  check_figures(result);
}

TEST_CASE("operators that add to their output pass their check, and those that cannot say so") {
  for (const char* name : {"allgather_gemm", "allgather_gemm_wgrad", "gemm_reduce_scatter", "gemm_allreduce"}) {
    const Outcome outcome = mk_perf(
        with({name, "-g", "3", "--accumulate", "--out-dtype", "fp32", "--check", "--shape", "m=37,n=19,k=33"},
             kQuick));
    INFO(outcome.err);
    CHECK(outcome.exit_code == 0);
    CHECK(contains(outcome.out, "ok, exact"));
    CHECK(contains(outcome.out, "C is added to"));
  }
  const Outcome other = mk_perf({"ring_attention", "--accumulate"});
  CHECK(other.exit_code == 2);
  CHECK(contains(other.err, "--accumulate: ring_attention does not add"));
}

TEST_CASE("all-reduces whose output is in symmetric memory pass their check, one after the other") {
  const Outcome outcome = mk_perf(with({"gemm_allreduce", "-g", "3", "--symmetric", "--check", "--shape",
                                        "m=37,n=24,k=33", "--shape", "m=300,n=64,k=8"},
                                       kQuick));
  INFO(outcome.err << outcome.out);
  CHECK(outcome.exit_code == 0);
  CHECK(contains(outcome.out, "symmetric memory"));
}

TEST_CASE("every GEMM operator passes its check with B as [n, k]") {
  const Outcome outcome =
      mk_perf(with({"all", "-g", "3", "--b-layout", "nk", "--check", "--shape", "m=37,n=19,k=33"}, kQuick));
  INFO(outcome.err << outcome.out);
  CHECK(outcome.exit_code == 0);
}

TEST_CASE("every dtype passes its check, on one rank and on ranks without rows") {
  for (const char* dtype : {"bf16", "fp16"}) {
    for (const char* out : {"bf16", "fp16", "fp32"}) {
      for (const char* ranks : {"1", "3"}) {
        INFO(dtype << " " << out << " " << ranks);
        const Outcome outcome =
            mk_perf(with({"all", "-g", ranks, "--check", "--shape", "m=2,n=19,k=33", "--shape",
                          "m=65,n=8,k=200", "--dtype", dtype, "--out-dtype", out},
                         kQuick));
        INFO(outcome.err << outcome.out);
        CHECK(outcome.exit_code == 0);
      }
    }
  }
}

TEST_CASE("expert layers pass their check on one rank and several nodes, and on a sample of a larger shape") {
  for (const char* name : {"moe_dispatch_gemm", "moe_gemm_combine"}) {
    for (const auto& [ranks, nodes] : {std::pair{"1", "1"}, {"4", "2"}}) {
      const Outcome outcome = mk_perf(with({name, "-g", ranks, "--nodes", nodes, "--check", "--dtype", "fp16",
                                            "--shape", "tokens=37,hidden=24,inter=16,experts=7,topk=3",
                                            "--shape", "tokens=2,hidden=8,inter=8,experts=4,topk=4", "--shape",
                                            "tokens=700,hidden=128,inter=256,experts=4,topk=2"},
                                           kQuick));
      INFO(name << " " << ranks << "\n" << outcome.err << outcome.out);
      CHECK(outcome.exit_code == 0);
      CHECK(contains(outcome.out, "ok, exact"));
    }
  }
}

TEST_CASE("ring attention passes its check in every mode, and on a sample of a larger shape") {
  for (const char* name : {"ring_attention", "ring_attention_backward"}) {
    const Outcome outcome =
        mk_perf(with({name, "-g", "3", "--nodes", "3", "--check", "--dtype", "fp16", "--shape",
                      "batch=2,seq=37,heads=4,kv_heads=2,dim=24", "--shape",
                      "batch=1,seq=40,heads=1,kv_heads=1,dim=8,causal=1", "--shape",
                      "batch=1,seq=77,heads=4,kv_heads=2,dim=16,packed=4", "--shape",
                      "batch=1,seq=77,heads=2,kv_heads=1,dim=16,causal=1,zigzag=1,packed=4", "--shape",
                      "batch=1,seq=3200,heads=1,kv_heads=1,dim=16,causal=1,zigzag=1"},
                     kQuick));
    INFO(outcome.err << outcome.out);
    CHECK(outcome.exit_code == 0);
    CHECK(contains(outcome.out, "ok, exact"));
    CHECK(contains(outcome.out, "(sample)"));
  }
}

// Of 4 MiB the benchmark has more sets than of less.
TEST_CASE("ranks whose operands are of different sizes launch as often") {
  for (const auto& [name, shape] :
       {std::pair{"allgather_gemm", "m=1005,n=8,k=4096"},
        {"ring_attention_backward", "batch=1,seq=33,heads=949,kv_heads=949,dim=16"}}) {
    const Outcome outcome = mk_perf(with({name, "-g", "2", "--check", "--shape", shape}, kQuick));
    INFO(name << "\n" << outcome.err << outcome.out);
    CHECK(outcome.exit_code == 0);
  }
}

TEST_CASE("ranks of a launcher find each other by a file, past what an earlier job left there") {
  const Folder folder;
  const std::string id_path = folder.path / "id";
  const std::string json_path = folder.path / "results.json";
  std::ofstream(id_path) << "left by an earlier job";
  const std::vector<std::string> arguments =
      with({"all", "--check", "--shape", "m=48,n=16,k=32", "--id-file", id_path, "--json", json_path}, kQuick);
  std::vector<program::Process> ranks;
  for (const char* rank : {"1", "0"}) {
    ranks.emplace_back(mk_perf_path(), arguments, Variables{{"MK_RANK", rank}, {"MK_NRANKS", "2"}});
  }
  const Outcome other = ranks[0].wait(120);
  const Outcome first = ranks[1].wait(120);
  INFO(first.err << other.err);
  CHECK(first.exit_code == 0);
  CHECK(other.exit_code == 0);
  CHECK(contains(first.out, "ok, exact"));
  CHECK(other.out == "");
  CHECK(read_json(json_path)["results"].items.size() == 4);
  CHECK(!std::filesystem::exists(id_path));
}

TEST_CASE("a failing check exits 1, says so in the table and names rank, shape and place") {
  const char* spoiler = std::getenv("MK_PERF_SPOILER");
  if (!spoiler) {
    WARN("not run: a preloaded library does not go together with a sanitizer, or with a static libmkernel");
    return;
  }
  const std::vector<std::string> arguments =
      with({"gemm_allreduce", "-g", "2", "--check", "--shape", "m=32,n=16,k=24", "--iters", "20"},
           {"--device", "host", "--warmup", "3"});
  const auto spoiled = [&](const char* how) {
    return mk_perf(arguments, {{"LD_PRELOAD", spoiler}, {"MK_PERF_SPOIL", how}});
  };
  CHECK(spoiled("not at all").exit_code == 0);

  // Nobody asks for symmetric memory but with --symmetric.
  CHECK(spoiled("no symmetric memory").exit_code == 0);
  const Outcome symmetric = mk_perf(with(arguments, {"--symmetric"}),
                                    {{"LD_PRELOAD", spoiler}, {"MK_PERF_SPOIL", "no symmetric memory"}});
  CHECK(symmetric.exit_code == 1);
  CHECK(contains(symmetric.err, "mk_mem_alloc"));

  const Outcome bit = spoiled("bit");
  CHECK(bit.exit_code == 1);
  CHECK(contains(bit.out, "FAILED, not exact"));
  CHECK(contains(bit.err,
                 "check failed: gemm_allreduce m=32,n=16,k=24: integer inputs: row 0, column 8: expected"));

  const Outcome unwritten = spoiled("unwritten");
  CHECK(unwritten.exit_code == 1);
  CHECK(contains(unwritten.err, "row 0, column 8: never written"));

  const Outcome late = spoiled("late");
  CHECK(late.exit_code == 1);
  CHECK(contains(late.out, "FAILED, exact"));
  CHECK(contains(late.err, "a repeated launch on the same inputs gave other bits"));
}
