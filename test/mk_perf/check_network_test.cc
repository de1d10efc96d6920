// SPDX-License-Identifier: MIT
// What --check-network makes of ports and of measured links, and the program itself.
#include "check_network.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "link_table.h"
#include "network_ports.h"
#include "pair_check.h"
#include "program.h"
#include "test/support/catch.h"

using namespace perf;

namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// A folder like /sys/class/infiniband.
class Ports {
 public:
  Ports() {
    char name[] = "/tmp/mk_perf_ports_XXXXXX";
    folder_ = mkdtemp(name);
  }
  ~Ports() { std::filesystem::remove_all(folder_); }

  void add(const std::string& device, const std::string& state, const std::string& layer,
           const std::vector<std::pair<std::string, std::string>>& gids) {
    const auto port = folder_ / device / "ports" / "1";
    write(port / "state", state);
    write(port / "rate", "400 Gb/sec (4X NDR)");
    write(port / "link_layer", layer);
    for (size_t n = 0; n < gids.size(); ++n) {
      write(port / "gids" / std::to_string(n), gids[n].first);
      write(port / "gid_attrs" / "types" / std::to_string(n), gids[n].second);
    }
  }
  std::string folder() const { return folder_; }

 private:
  static void write(const std::filesystem::path& path, const std::string& text) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  }
  std::filesystem::path folder_;
};

const std::string kZero = "0000:0000:0000:0000:0000:0000:0000:0000";
const std::string kLocal = "fe80:0000:0000:0000:0202:c9ff:fe00:0001";
const std::string kIpv4 = "0000:0000:0000:0000:0000:ffff:0a00:0001";

// --check-network over emulated NICs; skipped where they are not built.
class Softnic {
 public:
  explicit Softnic(const program::Variables& variables) : variables_(variables) {
    const char* library = std::getenv("MK_SOFTNIC");
    if (library != nullptr) variables_.push_back({"MK_VERBS_LIBRARY", library});
    there_ = library != nullptr;
    // Tests that run beside this one have other NICs.
    variables_.push_back({"MK_SOFTNIC_FABRIC", "check" + std::to_string(getpid())});
  }
  bool there() const { return there_; }
  // Ranks that a launcher has started, each with variables of its own; what rank 0 says.
  program::Outcome check_launched(const std::vector<program::Variables>& of_rank, int victim = -1) const {
    const std::string id = "/tmp/mk_perf_id_" + std::to_string(getpid());
    const std::string nranks = std::to_string(of_rank.size());
    std::vector<program::Process> ranks;
    for (size_t rank = 0; rank < of_rank.size(); ++rank) {
      program::Variables all = variables_;
      all.insert(all.end(), of_rank[rank].begin(), of_rank[rank].end());
      all.push_back({"MK_RANK", std::to_string(rank)});
      all.push_back({"MK_NRANKS", nranks});
      all.push_back({"MK_JOB", id});
      ranks.emplace_back(std::getenv("MK_PERF"),
                         std::vector<std::string>{"--check-network", "--nodes", nranks, "--id-file", id}, all);
    }
    if (victim >= 0) {
      std::this_thread::sleep_for(std::chrono::seconds(3));
      kill(ranks[static_cast<size_t>(victim)].pid(), SIGKILL);
    }
    const auto outcome = ranks[0].wait(60);
    for (size_t rank = 1; rank < ranks.size(); ++rank) ranks[rank].wait(30);
    unlink(id.c_str());
    return outcome;
  }
  program::Outcome check(const char* ranks = "2") const {
    return program::run(std::getenv("MK_PERF"), {"--check-network", "-g", ranks, "--nodes", "2"}, variables_);
  }

 private:
  program::Variables variables_;
  bool there_ = false;
};

// The lines of the table from one rank to another that name a NIC.
std::vector<std::string> lines_with(const std::string& text, int from, int to, const std::string& nic) {
  const std::string begin = mk::format("%4d %4d   %s ", from, to, nic.c_str());
  std::vector<std::string> found;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (line.starts_with(begin)) found.push_back(line);
  }
  return found;
}

std::string line_with(const std::string& text, int from, int to, const std::string& nic) {
  const auto lines = lines_with(text, from, to, nic);
  return lines.size() == 1 ? lines[0] : std::to_string(lines.size()) + " such lines";
}

