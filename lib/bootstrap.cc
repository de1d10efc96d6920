// SPDX-License-Identifier: MIT
#include "bootstrap.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "bootstrap_id.h"
#include "bootstrap_join.h"
#include "bootstrap_ring.h"
#include "bootstrap_root.h"
#include "env.h"
#include "network_interface.h"
#include "rank_list.h"
#include "thread.h"

namespace mk {
namespace {

using std::chrono::milliseconds;

class RingBootstrap final : public Bootstrap {
 public:
  RingBootstrap(int rank, int nranks, AbortToken& abort)
      : rank_(rank), nranks_(nranks), abort_(abort), state_(std::make_shared<RingState>(rank, nranks)) {
    // The token may outlive this object, and keeps its callbacks.
    abort.on_raise([weak = std::weak_ptr<RingState>(state_)] {
      if (const auto state = weak.lock()) {
        std::lock_guard lock(state->mutex);
        state->changed.notify_all();
      }
    });
  }
  ~RingBootstrap() override;

  Status start(RingEnds ends, milliseconds peer_timeout);
  bool knows_loss() const {
    std::lock_guard lock(state_->mutex);
    return state_->lost.has_value();
  }

  int rank() const override { return rank_; }
  int nranks() const override { return nranks_; }
  Result<std::vector<Bytes>> all_gather(std::span<const std::byte> mine, Deadline deadline,
                                        const char* what) override;
  void on_peer_lost(std::function<void(int, Status)> callback) override;
  std::optional<Bytes> peek(int peer) override;
  void on_arrival(std::function<void()> callback) override;
  void announce_abort(const std::string& why) override;
  Status leave(Deadline deadline) override;

 private:
  using Blocks = std::vector<std::shared_ptr<const Bytes>>;
  Result<Blocks> collective(FrameKind kind, std::span<const std::byte> mine, Deadline deadline,
                            const char* what);
  Status wait_for_blocks(std::unique_lock<std::mutex>& lock, Deadline deadline, const char* what);
  void wake();

  const int rank_;
  const int nranks_;
  AbortToken& abort_;
  std::shared_ptr<RingState> state_;
  FileDescriptor wake_;
  std::thread thread_;
  Status broken_;  // a collective failed half-way: the ranks' steps no longer correspond
};

RingBootstrap::~RingBootstrap() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  wake();
  thread_.join();
  reap_roots();  // this rank's process may have run the job's root, which has ended by now
}

Status RingBootstrap::start(RingEnds ends, milliseconds peer_timeout) {
  wake_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.valid()) {
    return Status(MK_ERROR_SYSTEM, format("no descriptor for the bootstrap ring: %s", std::strerror(errno)));
  }
  auto server =
      std::make_shared<RingServer>(rank_, nranks_, peer_timeout, std::move(ends), state_, wake_.get());
  return start_thread(thread_, "mk-ring", [server = std::move(server)] { server->run(); });
}

void RingBootstrap::wake() {
  const uint64_t one = 1;
  if (wake_.valid()) [[maybe_unused]]
    const ssize_t written = write(wake_.get(), &one, sizeof one);
}

Result<RingBootstrap::Blocks> RingBootstrap::collective(FrameKind kind, std::span<const std::byte> mine,
                                                        Deadline deadline, const char* what) {
  if (mine.size() > kMaxBlockBytes) {
    return Status(MK_ERROR_INTERNAL, format("%s: a block of %zu bytes, at most %zu are allowed", what,
                                            mine.size(), kMaxBlockBytes));
  }
  MK_RETURN_IF_ERROR(broken_);
  auto data = std::make_shared<const Bytes>(mine.begin(), mine.end());
  std::unique_lock lock(state_->mutex);
  const uint64_t sequence = state_->board.enter(kind, data);
  if (nranks_ > 1) {
    state_->posts.push_back(
        {kind, encode(BlockPrefix{sequence, static_cast<uint32_t>(rank_)}), std::move(data), {}});
    wake();
  }
  broken_ = wait_for_blocks(lock, deadline, what);
  if (!broken_.ok()) return broken_;
  return state_->board.finish();
}

