// SPDX-License-Identifier: MIT
#include "machine.h"

#include <sched.h>
#include <sys/utsname.h>

#include <filesystem>
#include <fstream>

#include "errors.h"

#ifndef MK_PERF_BUILD
#error "the build defines MK_PERF_BUILD, the version and commit of the source"
#endif

namespace perf {
namespace {

// What follows `label` and a colon on the first line of a file that begins with it.
std::optional<std::string> field_of_file(const std::filesystem::path& path, const std::string& label) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(label, 0) != 0) continue;
    const size_t start = line.find_first_not_of(" \t", line.find(':') + 1);
    if (start != std::string::npos) return line.substr(start);
  }
  return std::nullopt;
}

std::optional<std::string> first_gpu() {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", error)) {
    return field_of_file(entry.path() / "information", "Model");
  }
  return std::nullopt;
}

int usable_cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 0;
}

}  // namespace

Machine describe_machine(mk_device_t device) {
  Machine machine;
  machine.cpu = field_of_file("/proc/cpuinfo", "model name");
  machine.cores = usable_cores();
  utsname names{};
  if (uname(&names) == 0) machine.kernel = std::string(names.sysname) + " " + names.release;
  if (device == MK_DEVICE_CUDA) {
    machine.gpu = first_gpu();
    machine.driver = field_of_file("/proc/driver/nvidia/version", "NVRM version");
  }
  machine.build = build_id();
  machine.compiler = __VERSION__;
  return machine;
}

void complete(Machine& machine, const Machine& found) {
  const auto add = [](auto& field, const auto& value) {
    if (value) field = value;
  };
  add(machine.gpu, found.gpu);
  add(machine.driver, found.driver);
  add(machine.clocks, found.clocks);
  add(machine.nvlinks, found.nvlinks);
  add(machine.link, found.link);
  add(machine.network_gb_per_s, found.network_gb_per_s);
  add(machine.nccl, found.nccl);
  add(machine.cublaslt, found.cublaslt);
}

std::string library_version() {
  int version = 0;
  require(mk_get_version(&version), "mk_get_version", nullptr);
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::string build_id() { return MK_PERF_BUILD; }

}  // namespace perf
