// SPDX-License-Identifier: MIT
#include "sensors.h"

#include "measure.h"

namespace perf {
namespace {

// nvml.h: NVML_SUCCESS, NVML_CLOCK_SM, NVML_FEATURE_ENABLED, NVML_NVLINK_MAX_LINKS.
constexpr int kSuccess = 0;
constexpr int kClockSm = 1;
constexpr unsigned kEnabled = 1;
constexpr unsigned kMaxNvlinks = 18;

std::optional<double> median_of(std::vector<double>& samples) {
  if (samples.empty()) return std::nullopt;
  const double middle = median(samples);
  samples.clear();
  return middle;
}

}  // namespace

Sensors::Sensors(const std::string& bus_id) {
  if (bus_id.empty()) return;
  try {
    library_ = std::make_unique<DynamicLibrary>("", std::vector<std::string>{"libnvidia-ml.so.1"});
    int (*init)() = nullptr;
    int (*by_bus_id)(const char*, void**) = nullptr;
    library_->find("nvmlInit_v2", init);
    library_->find("nvmlDeviceGetHandleByPciBusId_v2", by_bus_id);
    library_->find("nvmlDeviceGetClockInfo", clock_);
    library_->find("nvmlDeviceGetPowerUsage", power_);
    if (init() != kSuccess || by_bus_id(bus_id.c_str(), &device_) != kSuccess) device_ = nullptr;
  } catch (const LibraryAbsent&) {
    device_ = nullptr;  // the readings are absent; nothing else depends on them
  }
}

void Sensors::sample() {
  if (!device_) return;
  unsigned value = 0;
  if (clock_(device_, kClockSm, &value) == kSuccess) mhz_.push_back(value);
  if (power_(device_, &value) == kSuccess) watts_.push_back(value / 1000.0);
}

SensorReadings Sensors::take_medians() { return {median_of(mhz_), median_of(watts_)}; }

std::optional<std::string> Sensors::gpu() const {
  int (*name_of)(void*, char*, unsigned) = nullptr;
  char name[96] = {};
  if (device_) library_->find_optional("nvmlDeviceGetName", name_of);
  if (!name_of || name_of(device_, name, sizeof name) != kSuccess) return std::nullopt;
  return name;
}

std::optional<std::string> Sensors::driver() const {
  int (*version_of)(char*, unsigned) = nullptr;
  char version[96] = {};
  if (device_) library_->find_optional("nvmlSystemGetDriverVersion", version_of);
  if (!version_of || version_of(version, sizeof version) != kSuccess) return std::nullopt;
  return version;
}

std::optional<std::string> Sensors::clocks() const {
  int (*max_clock)(void*, int, unsigned*) = nullptr;
  int (*power_limit)(void*, unsigned*) = nullptr;
  if (device_) library_->find_optional("nvmlDeviceGetMaxClockInfo", max_clock);
  if (device_) library_->find_optional("nvmlDeviceGetEnforcedPowerLimit", power_limit);
  unsigned mhz = 0;
  unsigned milliwatts = 0;
  if (!max_clock || max_clock(device_, kClockSm, &mhz) != kSuccess) return std::nullopt;
  std::string text = "SM up to " + std::to_string(mhz) + " MHz";
  if (power_limit && power_limit(device_, &milliwatts) == kSuccess)
    text += ", limit " + std::to_string(milliwatts / 1000) + " W";
  return text;
}

int Sensors::num_nvlinks() const {
  int (*state_of)(void*, unsigned, unsigned*) = nullptr;
  if (device_) library_->find_optional("nvmlDeviceGetNvLinkState", state_of);
  int count = 0;
  for (unsigned link = 0; state_of && link < kMaxNvlinks; ++link) {
    unsigned state = 0;
    if (state_of(device_, link, &state) == kSuccess && state == kEnabled) ++count;
  }
  return count;
}

}  // namespace perf
