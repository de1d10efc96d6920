// SPDX-License-Identifier: MIT
#include "kernels/ops/allgather_gemm/panel_part.h"

#include <algorithm>
#include <vector>

#include "test/support/catch.h"

using mk::allgather_gemm::PanelPart;

TEST_CASE("the CTAs that share a tile have each k-step once, a part of every panel each") {
  for (const int num_ctas : {1, 2, 3, 4}) {
    for (int num_k_steps = 0; num_k_steps <= 70; ++num_k_steps) {
      for (const int panel_steps : {4, 5, 16, 70, 100}) {
        CAPTURE(num_ctas, num_k_steps, panel_steps);
        std::vector<int> had(num_k_steps, 0);
        for (int index = 0; index < num_ctas; ++index) {
          const PanelPart part(num_k_steps, panel_steps, index, num_ctas);
          REQUIRE(part.num_panels == std::max(1, (num_k_steps + panel_steps - 1) / panel_steps));
          std::vector<int> of_panel(part.num_panels, 0);
          int num_steps = 0;
          for (int panel = 0; panel < part.num_panels; ++panel) {
            const PanelPart::Range range = part.range(panel);
            for (int step = range.begin; step < range.end; ++step, ++num_steps) {
              REQUIRE((step >= 0 && step < num_k_steps));
              REQUIRE(step / panel_steps == panel);
              ++had[step];
              ++of_panel[panel];
            }
          }
          CHECK(num_steps == part.num_steps);
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
  CHECK(first.range(0).begin == 0);
  CHECK(second.range(0).begin == 3);
  CHECK(third.range(0).begin == 6);
}
