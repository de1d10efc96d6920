// SPDX-License-Identifier: MIT
// Bad calls of an operator's four functions, made from good ones.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "test/multi_rank/bad_arguments.h"

namespace mk::test {

template <class T>
T* shifted(T* pointer, uintptr_t bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) + bytes);
}

// Op names the operator: its types Args and Maxima, its functions, and good(), good_maxima(). What changes the
// good values is erased to a std::function at once: a template a change would take the compiler a minute.
template <class Op>
class BadCallBuilder {
 public:
  using Args = typename Op::Args;
  using Maxima = typename Op::Maxima;
  using Change = std::function<void(Args&)>;
  using Says = std::vector<std::string>;

  // One bad field of the arguments: the launch refuses it, and so does the plan unless it is about a buffer.
  void launch(const char* name, mk_status_t expected, Says says, const Change& change) {
    says.push_back(Op::kName);
    calls.push_back({label("", name), expected, std::move(says), [change](mk_comm_t comm) {
                       Args args = Op::good();
                       change(args);
                       return Op::kLaunch(comm, &args, nullptr);
                     }});
  }
  void plan(const char* name, mk_status_t expected, const Says& says, const Change& change) {
    launch(name, expected, says, change);
    calls.push_back({label("_plan", name), expected, says, [change](mk_comm_t comm) {
                       Args args = Op::good();
                       change(args);
                       mk_plan_t plan = MK_PLAN_INIT;
                       return Op::kPlan(comm, &args, &plan);
                     }});
  }
  void maxima(const char* name, mk_status_t expected, const Says& says,
              const std::function<void(Maxima&)>& change) {
    calls.push_back({label("_prepare", name), expected, says, [change](mk_comm_t comm) {
                       Maxima changed = Op::good_maxima();
                       change(changed);
                       return Op::kPrepare(comm, &changed);
                     }});
    calls.push_back({label("_workspace_bytes", name), expected, says, [change](mk_comm_t comm) {
                       Maxima changed = Op::good_maxima();
                       change(changed);
                       size_t bytes = 0;
                       return Op::kWorkspaceBytes(comm, &changed, &bytes);
                     }});
  }
  // One bad field that arguments and maxima both have: all four functions refuse it.
  template <class AnyChange>
  void any(const char* name, mk_status_t expected, const Says& says, const AnyChange& change) {
    plan(name, expected, says, change);
    maxima(name, expected, says, change);
  }
  void tuned(const char* name, mk_status_t expected, const Says& says,
             const std::function<void(mk_tuning_t&)>& change) {
    any(name, expected, says, [change](auto& value) {
      static thread_local mk_tuning_t tuning;
      tuning = MK_TUNING_INIT;
      change(tuning);
      value.tuning = &tuning;
    });
  }

  // NULL, and structs of no known size.
  void pointers();
  // A stream where there is none.
  void stream() {
    calls.push_back(
        {label("", "stream"), MK_ERROR_INVALID_ARGUMENT, {"stream", "NULL", "0x40"}, [](mk_comm_t comm) {
           const Args args = Op::good();
           return Op::kLaunch(comm, &args, reinterpret_cast<mk_stream_t>(0x40));
         }});
  }

  std::vector<BadCall> calls;

 private:
  static std::string label(const char* function, const char* name) {
    return std::string(Op::kName) + function + ": " + name;
  }
};

template <class Op>
void BadCallBuilder<Op>::pointers() {
  constexpr auto kInvalid = MK_ERROR_INVALID_ARGUMENT;
  const std::string name = Op::kName;
  calls.push_back({name + "(args NULL)", kInvalid, {name + ": args", "NULL"}, [](mk_comm_t comm) {
                     return Op::kLaunch(comm, nullptr, nullptr);
                   }});
  calls.push_back({name + "_plan(args NULL)", kInvalid, {"args", "NULL"}, [](mk_comm_t comm) {
                     mk_plan_t plan = MK_PLAN_INIT;
                     return Op::kPlan(comm, nullptr, &plan);
                   }});
  calls.push_back({name + "_plan(plan NULL)", kInvalid, {"plan", "NULL"}, [](mk_comm_t comm) {
                     const Args args = Op::good();
                     return Op::kPlan(comm, &args, nullptr);
                   }});
  calls.push_back({name + "_prepare(maxima NULL)", kInvalid, {"maxima", "NULL"}, [](mk_comm_t comm) {
                     return Op::kPrepare(comm, nullptr);
                   }});
  calls.push_back({name + "_workspace_bytes(maxima NULL)", kInvalid, {"maxima", "NULL"}, [](mk_comm_t comm) {
                     size_t bytes = 0;
                     return Op::kWorkspaceBytes(comm, nullptr, &bytes);
                   }});
  calls.push_back({name + "_workspace_bytes(bytes NULL)", kInvalid, {"bytes", "NULL"}, [](mk_comm_t comm) {
                     const Maxima maxima = Op::good_maxima();
                     return Op::kWorkspaceBytes(comm, &maxima, nullptr);
                   }});
  for (const size_t bytes : {size_t{0}, size_t{16}}) {
    any(bytes == 0 ? "struct_size 0" : "struct_size 16", kInvalid,
        {name, "struct_size: expected", "saw " + std::to_string(bytes), "_INIT"},
        [bytes](auto& value) { value.struct_size = bytes; });
  }
}

}  // namespace mk::test
