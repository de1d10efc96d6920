// SPDX-License-Identifier: MIT
#include "check_network.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <sstream>

#include "lib/bootstrap.h"
#include "lib/cuda_driver.h"
#include "lib/env.h"
#include "lib/network_interface.h"
#include "lib/wire.h"
#include "link_table.h"
#include "network_ports.h"
#include "pair_check.h"
#include "transport/transport.h"
#include "transport/verbs/gpu_check.h"

namespace perf {
namespace {

using mk::format;

constexpr std::chrono::seconds kConnectLimit{60};
constexpr size_t kMostText = 1 << 16;
constexpr size_t kMostName = 128;
constexpr const char* kPortCure =
    "it is left out; check its cable and the switch's port, and bring its interface up (ibv_devinfo, rdma "
    "link)";

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

// With which backend pairs are measured, and why the library would not connect all ranks with it.
struct Choice {
  const mk::Backend* backend = nullptr;
  mk::Status failure;
};

const mk::Backend* backend_called(const std::string& name) {
  for (const mk::Backend& backend : mk::backends()) {
    if (name == backend.name) return &backend;
  }
  return nullptr;
}

// Waits for all ranks longer than what one of them may wait for by itself: then that rank says so, and all
// stay in step.
class PatientExchange : public mk::Exchange {
 public:
  explicit PatientExchange(mk::Exchange& all) : all_(all) {}
  int rank() const override { return all_.rank(); }
  int nranks() const override { return all_.nranks(); }
  mk::Result<std::vector<mk::Bytes>> all_gather(std::span<const std::byte> mine, mk::Deadline,
                                                const char* what) override {
    return all_.all_gather(mine, mk::Deadline::after(2 * kConnectLimit), what);
  }

