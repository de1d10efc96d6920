// SPDX-License-Identifier: MIT
#include "kernels/ops/allgather_gemm/panel_part.h"

#include <algorithm>
#include <vector>

#include "test/support/catch.h"

using mk::allgather_gemm::PanelPart;
using mk::allgather_gemm::PanelPartSteps;

TEST_CASE("the CTAs that share a tile have each k-step once, a part of every panel each") {
  for (const int num_ctas : {1, 2, 3, 4}) {
    for (int num_k_steps = 0; num_k_steps <= 70; ++num_k_steps) {
      for (const int panel_steps : {4, 5, 16, 70, 100}) {
        CAPTURE(num_ctas, num_k_steps, panel_steps);
        std::vector<int> had(num_k_steps, 0);
        for (int index = 0; index < num_ctas; ++index) {
          const PanelPart part(num_k_steps, panel_steps, index, num_ctas);
          PanelPartSteps steps(part);
          int last = -1;
          std::vector<int> of_panel((num_k_steps + panel_steps - 1) / panel_steps, 0);
          for (int i = 0; i < part.num_steps; ++i, steps.advance()) {
            REQUIRE(steps.k_step() > last);
            REQUIRE(steps.k_step() < num_k_steps);
            last = steps.k_step();
            ++had[last];
            ++of_panel[last / panel_steps];
          }
          for (size_t panel = 0; panel < of_panel.size(); ++panel) {
            const int first = static_cast<int>(panel) * panel_steps;
            const int length = std::min(panel_steps, num_k_steps - first);
            CHECK(of_panel[panel] >= length / num_ctas);
            CHECK(of_panel[panel] <= (length + num_ctas - 1) / num_ctas);
          }
        }
        CHECK(had == std::vector<int>(num_k_steps, 1));
      }
    }
  }
}

TEST_CASE("of one panel the CTAs that share a tile have one part after the other") {
  const PanelPart first(10, 10, 0, 3), second(10, 10, 1, 3), third(10, 10, 2, 3);
  CHECK(first.num_steps == 3);
  CHECK(second.num_steps == 3);
  CHECK(third.num_steps == 4);
  CHECK(PanelPartSteps(first).k_step() == 0);
  CHECK(PanelPartSteps(second).k_step() == 3);
  CHECK(PanelPartSteps(third).k_step() == 6);
}
