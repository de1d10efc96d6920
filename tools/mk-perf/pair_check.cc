// SPDX-License-Identifier: MIT
#include "pair_check.h"

#include <algorithm>
#include <bit>
#include <cctype>

#include "lib/wire.h"
#include "pair_exchange.h"

namespace perf {
namespace {

using mk::format;

constexpr size_t kMostText = 4096;

// Where a port leads, seen from another one.
std::string path_text(const mk::NicPort& from, const mk::NicPort& to, const mk::Backend& backend) {
  if (from.name.empty() && to.name.empty()) return backend.name;
  if (from.name.empty() || to.name.empty())
    return "no usable port at " + std::string(from.name.empty() ? "this" : "the other") + " end";
  std::string text = from.address + " -> " + to.name + " " + to.address + ", " + from.kind;
  if (from.kind != to.kind) text += " to " + to.kind;
  if (from.mtu_bytes == 0 || to.mtu_bytes == 0) return text;
  text += format(", MTU %u", from.mtu_bytes);
  if (from.mtu_bytes != to.mtu_bytes) text += format(" to %u", to.mtu_bytes);
  return text;
}

// What to look at when a link carries nothing.
std::string advice_on(const mk::NicPort& one, const mk::NicPort& other) {
  const std::string& kind = one.kind;
  if (!one.address.empty() && one.address == other.address)
    return "both ports have the GID " + one.address + ": give each interface an address of its own";
  if (kind == "EFA") {
    return "both security groups must allow all traffic from and to each other, and both machines be in one "
           "subnet";
  }
  if (kind == "InfiniBand") {
    return "see that both ports are ACTIVE in one fabric and partition (ibv_devinfo, ibping); MK_IB_HCA, "
           "MK_IB_GID_INDEX and MK_IB_PKEY_INDEX choose others";
  }
  if (kind.empty()) {
    return "see that no firewall stops TCP between the two, and that MK_SOCKET_IFNAME names interfaces that "
           "reach each other";
  }
  return "ping from the one address to the other, with packets as large as the MTU; UDP port 4791 must be "
         "open, both ports in one VLAN or routed, and their GIDs of one version; MK_IB_HCA and "
         "MK_IB_GID_INDEX choose others";
}

// How much a rank's failure says: least that the other one gave up, more that nothing came, most a reason.
constexpr int kReason = 3;
int weight_of(const mk::Status& failure) {
  if (failure.ok()) return 0;
  return failure.code() == MK_ERROR_ABORTED ? 1 : failure.code() == MK_ERROR_TIMEOUT ? 2 : kReason;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string said_by(int rank, const std::string& sentence) {
  const std::string who = format("rank %d: ", rank);
  return sentence.starts_with(who) ? sentence : who + sentence;
}

// What both ends know of a failure, in words.
std::string reason_of(const mk::Status& low, const mk::Status& high) {
  const int low_weight = weight_of(low), high_weight = weight_of(high);
  if (low_weight < high_weight) return said_by(1, high.sentence());
  if (low_weight > high_weight || low_weight < kReason || contains(high.sentence(), low.sentence()))
    return said_by(0, low.sentence());
  if (contains(low.sentence(), high.sentence())) return said_by(1, high.sentence());
  return said_by(0, low.sentence()) + "; " + said_by(1, high.sentence());
}

// Rather than of one of the machines.
bool is_of_the_path(const mk::Status& failure) {
  return failure.code() == MK_ERROR_TIMEOUT || failure.code() == MK_ERROR_REMOTE ||
         failure.code() == MK_ERROR_NETWORK;
}

}  // namespace

struct PairCheck::Pair {
  int low, high;
  const std::vector<mk::NicPort>&low_nics, &high_nics;
};

std::string with_ranks(const std::string& sentence, int low, int high) {
  static const std::string kWord = "rank ";
  std::string text;
  size_t at = 0;
  for (size_t found; (found = sentence.find(kWord, at)) != std::string::npos;) {
    const size_t number = found + kWord.size();
    text += sentence.substr(at, number - at);
    at = number;
    if (number >= sentence.size() || (sentence[number] != '0' && sentence[number] != '1')) continue;
    if (number + 1 < sentence.size() && std::isdigit(static_cast<unsigned char>(sentence[number + 1])))
      continue;
    text += std::to_string(sentence[number] == '0' ? low : high);
    ++at;
  }
  return text + sentence.substr(at);
}

void PairCheck::watch(LinkMeter* meter) {
  const std::lock_guard lock(mutex_);
  meter_ = meter;
  if (meter_ != nullptr && !aborted_.ok()) meter_->abort(aborted_);
}

void PairCheck::abort(const mk::Status& reason) {
  const std::lock_guard lock(mutex_);
  aborted_ = reason;
  if (meter_ != nullptr) meter_->abort(reason);
}

// First 0 measures, then 1.
PairCheck::Side PairCheck::measure_side(LinkMeter& meter, int rank) {
  Side side;
  for (int turn = 0; turn < 2; ++turn) {
    if (turn != rank) {
      side.failure = meter.answer();
    } else {
      auto figures = meter.measure();
      side.failure = figures.status();
      side.measured = figures.ok();
      if (figures.ok()) side.figures = figures.value();
    }
    if (!side.failure.ok()) break;
  }
  return side;
}

mk::Result<std::array<PairCheck::Side, 2>> PairCheck::measure(const Pair& pair, const Names& names) {
  PairExchange exchange(all_, pair.low, pair.high);
  std::unique_ptr<LinkMeter> meter;
  Side mine;
  if (all_.rank() == pair.low || all_.rank() == pair.high) {
    auto made = LinkMeter::create(backend_, exchange, names[static_cast<size_t>(exchange.rank())],
                                  [&] { return exchange.peer_gave_up(); });
    mine.failure = made.status();
    if (made.ok()) {
      meter = made.take();
      watch(meter.get());
      mine = measure_side(*meter, exchange.rank());
    }
  }
  mk::WireWriter writer;
  writer.integer(static_cast<uint8_t>(mine.failure.code())).text(mine.failure.sentence(), kMostText);
  writer.integer(static_cast<uint8_t>(mine.measured));
  writer.integer(std::bit_cast<uint64_t>(mine.figures.latency_us));
  writer.integer(std::bit_cast<uint64_t>(mine.figures.gigabytes));
  auto outcomes = exchange.finish(writer.take(), !mine.failure.ok());
  watch(nullptr);
  if (!outcomes.ok()) return outcomes.status();
  std::array<Side, 2> sides;
  for (size_t n = 0; n < sides.size(); ++n) {
    mk::WireReader reader(outcomes.value()[n]);
    const auto code = static_cast<mk_status_t>(reader.integer<uint8_t>());
    sides[n].failure = mk::Status(code, reader.text(kMostText));
    sides[n].measured = reader.integer<uint8_t>() != 0;
    sides[n].figures.latency_us = std::bit_cast<double>(reader.integer<uint64_t>());
    sides[n].figures.gigabytes = std::bit_cast<double>(reader.integer<uint64_t>());
    if (!reader.complete())
      return mk::Status(MK_ERROR_NETWORK, "a rank says of a link what makes no sense; do all run one version?");
    // Nobody takes leave over a link that has failed.
    if (meter && !sides[n].failure.ok()) meter->abort(sides[n].failure);
  }
  return sides;
}

// Both directions of a link: figures, or the failure that they share.
void PairCheck::record(const Pair& pair, const std::array<Side, 2>& sides,
                       const std::array<MeasuredLink, 2>& ways, const std::string& advice,
                       PairFindings& findings) {
  for (size_t n = 0; n < sides.size(); ++n) {
    MeasuredLink link = ways[n];
    link.failed = !sides[n].measured;
    link.latency_us = sides[n].figures.latency_us;
    link.gigabytes = sides[n].figures.gigabytes;
    findings.links.push_back(std::move(link));
  }
  const bool there = sides[0].measured, back = sides[1].measured;
  if (there && back) return;
  const MeasuredLink& way = ways[there ? 1 : 0];
  std::string subject = format("rank %d %s rank %d", way.from, there || back ? "to" : "and", way.to);
  if (way.all_nics) {
    subject += ", all NICs";
  } else if (!way.nic.empty()) {
    subject += ", " + way.nic + " " + way.path;
  }
  findings.problems +=
      subject + ": failed: " + with_ranks(reason_of(sides[0].failure, sides[1].failure), pair.low, pair.high) +
      (is_of_the_path(sides[0].failure) || is_of_the_path(sides[1].failure) ? "; " + advice : "") + "\n";
}

mk::Status PairCheck::check_nic(const Pair& pair, size_t link, PairFindings& findings) {
  const mk::NicPort none;
  const auto port = [&](const std::vector<mk::NicPort>& nics) -> const mk::NicPort& {
    return nics.empty() ? none : nics[link % nics.size()];
  };
  const mk::NicPort &low = port(pair.low_nics), &high = port(pair.high_nics);
  Names names;
  if (!low.name.empty()) names[0] = {low.name};
  if (!high.name.empty()) names[1] = {high.name};
  auto sides = measure(pair, names);
  if (!sides.ok()) return sides.status();
  std::array<MeasuredLink, 2> ways;
  ways[0].from = ways[1].to = pair.low;
  ways[0].to = ways[1].from = pair.high;
  ways[0].nic = low.name;
  ways[1].nic = high.name;
  ways[0].path = path_text(low, high, backend_);
  ways[1].path = path_text(high, low, backend_);
  record(pair, sides.value(), ways, advice_on(low, high), findings);
  return {};
}

// What an operator gets, whose puts go over all of them.
mk::Status PairCheck::check_all(const Pair& pair, size_t num_links, PairFindings& findings) {
  std::array<MeasuredLink, 2> ways;
  ways[0].from = ways[1].to = pair.low;
  ways[0].to = ways[1].from = pair.high;
  for (MeasuredLink& way : ways) {
    way.nic = "all";
    way.all_nics = true;
    way.path = format("the %zu above together", num_links);
  }
  if (!findings.problems.empty()) {
    for (MeasuredLink& way : ways) {
      way.failed = true;
      way.path += ": a put needs each of them";
      findings.links.push_back(way);
    }
    return {};
  }
  Names names;
  for (const mk::NicPort& port : pair.low_nics) names[0].push_back(port.name);
  for (const mk::NicPort& port : pair.high_nics) names[1].push_back(port.name);
  auto sides = measure(pair, names);
  if (!sides.ok()) return sides.status();
  record(pair, sides.value(), ways, advice_on(pair.low_nics.front(), pair.high_nics.front()), findings);
  return {};
}

mk::Status PairCheck::run(int low, int high, PairFindings& findings) {
  const Pair pair{low, high, nics_[static_cast<size_t>(low)], nics_[static_cast<size_t>(high)]};
  const size_t num_links = std::max({pair.low_nics.size(), pair.high_nics.size(), size_t{1}});
  PairFindings mine;
  for (size_t link = 0; link < num_links; ++link) MK_RETURN_IF_ERROR(check_nic(pair, link, mine));
  if (num_links > 1) MK_RETURN_IF_ERROR(check_all(pair, num_links, mine));
  findings.links.insert(findings.links.end(), mine.links.begin(), mine.links.end());
  findings.problems += mine.problems;
  return {};
}

}  // namespace perf
