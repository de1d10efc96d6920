// SPDX-License-Identifier: MIT
#include "symmetric_memory.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "descriptor_exchange.h"
#include "symmetric_backend.h"

namespace mk {
namespace {

static_assert(std::endian::native == std::endian::little, "records travel in the machine's byte order");

// What one rank tells the others in every step; fields that a step does not use are zero.
struct Record {
  uint64_t bytes = 0;   // set-up: granularity; growth: size asked for
  uint64_t offset = 0;  // growth: size before
  RandomToken token{};  // set-up: names the rank's range in its process
  DescriptorAddress address{};
  int32_t code = MK_SUCCESS;
  uint32_t description_bytes = 0;
  uint32_t sentence_bytes = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(Record) == 80);

constexpr size_t kMaxSentenceBytes = 1024;
constexpr uint64_t kMaxGranularity = 1 << 30;

struct RankReport {
  Record record;
  Bytes description;
  Status status;
};

Bytes encode(const RankReport& report) {
  std::string sentence = report.status.sentence().substr(0, kMaxSentenceBytes);
  Record record = report.record;
  record.code = report.status.code();
  record.description_bytes = static_cast<uint32_t>(report.description.size());
  record.sentence_bytes = static_cast<uint32_t>(sentence.size());
  const auto* fixed = reinterpret_cast<const std::byte*>(&record);
  const auto* text = reinterpret_cast<const std::byte*>(sentence.data());
  Bytes block(fixed, fixed + sizeof record);
  block.insert(block.end(), report.description.begin(), report.description.end());
  block.insert(block.end(), text, text + sentence.size());
  return block;
}

std::optional<RankReport> decode(std::span<const std::byte> block) {
  RankReport report;
  Record& record = report.record;
  if (block.size() < sizeof record) return std::nullopt;
  std::memcpy(&record, block.data(), sizeof record);
  block = block.subspan(sizeof record);
  if (record.description_bytes > MemoryBackend::kMaxDescriptionBytes) return std::nullopt;
  if (record.sentence_bytes > kMaxSentenceBytes || record.code < 0 || record.code > MK_ERROR_INTERNAL) {
    return std::nullopt;
  }
  if (block.size() != size_t{record.description_bytes} + record.sentence_bytes) return std::nullopt;
  report.description.assign(block.begin(), block.begin() + record.description_bytes);
  block = block.subspan(record.description_bytes);
  report.status = Status(static_cast<mk_status_t>(record.code),
                         std::string(reinterpret_cast<const char*>(block.data()), block.size()));
  return report;
}

// The ranges of this process' ranks, so that the other ranks of the process use them too.
class ProcessRanges {
 public:
  static ProcessRanges& get() {
    static ProcessRanges ranges;
    return ranges;
  }
  void add(const RandomToken& token, const std::shared_ptr<MemoryRange>& range) {
    std::lock_guard lock(mutex_);
    ranges_[token] = range;
  }
  void remove(const RandomToken& token) {
    std::lock_guard lock(mutex_);
    ranges_.erase(token);
  }
  // nullptr: the rank of that token is in another process.
  std::shared_ptr<MemoryRange> find(const RandomToken& token) {
    std::lock_guard lock(mutex_);
    const auto found = ranges_.find(token);
    return found == ranges_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<RandomToken, std::weak_ptr<MemoryRange>> ranges_;
};

class GrowingMemory final : public SymmetricMemory {
 public:
  GrowingMemory(const Topology& topology, Exchange& exchange, AbortToken& abort,
                std::unique_ptr<MemoryBackend> backend)
      : topology_(topology), exchange_(exchange), abort_(abort), backend_(std::move(backend)) {}

  ~GrowingMemory() override {
    if (own_) ProcessRanges::get().remove(token_);
  }

  Status connect(Deadline deadline);
  Result<size_t> grow(size_t bytes, Deadline deadline) override;

  size_t size() const override { return size_; }
  std::byte* local(size_t offset) const override { return own_->base() + offset; }
  std::byte* peer(int local_rank, size_t offset) const override {
    if (local_rank < 0 || local_rank >= topology_.local_nranks()) return nullptr;
    return ranges_[static_cast<size_t>(local_rank)]->base() + offset;
  }
  size_t granularity() const override { return granularity_; }

 private:
  struct ForeignRange {
    int rank;
    MemoryRange* range;
  };

