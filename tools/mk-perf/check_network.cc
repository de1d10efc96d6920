// SPDX-License-Identifier: MIT
#include "check_network.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <sstream>

#include "lib/bootstrap.h"
#include "lib/env.h"
#include "lib/network_interface.h"
#include "link_meter.h"
#include "network_ports.h"
#include "transport/transport.h"
#include "transport/verbs/gpu_check.h"

namespace perf {
namespace {

using mk::format;

constexpr std::chrono::seconds kConnectLimit{60};
constexpr size_t kMostText = 1 << 16;
// Beyond noise: a third of the others' bandwidth, five times their latency.
constexpr double kSlow = 1.0 / 3, kFar = 5;

std::string host_name() {
  char name[256] = "?";
  gethostname(name, sizeof name - 1);
  return name;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// A rank's own equipment, and what it lacks.
std::string describe_rank(int rank, std::string& problems) {
  std::string text = format("rank %d on %s\n  interfaces:", rank, host_name().c_str());
  const auto interfaces = mk::list_network_interfaces();
  if (interfaces.ok()) {
    for (const auto& interface : interfaces.value()) {
      std::string address = interface.address.text();
      address.resize(address.rfind(':'));
      text += format(" %s %s/%d", interface.name.c_str(), address.c_str(), interface.prefix_bits);
    }
  }
  text += "\n";
  for (const NetworkPort& port : list_network_ports()) {
    text += "  RDMA port: " + port.text() + "\n";
    const std::string problem = port.problem();
    if (!problem.empty()) problems += format("rank %d: %s\n", rank, problem.c_str());
  }
  const mk::verbs::GpuVerdict gpu = mk::verbs::check_gpu_memory();
  for (const std::string& line : lines_of(gpu.text)) text += "  " + line + "\n";
  for (const std::string& line : lines_of(gpu.problem)) problems += format("rank %d: %s\n", rank, line.c_str());
  for (const mk::Backend& backend : mk::backends()) {
    const mk::Status status = backend.available();
    text += format("  transport %s: %s\n", backend.name, status.ok() ? "available" : status.sentence().c_str());
  }
  return text;
}

mk::Result<std::vector<std::string>> gather_texts(mk::Exchange& exchange, const std::string& mine,
                                                  mk::Deadline deadline, const char* what) {
  auto blocks = exchange.all_gather(std::as_bytes(std::span(mine.data(), std::min(mine.size(), kMostText))),
                                    deadline, what);
  if (!blocks.ok()) return blocks.status();
  std::vector<std::string> texts;
  for (const mk::Bytes& block : blocks.value())
    texts.emplace_back(reinterpret_cast<const char*>(block.data()), block.size());
  return texts;
}

// Pair by pair, so that no link has to share anything with another.
mk::Status measure_links(LinkMeter& meter, const mk::Topology& topology, mk::Exchange& exchange,
                         std::vector<MeasuredLink>& mine) {
  for (int from = 0; from < topology.nranks; ++from) {
    for (int to = 0; to < topology.nranks; ++to) {
      if (topology.same_node(from, to)) continue;
      if (topology.rank == from) {
        auto figures = meter.measure(to);
        if (!figures.ok()) return figures.status();
        mine.push_back({from, to, figures->latency_us, figures->gigabytes});
      } else if (topology.rank == to) {
        MK_RETURN_IF_ERROR(meter.answer(from));
      }
      auto done = exchange.all_gather({}, mk::Deadline::after(kConnectLimit), "measuring a link");
      if (!done.ok()) return done.status();
    }
  }
  return {};
}

std::string table(const std::vector<MeasuredLink>& links) {
  std::string text = "from   to   latency [us]   bandwidth [GB/s]\n";
  for (const MeasuredLink& link : links) {
    text += format("%4d %4d %14.1f %18.2f\n", link.from, link.to, link.latency_us, link.gigabytes);
  }
  return text;
}

double median_of(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

class Check {
 public:
  Check(const mk_unique_id_t& id, int nranks, int rank) : id_(id), nranks_(nranks), rank_(rank) {}

  mk::Status run(const std::vector<int32_t>& node_of_rank, NetworkCheck& check) {
    mk::BootstrapOptions options;
    options.config = "network check";
    auto joined = mk::Bootstrap::join(id_, nranks_, rank_, options, abort_);
    if (!joined.ok()) return joined.status();
    bootstrap_ = joined.take();
    bootstrap_->on_peer_lost([this](int, mk::Status reason) { abort_.raise(std::move(reason)); });
    MK_RETURN_IF_ERROR(describe(check));
    auto hosts = gather_texts(*bootstrap_, mk::host_identity(), deadline(), "host identities");
    if (!hosts.ok()) return hosts.status();
    const mk::Topology topology = mk::Topology::make(rank_, hosts.value(), node_of_rank);
    if (topology.num_nodes == 1) {
      check.text += "All ranks share one machine: there is no network between them. --nodes emulates some.\n";
    } else {
      MK_RETURN_IF_ERROR(measure(topology, check));
    }
    return bootstrap_->leave(deadline());
  }

 private:
  static mk::Deadline deadline() { return mk::Deadline::after(kConnectLimit); }

  mk::Status describe(NetworkCheck& check) {
    std::string own_problems;
    auto texts = gather_texts(*bootstrap_, describe_rank(rank_, own_problems), deadline(), "descriptions");
    if (!texts.ok()) return texts.status();
    auto problems = gather_texts(*bootstrap_, own_problems, deadline(), "problems");
    if (!problems.ok()) return problems.status();
    for (const std::string& text : texts.value()) check.text += text;
    for (const std::string& text : problems.value()) check.problems += text;
    return {};
  }

  mk::Status measure(const mk::Topology& topology, NetworkCheck& check) {
    auto made = LinkMeter::create(topology, *bootstrap_, abort_, deadline());
    if (!made.ok()) return made.status();
    meter_ = made.take();
    check.text += format("transport used: %s\n", meter_->backend());
    std::vector<MeasuredLink> mine;
    MK_RETURN_IF_ERROR(measure_links(*meter_, topology, *bootstrap_, mine));
    auto blocks = bootstrap_->all_gather(std::as_bytes(std::span(mine)), deadline(), "figures of links");
    if (!blocks.ok()) return blocks.status();
    std::vector<MeasuredLink> links;
    for (const mk::Bytes& block : blocks.value()) {
      const size_t before = links.size();
      links.resize(before + block.size() / sizeof(MeasuredLink));
      std::memcpy(links.data() + before, block.data(), (links.size() - before) * sizeof(MeasuredLink));
    }
    check.text += table(links);
    check.problems += judge_links(links);
    return {};
  }

  const mk_unique_id_t id_;
  const int nranks_;
  const int rank_;
  mk::AbortToken abort_;
  // The bootstrap's thread may raise the token, and so call the meter, until it ends.
  std::unique_ptr<LinkMeter> meter_;
  std::unique_ptr<mk::Bootstrap> bootstrap_;
};

}  // namespace

std::string judge_links(const std::vector<MeasuredLink>& links) {
  if (links.empty()) return "";
  std::vector<double> latencies, bandwidths;
  for (const MeasuredLink& link : links) {
    latencies.push_back(link.latency_us);
    bandwidths.push_back(link.gigabytes);
  }
  const double latency = median_of(latencies), bandwidth = median_of(bandwidths);
  std::string problems;
  for (const MeasuredLink& link : links) {
    if (link.gigabytes < kSlow * bandwidth) {
      problems += format(
          "rank %d to rank %d: %.2f GB/s where most links have %.2f: a slower cable or port, a "
          "detour, or someone else's traffic; compare the ports above\n",
          link.from, link.to, link.gigabytes, bandwidth);
    }
    if (link.latency_us > kFar * latency) {
      problems += format(
          "rank %d to rank %d: %.1f us where most links have %.1f: more hops, or an interface that "
          "is not meant for this (MK_SOCKET_IFNAME, MK_IB_HCA)\n",
          link.from, link.to, link.latency_us, latency);
    }
  }
  return problems;
}

NetworkCheck check_network(const mk_unique_id_t& id, int nranks, int rank,
                           const std::vector<int32_t>& node_of_rank) {
  NetworkCheck check;
  const mk::Status status = Check(id, nranks, rank).run(node_of_rank, check);
  if (!status.ok()) check.failure = format("rank %d: %s\n", rank, status.sentence().c_str());
  return check;
}

}  // namespace perf
