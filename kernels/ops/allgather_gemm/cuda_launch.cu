// SPDX-License-Identifier: MIT
#include "kernels/ops/allgather_gemm/cuda_launch.h"

#include <algorithm>

#include "kernels/cuda/gemm_type.h"
#include "kernels/cuda/rank_gemm_params.h"
#include "kernels/gemm/load_maps.h"
#include "kernels/gemm/tensor_map.h"
#include "kernels/ops/allgather_gemm/cuda_network_kernel.cuh"
#include "kernels/ops/allgather_gemm/cuda_network_wgrad.cuh"
#include "kernels/ops/allgather_gemm/cuda_split_kernel.cuh"
#include "kernels/ops/allgather_gemm/cuda_swapped_kernel.cuh"
#include "kernels/ops/allgather_gemm/cuda_wgrad.cuh"

namespace mk::allgather_gemm {
namespace {

// What a warp brings to the gathered A at a time.
constexpr int64_t PIECE_BYTES = 16 << 10;

int piece_rows(int64_t row_bytes) {
  return static_cast<int>(std::clamp<int64_t>(PIECE_BYTES / std::max<int64_t>(1, row_bytes), 4, 128));
}

// Elements from row to row of the gathered A.
int64_t ld_of_output(const GemmCall& call) {
  return std::max<int64_t>(round_up(std::max(call.lda_gathered, travelling_columns(call)), 8), 8);
}

// What both modes' parameters have in common: how rows travel, and what becomes of the product.
void fill_gather(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm, CudaParams* params) {
  const int64_t columns = travelling_columns(call);
  params->comm = comm;
  params->schedule.topology.nranks = comm.nranks;
  params->schedule.topology.rank = comm.rank;
  params->schedule.m = call.m;
  params->schedule.k = columns;
  params->schedule.chunk_rows = plan.plan.chunk_rows;
  params->schedule.tile_m = plan.gemm.block_m;
  params->schedule.max_chunks = plan.plan.num_chunks;
  params->m = static_cast<int>(call.m);
  params->max_rows = static_cast<int>(std::max<int64_t>(1, ceil_div(call.m, comm.nranks)));
  params->merged = plan.merged;
  params->num_panels = plan.num_panels;
  params->num_push_warps = plan.num_push_warps;
  params->panel_steps = plan.panel_steps;
  params->piece_rows = piece_rows(std::min<int64_t>(columns, int64_t{plan.panel_steps} * GEMM_BLOCK_K) * 2);
  params->a_pitch = round_up(std::max(call.lda, columns), 8) * 2;
  params->a_gathered_pitch = ld_of_output(call) * 2;
  params->epilogue = epilogue_of(call);
}

// What changes from call to call, but for the maps.
void move_gather(const GemmCall& call, CudaParams* params) {
  move_epilogue(call, &params->epilogue);
  params->a = static_cast<const std::byte*>(call.a);
  params->a_gathered =
      call.m > 0 && travelling_columns(call) > 0 ? static_cast<std::byte*>(call.a_gathered) : nullptr;
}

// Rows are pushed in pieces of 16 bytes, and behind a row's last element the caller's memory is not ours.
PeerOutput gathered_output(const GemmCall& call) {
  PeerOutput output = travelling_columns(call) % 8 == 0 ? mk::peer_output(call) : PeerOutput();
  output.ld = ld_of_output(call);
  return output;
}

// Of a CTA that does nothing but push, where there are some.
int push_buffer_bytes(const RankGemmPlan& plan) {
  return plan.plan.copy_ctas > 0 ? PUSH_CTA_PIECE_BYTES : PUSH_PIECE_BYTES;
}

// Ranks that take turns, after this one, in what it computes first.
int num_in_turn(const RankGemmPlan& plan, const RankComm& comm) {
  if (plan.merged) return 0;
  return comm.order.num_local > 1 ? comm.order.num_local - 1 : comm.nranks - 1;
}

LateTileSchedule late_tiles_of(const TileSchedule& tiles, const RankGemmPlan& plan) {
  LateTileSchedule late = {tiles, tiles.num_workers, plan.late_tile, plan.shares_tiles};
  // Clusters have tiles together.
  late.set_num_workers(plan.gemm.is_swapped ? plan.gemm.num_workers : tiles.num_workers + plan.num_late);
  if (plan.spreads_tiles) late.spread();
  return late;
}

// Mode FORWARD, inside a node and between nodes. `num_more_ctas`: beside those that compute and push.
template <class Params>
class ForwardLaunchOf : public RankGemmLaunch {
 public:
  ForwardLaunchOf(const RankGemmKernel<Params>& kernel, int num_more_ctas, const GemmCall& call,
                  const RankGemmPlan& plan, const RankComm& comm)
      : kernel_(kernel),
        num_ctas_(plan.plan.compute_ctas + plan.plan.copy_ctas + num_more_ctas),
        num_cluster_ctas_(plan.gemm.num_cluster_ctas()),
        own_rows_(rows_count(call.m, comm.nranks, comm.rank)),
        is_swapped_(plan.gemm.is_swapped) {
    fill_gather(call, plan, comm, &params_);
    params_.tiles = tiles_of(call, plan);
    params_.num_split_ctas = plan.gemm.num_split_ctas;
    for (int i = 0; i < params_.num_split_ctas; ++i) {
      params_.panel_parts[i] =
          PanelPart(params_.tiles.num_k_steps, plan.panel_steps, i, params_.num_split_ctas);
    }
    params_.late_tiles = late_tiles_of(params_.tiles, plan);
    params_.order = {std::max(1, plan.tile_rows), num_in_turn(plan, comm)};
    const int chunk_rows = plan.plan.chunk_rows, block_m = plan.gemm.block_m;
    const PushOrder order = {plan.merged ? 0 : params_.order.tile_rows,
                             std::max(1, params_.order.num_in_turn) * std::max(1, chunk_rows / block_m),
                             params_.tiles.group_m,
                             std::max(1, params_.tiles.num_n_tiles),
                             params_.tiles.num_workers,
                             std::max(1, block_m / chunk_rows),
                             plan.shares_tiles};
    params_.push_units = make_push_units(params_, order, push_buffer_bytes(plan));
  }

