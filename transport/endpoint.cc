// SPDX-License-Identifier: MIT
#include "endpoint.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "../lib/env.h"
#include "../lib/log.h"
#include "command_fifo.h"
#include "transport.h"

namespace mk {
namespace {

// The counters that the proxy raises and anyone reads, a GPU too.
class Counters {
 public:
  static Result<Counters> make() {
    auto pages = SharedPages::make(CounterLayout::kBytes);
    if (!pages.ok()) return pages.status();
    return Counters(pages.take());
  }

  void add_signal(uint32_t index) {
    word(CounterLayout::signal(index)).fetch_add(1, std::memory_order_release);
  }
  uint64_t signal(uint32_t index) const {
    return word(CounterLayout::signal(index)).load(std::memory_order_acquire);
  }
  void add_completed(uint64_t count) {
    word(CounterLayout::kCompleted).fetch_add(count, std::memory_order_release);
  }
  uint64_t completed() const { return word(CounterLayout::kCompleted).load(std::memory_order_acquire); }
  const std::shared_ptr<SharedPages>& pages() const { return pages_; }

 private:
  explicit Counters(std::shared_ptr<SharedPages> pages) : pages_(std::move(pages)) {}
  std::atomic_ref<uint64_t> word(size_t offset) const {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(pages_->data() + offset));
  }

  std::shared_ptr<SharedPages> pages_;
};

// What a rank tells the others of a region.
struct RegionNotice {
  uint64_t bytes;
  uint32_t id;
  uint32_t generation;
  uint32_t failed;  // 1: what follows is a sentence, else the transport's key
  uint32_t reserved;
};
static_assert(sizeof(RegionNotice) == 24 && offsetof(RegionNotice, failed) == 16);

class ProxiedEndpoint : public Endpoint, private ProxyHandler {
 public:
  ProxiedEndpoint(const Topology& topology, Exchange& exchange, AbortToken& abort, EndpointOptions options)
      : topology_(topology),
        exchange_(exchange),
        abort_(abort),
        options_(std::move(options)),
        sent_bytes_(static_cast<size_t>(topology.nranks)) {}

  ~ProxiedEndpoint() override {
    proxy_.reset();
    if (transport_ && !abort_.raised()) transport_->leave();
  }

  Status start(const Backend& backend, std::unique_ptr<Transport> transport) {
    backend_ = backend.name;
    transport_ = std::move(transport);
    auto fifo = CommandFifo::create(options_.fifo_capacity);
    if (!fifo.ok()) return fifo.status();
    fifo_ = fifo.take();
    auto counters = Counters::make();
    if (!counters.ok()) return counters.status();
    counters_ = counters.take();
    auto proxy = Proxy::start(*fifo_, *this, abort_, options_.idle);
    if (!proxy.ok()) return proxy.status();
    proxy_ = proxy.take();
    return {};
  }

  RegionTable& regions() { return regions_; }
  const Topology& topology() const { return topology_; }

  const char* backend() const override { return backend_; }
  Result<uint32_t> register_region(void* base, size_t bytes, Deadline deadline) override;
  void deregister_region(uint32_t region) override;

  bool try_post(const Command& command) override {
    if (!fifo_->try_push(command)) {
      // From here on the proxy tells us of room; what it made before, we must look for ourselves.
      starved_.store(true);
      if (!fifo_->try_push(command)) return false;
    }
    proxy_->ring();
    return true;
  }
  SharedWithGpu shared_with_gpu() const override {
    return {fifo_->pages(), fifo_->capacity(), counters_->pages()};
  }
  bool try_publish(uint64_t index, const Command& command) override {
    if (!fifo_->try_publish(index, command)) return false;
    proxy_->ring();
    return true;
  }
  uint64_t posted() const override { return fifo_->claimed(); }
  uint64_t completed() const override { return counters_->completed(); }
  uint64_t sent_bytes(int peer) const override { return sent_bytes_[static_cast<size_t>(peer)].load(); }
  uint64_t signal(uint32_t index) const override { return counters_->signal(index); }

 private:
  bool handle(const Command& command) override;
  bool progress() override;
  std::chrono::microseconds prepare_wait(std::vector<pollfd>& descriptors) override {
    return transport_->prepare_wait(descriptors);
  }