// What is said of a NIC that a rank uses.
std::string address_of(const std::string& text, int rank, const std::string& nic) {
  const size_t line = text.find(mk::format("rank %d uses %s, ", rank, nic.c_str()));
  const size_t at = text.find("GID ", line);
  return line == std::string::npos || at == std::string::npos ? "" : text.substr(at, text.find('\n', at) - at);
}

bool is_measured(const std::string& line) { return contains(line, " -> ") && !contains(line, "failed"); }

struct Kind {
  const char* transport;
  const char* nic;
  const char* path;
};
constexpr Kind kKinds[] = {
    {"rc", "ib", ", InfiniBand, MTU 4096"}, {"rc", "roce", ", RoCE v2, MTU 4096"}, {"srd", "efa", ", EFA"}};

}  // namespace

TEST_CASE("ports: the best GID is shown, and what is wrong is said with its cure") {
  Ports ports;
  ports.add(
      "a0", "4: ACTIVE", "Ethernet",
      {{kLocal, "IB/RoCE v1"}, {kLocal, "RoCE v2"}, {kIpv4, "IB/RoCE v1"}, {kIpv4, "RoCE v2"}, {kZero, ""}});
  ports.add("a1", "1: DOWN", "Ethernet", {{kIpv4, "RoCE v2"}});
  ports.add("a2", "4: ACTIVE", "Ethernet", {{kLocal, "RoCE v2"}});
  ports.add("a3", "4: ACTIVE", "InfiniBand", {{kLocal, ""}});
  ports.add("a4", "4: ACTIVE", "Ethernet", {{kZero, ""}});
  ports.add("a5", "2: INIT", "InfiniBand", {{kLocal, ""}});
  const auto found = list_network_ports(ports.folder());
  REQUIRE(found.size() == 6);
  CHECK(found[0].gid_index == 3);
  CHECK(found[0].text() == "a0 port 1 ACTIVE, 400 Gb/sec (4X NDR), Ethernet, GID 3 " + kIpv4 + " (RoCE v2)");
  CHECK(found[0].problem().empty());
  CHECK(contains(found[1].problem(), "a1 port 1 is DOWN: it will not be used; check the cable"));
  CHECK(contains(found[2].problem(), "no GID but a link-local one: give its interface an IP address"));
  CHECK(found[3].problem().empty());
  CHECK(contains(found[4].problem(), "has no GID"));
  CHECK(contains(found[5].problem(), "no subnet manager"));
  CHECK(list_network_ports(ports.folder() + "/nowhere").empty());
}

TEST_CASE("links: what stands out is named") {
  CHECK(judge_links({}).empty());
  std::vector<MeasuredLink> links{{0, 1, 5, 40}, {1, 0, 6, 41}, {0, 2, 5, 39}, {2, 0, 5, 40}, {1, 2, 7, 30}};
  CHECK(judge_links(links).empty());
  links[3].gigabytes = 10;
  links[1].latency_us = 60;
  const std::string problems = judge_links(links);
  CHECK(contains(problems, "rank 2 to rank 0: 10.00 GB/s where most links have 39.00"));
  CHECK(contains(problems, "rank 1 to rank 0: 60.0 us where most links have 5.0"));
}

TEST_CASE("links: each NIC is compared with other single ones, and what failed with none") {
  std::vector<MeasuredLink> links;
  for (const char* nic : {"a0:1", "a1:1"}) {
    for (const int from : {0, 1}) links.push_back({from, 1 - from, 5, 10, nic, "there"});
  }
  for (const int from : {0, 1}) links.push_back({from, 1 - from, 6, 20, "all", "both", false, true});
  CHECK(judge_links(links).empty());
  links[2].gigabytes = links[3].gigabytes = 1;
  links[2].latency_us = links[3].latency_us = 60;
  const std::string slow = judge_links(links);
  CHECK(contains(slow, "rank 0 to rank 1 over a1:1: 1.00 GB/s where most links have 10.00"));
  CHECK(contains(slow, "rank 1 to rank 0 over a1:1: 60.0 us where most links have 5.0"));
  CHECK(!contains(slow, "a0:1"));
  CHECK(!contains(slow, "all NICs"));
  links[5].gigabytes = 2;
  CHECK(contains(judge_links(links), "rank 1 to rank 0 over all NICs: 2.00 GB/s where most links have 20.00"));
  links = {{0, 1, 5, 10, "a0:1", "there"}, {1, 0, 0, 0, "a0:1", "there", true}};
  CHECK(judge_links(links).empty());
  const std::string table = table_of(links);
  INFO(table);
  CHECK(contains(table, "   0    1   a0:1            5.0              10.00   there\n"));
  CHECK(contains(table, "   1    0   a0:1         failed                  -   there\n"));
}

