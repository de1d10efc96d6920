// SPDX-License-Identifier: MIT
#include "group.h"

#include <map>
#include <thread>
#include <vector>

#include "thread.h"

namespace mk::group {
namespace {

struct Deferred {
  uint64_t communicator;
  std::function<Status()> call;
  Status result;
};

thread_local int depth = 0;
thread_local std::vector<Deferred> deferred;
thread_local uint64_t keys = 0;

}  // namespace

void start() { ++depth; }
bool active() { return depth > 0; }
void defer(uint64_t communicator, std::function<Status()> call) {
  deferred.push_back({communicator, std::move(call), {}});
}
uint64_t next_key() { return ~0ull - keys++; }

Status end() {
  if (depth == 0)
    return Status(MK_ERROR_INVALID_ARGUMENT,
                  "mk_group_end: expected an mk_group_start of this thread before it");
  if (--depth > 0) return {};
  std::vector<Deferred> calls = std::move(deferred);
  deferred.clear();
  std::map<uint64_t, std::vector<Deferred*>> calls_of;  // by communicator, in order
  for (Deferred& call : calls) calls_of[call.communicator].push_back(&call);

  std::vector<std::thread> threads;
  Status first;
  for (auto& [communicator, list] : calls_of) {
    std::thread thread;
    const auto body = [&list = list] {
      for (Deferred* call : list) call->result = call->call();
    };
    if (Status started = start_thread(thread, "mk-group", body); !started.ok()) {
      // The calls of the other communicators wait for these until their deadline; say why.
      if (first.ok()) first = std::move(started);
      continue;
    }
    threads.push_back(std::move(thread));
  }
  for (std::thread& thread : threads) thread.join();
  if (!first.ok()) return first;
  for (Deferred& call : calls) {
    if (!call.result.ok()) return call.result;
  }
  return {};
}

}  // namespace mk::group
