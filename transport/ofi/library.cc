// SPDX-License-Identifier: MIT
#include "library.h"

#include <dlfcn.h>

#include <cstdlib>

namespace mk::ofi {
namespace {

struct Loaded {
  Library library{};
  Status status;
};

template <class FUNCTION>
void find(void* handle, const char* name, FUNCTION& function, std::string& missing) {
  function = reinterpret_cast<FUNCTION>(dlsym(handle, name));
  if (function == nullptr) missing += std::string(" ") + name;
}

Loaded load() {
  Loaded loaded;
  void* handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    loaded.status = Status(MK_ERROR_UNSUPPORTED,
                           format("libfabric.so.1 cannot be loaded (%s); install the package libfabric1",
                                  why != nullptr ? why : "no reason given"));
    return loaded;
  }
  std::string missing;
  find(handle, "fi_getinfo", loaded.library.getinfo, missing);
  find(handle, "fi_freeinfo", loaded.library.freeinfo, missing);
  find(handle, "fi_dupinfo", loaded.library.dupinfo, missing);
  find(handle, "fi_fabric", loaded.library.fabric, missing);
  find(handle, "fi_strerror", loaded.library.strerror, missing);
  find(handle, "fi_version", loaded.library.version, missing);
  if (!missing.empty()) {
    loaded.status =
        Status(MK_ERROR_UNSUPPORTED, "libfabric.so.1 lacks" + missing + "; install libfabric 1.14 or newer");
  }
  return loaded;
}

}  // namespace

Result<const Library*> load_library() {
  static const Loaded loaded = load();
  if (!loaded.status.ok()) return loaded.status;
  return &loaded.library;
}

std::string describe(const Library& library, ssize_t error) {
  return library.strerror(static_cast<int>(std::labs(error)));
}

}  // namespace mk::ofi
