// SPDX-License-Identifier: MIT
// The k-steps of a CTA of those that share a tile's inner dimension: a part of each panel of columns, so that
// all of them go on with every panel that comes, and not one after the other. Host and device.
#pragma once

#include "kernels/device/host_device.h"

namespace mk::allgather_gemm {

// From `begin` to `end` in each panel of `panel_steps`, but of the last one, which may be shorter, from
// `last_begin` to `last_end`.
struct PanelPart {
  int num_k_steps = 0;  // of all CTAs
  int panel_steps = 0;
  int begin = 0;
  int end = 0;
  int last_begin = 0;
  int last_end = 0;
  int num_steps = 0;  // this CTA's

  PanelPart() = default;
  // The `index`-th of `num_ctas`. Panels that are not the last have a k-step or more for each.
  PanelPart(int k_steps, int steps_of_panel, int index, int num_ctas)
      : num_k_steps(k_steps), panel_steps(steps_of_panel) {
    const int num_before = k_steps > 0 ? (k_steps - 1) / steps_of_panel : 0;
    const int steps_of_last = k_steps - num_before * steps_of_panel;
    begin = index * steps_of_panel / num_ctas;
    end = (index + 1) * steps_of_panel / num_ctas;
    last_begin = index * steps_of_last / num_ctas;
    last_end = (index + 1) * steps_of_last / num_ctas;
    num_steps = num_before * (end - begin) + last_end - last_begin;
  }
};

// One after the other, `num_steps` of them.
class PanelPartSteps {
 public:
  MK_HOST_DEVICE explicit PanelPartSteps(const PanelPart& part) : part_(part) { enter(0); }

  MK_HOST_DEVICE int k_step() const { return k_step_; }
  MK_HOST_DEVICE void advance() {
    if (++k_step_ == end_) enter(panel_ + part_.panel_steps);
  }

 private:
  MK_HOST_DEVICE void enter(int panel) {
    panel_ = panel;
    const bool is_last = panel + part_.panel_steps >= part_.num_k_steps;
    k_step_ = panel + (is_last ? part_.last_begin : part_.begin);
    end_ = panel + (is_last ? part_.last_end : part_.end);
  }

  const PanelPart& part_;
  int panel_ = 0;  // its first k-step
  int k_step_ = 0;
  int end_ = 0;
};

}  // namespace mk::allgather_gemm
