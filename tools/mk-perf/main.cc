// SPDX-License-Identifier: MIT
// mk-perf: measures and checks the operators of libmkernel. docs/performance.md says what is measured and how.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "benchmark.h"
#include "check_network.h"
#include "errors.h"
#include "launcher.h"
#include "machine.h"
#include "options.h"
#include "rank_group.h"
#include "rank_processes.h"
#include "trace_files.h"

namespace perf {
namespace {

constexpr int kHostRanks = 2;  // without a launcher
// A survivor learns of a dead rank within 8 s, and destroys its communicator within 5.
constexpr int kGraceMs = 15000;
constexpr std::chrono::seconds kIdDeadline{60};

using File = std::unique_ptr<FILE, int (*)(FILE*)>;

const char* environment(const char* name) { return std::getenv(name); }

// Everything that a rank needs to know to begin.
struct RankStart {
  int rank = 0;
  int nranks = 1;
  int local_rank = 0;
  SharedMemory* shared = nullptr;  // of ranks that mk-perf started itself
  std::string job;
  int gpus = 0;  // that this process may use
};

// The ranks run without NVLink multicast, whichever library a baseline brings.
void disable_multicast() {
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", 1);
  setenv("NVSHMEM_DISABLE_NVLS", "1", 1);
}

mk_unique_id_t obtain_id(const Options& options, const RankStart& start, RankGroup* shared_group) {
  mk_unique_id_t id{};
  if (!start.shared && !options.id_path.empty() && start.rank != 0) {
    return await_id(options.id_path, start.job, kIdDeadline);
  }
  if (!start.shared && options.id_path.empty() && start.nranks > 1)
    return parse_unique_id(environment("MK_UNIQUE_ID"));
  if (start.rank == 0) require(mk_get_unique_id(&id), "mk_get_unique_id", nullptr);
  if (!start.shared) {
    if (!options.id_path.empty()) publish_id(options.id_path, start.job, id);
    return id;
  }
  if (start.rank == 0) start.shared->unique_id() = id;
  shared_group->barrier();
  return start.shared->unique_id();
}

class Communicator {
 public:
  Communicator(const Options& options, const RankStart& start, const mk_unique_id_t& id) {
    const std::vector<int32_t> nodes = node_of_rank(options, start.nranks);
    mk_comm_config_t config = MK_COMM_CONFIG_INIT;
    // The library's choice, among what mk-perf can drive.
    const bool only_host = options.device == MK_DEVICE_AUTO && !find_device(MK_DEVICE_CUDA);
    config.device = only_host ? MK_DEVICE_HOST : options.device;
    config.cuda_device = start.local_rank;
    config.node_of_rank = nodes.empty() ? nullptr : nodes.data();
    require(mk_comm_init(&comm_, &id, start.nranks, start.rank, &config), "mk_comm_init", nullptr);
  }
  ~Communicator() {
    if (comm_) mk_comm_destroy(comm_);
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  mk_comm_t get() const { return comm_; }
  void finalize() const { require(mk_comm_finalize(comm_), "mk_comm_finalize", comm_); }

 private:
  mk_comm_t comm_ = nullptr;
};

void report(const Options& options, const BenchmarkOutput& output, mk_device_t device, FILE* json) {
  Machine machine = describe_machine(device);
  complete(machine, output.machine);
  std::string tables;
  for (const Mode mode : options.modes) {
    if (!tables.empty()) tables += "\n";
    tables += table_text(output.results, {mode, options.warmup, options.iterations});
  }
  tables += notes_text(machine, output.notes);
  std::fwrite(tables.data(), 1, tables.size(), stdout);
  std::fflush(stdout);
  if (!json) return;
  const std::string text = json_text(output.results, machine, library_version());
  if (std::fwrite(text.data(), 1, text.size(), json) != text.size() || std::fflush(json) != 0) {
    throw RunError("--json " + options.json_path + ": cannot write: " + std::strerror(errno));
  }
}

int run_network_check(const Options& options, const RankStart& start, std::string& problems) {
  std::unique_ptr<RankGroup> group;
  if (start.shared) group = make_shared_memory_group(*start.shared, start.rank);
  const mk_unique_id_t id = obtain_id(options, start, group.get());
  std::vector<int32_t> nodes = node_of_rank(options, start.nranks);
  // Ranks of one machine have no network between them.
  for (int rank = 0; start.shared && !options.nodes && rank < start.nranks; ++rank) nodes.push_back(rank);
  const int cuda_device = options.device == MK_DEVICE_HOST ? -1 : start.local_rank;
  const NetworkCheck check = check_network(id, start.nranks, start.rank, nodes, cuda_device);
  if (!start.shared && start.rank == 0 && !options.id_path.empty()) unlink(options.id_path.c_str());
  const int code = check.problems.empty() && check.failure.empty() ? kExitSuccess : kExitFailure;
  problems = check.failure;
  if (start.rank != 0) return code;
  std::fputs(check.text.c_str(), stdout);
  std::fputs(check.problems.empty() ? "" : ("problems:\n" + check.problems).c_str(), stdout);
  if (code == kExitSuccess) std::fputs("no problem found\n", stdout);
  return std::fflush(stdout) == 0 ? code : kExitFailure;
}

// Returns the exit code; `problems` gets a sentence a line.
int run_rank(const Options& options, const RankStart& start, FILE* json, std::string& problems) {
  if (options.check_network) return run_network_check(options, start, problems);
  const std::vector<Selection> work = select_work(options, start.nranks);
  std::unique_ptr<RankGroup> group;
  if (start.shared) group = make_shared_memory_group(*start.shared, start.rank);
  const mk_unique_id_t id = obtain_id(options, start, group.get());
  const Communicator comm(options, start, id);
  // Everyone has read it by now, and a later job must not.
  if (!start.shared && start.rank == 0 && !options.id_path.empty()) unlink(options.id_path.c_str());

  mk_comm_info_t info = MK_COMM_INFO_INIT;
  require(mk_comm_get_info(comm.get(), &info), "mk_comm_get_info", comm.get());
  const DeviceOperations* device = find_device(info.device);
  if (!device) throw UsageError("this mk-perf cannot drive CUDA devices; use --device host");
  device->select(info.cuda_device);
  if (options.baseline == Baseline::kNccl && info.device != MK_DEVICE_CUDA) {
    throw UsageError(std::string("--baseline nccl: there is no NCCL on device ") + device->name +
                     "; leave it out");
  }
  if (!group) group = make_communicator_group(comm.get(), start.nranks, *device);

  const bool show_progress = start.rank == 0 && isatty(STDERR_FILENO);
  BenchmarkOutput output = run_benchmark({options, comm.get(), *group, *device, show_progress}, work);
  if (info.device == MK_DEVICE_HOST && start.gpus > 0) {
    output.notes.push_back("on the host executor, though CUDA shows " + std::to_string(start.gpus) +
                           " GPUs: each rank of a machine needs a Hopper GPU of its own");
  }
  group.reset();
  comm.finalize();
  if (start.rank == 0) report(options, output, info.device, json);
  for (const std::string& problem : output.problems) problems += (problems.empty() ? "" : "\n") + problem;
  return output.all_passed ? kExitSuccess : kExitFailure;
}

int guarded_run_rank(const Options& options, const RankStart& start, FILE* json, std::string& problems) {
  try {
    return run_rank(options, start, json, problems);
  } catch (const std::bad_alloc&) {
    problems = "out of host memory; choose a smaller shape";
    return kExitFailure;
  } catch (const std::exception& error) {
    problems = error.what();
    return exit_code_of(error);
  }
}

void print_variables() {
  const auto print = [](const char* name, const char* value, const char* fallback, const char* description) {
    std::printf("%-20s %-24s %s\n", name, value ? value : (std::string("(") + fallback + ")").c_str(),
                description);
  };
  std::printf("%-20s %-24s %s\n", "variable", "value (default)", "meaning");
  mk_env_t variable = MK_ENV_INIT;
  for (size_t index = 0; mk_env_get(index, &variable) == MK_SUCCESS; ++index) {
    print(variable.name, variable.value, variable.default_value, variable.description);
  }
  print("MK_RANK", environment("MK_RANK"), "", "mk-perf: rank of this process, where no launcher says it.");
  print("MK_NRANKS", environment("MK_NRANKS"), "", "mk-perf: number of ranks, with MK_RANK.");
  print("MK_LOCAL_RANK", environment("MK_LOCAL_RANK"), "0",
        "mk-perf: rank on this machine, with MK_RANK; chooses the GPU.");
  print("MK_JOB", environment("MK_JOB"), "",
        "mk-perf: a name of the job, with MK_RANK; tells its --id-file from an older one.");
  print("MK_UNIQUE_ID", environment("MK_UNIQUE_ID") ? "(set)" : nullptr, "",
        "mk-perf: the 128 bytes of mk_get_unique_id in hexadecimal, instead of --id-file. A secret.");
  const std::optional<Launcher> launcher = detect_launcher(environment);
  if (launcher) {
    std::printf("\nlauncher: %s, rank %d of %d, local rank %d\n", launcher->name.c_str(), launcher->rank,
                launcher->nranks, launcher->local_rank);
  } else {
    std::printf("\nlauncher: none found; mk-perf -g RANKS starts ranks on this machine\n");
  }
}

int run_local_ranks(const Options& options, int nranks, int gpus, FILE* json) {
  SharedMemory shared(nranks);
  const auto body = [&](int rank, std::string& problems) {
    return guarded_run_rank(options, {rank, nranks, rank, &shared, "", gpus}, json, problems);
  };
  return report_failures(run_rank_processes(nranks, kGraceMs, body, [&] { shared.abandon(); }));
}

int run_launched_rank(const Options& options, const Launcher& launcher, int gpus, FILE* json) {
  if (launcher.nranks > 1 && options.id_path.empty() && !environment("MK_UNIQUE_ID")) {
    throw UsageError(launcher.name + " started " + std::to_string(launcher.nranks) +
                     " ranks: give them --id-file on a folder that all share, or MK_UNIQUE_ID");
  }
  std::string problems;
  const RankStart start = {launcher.rank, launcher.nranks, launcher.local_rank, nullptr, launcher.job, gpus};
  const int code = guarded_run_rank(options, start, json, problems);
  if (!problems.empty()) {
    std::fprintf(stderr, "mk-perf: rank %d of %d: %s\n", launcher.rank, launcher.nranks, problems.c_str());
  }
  return code;
}

int run(int argc, char** argv) {
  Options options = parse_options(argc, argv);
  if (options.help) return std::fputs(help_text().c_str(), stdout) < 0;
  if (options.version) {
    std::printf("mk-perf %s, libmkernel %s\n", build_id().c_str(), library_version().c_str());
    return kExitSuccess;
  }
  if (options.env) {
    print_variables();
    return kExitSuccess;
  }
  std::optional<Launcher> launcher;
  if (!options.local_ranks) launcher = detect_launcher(environment);
  const int gpus = options.device == MK_DEVICE_HOST ? 0 : num_gpus();
  const int nranks = launcher ? launcher->nranks : options.local_ranks.value_or(gpus > 0 ? gpus : kHostRanks);
  if (options.preset == "default" && gpus > 0 && (launcher || nranks <= gpus)) options.preset = "gpu";
  if (!options.check_network) select_work(options, nranks);
  node_of_rank(options, nranks);

  File json(nullptr, std::fclose);
  if (!options.json_path.empty() && (!launcher || launcher->rank == 0)) {
    json.reset(std::fopen(options.json_path.c_str(), "w"));
    if (!json) throw UsageError("--json " + options.json_path + ": cannot write: " + std::strerror(errno));
  }
  if (!options.trace_path.empty() && (!launcher || launcher->rank == 0)) create_trace_file(options.trace_path);
  disable_multicast();
  return launcher ? run_launched_rank(options, *launcher, gpus, json.get())
                  : run_local_ranks(options, nranks, gpus, json.get());
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) {
  try {
    return perf::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mk-perf: %s\n", error.what());
    return perf::exit_code_of(error);
  }
}
