// SPDX-License-Identifier: MIT
#include "verbs_library.h"

#include <dlfcn.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "../../lib/env.h"
#include "../../lib/log.h"

namespace mk::verbs {
namespace {

constexpr const char* kDefaultLibrary = "libibverbs.so.1";
constexpr const char* kEfaLibrary = "libefa.so.1";

template <class Function>
bool find(void* handle, const char* symbol, Function* out) {
  *out = reinterpret_cast<Function>(dlsym(handle, symbol));
  return *out != nullptr;
}

void find_efa(void* handle, Library* library) {
  bool all = true;
#define MK_VERBS_FIND(member, symbol) all = find(handle, #symbol, &library->member) && all;
  MK_EFA_OPTIONAL(MK_VERBS_FIND)
#undef MK_VERBS_FIND
  if (!all) library->efa_missing = "it lacks efadv_create_qp_ex, efadv_query_device or efadv_query_ah";
}

Result<std::unique_ptr<Library>> open_library(const std::string& wanted) {
  const std::string name = wanted.empty() ? kDefaultLibrary : wanted;
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return Status(
        MK_ERROR_UNSUPPORTED,
        format("cannot load %s: %s; install libibverbs (Debian, Ubuntu: libibverbs1) or set MK_VERBS_LIBRARY",
               name.c_str(), dlerror()));
  }
  auto library = std::make_unique<Library>();
  library->name = name;
  std::string missing;
#define MK_VERBS_FIND(member, symbol) \
  if (!find(handle, #symbol, &library->member)) missing += " " #symbol;
  MK_VERBS_REQUIRED(MK_VERBS_FIND)
#undef MK_VERBS_FIND
  if (!missing.empty()) {
    return Status(MK_ERROR_UNSUPPORTED, format("%s lacks%s", name.c_str(), missing.c_str()));
  }
#define MK_VERBS_FIND(member, symbol) find(handle, #symbol, &library->member);
  MK_VERBS_OPTIONAL(MK_VERBS_FIND)
#undef MK_VERBS_FIND
  void* efa = wanted.empty() ? dlopen(kEfaLibrary, RTLD_NOW | RTLD_LOCAL) : handle;
  if (efa == nullptr) {
    library->efa_missing = format("cannot load %s: %s", kEfaLibrary, dlerror());
  } else {
    find_efa(efa, library.get());
  }
  Dl_info where{};
  dladdr(reinterpret_cast<void*>(library->get_device_list), &where);
  log(MK_LOG_INFO, "verbs: loaded %s", where.dli_fname != nullptr ? where.dli_fname : name.c_str());
  return library;
}

}  // namespace

// What the header's ibv_query_port does; that one would bring a link-time dependency.
int Library::query_port(ibv_context* context, uint8_t port, ibv_port_attr* attributes) const {
  *attributes = ibv_port_attr{};
  verbs_context* table = verbs_get_ctx(context);
  const bool new_enough = table != nullptr &&
                          table->sz >= sizeof *table - offsetof(verbs_context, query_port) &&
                          table->query_port != nullptr;
  if (new_enough) return table->query_port(context, port, attributes, sizeof *attributes);
  return query_port_of_old(context, port, reinterpret_cast<_compat_ibv_port_attr*>(attributes));
}

Result<const Library*> load_library() {
  static std::mutex mutex;
  // Never destroyed: proxies of a program that ends may still be calling.
  static auto& loaded = *new std::map<std::string, std::unique_ptr<Library>>;
  const std::string wanted = env::text("MK_VERBS_LIBRARY");
  std::lock_guard lock(mutex);
  auto& entry = loaded[wanted];
  if (!entry) {
    auto library = open_library(wanted);
    if (!library.ok()) return library.status();
    entry = library.take();
  }
  return static_cast<const Library*>(entry.get());
}

}  // namespace mk::verbs
