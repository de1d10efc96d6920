// SPDX-License-Identifier: MIT
// What --check-network makes of ports and of measured links, and the program itself.
#include "check_network.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "network_ports.h"
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
