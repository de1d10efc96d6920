// SPDX-License-Identifier: MIT
#include "wait_graph.h"

#include <algorithm>

namespace mk::test {

std::string WaitGraph::key(const Event& event) {
  std::string text = event.kind;
  for (const int number : {event.rank, event.launch, event.a, event.b, event.c}) {
    text += ' ';
    text += std::to_string(number);
  }
  return text;
}

int WaitGraph::node(const Event& event) {
  const auto [place, added] = number_.try_emplace(key(event), static_cast<int>(events_.size()));
  if (added) {
    events_.push_back(place->first);
    waits_for_.emplace_back();
  }
  return place->second;
}

void WaitGraph::wait(const Event& who, const Event& what) {
  const int from = node(who);
  const int to = node(what);
  waits_for_[static_cast<size_t>(from)].push_back(to);
}

std::vector<std::string> WaitGraph::cycle() const {
  enum class Mark : uint8_t { fresh, open, closed };
  std::vector<Mark> mark(events_.size(), Mark::fresh);
  std::vector<std::pair<int, size_t>> path;  // event, how many of its edges were followed
  for (size_t start = 0; start < events_.size(); ++start) {
    if (mark[start] != Mark::fresh) continue;
    path.emplace_back(static_cast<int>(start), 0);
    mark[start] = Mark::open;
    while (!path.empty()) {
      const auto event = static_cast<size_t>(path.back().first);
      if (path.back().second == waits_for_[event].size()) {
        mark[event] = Mark::closed;
        path.pop_back();
        continue;
      }
      const int next = waits_for_[event][path.back().second++];
      if (mark[static_cast<size_t>(next)] == Mark::open) {
        std::vector<std::string> found;
        auto at = std::find_if(path.begin(), path.end(), [&](const auto& step) { return step.first == next; });
        for (; at != path.end(); ++at) found.push_back(events_[static_cast<size_t>(at->first)]);
        return found;
      }
      if (mark[static_cast<size_t>(next)] == Mark::fresh) {
        mark[static_cast<size_t>(next)] = Mark::open;
        path.emplace_back(next, 0);
      }
    }
  }
  return {};
}

bool WaitGraph::waits(const Event& who, const Event& what) const {
  const auto from = number_.find(key(who));
  const auto to = number_.find(key(what));
  if (from == number_.end() || to == number_.end()) return false;
  std::vector<bool> seen(events_.size());
  std::vector<int> open{from->second};
  while (!open.empty()) {
    const int event = open.back();
    open.pop_back();
    if (event == to->second) return true;
    if (seen[static_cast<size_t>(event)]) continue;
    seen[static_cast<size_t>(event)] = true;
    for (const int next : waits_for_[static_cast<size_t>(event)]) open.push_back(next);
  }
  return false;
}

}  // namespace mk::test
