// SPDX-License-Identifier: MIT
#pragma once

namespace mk::ptx {

// PTX ISA: griddepcontrol.wait. Until the grids that this one depends on have ended and what they wrote is
// visible; at once, if the launch asked for no programmatic dependency.
__device__ __forceinline__ void await_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// PTX ISA: griddepcontrol.launch_dependents. By one thread of a CTA: once all CTAs have said so, or ended,
// those of the next grid may come, if its launch asked for it.
__device__ __forceinline__ void let_next_grid_come() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace mk::ptx
