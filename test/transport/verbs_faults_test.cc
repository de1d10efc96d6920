// SPDX-License-Identifier: MIT
// What goes wrong with rc and srd, and the sentence for it: over softnic, which fails as it is told to.
#include <dirent.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <thread>

#include "../support/catch.h"
#include "harness.h"
#include "transport/rc/rc.h"
#include "transport/srd/srd.h"
#include "transport/verbs/verbs_transport.h"

namespace mk::test {
namespace {

const std::vector<int> kTwoNodes{0, 1};

struct Kind {
  const char* backend;
  const char* softnic;
};
constexpr Kind kKinds[] = {{"rc", "ib"}, {"rc", "roce"}, {"srd", "efa"}};

// A case with more environment.
class FaultCase {
 public:
  FaultCase(const Kind& kind, const std::string& more)
      : text_(std::string("MK_VERBS_LIBRARY=" MK_SOFTNIC_LIBRARY " MK_IB_TIMEOUT=14 MK_SOFTNIC_KIND=") +
              kind.softnic + " " + more),
        case_{kind.backend, "0", true, text_.c_str()} {}
  const BackendCase& get() const { return case_; }

 private:
  const std::string text_;
  const BackendCase case_;
};

bool holds_one_of(const std::string& sentence, const std::string& words) {
  std::istringstream list(words);
  for (std::string word; std::getline(list, word, '|');) {
    if (sentence.find(word) != std::string::npos) return true;
  }
  return false;
}

// Rank 0 puts until its link fails; the failure must name the peer and hold every one of `words`, of which one
// may be several, separated by '|': any of them will do. Once puts have arrived rank 1's end may fail first,
// with rank 0 waiting for it to take more and nothing under way: a communicator would tell rank 0, and here it
// gives up.
std::string put_until_failure(Rank& rank, const std::vector<std::string>& words,
                              std::atomic<bool>& peer_has_failed) {
  constexpr std::chrono::seconds kOwnFailure{5};
  if (rank.rank == 1) rank.abort.on_raise([&] { peer_has_failed = true; });
  MK_EXPECT_OK(rank.connect({}));
  auto& memory = rank.make_memory(1 << 16);
  MK_EXPECT_OK(rank.add_region(memory).status());
  if (rank.rank == 1) {
    MK_EXPECT(rank.barrier());
    MK_EXPECT(!rank.abort.raised() || rank.failure().find("link to rank 0") != std::string::npos);
    return "";
  }
  const Command put = make_put(1, region_address(0, 0), region_address(0, 0), 1 << 16, 3);
  const auto begin = std::chrono::steady_clock::now();
  auto since = begin;  // rank 1 has failed and nothing could be posted
  while (!rank.abort.raised()) {
    const bool posted = rank.wait([&] { return rank.endpoint->try_post(put); }, std::chrono::milliseconds(100));
    const auto now = std::chrono::steady_clock::now();
    if (posted || !peer_has_failed || rank.endpoint->completed() == 0) since = now;
    if (now > since + kOwnFailure) {
      MK_EXPECT(rank.barrier());
      return "";
    }
    MK_EXPECT(now < begin + rank.timeout);
  }
  MK_EXPECT(rank.failed_peers() == std::vector<int>{1});
  const std::string sentence = rank.failure();
  for (const std::string& word : words) {
    if (!holds_one_of(sentence, word)) return "\"" + word + "\" is not in: " + sentence + "; ";
  }
  const mk_status_t code = rank.abort.reason().code();
  MK_EXPECT(code == MK_ERROR_NETWORK || code == MK_ERROR_REMOTE);
  MK_EXPECT(rank.barrier());
  return "";
}

std::string fail_link(const FaultCase& fault, const std::vector<std::string>& words) {
  std::atomic<bool> peer_has_failed{false};
  return run_ranks(RankKind::threads, fault.get(), kTwoNodes,
                   [&](Rank& rank) { return put_until_failure(rank, words, peer_has_failed); });
}

int count_entries(const char* directory) {
  int count = 0;
  DIR* entries = opendir(directory);
  REQUIRE(entries != nullptr);
  while (readdir(entries) != nullptr) ++count;
  closedir(entries);
  return count;
}

}  // namespace

TEST_CASE("every error status of a completion ends the link, with peer, device, port and queue pair",
          "[verbs]") {
  // IBV_WC_LOC_LEN_ERR to IBV_WC_GENERAL_ERR, but for those of atomics and raw packets.
  const std::vector<int> all{1, 2, 4, 6, 8, 9, 10, 11, 12, 13, 20, 21}, some{4, 10, 12};
  for (const int status : kThreadSanitizer ? some : all) {
    for (const Kind& kind : kKinds) {
      INFO(kind.backend << " on " << kind.softnic << ", status " << status);
      const FaultCase fault(kind,
                            "MK_SOFTNIC_SEED=3 MK_SOFTNIC_ADVERSITY=error=0.05:" + std::to_string(status));
      // Rank 1's acknowledgements fail as well. Of one that is refused, a rank over srd hears from its peer,
      // and it may hear of it first.
      const bool is_told = std::string(kind.backend) == "srd" && (status == 10 || status == 21);
      const std::string cause =
          "status " + std::to_string(status) + (is_told ? "|its puts are refused here" : "");
      CHECK(fail_link(fault, {"rank 0: ", "link to rank 1", "softnic0 port 1", "QP ", cause}) == "");
    }
  }
}

TEST_CASE("a queue pair or a device that fails by itself is named", "[verbs]") {
  for (const char* hazard : {"qp_fatal", "device_fatal"}) {
    for (const Kind& kind : kKinds) {
      INFO(kind.backend << " on " << kind.softnic << ", " << hazard);
      const FaultCase fault(kind, std::string("MK_SOFTNIC_SEED=9 MK_SOFTNIC_ADVERSITY=") + hazard + "=0.05");
      CHECK(fail_link(fault, {"rank 0: ", "link to rank 1", "softnic0 port 1"}) == "");
    }
  }
}

TEST_CASE("a port that goes down and stays so is an error within the retry time", "[verbs]") {
  for (const Kind& kind : kKinds) {
    INFO(kind.backend << " on " << kind.softnic);
    const FaultCase fault(kind, "MK_SOFTNIC_SEED=4 MK_SOFTNIC_ADVERSITY=port_down=0.02");
    const Deadline deadline = Deadline::after(std::chrono::seconds(15));
    CHECK(fail_link(fault, {"link to rank 1", "softnic0 port 1"}) == "");
    CHECK_FALSE(deadline.passed());
  }
}

TEST_CASE("a peer that falls silent is an error within the retry time", "[verbs]") {
  for (const Kind& kind : kKinds) {
    INFO(kind.backend << " on " << kind.softnic);
    const FaultCase fault(kind, "MK_SOFTNIC_SEED=9 MK_SOFTNIC_ADVERSITY=vanish=0.02");
    const Deadline deadline = Deadline::after(std::chrono::seconds(15));
    CHECK(fail_link(fault, {"link to rank 1", "did not answer within the retry time"}) == "");
    CHECK_FALSE(deadline.passed());
  }
}

TEST_CASE("only active ports are used, and a rank without one says why", "[verbs]") {
  for (const Kind& kind : kKinds) {
    INFO(kind.backend << " on " << kind.softnic);
    const FaultCase one_down(kind, "MK_SOFTNIC_NICS=2 MK_SOFTNIC_DOWN=0");
    CHECK(run_ranks(RankKind::threads, one_down.get(), kTwoNodes, [&](Rank& rank) -> std::string {
            MK_EXPECT_OK(rank.connect({}));
            MK_EXPECT(rank.post(make_signal(1 - rank.rank, 1)));
            MK_EXPECT(rank.wait([&] { return rank.endpoint->signal(1) == 1; }));
            MK_EXPECT(rank.wait_complete());
            MK_EXPECT(rank.barrier());
            return rank.failure();
          }) == "");
    const FaultCase all_down(kind, "MK_SOFTNIC_NICS=2 MK_SOFTNIC_DOWN=0,1");
    CHECK(run_ranks(RankKind::threads, all_down.get(), kTwoNodes, [&](Rank& rank) -> std::string {
            const Status status = rank.connect({});
            MK_EXPECT(status.code() == MK_ERROR_UNSUPPORTED);
            const std::string& sentence = status.sentence();
            MK_EXPECT(sentence.find("softnic0 port 1 is down") != std::string::npos);
            MK_EXPECT(sentence.find("softnic1 port 1 is down") != std::string::npos);
            return "";
          }) == "");
  }
}

TEST_CASE("a rank says which ports it uses, and uses those that it is told to", "[verbs]") {
  for (const Kind& kind : kKinds) {
    INFO(kind.backend << " on " << kind.softnic);
    // Whoever uses port 0 fails.
    const FaultCase three(kind, "MK_SOFTNIC_NICS=3 MK_SOFTNIC_DOWN=1 MK_SOFTNIC_BLOCKED=0-0,0-2");
    CHECK(run_ranks(RankKind::threads, three.get(), kTwoNodes, [&](Rank& rank) -> std::string {
            const auto survey = std::string(kind.backend) == "rc" ? rc::survey : srd::survey;
            const NicSurvey ports = survey(rank.topology, "");
            MK_EXPECT(ports.used.size() == 2);
            MK_EXPECT(ports.used[0].name == "softnic0:1" && ports.used[1].name == "softnic2:1");
            MK_EXPECT(!ports.used[0].address.empty() && ports.used[0].address != ports.used[1].address);
            MK_EXPECT(ports.unusable == std::vector<std::string>{"softnic1 port 1 is down"});
            EndpointOptions options;
            options.nics = {"softnic2:1"};
            MK_EXPECT_OK(rank.connect(std::move(options)));
            MK_EXPECT_OK(rank.add_region(rank.make_memory(1 << 20)).status());
            for (uint32_t n = 0; n < 8; ++n)
              MK_EXPECT(rank.post(
                  make_put(1 - rank.rank, region_address(0, 0), region_address(0, 1 << 19), 1 << 19, n)));
            for (uint32_t n = 0; n < 8; ++n)
              MK_EXPECT(rank.wait([&] { return rank.endpoint->signal(n) == 1; }));
            MK_EXPECT(rank.wait_complete());
            MK_EXPECT(rank.barrier());
            return rank.failure();
          }) == "");
    CHECK(run_ranks(RankKind::threads, three.get(), kTwoNodes, [&](Rank& rank) -> std::string {
            EndpointOptions options;
            options.nics = {"softnic1:1"};
            const Status status = rank.connect(std::move(options));
            MK_EXPECT(status.code() == MK_ERROR_UNSUPPORTED);
            MK_EXPECT(status.sentence().find("softnic1:1 is not usable") != std::string::npos);
            return "";
          }) == "");
  }
}

TEST_CASE("a blocked path and a wrong GID end in words", "[verbs]") {
  for (const Kind& kind : {kKinds[1], kKinds[2]}) {
    INFO(kind.backend << " on " << kind.softnic);
    const FaultCase wrong(kind, "MK_SOFTNIC_WRONG_GID=0");
    CHECK(fail_link(wrong, {"link to rank 1", "GID"}) == "");
    const FaultCase blocked(kind, "MK_SOFTNIC_BLOCKED=0-0");
    CHECK(fail_link(blocked, {"link to rank 1", "the path is blocked"}) == "");
  }
}

TEST_CASE("a link over each GID of a port, and over each port of a device", "[verbs]") {
  struct Address {
    Kind kind;
    const char* environment;
  };
  // softnic's four on RoCE: link-local of version 1 and 2, IPv4 of version 1 and 2.
  const Address addresses[] = {{kKinds[0], "MK_IB_GID_INDEX=0"},
                               {kKinds[1], "MK_IB_GID_INDEX=0"},
                               {kKinds[1], "MK_IB_GID_INDEX=1"},
                               {kKinds[1], "MK_IB_GID_INDEX=2"},
                               {kKinds[1], "MK_IB_GID_INDEX=3"},
                               {kKinds[0], "MK_SOFTNIC_PORTS=2"},
                               {kKinds[1], "MK_SOFTNIC_PORTS=2 MK_IB_HCA=softnic0:2"}};
  for (const Address& address : addresses) {
    INFO(address.kind.softnic << ", " << address.environment);
    const FaultCase plain(address.kind, address.environment);
    CHECK(run_ranks(RankKind::threads, plain.get(), kTwoNodes, [&](Rank& rank) -> std::string {
            MK_EXPECT_OK(rank.connect({}));
            auto& memory = rank.make_memory(1 << 20);
            MK_EXPECT_OK(rank.add_region(memory).status());
            for (uint32_t n = 0; n < 8; ++n)
              MK_EXPECT(rank.post(
                  make_put(1 - rank.rank, region_address(0, 0), region_address(0, 1 << 19), 1 << 19, n)));
            for (uint32_t n = 0; n < 8; ++n)
              MK_EXPECT(rank.wait([&] { return rank.endpoint->signal(n) == 1; }));
            MK_EXPECT(rank.wait_complete());
            MK_EXPECT(rank.barrier());
            return rank.failure();
          }) == "");
  }
}

TEST_CASE("devices, GIDs and settings that make no sense are refused on every rank", "[verbs]") {
  struct Wrong {
    const char* environment;
    const char* sentence;
  };
  const Wrong wrongs[] = {
      {"MK_IB_HCA=mlx5", "excluded by MK_IB_HCA"}, {"MK_IB_HCA=:", "MK_IB_HCA"},
      {"MK_IB_GID_INDEX=200", "GID number 200"},   {"MK_IB_GID_INDEX=none", "MK_IB_GID_INDEX"},
      {"MK_IB_GID_INDEX=256", "from -1 to 255"},   {"MK_IB_SIGNAL=smoke", "MK_IB_SIGNAL"},
      {"MK_IB_TIMEOUT=99", "MK_IB_TIMEOUT"}};
  for (const Wrong& wrong : wrongs) {
    for (const Kind& kind : kKinds) {
      if (std::strcmp(kind.backend, "srd") == 0 && std::strstr(wrong.environment, "TIMEOUT") != nullptr)
        continue;
      INFO(kind.backend << " on " << kind.softnic << ", " << wrong.environment);
      const FaultCase fault(kind, wrong.environment);
      CHECK(run_ranks(RankKind::threads, fault.get(), kTwoNodes, [&](Rank& rank) -> std::string {
              const Status status = rank.connect({});
              MK_EXPECT(!status.ok());
              if (status.sentence().find(wrong.sentence) == std::string::npos) return status.sentence();
              return "";
            }) == "");
    }
  }
}

TEST_CASE("immediates that break the rules end the link, with the sender's name", "[verbs]") {
  using namespace verbs;
  struct Forged {
    uint32_t immediate;
    const char* sentence;
  };
  const Forged forgeries[] = {
      {0, "kind 0"},
      {encode(ControlImmediate{static_cast<ControlKind>(15), 0}), "kind 15"},
      {encode(acknowledge(0, 0)), "acknowledges nothing"},
      {encode(acknowledge(7, 0x80)), "acknowledges slot 63, which awaits nothing"},
      {encode(ControlImmediate{ControlKind::refused, 0}), "not registered"},
  };
  for (const Kind& kind : kKinds) {
    for (const Forged& forged : forgeries) {
      INFO(kind.backend << " on " << kind.softnic << ", expected: " << forged.sentence);
      sabotage().forged_immediate = forged.immediate;
      const FaultCase fault(kind, "");
      CHECK(run_ranks(RankKind::threads, fault.get(), kTwoNodes, [&](Rank& rank) -> std::string {
              MK_EXPECT_OK(rank.connect({}));
              if (rank.rank == 1) MK_EXPECT(rank.post(make_signal(0, 3)));
              if (rank.rank == 0) {
                MK_EXPECT(!rank.wait([] { return false; }, std::chrono::seconds(15)) && rank.abort.raised());
                MK_EXPECT(rank.failed_peers() == std::vector<int>{1});
                if (rank.failure().find(forged.sentence) == std::string::npos) return rank.failure();
                MK_EXPECT(rank.endpoint->signal(3) == 0);
              }
              MK_EXPECT(rank.barrier());
              return "";
            }) == "");
    }
    sabotage().forged_immediate.reset();
  }
}

TEST_CASE("no descriptor and no thread stays behind", "[verbs]") {
  for (const Kind& kind : kKinds) {
    const FaultCase plain(kind, "MK_SOFTNIC_NICS=2");
    const auto connect_and_go = [](Rank& rank) -> std::string {
      MK_EXPECT_OK(rank.connect({}));
      auto& memory = rank.make_memory(1 << 16);
      MK_EXPECT_OK(rank.add_region(memory).status());
      MK_EXPECT(rank.barrier());
      return "";
    };
    CHECK(run_ranks(RankKind::threads, plain.get(), {0, 1, 2}, connect_and_go) == "");
    const int descriptors = count_entries("/proc/self/fd");
    const int threads = count_entries("/proc/self/task");
    for (int n = 0; n < 5; ++n)
      CHECK(run_ranks(RankKind::threads, plain.get(), {0, 1, 2}, connect_and_go) == "");
    CHECK(count_entries("/proc/self/fd") == descriptors);
    // A thread that has been joined may still be on its way out of the kernel.
    for (int n = 0; n < 100 && count_entries("/proc/self/task") > threads; ++n) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(count_entries("/proc/self/task") <= threads);
  }
}

TEST_CASE("each backend leaves the other's devices alone", "[verbs]") {
  set_environment({"rc", "0", true, "MK_VERBS_LIBRARY=" MK_SOFTNIC_LIBRARY " MK_SOFTNIC_KIND=efa"});
  CHECK(rc::available().code() == MK_ERROR_UNSUPPORTED);
  CHECK(srd::available().ok());
  set_environment({"rc", "0", true, "MK_VERBS_LIBRARY=" MK_SOFTNIC_LIBRARY " MK_SOFTNIC_KIND=roce"});
  CHECK(rc::available().ok());
  CHECK(srd::available().sentence().find("is not an EFA device") != std::string::npos);
}

}  // namespace mk::test
