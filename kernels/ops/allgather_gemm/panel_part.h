// SPDX-License-Identifier: MIT
// The k-steps of a CTA of those that share a tile's inner dimension: a part of each panel of columns, so that
// all of them go on with every panel that comes, and not one after the other. Host and device.
#pragma once

#include "kernels/device/host_device.h"

namespace mk::allgather_gemm {

struct PanelPart {
  struct Range {
    int begin;
    int end;
  };

  int num_panels = 0;
  int num_steps = 0;  // of this CTA

  PanelPart() = default;
  // The `index`-th of `num_ctas`, of `k_steps` in panels of `steps_of_panel`, of which the last may be shorter.
  PanelPart(int k_steps, int steps_of_panel, int index, int num_ctas) : panel_steps_(steps_of_panel) {
    num_panels = k_steps > 0 ? (k_steps - 1) / steps_of_panel + 1 : 1;
    const int steps_of_last = k_steps - (num_panels - 1) * steps_of_panel;
    of_panel_ = {index * steps_of_panel / num_ctas, (index + 1) * steps_of_panel / num_ctas};
    of_last_ = {index * steps_of_last / num_ctas, (index + 1) * steps_of_last / num_ctas};
    num_steps = (num_panels - 1) * (of_panel_.end - of_panel_.begin) + of_last_.end - of_last_.begin;
  }

  MK_HOST_DEVICE Range range(int panel) const {
    const Range& part = panel == num_panels - 1 ? of_last_ : of_panel_;
    return {panel * panel_steps_ + part.begin, panel * panel_steps_ + part.end};
  }

 private:
  int panel_steps_ = 0;
  Range of_panel_{};  // counted from its first k-step on
  Range of_last_{};
};

}  // namespace mk::allgather_gemm