TEST_CASE("links: sentences of a pair name the job's ranks") {
  CHECK(with_ranks("rank 0: link to rank 1, not to rank 12 or rank x; rank 1", 7, 10) ==
        "rank 7: link to rank 10, not to rank 12 or rank x; rank 10");
  CHECK(with_ranks("rank ", 7, 10) == "rank ");
}

TEST_CASE("the program measures every path between nodes, or says why there is none") {
  const char* path = std::getenv("MK_PERF");
  REQUIRE(path != nullptr);
  const auto seen = program::run(path, {"--check-network", "-g", "4", "--nodes", "2"});
  INFO(seen.out << seen.err);
  CHECK(contains(seen.out, "rank 3 on "));
  CHECK(contains(seen.out, "transport loopback: available"));
  CHECK(contains(seen.out, "transport used: "));
  for (const char* link : {"   0    2 ", "   3    1 "}) CHECK(contains(seen.out, link));
  CHECK(!contains(seen.out, "   0    1 "));
  const auto one = program::run(path, {"--check-network", "-g", "2", "--nodes", "1"});
  CHECK(one.exit_code == 0);
  CHECK(contains(one.out, "All ranks share one machine"));
  const auto none = program::run(path, {"--check-network", "-g", "2"}, {{"MK_TRANSPORT", "pigeon"}});
  CHECK(none.exit_code == 1);
  CHECK(contains(none.err, "saw \"pigeon\""));
  CHECK(program::run(path, {"--check-network", "allgather_gemm"}).exit_code == 2);
}

TEST_CASE("over several NICs each has figures of its own, and all of them together") {
  for (const Kind& kind : kKinds) {
    const Softnic softnic(
        {{"MK_TRANSPORT", kind.transport}, {"MK_SOFTNIC_KIND", kind.nic}, {"MK_SOFTNIC_NICS", "2"}});
    if (!softnic.there()) return;
    const auto seen = softnic.check();
    INFO(seen.out << seen.err);
    for (const int from : {0, 1}) {
      for (const char* nic : {"softnic0:1", "softnic1:1"}) {
        CHECK(contains(seen.out, mk::format("rank %d uses %s, active, ", from, nic)));
        const std::string line = line_with(seen.out, from, 1 - from, nic);
        CHECK(contains(line, std::string(" -> ") + nic));
        CHECK(contains(line, kind.path));
        CHECK(address_of(seen.out, 0, nic) != address_of(seen.out, 1, nic));
        CHECK(is_measured(line));
      }
      CHECK(contains(line_with(seen.out, from, 1 - from, "all"), "the 2 above together"));
    }
  }
}

TEST_CASE("ranks of one node have the NICs dealt among them, and a single NIC has a single line") {
  const Softnic softnic({{"MK_TRANSPORT", "rc"}, {"MK_SOFTNIC_NICS", "2"}});
  if (!softnic.there()) return;
  const auto seen = softnic.check("4");
  INFO(seen.out << seen.err);
  CHECK(contains(line_with(seen.out, 0, 3, "softnic0:1"), " -> softnic1:1 "));
  CHECK(contains(line_with(seen.out, 3, 1, "softnic1:1"), " -> softnic1:1 "));
  CHECK(lines_with(seen.out, 0, 3, "softnic1:1").empty());
  CHECK(lines_with(seen.out, 0, 3, "all").empty());
}

TEST_CASE("a NIC that is slower than the others is named") {
  const Softnic softnic({{"MK_TRANSPORT", "rc"}, {"MK_SOFTNIC_NICS", "2"}, {"MK_SOFTNIC_RATE_GBPS", "8,0.8"}});
  if (!softnic.there()) return;
  const auto seen = softnic.check();
  INFO(seen.out << seen.err);
  CHECK(seen.exit_code == 1);
  CHECK(contains(seen.out, "rank 0 to rank 1 over softnic1:1: 0."));
  CHECK(contains(seen.out, "rank 1 to rank 0 over softnic1:1: 0."));
  CHECK(!contains(seen.out, "over softnic0:1: 0."));
}