 private:
  mk::Exchange& all_;
};

// The first transport that every rank has; nullptr: none.
mk::Result<const mk::Backend*> first_available(mk::Exchange& exchange, mk::Deadline deadline) {
  std::string mine;
  for (const mk::Backend& backend : mk::backends()) mine += backend.available().ok() ? '1' : '0';
  auto all = gather_texts(exchange, mine, deadline, "transports");
  if (!all.ok()) return all.status();
  for (size_t n = 0; n < mine.size(); ++n) {
    const auto has = [n](const std::string& text) { return n < text.size() && text[n] == '1'; };
    if (std::all_of(all->begin(), all->end(), has)) return &mk::backends()[n];
  }
  return static_cast<const mk::Backend*>(nullptr);
}

// Asks the library, as a communicator would; where it cannot connect all ranks, what MK_TRANSPORT names, or the
// first that all have, is tried pair by pair. The same answer on every rank.
mk::Result<Choice> choose_backend(const mk::Topology& topology, mk::Exchange& all,
                                  const std::string& pci_bus_id) {
  PatientExchange exchange(all);
  const mk::Deadline deadline = mk::Deadline::after(kConnectLimit);
  mk::AbortToken token;
  mk::EndpointOptions options;
  options.pci_bus_id = pci_bus_id;
  auto endpoint = mk::Endpoint::create(topology, exchange, token, std::move(options), deadline);
  std::string mine(1, static_cast<char>(endpoint.status().code()));
  mine += endpoint.ok() ? endpoint.value()->backend() : endpoint.status().sentence();
  // Nobody goes while another still connects.
  auto outcomes = gather_texts(exchange, mine, deadline, "choosing a transport");
  if (!outcomes.ok()) return outcomes.status();
  Choice choice;
  for (size_t rank = 0; rank < outcomes->size(); ++rank) {
    const std::string& outcome = outcomes.value()[rank];
    if (outcome.empty())
      return mk::Status(MK_ERROR_NETWORK, format("rank %zu says nothing of its transport", rank));
    if (outcome[0] != MK_SUCCESS && choice.failure.ok())
      choice.failure =
          mk::Status(static_cast<mk_status_t>(outcome[0]), format("rank %zu: %s", rank, outcome.c_str() + 1));
  }
  const std::string named = mk::env::text("MK_TRANSPORT");
  if (choice.failure.ok()) {
    choice.backend = backend_called(outcomes->front().substr(1));
  } else if (choice.failure.code() == MK_ERROR_MISMATCH) {
    return choice.failure;
  } else if (!named.empty()) {
    choice.backend = backend_called(named);
  } else {
    auto first = first_available(exchange, deadline);
    if (!first.ok()) return first.status();
    choice.backend = first.value();
  }
  if (choice.backend == nullptr) return choice.failure;
  return choice;
}

mk::Bytes bytes_of(const std::vector<mk::NicPort>& ports) {
  mk::WireWriter writer;
  for (const mk::NicPort& port : ports) {
    writer.text(port.name, kMostName).text(port.address, kMostName).text(port.kind, kMostName);
    writer.integer(port.mtu_bytes);
  }
  return writer.take();
}

std::vector<mk::NicPort> ports_of(const mk::Bytes& bytes) {
  std::vector<mk::NicPort> ports;
  mk::WireReader reader(bytes);
  while (!reader.complete() && !reader.broken()) {
    mk::NicPort port;
    port.name = reader.text(kMostName);
    port.address = reader.text(kMostName);
    port.kind = reader.text(kMostName);
    port.mtu_bytes = reader.integer<uint32_t>();
    if (!reader.broken()) ports.push_back(std::move(port));
  }
  return ports;
}

std::string describe_nic(int rank, const mk::NicPort& port) {
  std::string text = format("rank %d uses %s, active, %s, GID %s", rank, port.name.c_str(), port.kind.c_str(),
                            port.address.c_str());
  if (port.mtu_bytes > 0) text += format(", MTU %u", port.mtu_bytes);
  return text + "\n";
}

// A sentence about a port that list_network_ports sees, and speaks of, too.
bool is_listed(const std::string& sentence) {
  for (const NetworkPort& port : list_network_ports()) {
    if (sentence.starts_with(port.name + " ")) return true;
  }
  return false;
}

class Check {
 public:
  Check(const mk_unique_id_t& id, int nranks, int rank, std::string pci_bus_id)
      : id_(id), nranks_(nranks), rank_(rank), pci_bus_id_(std::move(pci_bus_id)) {}

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
    std::string problems;
    MK_RETURN_IF_ERROR(gather_text(describe_rank(rank_, problems), "descriptions", check.text));
    return gather_text(problems, "problems", check.problems);
  }

  // What every rank uses of its NICs; ports that are of no use are problems.
  mk::Status survey(const mk::Backend& backend, const mk::Topology& topology, NetworkCheck& check) {
    mk::NicSurvey mine;
    if (backend.survey != nullptr) mine = backend.survey(topology, pci_bus_id_);
    std::string lines, problems;
    for (const mk::NicPort& port : mine.used) lines += describe_nic(rank_, port);
    for (const std::string& why : mine.unusable) {
      lines += format("rank %d does not use: %s\n", rank_, why.c_str());
      if (!is_listed(why)) problems += format("rank %d: %s: %s\n", rank_, why.c_str(), kPortCure);
    }
    MK_RETURN_IF_ERROR(gather_text(lines, "NICs", check.text));
    MK_RETURN_IF_ERROR(gather_text(problems, "problems of NICs", check.problems));
    auto blocks = bootstrap_->all_gather(bytes_of(mine.used), deadline(), "NICs that are used");
    if (!blocks.ok()) return blocks.status();
    for (const mk::Bytes& block : blocks.value()) nics_.push_back(ports_of(block));
    return {};
  }