  Status check(const Command& command, Put* put) const;
  void publish_signals();
  void fail(int peer, const Status& status);
  Bytes make_notice(uint32_t id, void* base, size_t bytes);
  Status read_notices(uint32_t id, const std::vector<Bytes>& blocks);

  const Topology topology_;
  Exchange& exchange_;
  AbortToken& abort_;
  const EndpointOptions options_;
  const char* backend_ = "";
  uint32_t generation_ = 0;                        // of the last registration
  std::vector<std::atomic<uint64_t>> sent_bytes_;  // by peer
  std::atomic<bool> starved_{false};               // a producer has found the FIFO full
  RegionTable regions_;
  TransportEvents events_;
  // In the order of their making; the proxy uses all that stand before it.
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<CommandFifo> fifo_;
  std::optional<Counters> counters_;
  std::unique_ptr<Proxy> proxy_;
};

Status ProxiedEndpoint::check(const Command& command, Put* put) const {
  if (command.kind != CommandKind::put && command.kind != CommandKind::signal) {
    return Status(MK_ERROR_INTERNAL, format("its kind is %u", static_cast<unsigned>(command.kind)));
  }
  put->peer = command.peer;
  if (put->peer >= topology_.nranks) {
    return Status(MK_ERROR_INTERNAL, format("the peer is outside [0, %d)", topology_.nranks));
  }
  if (topology_.same_node(put->peer, topology_.rank)) {
    return Status(MK_ERROR_INTERNAL, "the peer is on this rank's own node");
  }
  put->signal = command.signal;
  if (put->signal != kNoSignal && put->signal >= kNumSignals) {
    return Status(MK_ERROR_INTERNAL, format("its signal %u is outside [0, %u)", put->signal, kNumSignals));
  }
  if (command.kind == CommandKind::signal) {
    if (command.bytes == 0 && put->signal != kNoSignal) return {};
    return Status(MK_ERROR_INTERNAL, "it is of kind signal and has bytes, or no signal");
  }
  put->bytes = command.bytes;
  put->source_region = region_of(command.source);
  auto source = regions_.source(put->source_region, offset_of(command.source), put->bytes);
  if (!source.ok()) return source.status();
  put->source = source.value();
  put->target_region = region_of(command.target);
  put->target_offset = offset_of(command.target);
  auto generation = regions_.target(put->target_region, put->peer, put->target_offset, put->bytes);
  if (!generation.ok()) return generation.status();
  put->target_generation = generation.value();
  return {};
}

bool ProxiedEndpoint::handle(const Command& command) {
  if (abort_.raised()) return false;
  Put put;
  if (const Status status = check(command, &put); !status.ok()) {
    fail(-1, Status(status.code(), format("rank %d: a command to rank %u is wrong: %s", topology_.rank,
                                          command.peer, status.sentence().c_str())));
    return true;
  }
  if (!transport_->post(put)) return false;
  sent_bytes_[static_cast<size_t>(put.peer)].fetch_add(put.bytes, std::memory_order_relaxed);
  return true;
}

bool ProxiedEndpoint::progress() {
  events_.completions = 0;
  events_.credits = false;
  events_.signals.clear();
  events_.failures.clear();
  transport_->poll(events_);
  publish_signals();
  // Release: who sees the count may overwrite the sources. Only this thread writes it.
  if (events_.completions > 0) counters_->add_completed(events_.completions);
  for (const auto& failure : events_.failures) fail(failure.peer, failure.status);
  const bool room = fifo_->has_room() && starved_.exchange(false);
  const bool any = events_.completions > 0 || !events_.signals.empty() || room;
  if (any && options_.on_event) options_.on_event();
  return any || events_.credits || !events_.failures.empty();
}

void ProxiedEndpoint::publish_signals() {
  if (events_.signals.empty()) return;
  if (options_.flush_writes) {
    if (const Status status = options_.flush_writes(); !status.ok()) {
      fail(-1, Status(status.code(),
                      format("rank %d: making what the network has written visible to the GPU failed: %s",
                             topology_.rank, status.sentence().c_str())));
      events_.signals.clear();
    }
  }
  for (const uint32_t signal : events_.signals) counters_->add_signal(signal);
}

void ProxiedEndpoint::fail(int peer, const Status& status) {
  if (options_.on_peer_error) options_.on_peer_error(peer, status);
  abort_.raise(status);
  if (options_.on_event) options_.on_event();
}

// Adds the region here and says so, or why not. From the moment the notice is sent peers may write to the
// region.
Bytes ProxiedEndpoint::make_notice(uint32_t id, void* base, size_t bytes) {
  RegionNotice notice{bytes, id, generation_, 0, 0};
  std::string text;
  Bytes key;
  if (id >= RegionTable::kMaxRegions) {
    text = format("%u regions are registered already; deregister some", RegionTable::kMaxRegions);
  } else if (uint64_t{bytes} >> kRegionOffsetBits != 0 || (base == nullptr && bytes > 0)) {
    text = format("a region of %zu bytes at %p", bytes, base);
  } else {
    regions_.add(id, static_cast<std::byte*>(base), bytes, generation_);
    auto added = transport_->add_region(id, static_cast<std::byte*>(base), bytes);
    if (added.ok()) {
      key = added.take();
    } else {
      text = added.status().sentence();
    }
  }
  notice.failed = text.empty() ? 0 : 1;
  Bytes block(sizeof notice);
  std::memcpy(block.data(), &notice, sizeof notice);
  const auto* characters = reinterpret_cast<const std::byte*>(text.data());
  block.insert(block.end(), characters, characters + text.size());
  block.insert(block.end(), key.begin(), key.end());
  return block;
}

Status ProxiedEndpoint::read_notices(uint32_t id, const std::vector<Bytes>& blocks) {
  std::vector<uint64_t> peer_bytes;
  std::vector<Bytes> keys;
  for (size_t rank = 0; rank < blocks.size(); ++rank) {
    RegionNotice notice;
    if (blocks[rank].size() < sizeof notice) {
      return Status(MK_ERROR_NETWORK,
                    format("registering a region: rank %zu sent %zu bytes, expected at least %zu", rank,
                           blocks[rank].size(), sizeof notice));
    }
    std::memcpy(&notice, blocks[rank].data(), sizeof notice);
    Bytes rest(blocks[rank].begin() + sizeof notice, blocks[rank].end());
    if (notice.failed != 0) {
      return Status(MK_ERROR_SYSTEM,
                    format("rank %zu cannot register a region of %llu bytes: %.*s", rank,
                           static_cast<unsigned long long>(notice.bytes), static_cast<int>(rest.size()),
                           reinterpret_cast<const char*>(rest.data())));
    }
    if (notice.id != id || notice.generation != generation_) {
      return Status(
          MK_ERROR_MISMATCH,
          format("registering a region: rank %d would call it region %u of generation %u, rank %zu region %u "
                 "of generation %u; register and deregister in the same order on every rank",
                 topology_.rank, id, generation_, rank, notice.id, notice.generation));
    }
    peer_bytes.push_back(notice.bytes);
    keys.push_back(std::move(rest));
  }
  MK_RETURN_IF_ERROR(transport_->set_peer_keys(id, keys));
  regions_.set_peer_bytes(id, std::move(peer_bytes));
  return {};
}

Result<uint32_t> ProxiedEndpoint::register_region(void* base, size_t bytes, Deadline deadline) {
  const uint32_t id = regions_.free_id();
  if (++generation_ == 0) ++generation_;  // 0 means "not registered"
  auto blocks = exchange_.all_gather(make_notice(id, base, bytes), deadline, "registering a region");
  const Status status = blocks.ok() ? read_notices(id, blocks.value()) : blocks.status();
  if (!status.ok()) {
    if (id < RegionTable::kMaxRegions) deregister_region(id);
    return status;
  }
  return id;
}

void ProxiedEndpoint::deregister_region(uint32_t region) {
  regions_.remove(region);
  transport_->remove_region(region);
}

constexpr std::chrono::seconds kSlowLook{3};

// What a rank says of its choice: the name asked for and, one byte a backend, whether it is available.
struct Choice {
  char name[16];
  uint8_t available[16];
};
static_assert(sizeof(Choice) == 32);

Result<std::vector<Choice>> exchange_choices(std::span<const Backend> backends, const std::string& name,
                                             Exchange& exchange, Deadline deadline) {
  Choice mine{};
  std::memcpy(mine.name, name.data(), std::min(name.size(), sizeof mine.name - 1));
  for (size_t i = 0; i < backends.size(); ++i) {
    // Loads libraries and asks for devices.
    const auto began = std::chrono::steady_clock::now();
    mine.available[i] = backends[i].available().ok();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    if (took > kSlowLook) {
      log(MK_LOG_WARN, "rank %d: to find out whether the transport %s is available took %.1f s",
          exchange.rank(), backends[i].name, took.count());
    }
  }
  auto blocks = exchange.all_gather(std::as_bytes(std::span(&mine, 1)), deadline, "choosing a transport");
  if (!blocks.ok()) return blocks.status();
  std::vector<Choice> choices(blocks->size());
  for (size_t rank = 0; rank < choices.size(); ++rank) {
    const Bytes& block = blocks.value()[rank];
    if (block.size() != sizeof(Choice)) {
      return Status(MK_ERROR_NETWORK, format("choosing a transport: rank %zu sent %zu bytes, expected %zu",
                                             rank, block.size(), sizeof(Choice)));
    }
    std::memcpy(&choices[rank], block.data(), sizeof(Choice));
    choices[rank].name[sizeof mine.name - 1] = '\0';
    if (std::strcmp(choices[rank].name, choices[0].name) != 0) {
      return Status(MK_ERROR_MISMATCH, format("rank 0 asks for the transport \"%s\", rank %zu for \"%s\"",
                                              choices[0].name, rank, choices[rank].name));
    }
  }
  return choices;
}

// Why not every rank can use backend number `index`, this rank's own reason first; empty when all can.
std::string missing(const Backend& backend, size_t index, const std::vector<Choice>& choices, int rank) {
  if (choices[static_cast<size_t>(rank)].available[index] == 0) return backend.available().sentence();
  for (size_t r = 0; r < choices.size(); ++r) {
    if (choices[r].available[index] == 0) return format("not available on rank %zu", r);
  }
  return "";
}

}  // namespace

