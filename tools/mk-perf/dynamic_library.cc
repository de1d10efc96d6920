// SPDX-License-Identifier: MIT
#include "dynamic_library.h"

#include <dlfcn.h>

#include <cstdlib>

namespace perf {
namespace {

std::vector<std::string> candidates(const std::string& path, const std::vector<std::string>& names) {
  if (!path.empty()) return {path};
  std::vector<std::string> all = names;
  const char* cuda_home = std::getenv("CUDA_HOME");
  for (const std::string& home : {std::string(cuda_home ? cuda_home : ""), std::string("/usr/local/cuda")}) {
    if (home.empty()) continue;
    for (const std::string& name : names) {
      all.push_back(home + "/lib64/" + name);
      all.push_back(home + "/lib/" + name);
    }
  }
  return all;
}

}  // namespace

DynamicLibrary::DynamicLibrary(const std::string& path, const std::vector<std::string>& names) {
  std::string tried;
  std::string first_error;
  for (const std::string& candidate : candidates(path, names)) {
    handle_ = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_) {
      name_ = candidate;
      return;
    }
    const char* error = dlerror();
    if (first_error.empty() && error) first_error = error;
    tried += (tried.empty() ? "" : ", ") + candidate;
  }
  throw LibraryAbsent{first_error + " (tried " + tried + ")"};
}

void* DynamicLibrary::symbol(const char* name, bool required) const {
  void* found = dlsym(handle_, name);
  if (!found && required) throw LibraryAbsent{name_ + " has no function " + name};
  return found;
}

}  // namespace perf