  const std::vector<int>& node_ranks() const {
    return topology_.ranks_of_node[static_cast<size_t>(topology_.node())];
  }
  Status reserve_own();
  Status meet_peers(const std::vector<RankReport>& reports);
  Result<size_t> round_up(size_t bytes) const;
  Status append_own(size_t bytes, Deadline deadline);
  Status map_foreign(const std::vector<RankReport>& reports, size_t bytes, Deadline deadline);
  Status disagreement(const std::vector<RankReport>& reports) const;
  Status first_failure(const std::vector<RankReport>& reports, const std::string& step) const;
  Result<std::vector<RankReport>> gather(const RankReport& mine, Deadline deadline, const char* what);
  void undo();

  const Topology topology_;
  Exchange& exchange_;
  AbortToken& abort_;
  const std::unique_ptr<MemoryBackend> backend_;
  RandomToken token_{};
  std::shared_ptr<MemoryRange> own_;
  std::vector<std::shared_ptr<MemoryRange>> ranges_;  // by local rank
  std::vector<ForeignRange> foreign_;
  size_t granularity_ = 1;
  size_t size_ = 0;
  Status broken_;

  // Of the growth under way: this rank's new memory and the socket that hands it on.
  FileDescriptor memory_;
  std::optional<DescriptorExchange> descriptors_;
};

Result<std::vector<RankReport>> GrowingMemory::gather(const RankReport& mine, Deadline deadline,
                                                      const char* what) {
  Result<std::vector<Bytes>> blocks = exchange_.all_gather(encode(mine), deadline, what);
  if (!blocks.ok()) return blocks.status();
  std::vector<RankReport> reports;
  for (const Bytes& block : blocks.value()) {
    std::optional<RankReport> report = decode(block);
    if (!report) {
      return Status(MK_ERROR_INTERNAL, format("%s: the block of rank %zu (%zu bytes) cannot be understood",
                                              what, reports.size(), block.size()));
    }
    reports.push_back(std::move(*report));
  }
  return reports;
}

Status GrowingMemory::first_failure(const std::vector<RankReport>& reports, const std::string& step) const {
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const Status& status = reports[rank].status;
    if (!status.ok()) {
      return Status(status.code(),
                    format("%s failed on rank %zu: %s", step.c_str(), rank, status.sentence().c_str()));
    }
  }
  return {};
}

Status GrowingMemory::reserve_own() {
  Result<RandomToken> token = make_random_token();
  if (!token.ok()) return token.status();
  Result<std::shared_ptr<MemoryRange>> range = backend_->reserve_own();
  if (!range.ok()) return range.status();
  token_ = token.value();
  own_ = range.take();
  ProcessRanges::get().add(token_, own_);
  return {};
}

Status GrowingMemory::meet_peers(const std::vector<RankReport>& reports) {
  for (const int rank : node_ranks()) {
    if (rank == topology_.rank) {
      ranges_.push_back(own_);
      continue;
    }
    const RankReport& report = reports[static_cast<size_t>(rank)];
    std::shared_ptr<MemoryRange> range = ProcessRanges::get().find(report.record.token);
    MK_RETURN_IF_ERROR(backend_->meet(rank, report.description, range != nullptr));
    if (!range) {
      Result<std::shared_ptr<MemoryRange>> reserved = backend_->reserve_peer(rank, report.description);
      if (!reserved.ok()) return reserved.status();
      range = reserved.take();
      foreign_.push_back({rank, range.get()});
    }
    ranges_.push_back(std::move(range));
  }
  return {};
}

Status GrowingMemory::connect(Deadline deadline) {
  RankReport mine;
  mine.status = reserve_own();
  mine.record.token = token_;
  mine.record.bytes = backend_->granularity();
  mine.description = backend_->description();
  Result<std::vector<RankReport>> reports = gather(mine, deadline, "setting up symmetric memory");
  if (!reports.ok()) return reports.status();
  MK_RETURN_IF_ERROR(first_failure(reports.value(), "reserving addresses for symmetric memory"));
  for (const RankReport& report : reports.value()) {
    if (!std::has_single_bit(report.record.bytes) || report.record.bytes > kMaxGranularity) {
      return Status(MK_ERROR_INTERNAL,
                    format("expected a power of two as granularity of symmetric memory, saw %llu",
                           static_cast<unsigned long long>(report.record.bytes)));
    }
    granularity_ = std::max(granularity_, static_cast<size_t>(report.record.bytes));
  }

  // Until this second step is over every rank keeps its own range, so that its neighbours find it.
  RankReport met;
  met.status = meet_peers(reports.value());
  reports = gather(met, deadline, "connecting symmetric memory");
  if (!reports.ok()) return met.status.ok() ? reports.status() : met.status;
  return first_failure(reports.value(), "connecting symmetric memory");
}

Result<size_t> GrowingMemory::round_up(size_t bytes) const {
  if (bytes == 0 || bytes > SIZE_MAX / 2) {
    return Status(
        MK_ERROR_INVALID_ARGUMENT,
        format("symmetric memory grows by 1 byte to half the address space, not by %zu bytes", bytes));
  }
  return (bytes + granularity_ - 1) & ~(granularity_ - 1);
}

Status GrowingMemory::append_own(size_t bytes, Deadline deadline) {
  Result<FileDescriptor> memory = own_->append(size_, bytes, abort_, deadline);
  if (!memory.ok()) return memory.status();
  memory_ = memory.take();
  if (foreign_.empty()) return {};
  Result<DescriptorExchange> descriptors =
      DescriptorExchange::open(topology_.rank, static_cast<int>(foreign_.size()));
  if (!descriptors.ok()) return descriptors.status();
  descriptors_.emplace(descriptors.take());
  return {};
}

Status GrowingMemory::map_foreign(const std::vector<RankReport>& reports, size_t bytes, Deadline deadline) {
  if (foreign_.empty()) return {};
  std::vector<DescriptorPeer> peers;
  for (const ForeignRange& foreign : foreign_) {
    peers.push_back({foreign.rank, reports[static_cast<size_t>(foreign.rank)].record.address});
  }
  Result<std::vector<FileDescriptor>> received = descriptors_->swap(memory_.get(), peers, abort_, deadline);
  if (!received.ok()) return received.status();
  for (size_t index = 0; index < foreign_.size(); ++index) {
    const ForeignRange& foreign = foreign_[index];
    Status mapped = foreign.range->append_shared(size_, bytes, received.value()[index]);
    if (!mapped.ok()) {
      return Status(mapped.code(),
                    format("memory of rank %d cannot be mapped: %s", foreign.rank, mapped.sentence().c_str()));
    }
  }
  return {};
}

Status GrowingMemory::disagreement(const std::vector<RankReport>& reports) const {
  for (size_t rank = 1; rank < reports.size(); ++rank) {
    const Record& first = reports[0].record;
    const Record& other = reports[rank].record;
    if (other.bytes == first.bytes && other.offset == first.offset) continue;
    return Status(
        MK_ERROR_MISMATCH,
        format("ranks grow symmetric memory differently: rank 0 asks for %llu bytes after %llu, rank %zu "
               "for %llu after %llu; every rank must ask for the same in the same order",
               static_cast<unsigned long long>(first.bytes), static_cast<unsigned long long>(first.offset),
               rank, static_cast<unsigned long long>(other.bytes),
               static_cast<unsigned long long>(other.offset)));
  }
  return {};
}

// Only while no rank has returned from grow(): from then on neighbours may be writing to the new piece.
void GrowingMemory::undo() {
  own_->truncate(size_);
  for (const ForeignRange& foreign : foreign_) foreign.range->truncate(size_);
}

Result<size_t> GrowingMemory::grow(size_t bytes, Deadline deadline) {
  MK_RETURN_IF_ERROR(broken_);
  RankReport mine;
  mine.record.bytes = bytes;
  mine.record.offset = size_;
  Result<size_t> rounded = round_up(bytes);
  mine.status = rounded.ok() ? append_own(rounded.value(), deadline) : rounded.status();
  if (descriptors_) mine.record.address = descriptors_->address();

  Result<std::vector<RankReport>> reports = gather(mine, deadline, "growing symmetric memory");
  RankReport mapped;
  const std::string step = format("growing symmetric memory by %zu bytes", bytes);
  Status outcome;
  if (reports.ok()) {
    outcome = disagreement(reports.value());
    if (outcome.ok()) outcome = first_failure(reports.value(), step);
    if (outcome.ok()) {
      mapped.status = map_foreign(reports.value(), rounded.value(), deadline);
      reports = gather(mapped, deadline, "mapping symmetric memory");
      if (reports.ok()) outcome = first_failure(reports.value(), step);
    }
  }
  descriptors_.reset();
  memory_.reset();
  if (!reports.ok()) {
    // Some ranks may think that all went well and use the new piece: it stays mapped until the destructor.
    broken_ = mapped.status.ok() ? reports.status() : mapped.status;
    return broken_;
  }
  if (!outcome.ok()) {
    undo();
    return outcome;
  }
  const size_t offset = size_;
  size_ += rounded.value();
  return offset;
}

}  // namespace

Result<std::unique_ptr<SymmetricMemory>> make_symmetric_memory(const Topology& topology, Exchange& exchange,
                                                               AbortToken& abort,
                                                               std::unique_ptr<MemoryBackend> backend,
                                                               Deadline deadline) {
  auto memory = std::make_unique<GrowingMemory>(topology, exchange, abort, std::move(backend));
  MK_RETURN_IF_ERROR(memory->connect(deadline));
  return std::unique_ptr<SymmetricMemory>(std::move(memory));
}

}  // namespace mk
