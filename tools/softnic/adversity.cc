// SPDX-License-Identifier: MIT
#include "adversity.h"

#include <cstdlib>
#include <sstream>

namespace softnic {
namespace {

constexpr std::array<const char*, kNumHazards> kNames = {
    "place", "reorder", "delay", "late", "rnr", "error", "qp_fatal", "port_down", "device_fatal", "vanish"};
constexpr uint32_t kDefaultMicroseconds = 200;
constexpr uint32_t kDefaultStatus = 11;  // IBV_WC_REM_OP_ERR
constexpr uint32_t kLargestStatus = 23;  // IBV_WC_TM_RNDV_INCOMPLETE
constexpr const char* kHarmless = "place=1,reorder=1,delay=0.02,late=0.05,rnr=0.02";

uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ value >> 27) * 0x94d049bb133111ebull;
  return value ^ value >> 31;
}

}  // namespace

uint64_t Random::next() {
  state_ += 0x9e3779b97f4a7c15ull;
  return mix(state_);
}

bool Adversity::parse(uint64_t seed, const std::string& list, std::string& error) {
  entries_ = {};
  any_ = false;
  seed_ = seed;
  if (seed == 0 && list.empty()) return true;
  std::istringstream entries(list.empty() ? kHarmless : list);
  for (std::string text; std::getline(entries, text, ',');) {
    if (!parse_entry(text, error)) return false;
  }
  return true;
}

bool Adversity::parse_entry(const std::string& text, std::string& error) {
  const size_t equals = text.find('=');
  const std::string name = text.substr(0, equals);
  for (size_t index = 0; equals != std::string::npos && index < kNumHazards; ++index) {
    if (name != kNames[index]) continue;
    const Hazard hazard = static_cast<Hazard>(index);
    Entry& entry = entries_[index];
    char* end = nullptr;
    entry.probability = std::strtod(text.c_str() + equals + 1, &end);
    entry.parameter = hazard == Hazard::error ? kDefaultStatus : kDefaultMicroseconds;
    if (*end == ':') entry.parameter = static_cast<uint32_t>(std::strtoul(end + 1, &end, 10));
    const bool bad_status =
        hazard == Hazard::error && (entry.parameter == 0 || entry.parameter > kLargestStatus);
    if (*end != '\0' || !(entry.probability >= 0 && entry.probability <= 1) || bad_status) break;
    any_ = any_ || entry.probability > 0;
    return true;
  }
  error = "MK_SOFTNIC_ADVERSITY: expected name=probability[:parameter] separated by commas, saw \"" + text +
          "\"; names are";
  for (const char* known : kNames) error += std::string(" ") + known;
  return false;
}

uint64_t Adversity::choice(Hazard hazard, const Subject& subject) const {
  uint64_t value = mix(seed_ ^ (static_cast<uint64_t>(hazard) + 1) << 56);
  value = mix(value ^ static_cast<uint64_t>(subject.nic));
  value = mix(value ^ (static_cast<uint64_t>(subject.source_qp) << 32 | subject.target_qp));
  value = mix(value ^ subject.sequence);
  return mix(value ^ subject.attempt);
}

bool Adversity::strikes(Hazard hazard, const Subject& subject) const {
  const double probability = entry(hazard).probability;
  if (probability <= 0) return false;
  constexpr double kScale = 1.0 / 9007199254740992.0;  // 2^-53
  // A second mix: choice() itself stays independent of the fact that the hazard struck.
  return static_cast<double>(mix(choice(hazard, subject)) >> 11) * kScale < probability;
}

}  // namespace softnic