TEST_CASE("a link that fails is said in words, and the others are measured") {
  for (const Kind& kind : kKinds) {
    const Softnic softnic({{"MK_TRANSPORT", kind.transport},
                           {"MK_SOFTNIC_KIND", kind.nic},
                           {"MK_SOFTNIC_NICS", "3"},
                           {"MK_SOFTNIC_BLOCKED", "1-1"},
                           {"MK_IB_TIMEOUT", "16"}});
    if (!softnic.there()) return;
    const auto seen = softnic.check();
    INFO(seen.out << seen.err);
    CHECK(seen.exit_code == 1);
    for (const int from : {0, 1}) {
      CHECK(contains(line_with(seen.out, from, 1 - from, "softnic1:1"), " failed "));
      CHECK(contains(line_with(seen.out, from, 1 - from, "all"), " failed "));
      for (const char* nic : {"softnic0:1", "softnic2:1"})
        CHECK(is_measured(line_with(seen.out, from, 1 - from, nic)));
    }
    CHECK(contains(seen.out, "rank 0 and rank 1, softnic1:1 "));
    CHECK(contains(seen.out, ": failed: rank "));
    CHECK(contains(seen.out, "the path is blocked"));
  }
}

TEST_CASE("ranks of a failed link are those of the job, and the ranks beside it go on") {
  const Softnic softnic({{"MK_TRANSPORT", "rc"},
                         {"MK_SOFTNIC_NICS", "2"},
                         {"MK_SOFTNIC_BLOCKED", "1-1"},
                         {"MK_IB_TIMEOUT", "16"}});
  if (!softnic.there()) return;
  const auto seen = softnic.check("4");
  INFO(seen.out << seen.err);
  CHECK(contains(line_with(seen.out, 1, 3, "softnic1:1"), " failed "));
  for (const int from : {0, 2}) {
    for (const int to : {2 - from, 3 - from}) CHECK(lines_with(seen.out, from, to, "softnic0:1").size() == 1);
  }
  CHECK(contains(seen.out, "rank 1 and rank 3, softnic1:1 "));
  CHECK(contains(seen.out, "rc link to rank 3: over softnic1 port 1"));
}

TEST_CASE("ports that are down and GIDs that lead nowhere are said in words") {
  const Softnic softnic({{"MK_TRANSPORT", "rc"},
                         {"MK_SOFTNIC_KIND", "roce"},
                         {"MK_SOFTNIC_NICS", "3"},
                         {"MK_SOFTNIC_DOWN", "1"},
                         {"MK_SOFTNIC_WRONG_GID", "2"},
                         {"MK_IB_TIMEOUT", "16"}});
  if (!softnic.there()) return;
  const auto seen = softnic.check();
  INFO(seen.out << seen.err);
  CHECK(seen.exit_code == 1);
  CHECK(contains(seen.out, "rank 1: softnic1 port 1 is down: it is left out; check its cable"));
  CHECK(lines_with(seen.out, 0, 1, "softnic1:1").empty());
  CHECK(is_measured(line_with(seen.out, 0, 1, "softnic0:1")));
  CHECK(contains(line_with(seen.out, 0, 1, "softnic2:1"), " failed "));
  CHECK(contains(seen.out, "give each interface an address of its own"));
}

TEST_CASE("a link that only grows silent is given up after 10 s, by both ends") {
  const Softnic softnic({{"MK_TRANSPORT", "rc"},
                         {"MK_SOFTNIC_NICS", "2"},
                         {"MK_SOFTNIC_BLOCKED", "0-0"},
                         {"MK_IB_TIMEOUT", "20"},
                         {"MK_SOFTNIC_TIMEOUT_DIVISOR", "1"}});
  if (!softnic.there()) return;
  const auto seen = softnic.check();
  INFO(seen.out << seen.err);
  CHECK(seen.exit_code == 1);
  CHECK(contains(line_with(seen.out, 0, 1, "softnic0:1"), " failed "));
  CHECK(is_measured(line_with(seen.out, 0, 1, "softnic1:1")));
  CHECK(contains(seen.out, " for 10 s although the link was made"));
}

