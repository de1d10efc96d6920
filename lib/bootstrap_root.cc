// SPDX-License-Identifier: MIT
#include "bootstrap_root.h"

#include <poll.h>

#include <algorithm>
#include <string_view>

#include "rank_list.h"

namespace mk {
namespace {

using std::chrono::milliseconds;

// A rank needs milliseconds for its handshake; whoever takes longer is not one of ours.
constexpr milliseconds kHandshakeTime{5000};
constexpr milliseconds kTellTime{5000};
// After a failure, ranks that come later still hear why.
constexpr milliseconds kMaxLinger{60000};
// Connections that have not proved themselves; beyond it the oldest goes, so that silent ones cannot fill the
// house.
constexpr size_t kMaxStrangers = 128;
constexpr int kAcceptsPerTurn = 64;

std::string_view take_field(std::string_view& rest) {
  const size_t end = std::min(rest.find(';'), rest.size());
  const std::string_view field = rest.substr(0, end);
  rest.remove_prefix(std::min(end + 1, rest.size()));
  return field;
}

// The first "name=value" in which two configurations differ, as one rank and the other have it.
std::pair<std::string, std::string> first_difference(std::string_view a, std::string_view b) {
  while (!a.empty() || !b.empty()) {
    const std::string_view field_a = take_field(a);
    const std::string_view field_b = take_field(b);
    if (field_a != field_b) return {printable(field_a, 200), printable(field_b, 200)};
  }
  return {};
}

Status mismatch(std::string sentence) { return Status(MK_ERROR_MISMATCH, std::move(sentence)); }

// Empty when `late` fits to `first`.
Status compare(const CheckIn& first, const CheckIn& late) {
  if (late.abi_version != first.abi_version) {
    return mismatch(format("rank %u has version %u of the library, rank %u version %u", late.rank,
                           late.abi_version, first.rank, first.abi_version));
  }
  if (late.build_id != first.build_id) {
    return mismatch(format("rank %u has build %s of the library, rank %u build %s", late.rank,
                           printable(late.build_id, kMaxBuildIdBytes).c_str(), first.rank,
                           printable(first.build_id, kMaxBuildIdBytes).c_str()));
  }
  if (late.nranks != first.nranks) {
    return mismatch(format("rank %u was started as one of %u ranks, rank %u as one of %u ranks", late.rank,
                           late.nranks, first.rank, first.nranks));
  }
  if (late.config != first.config) {
    const auto [of_late, of_first] = first_difference(late.config, first.config);
    return mismatch(
        format("rank %u has %s, rank %u has %s", late.rank, of_late.c_str(), first.rank, of_first.c_str()));
  }
  return Status();
}

}  // namespace

void RollCall::add(const CheckIn& check_in) {
  const int rank = static_cast<int>(check_in.rank);
  if (!failure_.ok()) return;
  if (members_.empty()) {
    nranks_ = static_cast<int>(check_in.nranks);
    first_ = rank;
  } else if (Status difference = compare(members_.at(first_), check_in); !difference.ok()) {
    return fail(std::move(difference));
  }
  if (rank >= nranks_)
    return fail(mismatch(format("rank %d joined a job of ranks 0 to %d", rank, nranks_ - 1)));
  if (!members_.emplace(rank, check_in).second) {
    fail(mismatch(
        format("rank %d was given twice: two of the %d callers joined with the same rank", rank, nranks_)));
  }
}

Status RollCall::missing(uint32_t timeout_ms) const {
  std::vector<int> absent;
  for (int rank = 0; rank < nranks_; ++rank) {
    if (!members_.contains(rank)) absent.push_back(rank);
  }
  return Status(MK_ERROR_TIMEOUT, format("%s of %d did not join within %s (init_timeout_ms)",
                                         rank_list(absent).c_str(), nranks_, seconds(timeout_ms).c_str()));
}

Root::Root(FileDescriptor listener, const UniqueId& id, milliseconds lifetime, int stop)
    : listener_(std::move(listener)), id_(id), stop_(stop), until_(Deadline::after(lifetime)) {}

void Root::run() {
  while (!done()) {
    const bool accepting = listener_.valid() && accept_again_.passed();
    std::vector<pollfd> waits{{stop_, POLLIN, 0}, {accepting ? listener_.get() : -1, POLLIN, 0}};
    for (const auto& guest : guests_) waits.push_back({guest->channel.fd(), guest->channel.events(), 0});
    poll(waits.data(), waits.size(), wait_ms());
    if (waits[0].revents != 0) return;
    for (size_t i = 0; i + 2 < waits.size(); ++i) {
      if (waits[i + 2].revents != 0) serve(*guests_[i]);
    }
    if (waits[1].revents != 0) accept_guests();
    drop_ended();
    look_at_clock();
  }
}

bool Root::done() const {
  if (!decided_) return roll_.members().empty() && roll_.failure().ok() && until_.passed();
  if (roll_.failure().ok()) return guests_.empty();
  const bool nobody_waits = std::none_of(guests_.begin(), guests_.end(), [](const auto& g) { return g->told; });
  return nobody_waits && (num_told_ >= most_ranks_ || until_.passed());
}

int Root::wait_ms() const {
  int wait = decided_ && roll_.failure().ok() ? static_cast<int>(kTellTime.count()) : until_.left_ms();
  for (const auto& guest : guests_) {
    if (guest->rank < 0 || guest->told) wait = std::min(wait, guest->limit.left_ms());
  }
  if (!accept_again_.passed()) wait = std::min(wait, accept_again_.left_ms());
  return wait;
}

void Root::accept_guests() {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    bool exhausted = false;
    FileDescriptor accepted = accept_connection(listener_.get(), &exhausted);
    const auto is_stranger = [](const auto& guest) { return guest->rank < 0; };
    const auto oldest = std::find_if(guests_.begin(), guests_.end(), is_stranger);
    const auto strangers = static_cast<size_t>(std::count_if(guests_.begin(), guests_.end(), is_stranger));
    if (oldest != guests_.end() && (exhausted || (accepted.valid() && strangers >= kMaxStrangers)))
      guests_.erase(oldest);
    // Without a free descriptor the listener stays readable: look again a little later instead of spinning.
    if (exhausted) accept_again_ = Deadline::after(milliseconds(20));
    if (!accepted.valid()) return;
    guests_.push_back(std::make_unique<Guest>(
        Guest{Channel::server(std::move(accepted), id_.secret, Purpose::root, 0, std::nullopt),
              Deadline::after(kHandshakeTime)}));
  }
}

