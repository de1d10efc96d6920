// SPDX-License-Identifier: MIT
// What may go wrong, how often, and the decisions: each is a hash of the seed and of what it is about (NIC, QP,
// sequence), so that a seed gives the same decisions whatever the threads do.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace softnic {

enum class Hazard : uint8_t {
  place,         // payload in pieces, any order, mixed with that of other work requests
  reorder,       // SRD: whole operations, immediates too, in any order
  delay,         // the operation is delivered later, by up to the parameter in microseconds
  late,          // the completion comes later, by up to the parameter in microseconds
  rnr,           // the receiver says that it is not ready
  error,         // the work request fails with the parameter as its ibv_wc_status
  qp_fatal,      // the sender's QP fails, with IBV_EVENT_QP_FATAL
  port_down,     // the sender's port goes down, with IBV_EVENT_PORT_ERR
  device_fatal,  // the sender's NIC dies, with IBV_EVENT_DEVICE_FATAL
  vanish,        // the sender's NIC falls silent without a word
};
inline constexpr size_t kNumHazards = 10;

// splitmix64: a good mixer and a small generator.
class Random {
 public:
  explicit Random(uint64_t state) : state_(state) {}
  uint64_t next();
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>((next() >> 32) * bound >> 32); }
  bool coin() { return (next() & 1) != 0; }

 private:
  uint64_t state_;
};

struct Subject {
  int nic = 0;
  uint32_t source_qp = 0;
  uint32_t target_qp = 0;
  uint64_t sequence = 0;
  uint32_t attempt = 0;
};

class Adversity {
 public:
  // `list`: name=probability[:parameter],... Empty with a seed: what a correct program never notices.
  // False, and a sentence in `error`, when the list makes no sense.
  bool parse(uint64_t seed, const std::string& list, std::string& error);

  bool any() const { return any_; }
  bool has(Hazard hazard) const { return entry(hazard).probability > 0; }
  bool strikes(Hazard hazard, const Subject& subject) const;
  // A number from the seed and the subject, for what a hazard has to choose.
  uint64_t choice(Hazard hazard, const Subject& subject) const;
  uint32_t parameter(Hazard hazard) const { return entry(hazard).parameter; }

 private:
  struct Entry {
    double probability = 0;
    uint32_t parameter = 0;
  };
  const Entry& entry(Hazard hazard) const { return entries_[static_cast<size_t>(hazard)]; }
  bool parse_entry(const std::string& text, std::string& error);

  uint64_t seed_ = 0;
  bool any_ = false;
  std::array<Entry, kNumHazards> entries_{};
};

}  // namespace softnic