TEST_CASE("a rank whose ports are down costs only its own links") {
  const Softnic softnic({{"MK_TRANSPORT", "rc"}, {"MK_SOFTNIC_NICS", "2"}});
  if (!softnic.there()) return;
  const auto seen = softnic.check_launched({{}, {}, {{"MK_SOFTNIC_DOWN", "0,1"}}});
  INFO(seen.out << seen.err);
  CHECK(seen.exit_code == 1);
  for (const char* nic : {"softnic0:1", "softnic1:1"}) {
    CHECK(is_measured(line_with(seen.out, 0, 1, nic)));
    CHECK(contains(line_with(seen.out, 1, 2, nic), " failed "));
  }
  CHECK(contains(seen.out, "the ranks cannot be connected all together: rank 0: "));
  CHECK(contains(seen.out, "rank 2: softnic1 port 1 is down: it is left out"));
  CHECK(contains(seen.out,
                 "rank 2: no transport connects the nodes: rc: no usable RDMA port: softnic0 port 1 is"));
}

TEST_CASE("ranks with fewer NICs have each of them joined to several") {
  const Softnic softnic({{"MK_TRANSPORT", "rc"}, {"MK_SOFTNIC_NICS", "2"}});
  if (!softnic.there()) return;
  const auto seen = softnic.check_launched({{}, {{"MK_SOFTNIC_DOWN", "1"}}});
  INFO(seen.out << seen.err);
  CHECK(contains(line_with(seen.out, 0, 1, "softnic1:1"), " -> softnic0:1 "));
  CHECK(lines_with(seen.out, 1, 0, "softnic0:1").size() == 2);
}

TEST_CASE("GIDs of different kinds are named, also where another transport takes over") {
  const program::Variables version_2{{"MK_IB_GID_INDEX", "3"}}, version_1{{"MK_IB_GID_INDEX", "2"}};
  const Softnic rc({{"MK_TRANSPORT", "rc"}, {"MK_SOFTNIC_KIND", "roce"}});
  if (!rc.there()) return;
  const auto seen = rc.check_launched({version_2, version_2, version_1});
  INFO(seen.out << seen.err);
  CHECK(seen.exit_code == 1);
  CHECK(is_measured(line_with(seen.out, 0, 1, "softnic0:1")));
  CHECK(contains(line_with(seen.out, 0, 2, "softnic0:1"), " failed "));
  CHECK(contains(seen.out, "softnic0 port 1 of rank 1 is RoCE v2 and softnic0 port 1 of rank 2 is RoCE v1"));
  const Softnic any(program::Variables{{"MK_SOFTNIC_KIND", "roce"}});
  const auto other = any.check_launched({version_2, version_1});
  INFO(other.out << other.err);
  CHECK(other.exit_code == 1);
  CHECK(contains(other.out, "every rank has NICs for transport rc, but they do not all connect"));
}

TEST_CASE("where the ranks cannot be connected all together, pairs are measured without MK_TRANSPORT, too") {
  const Softnic softnic(program::Variables{{"MK_SOFTNIC_NICS", "1"}});
  if (!softnic.there()) return;
  const auto seen = softnic.check_launched({{}, {}, {{"MK_IB_TIMEOUT", "99"}}});
  INFO(seen.out << seen.err);
  CHECK(seen.exit_code == 1);
  CHECK(contains(seen.out, "transport used: rc"));
  CHECK(is_measured(line_with(seen.out, 1, 0, "softnic0:1")));
  CHECK(contains(line_with(seen.out, 2, 0, "softnic0:1"), " failed "));
  CHECK(contains(seen.out, "MK_IB_TIMEOUT: expected an integer from 1 to 31, saw \"99\""));
}

TEST_CASE("a rank that dies during a measurement ends the check") {
  const Softnic softnic({{"MK_TRANSPORT", "rc"},
                         {"MK_SOFTNIC_BLOCKED", "0-0"},
                         {"MK_IB_TIMEOUT", "20"},
                         {"MK_SOFTNIC_TIMEOUT_DIVISOR", "1"}});
  if (!softnic.there()) return;
  const auto began = std::chrono::steady_clock::now();
  const auto seen = softnic.check_launched({{}, {}, {}}, 1);
  INFO(seen.out << seen.err);
  CHECK(seen.exit_code == 1);
  CHECK(contains(seen.err, "rank 1"));
  CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(9));
}
