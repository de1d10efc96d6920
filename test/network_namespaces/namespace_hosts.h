// SPDX-License-Identifier: MIT
// Hosts made of network namespaces: each has an interface of its own, and a bridge in the calling process' new
// namespace joins them. All of it goes with the process.
#pragma once

#include <string>
#include <vector>

#include "lib/file_descriptor.h"

namespace mk::test {

class NamespaceHosts {
 public:
  // Moves the calling process, which has no other threads yet, to a namespace of its own. "" or why not.
  std::string make(int num_hosts);
  int num_hosts() const { return static_cast<int>(hosts_.size()); }

  // Makes the calling process one of that host.
  void enter(int host) const;
  // The host's cable: pulled out and put back.
  bool cut(int host) const;
  bool mend(int host) const;
  // Makes every cable slow, for good; says how, nullptr where the kernel cannot.
  const char* slow_all() const;

 private:
  std::vector<FileDescriptor> hosts_;  // their namespaces
};

}  // namespace mk::test