Result<std::unique_ptr<Endpoint>> create_endpoint(std::span<const Backend> choice, const Topology& topology,
                                                  Exchange& exchange, AbortToken& abort,
                                                  EndpointOptions options, Deadline deadline) {
  const std::string name = options.backend;
  const std::string pci_bus_id = options.pci_bus_id;
  const std::vector<std::string> nics = options.nics;
  const bool gpu_memory = options.gpu_memory;
  auto choices = exchange_choices(choice, name, exchange, deadline);
  if (!choices.ok()) return choices.status();
  auto endpoint = std::make_unique<ProxiedEndpoint>(topology, exchange, abort, std::move(options));
  std::string reasons;
  bool known = name.empty();
  // Every rank goes through the same candidates: availability was exchanged, and create fails on all ranks or
  // on none.
  for (size_t i = 0; i < choice.size(); ++i) {
    if (!name.empty() && name != choice[i].name) continue;
    known = true;
    std::string reason = missing(choice[i], i, choices.value(), topology.rank);
    if (reason.empty() && gpu_memory && !choice[i].reaches_gpu_memory) reason = "cannot reach a GPU's memory";
    if (reason.empty()) {
      auto transport = choice[i].create(
          {endpoint->topology(), exchange, abort, endpoint->regions(), pci_bus_id, nics}, deadline);
      if (transport.ok()) {
        MK_RETURN_IF_ERROR(endpoint->start(choice[i], transport.take()));
        return std::unique_ptr<Endpoint>(std::move(endpoint));
      }
      if (transport.status().code() != MK_ERROR_UNSUPPORTED) return transport.status();
      reason = transport.status().sentence();
    }
    reasons += format("%s%s: %s", reasons.empty() ? "" : "; ", choice[i].name, reason.c_str());
  }
  if (!known) {
    return Status(MK_ERROR_INVALID_ARGUMENT, format("transport (MK_TRANSPORT): expected one of %s, saw \"%s\"",
                                                    backend_names(choice).c_str(), name.c_str()));
  }
  return Status(MK_ERROR_UNSUPPORTED, "no transport connects the nodes: " + reasons);
}

Result<std::unique_ptr<Endpoint>> Endpoint::create(const Topology& topology, Exchange& exchange,
                                                   AbortToken& abort, EndpointOptions options,
                                                   Deadline deadline) {
  if (options.backend.empty()) options.backend = env::text("MK_TRANSPORT");
  return create_endpoint(backends(), topology, exchange, abort, std::move(options), deadline);
}

}  // namespace mk