void Root::serve(Guest& guest) {
  guest.channel.pump();
  if (guest.channel.open() && guest.rank < 0) guest.channel.set_max_payload(kMaxRootPayload);
  while (const auto frame = guest.channel.next()) {
    if (guest.rank < 0 && frame->kind == FrameKind::check_in) check_in(guest, *frame);
  }
}

void Root::check_in(Guest& guest, const Frame& frame) {
  const auto check_in = decode_check_in(frame.payload);
  if (!check_in || check_in->rank != guest.channel.hello().from) return;
  guest.rank = static_cast<int>(check_in->rank);
  most_ranks_ = std::max(most_ranks_, static_cast<int>(check_in->nranks));
  const Deadline limit = Deadline::after(milliseconds(check_in->left_ms));
  if (!decided_ && (roll_.members().empty() || limit.moment() < until_.moment())) {
    until_ = limit;
    timeout_ms_ = check_in->timeout_ms;
  }
  roll_.add(*check_in);
  if (decided_) tell(guest);
}

void Root::drop_ended() {
  for (size_t i = 0; i < guests_.size();) {
    const Guest& guest = *guests_[i];
    const bool late = (guest.rank < 0 || guest.told) && guest.limit.passed();
    if (guest.channel.end() == Channel::End::none && !late) {
      ++i;
      continue;
    }
    if (guest.rank >= 0 && !guest.told) {
      roll_.fail(Status(
          MK_ERROR_REMOTE,
          format("rank %d left before all %d ranks had joined: its process ended or its call was aborted",
                 guest.rank, roll_.nranks())));
    }
    guests_.erase(guests_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void Root::look_at_clock() {
  if (decided_) return;
  if (roll_.failure().ok() && !roll_.complete() && !roll_.members().empty() && until_.passed()) {
    roll_.fail(roll_.missing(timeout_ms_));
  }
  if (roll_.failure().ok() && !roll_.complete()) return;
  decided_ = true;
  if (roll_.complete()) {
    listener_.reset();
    std::erase_if(guests_, [](const auto& guest) { return guest->rank < 0; });
  } else {
    // As long as a rank that was started together with these may still come.
    milliseconds linger{1000};
    for (const auto& [rank, member] : roll_.members())
      linger = std::max(linger, milliseconds(member.timeout_ms));
    until_ = Deadline::after(std::min(linger, kMaxLinger));
  }
  for (const auto& guest : guests_) {
    if (guest->rank >= 0) tell(*guest);
  }
}

void Root::tell(Guest& guest) {
  if (roll_.failure().ok()) {
    const int nranks = roll_.nranks();
    Assignment assignment;
    assignment.predecessor = static_cast<uint32_t>((guest.rank + nranks - 1) % nranks);
    assignment.successor = roll_.members().at((guest.rank + 1) % nranks).address;
    guest.channel.send(FrameKind::assignment, encode(assignment));
  } else {
    guest.channel.send(FrameKind::verdict, encode(Verdict{static_cast<uint32_t>(roll_.failure().code()),
                                                          roll_.failure().sentence()}));
  }
  guest.told = true;
  guest.limit = Deadline::after(kTellTime);
  ++num_told_;
  guest.channel.flush();
}

}  // namespace mk