  bool fill_maps(const GemmCall& call, const RankGemmPlan& plan) {
    const RankComm& comm = params_.comm;
    std::byte* area = comm.memory[comm.rank] + comm.arena;
    const int64_t box_source = plan.merged ? call.m : ceil_div(call.m, comm.nranks);
    // Swapped tiles take all rows from where they are gathered.
    if (!(is_swapped_ ? fill_swapped_load(call, plan.gemm, area, area, &params_.load)
                      : fill_load(call, plan.gemm, own_rows_, box_source, area, &params_.load)))
      return false;
    const int box_rows = (is_swapped_ ? params_.load.b_box : params_.load.a_box).num();
    const auto fill = [&](CUtensorMap* map, const void* base, int64_t ld) {
      return encode_tensor_map(map, gemm_type(call.dtype), base, call.m, call.k, ld, box_rows, GEMM_BLOCK_K);
    };
    const int64_t ld = std::max<int64_t>(round_up(call.k, 8), 8);
    return fill(&params_.map_gathered[0], area, ld) &&
           fill(&params_.map_gathered[1], area + comm.bank_bytes, ld) &&
           fill(&params_.map_gathered[MAP_OF_OUTPUT], area, ld_of_output(call));
  }

  cudaError_t enqueue(const GemmCall& call, const LaunchDetails& details, cudaStream_t stream) override {
    if (!move_load(call, own_rows_, is_swapped_, &params_.load)) return cudaErrorInvalidValue;
    if (details.output_offset != kNoOutput &&
        !move_tensor_map(&params_.map_gathered[MAP_OF_OUTPUT], call.a_gathered)) {
      return cudaErrorInvalidValue;
    }
    move_gather(call, &params_);
    fill(details, &params_.comm);
    return launch_kernel(kernel_, params_, num_ctas_, stream, num_cluster_ctas_);
  }

 private:
  const RankGemmKernel<Params>& kernel_;
  const int num_ctas_;
  const int num_cluster_ctas_;
  const int64_t own_rows_;
  const bool is_swapped_;

 protected:
  Params params_{};
};

const RankGemmKernel<CudaParams>& forward_kernel(const GemmCall& call, const GemmPlan& plan) {
  const bool is_fp16 = call.dtype == MK_DTYPE_FP16;
  const bool is_transposed = call.b_layout == MK_LAYOUT_NK;
  if (plan.is_swapped) {
    return find_kernel(is_fp16 ? swapped_kernels_fp16() : swapped_kernels_bf16(), RANK_SWAPPED_TILES, plan,
                       is_transposed);
  }
  if (plan.in_clusters()) {
    return find_kernel(is_fp16 ? pair_kernels_fp16() : pair_kernels_bf16(), GEMM_PAIR_TILES, plan,
                       is_transposed);
  }
  if (plan.num_split_ctas > 1) {
    return find_kernel(is_fp16 ? split_kernels_fp16() : split_kernels_bf16(), GEMM_SPLIT_TILES, plan,
                       is_transposed);
  }
  return find_kernel(is_fp16 ? cuda_kernels_fp16() : cuda_kernels_bf16(), GATHER_TILES, plan, is_transposed);
}

class ForwardLaunch final : public ForwardLaunchOf<CudaParams> {
 public:
  ForwardLaunch(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm)
      : ForwardLaunchOf(forward_kernel(call, plan.gemm), 0, call, plan, comm) {}

