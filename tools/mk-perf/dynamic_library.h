// SPDX-License-Identifier: MIT
// A library that is loaded when it is there: mk-perf itself needs neither a driver nor NCCL nor cuBLAS.
#pragma once

#include <string>
#include <vector>

namespace perf {

// Thrown when a library is not there or is not what it should be; the reason says what was tried.
struct LibraryAbsent {
  std::string reason;
};

// Stays loaded to the end of the process: such libraries leave threads and handlers behind.
class DynamicLibrary {
 public:
  // `path` alone when it is not empty, else the first of `names` that the loader or a CUDA folder has: the
  // loader's paths, then lib64 and lib of $CUDA_HOME and of /usr/local/cuda. Throws LibraryAbsent.
  DynamicLibrary(const std::string& path, const std::vector<std::string>& names);

  // Throws LibraryAbsent when the library has no such function.
  template <typename Function>
  void find(const char* name, Function*& function) const {
    function = reinterpret_cast<Function*>(symbol(name, true));
  }
  // nullptr when it has none.
  template <typename Function>
  void find_optional(const char* name, Function*& function) const {
    function = reinterpret_cast<Function*>(symbol(name, false));
  }

  const std::string& name() const { return name_; }  // as it was opened

 private:
  void* symbol(const char* name, bool required) const;

  void* handle_ = nullptr;
  std::string name_;
};

}  // namespace perf