Status RingBootstrap::wait_for_blocks(std::unique_lock<std::mutex>& lock, Deadline deadline, const char* what) {
  const auto entered = Deadline::Clock::now();
  BlockBoard& board = state_->board;
  while (true) {
    if (const auto odd = board.odd_one()) {
      return Status(
          MK_ERROR_NETWORK,
          format("%s: rank %d is in another step than rank %d: the ranks' calls are not in the same order",
                 what, *odd, rank_));
    }
    if (board.complete()) return Status();
    if (state_->lost)
      return Status(state_->lost->second.code(),
                    format("%s: %s", what, state_->lost->second.sentence().c_str()));
    if (abort_.raised()) return abort_.reason();
    if (deadline.passed()) {
      if (entered >= deadline.moment()) {
        return Status(
            MK_ERROR_TIMEOUT,
            format("%s: the time was up when rank %d came to this step, without %s of %d: its own earlier "
                   "steps were slow, or it waited there for others",
                   what, rank_, rank_list(board.missing()).c_str(), nranks_));
      }
      const auto waited = std::chrono::round<milliseconds>(Deadline::Clock::now() - entered).count();
      return Status(
          MK_ERROR_TIMEOUT,
          format("%s: rank %d waited %s for %s of %d; a rank whose own call was refused does not come: look "
                 "at its error",
                 what, rank_, seconds(waited).c_str(), rank_list(board.missing()).c_str(), nranks_));
    }
    state_->changed.wait_until(lock, deadline.moment());
  }
}

Result<std::vector<Bytes>> RingBootstrap::all_gather(std::span<const std::byte> mine, Deadline deadline,
                                                     const char* what) {
  auto gathered = collective(FrameKind::block, mine, deadline, what);
  if (!gathered.ok()) return gathered.status();
  std::vector<Bytes> blocks;
  blocks.reserve(gathered->size());
  for (const auto& block : gathered.value()) blocks.push_back(*block);
  return blocks;
}

void RingBootstrap::on_peer_lost(std::function<void(int, Status)> callback) {
  std::optional<std::pair<int, Status>> lost;
  {
    std::lock_guard lock(state_->mutex);
    state_->on_peer_lost = callback;
    if (callback && state_->lost && !std::exchange(state_->lost_told, true)) lost = state_->lost;
  }
  if (lost) callback(lost->first, lost->second);
}

std::optional<Bytes> RingBootstrap::peek(int peer) {
  std::lock_guard lock(state_->mutex);
  const auto block = state_->board.peek(peer);
  if (!block) return {};
  return *block;
}

void RingBootstrap::on_arrival(std::function<void()> callback) {
  std::lock_guard lock(state_->mutex);
  state_->on_arrival = std::move(callback);
}

void RingBootstrap::announce_abort(const std::string& why) {
  {
    std::lock_guard lock(state_->mutex);
    state_->posts.push_back({FrameKind::news, {}, nullptr, why});
  }
  wake();
}

Status RingBootstrap::leave(Deadline deadline) {
  const auto left = collective(FrameKind::leave, {}, deadline, "leaving");
  if (!left.ok()) return left.status();
  {
    std::lock_guard lock(state_->mutex);
    state_->left = true;
  }
  wake();
  return Status();
}

