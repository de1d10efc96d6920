// SPDX-License-Identifier: MIT
// The C interface but the operators: checks, translates, calls.
#include "api.h"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <new>
#include <string_view>

#include "../transport/transport.h"
#include "env.h"
#include "group.h"
#include "log.h"
#include "struct_size.h"

namespace mk::api {
namespace {

thread_local std::string thread_error;
thread_local std::string returned_error;

uint64_t value_of(mk_comm_t comm) { return reinterpret_cast<uint64_t>(comm); }
mk_comm_t handle_of(uint64_t value) { return reinterpret_cast<mk_comm_t>(value); }

Status invalid_handle(const char* function) {
  return Status(
      MK_ERROR_INVALID_HANDLE,
      format("%s: comm: expected a communicator of mk_comm_init in this process, saw one that was never "
             "created or is already destroyed",
             function));
}

// No exception crosses the border.
Status guarded(const std::function<Status()>& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Status(MK_ERROR_OUT_OF_MEMORY, "no host memory");
  } catch (const std::exception& exception) {
    return Status(MK_ERROR_INTERNAL, format("unexpected exception: %s", exception.what()));
  }
}

Status run_alone(Communicator& communicator, const char* function,
                 const std::function<Status(Communicator&)>& body) {
  if (!communicator.enter()) {
    return Status(MK_ERROR_BUSY,
                  format("%s: another thread is inside a call on this communicator; a communicator is used "
                         "by one thread at a time",
                         function));
  }
  // Found before another thread destroyed it, entered after.
  Status status =
      communicator.torn_down() ? invalid_handle(function) : guarded([&] { return body(communicator); });
  communicator.leave();
  return status;
}

}  // namespace

HandleTable<Communicator>& communicators() {
  static auto* const table = new HandleTable<Communicator>;  // outlives exit handlers that use the library
  // The child of a fork() has none of its parent's threads: a communicator would wait for them for ever.
  [[maybe_unused]] static const int registered =
      pthread_atfork([] { communicators().hold(); }, [] { communicators().release(); },
                     [] {
                       communicators().abandon();
                       communicators().release();
                     });
  return *table;
}

mk_status_t finish(const Status& status, Communicator* communicator) {
  if (!status.ok()) {
    thread_error = status.sentence();
    if (communicator) communicator->set_last_error(status.sentence());
    log(MK_LOG_DEBUG, "%s: %s", mk_status_string(status.code()), status.sentence().c_str());
  }
  return status.code();
}

mk_status_t with_communicator(mk_comm_t comm, const char* function,
                              const std::function<Status(Communicator&)>& body) {
  const std::shared_ptr<Communicator> communicator = communicators().find(value_of(comm));
  if (!communicator) return finish(invalid_handle(function));
  return finish(run_alone(*communicator, function, body), communicator.get());
}

mk_status_t host_collective(mk_comm_t comm, const char* function, std::function<Status(Communicator&)> body) {
  if (!group::active()) {
    return with_communicator(comm, function, [&](Communicator& communicator) {
      MK_RETURN_IF_ERROR(communicator.usable());
      return body(communicator);
    });
  }
  const std::shared_ptr<Communicator> communicator = communicators().find(value_of(comm));
  if (!communicator) return finish(invalid_handle(function));
  group::defer(value_of(comm), [communicator, function, body = std::move(body)] {
    Status status = run_alone(*communicator, function, [&](Communicator& inner) {
      MK_RETURN_IF_ERROR(inner.usable());
      return body(inner);
    });
    finish(status, communicator.get());
    return status;
  });
  return MK_SUCCESS;
}

