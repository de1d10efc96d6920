// SPDX-License-Identifier: MIT
#pragma once

namespace mk::gemm_reduce_scatter {

// How the kernel of GEMM+ReduceScatter and GEMM+AllReduce brings partial sums together.
enum class Reduction : int {
  scatter,   // an owner's rows are summed by the owner, and stay there
  two_shot,  // and then pushed to all
  one_shot,  // every rank gets every partial and sums all rows
};

}  // namespace mk::gemm_reduce_scatter
