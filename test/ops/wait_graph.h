// SPDX-License-Identifier: MIT
// Who waits for what. Nodes are events of a launch (a chunk pushed, a flag seen, a rank's end); an edge leads
// from an event to one that it waits for. The protocol can always go on exactly when there is no cycle.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace mk::test {

struct Event {
  const char* kind;  // a literal; equal kinds are the same pointer or compare equal as text
  int rank;
  int launch = 0;
  int a = 0;
  int b = 0;
  int c = 0;
};

class WaitGraph {
 public:
  void wait(const Event& who, const Event& what);
  // The events of a cycle, in the order of waiting; empty: there is none.
  std::vector<std::string> cycle() const;
  // Does `who` wait for `what`, through any number of others?
  bool waits(const Event& who, const Event& what) const;
  size_t size() const { return events_.size(); }

 private:
  static std::string key(const Event& event);
  int node(const Event& event);

  std::unordered_map<std::string, int> number_;
  std::vector<std::string> events_;
  std::vector<std::vector<int>> waits_for_;
};

}  // namespace mk::test