  PeerOutput peer_output(const GemmCall& call) const override { return gathered_output(call); }
};

// Rows reach a node once and are pushed on from where they arrived: not from anyone's output.
class NetworkForwardLaunch final : public ForwardLaunchOf<NetworkParams> {
 public:
  NetworkForwardLaunch(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm)
      : ForwardLaunchOf(
            find_kernel(call.dtype == MK_DTYPE_FP16 ? cuda_network_kernels_fp16() : cuda_network_kernels_bf16(),
                        RANK_GEMM_TILES, plan.gemm, call.b_layout == MK_LAYOUT_NK),
            NUM_NETWORK_CTAS, call, plan, comm) {
    // The network takes chunks whole, and the first one soon.
    params_.push_units = make_push_units(params_, CHUNK_BY_CHUNK, push_buffer_bytes(plan));
    const int num_near = comm.order.num_local - 1, num_far = comm.nranks - comm.order.num_local;
    params_.far_order = {params_.order.tile_rows, plan.merged ? 0 : num_near, plan.merged ? 0 : num_far};
  }

  PeerOutput peer_output(const GemmCall&) const override { return {}; }
};

// The same of mode WGRAD.
template <class Params>
class WgradLaunchOf : public RankGemmLaunch {
 public:
  WgradLaunchOf(const RankGemmTable<Params, NUM_WGRAD_TILES>& table, int num_more_ctas, const GemmCall& call,
                const RankGemmPlan& plan, const RankComm& comm)
      : kernel_(find_kernel(table, WGRAD_TILES, plan.gemm, call.b_layout == MK_LAYOUT_NK)),
        num_ctas_(plan.plan.compute_ctas + plan.plan.copy_ctas + num_more_ctas),
        own_rows_(rows_count(call.m, comm.nranks, comm.rank)) {
    fill_gather(call, plan, comm, &params_);
    if (plan.merged) {
      params_.wgrad_order = WgradOrder::of_merged(call.m);
      params_.chunk_groups = ChunkGroups::of_merged(comm.nranks);
    } else {
      const int num_near = num_in_turn(plan, comm);
      params_.wgrad_order =
          WgradOrder::of(call.m, num_near, comm.nranks - 1 - num_near, call.b_layout == MK_LAYOUT_NK);
      params_.chunk_groups = {params_.wgrad_order, plan.plan.num_chunks, plan.plan.chunk_rows};
    }
    params_.c_rows = static_cast<int>(call.k);
    params_.tiles = {static_cast<int>(ceil_div(call.k, plan.gemm.block_m)),
                     static_cast<int>(ceil_div(call.n, plan.gemm.block_n)),
                     params_.wgrad_order.num_steps(),
                     plan.plan.compute_ctas,
                     plan.gemm.num_streamk_tiles,
                     plan.gemm.group_m,
                     true};
    params_.late_tiles = late_tiles_of(params_.tiles, plan);
    params_.order = {1, 0};
    params_.push_units = make_push_units(params_, PANEL_BY_PANEL, push_buffer_bytes(plan));
  }

  bool fill_maps(const GemmCall& call, const RankGemmPlan& plan) {
    const RankComm& comm = params_.comm;
    const GemmType type = gemm_type(call.dtype);
    std::byte* area = comm.memory[comm.rank] + comm.arena;
    const bool transposed = call.b_layout == MK_LAYOUT_NK;
    const int64_t lddy = std::max<int64_t>(round_up(std::max(call.ldb, transposed ? call.m : call.k), 8), 8);
    params_.load.a_box = BoxRows(stage_box_rows(call.k, plan.gemm.block_m));
    params_.load.n = static_cast<int>(call.n);
    const void* dy = has_dy(call) ? call.b : area;
    if (!(transposed
              ? encode_tensor_map(&params_.load.map_a, type, dy, call.k, call.m, lddy, params_.load.a_box.num(),
                                  GEMM_BLOCK_K)
              : encode_tensor_map(&params_.load.map_a, type, dy, call.m, call.k, lddy, GEMM_BLOCK_K, 64)))
      return false;
    // X: slices of a source's rows, of columns in blocks of 64.
    const int64_t max_rows = slice_rows(), whole = call.m / max_rows;
    const auto fill = [&](CUtensorMap* map, const void* base, int64_t slices, int64_t rows, int64_t ld) {
      return encode_tensor_map_of_slices(map, type, base, slices, max_rows, rows, call.n, ld, GEMM_BLOCK_K, 64);
    };
    if (!fill(&params_.load.map_b, has_x(call) ? call.a : area, 1, own_rows_, params_.a_pitch / 2))
      return false;
    const int64_t area_ld = std::max<int64_t>(round_up(call.n, 8), 8);
    for (int i = 0; i <= MAP_OF_OUTPUT; ++i) {
      const int64_t ld = i == MAP_OF_OUTPUT ? ld_of_output(call) : area_ld;
      std::byte* const rows = i == 1 ? area + comm.bank_bytes : area;
      if (!fill(&params_.map_gathered[i], rows, whole, max_rows, ld) ||
          !fill(&params_.map_last[i], last_rows(call, rows, ld), 1, call.m - whole * max_rows, ld)) {
        return false;
      }
    }
    return true;
  }