namespace {

Status check_config(const mk_comm_config_t& config) {
  const auto out_of_range = [](const char* field, long long low, long long seen) {
    return Status(MK_ERROR_INVALID_ARGUMENT,
                  format("mk_comm_init: config.%s: expected at least %lld, saw %lld", field, low, seen));
  };
  if (config.device < MK_DEVICE_AUTO || config.device > MK_DEVICE_CUDA) {
    return Status(
        MK_ERROR_INVALID_ARGUMENT,
        format("mk_comm_init: config.device: expected MK_DEVICE_AUTO, _HOST or _CUDA, saw %d", config.device));
  }
  if (config.transport != nullptr && config.transport[0] != '\0') {
    const auto named = [&](const Backend& backend) {
      return std::string_view(backend.name) == config.transport;
    };
    if (std::none_of(backends().begin(), backends().end(), named)) {
      return Status(MK_ERROR_INVALID_ARGUMENT,
                    format("mk_comm_init: config.transport: expected one of %s, or NULL, saw \"%.32s\"",
                           backend_names(backends()).c_str(), config.transport));
    }
  }
  if (config.cuda_device < -1) return out_of_range("cuda_device", -1, config.cuda_device);
  if (config.host_threads < 0) return out_of_range("host_threads", 0, config.host_threads);
  if (config.host_threads > 1024) {
    return Status(
        MK_ERROR_INVALID_ARGUMENT,
        format("mk_comm_init: config.host_threads: expected at most 1024, saw %d", config.host_threads));
  }
  if (config.max_ctas < 0) return out_of_range("max_ctas", 0, config.max_ctas);
  if (config.reserved_sms < 0) return out_of_range("reserved_sms", 0, config.reserved_sms);
  if (config.require_prepare < 0 || config.require_prepare > 1) {
    return Status(
        MK_ERROR_INVALID_ARGUMENT,
        format("mk_comm_init: config.require_prepare: expected 0 or 1, saw %d", config.require_prepare));
  }
  constexpr int64_t kDay = 24 * 3600 * 1000ll;
  for (const auto& [field, value] : {std::pair{"init_timeout_ms", config.init_timeout_ms},
                                     std::pair{"wait_timeout_ms", config.wait_timeout_ms},
                                     std::pair{"peer_timeout_ms", config.peer_timeout_ms}}) {
    if (value < 0) return out_of_range(field, 0, value);
    if (value > kDay) {
      return Status(MK_ERROR_INVALID_ARGUMENT,
                    format("mk_comm_init: config.%s: expected at most a day (%lld ms), saw %lld", field,
                           static_cast<long long>(kDay), static_cast<long long>(value)));
    }
  }
  return {};
}

Status initialise(mk_comm_t* comm, const mk_unique_id_t& id,
                  const std::shared_ptr<Communicator>& communicator) {
  const uint64_t handle = communicators().insert(communicator);
  communicator->enter();
  // Release order: a thread that reads the handle in order to abort finds the communicator complete.
  __atomic_store_n(comm, handle_of(handle), __ATOMIC_RELEASE);
  Status status = guarded([&] { return communicator->initialise(id); });
  if (!status.ok()) {
    __atomic_store_n(comm, static_cast<mk_comm_t>(nullptr), __ATOMIC_RELEASE);
    communicators().remove(handle);
    communicator->tear_down();
  }
  communicator->leave();
  return status;
}

// For arguments that are judged before the communicator is entered: its error all the same, where it exists.
mk_status_t refuse(mk_comm_t comm, std::string sentence) {
  return finish(Status(MK_ERROR_INVALID_ARGUMENT, std::move(sentence)),
                communicators().find(value_of(comm)).get());
}

constexpr int kMaxRanks = 4096;

}  // namespace
}  // namespace mk::api

using namespace mk;
using namespace mk::api;