Status check_arguments(int nranks, int rank, const BootstrapOptions& options) {
  if (nranks < 1 || nranks > kMaxRanks) {
    return Status(MK_ERROR_INVALID_ARGUMENT, format("nranks: expected 1 to %d, saw %d", kMaxRanks, nranks));
  }
  if (rank < 0 || rank >= nranks) {
    return Status(MK_ERROR_INVALID_ARGUMENT, format("rank: expected 0 to %d, saw %d", nranks - 1, rank));
  }
  if (options.build_id.size() > kMaxBuildIdBytes || options.config.size() > kMaxConfigBytes) {
    return Status(MK_ERROR_INTERNAL,
                  format("bootstrap: a build id of %zu bytes and a configuration of %zu, at most %zu and %zu",
                         options.build_id.size(), options.config.size(), kMaxBuildIdBytes, kMaxConfigBytes));
  }
  constexpr auto kLongest = milliseconds(std::numeric_limits<int32_t>::max() / 2);
  if (options.timeout < milliseconds(1) || options.timeout > kLongest ||
      options.peer_timeout < milliseconds(1) || options.peer_timeout > kLongest) {
    return Status(
        MK_ERROR_INVALID_ARGUMENT,
        format("init_timeout_ms, peer_timeout_ms: expected 1 to %lld, saw %lld and %lld",
               static_cast<long long>(kLongest.count()), static_cast<long long>(options.timeout.count()),
               static_cast<long long>(options.peer_timeout.count())));
  }
  return Status();
}

}  // namespace

Status Bootstrap::create_root(mk_unique_id_t* id) {
  if (!id) return Status(MK_ERROR_INVALID_ARGUMENT, "id: NULL");
  auto port = env::integer("MK_ROOT_PORT", 0, 65535);
  if (!port.ok()) return port.status();
  auto lifetime = env::integer("MK_ROOT_TIMEOUT_MS", 1, 1 << 30);
  if (!lifetime.ok()) return lifetime.status();
  auto interfaces = list_network_interfaces();
  if (!interfaces.ok()) return interfaces.status();
  auto chosen = choose_network_interface(interfaces.value(), env::text("MK_SOCKET_IFNAME"), std::nullopt);
  if (!chosen.ok()) return chosen.status();

  UniqueId made;
  made.root = chosen->address;
  made.root.port = static_cast<uint16_t>(port.value());
  auto listener = listen_on(made.root);
  if (!listener.ok()) {
    return Status(listener.status().code(),
                  listener.status().sentence() + (port.value() ? " (MK_ROOT_PORT)" : ""));
  }
  MK_RETURN_IF_ERROR(fill_random(made.secret));
  MK_RETURN_IF_ERROR(fill_random(std::as_writable_bytes(std::span(&made.job, 1))));
  MK_RETURN_IF_ERROR(start_root(listener.take(), made, milliseconds(lifetime.value())));
  *id = encode_unique_id(made);
  return Status();
}

Result<std::unique_ptr<Bootstrap>> Bootstrap::join(const mk_unique_id_t& id, int nranks, int rank,
                                                   const BootstrapOptions& options, AbortToken& abort) {
  MK_RETURN_IF_ERROR(check_arguments(nranks, rank, options));
  auto decoded = decode_unique_id(id);
  if (!decoded.ok()) return decoded.status();
  if (abort.raised()) return abort.reason();

  auto bootstrap = std::make_unique<RingBootstrap>(rank, nranks, abort);
  if (nranks == 1) {
    stop_root(decoded->job);
    return std::unique_ptr<Bootstrap>(std::move(bootstrap));
  }
  const Deadline deadline = Deadline::after(options.timeout);
  Joiner joiner(decoded.value(), nranks, rank, options, abort, deadline);
  MK_RETURN_IF_ERROR(joiner.meet_root());
  auto ends = joiner.connect_ring();
  if (!ends.ok()) return ends.status();
  MK_RETURN_IF_ERROR(bootstrap->start(ends.take(), options.peer_timeout));

  // Nobody returns before everybody is on the ring, so whoever fails on the way there is named to all.
  auto joined = bootstrap->all_gather({}, deadline, "joining");
  if (!joined.ok()) {
    // Of a loss the others know as well; news of this rank would only hide whose it was.
    if (!bootstrap->knows_loss()) bootstrap->announce_abort(joined.status().sentence());
    return joined.status();
  }
  return std::unique_ptr<Bootstrap>(std::move(bootstrap));
}

}  // namespace mk
