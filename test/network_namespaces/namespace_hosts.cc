// SPDX-License-Identifier: MIT
#include "test/network_namespaces/namespace_hosts.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace mk::test {
namespace {

bool shell(const std::string& command) { return std::system((command + " 2>/dev/null").c_str()) == 0; }

std::string cable(int host) { return "mk-host" + std::to_string(host); }
std::string address(int host) { return "10.78.0." + std::to_string(host + 1) + "/24"; }

// Runs in a process of its own: the host's end of its cable, and what else a host has.
bool configure(int host, int netns) {
  const pid_t child = fork();
  if (child == 0) {
    const bool ok = setns(netns, CLONE_NEWNET) == 0 && shell("ip link set lo up") &&
                    shell("ip addr add " + address(host) + " dev eth0") && shell("ip link set eth0 up");
    _exit(ok ? 0 : 1);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  return child > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// A new namespace; a child makes it and ends, the descriptor keeps it. `plug` is called with the child's id
// while it lives.
template <class PLUG>
FileDescriptor make_namespace(const PLUG& plug) {
  int ready[2], done[2];
  if (pipe2(ready, O_CLOEXEC) != 0 || pipe2(done, O_CLOEXEC) != 0) return {};
  const pid_t child = fork();
  if (child == 0) {
    close(done[1]);
    char ok = unshare(CLONE_NEWNET) == 0 ? 1 : 0;
    [[maybe_unused]] const ssize_t told = write(ready[1], &ok, 1);
    [[maybe_unused]] const ssize_t waited = read(done[0], &ok, 1);
    _exit(0);
  }
  close(ready[1]), close(done[0]);
  char ok = 0;
  FileDescriptor netns;
  if (child > 0 && read(ready[0], &ok, 1) == 1 && ok == 1) {
    netns = FileDescriptor(open(("/proc/" + std::to_string(child) + "/ns/net").c_str(), O_RDONLY | O_CLOEXEC));
    if (!plug(child)) netns.reset();
  }
  close(ready[0]), close(done[1]);
  while (child > 0 && waitpid(child, nullptr, 0) < 0 && errno == EINTR) continue;
  return netns;
}

}  // namespace

std::string NamespaceHosts::make(int num_hosts) {
  if (unshare(CLONE_NEWNET) != 0) return std::string("unshare(CLONE_NEWNET): ") + std::strerror(errno);
  if (!shell("ip link set lo up")) return "no ip command, or it may not configure the new namespace";
  if (!shell("ip link add mk-bridge type bridge") || !shell("ip link set mk-bridge up")) return "no bridges";
  for (int host = 0; host < num_hosts; ++host) {
    FileDescriptor netns = make_namespace([host](pid_t holder) {
      return shell("ip link add " + cable(host) + " type veth peer name eth0 netns " +
                   std::to_string(holder)) &&
             shell("ip link set " + cable(host) + " master mk-bridge up");
    });
    if (!netns.valid() || !configure(host, netns.get())) return "no veth interfaces between namespaces";
    hosts_.push_back(std::move(netns));
  }
  return "";
}

void NamespaceHosts::enter(int host) const {
  if (setns(hosts_[static_cast<size_t>(host)].get(), CLONE_NEWNET) != 0) _exit(1);
}

bool NamespaceHosts::cut(int host) const { return shell("ip link set " + cable(host) + " down"); }
bool NamespaceHosts::mend(int host) const { return shell("ip link set " + cable(host) + " up"); }

const char* NamespaceHosts::slow_all() const {
  static constexpr const char* kWays[] = {"netem delay 3ms", "tbf rate 20mbit burst 2kb latency 400ms"};
  for (const char* way : kWays) {
    int done = 0;
    while (done < num_hosts() && shell("tc qdisc add dev " + cable(done) + " root " + way)) ++done;
    if (done == num_hosts()) return way;
    while (done > 0) shell("tc qdisc del dev " + cable(--done) + " root");
  }
  return nullptr;
}

}  // namespace mk::test
