// SPDX-License-Identifier: MIT
// mk_trace_start and mk_trace_stop on the host executor: what the file says of launches, and misuse.
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <stdexcept>
#include <thread>

#include "test/mk_perf/json_reader.h"
#include "test/multi_rank/exact_call.h"
#include "test/multi_rank/thread_job.h"
#include "test/support/catch.h"

using namespace mk::test;

namespace {

struct Folder {
  std::filesystem::path path;
  Folder() {
    char name[] = "/tmp/mk_trace_test_XXXXXX";
    if (!mkdtemp(name)) throw std::runtime_error("mkdtemp");
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string file(int rank) const { return path / ("trace." + std::to_string(rank)); }
};

struct Span {
  std::string name;
  double start = 0;
  double end = 0;
  int epoch = 0;
  std::string object;  // of a wait
  std::string shape;   // of a launch
};

// One rank's file, taken apart.
struct TraceFile {
  std::vector<Span> launches;
  std::map<int, std::vector<Span>> rows;
  std::map<int, std::string> row_names;
  std::map<int, int> dropped;
  std::map<std::string, double> summary;

  std::vector<Span> all(const std::string& name) const {
    std::vector<Span> found;
    for (const auto& [row, spans] : rows) {
      for (const Span& span : spans) {
        if (span.name == name) found.push_back(span);
      }
    }
    return found;
  }
};

bool has(const json::Value& object, const std::string& key) {
  return std::find(object.names.begin(), object.names.end(), key) != object.names.end();
}

TraceFile read_trace(const std::string& path, int rank) {
  std::ifstream file(path);
  const json::Value text = json::parse({std::istreambuf_iterator<char>(file), {}});
  TraceFile trace;
  for (const json::Value& event : text["traceEvents"].items) {
    const std::string& phase = event["ph"].text;
    const std::string& name = event["name"].text;
    const int row = static_cast<int>(event["tid"].number);
    CHECK(event["pid"].number == rank);
    if (phase == "M") {
      if (name == "thread_name") trace.row_names[row] = event["args"]["name"].text;
      continue;
    }
    const json::Value& args = event["args"];
    if (phase == "i") {
      if (name == "dropped") trace.dropped[row] = static_cast<int>(args["spans"].number);
      for (size_t i = 0; name == "trace" && i < args.names.size(); ++i)
        trace.summary[args.names[i]] = args.items[i].number;
      continue;
    }
    REQUIRE(phase == "X");
    const double start = event["ts"].number;
    Span span = {name, start, start + event["dur"].number, static_cast<int>(args["epoch"].number), "", ""};
    if (has(args, "object")) span.object = args["object"].text;
    if (has(args, "shape")) span.shape = args["shape"].text;
    (row == 0 ? trace.launches : trace.rows[row]).push_back(span);
  }
  return trace;
}

constexpr double kSlack = 0.002;  // ns digits, as doubles

// In order, and each either apart from or inside those that are open.
void check_nesting(const std::vector<Span>& spans) {
  std::vector<double> open;
  double last = 0;
  for (const Span& span : spans) {
    CHECK(span.start + kSlack >= last);
    last = span.start;
    while (!open.empty() && open.back() <= span.start + kSlack) open.pop_back();
    if (!open.empty()) CHECK(span.end <= open.back() + kSlack);
    CHECK(span.end >= span.start);
    open.push_back(span.end);
  }
}

void check_consistent(const TraceFile& trace) {
  check_nesting(trace.launches);
  std::map<int, Span> launch_of;
  for (const Span& launch : trace.launches) CHECK(launch_of.emplace(launch.epoch, launch).second);
  int spans = 0;
  for (const auto& [row, row_spans] : trace.rows) {
    INFO(trace.row_names.at(row));
    check_nesting(row_spans);
    for (const Span& span : row_spans) {
      REQUIRE(launch_of.count(span.epoch) == 1);
      CHECK(span.start + kSlack >= launch_of[span.epoch].start);
      CHECK(span.end <= launch_of[span.epoch].end + kSlack);
    }
    spans += static_cast<int>(row_spans.size());
  }
  CHECK(trace.summary.at("spans") == spans);
  CHECK(trace.summary.at("launches") == static_cast<double>(trace.launches.size()));
}

constexpr mk_operator_t kOperators[] = {MK_OPERATOR_ALLGATHER_GEMM, MK_OPERATOR_GEMM_REDUCE_SCATTER,
                                        MK_OPERATOR_GEMM_ALLREDUCE};
constexpr const char* kNames[] = {"allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"};

mk_status_t start_default(int, mk_comm_t comm) { return mk_trace_start(comm, nullptr); }

// Every operator `turns` times, and each result is right.
std::vector<Outcome> run_operators(ThreadJob& job, int turns) {
  std::vector<std::string> wrong(static_cast<size_t>(job.nranks()));
  auto outcomes = job.each([&](int rank, mk_comm_t comm) {
    for (int turn = 0; turn < turns; ++turn) {
      for (const mk_operator_t op : kOperators) {
        ExactCall call(op, job.nranks(), rank, static_cast<uint64_t>(turn), 40, 16, 32);
        const mk_status_t status = run_exact_call(comm, call, wrong[static_cast<size_t>(rank)]);
        if (status != MK_SUCCESS) return status;
      }
    }
    return MK_SUCCESS;
  });
  for (const std::string& text : wrong) CHECK(text == "");
  return outcomes;
}

JobOptions options(int nranks, int num_nodes) {
  JobOptions made(node_layout(nranks, num_nodes));
  made.config.host_threads = 2;
  return made;
}

}  // namespace

TEST_CASE("a trace has every launch, and spans of every role") {
  const Folder folder;
  ThreadJob job(options(4, 2));
  REQUIRE(failures(job.started()) == "");
  REQUIRE(all_answer(run_operators(job, 1), MK_SUCCESS));  // not in the trace
  REQUIRE(all_answer(job.each(start_default), MK_SUCCESS));
  REQUIRE(all_answer(run_operators(job, 2), MK_SUCCESS));
  REQUIRE(all_answer(
      job.each([&](int rank, mk_comm_t comm) { return mk_trace_stop(comm, folder.file(rank).c_str()); }),
      MK_SUCCESS));
  REQUIRE(all_answer(run_operators(job, 1), MK_SUCCESS));  // neither is this
  for (int rank = 0; rank < job.nranks(); ++rank) {
    INFO("rank " << rank);
    const TraceFile trace = read_trace(folder.file(rank), rank);
    check_consistent(trace);
    REQUIRE(trace.launches.size() == 6);
    for (size_t i = 0; i < trace.launches.size(); ++i) {
      CHECK(trace.launches[i].name == kNames[i % 3]);
      CHECK(trace.launches[i].epoch == static_cast<int>(i) + 4);
      CHECK(trace.launches[i].shape.substr(0, 4) == "m=40");
    }
    for (const char* kind : {"copy", "send", "compute", "reduce"}) {
      INFO(kind);
      std::set<int> epochs;
      for (const Span& span : trace.all(kind)) epochs.insert(span.epoch);
      CHECK(epochs.size() >= 2);
    }
    std::set<std::string> names;
    for (const auto& [row, name] : trace.row_names) names.insert(name);
    for (const char* name :
         {"launches", "copy", "send", "receive", "compute 0", "compute 1", "reduce", "entry"})
      CHECK(names.count(name) == 1);
    CHECK(trace.summary.at("dropped_spans") == 0);
    CHECK(trace.summary.at("dropped_launches") == 0);
  }
  CHECK(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("a rank that comes late is seen in the others' waits, on one clock") {
  const Folder folder;
  ThreadJob job(options(2, 1));
  REQUIRE(failures(job.started()) == "");
  REQUIRE(all_answer(run_operators(job, 1), MK_SUCCESS));
  REQUIRE(all_answer(job.each(start_default), MK_SUCCESS));
  REQUIRE(all_answer(job.each([](int rank, mk_comm_t comm) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(60));
    ExactCall call(MK_OPERATOR_ALLGATHER_GEMM, 2, rank, 1, 40, 16, 32);
    std::string wrong;
    return run_exact_call(comm, call, wrong);
  }),
                     MK_SUCCESS));
  REQUIRE(all_answer(
      job.each([&](int rank, mk_comm_t comm) { return mk_trace_stop(comm, folder.file(rank).c_str()); }),
      MK_SUCCESS));
  const TraceFile early = read_trace(folder.file(0), 0);
  const TraceFile late = read_trace(folder.file(1), 1);
  REQUIRE(early.launches.size() == 1);
  REQUIRE(late.launches.size() == 1);
  CHECK(late.launches[0].start - early.launches[0].start > 30e3);
  std::map<std::string, double> longest;
  for (const Span& span : early.all("wait")) {
    longest[span.object] = std::max(longest[span.object], span.end - span.start);
    // Nothing that another rank does ends a wait for it before it has come.
    if (span.object == "entry") CHECK(span.end >= late.launches[0].start);
  }
  CHECK(longest["entry"] > 30e3);
  CHECK(longest["chunk"] > 30e3);
  CHECK(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("spans beyond max_spans are counted, and said to be missing") {
  const Folder folder;
  ThreadJob job(options(2, 1));
  REQUIRE(failures(job.started()) == "");
  mk_trace_config_t config = MK_TRACE_CONFIG_INIT;
  config.max_spans = 3;
  REQUIRE(all_answer(job.each([&](int, mk_comm_t comm) { return mk_trace_start(comm, &config); }), MK_SUCCESS));
  REQUIRE(all_answer(run_operators(job, 3), MK_SUCCESS));
  REQUIRE(all_answer(
      job.each([&](int rank, mk_comm_t comm) { return mk_trace_stop(comm, folder.file(rank).c_str()); }),
      MK_SUCCESS));
  const TraceFile trace = read_trace(folder.file(1), 1);
  CHECK(trace.launches.size() == 3);
  CHECK(trace.summary.at("dropped_launches") == 6);
  int dropped = 0;
  for (const auto& [row, spans] : trace.rows) CHECK(spans.size() <= 3);
  for (const auto& [row, count] : trace.dropped) {
    CHECK(trace.rows.at(row).size() == 3);
    CHECK(count > 0);
    dropped += count;
  }
  CHECK(dropped > 0);
  CHECK(trace.summary.at("dropped_spans") == dropped);
  // A new trace begins empty.
  REQUIRE(all_answer(job.each(start_default), MK_SUCCESS));
  REQUIRE(all_answer(
      job.each([&](int rank, mk_comm_t comm) { return mk_trace_stop(comm, folder.file(rank).c_str()); }),
      MK_SUCCESS));
  CHECK(read_trace(folder.file(1), 1).launches.empty());
  CHECK(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("one rank may trace itself alone") {
  const Folder folder;
  ThreadJob job(options(2, 1));
  REQUIRE(failures(job.started()) == "");
  REQUIRE(job.on(1, start_default).status == MK_SUCCESS);
  REQUIRE(all_answer(run_operators(job, 1), MK_SUCCESS));
  REQUIRE(mk_trace_stop(job.comm(1), folder.file(1).c_str()) == MK_SUCCESS);
  const TraceFile trace = read_trace(folder.file(1), 1);
  check_consistent(trace);
  CHECK(trace.launches.size() == 3);
  CHECK(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("traces at the wrong moment") {
  const Folder folder;
  ThreadJob job(options(1, 1));
  REQUIRE(failures(job.started()) == "");
  const auto refused = [&](const ThreadJob::Call& call, const std::vector<std::string>& says) {
    const Outcome outcome = job.on(0, call);
    INFO(text_of(outcome));
    CHECK(outcome.status == MK_ERROR_INVALID_ARGUMENT);
    for (const std::string& text : says) CHECK(outcome.says(text));
  };
  const std::string good = folder.file(0);
  const auto stop = [](const std::string& path) {
    return [path](int, mk_comm_t comm) { return mk_trace_stop(comm, path.c_str()); };
  };
  refused(stop(good), {"mk_trace_stop", "mk_trace_start", "saw none"});
  CHECK(!std::filesystem::exists(good));
  for (const int64_t spans : {int64_t{-1}, (int64_t{1} << 20) + 1}) {
    refused(
        [spans](int, mk_comm_t comm) {
          mk_trace_config_t config = MK_TRACE_CONFIG_INIT;
          config.max_spans = spans;
          return mk_trace_start(comm, &config);
        },
        {"config.max_spans", "expected 0 to 1048576", std::to_string(spans)});
  }
  REQUIRE(job.on(0, start_default).status == MK_SUCCESS);
  refused(start_default, {"mk_trace_start", "under way", "mk_trace_stop"});
  REQUIRE(all_answer(run_operators(job, 1), MK_SUCCESS));
  // What could not be written is still there.
  refused(stop(folder.path / "no" / "such"), {"path", "no/such", "No such file"});
  refused(stop(folder.path), {"path", "directory"});
  refused(stop(""), {"path"});
  if (access("/dev/full", W_OK) == 0) {
    const Outcome full = job.on(0, stop("/dev/full"));
    INFO(text_of(full));
    CHECK(full.status == MK_ERROR_SYSTEM);
    CHECK(full.says("No space left"));
  }
  CHECK(mk_trace_stop(job.comm(0), good.c_str()) == MK_SUCCESS);
  CHECK(read_trace(good, 0).launches.size() == 3);
  refused(stop(good), {"saw none"});
  REQUIRE(job.on(0, start_default).status == MK_SUCCESS);
  CHECK(mk_trace_stop(job.comm(0), nullptr) == MK_SUCCESS);
  REQUIRE(job.on(0, start_default).status == MK_SUCCESS);
  CHECK(all_answer(job.finalize(), MK_SUCCESS));
  for (const ThreadJob::Call& late : {ThreadJob::Call(start_default), ThreadJob::Call(stop(good))}) {
    const Outcome outcome = job.on(0, late);
    CHECK(outcome.status == MK_ERROR_INVALID_HANDLE);
    CHECK(outcome.says("finalized"));
  }
}

TEST_CASE("an aborted communicator starts no trace, and still writes the one it has") {
  const Folder folder;
  ThreadJob job(options(2, 1));
  REQUIRE(failures(job.started()) == "");
  REQUIRE(job.on(0, start_default).status == MK_SUCCESS);
  REQUIRE(all_answer(run_operators(job, 1), MK_SUCCESS));
  // Rank 1 never launches this one.
  ExactCall call(MK_OPERATOR_ALLGATHER_GEMM, 2, 0, 1, 40, 16, 32);
  REQUIRE(call.launch(job.comm(0)) == MK_SUCCESS);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  REQUIRE(mk_comm_abort(job.comm(0)) == MK_SUCCESS);
  CHECK(mk_trace_start(job.comm(0), nullptr) == MK_ERROR_ABORTED);
  CHECK(mk_trace_stop(job.comm(0), folder.file(0).c_str()) == MK_SUCCESS);
  const TraceFile trace = read_trace(folder.file(0), 0);
  check_consistent(trace);
  REQUIRE(trace.launches.size() == 4);
  bool waited = false;
  for (const Span& span : trace.all("wait"))
    waited = waited || (span.epoch == 4 && span.end - span.start > 10e3);
  CHECK(waited);
  CHECK(mk_trace_start(job.comm(0), nullptr) == MK_ERROR_ABORTED);
}