  // The library takes the first transport that connects all ranks; one that it passes over though all have NICs
  // for it does not connect them.
  mk::Status note_passed_over(const mk::Backend& used, const mk::Topology& topology, NetworkCheck& check) {
    for (const mk::Backend& backend : mk::backends()) {
      if (&backend == &used || !mk::env::text("MK_TRANSPORT").empty()) break;
      if (backend.survey == nullptr) continue;
      const auto count = static_cast<std::byte>(backend.survey(topology, pci_bus_id_).used.size());
      auto counts = bootstrap_->all_gather(std::span(&count, 1), deadline(), "NICs of other transports");
      if (!counts.ok()) return counts.status();
      const bool everywhere = std::none_of(counts->begin(), counts->end(), [](const mk::Bytes& block) {
        return block.empty() || block[0] == std::byte{0};
      });
      if (!everywhere) continue;
      check.problems += format(
          "every rank has NICs for transport %s, but they do not all connect, and %s is used instead; "
          "MK_TRANSPORT=%s in front of this check says which and why\n",
          backend.name, used.name, backend.name);
    }
    return {};
  }

  mk::Status gather_text(const std::string& mine, const char* what, std::string& all) {
    auto texts = gather_texts(*bootstrap_, mine, deadline(), what);
    if (!texts.ok()) return texts.status();
    for (const std::string& text : texts.value()) all += text;
    return {};
  }

  mk::Status measure(const mk::Topology& topology, NetworkCheck& check) {
    auto choice = choose_backend(topology, *bootstrap_, pci_bus_id_);
    if (!choice.ok()) return choice.status();
    check.text += format("transport used: %s\n", choice->backend->name);
    if (!choice->failure.ok()) {
      check.problems +=
          format("the ranks cannot be connected all together: %s\n", choice->failure.sentence().c_str());
    }
    MK_RETURN_IF_ERROR(note_passed_over(*choice->backend, topology, check));
    MK_RETURN_IF_ERROR(survey(*choice->backend, topology, check));
    const bool nothing =
        choice->backend->survey != nullptr &&
        std::all_of(nics_.begin(), nics_.end(), [](const auto& ports) { return ports.empty(); });
    if (!choice->failure.ok() && nothing) return choice->failure;
    pairs_.emplace(*bootstrap_, *choice->backend, nics_);
    abort_.on_raise([this] { pairs_->abort(abort_.reason()); });
    PairFindings findings;
    // Pair by pair, so that no link has to share anything with another.
    for (int low = 0; low < topology.nranks; ++low) {
      for (int high = low + 1; high < topology.nranks; ++high) {
        if (!topology.same_node(low, high)) MK_RETURN_IF_ERROR(pairs_->run(low, high, findings));
      }
    }
    std::stable_sort(findings.links.begin(), findings.links.end(), [](const auto& a, const auto& b) {
      return std::pair(a.from, a.to) < std::pair(b.from, b.to);
    });
    check.text += table_of(findings.links);
    check.problems += findings.problems + judge_links(findings.links);
    return {};
  }

  const mk_unique_id_t id_;
  const int nranks_;
  const int rank_;
  const std::string pci_bus_id_;  // of its GPU, or empty
  mk::AbortToken abort_;
  std::vector<std::vector<mk::NicPort>> nics_;  // by rank
  // The bootstrap's thread may raise the token, and so end what is being measured, until it ends itself.
  std::optional<PairCheck> pairs_;
  std::unique_ptr<mk::Bootstrap> bootstrap_;
};

}  // namespace

NetworkCheck check_network(const mk_unique_id_t& id, int nranks, int rank,
                           const std::vector<int32_t>& node_of_rank, int cuda_device) {
  NetworkCheck check;
  const std::string pci_bus_id = cuda_device < 0 ? "" : mk::cuda::pci_bus_id(cuda_device);
  const mk::Status status = Check(id, nranks, rank, pci_bus_id).run(node_of_rank, check);
  if (!status.ok()) check.failure = format("rank %d: %s\n", rank, status.sentence().c_str());
  return check;
}

}  // namespace perf