extern "C" {

mk_status_t mk_get_version(int* version) {
  if (version == nullptr)
    return finish(Status(MK_ERROR_INVALID_ARGUMENT, "mk_get_version: version: expected a pointer, saw NULL"));
  *version = MK_VERSION;
  return MK_SUCCESS;
}

const char* mk_status_string(mk_status_t status) {
  static constexpr const char* kNames[] = {
      "MK_SUCCESS",           "MK_ERROR_INVALID_ARGUMENT", "MK_ERROR_INVALID_HANDLE",
      "MK_ERROR_UNSUPPORTED", "MK_ERROR_NOT_PREPARED",     "MK_ERROR_OUT_OF_MEMORY",
      "MK_ERROR_BUSY",        "MK_ERROR_MISMATCH",         "MK_ERROR_DATA",
      "MK_ERROR_TIMEOUT",     "MK_ERROR_REMOTE",           "MK_ERROR_NETWORK",
      "MK_ERROR_CUDA",        "MK_ERROR_SYSTEM",           "MK_ERROR_ABORTED",
      "MK_ERROR_INTERNAL"};
  const auto index = static_cast<size_t>(status);
  return index < std::size(kNames) ? kNames[index] : "unknown mk_status_t";
}

const char* mk_get_last_error(mk_comm_t comm) {
  const std::shared_ptr<Communicator> communicator = communicators().find(value_of(comm));
  returned_error = communicator ? communicator->last_error() : thread_error;
  return returned_error.c_str();
}

mk_status_t mk_set_log_callback(mk_log_callback_t callback, void* user, mk_log_level_t level) {
  return finish(set_log_callback(callback, user, level));
}

mk_status_t mk_env_get(size_t index, mk_env_t* env_out) {
  const env::Variable* variable = env::variable(index);
  if (variable == nullptr) {
    return finish(
        Status(MK_ERROR_INVALID_ARGUMENT,
               format("mk_env_get: index: expected less than the number of variables, saw %zu", index)));
  }
  mk_env_t out = MK_ENV_INIT;
  out.name = variable->name;
  out.default_value = variable->default_value;
  out.description = variable->description;
  out.value = env::value(variable->name);
  return finish(write_struct(out, sizeof(mk_env_t), "env", env_out));
}

mk_status_t mk_get_unique_id(mk_unique_id_t* id) {
  if (id == nullptr)
    return finish(Status(MK_ERROR_INVALID_ARGUMENT, "mk_get_unique_id: id: expected a pointer, saw NULL"));
  return finish(guarded([&] { return Bootstrap::create_root(id); }));
}

mk_status_t mk_comm_init(mk_comm_t* comm, const mk_unique_id_t* id, int nranks, int rank,
                         const mk_comm_config_t* config) {
  const auto refuse = [](std::string sentence) {
    return finish(Status(MK_ERROR_INVALID_ARGUMENT, "mk_comm_init: " + sentence));
  };
  if (comm == nullptr) return refuse("comm: expected a pointer, saw NULL");
  if (id == nullptr) return refuse("id: expected a pointer, saw NULL");
  if (nranks < 1 || nranks > kMaxRanks)
    return refuse(format("nranks: expected 1 to %d, saw %d", kMaxRanks, nranks));
  if (rank < 0 || rank >= nranks) return refuse(format("rank: expected 0 to %d, saw %d", nranks - 1, rank));
  mk_comm_config_t checked = MK_COMM_CONFIG_INIT;
  if (config != nullptr) {
    if (Status status = read_struct(config, sizeof(mk_comm_config_t), "mk_comm_init: config", checked);
        !status.ok())
      return finish(status);
    if (Status status = check_config(checked); !status.ok()) return finish(status);
  }
  return finish(guarded([&]() -> Status {
    auto communicator = std::make_shared<Communicator>(nranks, rank, checked);
    if (!group::active()) return initialise(comm, *id, communicator);
    group::defer(group::next_key(),
                 [comm, id = *id, communicator] { return initialise(comm, id, communicator); });
    return {};
  }));
}

mk_status_t mk_group_start(void) {
  group::start();
  return MK_SUCCESS;
}

mk_status_t mk_group_end(void) {
  return finish(guarded([] { return group::end(); }));
}

mk_status_t mk_comm_finalize(mk_comm_t comm) {
  return host_collective(comm, "mk_comm_finalize",
                         [](Communicator& communicator) { return communicator.finalize(); });
}

mk_status_t mk_comm_destroy(mk_comm_t comm) {
  const std::shared_ptr<Communicator> communicator = communicators().find(value_of(comm));
  if (!communicator) return finish(invalid_handle("mk_comm_destroy"));
  return finish(run_alone(*communicator, "mk_comm_destroy", [comm](Communicator& inner) {
    communicators().remove(value_of(comm));
    inner.tear_down();
    return Status();
  }));
}

mk_status_t mk_comm_abort(mk_comm_t comm) {
  const std::shared_ptr<Communicator> communicator = communicators().find(value_of(comm));
  if (!communicator) return finish(invalid_handle("mk_comm_abort"));
  return finish(guarded([&] {
    communicator->abort();
    return Status();
  }));
}

mk_status_t mk_comm_get_info(mk_comm_t comm, mk_comm_info_t* info) {
  return with_communicator(comm, "mk_comm_get_info", [&](Communicator& communicator) {
    return write_struct(communicator.info(), sizeof(mk_comm_info_t), "mk_comm_get_info: info", info);
  });
}

mk_status_t mk_comm_synchronize(mk_comm_t comm, mk_stream_t stream) {
  return with_communicator(comm, "mk_comm_synchronize", [&](Communicator& communicator) -> Status {
    MK_RETURN_IF_ERROR(communicator.check_stream(stream));
    return communicator.synchronize(stream);
  });
}

mk_status_t mk_comm_get_async_error(mk_comm_t comm, mk_async_error_t* error) {
  const std::shared_ptr<Communicator> communicator = communicators().find(value_of(comm));
  if (!communicator) return finish(invalid_handle("mk_comm_get_async_error"));
  return finish(write_struct(communicator->async_error(), sizeof(mk_async_error_t),
                             "mk_comm_get_async_error: error", error),
                communicator.get());
}

mk_status_t mk_comm_clear_async_error(mk_comm_t comm) {
  return with_communicator(comm, "mk_comm_clear_async_error",
                           [](Communicator& communicator) { return communicator.clear_async_error(); });
}

mk_status_t mk_comm_get_flight_record(mk_comm_t comm, mk_flight_entry_t* entries, size_t capacity,
                                      size_t* count) {
  const std::shared_ptr<Communicator> communicator = communicators().find(value_of(comm));
  if (!communicator) return finish(invalid_handle("mk_comm_get_flight_record"));
  if (entries == nullptr || count == nullptr) {
    return refuse(comm, "mk_comm_get_flight_record: entries, count: expected pointers, saw NULL");
  }
  *count = communicator->flight_record(entries, capacity);
  return MK_SUCCESS;
}

mk_status_t mk_mem_alloc(mk_comm_t comm, size_t bytes, void** ptr) {
  constexpr size_t kLargest = size_t{1} << 46;
  if (ptr == nullptr) return refuse(comm, "mk_mem_alloc: ptr: expected a pointer, saw NULL");
  if (bytes == 0 || bytes > kLargest) {
    return refuse(comm, format("mk_mem_alloc: bytes: expected 1 to %zu, saw %zu", kLargest, bytes));
  }
  return host_collective(comm, "mk_mem_alloc", [bytes, ptr](Communicator& communicator) {
    Result<void*> allocated = communicator.mem_alloc(bytes);
    if (allocated.ok()) *ptr = allocated.value();
    return allocated.status();
  });
}

mk_status_t mk_mem_free(mk_comm_t comm, void* ptr) {
  return host_collective(comm, "mk_mem_free", [ptr](Communicator& communicator) {
    return ptr ? communicator.mem_free(ptr) : Status();
  });
}

mk_status_t mk_mem_register(mk_comm_t comm, void* ptr, size_t bytes, mk_memory_t* memory) {
  if (memory == nullptr) return refuse(comm, "mk_mem_register: memory: expected a pointer, saw NULL");
  if (ptr == nullptr && bytes > 0) {
    return refuse(comm, format("mk_mem_register: ptr: expected a pointer to %zu bytes, saw NULL", bytes));
  }
  if (reinterpret_cast<uintptr_t>(ptr) + bytes < reinterpret_cast<uintptr_t>(ptr)) {
    return refuse(comm, format("mk_mem_register: bytes: %zu bytes from %p wrap around", bytes, ptr));
  }
  return host_collective(comm, "mk_mem_register", [=](Communicator& communicator) {
    Result<uint64_t> handle = communicator.mem_register(ptr, bytes);
    if (handle.ok()) *memory = reinterpret_cast<mk_memory_t>(handle.value());
    return handle.status();
  });
}

mk_status_t mk_mem_deregister(mk_comm_t comm, mk_memory_t memory) {
  return host_collective(comm, "mk_mem_deregister", [memory](Communicator& communicator) {
    return communicator.mem_deregister(reinterpret_cast<uint64_t>(memory));
  });
}

}  // extern "C"
