// SPDX-License-Identifier: MIT
#include "trace_files.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "errors.h"

namespace perf {
namespace {

constexpr int kTracedLaunches = 3;

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::trunc);
  file << text;
  if (!file.flush()) throw UsageError("--trace " + path + ": cannot write: " + std::strerror(errno));
}

}  // namespace

void create_trace_file(const std::string& path) { write_file(path, ""); }

std::string joined_traces(const std::vector<std::string>& paths) {
  const std::string head = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n";
  const std::string tail = "\n]}\n";
  std::string joined = head;
  for (const std::string& path : paths) {
    std::ifstream file(path);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    if (!file) {
      throw RunError("--trace: " + path + " cannot be read here; choose a folder that all ranks share");
    }
    if (text.size() <= head.size() + tail.size() || text.compare(0, head.size(), head) != 0 ||
        text.compare(text.size() - tail.size(), tail.size(), tail) != 0) {
      throw RunError("--trace: " + path + " is not a trace of this mk-perf's library");
    }
    if (joined.size() > head.size()) joined += ",\n";
    joined.append(text, head.size(), text.size() - head.size() - tail.size());
  }
  return joined + tail;
}

TraceFiles::TraceFiles(std::string path, mk_comm_t comm, const mk_comm_info_t& info, RankGroup& group)
    : path_(std::move(path)), comm_(comm), rank_(info.rank), nranks_(info.nranks), group_(group) {}

TraceFiles::~TraceFiles() {
  for (int number = 0; number < num_parts_; ++number) unlink(part(rank_, number).c_str());
}

std::string TraceFiles::part(int rank, int number) const {
  return path_ + ".rank" + std::to_string(rank) + "." + std::to_string(number);
}

void TraceFiles::record(const std::function<void()>& launch, const std::function<void()>& wait) {
  if (path_.empty()) return;
  group_.barrier();
  require(mk_trace_start(comm_, nullptr), "mk_trace_start", comm_);
  for (int i = 0; i < kTracedLaunches; ++i) launch();
  wait();
  const std::string path = part(rank_, num_parts_++);
  require(mk_trace_stop(comm_, path.c_str()), "mk_trace_stop", comm_);
}

void TraceFiles::join() {
  if (path_.empty()) return;
  group_.barrier();
  if (rank_ == 0) {
    std::vector<std::string> paths;
    for (int number = 0; number < num_parts_; ++number) {
      for (int rank = 0; rank < nranks_; ++rank) paths.push_back(part(rank, number));
    }
    write_file(path_, joined_traces(paths));
  }
  group_.barrier();
}

}  // namespace perf