  cudaError_t enqueue(const GemmCall& call, const LaunchDetails& details, cudaStream_t stream) override {
    if (has_dy(call) && !move_tensor_map(&params_.load.map_a, call.b)) return cudaErrorInvalidValue;
    if (has_x(call) && !move_tensor_map(&params_.load.map_b, call.a)) return cudaErrorInvalidValue;
    if (details.output_offset != kNoOutput &&
        (!move_tensor_map(&params_.map_gathered[MAP_OF_OUTPUT], call.a_gathered) ||
         !move_tensor_map(&params_.map_last[MAP_OF_OUTPUT],
                          last_rows(call, static_cast<std::byte*>(call.a_gathered), ld_of_output(call))))) {
      return cudaErrorInvalidValue;
    }
    move_gather(call, &params_);
    fill(details, &params_.comm);
    return launch_kernel(kernel_, params_, num_ctas_, stream);
  }

 private:
  int64_t slice_rows() const { return std::max(1, params_.wgrad_order.max_rows); }
  // Of gathered rows that begin at `rows`: those of the source that has fewer than others, but some.
  std::byte* last_rows(const GemmCall& call, std::byte* rows, int64_t ld) const {
    const int64_t begin = call.m / slice_rows() * slice_rows();
    return begin < call.m ? rows + begin * ld * 2 : rows;
  }
  static bool has_dy(const GemmCall& call) { return call.m > 0 && call.k > 0; }
  bool has_x(const GemmCall& call) const { return own_rows_ > 0 && call.n > 0; }

  const RankGemmKernel<Params>& kernel_;
  const int num_ctas_;
  const int64_t own_rows_;

 protected:
  Params params_{};
};

class WgradLaunch final : public WgradLaunchOf<WgradParams> {
 public:
  WgradLaunch(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm)
      : WgradLaunchOf(call.dtype == MK_DTYPE_FP16 ? wgrad_kernels_fp16() : wgrad_kernels_bf16(), 0, call, plan,
                      comm) {}

  PeerOutput peer_output(const GemmCall& call) const override { return gathered_output(call); }
};

class NetworkWgradLaunch final : public WgradLaunchOf<NetworkWgradParams> {
 public:
  NetworkWgradLaunch(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm)
      : WgradLaunchOf(call.dtype == MK_DTYPE_FP16 ? network_wgrad_kernels_fp16() : network_wgrad_kernels_bf16(),
                      NUM_NETWORK_CTAS, call, plan, comm) {}

  PeerOutput peer_output(const GemmCall&) const override { return {}; }
};

template <class Launch>
std::unique_ptr<RankGemmLaunch> make(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm) {
  auto launch = std::make_unique<Launch>(call, plan, comm);
  if (!launch->fill_maps(call, plan)) return nullptr;
  return launch;
}

}  // namespace

cudaError_t cuda_prepare(bool between_nodes) {
  cudaError_t error = prepare_table(cuda_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(cuda_kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(split_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(split_kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(pair_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(pair_kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(swapped_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(swapped_kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(wgrad_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(wgrad_kernels_fp16());
  if (!between_nodes) return error;
  if (error == cudaSuccess) error = prepare_table(cuda_network_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(cuda_network_kernels_fp16());
  if (error == cudaSuccess) error = prepare_table(network_wgrad_kernels_bf16());
  if (error == cudaSuccess) error = prepare_table(network_wgrad_kernels_fp16());
  return error;
}

std::unique_ptr<RankGemmLaunch> make_cuda_launch(const GemmCall& call, const RankGemmPlan& plan,
                                                 const RankComm& comm) {
  const bool is_wgrad = call.mode == MK_ALLGATHER_WGRAD;
  if (comm.order.num_rail_peers > 0) {
    return is_wgrad ? make<NetworkWgradLaunch>(call, plan, comm) : make<NetworkForwardLaunch>(call, plan, comm);
  }
  return is_wgrad ? make<WgradLaunch>(call, plan, comm) : make<ForwardLaunch>(call, plan, comm);
}

}  // namespace mk::allgather_gemm
