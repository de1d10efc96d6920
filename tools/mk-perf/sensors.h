// SPDX-License-Identifier: MIT
// Clock and power of one GPU as its driver's management library (NVML) reports them.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dynamic_library.h"

namespace perf {

struct SensorReadings {
  std::optional<double> sm_mhz;
  std::optional<double> watts;  // the driver's average over about a second
};

class Sensors {
 public:
  // `bus_id` is "" where there is no GPU. Where something is missing the readings are absent.
  explicit Sensors(const std::string& bus_id);

  void sample();
  SensorReadings take_medians();  // of the samples since the last call

  std::optional<std::string> gpu() const;
  std::optional<std::string> driver() const;
  std::optional<std::string> clocks() const;  // the limits: clock, power
  // Links that are up; 0 where it cannot be told.
  int num_nvlinks() const;

 private:
  std::unique_ptr<DynamicLibrary> library_;
  void* device_ = nullptr;
  int (*clock_)(void*, int, unsigned*) = nullptr;
  int (*power_)(void*, unsigned*) = nullptr;
  std::vector<double> mhz_;
  std::vector<double> watts_;
};

}  // namespace perf
